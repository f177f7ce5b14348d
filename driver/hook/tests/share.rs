//! What the hook does for a share, as a runtime runs it: in a mount namespace
//! with the share's list mounted over that of the image.

#![allow(clippy::unwrap_used)] // A test that cannot go on stops here.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The hook under test: cargo's, or the static one that is shipped.
fn hook() -> PathBuf {
    std::env::var_os("DIVVY_HOOK").map_or_else(|| env!("CARGO_BIN_EXE_divvy-hook").into(), PathBuf::from)
}

/// A bundle, and directories of the host for what is kept by container.
struct World {
    dir: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let world = Self { dir: tempfile::tempdir().unwrap() };
        for dir in ["bundle/rootfs/etc", "preload", "cgroups"] {
            fs::create_dir_all(world.path(dir)).unwrap();
        }
        fs::write(world.path("bundle/config.json"), r#"{"root": {"path": "rootfs"}}"#).unwrap();
        fs::write(world.path("shared"), "/run/divvy/lib/libdivvy.so\n").unwrap();
        world
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn list(&self) -> PathBuf {
        self.path("bundle/rootfs/etc/ld.so.preload")
    }

    fn files(&self, dir: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(dir)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Runs a script in a mount namespace of its own, with `$LIST`, `$SHARED`,
    /// `$PRELOAD` and the hook as `hook ARGS`; answers what it printed.
    fn inside(&self, script: &str) -> Result<String, String> {
        let state = serde_json::json!({"ociVersion": "1.2.0", "id": "c1", "bundle": self.path("bundle")});
        let script = format!(r#"hook() {{ printf %s "$STATE" | "$HOOK" "$@"; }}; set -e; {script}"#);
        let output = Command::new("unshare")
            .args(["--user", "--map-root-user", "--mount", "sh", "-c", &script])
            .env("STATE", state.to_string())
            .env("HOOK", hook())
            .env("LIST", self.list())
            .env("SHARED", self.path("shared"))
            .env("PRELOAD", self.path("preload"))
            .output()
            .unwrap();
        match output.status.success() {
            true => Ok(String::from_utf8(output.stdout).unwrap()),
            false => Err(String::from_utf8(output.stderr).unwrap()),
        }
    }

    /// The same with the share's list mounted, and the hook run; then the list.
    fn mounted(&self, then: &str) -> Result<String, String> {
        let mount = r#"mount --bind "$SHARED" "$LIST"; mount -o remount,bind,ro "$LIST""#;
        self.inside(&format!(r#"{mount}; hook --preload "$PRELOAD"; {then}"#))
    }

    fn cgroups(&self, state: serde_json::Value) -> Result<(), String> {
        let mut child = Command::new(hook())
            .arg("--cgroups")
            .arg(self.path("cgroups"))
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(state.to_string().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8(output.stderr).unwrap()),
        }
    }
}

const SHOW: &str = r#"cat "$LIST""#;

#[test]
fn an_image_keeps_what_it_preloads_itself() {
    let world = World::new();
    fs::write(world.list(), "/usr/lib/libjemalloc.so.2\n").unwrap();
    let text = world.mounted(SHOW).unwrap();
    assert_eq!(text, "/run/divvy/lib/libdivvy.so\n/usr/lib/libjemalloc.so.2\n");
    assert_eq!(world.files("preload"), ["c1"]);
    let mode = fs::metadata(world.path("preload/c1")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o444);
    assert_eq!(fs::read(world.list()).unwrap(), b"/usr/lib/libjemalloc.so.2\n", "the image is as it was");
}

#[test]
fn nobody_in_the_container_can_write_the_list() {
    let world = World::new();
    fs::write(world.list(), "/a.so\n").unwrap();
    for write in [r#"echo > "$LIST""#, r#"rm "$LIST""#, r#"mv "$LIST" "$LIST.old""#] {
        let text = world.mounted(&format!("if {write}; then false; fi; {SHOW}")).unwrap();
        assert_eq!(text, "/run/divvy/lib/libdivvy.so\n/a.so\n", "{write}");
    }
}

#[test]
fn an_image_that_preloads_nothing_gets_the_shared_list() {
    for own in ["", "# nothing\n", "/run/divvy/lib/libdivvy.so\n"] {
        let world = World::new();
        fs::write(world.list(), own).unwrap();
        assert_eq!(world.mounted(SHOW).unwrap(), "/run/divvy/lib/libdivvy.so\n");
        assert_eq!(world.files("preload"), [""; 0]);
    }
}

#[test]
fn a_second_share_of_the_container_changes_nothing() {
    let world = World::new();
    fs::write(world.list(), "/a.so\n").unwrap();
    let text =
        world.mounted(&format!(r#"hook --preload "$PRELOAD"; {SHOW}; grep -c "$LIST" /proc/self/mountinfo"#));
    assert_eq!(text.unwrap(), "/run/divvy/lib/libdivvy.so\n/a.so\n2\n");
}

#[test]
fn a_list_on_a_volume_counts_as_the_images() {
    let world = World::new();
    fs::create_dir(world.path("volume")).unwrap();
    fs::write(world.path("volume/ld.so.preload"), "/volume.so\n").unwrap();
    fs::write(world.list(), "/hidden.so\n").unwrap();
    let volume = world.path("volume").display().to_string();
    let etc = world.path("bundle/rootfs/etc").display().to_string();
    let script = format!(
        r#"mount --bind {volume} {etc}; mount --bind "$SHARED" "$LIST"; hook --preload "$PRELOAD"; {SHOW}"#
    );
    assert_eq!(world.inside(&script).unwrap(), "/run/divvy/lib/libdivvy.so\n/volume.so\n");
}

#[test]
fn a_link_to_the_host_is_not_followed() {
    let world = World::new();
    fs::write(world.path("secret"), "/secret.so\n").unwrap();
    symlink(world.path("secret"), world.list()).unwrap();
    // A runtime resolves the link inside the root and mounts there.
    let inside = world.path("bundle/rootfs").join(world.path("secret").strip_prefix("/").unwrap());
    fs::create_dir_all(inside.parent().unwrap()).unwrap();
    fs::write(&inside, "").unwrap();
    let inside = inside.display();
    let script = format!(r#"mount --bind "$SHARED" {inside}; hook --preload "$PRELOAD"; cat {inside}"#);
    assert_eq!(world.inside(&script).unwrap(), "/run/divvy/lib/libdivvy.so\n");
    assert_eq!(world.files("preload"), [""; 0]);
}

#[test]
fn a_list_that_cannot_be_kept_stops_the_container() {
    let world = World::new();
    fs::write(world.list(), "/a.so\n".repeat(20_000)).unwrap();
    let said = world.mounted("").unwrap_err();
    assert!(said.contains("/etc/ld.so.preload of the image is larger"), "{said}");
    fs::write(world.list(), "/a.so\n").unwrap();
    fs::remove_dir(world.path("preload")).unwrap();
    let said = world.mounted("").unwrap_err();
    assert!(said.contains("preload/c1 cannot be written"), "{said}");
}

#[test]
fn the_driver_is_told_the_cgroups_until_the_container_stops() {
    let world = World::new();
    let state = |status: &str, pid: u32| serde_json::json!({"id": "c1", "bundle": "/nonexistent", "status": status, "pid": pid});
    world.cgroups(state("creating", std::process::id())).unwrap();
    assert_eq!(world.files("cgroups"), ["c1"]);
    let own = fs::read("/proc/self/cgroup").unwrap();
    assert_eq!(fs::read(world.path("cgroups/c1")).unwrap(), own);
    world.cgroups(state("stopped", 0)).unwrap();
    world.cgroups(state("stopped", 0)).unwrap();
    assert_eq!(world.files("cgroups"), [""; 0]);
}

#[test]
fn a_runtime_that_does_not_name_the_process_is_told_so() {
    let world = World::new();
    let state = |pid: u32| serde_json::json!({"id": "c1", "bundle": "/b", "status": "creating", "pid": pid});
    assert!(world.cgroups(state(0)).unwrap_err().contains("names no process of container c1"));
    assert!(world.cgroups(state(u32::MAX)).unwrap_err().contains("cgroups of process 4294967295"));
    assert_eq!(world.files("cgroups"), [""; 0]);
    let sly = serde_json::json!({"id": "../c1", "bundle": "/b", "pid": 1});
    assert!(world.cgroups(sly).unwrap_err().contains("cannot name a file"));
}
