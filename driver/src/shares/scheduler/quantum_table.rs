//! Grants quanta on the policy pages of shares, and reads from their accounts who waits, works or has
//! completed its work.
//!
//! Shares of a MIG instance are divided among themselves, like those of a whole GPU. A holder ends
//! its quantum by itself, at the time on its page, and rings when its work has completed. So a
//! hand-over costs this thread one wake. A holder that does not complete in time loses exclusivity:
//! the next share launches beside it. Quanta on the pages expire, so a node without an agent blocks
//! no share.

use super::doorbell::{Door, WakeReason};
use super::explained::{GrantLog, PENDING_MAX_NS, ShareLevel, Unexplained};
use super::grant_table::{Doors, PlannedShare};
use super::quanta::{Bucket, Law, Ledger, Next, QUANTUM_MIN_NS, divides};
use crate::shares::MappedPolicy;
use crate::shares::snapshot::{Device, ShareKey};
use divvy_api::ClaimUid;
use divvy_pages::account::{HEADER, QuantumState, Snapshot};
use divvy_pages::policy::UNBOUNDED;
use divvy_pages::{Compute, GpuUuid, PolicyPage, SlotState};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use rustix::thread::futex::{self, Flags};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

/// A holder that has not completed its work this long after the end of its quantum loses
/// exclusivity, in nanoseconds.
const LATE_NS: u64 = 20_000_000;
/// It is checked after this time whether its process has died, in nanoseconds. Most have completed their
/// work by then.
const CHECK_NS: u64 = LATE_NS / 4;
/// A holder without work in flight for this long gives its quantum up to a share that waits, in
/// nanoseconds: about the cost of a hand-over.
const PAUSE_NS: u64 = 300_000;
/// Quanta count for this long after they were written last, in nanoseconds.
const EXPIRE_NS: u64 = 500_000_000;
/// They are written again after this time.
const RENEW_NS: u64 = EXPIRE_NS / 3;

/// A process that was there when its share was planned may have such a long kernel in flight, which
/// it launched without a quantum.
const EARLIER_KERNEL_NS: u64 = 10_000_000_000;
/// An audit corrects the charges of a device for this long. The next audit does so again.
const CORRECTION_NS: u64 = 3_000_000_000;

/// The grants and charges of a share under quanta.
#[derive(Clone, Debug)]
pub(crate) struct ShareGrants {
    pub(crate) key: ShareKey,
    pub(crate) log: GrantLog,
    pub(crate) level: ShareLevel,
}

/// Counters of a share since it was planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QuantumUsage {
    /// GPU time that it was charged, in nanoseconds.
    pub(crate) used_ns: u64,
    /// Time for which it had the device, in nanoseconds.
    pub(crate) granted_ns: u64,
    pub(crate) hand_overs: u64,
    pub(crate) late_hand_overs: u64,
}

#[derive(Debug, Default)]
pub(crate) struct QuantumTable {
    devices: BTreeMap<Device, DeviceQuanta>,
    doors: Arc<Doors>,
    are_others: bool,
    /// A claim has shares of several devices.
    has_gangs: bool,
}

/// A claim that has a device, and until when; 0 while no other share waits there.
#[derive(Clone, Debug)]
struct Held {
    device: Device,
    claim: ClaimUid,
    ends: u64,
}

#[derive(Debug, Default)]
struct DeviceQuanta {
    seats: Vec<Seat>,
    law: Law,
    /// Quanta are in force.
    is_gated: bool,
    holder: Option<Holder>,
    /// The number of the last quantum.
    number: u32,
    /// The time of the next check, also without a ring.
    next: u64,
    renewed: u64,
    /// Active time that charges do not explain, and until when they are corrected for it.
    unexplained: Option<(Unexplained, u64)>,
}

