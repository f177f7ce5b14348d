//! The mapped policy pages of the shares whose time is divided, and what was last written to them.
//!
//! Shares of a MIG instance are divided among themselves, like those of a whole GPU. Turns apply to
//! whole GPUs only. Values that a page already has are not written again, so an idle node writes one
//! grant per second for each limited share. The state of a page is bound to its file: a recreated
//! page belongs to another share.

mod grant_history;
mod share_state;

use super::doorbell::{Door, WakeReason};
use super::fast_sampling::ActivityChange;
use super::grants::{self, CLOSED, Gate, ShareStatus, Turn, Turns};
use crate::shares::snapshot::{Device, ShareKey};
use divvy_pages::GpuUuid;
pub(crate) use share_state::{GrantSummary, PlannedShare};
use share_state::{Out, PATIENCE, ShareState, TICK, WAITS};
use std::collections::BTreeMap;
use std::sync::Arc;

const REST: u64 = super::fast_sampling::REST.as_nanos() as u64;
/// A share that works or rests for less than this is intermittent. Its neighbours count it by its
/// mean time between two audits.
const STAYS: u64 = crate::shares::snapshot::AUDIT_INTERVAL.as_nanos() as u64;

/// Doors, with what their doorbells said.
pub(crate) type Doors = Vec<(Arc<Door>, u32)>;

#[derive(Debug, Default)]
pub(crate) struct GrantTable {
    parts: BTreeMap<Device, Part>,
    /// Those that are waited at, and whose they are; whether they are others by now, and until when
    /// that wait is.
    doors: Arc<Doors>,
    owners: Vec<Device>,
    are_others: bool,
    until: Option<u64>,
}

#[derive(Debug, Default)]
struct Part {
    shares: Vec<ShareState>,
    /// The parts of the shares; see [`grants::parts`].
    parts: Vec<u64>,
    gate: Gate,
    turns: Option<Turns<ShareKey>>,
    /// Until when the gate is closed, if it is.
    shut: Option<u64>,
    /// Other shares are active than at the last query, not counting intermittent ones.
    has_moved: bool,
    /// One of them does for the first time.
    has_begun: bool,
    /// When it was last asked and had changed.
    told: u64,
    /// The time of the next action without a ring.
    next: u64,
    /// The doors of those that are to ring, and how many of them are waited at, so that who rang is known.
    doors: Doors,
    heard: usize,
    /// The earliest and the latest time of the next check.
    due: u64,
    late: u64,
}

impl GrantTable {
    /// The grants of each share since the previous call, up to `until`.
    pub(crate) fn since(&mut self, gpu: GpuUuid, until: u64) -> BTreeMap<ShareKey, GrantSummary> {
        let parts = self.parts.iter_mut().filter(|(device, _)| device.gpu == gpu).map(|(_, part)| part);
        let seats = parts.flat_map(|part| &mut part.shares);
        seats.map(|seat| (seat.key.clone(), seat.had(until))).collect()
    }

    /// Whether a share of the GPU is one of those that were planned last.
    pub(crate) fn has(&self, gpu: GpuUuid, share: &ShareKey) -> bool {
        let mut parts = self.parts.iter().filter(|(device, _)| device.gpu == gpu);
        parts.any(|(_, part)| part.shares.iter().any(|seat| seat.key == *share))
    }

    /// From now on the shares of a GPU and its instances are these. Says whether the thread has
    /// anything to do with them before its wait ends.
    pub(crate) fn plan(&mut self, gpu: GpuUuid, shares: Vec<PlannedShare>, now: u64) -> bool {
        let known = self.parts.keys().filter(|device| device.gpu == gpu);
        let mut by_device: BTreeMap<Device, Vec<PlannedShare>> =
            known.map(|device| (*device, Vec::new())).collect();
        for planned in shares {
            by_device.entry(Device { gpu, mig: planned.mig }).or_default().push(planned);
        }
        let mut next = u64::MAX;
        for (device, shares) in by_device {
            let part = self.parts.entry(device).or_default();
            self.are_others |= part.plan(shares, now);
            next = next.min(part.late);
        }
        // For a whole GPU, the time of the last notification stays known.
        self.parts.retain(|device, part| device.mig.is_none() || !part.shares.is_empty());
        self.are_others || self.is_before(next)
    }

    pub(crate) fn turns(&mut self, gpu: GpuUuid, order: Vec<ShareKey>, quantum: u64, now: u64) -> bool {
        let part = self.parts.entry(Device { gpu, mig: None }).or_default();
        let before = part.turns.take();
        part.turns = (order.len() > 1).then(|| Turns::new(order, quantum, before, now));
        part.settle(now);
        self.are_others |= part.arm(now);
        let next = part.late;
        self.are_others || self.is_before(next)
    }

