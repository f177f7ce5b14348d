//! Memory limits by cgroup, as GPU drivers from R615 on have them: cgroup v2 only, and
//! not on a GPU that is cut into instances.
//!
//! A limit belongs to the cgroup's directory, by inode, and ends with it. Who is in a
//! cgroup is what its `cgroup.procs` and those below it say.

use crate::code::Code;
use crate::state::{CgroupLimit, Gpu, State};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// The first GPU driver that has them.
const SINCE: u32 = 615;
/// No limit: `NVML_DEVICE_MEMORY_LIMIT_MAX`.
const NO_LIMIT: u64 = u64::MAX;

impl State {
    /// FUNCTION_NOT_FOUND where the GPU driver is older than the limits.
    pub fn has_cgroup_limits(&self) -> Result<(), Code> {
        let major = self.driver.split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_some_and(|major| major >= SINCE) { Ok(()) } else { Err(Code::FunctionNotFound) }
    }

    /// Sets what a cgroup may have of a GPU, or takes it back.
    pub fn limit_cgroup(&mut self, slot: usize, path: &str, soft: u64, hard: u64) -> Result<(), Code> {
        self.has_cgroup_limits()?;
        let directory = directory(path)?;
        let gpu = self.gpu_mut(slot)?;
        let total = gpu.model().memory_total_mib << 20;
        let none = (soft, hard) == (0, NO_LIMIT);
        if gpu.mig.current {
            return Err(Code::NotSupported);
        }
        if soft > hard || (!none && soft.max(hard) > total) {
            return Err(Code::InvalidArgument);
        }
        gpu.limits.retain(|limit| limit.directory != directory && limit.holds());
        if !none {
            gpu.limits.push(CgroupLimit { path: path.to_owned(), directory, soft, hard });
        }
        Ok(())
    }
}

impl Gpu {
    /// What a cgroup may have; NOT_FOUND where nothing was set.
    pub fn cgroup_limit(&self, path: &str) -> Result<&CgroupLimit, Code> {
        if self.mig.current {
            return Err(Code::NotSupported);
        }
        let directory = directory(path)?;
        self.limits.iter().find(|limit| limit.directory == directory).ok_or(Code::NotFound)
    }

    /// The limit of the process's cgroup, or of one above it, that leaves it the least: how many bytes.
    pub(crate) fn room_in_cgroup(&self, pid: u32) -> Option<u64> {
        let limits = self.limits.iter().filter(|limit| limit.holds());
        let rooms = limits.filter_map(|limit| {
            let members = limit.members();
            members.contains(&pid).then(|| limit.hard.saturating_sub(self.used_by(&members)))
        });
        rooms.min()
    }

    /// Bytes that these processes have.
    pub fn used_by(&self, pids: &[u32]) -> u64 {
        let theirs = self.processes.iter().filter(|process| pids.contains(&process.pid));
        theirs.map(|process| process.memory_mib << 20).sum()
    }
}

impl CgroupLimit {
    /// Whether the cgroup is still there.
    fn holds(&self) -> bool {
        directory(&self.path) == Ok(self.directory)
    }

    /// The processes in the cgroup and below.
    pub fn members(&self) -> Vec<u32> {
        let mut pids = Vec::new();
        members(Path::new(&self.path), &mut pids);
        pids
    }
}

fn members(cgroup: &Path, pids: &mut Vec<u32>) {
    let listed = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    pids.extend(listed.lines().filter_map(|line| line.parse::<u32>().ok()));
    for below in std::fs::read_dir(cgroup).into_iter().flatten().flatten() {
        if below.file_type().is_ok_and(|kind| kind.is_dir()) {
            members(&below.path(), pids);
        }
    }
}

/// The directory itself: the kernel never gives a cgroup's number to another, and the file systems
/// on which tests play cgroups do, but they know when a directory was made.
fn directory(path: &str) -> Result<(u64, u64, u64), Code> {
    let found = std::fs::metadata(path).ok().filter(|found| found.is_dir()).ok_or(Code::OperatingSystem)?;
    let made = found.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let made = made.and_then(|since| u64::try_from(since.as_nanos()).ok()).unwrap_or(0);
    Ok((found.dev(), found.ino(), made))
}
