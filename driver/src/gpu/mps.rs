//! MPS control daemons, requested through files ([`divvy_api::mps`]) and run by
//! divvy-mps-supervisor, so that they survive this daemon and its upgrades.
//!
//! The driver writes the desired state and follows the actual state through inotify. It waits under
//! the GPU's lock with a deadline, so a missing supervisor delays only claims that need it.

use crate::gpu::part::Part;
use crate::gpu::sharing::MpsLimits;
use crate::inotify::DirWatcher;
use crate::paths::HostPaths;
use divvy_api::mps::{ACTUAL, Actual, DESIRED, DIRECTORY, Desired, FORMAT, Phase, Process};
use serde::de::DeserializeOwned;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Time for a daemon to answer on its pipe.
pub const START_TIMEOUT: Duration = Duration::from_secs(15);
/// Time for a daemon to stop. The supervisor kills it earlier.
pub const STOP_TIMEOUT: Duration = Duration::from_secs(8);
/// Time for a daemon to stop if no supervisor ever reported it.
const UNREPORTED_STOP_TIMEOUT: Duration = Duration::from_millis(500);
/// Mode of the directories that clients share with their daemon. The clients of a daemon are one trust
/// domain: clients of any user must reach the pipe directory and share memory with the server. The
/// sticky bit keeps one client from removing the files of another.
const SHARED_DIR_MODE: u32 = 0o1777;

/// Why a daemon could not be started or stopped.
#[derive(Debug, thiserror::Error)]
pub enum MpsError {
    #[error("{path} cannot be created")]
    Dir {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{path} cannot be watched")]
    Watch {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{path} cannot be removed")]
    Remove {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error(
        "MPS control daemon for {part} is not ready ({state}); check that divvy-mps-supervisor runs on this \
         node, and its log"
    )]
    NotReady { part: Part, state: String },
    #[error(
        "MPS control daemon for {part} has not stopped; check that divvy-mps-supervisor runs on this node, \
         and its log"
    )]
    NotStopped { part: Part },
}

/// The directories of all daemons; a clone is the same.
#[derive(Clone, Debug)]
pub struct Mps {
    dir: PathBuf,
    process_root: PathBuf,
}

impl Mps {
    pub fn new(paths: &HostPaths) -> Self {
        Self { dir: paths.run_dir.join(DIRECTORY), process_root: paths.process_root.clone() }
    }

    /// The directory of all targets.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Creates the directory of all targets.
    pub fn make(&self) -> Result<(), MpsError> {
        let made = DirBuilder::new().recursive(true).mode(0o755).create(&self.dir);
        made.map_err(|cause| MpsError::Dir { path: self.dir.clone(), cause })
    }

    /// The directory of one daemon.
    pub fn of(&self, part: &Part) -> PathBuf {
        self.dir.join(target(part))
    }

    /// Requests a daemon for the device with that UUID, and returns when it answers. If one runs
    /// already, its limits become the larger ones. `by` is the deadline.
    pub async fn start(
        &self,
        part: &Part,
        device: &str,
        limits: MpsLimits,
        by: Instant,
    ) -> Result<(), MpsError> {
        let dir = self.of(part);
        let mut changes: Option<DirWatcher> = None;
        loop {
            let wanted = request(&dir, device, limits)?;
            if let Some(changes) = &changes {
                // The supervisor may have removed the directory, so watch the current one.
                let _may_be_gone = changes.watch(&dir);
            }
            let actual: Option<Actual> = read(&dir.join(ACTUAL));
            if actual.as_ref().is_some_and(|is| is.phase == Phase::Ready && is.desired == wanted) {
                return Ok(());
            }
            let Some(changes) = &changes else {
                changes = match watch(&dir) {
                    Err(_) if !dir.exists() => continue,
                    watching => Some(watching?),
                };
                // Check again for changes before the watch started.
                continue;
            };
            if !wait_for_change(changes, &dir, by).await? {
                let state = match actual {
                    None => "no state reported".to_owned(),
                    Some(Actual { phase: Phase::Ready, .. }) => "with other settings".to_owned(),
                    Some(actual) => actual.phase.to_string(),
                };
                return Err(MpsError::NotReady { part: part.clone(), state });
            }
        }
    }

    /// Stops a daemon, and returns when it has stopped and its directory is gone. `by` is the deadline.
    pub async fn stop(&self, part: &Part, by: Instant) -> Result<(), MpsError> {
        let dir = self.of(part);
        let unanswered = by.min(Instant::now() + UNREPORTED_STOP_TIMEOUT);
        let mut changes: Option<DirWatcher> = None;
        loop {
            self.release(&dir)?;
            if !dir.exists() {
                return Ok(());
            }
            let Some(changes) = &changes else {
                changes = match watch(&dir) {
                    Err(_) if !dir.exists() => return Ok(()),
                    watching => Some(watching?),
                };
                continue;
            };
            let by = if dir.join(ACTUAL).exists() { by } else { unanswered };
            if !wait_for_change(changes, &dir, by).await? {
                break;
            }
        }
        // Without a supervisor, the directory of a dead daemon is removed here.
        let actual: Option<Actual> = read(&dir.join(ACTUAL));
        if actual.and_then(|actual| actual.process).is_some_and(|process| self.is_running(process)) {
            return Err(MpsError::NotStopped { part: part.clone() });
        }
        tracing::warn!(
            %part,
            "divvy-mps-supervisor has not removed an MPS directory; removing it, since its daemon is gone"
        );
        let tree = dir.clone();
        let removed = tokio::task::spawn_blocking(move || divvy_mps_supervisor::tree::remove(&tree)).await;
        remove(removed.unwrap_or_else(|cause| Err(io::Error::other(cause))), &dir)
    }

