//! GPU usage of CUDA processes: counters in one mapped file beside the state.
//!
//! CUDA programs allocate and launch too often for the locked state file, so each process with the
//! simulated libcuda maps the file `cuda`. It has a *partition* for each GPU and GPU instance, and
//! a *row* for each attached process. Memory counts stay exact to the byte even if a process is
//! killed in the middle of a change. The row first announces the change, one compare-exchange on
//! the partition applies it, and the row then records it. From that, other processes can tell
//! whether a dead process's last change was applied.

#![allow(unsafe_code, reason = "a mapped file, and locks on bytes of a file")]

mod cgroup;
mod gpu_process;
mod gpu_usage;
mod layout;
mod locks;
mod managed;
mod monitor;
mod time;

pub use gpu_process::{AttachError, GpuProcess};
pub use gpu_usage::GpuUsage;
pub use layout::{GRANULE_BYTES, MANAGED_PAGE_BYTES, Meeting, Place, ProcessUsage};
pub use monitor::{NamedProcess, PartitionTimes, ProcessTime, UsageMonitor, Utilization};
pub use time::{Kernel, Mark, now};

use crate::state::{Process, ProcessKind, State};

/// Adds the GPU processes to the processes of the state, so that NVML's lists, memory figures and
/// "in use" checks include them. Returns the new entries, by slot and process id.
pub(crate) fn show(state: &mut State, gpu_processes: &[ProcessUsage]) -> Vec<(usize, u32)> {
    let mut added: Vec<(usize, u32)> = Vec::new();
    for found in gpu_processes {
        let slot = found.place.slot;
        let Some(gpu) = state.gpus.get_mut(slot) else { continue };
        let is_known = added.contains(&(slot, found.pid));
        if list(&mut gpu.processes, found, is_known) {
            added.push((slot, found.pid));
        }
    }
    added
}

/// Adds the GPU processes of one GPU to a list of its processes.
pub(crate) fn with_gpu_processes(
    mut processes: Vec<Process>,
    gpu_processes: &[ProcessUsage],
) -> Vec<Process> {
    let mut added = Vec::new();
    for found in gpu_processes {
        if list(&mut processes, found, added.contains(&found.pid)) {
            added.push(found.pid);
        }
    }
    processes
}

/// Adds a GPU process to a list, or its memory to the entry of an earlier GPU process with the same
/// process id. Returns whether it is a new entry.
fn list(processes: &mut Vec<Process>, found: &ProcessUsage, is_gpu_process: bool) -> bool {
    let memory_mib = found.bytes.div_ceil(1 << 20);
    match processes.iter_mut().find(|process| process.pid == found.pid) {
        // Two libraries in one process share a process id. An entry that was made by hand stays as
        // it is.
        Some(known) if is_gpu_process => known.memory_mib += memory_mib,
        Some(_) => {}
        None => {
            let (pid, name, instance) = (found.pid, found.name.clone(), found.place.instance);
            processes.push(Process { pid, name, kind: ProcessKind::Compute, instance, memory_mib });
            return true;
        }
    }
    false
}

/// Removes the entries that [`show`] added. They are never written to the state file.
pub(crate) fn hide(state: &mut State, added: &[(usize, u32)]) {
    for (slot, pid) in added {
        if let Some(gpu) = state.gpus.get_mut(*slot) {
            gpu.processes.retain(|process| process.pid != *pid);
        }
    }
}
