//! Programs of other crates that tests run: the simulator and the MPS supervisor.
//!
//! `cargo test --workspace` builds them beside the tests. If only this crate was built, [`program`]
//! builds the missing one.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;

/// The path of the program. Package and program have the same name.
pub(crate) fn program(name: &str) -> PathBuf {
    static BUILDING: Mutex<()> = Mutex::new(());
    let test = std::env::current_exe().unwrap();
    let directory = test.ancestors().nth(2).unwrap();
    let path = directory.join(name);
    let _guard = BUILDING.lock();
    if !path.exists() {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let mut build = Command::new(cargo);
        build.args(["build", "--offline", "--quiet", "-p", name, "--bin", name]);
        build.arg("--target-dir").arg(directory.parent().unwrap());
        if directory.ends_with("release") {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success(), "cannot build {name}");
    }
    path
}
