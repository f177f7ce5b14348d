//! Restricts NVML's results to the share.
//!
//! The library around this crate knows the structures and their versions; this module computes the
//! values. Memory: total is the share's limit, used is the sum of its processes, reserved is 0, so
//! the parts add up. Processes: only those of the share, under the pid that the caller knows, with
//! their charge. Utilisation: percent of the share's compute limit, not of the device.

use crate::device::MemoryUsage;
use crate::process_state::Device;
use crate::system::System;
use crate::throttle;
use divvy_pages::SlotState;

/// `nvmlMemory_t` and `nvmlMemory_v2_t`, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    pub total: u64,
    pub free: u64,
    pub used: u64,
    /// Only version 2 has this field.
    pub reserved: u64,
}

/// A process of the share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// In the caller's pid namespace if the process belongs to it, otherwise in the process's own.
    pub pid: u32,
    /// Bytes charged to it on the device.
    pub bytes: u64,
}

impl MemoryUsage {
    /// The device's memory as the share sees it.
    pub fn memory(&self, device: MemoryInfo) -> MemoryInfo {
        let total = self.total(device.total);
        let free = self.free(device.free).min(total);
        // Used is the charge. Memory of other shares is neither free nor used here. It shows only
        // if the node has promised more than the device has.
        MemoryInfo { total, free, used: self.used(device.total).min(total - free), reserved: 0 }
    }
}

/// Converts percent of the device to percent of the share's limit ([`Device::compute_percent`]), at
/// most 100.
pub fn utilisation(busy: u32, part: u32) -> u32 {
    (busy.min(100) * 100 / part.clamp(1, 100)).min(100)
}

impl<S: System> Device<'_, S> {
    /// Percent of the device's time that the pages together guarantee or limit; 100 if a page does
    /// neither.
    pub fn compute_percent(&self) -> u32 {
        let percent = |rate: u64| u32::try_from(rate / (throttle::SECOND_NS / 100)).unwrap_or(100);
        let policies = self.pages.shares().filter_map(|share| share.policy());
        policies.fold(0_u32, |sum, (_, policy)| sum.saturating_add(percent(policy.compute.rate()))).min(100)
    }

    /// Returns the share's process that NVML lists under `pid`. NVML uses the host pid, which the
    /// node has written into the slot, or the pid in the caller's namespace. `None` if it is not of
    /// this share.
    pub fn process(&self, pid: u32) -> Option<Process> {
        let mut found = None::<Process>;
        self.for_each_process(|host, process| {
            if host == pid || host == 0 && process.pid == pid {
                let bytes = found.map_or(0, |found| found.bytes);
                found = Some(Process { bytes: bytes.saturating_add(process.bytes), ..process });
            }
        });
        found
    }

    /// Calls `call` with every living process of the share that holds memory: its host pid (0 if
    /// the node has not found it yet) and the share's view. A process with several pages is passed
    /// once per page.
    pub fn for_each_process(&self, mut call: impl FnMut(u32, Process)) {
        for account in self.pages.shares().filter_map(|share| share.account()) {
            for slot in account.slots().iter().filter(|slot| slot.owner().state() == SlotState::Live) {
                let process = Process { pid: slot.owner().pid(), bytes: slot.effective_bytes() };
                if process.bytes > 0 {
                    call(slot.host_pid(), process);
                }
            }
        }
    }
}
