//! File locks on single bytes, one for each row. The kernel releases them when the process dies.
//!
//! They are POSIX record locks: a process loses them when it closes *any* descriptor of the file,
//! so the file is never closed once opened. `F_GETLK` translates the holder's process id into the
//! namespace of the process that asks.

use std::fs::File;
use std::io;
use std::os::fd::{IntoRawFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

/// Name of the lock file in the state's directory.
const FILE: &str = "cuda.lock";

/// The lock files that this process has opened, by device and inode. They are never closed.
static OPEN_FILES: Mutex<Vec<((u64, u64), Locks)>> = Mutex::new(Vec::new());
/// Process id and [`token`] of this process. The process id differs after a fork.
static CACHED_TOKEN: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

pub(super) fn create(dir: &Path) -> io::Result<()> {
    File::options().write(true).create(true).truncate(true).open(dir.join(FILE)).map(drop)
}

/// Identifies this process: its process id and start time, so that a later process with the same id
/// has another token.
pub(super) fn token() -> u64 {
    let pid = u64::from(std::process::id());
    if CACHED_TOKEN[0].load(Ordering::Acquire) == pid {
        return CACHED_TOKEN[1].load(Ordering::Relaxed);
    }
    // Field 22 of `/proc/self/stat`: start time in clock ticks since boot.
    let began = std::fs::read_to_string("/proc/self/stat")
        .ok()
        .and_then(|stat| stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse::<u64>().ok());
    let token = pid << 32 | began.unwrap_or(0) & 0xffff_ffff;
    CACHED_TOKEN[1].store(token, Ordering::Relaxed);
    CACHED_TOKEN[0].store(pid, Ordering::Release);
    token
}

/// The open lock files, by device and inode.
type Open = Vec<((u64, u64), Locks)>;

/// Locks the list. Gives up after a second, because a fork may leave it locked forever.
fn list() -> Option<MutexGuard<'static, Open>> {
    let begin = Instant::now();
    loop {
        match OPEN_FILES.try_lock() {
            Ok(list) => return Some(list),
            // A panic cannot leave the list in an inconsistent state.
            Err(TryLockError::Poisoned(list)) => return Some(list.into_inner()),
            Err(TryLockError::WouldBlock) if begin.elapsed() > Duration::from_secs(1) => return None,
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
}

/// The locks of one mapped file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Locks(RawFd);

impl Locks {
    pub(super) fn open(dir: &Path) -> io::Result<Self> {
        let path = dir.join(FILE);
        let inode = |data: std::fs::Metadata| (data.dev(), data.ino());
        let here = inode(std::fs::metadata(&path)?);
        let mut open = list().ok_or_else(|| io::Error::from(io::ErrorKind::WouldBlock))?;
        if let Some((_, locks)) = open.iter().find(|(known, _)| *known == here) {
            return Ok(*locks);
        }
        let file = File::options().read(true).write(true).open(&path).or_else(|_| File::open(&path))?;
        let here = inode(file.metadata()?);
        let locks = Self(file.into_raw_fd());
        open.push((here, locks));
        Ok(locks)
    }

    /// Takes the lock unless another process holds it.
    pub(super) fn take(self, row: usize) -> bool {
        self.call(libc::F_SETLK, libc::F_WRLCK, row).is_some()
    }

    pub(super) fn drop(self, row: usize) {
        // Unlocking fails only if there is no lock.
        let _ = self.call(libc::F_SETLK, libc::F_UNLCK, row);
    }

    /// Process id of the owner of a row, as seen from this process; none if the owner has died.
    /// `mine` is this process's [`token`].
    pub(super) fn holder(self, row: usize, owner: u64, mine: u64) -> Option<u32> {
        if owner == mine {
            return Some(std::process::id());
        }
        let lock = self.call(libc::F_GETLK, libc::F_WRLCK, row)?;
        if lock.l_type == libc::F_UNLCK as i16 {
            return None;
        }
        // F_GETLK returns 0 for a process outside this PID namespace; then its own process id is
        // used.
        Some(u32::try_from(lock.l_pid).ok().filter(|pid| *pid != 0).unwrap_or((owner >> 32) as u32))
    }

    fn call(self, operation: i32, kind: i32, row: usize) -> Option<libc::flock> {
        // SAFETY: all-zero bytes are a valid flock.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        lock.l_type = kind as i16;
        lock.l_whence = libc::SEEK_SET as i16;
        lock.l_start = row as i64;
        lock.l_len = 1;
        // SAFETY: the descriptor is never closed, and `lock` is writable for the answer.
        let done = unsafe { libc::fcntl(self.0, operation, &mut lock) };
        (done == 0).then_some(lock)
    }
}
