//! Limits of cgroups, as they bind the processes that allocate.
//!
//! A kernel driver knows the cgroup of whoever calls it. Here the driver's code runs in the caller, which may be in
//! namespaces of its own, see another `/proc` or none at all, and mean ill. So it asks the kernel for the number of its
//! cgroup, by a handle on itself: neither mounts nor namespaces nor the environment have a part in the answer. The limit
//! says which numbers it is of: those of the cgroup and of all below it when it was set. One made below it later
//! counts once the limit is set again: that much less than a kernel knows the model.
//!
//! Kernels before 6.13 do not tell that number. There the name counts that `/proc/self/cgroup` has, which a process with
//! a cgroup namespace or a `/proc` of its own can bend. And where the limit is a plain directory that plays a
//! cgroup, for tests without root, its `cgroup.procs` counts, for those who see it.
//!
//! **What is counted.** Each row notes the limits that bind its process when it last allocated, and whoever sets a limit
//! notes it in the rows of the processes that are in there already. A cgroup has what the rows with its limit use. So all of a
//! process's memory is its present cgroup's, managed memory left out: that is the cgroup's as memory of the system.
//! Processes without a row, entered into the state by hand, are not counted here; NVML's figure has them.
//!
//! Who is bound looks, adds up and charges under the part's lock, so that of two who want the last byte one gets it.
//! What the dead had is left out with their rows.

use super::guest::Guest;
use super::map::{LIMITS, Ledger, Row};
use super::{GRANULE, Place};
use crate::limits::listed;
use crate::state::{CgroupLimit, Gpu, State};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// `PIDFD_GET_INFO` of linux/pidfd.h: `_IOWR(0xff, 11, struct pidfd_info)` of the struct's first 64 bytes.
const GET_INFO: libc::c_ulong = 0xc040_ff0b;
/// `PIDFD_INFO_CGROUPID`.
const CGROUP_ID: u64 = 1 << 2;

/// `struct pidfd_info` as it first was.
#[repr(C)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    rest: [u32; 12],
}

const _: () = assert!(size_of::<PidfdInfo>() == 64);

/// The limits of a part, of that generation of the state.
#[derive(Debug, Default)]
pub(super) struct Known {
    generation: u64,
    limits: Vec<CgroupLimit>,
}

/// Where this process is.
struct Own {
    id: Option<u64>,
    name: Option<String>,
}

/// A limit that binds this process.
#[derive(Clone, Copy, Debug)]
struct Bound {
    number: u64,
    /// Bytes.
    hard: u64,
    /// Its own cgroup's, not of one above it.
    is_own: bool,
}

impl Own {
    fn now() -> Self {
        let id = cgroup_id();
        let name = if id.is_none() { cgroup_name() } else { None };
        Self { id, name }
    }

    /// How a limit binds this process: as its own cgroup's, or as that of one above.
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
                let is_own = listed(Path::new(&limit.path)).contains(&pid);
                (!limit.is_replaced() && (is_own || limit.members().contains(&pid))).then_some(is_own)
            }
        }
    }
}

/// The kernel's number of this process's cgroup.
fn cgroup_id() -> Option<u64> {
    // SAFETY: takes two numbers; a new descriptor is returned.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, libc::getpid(), 0) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: it was just opened, and nobody else has it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut info = PidfdInfo { mask: CGROUP_ID, cgroup: 0, rest: [0; 12] };
    // SAFETY: the call writes as many bytes as its number says, which is the size of `info`.
    let done = unsafe { libc::ioctl(fd.as_raw_fd(), GET_INFO, &mut info) };
    (done == 0 && info.mask & CGROUP_ID != 0).then_some(info.cgroup)
}

