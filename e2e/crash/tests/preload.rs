//! The library in arbitrary programs.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};

fn library() -> PathBuf {
    let exe = std::env::current_exe().expect("path of this test");
    exe.parent().expect("deps").join("libdivvy_crash.so")
}

/// Runs `sh -c script` in a new directory, with that content of the control file.
fn check(script: &str, control: Option<&str>) -> (tempfile::TempDir, ExitStatus) {
    let dir = tempfile::tempdir().expect("a directory");
    let under = dir.path().join("state");
    std::fs::create_dir(&under).expect("state");
    let file = dir.path().join("control");
    if let Some(text) = control {
        std::fs::write(&file, text).expect("control");
    }
    let status = Command::new("sh")
        .args(["-c", script])
        .current_dir(&under)
        .env("LD_PRELOAD", library())
        .env("DIVVY_CRASH_CONTROL", &file)
        .env("DIVVY_CRASH_UNDER", &under)
        .status()
        .expect("sh starts");
    (dir, status)
}

fn exists(dir: &tempfile::TempDir, name: &str) -> bool {
    Path::new(&dir.path().join("state").join(name)).exists()
}

#[test]
fn nothing_happens_without_a_control_file() {
    let (dir, status) = check("mkdir a && mkdir b", None);
    assert!(status.success());
    assert!(exists(&dir, "b"));
}

#[test]
fn before_prevents_the_effect_and_after_does_not() {
    for (control, made) in [("1 before", false), ("1 after", true)] {
        let (dir, status) = check("exec mkdir a", Some(control));
        assert_eq!(status.signal(), Some(9), "{control}");
        assert_eq!(exists(&dir, "a"), made, "{control}");
    }
}

#[test]
fn calls_in_other_directories_are_not_counted() {
    let (dir, status) = check("exec mkdir ../elsewhere a", Some("1 after"));
    assert_eq!(status.signal(), Some(9));
    assert!(exists(&dir, "a"));
}

#[test]
fn number_beyond_the_last_call_has_no_effect() {
    let (dir, status) = check("exec mkdir a b", Some("3 before"));
    assert!(status.success());
    assert!(exists(&dir, "b"));
}
