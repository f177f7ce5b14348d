//! Memory limits of cgroups, as they apply to a process that allocates.
//!
//! The simulated driver runs inside the process that allocates, which may try to escape its limit.
//! It therefore asks the kernel for its cgroup id through a pidfd (Linux 6.13 and later): mounts,
//! namespaces and the environment do not affect the answer. On older kernels the cgroup path of
//! `/proc/self/cgroup` decides, and for a plain directory that stands in for a cgroup in tests its
//! `cgroup.procs`.

use super::gpu_process::{GpuProcess, LimitCache};
use super::gpu_usage::GpuUsage;
use super::layout::{GRANULE_BYTES, LIMITS_PER_ROW, Place, Row};
use crate::cgroup_limits::direct_members;
use crate::state::{CgroupLimit, Gpu, State};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// `PIDFD_GET_INFO` of linux/pidfd.h: `_IOWR(0xff, 11, struct pidfd_info)` with the struct's first
/// 64 bytes.
const PIDFD_GET_INFO: libc::c_ulong = 0xc040_ff0b;
/// `PIDFD_INFO_CGROUPID` of linux/pidfd.h.
const PIDFD_INFO_CGROUPID: u64 = 1 << 2;

/// The first version of `struct pidfd_info` (64 bytes).
#[repr(C)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    rest: [u32; 12],
}

const _: () = assert!(size_of::<PidfdInfo>() == 64);

/// The cgroup of this process: its id if the kernel reports one, else its path.
struct OwnCgroup {
    id: Option<u64>,
    name: Option<String>,
}

/// A limit that applies to this process.
#[derive(Clone, Copy, Debug)]
struct AppliedLimit {
    number: u64,
    /// The most memory that the cgroup may use, in bytes.
    hard: u64,
    /// Whether the limit is set on the process's own cgroup, rather than on an ancestor.
    is_own: bool,
}

impl OwnCgroup {
    fn now() -> Self {
        let id = cgroup_id();
        let name = if id.is_none() { cgroup_name() } else { None };
        Self { id, name }
    }

    /// Whether a limit applies to this process: `Some(true)` if it is set on the process's own
    /// cgroup, `Some(false)` if it is set on an ancestor.
    ///
    /// A limit lists the ids of the cgroups that existed below it when it was set. A cgroup that is
    /// created later is covered only after the limit is set again; a kernel driver would cover it
    /// at once.
    fn under(&self, limit: &CgroupLimit) -> Option<bool> {
        match (&limit.name, self.id, &self.name) {
            (Some(_), Some(id), _) => limit.ids.contains(&id).then_some(id == limit.directory.1),
            (Some(of), None, Some(name)) => {
                let rest = name.strip_prefix(of.as_str()).filter(|_| !limit.is_replaced())?;
                (rest.is_empty() || rest.starts_with('/')).then_some(rest.is_empty())
            }
            (Some(_), None, None) => None,
            (None, ..) => {
                let pid = std::process::id();
                let is_own = direct_members(Path::new(&limit.path)).contains(&pid);
                (!limit.is_replaced() && (is_own || limit.members().contains(&pid))).then_some(is_own)
            }
        }
    }
}

/// The kernel's id of this process's cgroup.
fn cgroup_id() -> Option<u64> {
    // SAFETY: the call takes two integers and returns a new descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: the descriptor was just opened, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut info = PidfdInfo { mask: PIDFD_INFO_CGROUPID, cgroup: 0, rest: [0; 12] };
    // SAFETY: the ioctl number encodes the size of `info`, so the kernel writes no more than that.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), PIDFD_GET_INFO, &mut info) };
    (done == 0 && info.mask & PIDFD_INFO_CGROUPID != 0).then_some(info.cgroup)
}

