//! A snapshot of one GPU: its shares, their pages, and the processes on it.
//!
//! Enforcement, the scheduler and memory-pressure handling all work from it. NVML and the kernel
//! are trusted; everything that an account page says is the container's own claim. Memory is in
//! bytes; rates are nanoseconds per second.

pub(crate) mod collect;
pub(crate) mod entitlement;
pub(crate) mod finding;
#[cfg(test)]
pub(crate) mod fixture;
pub(crate) mod mig_totals;
pub(crate) mod mounts;
pub(crate) mod nvml_query;
pub(crate) mod page_files;
pub(crate) mod process;
pub(crate) mod usage;

use divvy_api::{ClaimUid, ShareId};
use divvy_pages::account::SlotReport;
use divvy_pages::{Flags, GpuUuid, Identity, PageError, Policy, SlotState};
use mounts::Page;
use process::{Cgroups, Process};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Time between two audits of a GPU. Two audits that confirm a finding stay well within the five
/// seconds in which the agent promises to act.
pub const AUDIT_INTERVAL: Duration = Duration::from_secs(1);

/// A balance above one second of GPU time cannot be granted: it is a thousand times the usual burst.
const BALANCE_MAX_NS: i64 = 1_000_000_000;

/// Claim and share.
pub(crate) type ShareKey = (ClaimUid, ShareId);

/// Busy time of MIG instances in nanoseconds per second, by the UUID of the MIG device.
pub(crate) type MigBusyNs = BTreeMap<GpuUuid, u64>;

/// Time in which multiprocessors were active, in nanoseconds per second: by MIG device, and `None`
/// for the whole GPU.
pub(crate) type SmActiveNs = BTreeMap<Option<GpuUuid>, u64>;

/// The device that a share is a part of: a whole GPU or one MIG instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Device {
    pub(crate) gpu: GpuUuid,
    pub(crate) mig: Option<GpuUuid>,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mig {
            Some(mig) => write!(f, "MIG-{mig}"),
            None => write!(f, "GPU-{}", self.gpu),
        }
    }
}

/// A share with its two pages.
#[derive(Clone, Debug)]
pub(crate) struct Share {
    pub(crate) claim: ClaimUid,
    pub(crate) id: ShareId,
    pub(crate) policy: Policy,
    pub(crate) page: Page,
    pub(crate) account: Result<Account, AccountError>,
    /// Containers that the hook reported, by id.
    pub(crate) containers: Vec<(String, Cgroups)>,
}

/// The account page of a share, as its processes wrote it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Account {
    /// The total in bytes, as the page states it.
    pub(crate) used: u64,
    /// GPU time left, in nanoseconds.
    pub(crate) balance: i64,
    /// When the balance was last refilled, in nanoseconds of the monotonic clock.
    pub(crate) refilled: u64,
    pub(crate) attention: u64,
    /// GPU time charged under quanta, in nanoseconds. Exact also after processes exited.
    pub(crate) charged_ns: u64,
    /// The file is larger than a page, which takes memory of the node.
    pub(crate) is_oversized: bool,
    /// No slot changed and nothing was in flight while NVML was queried.
    pub(crate) is_stable: bool,
    pub(crate) slots: Vec<Slot>,
}

/// A slot that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) report: SlotReport,
    /// The slot was the same before and after NVML was queried, and nothing was in flight.
    pub(crate) is_stable: bool,
}

/// Why an account page cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AccountError {
    /// Processes of the share corrupted it. Only they write it.
    Corrupt(PageError),
    /// A process holds a lease that keeps the node from opening it.
    Leased,
    /// The node cannot read it. This is not the share's fault.
    Unreadable(String),
}

impl AccountError {
    /// Whether processes of the share caused the error.
    pub(crate) fn is_tampering(&self) -> bool {
        matches!(self, Self::Corrupt(_) | Self::Leased)
    }
}

impl fmt::Display for AccountError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Corrupt(why) => write!(f, "the account page is corrupt: {why}"),
            Self::Leased => {
                f.write_str("a process holds a lease on the account page to keep the node from opening it")
            }
            Self::Unreadable(why) => write!(f, "the account page cannot be read: {why}"),
        }
    }
}

/// Device memory of a process, as NVML reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProcessMemory {
    pub(crate) pid: u32,
    pub(crate) device: Device,
    /// `None` if NVML does not report it.
    pub(crate) bytes: Option<u64>,
}

