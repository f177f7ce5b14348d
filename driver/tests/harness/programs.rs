//! Programs of other crates that tests run: the simulator's stand-ins and the
//! keeper. They lie beside the tests after `cargo test --workspace`; where only
//! this crate was built, they are built now.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;

/// The program of that package and name.
pub(crate) fn program(name: &str) -> PathBuf {
    static BUILDING: Mutex<()> = Mutex::new(());
    let test = std::env::current_exe().unwrap();
    let directory = test.ancestors().nth(2).unwrap();
    let path = directory.join(name);
    let _alone = BUILDING.lock();
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
