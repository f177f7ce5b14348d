//! MPS control daemons, asked for by files ([`divvy_api::mps`]) and run by the
//! keeper, so that they outlive this daemon and its upgrades.
//!
//! What is wanted is written and what there is comes back through inotify;
//! whoever waits does so under the GPU's lock and with a deadline. A keeper that
//! is not there delays the claims that need it and nobody else.
//!
//! The clients of a daemon are one trust domain: each of them, of whatever user,
//! must reach the daemon's pipe directory and share memory with its server, so
//! both directories are open to all, with the sticky bit that keeps one client
//! from removing what another made.

use crate::changes::Changes;
use crate::paths::HostPaths;
use crate::plan::Part;
use crate::sharing::MpsLimits;
use divvy_api::mps::{ACTUAL, Actual, DESIRED, DIRECTORY, Desired, FORMAT, Phase, Process};
use serde::de::DeserializeOwned;
use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// How long a daemon may take to answer on its pipe.
pub const START_WITHIN: Duration = Duration::from_secs(15);
/// How long a daemon may take to end; it is killed by the keeper before.
pub const STOP_WITHIN: Duration = Duration::from_secs(8);
/// The same where no keeper has ever told of a daemon.
const UNANSWERED_WITHIN: Duration = Duration::from_millis(500);

const OPEN_TO_ALL: u32 = 0o1777;

/// Why there is no daemon, or still one.
#[derive(Debug, thiserror::Error)]
pub enum MpsError {
    #[error("{path} cannot be made")]
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
        "MPS control daemon for {part} is not ready ({state}); is divvy-keeper running on this node? see its log"
    )]
    NotReady { part: Part, state: String },
    #[error("MPS control daemon for {part} has not ended; is divvy-keeper running on this node? see its log")]
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

    /// Makes it.
    pub fn make(&self) -> Result<(), MpsError> {
        let made = DirBuilder::new().recursive(true).mode(0o755).create(&self.dir);
        made.map_err(|cause| MpsError::Dir { path: self.dir.clone(), cause })
    }

    /// The directory of one daemon.
    pub fn of(&self, part: &Part) -> PathBuf {
        self.dir.join(target(part))
    }

    /// A daemon for the device of that UUID, with these defaults or, where it
    /// runs already, the larger ones. Returns when it answers.
    pub async fn start(
        &self,
        part: &Part,
        device: &str,
        limits: MpsLimits,
        by: Instant,
    ) -> Result<(), MpsError> {
        let dir = self.of(part);
        let mut changes: Option<Changes> = None;
        loop {
            let wanted = ask(&dir, device, limits)?;
            if let Some(changes) = &changes {
                // The keeper may have removed the directory, and this is another.
                let _gone_again = changes.watch(&dir);
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
                // What came before the watch is looked at once more.
                continue;
            };
            if !woken(changes, &dir, by).await? {
                let state = match actual {
                    None => "nobody has answered".to_owned(),
                    Some(Actual { phase: Phase::Ready, .. }) => "with other settings".to_owned(),
                    Some(actual) => actual.phase.to_string(),
                };
                return Err(MpsError::NotReady { part: part.clone(), state });
            }
        }
    }

    /// Returns when the daemon has ended and its directory is gone.
    pub async fn stop(&self, part: &Part, by: Instant) -> Result<(), MpsError> {
        let dir = self.of(part);
        let unanswered = by.min(Instant::now() + UNANSWERED_WITHIN);
        let mut changes: Option<Changes> = None;
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
            if !woken(changes, &dir, by).await? {
                break;
            }
        }
        // Without a keeper nobody removes the directory of a daemon that is gone.
        let actual: Option<Actual> = read(&dir.join(ACTUAL));
        if actual.and_then(|actual| actual.process).is_some_and(|process| self.lives(process)) {
            return Err(MpsError::NotStopped { part: part.clone() });
        }
        tracing::warn!(%part, "divvy-keeper has not removed an MPS directory; its daemon is gone, so it is removed");
        let tree = dir.clone();
        let removed = tokio::task::spawn_blocking(move || divvy_tree::remove(&tree)).await;
        remove(removed.unwrap_or_else(|cause| Err(io::Error::other(cause))), &dir)
    }

    /// Wants the daemon of a directory no more; what is not there is fine.
    pub fn release(&self, dir: &Path) -> Result<(), MpsError> {
        let desired = dir.join(DESIRED);
        remove(fs::remove_file(&desired), &desired)
    }

    /// What the keeper says of a part's daemon.
    pub fn actual(&self, part: &Part) -> Option<Actual> {
        read(&self.of(part).join(ACTUAL))
    }

    /// Directories of daemons, by target.
    pub fn targets(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }

    fn lives(&self, process: Process) -> bool {
        let stat = self.process_root.join(process.pid.to_string()).join("stat");
        let Ok(text) = fs::read_to_string(stat) else { return false };
        // Behind the command, which may hold anything but ends at the last `)`: field 3 and on.
        let fields = text.rsplit_once(')').map(|(_, fields)| fields.split_whitespace());
        fields.and_then(|mut fields| fields.nth(19)?.parse().ok()) == Some(process.start_time)
    }
}

/// The name of a part's directory.
pub fn target(part: &Part) -> String {
    match part {
        Part::Whole { gpu } => gpu.to_string(),
        Part::Instance(key) => format!("{}-{}-{}", key.gpu, key.profile_id, key.placement.start),
    }
}

/// Has `desired.json` say at least this, and gives what it says. The GPU's lock
/// makes us its only writer.
fn ask(dir: &Path, device: &str, limits: MpsLimits) -> Result<Desired, MpsError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |cause| MpsError::Dir { path, cause }
    };
    for (path, mode) in [
        (dir.to_owned(), 0o755),
        (dir.join("pipe"), OPEN_TO_ALL),
        (dir.join("log"), 0o755),
        (dir.join("shm"), OPEN_TO_ALL),
    ] {
        if !path.is_dir() {
            DirBuilder::new().recursive(true).mode(0o755).create(&path).map_err(failed(&path))?;
            // Not by creation: the umask would take a part of it.
            fs::set_permissions(&path, Permissions::from_mode(mode)).map_err(failed(&path))?;
        }
    }
    let path = dir.join(DESIRED);
    let have: Option<Desired> = read(&path).filter(|have: &Desired| have.device == device);
    let limits = have.as_ref().map_or(limits, |have| {
        limits.or_more(MpsLimits {
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
        // The keeper may have removed the directory under us: its end is then ours to see.
        match written {
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            written => written.map_err(failed(&path))?,
        }
    }
    Ok(wanted)
}

fn watch(dir: &Path) -> Result<Changes, MpsError> {
    let watching = Changes::new().and_then(|changes| changes.watch(dir).map(|()| changes));
    watching.map_err(|cause| MpsError::Watch { path: dir.to_owned(), cause })
}

/// Waits for a change; false at the deadline.
async fn woken(changes: &Changes, dir: &Path, by: Instant) -> Result<bool, MpsError> {
    match timeout_at(by, changes.next()).await {
        Err(_) => Ok(false),
        Ok(Err(cause)) => Err(MpsError::Watch { path: dir.to_owned(), cause }),
        Ok(Ok(())) => Ok(true),
    }
}

/// A file of the other side; one that cannot be understood is none.
fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let bytes = fs::read(path).ok()?;
    serde_json::from_slice(&bytes)
        .inspect_err(|error| tracing::warn!(path = %path.display(), %error, "cannot be understood"))
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
