//! Memory and utilization of a GPU by process, and memory limits of cgroups.

use crate::code::Code;
use crate::error::NvmlError;
use crate::job::Worker;
use crate::raw::{CgroupMemory, ProcessEntry};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A process on a GPU or on a compute instance, as the GPU driver reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessUse {
    /// The PID in this process's PID namespace.
    pub pid: u32,
    /// GPU instance id and compute instance id; `None` without MIG.
    pub instance: Option<(u32, u32)>,
    /// Device memory in bytes, with contexts; `None` if the GPU driver does not report it.
    pub bytes: Option<u64>,
}

/// Utilization of a GPU by process, from samples that the GPU driver takes a few times a second.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessUtilization {
    /// Percent by PID; processes without utilization are missing.
    pub percent: BTreeMap<u32, u32>,
    /// Time of the last sample, in microseconds since the Unix epoch. Use it as `since_us` of the
    /// next query. `None` if there is no sample.
    pub until_us: Option<u64>,
    /// Whether each sample holds the time of one process. An H100 with time-sliced processes
    /// (driver 580.159) does not divide the time: each sample holds the time of all processes but
    /// names only one of them, as often as it ran. So no two processes have a sample of the same
    /// time. `None` if fewer than two processes have samples.
    pub is_per_process: Option<bool>,
}

impl Worker {
    /// Processes with utilization since `since_us`; `None` if the GPU driver does not report it, as
    /// with MIG on.
    pub(crate) fn process_utilization(
        &mut self,
        since_us: u64,
    ) -> Result<Option<ProcessUtilization>, NvmlError> {
        let device = self.device()?;
        let read = self.call("nvmlDeviceGetProcessUtilization", |nvml| nvml.utilization(device, since_us));
        let samples = match read {
            Ok(samples) => samples,
            Err(error) => return absent(error).map(|_| None),
        };
        let mut newest = BTreeMap::new();
        for (pid, percent, at_us) in samples {
            // Some drivers report several samples of a process; the newest one counts.
            let known = newest.entry(pid).or_insert((at_us, percent));
            *known = (*known).max((at_us, percent));
        }
        let until_us = newest.values().map(|(at_us, _)| *at_us).max();
        let moments: BTreeSet<u64> = newest.values().map(|(at_us, _)| *at_us).collect();
        let is_per_process = (newest.len() > 1).then_some(moments.len() < newest.len());
        let percent = newest.into_iter().map(|(pid, (_, percent))| (pid, percent.min(100))).collect();
        Ok(Some(ProcessUtilization { percent, until_us, is_per_process }))
    }

    /// One entry per process and instance. A process that uses compute and graphics is in two
    /// lists, each with all its memory.
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

    /// Timeouts the memory of a cgroup. False if the GPU driver does not support it.
    pub(crate) fn limit_cgroup_memory(&mut self, cgroup: &Path, limit: u64) -> Result<bool, NvmlError> {
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

    /// The limit and usage of a cgroup; `None` if it has no limit or limits are not supported.
    pub(crate) fn cgroup_memory(&mut self, cgroup: &Path) -> Result<Option<CgroupMemory>, NvmlError> {
        let device = self.device()?;
        let read = self.call("nvmlDeviceGetMemoryLimits_v1", |nvml| nvml.cgroup_memory(device, cgroup));
        read.or_else(|error| absent(error).map(|_| None))
    }
}

/// False for errors of an older GPU driver or of a GPU with MIG on, which lack the feature.
fn absent(error: NvmlError) -> Result<bool, NvmlError> {
    match error.code() {
        Some(Code::FunctionNotFound | Code::NotSupported) => Ok(false),
        _ => Err(error),
    }
}
