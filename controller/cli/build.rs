//! Sets the version, and builds the libraries that enforce the limits of shares, which the demo
//! installs on its simulated node. The script of the image builds them, so the demo runs the files
//! that a cluster gets.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// Sources of the libraries, relative to the root of the repository.
const SOURCES: &[&str] = &[
    "Cargo.toml",
    "api/pages/Cargo.toml",
    "api/pages/src",
    "driver/interposer/Cargo.toml",
    "driver/interposer/build",
    "driver/interposer/build.rs",
    "driver/interposer/core/Cargo.toml",
    "driver/interposer/core/src",
    "driver/interposer/exports",
    "driver/interposer/src",
    "driver/interposer/symbols",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CC");
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    set_version(&root);
    if env::var_os("CARGO_FEATURE_DEMO").is_none() {
        return;
    }
    for source in SOURCES {
        println!("cargo::rerun-if-changed={}", root.join(source).display());
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let libraries = out.join("libraries");
    fs::create_dir_all(&libraries).expect("OUT_DIR is writable");
    let script = root.join("driver/interposer/build");
    let built = Command::new("bash")
        .arg(&script)
        .arg(&libraries)
        // Not the target directory of this build, which cargo has locked.
        .env("CARGO_TARGET_DIR", out.join("target"))
        // The libraries have no dependencies outside this workspace.
        .env("CARGO_NET_OFFLINE", "true")
        // Settings of this build do not apply to the libraries: flags and the wrapper of clippy.
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .output();
    let failed = |cause: &str| {
        for line in cause.lines() {
            println!("cargo::error={line}");
        }
        println!(
            "cargo::error={} failed; it needs bash and a C compiler, `cc` or that in CC. \
             `--no-default-features` builds divvy without the demo",
            script.display()
        );
    };
    match built {
        Ok(built) if built.status.success() => {}
        Ok(built) => failed(&String::from_utf8_lossy(&built.stderr)),
        Err(cause) => failed(&cause.to_string()),
    }
}

/// Sets the commit and the target that `divvy version` prints. Outside a clone the commit is unknown.
fn set_version(root: &Path) {
    let git = |arguments: &[&str]| {
        let out = Command::new("git").args(arguments).current_dir(root).output().ok()?;
        out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
    };
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    // Each commit and each checkout appends a line to this log.
    let log = git(&["rev-parse", "--git-path", "logs/HEAD"]).map(|log| root.join(log));
    if let Some(log) = log.filter(|log| log.exists()) {
        println!("cargo::rerun-if-changed={}", log.display());
    }
    println!("cargo::rustc-env=DIVVY_COMMIT={commit}");
    println!("cargo::rustc-env=DIVVY_TARGET={}", env::var("TARGET").unwrap_or_default());
}
