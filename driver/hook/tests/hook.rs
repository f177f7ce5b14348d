//! Runs the binary as a runtime does, on ordinary and on malicious images.

#![allow(clippy::unwrap_used)] // A test may panic.

use divvy_hook::ldcache::Cache;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const LIB: &str = "/usr/lib/x86_64-linux-gnu";

/// The hook under test: the binary built by cargo, or the static one that is shipped.
fn hook() -> PathBuf {
    std::env::var_os("DIVVY_HOOK").map_or_else(|| env!("CARGO_BIN_EXE_divvy-hook").into(), PathBuf::from)
}

/// A temporary directory with a bundle, and host files that the hook must not touch.
struct TestBundle {
    dir: tempfile::TempDir,
}

impl TestBundle {
    /// An image with a mounted library, and a host with a secret.
    fn new() -> Self {
        let bundle = Self { dir: tempfile::tempdir().unwrap() };
        bundle.write("bundle/config.json", br#"{"root": {"path": "rootfs"}}"#);
        bundle.write(&format!("bundle/rootfs{LIB}/libcuda.so.580.1"), b"mounted");
        fs::create_dir_all(bundle.image("etc")).unwrap();
        bundle.write("host/ld.so.cache", b"the host's cache");
        bundle.write("host/ld.so.conf.d/host.conf", b"/host/lib\n");
        bundle
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

    /// Replaces a path of the image by a link to the host.
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

    /// Runs the hook; the error is what it printed.
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

    /// Every file of the host directory; directories, FIFOs and links by kind.
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
fn image_finds_the_library() {
    let bundle = TestBundle::new();
    bundle.run().unwrap();
    bundle.points_to(&format!("{LIB}/libcuda.so.1"), "libcuda.so.580.1");
    bundle.points_to(&format!("{LIB}/libcuda.so"), "libcuda.so.1");
    assert_eq!(bundle.read("etc/ld.so.conf.d/00-divvy.conf"), format!("{LIB}\n").into_bytes());
    let bytes = bundle.read("etc/ld.so.cache");
    let cache = Cache::parse(&bytes).unwrap();
    assert_eq!(cache.find("libcuda.so.1"), Some(format!("{LIB}/libcuda.so.1").as_bytes()));
    assert_eq!(cache.find("libcuda.so"), Some(format!("{LIB}/libcuda.so").as_bytes()));
}

#[test]
fn second_run_changes_nothing() {
    let bundle = TestBundle::new();
    bundle.run().unwrap();
    let first = tree(&bundle.image(""));
    bundle.run().unwrap();
    assert_eq!(tree(&bundle.image("")), first);
}

#[test]
fn missing_directories_are_created() {
    let bundle = TestBundle::new();
    fs::remove_dir(bundle.image("etc")).unwrap();
    bundle.run().unwrap();
    assert!(Cache::parse(&bundle.read("etc/ld.so.cache")).is_some());
}

#[test]
fn stub_library_of_the_image_is_replaced() {
    let bundle = TestBundle::new();
    bundle.write(&format!("bundle/rootfs{LIB}/libcuda.so.1"), b"a stub from a build");
    bundle.run().unwrap();
    bundle.points_to(&format!("{LIB}/libcuda.so.1"), "libcuda.so.580.1");
}

#[test]
fn musl_path_file_gets_the_directory_last() {
    let bundle = TestBundle::new();
    bundle.write("bundle/rootfs/lib/ld-musl-x86_64.so.1", b"loader");
    bundle.run().unwrap();
    bundle.run().unwrap();
    let expect = format!("/lib\n/usr/local/lib\n/usr/lib\n{LIB}\n");
    assert_eq!(String::from_utf8(bundle.read("etc/ld-musl-x86_64.path")).unwrap(), expect);
}

/// Prepares the image, runs the hook, which may fail, and checks that the host is unchanged.
fn host_is_safe(name: &str, prepare: impl Fn(&TestBundle)) {
    let bundle = TestBundle::new();
    prepare(&bundle);
    let before = bundle.host();
    let message = bundle.run();
    assert_eq!(bundle.host(), before, "{name}: {message:?}");
    let inside = tree(&bundle.image(""));
    let secret = b"the host's cache".as_slice();
    for (path, content) in &inside {
        assert!(
            !content.windows(secret.len()).any(|part| part == secret),
            "{name}: {path:?} contains the secret"
        );
    }
}

#[test]
fn links_to_the_host_are_not_followed() {
    for path in
        ["etc", "etc/ld.so.conf.d", "etc/ld.so.cache", "etc/ld.so.conf.d/00-divvy.conf", LIB, "usr/lib"]
    {
        host_is_safe(path, |bundle| bundle.point(path, &bundle.path("host")));
        host_is_safe(path, |bundle| bundle.point(path, &bundle.path("host/ld.so.cache")));
        let up = Path::new("../../../../../../../../../../../..");
        host_is_safe(path, |bundle| {
            bundle.point(path, &up.join(bundle.path("host").strip_prefix("/").unwrap()))
        });
        host_is_safe(path, |bundle| {
            bundle.point(
                path,
                Path::new("/proc/self/root").join(bundle.path("host").strip_prefix("/").unwrap()).as_path(),
            )
        });
        host_is_safe(path, |bundle| bundle.point(path, Path::new(path)));
    }
    let file = format!("{LIB}/libcuda.so.1");
    host_is_safe("a soname", |bundle| bundle.point(&file, &bundle.path("host/ld.so.cache")));
}

#[test]
fn links_are_resolved_inside_the_image() {
    let bundle = TestBundle::new();
    fs::create_dir_all(bundle.image("data/etc")).unwrap();
    bundle.point("etc", Path::new("/data/etc"));
    bundle.run().unwrap();
    assert!(Cache::parse(&bundle.read("data/etc/ld.so.cache")).is_some());
}

#[test]
fn fifos_do_not_block_and_are_replaced() {
    for path in ["etc/ld.so.cache", "etc/ld.so.conf.d/00-divvy.conf", "usr/lib/x86_64-linux-gnu/libcuda.so.1"]
    {
        let bundle = TestBundle::new();
        bundle.fifo(path);
        bundle.run().unwrap();
        let kind = fs::symlink_metadata(bundle.image(path)).unwrap().file_type();
        assert!(!kind.is_fifo(), "{path}");
    }
}

#[test]
fn fifo_in_place_of_a_directory_is_an_error() {
    for path in ["etc", "etc/ld.so.conf.d"] {
        let bundle = TestBundle::new();
        let _ = fs::remove_dir_all(bundle.image(path));
        bundle.fifo(path);
        let message = bundle.run().unwrap_err();
        assert!(message.starts_with("divvy-hook: ") && message.contains(path), "{message}");
    }
}

#[test]
fn host_fifo_behind_a_link_is_not_opened() {
    let bundle = TestBundle::new();
    assert!(Command::new("mkfifo").arg(bundle.path("host/fifo")).status().unwrap().success());
    bundle.point("etc/ld.so.cache", &bundle.path("host/fifo"));
    bundle.run().unwrap();
    assert!(Cache::parse(&bundle.read("etc/ld.so.cache")).is_some());
}

#[test]
fn directory_in_place_of_the_cache_is_an_error() {
    let bundle = TestBundle::new();
    fs::create_dir_all(bundle.image("etc/ld.so.cache/x")).unwrap();
    let message = bundle.run().unwrap_err();
    assert!(message.contains("ld.so.cache"), "{message}");
    assert_eq!(fs::read_dir(bundle.image("etc")).unwrap().count(), 1);
}

#[test]
fn volumes_are_detected() {
    let root = divvy_hook::root::Root::open(Path::new("/")).unwrap();
    assert!(root.dir(Path::new("/proc/self")).unwrap_err().is_volume());
    assert!(!root.dir(Path::new("/nonexistent\0")).unwrap_err().is_volume());
}

#[test]
fn missing_state_is_an_error() {
    let output = Command::new(hook()).stdin(Stdio::null()).output().unwrap();
    assert!(!output.status.success());
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("OCI state"), "{message}");
}