/// The path of this process's cgroup, from `/proc`. A process with its own cgroup namespace or
/// `/proc` can falsify it.
fn cgroup_name() -> Option<String> {
    let lines = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    lines.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

impl GpuProcess {
    /// The limits that apply now. They are also recorded in the row, so that other processes count
    /// this process's memory against them.
    fn applicable_limits(&self) -> Vec<AppliedLimit> {
        let generation = self.partition().limits.load(Ordering::Acquire);
        if generation == 0 {
            return Vec::new();
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.generation != generation
            && let Some(limits) = self.usage().limits_of(self.partition_index())
        {
            *known = LimitCache { generation, limits };
        }
        let own = OwnCgroup::now();
        let bound = |limit: &CgroupLimit| {
            let &CgroupLimit { number, hard, .. } = limit;
            own.under(limit).map(|is_own| AppliedLimit { number, hard, is_own })
        };
        let mut bounds: Vec<AppliedLimit> = known.limits.iter().filter_map(bound).collect();
        // If more limits apply than a row can hold, those of inner cgroups take precedence.
        bounds.sort_by_key(|bound| (!bound.is_own, bound.hard));
        bounds.truncate(LIMITS_PER_ROW);
        let numbers = bounds.iter().map(|bound| bound.number).chain(std::iter::repeat(0));
        for (noted, number) in self.own().limits.iter().zip(numbers) {
            noted.store(number, Ordering::Release);
        }
        bounds
    }

    /// Adds `granules` to the process's use if the partition and all limits allow it. With a limit,
    /// the check and the charge happen under the partition's lock, so that two processes cannot
    /// both take the last byte.
    pub(super) fn change_within_limits(&self, granules: u64) -> bool {
        let change = || self.change(i64::try_from(granules).unwrap_or(i64::MAX));
        let bounds = self.applicable_limits();
        if bounds.is_empty() {
            return change();
        }
        let _held = self.usage().lock_partition(self.locks(), self.partition_index(), self.row());
        let fits = |bound: &AppliedLimit| granules.saturating_mul(GRANULE_BYTES) <= self.limit_left(*bound);
        bounds.iter().all(fits) && change()
    }

    /// Free and total bytes for this process, given the free and total bytes of the partition.
    pub(super) fn memory_within_limits(&self, free: u64, total: u64) -> (u64, u64) {
        self.applicable_limits().into_iter().fold((free, total), |(free, total), bound| {
            let all = if bound.is_own { total.min(bound.hard) } else { total };
            (free.min(self.limit_left(bound)), all)
        })
    }

    /// Bytes that the limit leaves.
    fn limit_left(&self, bound: AppliedLimit) -> u64 {
        bound.hard.saturating_sub(self.usage().used_under_limit(self.partition_index(), bound.number))
    }
}

impl Row {
    /// Bytes that count against cgroup limits. Managed memory does not count: the cgroup pays for
    /// it as system memory.
    fn limited_bytes(&self) -> u64 {
        self.used.load(Ordering::Acquire) * GRANULE_BYTES
    }

    fn has_limit(&self, number: u64) -> bool {
        self.limits.iter().any(|noted| noted.load(Ordering::Acquire) == number)
    }

    fn add_limit(&self, number: u64) {
        if self.has_limit(number) {
            return;
        }
        let free = |noted: &&std::sync::atomic::AtomicU64| noted.load(Ordering::Acquire) == 0;
        if let Some(noted) = self.limits.iter().find(free) {
            noted.store(number, Ordering::Release);
        }
    }
}

impl GpuUsage {
    /// Bytes of a partition that the processes under a limit use. Dead processes do not count, and
    /// neither do processes that were added to the state without a row; NVML's figure includes the
    /// latter.
    fn used_under_limit(&self, partition: usize, number: u64) -> u64 {
        let epoch = self.get().partitions[partition].epoch.load(Ordering::Relaxed);
        let is_counted = |at: &usize| {
            let (owner, row) = (self.get().owners[*at].load(Ordering::Acquire), &self.get().rows[*at]);
            owner != 0
                && row.partition.load(Ordering::Relaxed) as usize == partition
                && row.epoch.load(Ordering::Relaxed) == epoch
                && row.has_limit(number)
        };
        (0..self.high_water()).filter(is_counted).map(|at| self.get().rows[at].limited_bytes()).sum()
    }

    /// Records the limits of a GPU in the rows of the processes that are already in those cgroups.
    /// The caller may not see all processes, so it only adds limits; each process removes its own.
    pub(super) fn record_members(&self, gpu: &Gpu, slot: usize) {
        let Some(partition) = (Place { slot, instance: None }).partition().filter(|_| !gpu.limits.is_empty())
        else {
            return;
        };
        let members: Vec<(u64, Vec<u32>)> =
            gpu.limits.iter().map(|limit| (limit.number, limit.members())).collect();
        for (row, pid) in self.rows_on(partition) {
            let theirs = members.iter().filter(|(_, pids)| pids.contains(&pid));
            theirs.for_each(|(number, _)| row.add_limit(*number));
        }
    }

    /// The limits of a partition that is a whole GPU, read from the state file.
    fn limits_of(&self, partition: usize) -> Option<Vec<CgroupLimit>> {
        let text = std::fs::read(self.dir().join("state.json")).ok()?;
        let state: State = serde_json::from_slice(&text).ok()?;
        let of = |slot: &usize| (Place { slot: *slot, instance: None }).partition() == Some(partition);
        let slot = (0..state.gpus.len()).find(of)?;
        state.gpus.into_iter().nth(slot).map(|gpu| gpu.limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(name: Option<&str>, ids: &[u64]) -> CgroupLimit {
        let directory = (1, ids.first().copied().unwrap_or(0), 1);
        let (path, name) = ("/no/such/cgroup".to_owned(), name.map(str::to_owned));
        CgroupLimit { path, directory, number: 1, name, ids: ids.to_vec(), soft: 0, hard: 0 }
    }

    fn under(id: Option<u64>, name: Option<&str>) -> Option<bool> {
        OwnCgroup { id, name: name.map(str::to_owned) }.under(&limit(Some("/pods/a"), &[7, 8]))
    }

    #[test]
    fn cgroup_id_decides_where_the_kernel_reports_it() {
        assert_eq!(under(Some(7), None), Some(true));
        assert_eq!(under(Some(8), None), Some(false));
        assert_eq!(under(Some(9), None), None);
        assert_eq!(under(Some(9), Some("/pods/a")), None, "the path is only the process's claim");
    }

    #[test]
    fn cgroup_path_decides_without_an_id() {
        assert_eq!(under(None, Some("/pods/a")), Some(true));
        assert_eq!(under(None, Some("/pods/a/below")), Some(false));
        assert_eq!(under(None, Some("/pods/ab")), None);
        assert_eq!(under(None, Some("/")), None);
        assert_eq!(under(None, None), None);
    }
}
