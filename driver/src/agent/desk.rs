//! The pages of the shares that are divided, mapped and open, and what was last written there.
//!
//! Nothing is written that is there already, so that a node on which nothing happens writes a grant a second for
//! each share that is limited. What is kept of a page goes by its file: one that was made anew is another share's.

use super::arbiter::{self, Company, Terms};
use super::bell::{Key, TICK};
use super::door::{Door, Pulse};
use super::orders::{self, Gate, Order, Standing, Turn, Turns};
use crate::shares::Mapped;
use divvy_pages::policy::UNBOUNDED;
use divvy_pages::{GpuUuid, PolicyPage, account};
use rustix::thread::futex::{self, Flags};
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

/// For so long a rate holds: an audit may come late, and two may be lost.
const GRANT: u64 = 3_500_000_000;
/// Rates that ended so long ago tell nothing any more.
const STALE: u64 = 60_000_000_000;
/// For so long a gate stays closed by itself.
const CLOSED: u64 = 200_000_000;
/// Who launched last so long ago does not work any more: of who keeps others out, and of the rest, to whom it matters
/// less and who sleep longer between launches.
const HOLD: u64 = 20_000_000;
const RESTS: u64 = 60_000_000;
/// Between two looks whether somebody rests, in nanoseconds.
const LOOK: u64 = 25_000_000;
/// Who has so little left, in nanoseconds of GPU time, may be waiting for more.
const SCARCE: i128 = 500_000;
/// So long after it rang a share was seen by an audit, all of it.
const SEEN: u64 = 1_100_000_000;

/// A share of a GPU, as an audit found it.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) key: Key,
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

#[derive(Debug, Default)]
pub(super) struct Desk(BTreeMap<GpuUuid, Gpu>);

#[derive(Debug, Default)]
struct Gpu {
    shares: Vec<Seat>,
    gate: Gate,
    turns: Option<Turns<Key>>,
    /// When something is to be done though nobody rings.
    next: u64,
}

#[derive(Debug)]
struct Seat {
    key: Key,
    file: (u64, u64),
    page: Mapped,
    account: Arc<File>,
    door: Arc<Door>,
    standing: Standing,
    order: Order,
    is_divided: bool,
    granted_until: u64,
    closed_until: u64,
    /// The last call, 0 before the first, and what the doorbell was before it.
    call: u32,
    doorbell: u32,
    /// When it rang, or the audit before.
    woke: u64,
    /// When it was last seen to work, by its own word, and whether that is long ago.
    works: u64,
    rests: bool,
    /// Since when the order holds; what was granted and allowed since `began`, in nanoseconds times nanoseconds a second.
    since: u64,
    began: u64,
    sums: [u128; 2],
    /// Nanoseconds since then beside others, and how often that changed.
    beside: u64,
    changes: u32,
    /// How often it came to rest or began since then.
    moves: u32,
    /// These changes there were in the second before, too.
    has_changed: bool,
    has_moved: bool,
    was_closed: bool,
    /// See [`Had`].
    highest: u64,
}

impl Desk {
    pub(super) fn since(&mut self, gpu: GpuUuid, now: u64) -> BTreeMap<Key, Had> {
        let seats = self.0.get_mut(&gpu).map(|gpu| gpu.shares.as_mut_slice()).unwrap_or_default();
        seats.iter_mut().map(|seat| (seat.key.clone(), seat.had(now))).collect()
    }

