//! The OCI hook that lets an unmodified image find the GPU driver's libraries.
//!
//! The runtime mounts `libcuda.so.580.95.05`, but programs load `libcuda.so.1`. The hook creates the
//! links ([`links`]) and rewrites the loader's cache ([`ldcache`]); it executes nothing of the image. For
//! a share it merges preload lists ([`preload`]). It reports containers ([`report`]). It runs as root on
//! untrusted files. Every path is resolved inside the container's root and on its own mount ([`root`]).
//! No environment variable is read, and input and run time are limited.

pub mod args;
pub mod ldcache;
pub mod links;
pub mod preload;
pub mod report;
pub mod root;
pub mod state;

use args::HookArgs;
use root::{Root, RootError};
use state::State;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// The runtime waits for the hook, and the pod waits for the runtime.
const HOOK_TIMEOUT: Duration = Duration::from_secs(10);

/// Why the hook fails.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    #[error(transparent)]
    Args(#[from] args::ArgsError),
    #[error(transparent)]
    State(#[from] state::StateError),
    #[error(transparent)]
    Root(#[from] RootError),
    #[error(transparent)]
    Preload(#[from] preload::PreloadError),
    #[error(transparent)]
    Report(#[from] report::ReportError),
}

/// Entry point of the hook. The arguments say what to do; the OCI state on stdin identifies the
/// container.
pub fn main() -> ExitCode {
    // A watchdog for the whole process. It needs no owner: it ends with the process or ends the
    // process.
    std::thread::spawn(|| {
        std::thread::sleep(HOOK_TIMEOUT);
        eprintln!("divvy-hook: timed out after {} s", HOOK_TIMEOUT.as_secs());
        std::process::exit(1);
    });
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let mut text = format!("divvy-hook: {error}");
            let mut cause = std::error::Error::source(&error);
            while let Some(error) = cause {
                text.push_str(&format!(": {error}"));
                cause = error.source();
            }
            eprintln!("{text}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), HookError> {
    let args = HookArgs::parse(std::env::args_os().skip(1))?;
    let state = State::read(std::io::stdin().lock())?;
    if let Some(dir) = &args.cgroups {
        report::cgroups(dir, &state)?;
    }
    if let Some(dir) = &args.process {
        report::process(dir, &state)?;
    }
    if args.entries.is_empty() && args.preload.is_none() {
        // After the container has stopped, its root no longer exists.
        return Ok(());
    }
    let rootfs = state.rootfs()?;
    if !args.entries.is_empty() {
        apply(&rootfs, &args)?;
    }
    if let Some(dir) = &args.preload {
        preload::merge(&Root::open(&rootfs)?, dir, &state.id)?;
    }
    Ok(())
}

/// Creates the names in a container's root. Calling it again changes nothing.
pub fn apply(rootfs: &Path, args: &HookArgs) -> Result<(), HookError> {
    let root = Root::open(rootfs)?;
    for step in [links::make, ldcache::update, links::configure, links::configure_musl] {
        match step(&root, args) {
            // The image's directory is covered by a volume, which must not be changed.
            Err(error) if error.is_volume() => {
                eprintln!("divvy-hook: skipped, a volume is mounted there: {error}")
            }
            result => result?,
        }
    }
    Ok(())
}