/// The share that has the device.
#[derive(Clone, Copy, Debug)]
struct Holder {
    index: usize,
    number: u32,
    began: u64,
    /// 0 while no other share waits.
    ends: u64,
    /// Since when it has no work in flight.
    paused: Option<u64>,
    /// GPU time that it had been charged before, in nanoseconds.
    charged: u64,
    /// GPU time that it used by its page in this quantum, in nanoseconds.
    used: u64,
}

#[derive(Debug)]
struct Seat {
    key: ShareKey,
    file: (u64, u64),
    page: MappedPolicy,
    account: Arc<File>,
    door: Arc<Door>,
    doorbell: u32,
    compute: Compute,
    joined: u64,
    /// The content of its account when it was last read.
    seen: Seen,
    /// It waited before that.
    waited: bool,
    /// The doorbell when it had a quantum and did not wake. Until it rings again it does not wait.
    slept_at: Option<u32>,
    /// The quantum in which it still works although another share has the device.
    late: Option<u32>,
    /// When its quantum ends, if it has one.
    ends: Option<u64>,
    usage: QuantumUsage,
    /// Charged GPU time, without that of late shares beside it, in nanoseconds.
    served_ns: u64,
    log: GrantLog,
    earlier: Option<EarlierWork>,
    /// When its quantum began, or it was charged last.
    charged_at: u64,
}

/// Work may be in flight that was launched without a quantum. It has completed when work that was
/// launched later has completed.
#[derive(Clone, Copy, Debug)]
struct EarlierWork {
    /// The GPU time charged until then, and the last quantum.
    charged: u64,
    number: u32,
    /// It was seen to work in a later quantum.
    has_worked: bool,
}

/// The content of an account. Tenants write it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    /// A launch waits.
    waits: bool,
    /// The newest quantum in which a process works, or has ended its work.
    works: Option<u32>,
    ended: Option<u32>,
    /// The newest quantum that a process has begun.
    begun: Option<u32>,
    /// A process that works is known to live.
    is_alive: bool,
    has_process: bool,
    /// GPU time charged so far, in nanoseconds.
    charged: u64,
    bucket: Bucket,
    /// The file was cut short, so nothing is known.
    is_cut: bool,
}

impl QuantumTable {
    /// From now on the shares of a GPU and its instances are these.
    /// Returns whether the thread has to look at once.
    pub(crate) fn plan(&mut self, gpu: GpuUuid, shares: Vec<PlannedShare>, now: u64) -> bool {
        let known = self.devices.keys().filter(|device| device.gpu == gpu);
        let mut by_device: BTreeMap<Device, Vec<PlannedShare>> =
            known.map(|device| (*device, Vec::new())).collect();
        for planned in shares {
            by_device.entry(Device { gpu, mig: planned.mig }).or_default().push(planned);
        }
        for (device, shares) in by_device {
            let of = self.devices.entry(device).or_default();
            self.are_others |= of.plan(shares, now);
        }
        self.devices.retain(|_, of| !of.seats.is_empty());
        let mut claims: Vec<_> =
            self.devices.values().flat_map(|of| &of.seats).map(|seat| &seat.key.0).collect();
        claims.sort_unstable();
        self.has_gangs = claims.windows(2).any(|pair| pair[0] == pair[1]);
        self.are_others
    }

    pub(crate) fn has(&self, gpu: GpuUuid, share: &ShareKey) -> bool {
        let mut devices = self.devices.iter().filter(|(device, _)| device.gpu == gpu);
        devices.any(|(_, of)| of.seats.iter().any(|seat| seat.key == *share))
    }

    pub(crate) fn keep(&mut self, are_there: impl Fn(&GpuUuid) -> bool) {
        self.keep_devices(|device| are_there(&device.gpu));
    }

    /// Releases the shares of the other instances of a GPU. `None` is the GPU itself.
    pub(crate) fn retain(&mut self, gpu: GpuUuid, are_there: impl Fn(Option<GpuUuid>) -> bool) {
        self.keep_devices(|device| device.gpu != gpu || are_there(device.mig));
    }

