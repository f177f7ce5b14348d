//! Lock files that assign each GPU to exactly one agent.
//!
//! While a daemon is replaced, two agents run. The second one takes over each GPU as soon as the
//! first one exits, however it exits, because the kernel releases the locks of a dead process. The
//! files are never removed: an agent cannot know whether another one has just opened the file.

use divvy_pages::GpuUuid;
use rustix::fs::{FlockOperation, flock};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The locks that this agent holds.
#[derive(Debug, Default)]
pub(super) struct GpuLocks {
    directory: PathBuf,
    held: Mutex<BTreeMap<GpuUuid, File>>,
}

impl GpuLocks {
    pub(super) fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned(), held: Mutex::default() }
    }

    /// Acquires the lock of a GPU if no other agent holds it. Returns whether this agent holds it.
    pub(super) fn try_acquire(&self, gpu: GpuUuid) -> bool {
        let mut held = self.held();
        if held.contains_key(&gpu) {
            return true;
        }
        let path = self.directory.join(format!("agent-GPU-{gpu}.lock"));
        match lock(&path) {
            Ok(Some(file)) => {
                tracing::info!(%gpu, "auditing the shares of this GPU");
                held.insert(gpu, file);
                true
            }
            // Another agent holds it.
            Ok(None) => false,
            Err(cause) => {
                tracing::warn!(path = %path.display(), %cause, "shares not audited: lock file not usable");
                false
            }
        }
    }

    pub(super) fn holds(&self, gpu: GpuUuid) -> bool {
        self.held().contains_key(&gpu)
    }

    /// Releases the locks of all other GPUs.
    pub(super) fn retain(&self, is_kept: impl Fn(&GpuUuid) -> bool) {
        self.held().retain(|gpu, _| is_kept(gpu));
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, File>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Locks the file; `None` if another process holds the lock.
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
    fn a_gpu_has_one_agent_until_that_one_releases_it() {
        let dir = tempfile::tempdir().unwrap();
        let [one, other] = [GpuUuid([1; 16]), GpuUuid([2; 16])];
        let (first, second) = (GpuLocks::new(dir.path()), GpuLocks::new(dir.path()));
        let take = |agent: &GpuLocks| [one, other].map(|gpu| agent.try_acquire(gpu));
        assert!(first.try_acquire(one) && first.try_acquire(one));
        assert_eq!(take(&second), [false, true]);
        assert_eq!([one, other].map(|gpu| second.holds(gpu)), [false, true]);
        assert_eq!(take(&first), [true, false]);
        second.retain(|gpu| *gpu == one);
        assert_eq!(take(&first), [true, true]);
        drop(first);
        assert_eq!(take(&second), [true, true]);
    }

    #[test]
    fn no_gpu_is_acquired_without_a_lock_directory() {
        assert!(!GpuLocks::new(Path::new("/nonexistent")).try_acquire(GpuUuid([1; 16])));
    }
}
