//! File locks between the processes of one simulator.

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// The operation with which every lock of the simulator is taken: exclusive, without waiting.
pub(crate) const TRY_LOCK: FlockOperation = FlockOperation::NonBlockingLockExclusive;
/// First pause between two attempts to take a lock. Each pause is twice as long as the one before,
/// up to [`MAX_RETRY_PAUSE`].
const FIRST_RETRY_PAUSE: Duration = Duration::from_micros(20);
const MAX_RETRY_PAUSE: Duration = Duration::from_millis(1);

/// A file lock. The kernel releases it when the process dies.
#[derive(Debug)]
pub(crate) struct Lock(OwnedFd);

/// The reason why a lock was not taken.
#[derive(Debug)]
pub(crate) enum LockError {
    /// The file cannot be opened or locked; the operation that failed, and its error.
    Io(&'static str, Errno),
    /// Another process has held the lock for the whole timeout.
    Held,
}

/// Takes the lock on `path`, and creates that file if need be. Waits for at most `timeout`.
pub(crate) fn lock(path: &Path, timeout: Duration) -> Result<Lock, LockError> {
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o644))
        .map_err(|errno| LockError::Io("open", errno))?;
    let (begin, mut pause) = (Instant::now(), FIRST_RETRY_PAUSE);
    loop {
        match rustix::fs::flock(&file, TRY_LOCK) {
            Ok(()) => return Ok(Lock(file)),
            Err(Errno::WOULDBLOCK | Errno::INTR) => {}
            Err(errno) => return Err(LockError::Io("lock", errno)),
        }
        if begin.elapsed() > timeout {
            return Err(LockError::Held);
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(MAX_RETRY_PAUSE);
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Unlocked explicitly: a child that was forked meanwhile still has the file open, so that
        // closing it here would not release the lock.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}