    fn keep_devices(&mut self, are_there: impl Fn(&Device) -> bool) {
        let before = self.devices.len();
        self.devices.retain(|device, of| {
            let is_there = are_there(device);
            if !is_there {
                of.seats.iter().for_each(Seat::release);
            }
            is_there
        });
        self.are_others |= self.devices.len() < before;
    }

    /// Ends the quanta: shares go by their own buckets until the next agent.
    pub(crate) fn leave(&mut self) {
        self.devices.values_mut().flat_map(|of| &of.seats).for_each(|seat| {
            if let Some(page) = seat.page.page() {
                page.set_quanta_expire(0);
                wake(page);
            }
        });
    }

    /// The counters of the shares of a GPU that launch under quanta. A holder is granted the time
    /// since its quantum began, which may last for hours while no other share waits.
    pub(crate) fn usage(&self, gpu: GpuUuid, now: u64) -> BTreeMap<ShareKey, QuantumUsage> {
        let devices = self.devices.iter().filter(|(device, of)| device.gpu == gpu && of.is_gated);
        devices.flat_map(|(_, of)| of.usage(now)).collect()
    }

    /// The grants and charges of the shares that launch under quanta, by device.
    pub(crate) fn grants(&self, gpu: GpuUuid, now: u64) -> BTreeMap<Device, Vec<ShareGrants>> {
        let devices = self.devices.iter().filter(|(device, of)| device.gpu == gpu && of.is_gated);
        devices
            .map(|(device, of)| (*device, of.seats.iter().map(|seat| seat.grants(now)).collect()))
            .collect()
    }

    /// Charges do not explain the active time of a device: they are corrected until the next audits.
    pub(crate) fn correct(&mut self, device: &Device, unexplained: Unexplained, now: u64) {
        if let Some(of) = self.devices.get_mut(device) {
            of.unexplained = Some((unexplained, now + CORRECTION_NS));
        }
    }

    /// Does what is due, and what follows from rings.
    pub(crate) fn tick(&mut self, now: u64, rang: &WakeReason) {
        let held = if self.has_gangs { self.held() } else { Vec::new() };
        for (device, of) in self.devices.iter_mut().filter(|(_, of)| of.is_gated) {
            let has_rung = |seat: &Seat| rang.may_be(&seat.door);
            if of.next <= now || of.seats.iter().any(has_rung) {
                of.advance(now, has_rung, held.iter().filter(|held| held.device != *device));
                self.are_others = true;
            }
        }
    }

    fn held(&self) -> Vec<Held> {
        let holder = |(device, of): (&Device, &DeviceQuanta)| {
            let holder = of.holder?;
            let claim = of.seats.get(holder.index)?.key.0.clone();
            Some(Held { device: *device, claim, ends: holder.ends })
        };
        self.devices.iter().filter_map(holder).collect()
    }

    /// The doors to wait at, and until when.
    pub(crate) fn doors(&mut self) -> (Arc<Doors>, u64) {
        if std::mem::take(&mut self.are_others) {
            let gated = self.devices.values().filter(|of| of.is_gated);
            let heard =
                gated.flat_map(|of| of.seats.iter().enumerate().filter(|(at, seat)| of.hears(*at, seat)));
            let doors = heard.map(|(_, seat)| (Arc::clone(&seat.door), seat.doorbell));
            self.doors = Arc::new(doors.take(super::doorbell::MOST).collect());
        }
        let gated = self.devices.values().filter(|of| of.is_gated);
        let until = gated.map(|of| of.next).min().unwrap_or(u64::MAX);
        (Arc::clone(&self.doors), until)
    }
}

