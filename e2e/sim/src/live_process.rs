//! State entries of real processes. They are removed when the process dies.
//!
//! An MPS server or `divvy-sim client` holds a file lock for each entry that it makes. The next
//! change of the state removes all entries with a lock file that is not locked. Unlike process ids,
//! locks work across PID namespaces and are not reused. Entries without a lock file were made by
//! hand and stay.

use crate::code::Code;
use crate::file_lock::TRY_LOCK;
use crate::state::State;
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Directory of the lock files, in the state's directory.
pub(crate) const DIR: &str = "alive";
/// Larger than any process id (the kernel's limit is 4194304). Used for processes of other PID
/// namespaces if a living process already has their id.
const FIRST_SYNTHETIC_PID: u32 = 5_000_000;

/// A real process's entry in the state. The entry is removed at the next change of the state after
/// the process died or the value was dropped.
#[derive(Debug)]
pub struct LiveProcess {
    /// Process id of the entry.
    pub pid: u32,
    pub(crate) _lock: OwnedFd,
}

/// Locks the file of a process id, or of a synthetic id if that one is taken.
pub(crate) fn lock_pid(dir: &Path, pid: u32) -> Result<(u32, OwnedFd), Code> {
    std::fs::create_dir_all(dir).map_err(|_| Code::OperatingSystem)?;
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    std::iter::once(pid)
        .chain(FIRST_SYNTHETIC_PID..FIRST_SYNTHETIC_PID + 10_000)
        .find_map(|pid| {
            let file = rustix::fs::open(dir.join(pid.to_string()), flags, Mode::from_raw_mode(0o644)).ok()?;
            rustix::fs::flock(&file, TRY_LOCK).ok()?;
            Some((pid, file))
        })
        .ok_or(Code::NoPermission)
}

/// Ids and paths of the lock files that are not locked. The caller holds the state's lock, so no
/// process is about to lock one.
pub(crate) fn dead(dir: &Path) -> Vec<(u32, PathBuf)> {
    let Ok(names) = std::fs::read_dir(dir.join(DIR)) else { return Vec::new() };
    names
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let path = entry.path();
            let file = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
            rustix::fs::flock(&file, TRY_LOCK).ok()?;
            // Unlocked explicitly: a child that another thread is starting has the file open too,
            // and would hold the lock until it executes its program.
            rustix::fs::flock(&file, FlockOperation::Unlock).ok()?;
            Some((pid, path))
        })
        .collect()
}

/// Removes the entries of dead processes from the state.
pub(crate) fn remove_entries(state: &mut State, dead: &[(u32, PathBuf)]) {
    for gpu in &mut state.gpus {
        gpu.processes.retain(|process| !dead.iter().any(|(pid, _)| *pid == process.pid));
    }
}
