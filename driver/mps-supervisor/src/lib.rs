//! The supervisor of MPS control daemons: a small process that must outlive the node daemon.
//!
//! It reads desired state from files and writes actual state to files ([`divvy_api::mps`]). It uses
//! neither the network nor Kubernetes. A daemon outlives the supervisor that started it: the next
//! supervisor finds it in /proc and adopts it. So the supervisor keeps no state and needs no
//! SIGTERM handler. In a pod the container runtime kills everything in the container, so replace
//! the supervisor's pod only when no MPS client runs.

mod args;
mod daemon;
mod files;
mod process;
mod program;
mod target;
pub mod tree;
mod watch;

use args::{Args, ArgsError, Command};
use divvy_api::mps::DIRECTORY;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use target::{Threads, log};
use watch::Watch;

/// The run directory is rescanned at this interval even when inotify reports no change.
const RESCAN_INTERVAL: Duration = Duration::from_secs(60);

/// Why the supervisor cannot run.
#[derive(Debug, thiserror::Error)]
enum SupervisorError {
    #[error(transparent)]
    Args(#[from] ArgsError),
    #[error("{path} cannot be {what}: {cause}")]
    Io { path: String, what: &'static str, cause: std::io::Error },
}

/// Entry point of the `divvy-mps-supervisor` program.
pub fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("divvy-mps-supervisor: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), SupervisorError> {
    let args = match Args::parse(std::env::args_os().skip(1), |name| std::env::var_os(name))? {
        Command::Print(text) => {
            println!("{text}");
            return Ok(());
        }
        Command::Run(args) => args,
    };
    let dir = args.run_dir.join(DIRECTORY);
    std::fs::create_dir_all(&dir).map_err(io(&dir, "created"))?;
    let _lock = lock(&dir)?;
    if !rustix::process::geteuid().is_root() {
        log("supervisor", "not running as root: daemons share the host's /dev/shm instead of a private one");
    }
    supervise_all(Arc::new(args), &dir)
}

/// Takes the lock that allows one supervisor per run directory; waits for the holder to exit.
fn lock(dir: &Path) -> Result<std::fs::File, SupervisorError> {
    let lock = std::fs::File::open(dir).map_err(io(dir, "read"))?;
    if lock.try_lock().is_err() {
        log("supervisor", "another supervisor holds the lock; waiting for it to exit");
        lock.lock().map_err(io(dir, "locked"))?;
    }
    Ok(lock)
}

/// Runs one thread per directory, forever.
fn supervise_all(args: Arc<Args>, dir: &Path) -> Result<(), SupervisorError> {
    let threads = Threads::default();
    loop {
        std::fs::create_dir_all(dir).map_err(io(dir, "created"))?;
        // Watch before the scan, so that a directory created after the scan causes a wakeup.
        let watch = Watch::of_entries(dir).map_err(io(dir, "watched"))?;
        for entry in std::fs::read_dir(dir).map_err(io(dir, "read"))?.flatten() {
            let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) || name.starts_with('.') {
                continue;
            }
            let mut running = threads.lock().unwrap_or_else(PoisonError::into_inner);
            if running.get(&name).is_none_or(JoinHandle::is_finished) {
                let (args, path, mine) = (Arc::clone(&args), entry.path(), Arc::clone(&threads));
                let target = name.clone();
                let thread = std::thread::Builder::new()
                    .stack_size(program::THREAD_STACK_BYTES)
                    .spawn(move || target::supervise(&args, &target, &path, &mine))
                    .map_err(io(dir, "supervised, as its thread cannot be started"))?;
                running.insert(name, thread);
            }
        }
        watch.wait(None, RESCAN_INTERVAL).map_err(io(dir, "watched"))?;
    }
}

fn io(path: &Path, what: &'static str) -> impl Fn(std::io::Error) -> SupervisorError {
    move |cause| SupervisorError::Io { path: path.display().to_string(), what, cause }
}
