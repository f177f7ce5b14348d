//! Time on a part: who runs when.
//!
//! **Round robin.** By default processes take turns of a time slice, as the real driver lets contexts with work do. A
//! guest's work is a length on an axis of its own: `submitted` is its end, `served` how far it has got, and a kernel
//! is a stretch of it. Kernels of one process overlap where its streams let them, so the axis grows by their union.
//! Nothing runs in the background: whoever wants to know plays the turns since the last look, under the part's lock.
//! When a turn begins it is noted in the guest's row, and that gives each point of its axis a time.
//!
//! **In order.** Guests that came as clients of MPS run at once; here one kernel after the other, in the order in which
//! they were submitted, whosever they are. Their axis is the clock itself.
//!
//! **Samples.** Six times a second of played time, what each guest and the part have had is noted, as the real driver
//! notes it for `nvmlDeviceGetProcessUtilization`; whoever looks plays first, so the samples are there whenever they
//! are asked for.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::guest::Guest;
use super::locks::Locks;
use super::map::{Ledger, ROWS};
use super::samples::{PERIOD, Samples};

/// Begins of turns that a row remembers.
const TURNS: usize = 512;
/// A time slice unless the GPU is set to another.
const SLICE: Duration = Duration::from_millis(2);
/// So many looks at a lock before asking whether who holds it lives.
const PATIENCE: u32 = 10_000;

/// The engine of a part.
#[repr(C)]
pub(super) struct Engine {
    /// Row that holds it, from 1; 0 when free.
    lock: AtomicU64,
    /// Played up to this time, in ns of the monotonic clock.
    clock: AtomicU64,
    /// Row whose turn it is, from 1; 0 when nobody has work.
    pub(super) turn: AtomicU64,
    /// What is left of it, in ns.
    pub(super) left: AtomicU64,
    /// Length of a turn in ns.
    pub(super) slice: AtomicU64,
    /// In-order work ends at this time, and is so much since the part is there.
    pub(super) end: AtomicU64,
    pub(super) ordered: AtomicU64,
    /// What turns have run, in ns.
    pub(super) ran: AtomicU64,
    /// Number of the last sample, in periods of the monotonic clock, and the part's busy time at the last of them.
    pub(super) sample: AtomicU64,
    pub(super) samples: Samples,
    /// Rows with work, a bit each.
    active: [AtomicU64; ROWS / 64],
}

/// The work of a row, in ns.
#[repr(C)]
pub(super) struct Work {
    pub(super) submitted: AtomicU64,
    pub(super) served: AtomicU64,
    /// 1 for a client of MPS.
    in_order: AtomicU64,
    /// Where the axis was when the guest came.
    pub(super) base: AtomicU64,
    /// Turns that have begun, and the last of them: when, and what had been served. In order: stretches of work without
    /// a gap, which may begin in the future.
    turns: AtomicU64,
    begins: [[AtomicU64; 2]; TURNS],
    /// What had been served at the last samples.
    pub(super) samples: Samples,
}

impl Work {
    /// What the row's last guest was; its axis goes on.
    pub(super) fn forget(&self) {
        self.in_order.store(0, Ordering::Relaxed);
        let served = self.served.load(Ordering::Relaxed);
        self.base.store(served, Ordering::Relaxed);
        self.samples.fill(served);
    }

    /// What had been served at a time up to which the part was played, and before which nothing was submitted since.
    pub(super) fn served_at(&self, time: u64) -> u64 {
        if self.in_order.load(Ordering::Relaxed) == 0 {
            return self.served.load(Ordering::Relaxed);
        }
        let mut end = self.submitted.load(Ordering::Relaxed);
        for (_, [when, what]) in self.last_turns() {
            if when <= time {
                return what + (time - when).min(end.saturating_sub(what));
            }
            end = what;
        }
        end
    }

    /// The turns that are remembered, the last first.
    fn last_turns(&self) -> impl Iterator<Item = (u64, [u64; 2])> {
        let turns = self.turns.load(Ordering::Acquire);
        (0..turns).rev().take(TURNS).map(|turn| {
            let [when, what] = &self.begins[turn as usize % TURNS];
            (turn, [when.load(Ordering::Relaxed), what.load(Ordering::Relaxed)])
        })
    }

    fn begin(&self, when: u64, what: u64) {
        let turns = self.turns.load(Ordering::Relaxed);
        let [at, had] = &self.begins[turns as usize % TURNS];
        at.store(when, Ordering::Relaxed);
        had.store(what, Ordering::Relaxed);
        self.turns.store(turns + 1, Ordering::Release);
    }
}

/// A point on a guest's axis.
pub type Mark = u64;