impl DeviceQuanta {
    fn plan(&mut self, shares: Vec<PlannedShare>, now: u64) -> bool {
        let holder = self.holder.take().and_then(|holder| {
            let seat = self.seats.get(holder.index)?;
            Some((Arc::clone(&seat.door), holder))
        });
        let mut before: Vec<(Seat, Ledger)> =
            std::mem::take(&mut self.seats).into_iter().zip(self.law.ledgers.drain(..)).collect();
        let mut has_changed = false;
        for planned in shares {
            let known = before.iter().position(|(seat, _)| seat.is_of(&planned));
            let (seat, ledger) = match known.map(|at| before.swap_remove(at)) {
                Some((mut seat, ledger)) => {
                    seat.compute = planned.compute;
                    (Ok(seat), ledger.with_policy(planned.compute))
                }
                None => {
                    has_changed = true;
                    let seat = Seat::new(&planned, now);
                    let bucket = seat.as_ref().map_or(Bucket::default(), |seat| seat.seen.bucket);
                    (seat, Ledger::new(planned.compute, bucket, now))
                }
            };
            match seat {
                Ok(seat) => {
                    self.seats.push(seat);
                    self.law.ledgers.push(ledger);
                }
                // Its pages are being created or removed, or a process holds a lease on them.
                Err(cause) => tracing::debug!(share = ?planned.key, %cause, "share not scheduled"),
            }
        }
        has_changed |= !before.is_empty();
        before.iter().for_each(|(seat, _)| seat.release());
        // Pages that were written again know nothing of a quantum.
        self.holder = holder.and_then(|(door, holder)| {
            let index = self.seats.iter().position(|seat| Arc::ptr_eq(&seat.door, &door))?;
            Some(Holder { index, ..holder })
        });
        let is_gated = divides(self.seats.iter().map(|seat| seat.compute));
        if !is_gated && let Some(holder) = self.holder.take() {
            self.seats[holder.index].usage.granted_ns += now.saturating_sub(holder.began);
        }
        let is_other_law = is_gated != std::mem::replace(&mut self.is_gated, is_gated);
        if is_other_law {
            self.seats.iter_mut().for_each(|seat| seat.begin_log(now));
        }
        if is_other_law || has_changed {
            self.seats.iter().for_each(|seat| if is_gated { seat.gate() } else { seat.release() });
            (self.renewed, self.next) = (0, now);
            if is_gated {
                self.renew(now);
                return true;
            }
        }
        has_changed
    }

    fn usage(&self, now: u64) -> impl Iterator<Item = (ShareKey, QuantumUsage)> {
        self.seats.iter().enumerate().map(move |(index, seat)| {
            let holder = self.holder.filter(|holder| holder.index == index);
            let since = holder.map_or(0, |holder| now.saturating_sub(holder.began));
            let granted_ns = seat.usage.granted_ns.saturating_add(since);
            (seat.key.clone(), QuantumUsage { granted_ns, ..seat.usage })
        })
    }

    /// Whether a ring of the share is waited for. One that waits has rung.
    fn hears(&self, index: usize, seat: &Seat) -> bool {
        let holds = self.holder.is_some_and(|holder| holder.index == index);
        !seat.seen.is_cut && (holds || !seat.seen.waits || seat.late.is_some())
    }

