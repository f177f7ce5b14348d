//! Memory limits by cgroup, as GPU drivers from R615 on have them: cgroup v2 only, and not on a GPU
//! with MIG enabled.
//!
//! A limit belongs to the cgroup's directory, identified by its inode, and ends with it. The
//! members of a cgroup are the processes in its `cgroup.procs` and in those below it.
//! [`crate::usage`] applies the limits to CUDA processes.

use crate::code::Code;
use crate::state::{CgroupLimit, Gpu, State};
use std::os::unix::fs::{DirEntryExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Major version of the first GPU driver that has cgroup limits.
const FIRST_DRIVER_MAJOR: u32 = 615;
/// `NVML_DEVICE_MEMORY_LIMIT_MAX`: no limit.
const NO_LIMIT: u64 = u64::MAX;
/// `CGROUP2_SUPER_MAGIC` of linux/magic.h.
const CGROUP2_SUPER_MAGIC: u64 = 0x6367_7270;

impl State {
    /// Checks that the GPU driver has cgroup limits; FUNCTION_NOT_FOUND if it is too old.
    pub fn has_cgroup_limits(&self) -> Result<(), Code> {
        let major = self.driver.split('.').next().and_then(|major| major.parse::<u32>().ok());
        if major.is_some_and(|major| major >= FIRST_DRIVER_MAJOR) {
            Ok(())
        } else {
            Err(Code::FunctionNotFound)
        }
    }

    /// Sets or removes a cgroup's limits on a GPU, in bytes. `soft` 0 with `hard` [`NO_LIMIT`]
    /// removes them.
    pub fn limit_cgroup(&mut self, slot: usize, path: &str, soft: u64, hard: u64) -> Result<(), Code> {
        self.has_cgroup_limits()?;
        let directory = directory_identity(path)?;
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
        gpu.limits.retain(|limit| limit.directory != directory && limit.exists());
        if !none {
            let mut ids = Vec::new();
            let name = hierarchy_path(Path::new(path));
            if name.is_some() {
                ids.push(directory.1);
                descendant_ids(Path::new(path), &mut ids);
            }
            gpu.limits.push(CgroupLimit { path: path.to_owned(), directory, number, name, ids, soft, hard });
        }
        Ok(())
    }
}

impl Gpu {
    /// The limit of a cgroup; NOT_FOUND if none is set.
    pub fn cgroup_limit(&self, path: &str) -> Result<&CgroupLimit, Code> {
        if self.mig.current {
            return Err(Code::NotSupported);
        }
        let directory = directory_identity(path)?;
        self.limits.iter().find(|limit| limit.directory == directory).ok_or(Code::NotFound)
    }

    /// Bytes that the process may still allocate under the limits of its cgroup and all ancestors;
    /// none without a limit.
    pub(crate) fn cgroup_bytes_left(&self, pid: u32) -> Option<u64> {
        let limits = self.limits.iter().filter(|limit| limit.exists());
        let rooms = limits.filter_map(|limit| {
            let members = limit.members();
            members.contains(&pid).then(|| limit.hard.saturating_sub(self.used_by(&members)))
        });
        rooms.min()
    }

    /// Bytes that these processes use on the GPU.
    pub fn used_by(&self, pids: &[u32]) -> u64 {
        let theirs = self.processes.iter().filter(|process| pids.contains(&process.pid));
        theirs.map(|process| process.memory_mib << 20).sum()
    }
}

impl CgroupLimit {
    /// Whether the cgroup still exists.
    fn exists(&self) -> bool {
        directory_identity(&self.path) == Ok(self.directory)
    }

    /// Whether another cgroup has taken the path, as far as this process sees it.
    pub(crate) fn is_replaced(&self) -> bool {
        directory_identity(&self.path).is_ok_and(|found| found != self.directory)
    }

    /// The processes in the cgroup and in all below it.
    pub fn members(&self) -> Vec<u32> {
        let mut pids = Vec::new();
        members(Path::new(&self.path), &mut pids);
        pids
    }
}

/// The processes in the cgroup itself.
pub(crate) fn direct_members(cgroup: &Path) -> Vec<u32> {
    let listed = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    listed.lines().filter_map(|line| line.parse::<u32>().ok()).collect()
}

fn members(cgroup: &Path, pids: &mut Vec<u32>) {
    pids.extend(direct_members(cgroup));
    for below in std::fs::read_dir(cgroup).into_iter().flatten().flatten() {
        if below.file_type().is_ok_and(|kind| kind.is_dir()) {
            members(&below.path(), pids);
        }
    }
}

/// Identity of a cgroup's directory: device, inode and creation time in ns. The kernel never reuses
/// a cgroup's id. The file systems on which tests simulate cgroups reuse inodes, hence the creation
/// time.
fn directory_identity(path: &str) -> Result<(u64, u64, u64), Code> {
    let found = std::fs::metadata(path).ok().filter(|found| found.is_dir()).ok_or(Code::OperatingSystem)?;
    let made = found.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let made = made.and_then(|since| u64::try_from(since.as_nanos()).ok()).unwrap_or(0);
    Ok((found.dev(), found.ino(), made))
}

/// Appends the kernel's ids of all cgroups below.
fn descendant_ids(cgroup: &Path, ids: &mut Vec<u64>) {
    for below in std::fs::read_dir(cgroup).into_iter().flatten().flatten() {
        if below.file_type().is_ok_and(|kind| kind.is_dir()) {
            ids.push(below.ino());
            self::descendant_ids(&below.path(), ids);
        }
    }
}

/// Path of the cgroup within its hierarchy, `/kubepods/a`; none for a plain directory.
fn hierarchy_path(cgroup: &Path) -> Option<String> {
    let is_real =
        |path: &Path| rustix::fs::statfs(path).is_ok_and(|found| found.f_type as u64 == CGROUP2_SUPER_MAGIC);
    let path: PathBuf = cgroup.canonicalize().ok().filter(|path| is_real(path))?;
    let root = path.ancestors().take_while(|above| is_real(above)).last()?;
    Some(format!("/{}", path.strip_prefix(root).ok()?.to_str()?))
}
