//! Memory limits by cgroup, as GPU drivers from R615 on have them: cgroup v2 only, and
//! not on a GPU that is cut into instances.
//!
//! A limit belongs to the cgroup's directory, by inode, and ends with it. Who is in a
//! cgroup is what its `cgroup.procs` and those below it say, to whoever sees that directory.
//! How a process in a container learns it of itself is [`crate::ledger`]'s business.

use crate::code::Code;
use crate::state::{CgroupLimit, Gpu, State};
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// The first GPU driver that has them.
const SINCE: u32 = 615;
/// No limit: `NVML_DEVICE_MEMORY_LIMIT_MAX`.
const NO_LIMIT: u64 = u64::MAX;
/// `CGROUP2_SUPER_MAGIC`.
const CGROUP2: u64 = 0x6367_7270;

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
        let fresh = self.generation + 1;
        let gpu = self.gpu_mut(slot)?;
        let total = gpu.model().memory_total_mib << 20;
        let none = (soft, hard) == (0, NO_LIMIT);
        if gpu.mig.current {
            return Err(Code::NotSupported);
        }
        if soft > hard || (!none && soft.max(hard) > total) {
            return Err(Code::InvalidArgument);
        }
        let known = gpu.limits.iter().find(|limit| limit.directory == directory);
        let number = known.map_or(fresh, |limit| limit.number);
        gpu.limits.retain(|limit| limit.directory != directory && limit.holds());
        if !none {
            let mut ids = Vec::new();
            let name = name(Path::new(path));
            if name.is_some() {
                ids.push(directory.1);
                below(Path::new(path), &mut ids);
            }
            gpu.limits.push(CgroupLimit { path: path.to_owned(), directory, number, name, ids, soft, hard });
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

    /// Whether another cgroup is there by now, as far as this process sees where it was.
    pub(crate) fn is_replaced(&self) -> bool {
        directory(&self.path).is_ok_and(|found| found != self.directory)
    }

    /// The processes in the cgroup and below.
    pub fn members(&self) -> Vec<u32> {
        let mut pids = Vec::new();
        members(Path::new(&self.path), &mut pids);
        pids
    }
}

/// The processes that a cgroup's own list has.
pub(crate) fn listed(cgroup: &Path) -> Vec<u32> {
    let listed = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    listed.lines().filter_map(|line| line.parse::<u32>().ok()).collect()
}

fn members(cgroup: &Path, pids: &mut Vec<u32>) {
    pids.extend(listed(cgroup));
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

/// The kernel's numbers of the cgroups below.
fn below(cgroup: &Path, ids: &mut Vec<u64>) {
    for below in std::fs::read_dir(cgroup).into_iter().flatten().flatten() {
        if below.file_type().is_ok_and(|kind| kind.is_dir()) {
            ids.push(below.ino());
            self::below(&below.path(), ids);
        }
    }
}

/// What the kernel calls the cgroup, `/kubepods/a`; none of a directory that only plays one.
fn name(cgroup: &Path) -> Option<String> {
    let is_real = |path: &Path| rustix::fs::statfs(path).is_ok_and(|found| found.f_type as u64 == CGROUP2);
    let path: PathBuf = cgroup.canonicalize().ok().filter(|path| is_real(path))?;
    let root = path.ancestors().take_while(|above| is_real(above)).last()?;
    Some(format!("/{}", path.strip_prefix(root).ok()?.to_str()?))
}
