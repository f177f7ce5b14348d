//! The pages of the shares that are divided, mapped and open, and what was last written there.
//!
//! Shares of a MIG instance are divided among themselves, as the whole GPU's are; turns are of whole GPUs.
//!
//! Nothing is written that is there already, so that a node on which nothing happens writes a grant a second for
//! each share that is limited. What is kept of a page goes by its file: one that was made anew is another share's.

mod past;
mod seat;

use super::arbiter::{self, Company};
use super::bell::{Key, TICK};
use super::door::{Door, Rang};
use super::look::Device;
use super::orders::{self, Gate, Standing, Turn, Turns};
use divvy_pages::GpuUuid;
use seat::{CLOSED, Seat};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

const REST: u64 = super::soon::REST.as_nanos() as u64;

/// A share of a GPU, as an audit found it.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) key: Key,
    /// The instance that it is of.
    pub(super) mig: Option<GpuUuid>,
    /// Its policy page, and its account.
    pub(super) policy: PathBuf,
    pub(super) account: Arc<File>,
    pub(super) standing: Standing,
}

/// What a share was granted since the last audit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Had {
    /// By the mean.
    pub(super) memory: arbiter::Memory,
    /// What it wanted then, if it was kept out meanwhile.
    pub(super) wanted: Option<u64>,
    /// The highest rate that its page has told since then, of the library's nanoseconds a second; 0: none.
    pub(super) highest: u64,
    /// Beside whom; what they had is for NVML to say.
    pub(super) company: Company,
}

/// More or fewer shares of a GPU work than did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Moved {
    pub(super) gpu: GpuUuid,
    /// One of them for the first time.
    pub(super) is_first: bool,
}

#[derive(Debug, Default)]
pub(super) struct Desk(BTreeMap<Device, Part>);

#[derive(Debug, Default)]
struct Part {
    shares: Vec<Seat>,
    gate: Gate,
    turns: Option<Turns<Key>>,
    /// How many work, as far as is known, and whether that was another number since it was last asked.
    workers: usize,
    has_moved: bool,
    /// One of them does for the first time.
    has_begun: bool,
    /// When it was last asked and had changed.
    told: u64,
    /// When something is to be done though nobody rings.
    next: u64,
}

impl Desk {
    /// What each share had since this was last asked, up to then.
    pub(super) fn since(&mut self, gpu: GpuUuid, until: u64) -> BTreeMap<Key, Had> {
        let parts = self.0.iter_mut().filter(|(device, _)| device.gpu == gpu).map(|(_, part)| part);
        let seats = parts.flat_map(|part| &mut part.shares);
        seats.map(|seat| (seat.key.clone(), seat.had(until))).collect()
    }

    /// From now on the shares of a GPU and its instances are these. Says whether the thread has anything to do with them that
    /// it had not.
    pub(super) fn plan(&mut self, gpu: GpuUuid, shares: Vec<Planned>, now: u64) -> bool {
        let known = self.0.keys().filter(|device| device.gpu == gpu);
        let mut by_device: BTreeMap<Device, Vec<Planned>> =
            known.map(|device| (*device, Vec::new())).collect();
        for planned in shares {
            by_device.entry(Device { gpu, mig: planned.mig }).or_default().push(planned);
        }
        let mut is_other = false;
        for (device, shares) in by_device {
            is_other |= self.0.entry(device).or_default().plan(shares, now);
        }
        // Of a whole GPU it stays known when it was told of last.
        self.0.retain(|device, part| device.mig.is_none() || !part.shares.is_empty());
        is_other
    }

    pub(super) fn turns(&mut self, gpu: GpuUuid, order: Vec<Key>, quantum: u64, now: u64) -> bool {
        let part = self.0.entry(Device { gpu, mig: None }).or_default();
        let before = part.turns.take();
        part.turns = (order.len() > 1).then(|| Turns::new(order, quantum, before, now));
        part.settle(now)
    }

    pub(super) fn keep(&mut self, are_there: impl Fn(&GpuUuid) -> bool) {
        self.0.retain(|device, _| are_there(&device.gpu));
    }

    /// Nobody is kept out by who is gone.
    pub(super) fn leave(&mut self) {
        self.0.values_mut().flat_map(|part| &mut part.shares).for_each(|seat| seat.close(false, 0));
    }

    /// The GPUs on which more or fewer work since this was last asked. Who comes and goes all the time is told of as often
    /// as it is heard ([`super::soon`]).
    pub(super) fn moved(&mut self, now: u64) -> Vec<Moved> {
        let moved = |(device, of): (&Device, &mut Part)| {
            let is_first = std::mem::take(&mut of.has_begun);
            std::mem::take(&mut of.has_moved).then(|| {
                of.told = now;
                Moved { gpu: device.gpu, is_first }
            })
        };
        self.0.iter_mut().filter_map(moved).collect()
    }

    /// Whether there are any.
    pub(super) fn has_moved(&self) -> bool {
        self.0.values().any(|part| part.has_moved)
    }

