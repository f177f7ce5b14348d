//! Runs the hook for a share as a runtime does: in a mount namespace with the list of the share
//! mounted over that of the image.

#![allow(clippy::unwrap_used)] // A test may panic.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The hook under test: the binary built by cargo, or the static one that is shipped.
fn hook() -> PathBuf {
    std::env::var_os("DIVVY_HOOK").map_or_else(|| env!("CARGO_BIN_EXE_divvy-hook").into(), PathBuf::from)
}

/// A bundle, and the host directories with a file per container.
struct TestBundle {
    dir: tempfile::TempDir,
}

impl TestBundle {
    fn new() -> Self {
        let bundle = Self { dir: tempfile::tempdir().unwrap() };
        for dir in ["bundle/rootfs/etc", "preload", "cgroups"] {
            fs::create_dir_all(bundle.path(dir)).unwrap();
        }
        fs::write(bundle.path("bundle/config.json"), r#"{"root": {"path": "rootfs"}}"#).unwrap();
        fs::write(bundle.path("shared"), "/run/divvy/lib/libdivvy.so\n").unwrap();
        bundle
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

    /// Runs a script in a mount namespace of its own, with `$LIST`, `$SHARED`, `$PRELOAD` and the
    /// hook as `hook ARGS`. Returns its output.
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

    /// Mounts the list of the share, runs the hook and then the script `then`.
    fn mounted(&self, then: &str) -> Result<String, String> {
        let mount = r#"mount --bind "$SHARED" "$LIST"; mount -o remount,bind,ro "$LIST""#;
        self.inside(&format!(r#"{mount}; hook --preload "$PRELOAD"; {then}"#))
    }

    fn cgroups(&self, state: serde_json::Value) -> Result<(), String> {
        self.report("--cgroups", "cgroups", state)
    }

    fn report(&self, option: &str, dir: &str, state: serde_json::Value) -> Result<(), String> {
        let mut child = Command::new(hook())
            .arg(option)
            .arg(self.path(dir))
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
fn preload_list_of_the_image_is_kept() {
    let bundle = TestBundle::new();
    fs::write(bundle.list(), "/usr/lib/libjemalloc.so.2\n").unwrap();
    let text = bundle.mounted(SHOW).unwrap();
    assert_eq!(text, "/run/divvy/lib/libdivvy.so\n/usr/lib/libjemalloc.so.2\n");
    assert_eq!(bundle.files("preload"), ["c1"]);
    let mode = fs::metadata(bundle.path("preload/c1")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o444);
    assert_eq!(fs::read(bundle.list()).unwrap(), b"/usr/lib/libjemalloc.so.2\n", "the image is as it was");
}

#[test]
fn merged_list_is_read_only_in_the_container() {
    let bundle = TestBundle::new();
    fs::write(bundle.list(), "/a.so\n").unwrap();
    for write in [r#"echo > "$LIST""#, r#"rm "$LIST""#, r#"mv "$LIST" "$LIST.old""#] {
        let text = bundle.mounted(&format!("if {write}; then false; fi; {SHOW}")).unwrap();
        assert_eq!(text, "/run/divvy/lib/libdivvy.so\n/a.so\n", "{write}");
    }
}

#[test]
fn image_without_a_list_gets_the_list_of_the_share() {
    for own in ["", "# nothing\n", "/run/divvy/lib/libdivvy.so\n"] {
        let bundle = TestBundle::new();
        fs::write(bundle.list(), own).unwrap();
        assert_eq!(bundle.mounted(SHOW).unwrap(), "/run/divvy/lib/libdivvy.so\n");
        assert_eq!(bundle.files("preload"), [""; 0]);
    }
}

#[test]
fn second_share_changes_nothing() {
    let bundle = TestBundle::new();
    fs::write(bundle.list(), "/a.so\n").unwrap();
    let text = bundle
        .mounted(&format!(r#"hook --preload "$PRELOAD"; {SHOW}; grep -c "$LIST" /proc/self/mountinfo"#));
    assert_eq!(text.unwrap(), "/run/divvy/lib/libdivvy.so\n/a.so\n2\n");
}

#[test]
fn list_on_a_volume_counts_as_that_of_the_image() {
    let bundle = TestBundle::new();
    fs::create_dir(bundle.path("volume")).unwrap();
    fs::write(bundle.path("volume/ld.so.preload"), "/volume.so\n").unwrap();
    fs::write(bundle.list(), "/hidden.so\n").unwrap();
    let volume = bundle.path("volume").display().to_string();
    let etc = bundle.path("bundle/rootfs/etc").display().to_string();
    let script = format!(
        r#"mount --bind {volume} {etc}; mount --bind "$SHARED" "$LIST"; hook --preload "$PRELOAD"; {SHOW}"#
    );
    assert_eq!(bundle.inside(&script).unwrap(), "/run/divvy/lib/libdivvy.so\n/volume.so\n");
}

#[test]
fn link_to_the_host_is_not_followed() {
    let bundle = TestBundle::new();
    fs::write(bundle.path("secret"), "/secret.so\n").unwrap();
    symlink(bundle.path("secret"), bundle.list()).unwrap();
    // A runtime resolves the link inside the root and mounts at its target.
    let inside = bundle.path("bundle/rootfs").join(bundle.path("secret").strip_prefix("/").unwrap());
    fs::create_dir_all(inside.parent().unwrap()).unwrap();
    fs::write(&inside, "").unwrap();
    let inside = inside.display();
    let script = format!(r#"mount --bind "$SHARED" {inside}; hook --preload "$PRELOAD"; cat {inside}"#);
    assert_eq!(bundle.inside(&script).unwrap(), "/run/divvy/lib/libdivvy.so\n");
    assert_eq!(bundle.files("preload"), [""; 0]);
}

#[test]
fn failed_merge_stops_the_container() {
    let bundle = TestBundle::new();
    fs::write(bundle.list(), "/a.so\n".repeat(20_000)).unwrap();
    let message = bundle.mounted("").unwrap_err();
    assert!(message.contains("/etc/ld.so.preload of the image is larger"), "{message}");
    fs::write(bundle.list(), "/a.so\n").unwrap();
    fs::remove_dir(bundle.path("preload")).unwrap();
    let message = bundle.mounted("").unwrap_err();
    assert!(message.contains("cannot write"), "{message}");
}

#[test]
fn cgroups_are_reported_until_the_container_stops() {
    let bundle = TestBundle::new();
    let state = |status: &str, pid: u32| -> serde_json::Value {
        let bundle = "/nonexistent";
        serde_json::json!({"id": "c1", "bundle": bundle, "status": status, "pid": pid})
    };
    bundle.cgroups(state("creating", std::process::id())).unwrap();
    assert_eq!(bundle.files("cgroups"), ["c1"]);
    let own = fs::read("/proc/self/cgroup").unwrap();
    assert_eq!(fs::read(bundle.path("cgroups/c1")).unwrap(), own);
    bundle.cgroups(state("stopped", 0)).unwrap();
    bundle.cgroups(state("stopped", 0)).unwrap();
    assert_eq!(bundle.files("cgroups"), [""; 0]);
}

#[test]
fn process_is_reported_in_a_directory_that_is_created() {
    let bundle = TestBundle::new();
    let pid = std::process::id();
    let state = serde_json::json!({"id": "c1", "bundle": "/b", "status": "creating", "pid": pid});
    bundle.report("--process", "containers/claim", state).unwrap();
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let start = stat.rsplit_once(')').unwrap().1.split_whitespace().nth(19).unwrap();
    let reported = fs::read_to_string(bundle.path("containers/claim/c1")).unwrap();
    assert_eq!(reported, format!("{pid} {start}\n"));
}

#[test]
fn missing_process_and_bad_ids_are_errors() {
    let bundle = TestBundle::new();
    let state = |pid: u32| serde_json::json!({"id": "c1", "bundle": "/b", "status": "creating", "pid": pid});
    assert!(bundle.cgroups(state(0)).unwrap_err().contains("of container c1 has no process id"));
    assert!(bundle.cgroups(state(u32::MAX)).unwrap_err().contains("/proc/4294967295/cgroup"));
    assert_eq!(bundle.files("cgroups"), [""; 0]);
    let malicious = serde_json::json!({"id": "../c1", "bundle": "/b", "pid": 1});
    assert!(bundle.cgroups(malicious).unwrap_err().contains("cannot be a file name"));
}