    /// Looks at the shares that rang and at the holder, and does what follows.
    fn advance<'a>(
        &mut self,
        now: u64,
        has_rung: impl Fn(&Seat) -> bool,
        held: impl Iterator<Item = &'a Held> + Clone,
    ) {
        self.renew(now);
        for index in 0..self.seats.len() {
            let holds = self.holder.is_some_and(|holder| holder.index == index);
            let seat = &mut self.seats[index];
            if holds || has_rung(seat) || seat.late.is_some() || seat.seen.is_cut {
                let used = seat.look(now);
                self.charge(index, used, now);
            }
            let seat = &mut self.seats[index];
            if seat.late.is_some_and(|late| seat.seen.works != Some(late)) {
                seat.late = None;
            }
        }
        for index in 0..self.seats.len() {
            let holds = self.holder.is_some_and(|holder| holder.index == index);
            let seat = &self.seats[index];
            if seat.seen.waits || seat.seen.works.is_some() {
                self.law.is_active(index, seat.seen.waits && !holds, now);
            }
            let seat = &mut self.seats[index];
            let waits = seat.seen.waits && !holds;
            let waited = std::mem::replace(&mut seat.waited, waits);
            if waits && !waited {
                self.shorten(index, now);
            }
        }
        self.next = now + RENEW_NS;
        self.check_holder(now);
        if self.holder.is_none() {
            self.choose(held, now);
        }
        for (index, seat) in self.seats.iter_mut().enumerate() {
            let holds = self.holder.is_some_and(|holder| holder.index == index);
            seat.log.set(holds || seat.late.is_some(), now);
        }
    }

    /// Charges a share for the time that its page shows. Beside shares that are late, and beside a
    /// process that works without a grant, the GPU divides its time, so the holder had half of it.
    fn charge(&mut self, index: usize, used: u64, now: u64) {
        let late = self.late_beside(index);
        self.seats[index].served_ns += used / (1 + late);
        let beside = late + u64::from(self.is_beside_ungranted(now));
        if let Some(holder) = self.holder.as_mut().filter(|holder| holder.index == index) {
            holder.used = holder.used.saturating_add(used);
        }
        self.law.charge(index, used / (1 + beside), now);
    }

    fn is_beside_ungranted(&self, now: u64) -> bool {
        matches!(self.unexplained, Some((Unexplained::Ungranted, until)) if now < until)
    }

    /// Whether the page of a share shows less than the share uses.
    fn has_low_charges(&self, index: usize, now: u64) -> bool {
        let Some((Unexplained::LowCharges(low), until)) = &self.unexplained else { return false };
        now < *until && low.contains(&self.seats[index].key)
    }

    /// Makes the current quantum a short one if the share, which has begun to wait, precedes the holder.
    fn shorten(&mut self, index: usize, now: u64) {
        if let Some(holder) = self.holder.as_mut().filter(|holder| holder.ends > 0)
            && self.law.precedes(index, holder.index)
        {
            let ends = holder.ends.min(now.max(holder.began + QUANTUM_MIN_NS));
            if ends < holder.ends {
                holder.ends = ends;
                self.seats[holder.index].end_at(ends);
            }
        }
    }

    fn waits_beside(&self, holder: usize) -> impl Iterator<Item = usize> {
        let waits = move |(index, seat): &(usize, &Seat)| *index != holder && seat.seen.waits;
        self.seats.iter().enumerate().filter(waits).map(|(index, _)| index)
    }

    /// Whether others wait, or work although the share has the device. Alone, it goes by its bucket.
    fn is_contended(&self, holder: usize) -> bool {
        self.waits_beside(holder).next().is_some() || self.late_beside(holder) > 0
    }

    /// Shares that work although another has the device.
    fn late_beside(&self, holder: usize) -> u64 {
        let is_late =
            |(index, seat): &(usize, &Seat)| *index != holder && seat.late.is_some() && seat.seen.is_alive;
        self.seats.iter().enumerate().filter(is_late).count() as u64
    }

    /// Takes the device from the holder if its quantum has ended.
    fn check_holder(&mut self, now: u64) {
        let Some(mut holder) = self.holder else { return };
        let is_contended = self.is_contended(holder.index);
        let outranked =
            self.waits_beside(holder.index).any(|index| self.law.outranks(index, holder.index, now));
        let seat = &mut self.seats[holder.index];
        let works = seat.seen.works == Some(holder.number);
        let has_ended = seat.seen.ended == Some(holder.number);
        let is_asleep = seat.is_asleep(&holder);
        if !is_contended {
            self.holder = Some(Holder { paused: None, ..holder });
            let begins = holder.began + LATE_NS;
            if has_ended && !works || is_asleep && now >= begins {
                self.release(now);
            } else if is_asleep {
                self.next = self.next.min(begins);
            }
            return;
        }
        if outranked && (holder.ends == 0 || holder.ends > now) {
            holder.ends = now;
            seat.end_at(holder.ends);
        } else if holder.ends == 0 {
            holder.ends = now.max(holder.began + QUANTUM_MIN_NS);
            seat.end_at(holder.ends);
        }
        if !works {
            let since = *holder.paused.get_or_insert(now);
            // A share that was just woken has its whole quantum to begin.
            let patience = if is_asleep { holder.ends } else { since + PAUSE_NS };
            self.holder = Some(holder);
            if has_ended || now >= patience || now >= holder.ends {
                self.release(now);
            } else {
                self.next = self.next.min(patience.min(holder.ends));
            }
            return;
        }
        holder.paused = None;
        self.holder = Some(holder);
        let late = holder.ends + LATE_NS;
        if now < late {
            // Soon after the end it is checked whether the process lives.
            let check = holder.ends + CHECK_NS;
            self.next = self.next.min(if now < check { check } else { late });
            return;
        }
        let seat = &mut self.seats[holder.index];
        seat.late = Some(holder.number);
        seat.usage.late_hand_overs += 1;
        self.release(now);
    }

    fn release(&mut self, now: u64) {
        if let Some(holder) = self.holder.take() {
            let seat = &mut self.seats[holder.index];
            seat.usage.granted_ns += now.saturating_sub(holder.began);
            seat.grant(0, 1);
            // It may have begun to work at this moment.
            let used = seat.look(now);
            // One that was just woken is only slow.
            if seat.is_asleep(&holder) && now >= holder.began + QUANTUM_MIN_NS {
                (seat.slept_at, seat.seen.waits) = (Some(seat.doorbell), false);
            }
            if seat.seen.works == Some(holder.number) && seat.late.is_none() {
                seat.late = Some(holder.number);
            }
            self.charge(holder.index, used, now);
            if self.has_low_charges(holder.index, now) {
                let shown = holder.used.saturating_add(used);
                let missing = now.saturating_sub(holder.began).saturating_sub(shown);
                self.law.charge(holder.index, missing / (1 + self.late_beside(holder.index)), now);
            }
        }
    }

    /// Gives the device to the next share. A claim that has another device comes first, until it
    /// loses that: its kernels may wait for each other.
    fn choose<'a>(&mut self, held: impl Iterator<Item = &'a Held> + Clone, now: u64) {
        let seats = &self.seats;
        let waits = |index: usize| seats[index].seen.waits;
        let held_until = |index: usize| {
            let claim = &seats[index].key.0;
            let mut until = held.clone().filter(|held| held.claim == *claim).map(|held| held.ends);
            until.find(|ends| *ends == 0 || *ends > now + QUANTUM_MIN_NS)
        };
        let together = self.law.next(|index| waits(index) && held_until(index).is_some(), now);
        let next = match together {
            Next::Grant { index, length } => {
                let left = held_until(index).filter(|ends| *ends > 0).map_or(length, |ends| ends - now);
                Next::Grant { index, length: left }
            }
            _ => self.law.next(waits, now),
        };
        match next {
            Next::Nobody => {}
            Next::Tokens { at } => self.next = self.next.min(at),
            Next::Grant { index, length } => {
                let is_contended = self.is_contended(index);
                self.number = self.number.wrapping_add(1).max(first_number(now)).max(1);
                let ends = if is_contended { now + length } else { 0 };
                let seat = &mut self.seats[index];
                seat.usage.hand_overs += 1;
                seat.grant(self.number, ends);
                let charged = seat.seen.charged;
                seat.charged_at = now;
                let number = self.number;
                self.holder =
                    Some(Holder { index, number, began: now, ends, paused: None, charged, used: 0 });
                self.next = self.next.min(if is_contended { ends + PAUSE_NS } else { now + LATE_NS });
            }
        }
    }

    /// Extends what is written before it expires.
    fn renew(&mut self, now: u64) {
        if now < self.renewed + RENEW_NS {
            return;
        }
        if self.renewed > 0 && now >= self.renewed + EXPIRE_NS {
            // Shares went by their own buckets since then, and kernels of that time may still run.
            self.seats.iter_mut().for_each(|seat| seat.expect_earlier_work(now));
        }
        self.renewed = now;
        for (seat, ledger) in self.seats.iter().zip(&self.law.ledgers) {
            let Some(page) = seat.page.page() else { continue };
            let ceiling = ledger.ceiling();
            let rate = if ceiling < crate::shares::snapshot::entitlement::NS_PER_SECOND {
                ceiling
            } else {
                UNBOUNDED
            };
            page.grant(rate, now + EXPIRE_NS);
            page.set_quanta_expire(now + EXPIRE_NS);
        }
    }
}

