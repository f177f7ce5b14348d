//! What an audit of one GPU goes by, gathered once and then only looked at.

use super::instances::{Active, Busy};
use super::mounts::Page;
use super::process::{Cgroups, Process};
use divvy_api::{ClaimUid, ShareId};
use divvy_pages::account::SlotReport;
use divvy_pages::{Flags, GpuUuid, Identity, PageError, Policy, SlotState};
use std::collections::{BTreeMap, BTreeSet};

/// Nobody is ever granted a second of GPU time at once: a thousand times the usual burst.
const MOST_BALANCE: i64 = 1_000_000_000;

/// A part of a GPU that shares are of: all of it, or one MIG instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Device {
    pub(super) gpu: GpuUuid,
    pub(super) mig: Option<GpuUuid>,
}

/// A share, by its pages.
#[derive(Clone, Debug)]
pub(super) struct Share {
    pub(super) claim: ClaimUid,
    pub(super) id: ShareId,
    pub(super) policy: Policy,
    pub(super) page: Page,
    pub(super) account: Result<Account, AccountError>,
    /// Containers that the hook told of, by id.
    pub(super) containers: Vec<(String, Cgroups)>,
}

/// What the processes of a share say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Account {
    /// The total, by the page's own word.
    pub(super) used: u64,
    /// Nanoseconds.
    pub(super) balance: i64,
    /// When that was added to last, in nanoseconds of the monotonic clock.
    pub(super) refilled: u64,
    pub(super) attention: u64,
    /// Its file was made larger than a page, which takes memory of the node.
    pub(super) is_long: bool,
    /// Nothing was changed and nothing was in flight while NVML was asked.
    pub(super) still: bool,
    pub(super) slots: Vec<Slot>,
}

/// A slot that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) report: SlotReport,
    /// It said the same before and after NVML was asked, and nothing was in flight.
    pub(super) still: bool,
}

/// Why nothing can be read from an account page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AccountError {
    /// Processes of the share have spoiled it: they alone write it.
    Spoiled(PageError),
    /// One of them keeps the node from opening it.
    Leased,
    /// Nothing is known of it.
    Unreadable(String),
}

/// A process on a device, by the GPU driver's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) pid: u32,
    pub(super) device: Device,
    /// None where the GPU driver does not say.
    pub(super) bytes: Option<u64>,
}

/// One look at a GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct Look {
    /// Of this GPU, by claim and share.
    pub(super) shares: Vec<Share>,
    pub(super) uses: Vec<Use>,
    /// Of the uses and of the containers, by pid; those that have ended are not there.
    pub(super) processes: BTreeMap<u32, Process>,
    /// Containers whose limit the GPU driver keeps, by id.
    pub(super) kept: BTreeSet<String>,
    /// Of instances that have shares, and nobody runs there beside their compute instance.
    pub(super) busy: Busy,
    /// What all processes of the GPU had together, in nanoseconds a second; none where NVML says what each had, or nothing.
    pub(super) whole: Option<u64>,
    /// For how much of that time multiprocessors were active.
    pub(super) active: Active,
}

impl Account {
    /// The least that an honest total can be: the node takes no more off a slot than the
    /// estimate of its contexts.
    pub(super) fn least(&self) -> u64 {
        let live = self.slots.iter().filter(|slot| slot.is_live());
        let least = |slot: &Slot| slot.report.held.saturating_sub(slot.report.context);
        live.fold(0_u64, |sum, slot| sum.saturating_add(least(slot)))
    }

    /// Nobody grants as much.
    pub(super) fn is_rich(&self) -> bool {
        self.balance > MOST_BALANCE
    }

    /// Somebody has lowered the total: while nothing changes it is never below that.
    pub(super) fn is_below_its_slots(&self) -> bool {
        self.still && self.used < self.least()
    }
}

impl Share {
    pub(super) fn device(&self) -> Device {
        Device { gpu: self.policy.gpu, mig: self.policy.mig }
    }

    pub(super) fn key(&self) -> (ClaimUid, ShareId) {
        (self.claim.clone(), self.id.clone())
    }

    pub(super) fn observes_only(&self) -> bool {
        self.policy.flags.has(Flags::OBSERVE_ONLY)
    }

    /// The containers of the share that a process is in; there is at most one.
    pub(super) fn container(&self, process: &Process) -> Option<&str> {
        let found = self.containers.iter().find(|(_, cgroups)| process.cgroups.are_within(cgroups));
        found.map(|(id, _)| id.as_str())
    }

    /// The slots of a process that lives.
    pub(super) fn slots_of<'a>(&'a self, process: &'a Process) -> impl Iterator<Item = &'a Slot> {
        let slots = self.account.as_ref().map(|account| account.slots.as_slice()).unwrap_or_default();
        slots.iter().filter(|slot| slot.is_live() && is_of(&slot.report, &process.who))
    }
}

impl Slot {
    /// Somebody has it, as far as the processes of the share have noticed.
    pub(super) fn is_taken(&self) -> bool {
        self.report.owner.state() == SlotState::Live
    }

    /// Its owner lives. One that the node has said is dead keeps its slot until a process
    /// of the share sees to it, and there may be none left.
    pub(super) fn is_live(&self) -> bool {
        let line = &self.report.line;
        self.is_taken() && !(line.dead && line.about == self.report.owner)
    }
}

/// Whether a slot says that it is a process's. What the process could not find out
/// about itself, for want of a `/proc`, is zero.
pub(super) fn is_of(slot: &SlotReport, is: &Identity) -> bool {
    let said = &slot.who;
    let agrees = |said: u64, is: u64| said == 0 || is == 0 || said == is;
    said.pid == is.pid
        && agrees(said.namespace, is.namespace)
        && agrees(said.start, is.start)
        && agrees(said.image, is.image)
}

impl Look {
    /// What all processes of a device had together, in nanoseconds a second, where that is all that is known.
    pub(super) fn busy_of(&self, device: Device) -> Option<u64> {
        device.mig.map_or(self.whole, |mig| self.busy.get(&mig).copied())
    }

    /// The shares that a process belongs to, by index: those of the container it is in
    /// or, where no hook told of one, those whose policy page it has mounted.
    pub(super) fn shares_of(&self, process: &Process) -> BTreeSet<usize> {
        let all = || self.shares.iter().enumerate();
        let by_cgroup: BTreeSet<usize> =
            all().filter(|(_, share)| share.container(process).is_some()).map(|(at, _)| at).collect();
        match by_cgroup.is_empty() {
            false => by_cgroup,
            true => all()
                .filter(|(_, share)| super::mounts::has(&process.mounts, &share.page))
                .map(|(at, _)| at)
                .collect(),
        }
    }
}
