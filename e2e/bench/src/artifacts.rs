//! Builds what is measured the way the image ships it: `divvy-node`, the controller, the MPS
//! supervisor and the interposer library.

use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Builds the node daemon, and the hook that it installs.
pub(crate) fn node_daemon() -> Result<PathBuf> {
    build("divvy-hook", "divvy-hook")?;
    build("divvy-driver", "divvy-node")
}

/// Builds a program with the profile of the image.
pub(crate) fn build(package: &str, binary: &str) -> Result<PathBuf> {
    run_cargo(cargo().args(["--profile", "ship", "-p", package]), binary)
}

/// Builds a statically linked program, as the image ships it.
pub(crate) fn build_static(package: &str, binary: &str) -> Result<PathBuf> {
    // With an explicit target, RUSTFLAGS apply to the program alone and not to build scripts.
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let mut cargo = cargo();
    cargo.args(["--release", "--target", &target, "-p", package]);
    run_cargo(cargo.env("RUSTFLAGS", "-C target-feature=+crt-static"), binary)
}

/// Returns the library at `named`, or builds the shipping library into the directory `out`.
pub(crate) fn interposer(named: Option<&Path>, out: &Path) -> Result<PathBuf> {
    if let Some(named) = named {
        return named.canonicalize().with_context(|| format!("no {}", named.display()));
    }
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../driver/interposer/build");
    eprintln!("building the shipping libdivvy.so");
    let status = Command::new(&build).arg(out).status().context("cannot start driver/interposer/build")?;
    ensure!(status.success(), "driver/interposer/build failed");
    Ok(out.join("libdivvy.so"))
}

fn cargo() -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--message-format", "json-render-diagnostics"]);
    cargo
}

fn run_cargo(cargo: &mut Command, binary: &str) -> Result<PathBuf> {
    eprintln!("building the shipping {binary} (a few minutes the first time)");
    let out = cargo
        .args(["--bin", binary])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    if !out.status.success() {
        bail!("building {binary} failed");
    }
    let messages = String::from_utf8_lossy(&out.stdout);
    let executable = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == binary)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from));
    executable.with_context(|| format!("cargo did not report the path of {binary}"))
}