impl Seat {
    fn new(planned: &PlannedShare, now: u64) -> io::Result<Self> {
        let file = identity(&planned.policy)?;
        let page = MappedPolicy::open(&planned.policy)?;
        page.page().ok_or(io::ErrorKind::InvalidData)?;
        let mut seat = Self {
            key: planned.key.clone(),
            file,
            page,
            account: Arc::clone(&planned.account),
            door: Arc::new(Door::of(&planned.account)?),
            doorbell: 0,
            compute: planned.compute,
            joined: now,
            seen: Seen::default(),
            waited: false,
            slept_at: None,
            late: None,
            ends: None,
            usage: QuantumUsage::default(),
            served_ns: 0,
            log: GrantLog::default(),
            earlier: None,
            charged_at: now,
        };
        seat.look(now);
        seat.begin_log(now);
        Ok(seat)
    }

    fn is_of(&self, planned: &PlannedShare) -> bool {
        self.key == planned.key
            && Arc::ptr_eq(&self.account, &planned.account)
            && identity(&planned.policy).is_ok_and(|file| file == self.file)
    }

    fn begin_log(&mut self, now: u64) {
        self.log = GrantLog::new(now);
        if self.seen.has_process {
            self.expect_earlier_work(now);
        }
    }

    fn expect_earlier_work(&mut self, now: u64) {
        self.log.forget(now + EARLIER_KERNEL_NS);
        let (charged, number) = (self.usage.used_ns, first_number(now));
        self.earlier = Some(EarlierWork { charged, number, has_worked: false });
    }

