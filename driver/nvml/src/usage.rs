//! Who uses a GPU's memory, and what a cgroup may have of it.

use crate::code::Code;
use crate::error::NvmlError;
use crate::job::Worker;
use crate::raw::{CgroupMemory, ProcessEntry};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A process on a GPU or on one of its compute instances, by the GPU driver's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessUse {
    /// As this process's PID namespace numbers it.
    pub pid: u32,
    /// GPU instance and compute instance; none on a GPU without.
    pub instance: Option<(u32, u32)>,
    /// Device memory, contexts included; absent where the GPU driver does not say.
    pub bytes: Option<u64>,
}

/// How much of a GPU's time its processes had, by samples that the GPU driver takes a few times a second.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessTimes {
    /// Per cent by process id, without those that had none.
    pub percent: BTreeMap<u32, u32>,
    /// When the last sample was taken, in microseconds of the system clock: what is asked for from there on begins
    /// where this ends. None where nobody had any.
    pub until_us: Option<u64>,
    /// Whether a sample says what each process had of it. An H100 whose processes take turns (driver 580.159) says what all of
    /// them had and names one, now this one, now that, each as often as it had the GPU; so two processes are never told with
    /// one time. None where that does not show: fewer than two had any.
    pub divides: Option<bool>,
}

impl Worker {
    /// Of those that had some time since then; none where the GPU driver does not say, as with MIG on.
    pub(crate) fn times(&mut self, since_us: u64) -> Result<Option<ProcessTimes>, NvmlError> {
        let device = self.device()?;
        let read = self.call("nvmlDeviceGetProcessUtilization", |nvml| nvml.utilization(device, since_us));
        let samples = match read {
            Ok(samples) => samples,
            Err(error) => return absent(error).map(|_| None),
        };
        let mut newest = BTreeMap::new();
        for (pid, percent, at_us) in samples {
            // Where a driver tells several of a process.
            let known = newest.entry(pid).or_insert((at_us, percent));
            *known = (*known).max((at_us, percent));
        }
        let until_us = newest.values().map(|(at_us, _)| *at_us).max();
        let moments: BTreeSet<u64> = newest.values().map(|(at_us, _)| *at_us).collect();
        let divides = (newest.len() > 1).then_some(moments.len() < newest.len());
        let percent = newest.into_iter().map(|(pid, (_, percent))| (pid, percent.min(100))).collect();
        Ok(Some(ProcessTimes { percent, until_us, divides }))
    }

    /// One entry for each process and instance. A process that computes and draws is in
    /// two lists, with all its memory in each.
    pub(crate) fn usage(&mut self) -> Result<Vec<ProcessUse>, NvmlError> {
        let device = self.device()?;
        let entries = self.call("nvmlDeviceGetComputeRunningProcesses_v3", |nvml| nvml.processes(device))?;
        let mut uses = BTreeMap::<_, Option<u64>>::new();
        for ProcessEntry { pid, bytes, instance } in entries {
            let known = uses.entry((pid, instance)).or_default();
            *known = (*known).max(bytes);
        }
        Ok(uses.into_iter().map(|((pid, instance), bytes)| ProcessUse { pid, instance, bytes }).collect())
    }

    /// Has a cgroup held to that limit. False where the GPU driver has no such limits.
    pub(crate) fn hold_cgroup(&mut self, cgroup: &Path, limit: u64) -> Result<bool, NvmlError> {
        let device = self.device()?;
        let read = self.call("nvmlDeviceGetMemoryLimits_v1", |nvml| nvml.cgroup_memory(device, cgroup));
        match read {
            Ok(Some(CgroupMemory { hard, .. })) if hard == Some(limit) => return Ok(true),
            Ok(_) => {}
            Err(error) => return absent(error),
        }
        let set = self
            .call("nvmlDeviceSetMemoryLimits_v1", |nvml| nvml.set_cgroup_memory(device, cgroup, Some(limit)));
        set.map(|()| true).or_else(absent)
    }

    /// What a cgroup may have and has; none where it has no limit, or none can be set.
    pub(crate) fn cgroup_memory(&mut self, cgroup: &Path) -> Result<Option<CgroupMemory>, NvmlError> {
        let device = self.device()?;
        let read = self.call("nvmlDeviceGetMemoryLimits_v1", |nvml| nvml.cgroup_memory(device, cgroup));
        read.or_else(|error| absent(error).map(|_| None))
    }
}

/// An older GPU driver, or a GPU that is cut into instances, has no such thing.
fn absent(error: NvmlError) -> Result<bool, NvmlError> {
    match error.code() {
        Some(Code::FunctionNotFound | Code::NotSupported) => Ok(false),
        _ => Err(error),
    }
}
