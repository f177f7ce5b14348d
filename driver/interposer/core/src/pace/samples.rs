//! Launches that are being measured: a ring of pairs of events.
//!
//! Events are recorded round a launch and looked at later, by somebody who comes by; nothing
//! is ever waited for here, and a thread that finds the ring in another's hands leaves it.
//!
//! **Overlap.** Kernels of several streams run at once, and what is charged is the time in
//! which the device worked, once. So a launch counts for as much as it moved the end of all
//! work so far: from its own start, or from that end if it lies later. The event that marks
//! the end is kept, and times are taken between neighbours: an event's time is a float of
//! milliseconds, which over an hour would be too coarse.
//!
//! **What events cost.** A GPU takes time for an event, and runs nothing beside it that without would have overlapped: on an H100
//! (driver 580.159) 1.28 us lie between two events with nothing between, and round a kernel of any length, 2 us as 100,
//! they measure 1.95 more than a row of such kernels takes each. Of short kernels that would be a third or half of what they are charged. So the
//! least that ever lay between the end of one measured launch and the begin of the next is taken for what an event costs, and half as much again
//! off each ([`Samples::net`]). A driver whose events cost nothing is found out by that, and no program gains more than it is.

use super::costs::{Charge, Cost, Costs, KERNELS};
use super::runs::Measure;
use divvy_pages::sync::{AtomicI64, AtomicU32, AtomicU64, Ordering::*};

/// The driver's events, for the thread and the stream that launch.
pub trait Timer {
    /// The current context; events are of one.
    fn context(&self) -> u64;
    /// A new event of the current context; 0: none is to be had.
    fn create(&self) -> u64;
    fn destroy(&self, event: u64);
    /// Marks the place in the stream that is launched on.
    fn record(&self, event: u64) -> bool;
    /// `None`: the event is of no use any more.
    fn is_done(&self, event: u64) -> Option<bool>;
    /// Nanoseconds between two events that are done.
    fn elapsed(&self, from: u64, to: u64) -> Option<i64>;
}

const LENGTH: usize = 64;
/// Of what launches took so much may be charged later or was charged before, in nanoseconds.
const PUT_OFF: i64 = 80_000_000;
/// No launch ran for longer, in nanoseconds: what many of them are charged is no overflow, whatever a driver says of its events.
const LONGEST: i64 = 1 << 44;
/// More than that two events never cost, in nanoseconds: what lies between two launches is the program's doing.
const DEAREST: u32 = 1_300;
/// Who waits for measured work to end looks for it so often at least, in nanoseconds.
pub(crate) const BUSY: i64 = 500_000;

const RESERVED: u32 = 0;
const UNDER_WAY: u32 = 1;
const VOID: u32 = 2;

/// Of one device. Zeros are an empty ring.
#[derive(Debug)]
pub(crate) struct Samples {
    lock: AtomicU32,
    head: AtomicU32,
    tail: AtomicU32,
    /// Where all measured work ends so far, and of which context that event is.
    end: AtomicU64,
    context: AtomicU64,
    /// A call that may end this context is being made: its events may not be looked at. 0: none.
    aside: AtomicU64,
    /// What the launches under way were charged.
    depth: AtomicI64,
    /// When what is under way will have taken what it was charged, by the monotonic clock; 0: nothing is under way.
    since: AtomicU64,
    /// What launches took and were not charged yet.
    put_off: AtomicI64,
    /// Nanoseconds from begin to end of measured launches, and what they would have been had each been as fast as the
    /// fastest of its kernel, since the node was told last.
    took: AtomicU64,
    least: AtomicU64,
    /// What those counted as whose kernels are longer than a time slice.
    long: AtomicU64,
    /// What launches took and did not count as, where it may have been their own.
    spared: AtomicU64,
    /// By how much less than [`DEAREST`] an event costs, by what lay between two with nothing between.
    cheaper: AtomicU32,
    ring: [Sample; LENGTH],
    /// By the kernel's number: the fastest that was seen, in nanoseconds; 0: none.
    fastest: [AtomicU32; KERNELS],
}

#[derive(Debug)]
pub(crate) struct Sample {
    state: AtomicU32,
    cost: AtomicU32,
    /// See [`Measure`]; 0: the lead of a run.
    stands_for: AtomicU32,
    context: AtomicU64,
    begin: AtomicU64,
    end: AtomicU64,
    charged: AtomicI64,
}

struct Locked<'a>(&'a AtomicU32);

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.0.store(0, Release);
    }
}

