//! What benches of programs in containers have in common: which parts are asked for, the library that is measured, and how
//! a program is spoken to.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Whether a part is asked for; all are where none is named.
pub(crate) fn is_wanted(only: &[String], part: &str) -> bool {
    only.is_empty() || only.iter().any(|only| only == part)
}

/// The library that was named, or the shipping one, built into that directory.
pub(crate) fn library(named: Option<&Path>, out: &Path) -> Result<PathBuf> {
    if let Some(named) = named {
        return named.canonicalize().with_context(|| format!("no {}", named.display()));
    }
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../driver/interposer/build");
    eprintln!("building libdivvy.so as it ships");
    let status = Command::new(&build).arg(out).status().context("cannot start driver/interposer/build")?;
    ensure!(status.success(), "driver/interposer/build failed");
    Ok(out.join("libdivvy.so"))
}

/// Starts a program in a container, of which everything is heard and which waits to be told.
pub(crate) fn start(mut command: Command) -> Result<Child> {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    piped.spawn().context("cannot start nsenter")
}