/// A stretch of work, as a caller wants it done.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// Not before this point.
    pub after: Mark,
    pub length: u64,
    /// It touches the managed memory of its process.
    pub touches: bool,
}

/// The monotonic clock in ns.
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a place for the answer. It cannot fail: every kernel has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Length of a turn by `nvidia-smi compute-policy --set-timeslice`.
pub(super) const fn slice(level: u32) -> Duration {
    match level {
        2 => Duration::from_millis(10),
        3 => Duration::from_millis(30),
        _ => SLICE,
    }
}

/// The part's lock, let go when dropped.
pub(super) struct Held<'l>(&'l AtomicU64);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

impl Ledger {
    pub(super) fn engine(&self, part: usize) -> &Engine {
        &self.get().parts[part].engine
    }

    pub(super) fn work(&self, row: usize) -> &Work {
        &self.get().rows[row].work
    }

    /// Takes the part's lock for a row; from a holder that has died, its turn half played, it is taken over.
    pub(super) fn hold(&self, locks: Locks, part: usize, row: usize) -> Held<'_> {
        let lock = &self.engine(part).lock;
        let me = row as u64 + 1;
        let mut looks = 0;
        loop {
            let Err(holder) = lock.compare_exchange_weak(0, me, Ordering::Acquire, Ordering::Relaxed) else {
                return Held(lock);
            };
            looks += 1;
            if looks % PATIENCE == 0 {
                let dead = holder.checked_sub(1).is_some_and(|other| {
                    let other = other as usize % ROWS;
                    let owner = self.get().owners[other].load(Ordering::Acquire);
                    owner == 0 || locks.holder(other, owner, super::locks::token()).is_none()
                });
                if dead && lock.compare_exchange(holder, me, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    return Held(lock);
                }
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }

    /// Plays the turns up to that time. The part's lock is held.
    pub(super) fn play(&self, part: usize, now: u64) {
        let engine = self.engine(part);
        let mut time = engine.clock.load(Ordering::Relaxed).min(now);
        let next_sample = || (engine.sample.load(Ordering::Relaxed) + 1) * PERIOD;
        let mut until = now.min(next_sample());
        let slice = engine.slice.load(Ordering::Relaxed).max(1);
        while time < now {
            let Some(row) = engine.turn.load(Ordering::Relaxed).checked_sub(1).map(|row| row as usize % ROWS)
            else {
                break;
            };
            let work = self.work(row);
            let served = work.served.load(Ordering::Relaxed);
            let rest = work.submitted.load(Ordering::Relaxed).saturating_sub(served);
            let left = engine.left.load(Ordering::Relaxed);
            let run = rest.min(left).min(until.saturating_sub(time));
            time += run;
            engine.ran.store(engine.ran.load(Ordering::Relaxed) + run, Ordering::Relaxed);
            work.served.store(served + run, Ordering::Release);
            engine.left.store(left - run, Ordering::Relaxed);
            if run == rest {
                engine.active[row / 64].fetch_and(!(1 << (row % 64)), Ordering::Relaxed);
                self.give_turn(part, row, time, slice);
            } else if run == left {
                self.give_turn(part, row, time, slice);
            }
            if time >= until {
                self.sample(part, time);
                until = now.min(next_sample());
            }
        }
        self.sample(part, now);
        engine.clock.store(now, Ordering::Relaxed);
    }

    /// The next row with work after that one, round and round, has its turn from that time on.
    fn give_turn(&self, part: usize, last: usize, time: u64, slice: u64) {
        let engine = self.engine(part);
        engine.left.store(slice, Ordering::Relaxed);
        let high = self.high().max(1);
        let next = next_active(&engine.active, last, high);
        engine.turn.store(next.map_or(0, |row| row as u64 + 1), Ordering::Relaxed);
        if let Some(row) = next.filter(|row| *row != last) {
            self.begin(row, time);
        }
    }

    fn begin(&self, row: usize, time: u64) {
        let work = self.work(row);
        work.begin(time, work.served.load(Ordering::Relaxed));
    }

    /// A row's work is nobody's any more, nor is what it manages.
    pub(super) fn drop_work(&self, part: usize, row: usize) {
        let Ok(locks) = self.locks() else { return };
        let _held = self.hold(locks, part, row);
        let (work, time) = (self.work(row), now());
        self.play(part, time);
        work.submitted.store(work.served.load(Ordering::Relaxed), Ordering::Relaxed);
        self.forget_managed(part, row);
    }

    /// When a point of an axis that has been reached was reached, or is.
    fn time_of(&self, row: usize, mark: Mark) -> u64 {
        let mut oldest = 0;
        for (turn, [when, what]) in self.work(row).last_turns() {
            if what < mark || turn == 0 {
                return when + mark.saturating_sub(what);
            }
            oldest = when;
        }
        // Longer ago than turns are remembered.
        oldest
    }
}

/// The next bit that is set after that one, below `high` and round the end.
fn next_active(words: &[AtomicU64], last: usize, high: usize) -> Option<usize> {
    let count = high.div_ceil(64).min(words.len());
    let begin = (last + 1) / 64;
    let above = |word: u64, bit: usize| if bit >= 64 { 0 } else { word >> bit << bit };
    for step in 0..=count {
        let at = (begin + step) % count.max(1);
        let mut word = words.get(at)?.load(Ordering::Relaxed);
        if step == 0 && begin < count {
            word = above(word, (last + 1) % 64);
        }
        if word != 0 {
            return Some(at * 64 + word.trailing_zeros() as usize);
        }
    }
    None
}

impl Guest {
    /// From now on its kernels run in the order of all such guests, as those of clients of MPS.
    pub fn run_in_order(&self) {
        self.ledger().work(self.row()).in_order.store(1, Ordering::Relaxed);
    }

