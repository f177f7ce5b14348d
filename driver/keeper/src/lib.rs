//! The keeper of MPS control daemons: a small process that holds what must
//! outlive the node daemon and its upgrades.
//!
//! It reads what is wanted from files and writes what there is into files (see
//! [`divvy_api::mps`]); it has no network and knows no Kubernetes. A control
//! daemon is a child of the keeper's, but not bound to it: a keeper that dies or
//! is replaced leaves the daemons and their clients running, and the next one
//! knows them again by what the kernel says of them. So it has no state of its
//! own, and SIGTERM needs no handler: it ends at once and takes nothing with it.
//! (In a pod the container runtime then ends whatever ran in the container, so
//! the keeper's pod is replaced only when no client minds.)
//!
//! - [`target`]: one thread per daemon, which decides and does everything about it.
//! - [`daemon`]: a running daemon: asked, changed, ended.
//! - [`program`]: the GPU driver's programs, how they are found and run.
//! - [`process`]: processes, told from others that got their numbers.
//! - [`files`]: the files of the contract.

mod args;
mod daemon;
mod files;
mod process;
mod program;
mod target;
mod watch;

use args::{Args, ArgsError, Command};
use divvy_api::mps::DIRECTORY;
use std::collections::HashMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use watch::Watch;

/// Directories are looked for that often even where nothing is heard of them.
const RESCAN: Duration = Duration::from_secs(60);
/// A thread reads small files and starts programs.
const STACK: usize = 256 * 1024;

/// Why the keeper cannot work.
#[derive(Debug, thiserror::Error)]
enum KeeperError {
    #[error(transparent)]
    Args(#[from] ArgsError),
    #[error("{path} cannot be {what}: {cause}")]
    Io { path: String, what: &'static str, cause: std::io::Error },
}

/// The command.
pub fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("divvy-keeper: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), KeeperError> {
    let args = match Args::parse(std::env::args_os().skip(1), |name| std::env::var_os(name))? {
        Command::Print(text) => {
            println!("{text}");
            return Ok(());
        }
        Command::Keep(args) => args,
    };
    let dir = args.run_dir.join(DIRECTORY);
    std::fs::create_dir_all(&dir).map_err(io(&dir, "made"))?;
    let _alone = alone(&dir)?;
    if !rustix::process::geteuid().is_root() {
        log("keeper", "not root: daemons do not get a /dev/shm of their own");
    }
    keep(Arc::new(args), &dir)
}

/// The lock of the one keeper; a second one waits for the first one's end.
fn alone(dir: &Path) -> Result<std::fs::File, KeeperError> {
    let lock = std::fs::File::open(dir).map_err(io(dir, "read"))?;
    if lock.try_lock().is_err() {
        log("keeper", "another keeper runs here, waiting for its end");
        lock.lock().map_err(io(dir, "locked"))?;
    }
    Ok(lock)
}

/// Threads by the name of their directory. Whoever removes a directory holds this, so that one of the same name that is
/// made at that moment is seen by [`keep`] when it has no thread.
type Threads = Arc<Mutex<HashMap<String, JoinHandle<()>>>>;

/// Gives each directory a thread, for ever.
fn keep(args: Arc<Args>, dir: &Path) -> Result<(), KeeperError> {
    let threads = Threads::default();
    loop {
        std::fs::create_dir_all(dir).map_err(io(dir, "made"))?;
        // Before the look around, so that what comes after it is heard.
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
                    .stack_size(STACK)
                    .spawn(move || target::supervise(&args, &target, &path, &mine))
                    .map_err(io(dir, "given a thread"))?;
                running.insert(name, thread);
            }
        }
        watch.wait(None, RESCAN).map_err(io(dir, "watched"))?;
    }
}

fn io(path: &Path, what: &'static str) -> impl Fn(std::io::Error) -> KeeperError {
    move |cause| KeeperError::Io { path: path.display().to_string(), what, cause }
}

/// A line of the log. Whoever collects stderr adds the time.
fn log(target: &str, text: &str) {
    eprintln!("{target}: {text}");
}
