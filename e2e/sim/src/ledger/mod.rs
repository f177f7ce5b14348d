//! What CUDA processes use of the GPUs: counters in one mapped file beside the state.
//!
//! A CUDA program allocates and launches far too often for the locked state. So the file `cuda` is mapped by every
//! process that has the simulated libcuda loaded, and all that changes often is an atomic in it: per *part* (a GPU, or a
//! GPU instance of it) the memory that is used and the limit, per *guest* (a process's contexts on one part) its share of
//! that. [`Sim::read`](crate::Sim::read) shows guests as processes of the state, so that everything that looks at processes (NVML's lists,
//! memory, "in use") sees them; they are never written to the state.
//!
//! **Exact to the byte, whenever a process is killed.** Memory is counted in two places, and a process may die between
//! the two writes. Each change is therefore announced in the guest's row first (the row's use once it is done, under a
//! number), then made by one compare-exchange on the part that also carries row and number, then noted in the row. Who
//! replaces the part's word notes for the guest named there that its change was made. So whoever finds a dead guest
//! knows whether its last change was, completes or forgets it, and gives back exactly what the guest used.
//!
//! Managed memory is counted apart, in pages that are there ([`managed`]): it makes room for all that is counted so.
//!
//! **Alive is who holds its lock.** A guest holds a lock on its row's byte of the file `cuda.lock`. The kernel drops it
//! with the process, however it dies, and tells a reader in another PID namespace the guest's number there. These locks
//! belong to processes and end when a process closes *any* descriptor of the file, so it is never closed once opened.

#![allow(unsafe_code, reason = "a mapped file, and locks on bytes of a file")]

mod cgroup;
mod engine;
mod guest;
mod locks;
mod managed;
mod map;
mod samples;
mod wait;
mod watch;

pub use engine::{Kernel, Mark, now};
pub use guest::{EnterError, Guest};
pub use managed::PAGE;
pub use map::{Ledger, Place};
pub use watch::{Named, Sampled, Served, Watcher};

use crate::state::{Process, ProcessKind, State};

/// Memory is counted in these; CUDA hands out no less.
pub const GRANULE: u64 = 512;

/// A process that has contexts on a part, as the ledger shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    pub place: Place,
    /// As this process's PID namespace numbers it; its own number where it is in none of this one.
    pub pid: u32,
    pub name: String,
    pub bytes: u64,
}

/// Adds the guests to the state's processes: the entries that were added, by slot and process id.
pub(crate) fn show(state: &mut State, uses: &[Use]) -> Vec<(usize, u32)> {
    let mut added: Vec<(usize, u32)> = Vec::new();
    for found in uses {
        let slot = found.place.slot;
        let Some(gpu) = state.gpus.get_mut(slot) else { continue };
        let is_known = added.contains(&(slot, found.pid));
        if list(&mut gpu.processes, found, is_known) {
            added.push((slot, found.pid));
        }
    }
    added
}

/// A GPU's processes with its guests among them.
pub(crate) fn with_guests(mut processes: Vec<Process>, uses: &[Use]) -> Vec<Process> {
    let mut added = Vec::new();
    for found in uses {
        if list(&mut processes, found, added.contains(&found.pid)) {
            added.push(found.pid);
        }
    }
    processes
}

/// Adds a guest, or what it uses to an entry that is a guest's; whether it is a new entry.
fn list(processes: &mut Vec<Process>, found: &Use, is_guest: bool) -> bool {
    let memory_mib = found.bytes.div_ceil(1 << 20);
    match processes.iter_mut().find(|process| process.pid == found.pid) {
        // Two libraries in one process, or an entry made by hand.
        Some(known) if is_guest => known.memory_mib += memory_mib,
        Some(_) => {}
        None => {
            let (pid, name, instance) = (found.pid, found.name.clone(), found.place.instance);
            processes.push(Process { pid, name, kind: ProcessKind::Compute, instance, memory_mib });
            return true;
        }
    }
    false
}

/// Takes them out again.
pub(crate) fn hide(state: &mut State, added: &[(usize, u32)]) {
    for (slot, pid) in added {
        if let Some(gpu) = state.gpus.get_mut(*slot) {
            gpu.processes.retain(|process| process.pid != *pid);
        }
    }
}
