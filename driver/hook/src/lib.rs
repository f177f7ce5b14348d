//! The OCI hook that lets an unmodified image find the GPU driver's libraries.
//!
//! The runtime has mounted the libraries as `libcuda.so.580.95.05`; programs ask
//! the loader for `libcuda.so.1`. This makes the links ([`links`]) and enters
//! both into the loader's cache ([`ldcache`]), which is rewritten here, not by
//! anybody's `ldconfig`: nothing of the image is executed.
//!
//! For a share it does two things more, each in a call of its own: what the image
//! itself wants preloaded is kept ([`preload`]), and the driver is told the
//! container's cgroups ([`cgroups`]).
//!
//! It runs as root over files that a stranger made. So every path is resolved
//! inside the container's root and on its own mount ([`root`]): a link to the
//! host, a FIFO, a device or a volume in the place of a file is never opened or
//! followed out. No environment variable is read, input is bounded, and a
//! deadline ends the process whatever happens.

pub mod args;
pub mod cgroups;
pub mod ldcache;
pub mod links;
pub mod preload;
pub mod root;
pub mod state;

use args::Work;
use root::{Root, RootError};
use state::State;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

/// The runtime waits for the hook, and the pod for the runtime.
const DEADLINE: Duration = Duration::from_secs(10);

/// Why the container cannot have its libraries.
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
    Cgroups(#[from] cgroups::CgroupsError),
}

/// The hook: arguments say what, OCI state on stdin says where.
pub fn main() -> ExitCode {
    // Owned by the process: it ends with it, or ends it.
    std::thread::spawn(|| {
        std::thread::sleep(DEADLINE);
        eprintln!("divvy-hook: not done within {} s", DEADLINE.as_secs());
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
    let work = Work::parse(std::env::args_os().skip(1))?;
    let state = State::read(std::io::stdin().lock())?;
    if let Some(dir) = &work.cgroups {
        cgroups::keep(dir, &state)?;
    }
    if work.entries.is_empty() && work.preload.is_none() {
        // After the container's end there is no root any more.
        return Ok(());
    }
    let rootfs = state.rootfs()?;
    if !work.entries.is_empty() {
        apply(&rootfs, &work)?;
    }
    if let Some(dir) = &work.preload {
        preload::keep(&Root::open(&rootfs)?, dir, &state.id)?;
    }
    Ok(())
}

/// Makes the names in a container's root. Doing it again changes nothing.
pub fn apply(rootfs: &Path, work: &Work) -> Result<(), HookError> {
    let root = Root::open(rootfs)?;
    for step in [links::make, ldcache::update, links::configure, links::configure_musl] {
        match step(&root, work) {
            // A volume lies where the image's directory was: it belongs to
            // somebody else and is left as it is.
            Err(error) if error.is_volume() => eprintln!("divvy-hook: left alone: {error}"),
            result => result?,
        }
    }
    Ok(())
}