    /// The thread would wake too late for that.
    fn is_before(&self, next: u64) -> bool {
        next < self.until.unwrap_or(u64::MAX)
    }

    pub(crate) fn keep(&mut self, are_there: impl Fn(&GpuUuid) -> bool) {
        let before = self.parts.len();
        self.parts.retain(|device, _| are_there(&device.gpu));
        self.are_others |= self.parts.len() < before;
    }

    /// Opens all gates when the agent ends.
    pub(crate) fn leave(&mut self) {
        self.parts.values_mut().flat_map(|part| &mut part.shares).for_each(|seat| seat.close(None, 0));
    }

    /// The GPUs on which others work since this was last asked. It is told of as often as it is
    /// heard ([`super::fast_sampling`]).
    pub(crate) fn moved(&mut self, now: u64) -> Vec<ActivityChange> {
        let moved = |(device, of): (&Device, &mut Part)| {
            let is_first = std::mem::take(&mut of.has_begun);
            std::mem::take(&mut of.has_moved).then(|| {
                of.told = now;
                ActivityChange { gpu: device.gpu, is_first }
            })
        };
        self.parts.iter_mut().filter_map(moved).collect()
    }

    /// Whether there are any.
    pub(crate) fn has_moved(&self) -> bool {
        self.parts.values().any(|part| part.has_moved)
    }

    /// Checks the shares that rang or may rest, and acts on the result. The state of other GPUs is
    /// not touched, because it is in no cache.
    pub(crate) fn tick(&mut self, now: u64, rang: &WakeReason) {
        let mut doors = self.doors.iter().zip(&self.owners);
        let rung = doors.find_map(|((door, _), owner)| rang.is(door).then_some(*owner));
        for (device, part) in &mut self.parts {
            let has_rung = rung == Some(*device) || rang.is_anybody() && !part.doors.is_empty();
            if has_rung || part.due <= now {
                part.look(now, rang);
                self.are_others |= part.arm(now);
            }
        }
    }

    /// The doors to wait at, and until when.
    pub(crate) fn doors(&mut self, now: u64) -> (Arc<Doors>, u64) {
        if std::mem::take(&mut self.are_others) {
            let mut doors = Vec::new();
            self.owners.clear();
            for (device, part) in &mut self.parts {
                let room = super::doorbell::MOST - doors.len();
                doors.extend(part.doors.iter().take(room).cloned());
                part.heard = doors.len() - self.owners.len();
                self.owners.resize(doors.len(), *device);
            }
            self.doors = Arc::new(doors);
        }
        // Doors beyond the maximum are checked by polling.
        for part in self.parts.values_mut().filter(|part| part.heard < part.doors.len()) {
            (part.due, part.late) = (part.due.min(now + TICK), part.late.min(now + TICK));
        }
        let until = self.parts.values().map(|part| part.late).min().unwrap_or(u64::MAX);
        self.until = Some(until);
        (Arc::clone(&self.doors), until)
    }
}

impl Part {
    fn plan(&mut self, shares: Vec<PlannedShare>, now: u64) -> bool {
        let mut before = std::mem::take(&mut self.shares);
        let is_beside = shares.len() > 1;
        for planned in shares {
            let known = before.iter().position(|seat| seat.is_of(&planned)).map(|at| before.swap_remove(at));
            let seat = match known {
                Some(seat) => Ok(seat.found(planned.standing, now)),
                None => ShareState::new(&planned, is_beside, now),
            };
            match seat {
                Ok(seat) => self.shares.push(seat),
                // The page is being created or removed, or a process has a lease on it.
                Err(cause) => tracing::debug!(share = ?planned.key, %cause, "share not divided"),
            }
        }
        before.iter_mut().for_each(ShareState::release);
        self.parts = grants::parts(&self.shares.iter().map(|seat| seat.standing).collect::<Vec<_>>());
        self.has_moved |= now >= self.told + REST && before.iter().any(ShareState::is_at_work);
        self.settle(now);
        self.arm(now)
    }

    fn look(&mut self, now: u64, rang: &WakeReason) {
        // Earlier, if a check is due anyway.
        let mut has_changed = self.next <= now + WAITS[0];
        let all = self.turns.is_some();
        let is_alone = self.shares.len() < 2;
        let heard = self.doors.get(..self.heard).unwrap_or_default();
        let is_heard = |seat: &ShareState| heard.iter().any(|(door, _)| Arc::ptr_eq(door, &seat.door));
        let has_rung =
            |seat: &ShareState| seat.order.is_asked && (rang.may_be(&seat.door) || !is_heard(seat));
        let is_due = |seat: &&mut ShareState| all || !is_alone && (seat.is_due(now) || has_rung(seat));
        for seat in self.shares.iter_mut().filter(is_due) {
            has_changed |= seat.look(now);
        }
        if has_changed {
            self.settle(now);
        }
    }