/// Its name, by `/proc`.
fn cgroup_name() -> Option<String> {
    let lines = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    lines.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

impl Guest {
    /// The limits that bind it now; it is noted in its row.
    fn bounds(&self) -> Vec<Bound> {
        let generation = self.part().limits.load(Ordering::Acquire);
        if generation == 0 {
            return Vec::new();
        }
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.generation != generation
            && let Some(limits) = self.ledger().limits_of(self.part_index())
        {
            *known = Known { generation, limits };
        }
        let own = Own::now();
        let bound = |limit: &CgroupLimit| {
            let &CgroupLimit { number, hard, .. } = limit;
            own.under(limit).map(|is_own| Bound { number, hard, is_own })
        };
        let mut bounds: Vec<Bound> = known.limits.iter().filter_map(bound).collect();
        // Those below hold before those above, where there are too many.
        bounds.sort_by_key(|bound| (!bound.is_own, bound.hard));
        bounds.truncate(LIMITS);
        let numbers = bounds.iter().map(|bound| bound.number).chain(std::iter::repeat(0));
        for (noted, number) in self.own().limits.iter().zip(numbers) {
            noted.store(number, Ordering::Release);
        }
        bounds
    }

    /// Uses as many granules more, if part and cgroups have them.
    pub(super) fn change_within(&self, granules: u64) -> bool {
        let change = || self.change(i64::try_from(granules).unwrap_or(i64::MAX));
        let bounds = self.bounds();
        if bounds.is_empty() {
            return change();
        }
        let _held = self.ledger().hold(self.locks(), self.part_index(), self.row());
        let fits = |bound: &Bound| granules.saturating_mul(GRANULE) <= self.left(*bound);
        bounds.iter().all(fits) && change()
    }

    /// Bytes that are free and that there are, of so many on the part.
    pub(super) fn memory_within(&self, free: u64, total: u64) -> (u64, u64) {
        self.bounds().into_iter().fold((free, total), |(free, total), bound| {
            let all = if bound.is_own { total.min(bound.hard) } else { total };
            (free.min(self.left(bound)), all)
        })
    }

    /// Bytes that a limit leaves.
    fn left(&self, bound: Bound) -> u64 {
        bound.hard.saturating_sub(self.ledger().used_under(self.part_index(), bound.number))
    }
}

impl Row {
    /// Bytes that count against limits of cgroups.
    fn counted(&self) -> u64 {
        self.used.load(Ordering::Acquire) * GRANULE
    }

    fn is_under(&self, number: u64) -> bool {
        self.limits.iter().any(|noted| noted.load(Ordering::Acquire) == number)
    }

    fn put_under(&self, number: u64) {
        if self.is_under(number) {
            return;
        }
        let free = |noted: &&std::sync::atomic::AtomicU64| noted.load(Ordering::Acquire) == 0;
        if let Some(noted) = self.limits.iter().find(free) {
            noted.store(number, Ordering::Release);
        }
    }
}

impl Ledger {
    /// Bytes that the processes under a limit use of a part.
    fn used_under(&self, part: usize, number: u64) -> u64 {
        let epoch = self.get().parts[part].epoch.load(Ordering::Relaxed);
        let is_counted = |at: &usize| {
            let (owner, row) = (self.get().owners[*at].load(Ordering::Acquire), &self.get().rows[*at]);
            owner != 0
                && row.part.load(Ordering::Relaxed) as usize == part
                && row.epoch.load(Ordering::Relaxed) == epoch
                && row.is_under(number)
        };
        (0..self.high()).filter(is_counted).map(|at| self.get().rows[at].counted()).sum()
    }

    /// Notes the limits of a GPU for those who are in there already. Who sees fewer processes notes fewer: so it takes
    /// none back, which a process does for itself.
    pub(super) fn find_members(&self, gpu: &Gpu, slot: usize) {
        let Some(part) = (Place { slot, instance: None }).part().filter(|_| !gpu.limits.is_empty()) else {
            return;
        };
        let members: Vec<(u64, Vec<u32>)> =
            gpu.limits.iter().map(|limit| (limit.number, limit.members())).collect();
        for (row, pid) in self.rows_on(part) {
            let theirs = members.iter().filter(|(_, pids)| pids.contains(&pid));
            theirs.for_each(|(number, _)| row.put_under(*number));
        }
    }

    /// The limits of a part that is a whole GPU, by the state's file.
    fn limits_of(&self, part: usize) -> Option<Vec<CgroupLimit>> {
        let text = std::fs::read(self.dir().join("state.json")).ok()?;
        let state: State = serde_json::from_slice(&text).ok()?;
        let of = |slot: &usize| (Place { slot: *slot, instance: None }).part() == Some(part);
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
        Own { id, name: name.map(str::to_owned) }.under(&limit(Some("/pods/a"), &[7, 8]))
    }

    #[test]
    fn the_kernels_number_of_a_cgroup_counts_where_it_tells_one() {
        assert_eq!(under(Some(7), None), Some(true));
        assert_eq!(under(Some(8), None), Some(false));
        assert_eq!(under(Some(9), None), None);
        assert_eq!(under(Some(9), Some("/pods/a")), None, "the name is what the process says");
    }

    #[test]
    fn else_its_name_does() {
        assert_eq!(under(None, Some("/pods/a")), Some(true));
        assert_eq!(under(None, Some("/pods/a/below")), Some(false));
        assert_eq!(under(None, Some("/pods/ab")), None);
        assert_eq!(under(None, Some("/")), None);
        assert_eq!(under(None, None), None);
    }
}