impl Samples {
    fn lock(&self) -> Option<Locked<'_>> {
        let is_free = self.lock.compare_exchange(0, 1, Acquire, Relaxed).is_ok();
        is_free.then(|| Locked(&self.lock))
    }

    /// Whether one more measured launch can be under way: as long as what they were charged is below `most` nanoseconds,
    /// and always where what waits behind the oldest would not keep the device busy.
    pub(crate) fn has_room(&self, most: i64) -> bool {
        let head = self.head.load(Relaxed);
        let count = self.tail.load(Relaxed).wrapping_sub(head) as usize;
        let oldest = self.ring.get(head as usize % LENGTH).map_or(0, |sample| sample.charged.load(Relaxed));
        let depth = self.depth.load(Relaxed);
        let is_little = count < 2 || depth < most || depth.saturating_sub(oldest) < BUSY;
        count < LENGTH && is_little || self.aside.load(Relaxed) != 0
    }

    /// Before a call that may end a context: as of now nobody looks at its events. `nap` lets those
    /// go on who do at the moment.
    pub(crate) fn leaves(&self, context: u64, nap: impl Fn()) {
        // Who holds it asks the driver a few questions.
        for _ in 0..LENGTH {
            if let Some(_locked) = self.lock() {
                self.aside.store(context, Relaxed);
                return;
            }
            nap();
        }
        self.aside.store(context, Relaxed);
    }

    /// The call was made.
    pub(crate) fn left(&self, is_gone: bool) {
        let context = self.aside.load(Relaxed);
        if context != 0 && is_gone {
            for sample in self.ring.iter().filter(|sample| sample.context.load(Relaxed) == context) {
                sample.state.store(VOID, Relaxed);
                sample.forget();
            }
            if self.context.load(Relaxed) == context {
                self.end.store(0, Relaxed);
            }
        }
        self.aside.store(0, Release);
    }

    /// A place for a launch, its first event recorded. `None`: it goes unmeasured. `tell` is told since when what is under way
    /// is not paid for.
    pub(crate) fn begin(
        &self,
        timer: &impl Timer,
        charge: &Charge<'_>,
        now: impl FnOnce() -> u64,
        tell: impl FnOnce(u64),
    ) -> Option<&Sample> {
        let stands_for = match charge.measure {
            Measure::No => return None,
            Measure::Lead => 0,
            Measure::For(count) => count,
        };
        let locked = self.lock()?;
        if self.aside.load(Relaxed) != 0 {
            return None;
        }
        let tail = self.tail.load(Relaxed);
        if tail.wrapping_sub(self.head.load(Relaxed)) as usize >= LENGTH {
            return None;
        }
        let sample = self.ring.get(tail as usize % LENGTH)?;
        let context = timer.context();
        let is_other = sample.context.swap(context, Relaxed) != context;
        for event in [&sample.begin, &sample.end] {
            let old = event.load(Relaxed);
            if is_other && old != 0 {
                timer.destroy(old);
            }
            if is_other || old == 0 {
                event.store(timer.create(), Relaxed);
            }
        }
        let (begin, end) = (sample.begin.load(Relaxed), sample.end.load(Relaxed));
        if begin == 0 || end == 0 {
            return None;
        }
        let since = if self.is_any() { self.since.load(Relaxed) } else { now() };
        self.unpaid(since.saturating_add_signed(charge.nanoseconds), tell);
        sample.state.store(RESERVED, Relaxed);
        sample.cost.store(charge.number, Relaxed);
        sample.stands_for.store(stands_for, Relaxed);
        sample.charged.store(charge.nanoseconds, Relaxed);
        self.depth.fetch_add(charge.nanoseconds, Relaxed);
        self.tail.store(tail.wrapping_add(1), Relaxed);
        drop(locked);
        if !timer.record(begin) {
            sample.state.store(VOID, Release);
            return None;
        }
        Some(sample)
    }

    /// Whether a launch is under way that is measured, or nobody has looked since it ended.
    #[inline]
    pub(crate) fn is_any(&self) -> bool {
        self.head.load(Relaxed) != self.tail.load(Relaxed)
    }

    /// Looks at launches that have ended: what to add to the process's credit, in nanoseconds. Where one had, `tell` is told
    /// since when what is still under way is not paid for; 0: nothing is.
    pub(crate) fn harvest(
        &self,
        timer: &impl Timer,
        costs: &Costs,
        is_watched: bool,
        now: impl FnOnce() -> u64,
        tell: impl FnOnce(u64),
    ) -> i64 {
        let Some(_locked) = self.lock().filter(|_| self.aside.load(Relaxed) == 0) else { return 0 };
        let (first, tail) = (self.head.load(Relaxed), self.tail.load(Relaxed));
        let mut head = first;
        let mut credit = 0i64;
        while head != tail {
            let Some(sample) = self.ring.get(head as usize % LENGTH) else { break };
            let end = sample.end.load(Relaxed);
            let (is_void, took) = match sample.state.load(Acquire) {
                RESERVED => break,
                UNDER_WAY => match timer.is_done(end) {
                    Some(false) => break,
                    Some(true) => (false, self.took(sample, timer)),
                    None => (false, None),
                },
                _ => (true, None),
            };
            head = head.wrapping_add(1);
            self.head.store(head, Relaxed);
            let charged = sample.charged.load(Relaxed);
            self.depth.fetch_sub(charged, Relaxed);
            let Some(cost) = costs.at(sample.cost.load(Relaxed)) else { continue };
            cost.goes(-1);
            let Some((took, length)) = took else {
                if !is_void {
                    // Its context has ended, and its events with it.
                    sample.forget();
                }
                continue;
            };
            let stands_for = sample.stands_for.load(Relaxed);
            if stands_for > 0 {
                self.compare(sample.cost.load(Relaxed), length);
                let counts = cost.learn(took, length, is_watched);
                let (sum, more) = if cost.is_long() {
                    (&self.long, counts)
                } else {
                    (&self.spared, cost.spared(took, counts).wrapping_mul(stands_for.into()))
                };
                sum.fetch_add(more, Relaxed);
                let counts = self.spread(cost, counts, is_watched);
                credit = credit.saturating_add((charged - counts) * i64::from(stands_for));
            }
        }
        if head != first {
            // The next has begun to run by now, as one runs after the other.
            let charged = || now().wrapping_add_signed(self.depth.load(Relaxed));
            self.unpaid(if head == tail { 0 } else { charged() }, tell);
        }
        credit
    }

    /// Under the lock, so that what is told last is so.
    fn unpaid(&self, since: u64, tell: impl FnOnce(u64)) {
        self.since.store(since, Relaxed);
        tell(since);
    }

    /// What of a launch that counts as so much is charged now. All, and what was put off, where nobody watches.
    fn spread(&self, cost: &Cost, counts: u64, is_watched: bool) -> i64 {
        let usual = cost.usually(counts).filter(|_| is_watched);
        let most = if is_watched { PUT_OFF } else { 0 };
        let all = self.put_off.load(Relaxed) + counts as i64;
        let later = (all - usual.unwrap_or(counts) as i64).clamp(-most, most);
        self.put_off.store(later, Relaxed);
        all - later
    }

    /// Nobody waits any longer for the oldest: its thread may have ended in the middle of its launch, or
    /// its kernel never ends.
    pub(crate) fn give_up(&self) {
        let Some(_locked) = self.lock() else { return };
        let head = self.head.load(Relaxed);
        if head != self.tail.load(Relaxed)
            && let Some(sample) = self.ring.get(head as usize % LENGTH)
        {
            sample.state.store(VOID, Release);
        }
    }

    /// What was not told yet of [`divvy_pages::account::Slot::measured`], in its order.
    pub(crate) fn untold(&self) -> Option<[u64; 4]> {
        let is_any = self.took.load(Relaxed) != 0;
        is_any.then(|| [&self.took, &self.least, &self.long, &self.spared].map(|sum| sum.swap(0, Relaxed)))
    }

    /// Holds how long a kernel ran against the fastest of its launches.
    fn compare(&self, kernel: u32, length: u64) {
        let Some(fastest) = self.fastest.get(kernel as usize) else { return };
        let length = u32::try_from(length).unwrap_or(u32::MAX).max(1);
        let least = match fastest.load(Relaxed) {
            0 => length,
            known => known.min(length),
        };
        fastest.store(least, Relaxed);
        self.took.fetch_add(length.into(), Relaxed);
        self.least.fetch_add(least.into(), Relaxed);
    }

    /// By how much it moved the end of all work, and how long it ran itself.
    fn took(&self, sample: &Sample, timer: &impl Timer) -> Option<(u64, u64)> {
        let (begin, end) = (sample.begin.load(Relaxed), sample.end.load(Relaxed));
        let context = sample.context.load(Relaxed);
        let length = timer.elapsed(begin, end)?.clamp(0, LONGEST);
        let last = self.end.load(Relaxed);
        let moved =
            if last != 0 && self.context.load(Relaxed) == context { timer.elapsed(last, end) } else { None };
        if moved.is_none_or(|moved| moved > 0) {
            // The two events change places: the end's stays as it is until a later one is the end.
            self.end.store(end, Relaxed);
            self.context.store(context, Relaxed);
            sample.end.store(if moved.is_some() { last } else { 0 }, Relaxed);
            if moved.is_none() && last != 0 {
                timer.destroy(last);
            }
        }
        if let Some(apart) = moved.and_then(|moved| u32::try_from(moved.wrapping_sub(length)).ok()) {
            let cheaper = DEAREST.saturating_sub(apart).max(self.cheaper.load(Relaxed));
            self.cheaper.store(cheaper, Relaxed);
        }
        let length = self.net(length.unsigned_abs());
        let moved = moved.map_or(length, |moved| length.min(moved.max(0).unsigned_abs()));
        Some((moved, length))
    }

    /// What a kernel took that was measured to take so long: no less than a quarter of it.
    fn net(&self, length: u64) -> u64 {
        let apart = u64::from(DEAREST - self.cheaper.load(Relaxed));
        length.saturating_sub(apart + apart / 2).max(length / 4)
    }
}

impl Sample {
    /// Its events are nobody's any more; new ones are made when it is used again.
    fn forget(&self) {
        self.begin.store(0, Relaxed);
        self.end.store(0, Relaxed);
    }

    /// The launch was made, or the driver refused it.
    pub(crate) fn end(&self, timer: &impl Timer, launched: bool) {
        let measured = launched && timer.record(self.end.load(Relaxed));
        let state = if measured { UNDER_WAY } else { VOID };
        // Not where it was given up.
        let _ = self.state.compare_exchange(RESERVED, state, Release, Relaxed);
    }
}

#[cfg(test)]
mod tests;
