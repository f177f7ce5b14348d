//! NVML's answers, cut down to the share.
//!
//! Which structure an answer stands in, and its versions, are the library's business; here are the
//! numbers. Memory: the share's limit is the total, what its processes use is used, and nothing is reserved,
//! so that the parts add up. Processes: only those of the share, under the pid that the caller knows
//! them by, with what they are charged. Utilisation: of the share's part, not of the device.

use crate::device::{Device, Figures};
use crate::pace;
use crate::system::System;
use divvy_pages::SlotState;

/// `nvmlMemory_t` and `nvmlMemory_v2_t`, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    pub total: u64,
    pub free: u64,
    pub used: u64,
    /// Only version 2 has it.
    pub reserved: u64,
}

/// A process of the share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// In the caller's pid namespace if it is of it, otherwise in its own.
    pub pid: u32,
    /// What it is charged on the device.
    pub bytes: u64,
}

impl Figures {
    /// The device's memory as the share sees it.
    pub fn memory(&self, device: MemoryInfo) -> MemoryInfo {
        let total = self.total(device.total);
        let free = self.free(device.free).min(total);
        // Used is what is charged: memory that others take of the device is neither free nor used here,
        // which only shows where the node promised more than there is.
        MemoryInfo { total, free, used: self.used(device.total).min(total - free), reserved: 0 }
    }
}

/// Percent of the device that the share's processes were seen busy, as percent of its part ([`Device::part`]).
/// Never above 100.
pub fn utilisation(busy: u32, part: u32) -> u32 {
    (busy.min(100) * 100 / part.clamp(1, 100)).min(100)
}

impl<S: System> Device<'_, S> {
    /// Percent of the device's time that its pages together promise, or hold it to; all of it where one does neither.
    pub fn part(&self) -> u32 {
        let percent = |rate: u64| u32::try_from(rate / (pace::SECOND / 100)).unwrap_or(100);
        let policies = self.places.places().filter_map(|place| place.policy());
        policies.fold(0_u32, |sum, (_, policy)| sum.saturating_add(percent(policy.compute.rate()))).min(100)
    }

    /// The process of the share that NVML lists under `pid`: its pid on the host as a rule, which the
    /// node has written into the slot, or its pid in the caller's namespace. `None`: not of this share.
    pub fn process(&self, pid: u32) -> Option<Process> {
        let mut found = None::<Process>;
        self.each(|host, process| {
            if host == pid || host == 0 && process.pid == pid {
                let bytes = found.map_or(0, |found| found.bytes);
                found = Some(Process { bytes: bytes.saturating_add(process.bytes), ..process });
            }
        });
        found
    }

    /// Calls with every living process of the share that holds memory: its pid on the host (0 where the node
    /// has not found it yet) and what the share sees. A process with several pages comes once for each.
    pub fn each(&self, mut call: impl FnMut(u32, Process)) {
        for account in self.places.places().filter_map(|place| place.account()) {
            for slot in account.slots().iter().filter(|slot| slot.owner().state() == SlotState::Live) {
                let process = Process { pid: slot.owner().pid(), bytes: slot.weighs() };
                if process.bytes > 0 {
                    call(slot.host_pid(), process);
                }
            }
        }
    }
}
