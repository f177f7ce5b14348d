//! The binary, as a runtime runs it, on images of every kind.

#![allow(clippy::unwrap_used)] // A test that cannot go on stops here.

use divvy_hook::ldcache::Cache;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const LIB: &str = "/usr/lib/x86_64-linux-gnu";

/// The hook under test: cargo's, or the static one that is shipped.
fn hook() -> PathBuf {
    std::env::var_os("DIVVY_HOOK").map_or_else(|| env!("CARGO_BIN_EXE_divvy-hook").into(), PathBuf::from)
}

/// A host directory with a bundle, and things that the hook must not touch.
struct World {
    dir: tempfile::TempDir,
}

impl World {
    /// An image with the mounted library, and a host with a secret.
    fn new() -> Self {
        let world = Self { dir: tempfile::tempdir().unwrap() };
        world.write("bundle/config.json", br#"{"root": {"path": "rootfs"}}"#);
        world.write(&format!("bundle/rootfs{LIB}/libcuda.so.580.1"), b"mounted");
        fs::create_dir_all(world.image("etc")).unwrap();
        world.write("host/ld.so.cache", b"the host's cache");
        world.write("host/ld.so.conf.d/host.conf", b"/host/lib\n");
        world
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    fn image(&self, path: &str) -> PathBuf {
        self.path("bundle/rootfs").join(path.trim_start_matches('/'))
    }

    fn write(&self, path: &str, content: &[u8]) {
        let path = self.path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    /// Puts a link to the host in the place of a path of the image.
    fn point(&self, path: &str, to: &Path) {
        let path = self.image(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_dir_all(&path);
        symlink(to, path).unwrap();
    }

    fn fifo(&self, path: &str) {
        let path = self.image(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    }

    /// Runs the hook; what it said on failure.
    fn run(&self) -> Result<(), String> {
        let library = format!("{LIB}/libcuda.so.580.1=libcuda.so.1");
        let link = format!("{LIB}/libcuda.so=libcuda.so.1");
        let mut child = Command::new(hook())
            .args(["--library", &library, "--link", &link])
            .env_clear()
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let state = serde_json::json!({"ociVersion": "1.2.0", "id": "c", "bundle": self.path("bundle")});
        child.stdin.take().unwrap().write_all(state.to_string().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    /// Every file below the host's directory, FIFOs and links by their kind.
    fn host(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        tree(&self.path("host"))
    }

    fn read(&self, path: &str) -> Vec<u8> {
        fs::read(self.image(path)).unwrap()
    }

    fn points_to(&self, path: &str, target: &str) {
        assert_eq!(fs::read_link(self.image(path)).unwrap(), Path::new(target), "{path}");
    }
}

fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let kind = fs::symlink_metadata(&path).unwrap().file_type();
        if kind.is_dir() {
            files.extend(tree(&path));
            files.insert(path, b"directory".to_vec());
        } else if kind.is_symlink() {
            files.insert(path.clone(), fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes());
        } else if kind.is_fifo() {
            files.insert(path, b"fifo".to_vec());
        } else {
            files.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    files
}

#[test]
fn an_ordinary_image_finds_the_library() {
    let world = World::new();
    world.run().unwrap();
    world.points_to(&format!("{LIB}/libcuda.so.1"), "libcuda.so.580.1");
    world.points_to(&format!("{LIB}/libcuda.so"), "libcuda.so.1");
    assert_eq!(world.read("etc/ld.so.conf.d/00-divvy.conf"), format!("{LIB}\n").into_bytes());
    let bytes = world.read("etc/ld.so.cache");
    let cache = Cache::parse(&bytes).unwrap();
    assert_eq!(cache.find("libcuda.so.1"), Some(format!("{LIB}/libcuda.so.1").as_bytes()));
    assert_eq!(cache.find("libcuda.so"), Some(format!("{LIB}/libcuda.so").as_bytes()));
}

#[test]
fn doing_it_again_changes_nothing() {
    let world = World::new();
    world.run().unwrap();
    let first = tree(&world.image(""));
    world.run().unwrap();
    assert_eq!(tree(&world.image("")), first);
}

#[test]
fn an_image_without_anything_gets_what_it_needs() {
    let world = World::new();
    fs::remove_dir(world.image("etc")).unwrap();
    world.run().unwrap();
    assert!(Cache::parse(&world.read("etc/ld.so.cache")).is_some());
}

#[test]
fn the_images_own_library_of_that_name_gives_way() {
    let world = World::new();
    world.write(&format!("bundle/rootfs{LIB}/libcuda.so.1"), b"a stub from a build");
    world.run().unwrap();
    world.points_to(&format!("{LIB}/libcuda.so.1"), "libcuda.so.580.1");
}

#[test]
fn musl_is_told_the_directory_behind_its_own() {
    let world = World::new();
    world.write("bundle/rootfs/lib/ld-musl-x86_64.so.1", b"loader");
    world.run().unwrap();
    world.run().unwrap();
    let expect = format!("/lib\n/usr/local/lib\n/usr/lib\n{LIB}\n");
    assert_eq!(String::from_utf8(world.read("etc/ld-musl-x86_64.path")).unwrap(), expect);
}

/// The image is prepared, the hook runs (and may refuse), the host is as before.
fn host_is_safe(name: &str, prepare: impl Fn(&World)) {
    let world = World::new();
    prepare(&world);
    let before = world.host();
    let said = world.run();
    assert_eq!(world.host(), before, "{name}: {said:?}");
    let inside = tree(&world.image(""));
    let secret = b"the host's cache".as_slice();
    for (path, content) in &inside {
        assert!(!content.windows(secret.len()).any(|part| part == secret), "{name}: {path:?} holds it");
    }
}

#[test]
fn links_to_the_host_are_not_followed() {
    for path in
        ["etc", "etc/ld.so.conf.d", "etc/ld.so.cache", "etc/ld.so.conf.d/00-divvy.conf", LIB, "usr/lib"]
    {
        host_is_safe(path, |world| world.point(path, &world.path("host")));
        host_is_safe(path, |world| world.point(path, &world.path("host/ld.so.cache")));
        let up = Path::new("../../../../../../../../../../../..");
        host_is_safe(path, |world| {
            world.point(path, &up.join(world.path("host").strip_prefix("/").unwrap()))
        });
        host_is_safe(path, |world| {
            world.point(
                path,
                Path::new("/proc/self/root").join(world.path("host").strip_prefix("/").unwrap()).as_path(),
            )
        });
        host_is_safe(path, |world| world.point(path, Path::new(path)));
    }
    let file = format!("{LIB}/libcuda.so.1");
    host_is_safe("a soname", |world| world.point(&file, &world.path("host/ld.so.cache")));
}

#[test]
fn links_inside_the_image_are_followed_inside_it() {
    let world = World::new();
    fs::create_dir_all(world.image("data/etc")).unwrap();
    world.point("etc", Path::new("/data/etc"));
    world.run().unwrap();
    assert!(Cache::parse(&world.read("data/etc/ld.so.cache")).is_some());
}

#[test]
fn fifos_do_not_block_and_are_replaced() {
    for path in ["etc/ld.so.cache", "etc/ld.so.conf.d/00-divvy.conf", "usr/lib/x86_64-linux-gnu/libcuda.so.1"]
    {
        let world = World::new();
        world.fifo(path);
        world.run().unwrap();
        let kind = fs::symlink_metadata(world.image(path)).unwrap().file_type();
        assert!(!kind.is_fifo(), "{path}");
    }
}

#[test]
fn a_fifo_in_the_place_of_a_directory_is_an_error() {
    for path in ["etc", "etc/ld.so.conf.d"] {
        let world = World::new();
        let _ = fs::remove_dir_all(world.image(path));
        world.fifo(path);
        let said = world.run().unwrap_err();
        assert!(said.starts_with("divvy-hook: ") && said.contains(path), "{said}");
    }
}

#[test]
fn a_fifo_on_the_host_behind_a_link_is_not_opened() {
    let world = World::new();
    assert!(Command::new("mkfifo").arg(world.path("host/fifo")).status().unwrap().success());
    world.point("etc/ld.so.cache", &world.path("host/fifo"));
    world.run().unwrap();
    assert!(Cache::parse(&world.read("etc/ld.so.cache")).is_some());
}

#[test]
fn a_cache_that_is_a_directory_is_an_error_and_leaves_nothing() {
    let world = World::new();
    fs::create_dir_all(world.image("etc/ld.so.cache/x")).unwrap();
    let said = world.run().unwrap_err();
    assert!(said.contains("ld.so.cache"), "{said}");
    assert_eq!(fs::read_dir(world.image("etc")).unwrap().count(), 1);
}

#[test]
fn a_volume_is_told_from_the_image() {
    let root = divvy_hook::root::Root::open(Path::new("/")).unwrap();
    assert!(root.dir(Path::new("/proc/self")).unwrap_err().is_volume());
    assert!(!root.dir(Path::new("/nonexistent\0")).unwrap_err().is_volume());
}

#[test]
fn a_state_without_a_bundle_is_an_error() {
    let output = Command::new(hook()).stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("OCI state"), "{said}");
}
