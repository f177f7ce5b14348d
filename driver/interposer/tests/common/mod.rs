//! Shared by the tests: the shipped library, built by the command that ships it.

#[allow(dead_code, reason = "not every test runs containers")]
pub(crate) mod container;
#[allow(dead_code, reason = "not every test runs containers")]
mod graphs;
#[allow(dead_code, reason = "not every test runs containers")]
pub(crate) mod guest;
#[allow(dead_code, reason = "not every test runs containers")]
mod launches;
#[allow(dead_code, reason = "not every test runs containers")]
mod locations;
#[allow(dead_code, reason = "not every test runs containers")]
mod physical_memory;
#[allow(dead_code, reason = "not every test runs containers")]
#[path = "../../../../e2e/sim/cuda/tests/common/program.rs"]
pub(crate) mod program;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The directory with `libdivvy.so` and `shim/`, built from the current sources.
pub(crate) fn shipped() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("shipped");
        let status = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/build")).arg(&out).status();
        assert!(status.expect("driver/interposer/build starts").success(), "driver/interposer/build failed");
        out
    })
}

/// The lines of one of the committed lists.
#[allow(dead_code, reason = "not every test reads the lists")]
pub(crate) fn listed(list: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("symbols").join(list);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(str::to_owned).collect()
}