    fn grants(&self, now: u64) -> ShareGrants {
        let works = self.log.is_open() && self.seen.works.is_some();
        let pending = if works { now.saturating_sub(self.charged_at).min(PENDING_MAX_NS) } else { 0 };
        let level = ShareLevel { charged: self.served_ns, pending, granted: self.log.total(now) };
        ShareGrants { key: self.key.clone(), log: self.log.clone(), level }
    }

    /// It has a quantum and still waits for it. A process that has worked in it may wait for the next one by
    /// now, and then the share was charged.
    fn is_asleep(&self, holder: &Holder) -> bool {
        self.seen.waits && self.seen.begun != Some(holder.number) && self.seen.charged == holder.charged
    }

    /// Has launches need a quantum, which there is none of yet.
    fn gate(&self) {
        if let Some(page) = self.page.page() {
            page.set_exclusive(true);
            page.set_agent_limited(true);
        }
    }

    /// The share is not scheduled any more.
    fn release(&self) {
        if let Some(page) = self.page.page() {
            page.set_exclusive(false);
            page.set_agent_limited(false);
            page.grant_quantum(0, 0);
            page.set_quanta_expire(0);
            wake(page);
        }
    }

    fn grant(&mut self, number: u32, ends: u64) {
        self.ends = (number > 0).then_some(ends);
        if let Some(page) = self.page.page() {
            page.grant_quantum(number, ends);
            if number > 0 {
                wake(page);
            }
        }
    }

    fn end_at(&mut self, ends: u64) {
        self.ends = Some(ends);
        if let Some(page) = self.page.page() {
            page.end_quantum_at(ends);
            wake(page);
        }
    }

