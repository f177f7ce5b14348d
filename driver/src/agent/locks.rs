//! One agent for each GPU: who holds its lock file looks after its shares.
//!
//! A second agent, as while a daemon is replaced, takes over GPU by GPU as soon as the first is gone, however that ended: the
//! kernel gives a dead one's locks back. Files stay behind, as whoever removed one could not know that nobody has just
//! opened it.

use divvy_pages::GpuUuid;
use rustix::fs::{FlockOperation, flock};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The locks that this agent holds.
#[derive(Debug, Default)]
pub(super) struct Locks {
    directory: PathBuf,
    held: Mutex<BTreeMap<GpuUuid, File>>,
}

impl Locks {
    pub(super) fn of(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), held: Mutex::default() }
    }

    /// Whether that GPU is this agent's, which it becomes where it is nobody's.
    pub(super) fn take(&self, gpu: GpuUuid) -> bool {
        let mut held = self.held();
        if held.contains_key(&gpu) {
            return true;
        }
        let path = self.directory.join(format!("agent-GPU-{gpu}.lock"));
        match lock(&path) {
            Ok(Some(file)) => {
                tracing::info!(%gpu, "shares are audited");
                held.insert(gpu, file);
                true
            }
            // Another agent's.
            Ok(None) => false,
            Err(cause) => {
                tracing::warn!(path = %path.display(), %cause, "shares are not audited");
                false
            }
        }
    }

    pub(super) fn has(&self, gpu: GpuUuid) -> bool {
        self.held().contains_key(&gpu)
    }

    /// Lets go of the other GPUs.
    pub(super) fn keep(&self, are_there: impl Fn(&GpuUuid) -> bool) {
        self.held().retain(|gpu, _| are_there(gpu));
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, File>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// None where somebody else has it.
fn lock(path: &Path) -> io::Result<Option<File>> {
    let create = || File::options().create(true).truncate(false).write(true).open(path);
    let file = File::open(path).or_else(|_| create())?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(cause) => Err(cause.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_gpu_has_one_agent_and_another_when_that_lets_go_of_it_or_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let [one, other] = [GpuUuid([1; 16]), GpuUuid([2; 16])];
        let (first, second) = (Locks::of(dir.path()), Locks::of(dir.path()));
        let take = |agent: &Locks| [one, other].map(|gpu| agent.take(gpu));
        assert!(first.take(one) && first.take(one));
        assert_eq!(take(&second), [false, true]);
        assert_eq!([one, other].map(|gpu| second.has(gpu)), [false, true]);
        assert_eq!(take(&first), [true, false]);
        second.keep(|gpu| *gpu == one);
        assert_eq!(take(&first), [true, true]);
        drop(first);
        assert_eq!(take(&second), [true, true]);
    }

    #[test]
    fn without_a_place_for_locks_nobody_audits() {
        assert!(!Locks::of(Path::new("/nonexistent")).take(GpuUuid([1; 16])));
    }
}