    pub(super) fn in_order(&self) -> bool {
        self.ledger().work(self.row()).in_order.load(Ordering::Relaxed) == 1
    }

    /// Submits work: the points of the axis where it begins and ends.
    pub fn submit(&self, kernel: Kernel) -> (Mark, Mark) {
        let (ledger, part, row) = (self.ledger(), self.part_index(), self.row());
        let _held = ledger.hold(self.locks(), part, row);
        let (engine, time) = (ledger.engine(part), now());
        ledger.play(part, time);
        let kernel = match self.own().manages.load(Ordering::Relaxed) {
            1.. if kernel.touches => {
                Kernel { length: kernel.length + ledger.touch(part, row, time), ..kernel }
            }
            _ => kernel,
        };
        if self.in_order() {
            let begin = engine.end.load(Ordering::Relaxed).max(kernel.after).max(time);
            engine.end.store(begin + kernel.length, Ordering::Relaxed);
            engine.ordered.fetch_add(kernel.length, Ordering::Relaxed);
            let (work, had) = (ledger.work(row), ledger.work(row).served.load(Ordering::Relaxed));
            let last = work.last_turns().next();
            if last.is_none_or(|(_, [when, what])| when + (had - what) != begin) {
                work.begin(begin, had);
            }
            work.served.fetch_add(kernel.length, Ordering::Relaxed);
            work.submitted.fetch_add(kernel.length, Ordering::Relaxed);
            return (begin, begin + kernel.length);
        }
        let work = ledger.work(row);
        let begin = work.served.load(Ordering::Relaxed).max(kernel.after);
        let end = begin + kernel.length;
        if end > work.submitted.load(Ordering::Relaxed) {
            work.submitted.store(end, Ordering::Relaxed);
            engine.active[row / 64].fetch_or(1 << (row % 64), Ordering::Relaxed);
            if engine.turn.load(Ordering::Relaxed) == 0 {
                engine.turn.store(row as u64 + 1, Ordering::Relaxed);
                engine.left.store(engine.slice.load(Ordering::Relaxed).max(1), Ordering::Relaxed);
                ledger.begin(row, time);
            }
        }
        (begin, end)
    }

    /// How far its work has got: all that was submitted up to that point is done.
    pub fn reached(&self) -> Mark {
        if self.in_order() {
            return now();
        }
        let (ledger, part, row) = (self.ledger(), self.part_index(), self.row());
        let _held = ledger.hold(self.locks(), part, row);
        ledger.play(part, now());
        ledger.work(row).served.load(Ordering::Relaxed)
    }

    /// The same as it was when somebody last looked: never too far.
    #[inline]
    pub fn reached_before(&self) -> Mark {
        if self.in_order() { now() } else { self.served() }
    }

    /// When it got to a point that it has reached, in ns of the monotonic clock.
    pub fn time_of(&self, mark: Mark) -> u64 {
        if self.in_order() { mark } else { self.ledger().time_of(self.row(), mark) }
    }

    /// Time on the part that its work has had, in ns.
    pub fn served(&self) -> u64 {
        self.ledger().work(self.row()).served.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_next_with_work_is_the_first_after_the_last(
            bits in proptest::collection::btree_set(0..300_usize, 0..20), last in 0..300_usize,
        ) {
            let words: Vec<AtomicU64> = (0..ROWS / 64)
                .map(|at| AtomicU64::new(bits.iter().filter(|bit| *bit / 64 == at).map(|bit| 1 << (bit % 64)).sum()))
                .collect();
            let expected = bits.range(last + 1..).next().or_else(|| bits.first()).copied();
            prop_assert_eq!(next_active(&words, last, 300), expected);
        }
    }
}