    /// Looks who rang and who rests, and does what follows.
    pub(super) fn tick(&mut self, now: u64, rang: &Rang) {
        for part in self.0.values_mut() {
            let mut has_changed = part.next <= now;
            let all = part.turns.is_some();
            let is_alone = part.shares.len() < 2;
            for seat in part.shares.iter_mut().filter(|seat| all || !is_alone && seat.is_due(now, rang)) {
                has_changed |= seat.look(now);
            }
            if has_changed {
                part.settle(now);
            }
        }
    }

    /// The doors to wait at, with what their doorbells said, and until when.
    pub(super) fn doors(&mut self, now: u64) -> (Vec<(Arc<Door>, u32)>, u64) {
        let (mut doors, mut are_all_heard) = (Vec::new(), true);
        for seat in self.0.values_mut().flat_map(|part| &mut part.shares).filter(|seat| seat.order.is_asked) {
            seat.is_heard = !seat.is_cut && doors.len() < super::door::MOST;
            are_all_heard &= seat.is_heard;
            if seat.is_heard {
                doors.push((seat.door.clone(), seat.doorbell));
            }
        }
        let next = self.0.values().map(|part| part.next).min().unwrap_or(u64::MAX);
        let rests = |seat: &Seat| seat.may_rest().max(now + seat.pause());
        let of_company = self.0.values().filter(|part| part.has_company()).flat_map(|part| &part.shares);
        let watched = of_company.filter(|seat| seat.is_at_work() && seat.is_seen());
        // Whose door is none, or one too many, has to be looked at.
        let unheard = if are_all_heard { u64::MAX } else { now + TICK };
        let until = watched.map(rests).min().unwrap_or(u64::MAX).min(unheard);
        (doors, next.min(until))
    }
}

impl Part {
    fn plan(&mut self, shares: Vec<Planned>, now: u64) -> bool {
        let mut before = std::mem::take(&mut self.shares);
        let is_beside = shares.len() > 1;
        for planned in shares {
            let known = before.iter().position(|seat| seat.is_of(&planned)).map(|at| before.swap_remove(at));
            let seat = match known {
                Some(seat) => Ok(seat.found(planned.standing, now)),
                None => Seat::new(&planned, is_beside, now),
            };
            match seat {
                Ok(seat) => self.shares.push(seat),
                // Just being made or removed, or somebody has a lease on it.
                Err(cause) => tracing::debug!(share = ?planned.key, %cause, "share not divided"),
            }
        }
        let is_other = !before.is_empty();
        before.iter_mut().for_each(Seat::release);
        // Who works beside others is watched, and the thread may be asleep.
        self.settle(now) || is_other || self.has_company()
    }

    /// Somebody works, by its own word, and is not the only one who may.
    fn has_company(&self) -> bool {
        self.shares.len() > 1 && self.shares.iter().any(|seat| seat.is_at_work() && seat.is_seen())
    }

    /// Has all pages say what they are to say; true where something is other than it was.
    fn settle(&mut self, now: u64) -> bool {
        let shares = &self.shares;
        let last = |key: &Key| shares.iter().find(|seat| seat.key == *key).map_or(0, |seat| seat.works);
        let turn_ends = self.turns.as_mut().map_or(u64::MAX, |turns| turns.go_on(last, now));
        let turn = |seat: &Seat| self.turns.as_ref().and_then(|turns| turns.of(&seat.key));
        let has_no_turn = |seat: &Seat| turn(seat) == Some(Turn::Anothers);
        let standing = |seat: &Seat| {
            let wants = if seat.rests { 0 } else { seat.standing.wants };
            Standing { turn: turn(seat), wants, ..seat.standing }
        };
        let standings: Vec<Standing> = shares.iter().map(standing).collect();
        let (low_is_out, gate_changes) = self.gate.is_closed(orders::is_high_at_work(&standings), now);
        let mut next = gate_changes.min(turn_ends);
        let is_out = |seat: &Seat| low_is_out && !seat.standing.is_high || has_no_turn(seat);
        let out: Vec<bool> = shares.iter().map(is_out).collect();
        let mut has_changed = false;
        let orders = orders::orders(&standings);
        for ((seat, order), is_out) in self.shares.iter_mut().zip(orders).zip(out) {
            has_changed |= seat.obey(order, is_out, now);
            if is_out {
                next = next.min(now + CLOSED / 2);
            }
        }
        has_changed |= next < self.next;
        self.next = next;
        let workers = self.shares.iter().filter(|seat| seat.is_at_work()).count();
        let is_other = std::mem::replace(&mut self.workers, workers) != workers;
        self.has_moved |= is_other && now >= self.told + REST;
        for seat in self.shares.iter_mut().filter(|seat| seat.is_at_work()) {
            self.has_begun |= !std::mem::replace(&mut seat.has_worked, true);
        }
        self.has_moved |= self.has_begun;
        has_changed
    }
}

#[cfg(test)]
pub(super) mod tests;