    /// Collects the doors to wait for, and until when. Returns true if these have changed.
    fn arm(&mut self, now: u64) -> bool {
        let asked = || self.shares.iter().filter(|seat| seat.order.is_asked);
        let doors = || asked().filter(|seat| !seat.is_cut).map(|seat| (&seat.door, seat.doorbell));
        // A share without a valid door is checked by polling.
        let unheard = if asked().any(|seat| seat.is_cut) { now + TICK } else { u64::MAX };
        let is_alone = self.shares.len() < 2;
        let watched = || self.shares.iter().filter(|seat| !is_alone && seat.is_watched());
        let first = |at: fn(&ShareState) -> u64| watched().map(at).min().unwrap_or(u64::MAX).min(unheard);
        (self.due, self.late) =
            (first(ShareState::due).min(self.next), first(ShareState::late).min(self.next));
        let is = |door: &Arc<Door>, doorbell: u32| (Arc::as_ptr(door), doorbell);
        let known = self.doors.iter().map(|(door, doorbell)| is(door, *doorbell));
        let are_same = doors().map(|(door, doorbell)| is(door, doorbell)).eq(known);
        if !are_same {
            self.doors = doors().map(|(door, doorbell)| (Arc::clone(door), doorbell)).collect();
        }
        !are_same
    }

    /// Has all pages say what they are to say.
    fn settle(&mut self, now: u64) {
        let shares = &self.shares;
        let last = |key: &ShareKey| shares.iter().find(|seat| seat.key == *key).map_or(0, |seat| seat.works);
        let turn_ends = self.turns.as_mut().map_or(u64::MAX, |turns| turns.go_on(last, now));
        let turn = |seat: &ShareState| self.turns.as_ref().and_then(|turns| turns.of(&seat.key));
        let has_no_turn = |seat: &ShareState| turn(seat) == Some(Turn::Anothers);
        let standing = |seat: &ShareState| {
            let wants = if seat.rests { 0 } else { seat.standing.wants };
            ShareStatus { turn: turn(seat), wants, ..seat.standing }
        };
        let standings: Vec<ShareStatus> = shares.iter().map(standing).collect();
        let keeps_out = grants::is_high_at_work(&standings);
        if let Some(opened) = self.shut.take_if(|shut| *shut <= now) {
            self.gate.is_closed(false, opened);
        }
        // A gate that opens by itself soon is left alone: neither the processes that sleep there
        // nor this thread have to wake.
        let opens = self.shut.filter(|shut| !keeps_out && *shut <= now + PATIENCE && self.turns.is_none());
        let (is_shut, gate_changes) = self.gate.is_closed(keeps_out || opens.is_some(), now);
        let of_high = || shares.iter().filter(|seat| seat.standing.is_high && seat.standing.is_awake);
        let woke = of_high().map(|seat| seat.woke).min().unwrap_or(now);
        let (until, again) = Gate::lasts(woke, of_high().map(ShareState::late).max().unwrap_or(now), now);
        let low = match opens {
            Some(until) => Out { until, again: u64::MAX },
            None => Out { until: until.min(gate_changes), again },
        };
        self.shut = is_shut.then_some(low.until);
        self.next = turn_ends.min(if opens.is_none() { gate_changes } else { u64::MAX });
        let out = |seat: &ShareState| match has_no_turn(seat) {
            true => Some(Out { until: now + CLOSED, again: now + CLOSED / 2 }),
            false => (is_shut && !seat.standing.is_high).then_some(low),
        };
        for (seat, order) in self.shares.iter_mut().zip(grants::orders(&standings, &self.parts)) {
            let out = out(seat);
            seat.obey(order, out, now);
            self.next = self.next.min(out.map_or(u64::MAX, |out| out.again));
        }
        for seat in &mut self.shares {
            let lasted = seat.came_or_went(now);
            self.has_moved |= lasted.is_some_and(|lasted| lasted >= STAYS) && now >= self.told + REST;
            self.has_begun |= seat.is_at_work() && !std::mem::replace(&mut seat.has_worked, true);
        }
        self.has_moved |= self.has_begun;
        let is_moot = self.is_moot();
        self.shares.iter_mut().for_each(|seat| seat.is_moot = is_moot);
    }

    /// Whether the end of a share's activity may be noticed late: no other share may use the time
    /// that it leaves, and none is alone afterwards.
    fn is_moot(&self) -> bool {
        let is_fixed = |seat: &ShareState| seat.standing.terms.ceiling <= seat.standing.terms.guarantee;
        let is_held = |seat: &ShareState| is_fixed(seat) && !seat.standing.is_high;
        let at_work = self.shares.iter().filter(|seat| seat.is_at_work()).count();
        self.turns.is_none() && at_work > 2 && self.shares.iter().all(is_held)
    }
}

#[cfg(test)]
pub(crate) mod tests;