    /// Says whether the thread has anything to do with it that it had not.
    pub(super) fn plan(&mut self, gpu: GpuUuid, shares: Vec<Planned>, now: u64) -> bool {
        let gpu = self.0.entry(gpu).or_default();
        let mut before = std::mem::take(&mut gpu.shares);
        let is_beside = shares.len() > 1;
        for planned in shares {
            let known = before.iter().position(|seat| seat.is_of(&planned)).map(|at| before.swap_remove(at));
            let seat = match known {
                Some(seat) => Ok(seat.found(planned.standing, now)),
                None => Seat::new(&planned, is_beside, now),
            };
            match seat {
                Ok(seat) => gpu.shares.push(seat),
                // Just being made or removed, or somebody has a lease on it.
                Err(cause) => tracing::debug!(share = ?planned.key, %cause, "share not divided"),
            }
        }
        let is_other = !before.is_empty();
        before.iter_mut().for_each(Seat::release);
        // Who works beside others is watched, and the thread may be asleep.
        gpu.settle(now) || is_other || gpu.has_company()
    }

    pub(super) fn turns(&mut self, gpu: GpuUuid, order: Vec<Key>, quantum: u64, now: u64) -> bool {
        let gpu = self.0.entry(gpu).or_default();
        let before = gpu.turns.take();
        gpu.turns = (order.len() > 1).then(|| Turns::new(order, quantum, before, now));
        gpu.settle(now)
    }

    pub(super) fn keep(&mut self, are_there: impl Fn(&GpuUuid) -> bool) {
        self.0.retain(|gpu, _| are_there(gpu));
    }

    /// Nobody is kept out by who is gone.
    pub(super) fn leave(&mut self) {
        self.0.values_mut().flat_map(|gpu| &mut gpu.shares).for_each(|seat| seat.close(false, 0));
    }

    /// Looks who rang and who rests, and does what follows.
    pub(super) fn tick(&mut self, now: u64) {
        for gpu in self.0.values_mut() {
            let mut has_changed = gpu.next <= now;
            let all = gpu.turns.is_some();
            let is_alone = gpu.shares.len() < 2;
            for seat in gpu.shares.iter_mut().filter(|seat| all || !is_alone && seat.is_watched()) {
                has_changed |= seat.look(now);
            }
            if has_changed {
                gpu.settle(now);
            }
        }
    }

    /// The doors to wait at, with what their doorbells said, and until when.
    pub(super) fn doors(&self, now: u64) -> (Vec<(Arc<Door>, u32)>, u64) {
        let seats = || self.0.values().flat_map(|gpu| &gpu.shares);
        let asked = || seats().filter(|seat| seat.order.is_asked);
        let doors: Vec<_> = asked()
            .filter(|seat| seat.is_whole())
            .take(super::door::MOST)
            .map(|seat| (seat.door.clone(), seat.doorbell))
            .collect();
        let next = self.0.values().map(|gpu| gpu.next).min().unwrap_or(u64::MAX);
        // Whose door is none, or one too many, has to be looked at.
        let looks =
            doors.len() < asked().count() || seats().any(|seat| seat.standing.is_awake && seat.is_seen());
        let until = match looks {
            true => now + TICK,
            false if self.0.values().any(Gpu::has_company) => now + LOOK,
            false => u64::MAX,
        };
        (doors, next.min(until))
    }
}

impl Gpu {
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
        has_changed
    }
}

impl Seat {
    /// `is_beside`: there are others on the GPU.
    fn new(planned: &Planned, is_beside: bool, now: u64) -> io::Result<Self> {
        let file = identity(&planned.policy)?;
        let page = Mapped::open(&planned.policy)?;
        let mut standing = planned.standing;
        let words = page.page().ok_or(io::ErrorKind::InvalidData)?;
        // Of an agent before this one. What was granted where time is lent cannot be told.
        let Terms { guarantee, ceiling, .. } = standing.terms;
        if let Some(rate) = words.granted(now.saturating_sub(STALE)).filter(|_| guarantee == ceiling) {
            standing.memory = arbiter::Memory::inherited(rate, guarantee, is_beside);
        }
        let (closed_until, is_divided, is_asked) =
            (words.closed_until(), words.is_paced() && !standing.is_limited, words.call() > 0);
        Ok(Self {
            key: planned.key.clone(),
            file,
            page,
            account: Arc::clone(&planned.account),
            door: Arc::new(Door::of(&planned.account)?),
            standing,
            order: Order { rate: None, is_asked, is_beside, memory: standing.memory },
            is_divided,
            granted_until: 0,
            closed_until,
            call: 0,
            doorbell: 0,
            woke: 0,
            works: now,
            rests: false,
            since: now,
            began: now,
            sums: [0; 2],
            beside: 0,
            changes: 0,
            moves: 0,
            has_changed: false,
            has_moved: false,
            was_closed: false,
            highest: 0,
        })
    }

