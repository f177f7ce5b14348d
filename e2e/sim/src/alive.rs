//! Processes that really run: their entries in the state end with them.
//!
//! Hardware lets go of what a process held when the process dies, however it
//! dies. So a real process (an MPS server, `divvy-sim client`) holds a file lock
//! for each entry it made, and whoever next changes the state takes out the
//! entries whose lock nobody holds. A lock works across PID namespaces and is
//! never mistaken for another process that got the number; an entry without a
//! lock was made by hand and stays.

use crate::code::Code;
use crate::control::LOCK;
use crate::mig::memory_mib;
use crate::sim::{Failure, Sim};
use crate::state::{Process, State};
use rustix::fs::{FlockOperation, Mode, OFlags};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// Directory of the locks below the state's.
const DIR: &str = "alive";
/// Numbers from here on are no process ids (the kernel's largest is 4194304): for processes of other PID
/// namespaces whose own number is taken.
const BEYOND_PIDS: u32 = 5_000_000;

/// A real process's entry in the state. It ends with the process, or when it is dropped and somebody looks.
#[derive(Debug)]
pub struct Alive {
    /// The number it was entered under.
    pub pid: u32,
    _lock: OwnedFd,
}

impl Sim {
    /// Enters a real process, under its number or, where a living one has that, another. MEMORY if the GPU or the
    /// instance has not so much left; IN_USE if the compute mode keeps it out.
    pub fn enter(&self, slot: usize, process: Process) -> Result<Alive, Failure> {
        self.update(|state| {
            let (pid, lock) = take_number(&self.dir().join(DIR), process.pid)?;
            let process = Process { pid, ..process };
            let gpu = state.gpu(slot)?;
            let gi = process.instance.map(|(gi, _)| gi);
            if gpu.used_mib(gi) + process.memory_mib > memory_mib(gpu, gi) {
                return Err(Code::Memory);
            }
            if gpu.room_in_cgroup(process.pid).is_some_and(|room| process.memory_mib << 20 > room) {
                return Err(Code::Memory);
            }
            state.add_process(slot, process)?;
            Ok(Alive { pid, _lock: lock })
        })
    }

    /// Takes out what dead processes left. Changing the state does so too.
    pub fn bury(&self) -> Result<(), Failure> {
        let any = std::fs::read_dir(self.dir().join(DIR)).is_ok_and(|mut names| names.next().is_some());
        if any { self.update(|_| Ok(())) } else { Ok(()) }
    }
}

/// Locks the file of the number, or of one beyond all process ids.
fn take_number(dir: &Path, pid: u32) -> Result<(u32, OwnedFd), Code> {
    std::fs::create_dir_all(dir).map_err(|_| Code::OperatingSystem)?;
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    std::iter::once(pid)
        .chain(BEYOND_PIDS..BEYOND_PIDS + 10_000)
        .find_map(|pid| {
            let file = rustix::fs::open(dir.join(pid.to_string()), flags, Mode::from_raw_mode(0o644)).ok()?;
            rustix::fs::flock(&file, LOCK).ok()?;
            Some((pid, file))
        })
        .ok_or(Code::NoPermission)
}

/// The locks that nobody holds. The state's lock is held, so none is about to be taken.
pub(crate) fn dead(dir: &Path) -> Vec<(u32, PathBuf)> {
    let Ok(names) = std::fs::read_dir(dir.join(DIR)) else { return Vec::new() };
    names
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let path = entry.path();
            let file = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
            rustix::fs::flock(&file, LOCK).ok()?;
            // Not left to the end of the file: a child that another thread is just starting has it open too, and
            // would keep the lock until it runs its program.
            rustix::fs::flock(&file, FlockOperation::Unlock).ok()?;
            Some((pid, path))
        })
        .collect()
}

/// Takes their entries out of the state.
pub(crate) fn take_out(state: &mut State, dead: &[(u32, PathBuf)]) {
    for gpu in &mut state.gpus {
        gpu.processes.retain(|process| !dead.iter().any(|(pid, _)| *pid == process.pid));
    }
}