    /// Reads its account. Returns the GPU time that was charged since the last time.
    fn look(&mut self, now: u64) -> u64 {
        let before = self.seen;
        // A process that died in a quantum works for ever, by its slot.
        let is_late = self.late.is_some() || self.ends.is_some_and(|ends| ends > 0 && now > ends);
        // The doorbell is read before the slots, so a change after that rings again.
        let Some((doorbell, seen)) = read(&self.account, is_late) else {
            self.seen = Seen { is_cut: true, charged: before.charged, ..Seen::default() };
            return 0;
        };
        (self.doorbell, self.seen) = (doorbell, seen);
        self.slept_at = self.slept_at.filter(|slept_at| *slept_at == doorbell);
        self.seen.waits &= self.slept_at.is_none();
        let used = if before.is_cut { 0 } else { seen.charged.saturating_sub(before.charged) };
        // The GPU cannot have served it for longer, and a forged charge must not become a debt.
        let used = used.min(now.saturating_sub(self.joined).saturating_sub(self.usage.used_ns));
        self.usage.used_ns += used;
        if used > 0 {
            self.charged_at = now;
        }
        if let Some(earlier) = &mut self.earlier {
            earlier.has_worked |= seen.works > Some(earlier.number);
        }
        let is_over = |earlier: EarlierWork| {
            self.usage.used_ns > earlier.charged || earlier.has_worked && seen.works.is_none()
        };
        if self.earlier.is_some_and(is_over) {
            self.earlier = None;
            self.log.learn(now);
        }
        used
    }
}

/// The lowest number of a quantum that begins now: in milliseconds of the clock, so that no earlier
/// agent has used it.
fn first_number(now: u64) -> u32 {
    (now / 1_000_000) as u32
}

/// The doorbell of an account, and what its slots say.
fn read(account: &File, is_late: bool) -> Option<(u32, Seen)> {
    let mut page = vec![0; HEADER + 4 * divvy_pages::account::SLOT];
    let length = read_at(account, &mut page)?;
    page.truncate(length);
    let needed = Snapshot::length(&page);
    if needed > page.len() {
        page.resize(needed, 0);
        let length = read_at(account, &mut page)?;
        page.truncate(length);
    }
    let snapshot = Snapshot::new(&page).ok()?;
    let bucket = Bucket { balance: snapshot.balance(), refilled_at: snapshot.refilled_at() };
    let mut seen = Seen { charged: snapshot.charged_ns(), bucket, ..Seen::default() };
    for slot in snapshot.slots() {
        let Some((state, number)) = slot.quantum.filter(|_| slot.owner.state() == SlotState::Live) else {
            continue;
        };
        seen.has_process = true;
        seen.begun = seen.begun.max(Some(number));
        match state {
            QuantumState::Working => {
                let lives =
                    (is_late && slot.node_line.owner == slot.owner).then(|| lives(slot.node_line.host_pid));
                if lives != Some(Some(false)) {
                    seen.works = seen.works.max(Some(number));
                    seen.is_alive |= lives == Some(Some(true));
                }
            }
            QuantumState::Waiting => {
                seen.waits = true;
                seen.ended = seen.ended.max(Some(number));
            }
            QuantumState::Drained => {}
        }
    }
    Some((snapshot.doorbell(), seen))
}

/// Whether a process exists; `None` if its PID is unknown.
fn lives(host_pid: u32) -> Option<bool> {
    let pid = i32::try_from(host_pid).ok().and_then(Pid::from_raw)?;
    Some(test_kill_process(pid) != Err(Errno::SRCH))
}

fn read_at(account: &File, page: &mut [u8]) -> Option<usize> {
    let length = account.read_at(page, 0).ok()?;
    (length >= HEADER).then_some(length)
}

fn wake(page: &PolicyPage) {
    // It fails for no word of ours.
    let _ = futex::wake(page.quantum(), Flags::empty(), i32::MAX as u32);
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    path.metadata().map(|meta| (meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests;