    /// Removes the request for a daemon; succeeds if there is none.
    pub fn release(&self, dir: &Path) -> Result<(), MpsError> {
        let desired = dir.join(DESIRED);
        remove(fs::remove_file(&desired), &desired)
    }

    /// The state of a part's daemon as the supervisor reports it.
    pub fn actual(&self, part: &Part) -> Option<Actual> {
        read(&self.of(part).join(ACTUAL))
    }

    /// The names of all daemon directories.
    pub fn targets(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    fn is_running(&self, process: Process) -> bool {
        let stat = self.process_root.join(process.pid.to_string()).join("stat");
        let Ok(text) = fs::read_to_string(stat) else { return false };
        // The command may contain anything and ends at the last `)`; fields 3 and later follow.
        let fields = text.rsplit_once(')').map(|(_, fields)| fields.split_whitespace());
        fields.and_then(|mut fields| fields.nth(19)?.parse().ok()) == Some(process.start_time)
    }
}

/// The name of a part's daemon directory.
pub fn target(part: &Part) -> String {
    match part {
        Part::Whole { gpu } => gpu.to_string(),
        Part::Instance(key) => format!("{}-{}-{}", key.gpu, key.profile_id, key.placement.start),
    }
}

/// Writes `desired.json` with at least these limits, and returns its contents. The GPU's lock makes this
/// process the only writer.
fn request(dir: &Path, device: &str, limits: MpsLimits) -> Result<Desired, MpsError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |cause| MpsError::Dir { path, cause }
    };
    for (path, mode) in [
        (dir.to_owned(), 0o755),
        (dir.join("pipe"), SHARED_DIR_MODE),
        (dir.join("log"), 0o755),
        (dir.join("shm"), SHARED_DIR_MODE),
    ] {
        if !path.is_dir() {
            DirBuilder::new().recursive(true).mode(0o755).create(&path).map_err(failed(&path))?;
            // Set separately, because the umask applies to the mode at creation.
            fs::set_permissions(&path, Permissions::from_mode(mode)).map_err(failed(&path))?;
        }
    }
    let path = dir.join(DESIRED);
    let have: Option<Desired> = read(&path).filter(|have: &Desired| have.device == device);
    let limits = have.as_ref().map_or(limits, |have| {
        limits.or_larger(MpsLimits {
            threads: have.thread_percentage,
            memory_mib: have.memory_mib,
            multi_user: have.multi_user,
        })
    });
    let wanted = Desired {
        format: FORMAT,
        device: device.to_owned(),
        thread_percentage: limits.threads,
        memory_mib: limits.memory_mib,
        multi_user: limits.multi_user,
    };
    if have.as_ref() != Some(&wanted) {
        let part = path.with_extension("part");
        let bytes = serde_json::to_vec(&wanted).map_err(io::Error::from);
        let written = bytes.and_then(|bytes| fs::write(&part, bytes)).and_then(|()| fs::rename(&part, &path));
        // If the supervisor removed the directory in between, the caller sees that and retries.
        match written {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            written => written.map_err(failed(&path))?,
        }
    }
    Ok(wanted)
}

fn watch(dir: &Path) -> Result<DirWatcher, MpsError> {
    let watching = DirWatcher::new().and_then(|changes| changes.watch(dir).map(|()| changes));
    watching.map_err(|cause| MpsError::Watch { path: dir.to_owned(), cause })
}

/// Waits for a change; returns false at the deadline.
async fn wait_for_change(changes: &DirWatcher, dir: &Path, by: Instant) -> Result<bool, MpsError> {
    match timeout_at(by, changes.next()).await {
        Err(_) => Ok(false),
        Ok(Err(cause)) => Err(MpsError::Watch { path: dir.to_owned(), cause }),
        Ok(Ok(())) => Ok(true),
    }
}

/// Reads a file of the supervisor; a file that cannot be parsed counts as missing.
fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let bytes = fs::read(path).ok()?;
    serde_json::from_slice(&bytes)
        .inspect_err(
            |error| tracing::warn!(path = %path.display(), %error, "cannot parse the file; ignoring it"),
        )
        .ok()
}

fn remove(removed: io::Result<()>, path: &Path) -> Result<(), MpsError> {
    match removed {
        Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
            Err(MpsError::Remove { path: path.to_owned(), cause })
        }
        _ => Ok(()),
    }
}