    fn is_of(&self, planned: &Planned) -> bool {
        self.key == planned.key
            && Arc::ptr_eq(&self.account, &planned.account)
            && identity(&planned.policy).is_ok_and(|file| file == self.file)
    }

    fn words(&self) -> Option<&PolicyPage> {
        self.page.page()
    }

    /// An audit found it so.
    fn found(self, standing: Standing, now: u64) -> Self {
        // NVML has the word again of who rang a second ago; but high priority is a matter of milliseconds.
        let is_old = self.woke + SEEN <= now && !standing.is_high;
        Self { standing: Standing { is_awake: self.standing.is_awake && !is_old, ..standing }, ..self }
    }

    /// It may ring, or come to rest.
    fn is_watched(&self) -> bool {
        self.order.is_asked || self.is_at_work()
    }

    /// As far as is known.
    fn is_at_work(&self) -> bool {
        self.standing.is_awake || self.standing.wants > 0 && !self.rests
    }

    /// Its launches are paced, so that its account says when they come.
    fn is_seen(&self) -> bool {
        self.order.rate.is_some()
    }

    fn is_whole(&self) -> bool {
        self.account.metadata().is_ok_and(|meta| meta.len() >= account::HEADER as u64)
    }

    /// Whether it is awake that was not, or the other way round.
    fn look(&mut self, now: u64) -> bool {
        let Ok(pulse) = Pulse::read(&self.account) else { return false };
        self.works = self.works.max(pulse.refilled.min(now));
        let was = (self.standing.is_awake, self.rests);
        if self.order.is_asked && pulse.doorbell != self.doorbell {
            (self.standing.is_awake, self.woke, self.works, self.rests) = (true, now, now, false);
        } else if self.is_seen() {
            let rate = self.order.rate.unwrap_or(0).min(arbiter::SECOND);
            let accrued = u128::from(now.saturating_sub(pulse.refilled)) * u128::from(rate)
                / u128::from(arbiter::SECOND);
            let left = i128::from(pulse.balance) + i128::try_from(accrued).unwrap_or(0);
            let quiet = now.saturating_sub(self.works.max(self.woke));
            self.standing.is_awake &= left < 0 || quiet <= HOLD;
            self.rests = left >= SCARCE && quiet > RESTS;
        }
        self.moves += u32::from(self.rests != was.1);
        (self.standing.is_awake, self.rests) != was
    }

    /// Has the page say that; true where it is watched for something else from now on.
    fn obey(&mut self, order: Order, is_out: bool, now: u64) -> bool {
        self.add_up(now);
        let had = std::mem::replace(&mut self.order, order);
        let was_out = self.closed_until > 0;
        self.highest = self.highest.max(self.rate_of(had)).max(self.rate_of(order));
        self.changes += u32::from(had.is_beside != order.is_beside);
        if let Some(page) = self.page.page() {
            if let Some(rate) = order.rate
                && (had.rate != order.rate || self.granted_until < now + GRANT - arbiter::SECOND / 2)
            {
                self.granted_until = now + GRANT;
                page.grant(rate, self.granted_until);
            }
            let is_divided = order.rate.is_some() && !self.standing.is_limited;
            if is_divided != self.is_divided {
                self.is_divided = is_divided;
                page.divide(is_divided);
            }
            if had.is_asked && !order.is_asked {
                page.ask(false, 0);
            }
            // Who sleeps by the rate that was may have more by now.
            if had.rate.is_some_and(|had| order.rate > Some(had.saturating_add(had / 4))) {
                wake(page);
            }
        }
        if order.is_asked && (!had.is_asked || self.call == 0) {
            self.ask(now);
        }
        self.close(is_out, now);
        had.is_asked != order.is_asked || was_out != is_out
    }