/// The state of one GPU at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Snapshot {
    /// Sorted by share and claim.
    pub(crate) shares: Vec<Share>,
    /// The pages of all shares of the node. A container can have shares of several GPUs.
    pub(crate) node_pages: Arc<[Page]>,
    pub(crate) uses: Vec<ProcessMemory>,
    /// The processes in `uses` and the first process of each container, by pid. Processes that
    /// exited are missing.
    pub(crate) processes: BTreeMap<u32, Process>,
    /// Ids of the containers whose memory limit the GPU driver enforces.
    pub(crate) driver_limited: BTreeSet<String>,
    /// Of instances with shares and no processes outside their compute instance.
    pub(crate) mig_busy_ns: MigBusyNs,
    /// Total of all processes, in nanoseconds per second. `None` if each share's own time is known,
    /// or nothing is.
    pub(crate) gpu_busy_ns: Option<u64>,
    pub(crate) sm_active_ns: SmActiveNs,
}

impl Account {
    /// The smallest honest total in bytes. The node subtracts at most the estimate of its contexts
    /// from a slot.
    pub(crate) fn min_used(&self) -> u64 {
        let live = self.slots.iter().filter(|slot| slot.is_live());
        let least = |slot: &Slot| slot.report.held.saturating_sub(slot.report.context);
        live.fold(0_u64, |sum, slot| sum.saturating_add(least(slot)))
    }

    /// Whether the library of all processes knows quanta. One of an earlier version charges only its slot.
    pub(crate) fn knows_quanta(&self) -> bool {
        self.slots.iter().filter(|slot| slot.is_live()).all(|slot| slot.report.quantum.is_some())
    }

    /// Whether the balance is more than the node ever grants.
    pub(crate) fn has_forged_balance(&self) -> bool {
        self.balance > BALANCE_MAX_NS
    }

    /// Whether a process lowered the total: a stable page never shows less than its slots.
    pub(crate) fn is_below_its_slots(&self) -> bool {
        self.is_stable && self.used < self.min_used()
    }
}

impl Share {
    pub(crate) fn device(&self) -> Device {
        Device { gpu: self.policy.gpu, mig: self.policy.mig }
    }

    pub(crate) fn key(&self) -> ShareKey {
        (self.claim.clone(), self.id.clone())
    }

    pub(crate) fn is_observe_only(&self) -> bool {
        self.policy.flags.has(Flags::OBSERVE_ONLY)
    }

    /// The container of the share that a process runs in. There is at most one.
    pub(crate) fn container(&self, process: &Process) -> Option<&str> {
        let found = self.containers.iter().find(|(_, cgroups)| process.cgroups.are_within(cgroups));
        found.map(|(id, _)| id.as_str())
    }

    /// The slots of a running process.
    pub(crate) fn slots_of<'a>(&'a self, process: &'a Process) -> impl Iterator<Item = &'a Slot> {
        let slots = self.account.as_ref().map(|account| account.slots.as_slice()).unwrap_or_default();
        slots.iter().filter(|slot| slot.is_live() && belongs_to(&slot.report, &process.identity))
    }
}

impl Slot {
    /// Whether the share's processes consider the slot taken.
    pub(crate) fn is_taken(&self) -> bool {
        self.report.owner.state() == SlotState::Live
    }

    /// Whether the owner is alive. A slot that the node marked dead stays taken until a process of
    /// the share frees it, and there may be no process left to do so.
    pub(crate) fn is_live(&self) -> bool {
        let line = &self.report.node_line;
        self.is_taken() && !(line.dead && line.owner == self.report.owner)
    }
}

/// Whether a slot names this process as its owner. A process without `/proc` writes zero for what
/// it cannot find out.
pub(crate) fn belongs_to(slot: &SlotReport, identity: &Identity) -> bool {
    let claimed = &slot.identity;
    let agrees = |claimed: u64, actual: u64| claimed == 0 || actual == 0 || claimed == actual;
    claimed.pid == identity.pid
        && agrees(claimed.namespace, identity.namespace)
        && agrees(claimed.start, identity.start)
        && agrees(claimed.image, identity.image)
}

impl Snapshot {
    /// Total of all processes of a device, in nanoseconds per second, if only the total is known.
    pub(crate) fn busy_ns(&self, device: Device) -> Option<u64> {
        device.mig.map_or(self.gpu_busy_ns, |mig| self.mig_busy_ns.get(&mig).copied())
    }

    /// Indices of the shares that a process belongs to: the shares of its container or, if the hook
    /// reported no container, the shares whose policy page the process has mounted.
    pub(crate) fn shares_of(&self, process: &Process) -> BTreeSet<usize> {
        let all = || self.shares.iter().enumerate();
        let by_cgroup: BTreeSet<usize> =
            all().filter(|(_, share)| share.container(process).is_some()).map(|(at, _)| at).collect();
        match by_cgroup.is_empty() {
            false => by_cgroup,
            true => all()
                .filter(|(_, share)| mounts::has(&process.mounts, &share.page))
                .map(|(at, _)| at)
                .collect(),
        }
    }
}

/// Nanoseconds of the monotonic clock, the clock of the pages.
pub(crate) fn monotonic_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let since = Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0));
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