    /// What the doorbell says is read before: a launch that comes in between rings.
    fn ask(&mut self, now: u64) {
        let Ok(pulse) = Pulse::read(&self.account) else {
            // Tried again with the next order.
            self.order.is_asked = false;
            return;
        };
        // Of the clock, so that no agent's number is one that an earlier one has used.
        self.call = ((now / 1_000_000) as u32).max(self.call + 1) & (u32::MAX >> 2);
        self.doorbell = pulse.doorbell;
        if let Some(page) = self.words() {
            page.ask(true, self.call);
        }
    }

    fn close(&mut self, is_out: bool, now: u64) {
        let Some(page) = self.page.page() else { return };
        if is_out {
            self.was_closed = true;
            if self.closed_until < now + CLOSED * 3 / 4 {
                self.closed_until = now + CLOSED;
                page.close(self.closed_until);
            }
        } else if self.closed_until > 0 {
            self.closed_until = 0;
            page.close(0);
            wake(page);
        }
    }

    /// It is no share to be divided any more.
    fn release(&mut self) {
        self.close(false, 0);
        if let Some(page) = self.words() {
            page.divide(false);
            page.ask(false, 0);
        }
    }

    fn add_up(&mut self, now: u64) {
        let (granted, allowed) = if self.closed_until > 0 { (0, 0) } else { self.order.memory.granted() };
        let passed = u128::from(now.saturating_sub(self.since));
        for (sum, had) in self.sums.iter_mut().zip([granted, allowed]) {
            *sum += passed * u128::from(had);
        }
        if self.order.is_beside {
            self.beside += now.saturating_sub(self.since);
        }
        self.since = now;
    }

    /// What its launches are paced by: without a grant by its record, if at all.
    fn rate_of(&self, order: Order) -> u64 {
        let of_record = if self.standing.is_limited { self.standing.terms.ceiling } else { UNBOUNDED };
        order.rate.unwrap_or(of_record)
    }

    fn had(&mut self, now: u64) -> Had {
        self.add_up(now);
        let passed = u128::from(now.saturating_sub(self.began)).max(1);
        let [granted, allowed] = self.sums.map(|sum| u64::try_from(sum / passed).unwrap_or(u64::MAX));
        let wanted = std::mem::take(&mut self.was_closed).then_some(self.standing.wants);
        // Who begins and rests again and again, and who is beside such a one, is met on the mean.
        let had_changed = std::mem::replace(&mut self.has_changed, self.changes > 0);
        let had_moved = std::mem::replace(&mut self.has_moved, self.moves > 0);
        let company = Company {
            is_beside: u128::from(self.beside) * 2 > passed,
            has_changed: self.changes == 1 && !had_changed,
            has_moved: self.moves == 1 && !had_moved,
            between: 0,
        };
        (self.began, self.sums) = (now, [0; 2]);
        (self.beside, self.changes, self.moves) = (0, 0, 0);
        let highest = self.highest;
        self.highest = self.rate_of(self.order);
        Had { memory: self.order.memory.with_granted(granted, allowed), wanted, highest, company }
    }
}

/// Everybody who waits for the share's gate or for its time.
fn wake(page: &PolicyPage) {
    // It fails for no word of ours.
    let _ = futex::wake(page.gate(), Flags::empty(), i32::MAX as u32);
}

fn identity(path: &std::path::Path) -> io::Result<(u64, u64)> {
    path.metadata().map(|meta| (meta.dev(), meta.ino()))
}

#[cfg(test)]
pub(super) mod tests;
