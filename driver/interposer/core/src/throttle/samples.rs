//! Launches that are being measured: a ring of pairs of events.
//!
//! Events are recorded before and after a launch and read by a later call. Nothing waits here, and
//! a thread that finds the ring locked skips it. A launch counts for how far it moved the end of
//! all work, so overlapping kernels count once. Times are taken between neighbouring events,
//! because event times are floats of milliseconds. The cost of events is estimated and subtracted
//! ([`Samples::net`]).

use super::cost_model::{Charge, Cost, Costs, KERNELS};
use super::sampling::Measure;
use divvy_pages::sync::{AtomicI64, AtomicU32, AtomicU64, Ordering::*};

/// The driver's events, for the thread and stream of a launch.
pub trait Timer {
    /// The current context. Each event belongs to one.
    fn context(&self) -> u64;
    /// Creates an event of the current context; 0 on failure.
    fn create(&self) -> u64;
    fn destroy(&self, event: u64);
    /// Records the event in the launch's stream.
    fn record(&self, event: u64) -> bool;
    /// `None` if the event is no longer valid.
    fn is_done(&self, event: u64) -> Option<bool>;
    /// Nanoseconds between two completed events.
    fn elapsed(&self, from: u64, to: u64) -> Option<i64>;
}

const LENGTH: usize = 64;
/// Maximum time that is charged earlier or later than measured, in nanoseconds.
const PUT_OFF: i64 = 80_000_000;
/// Upper bound for the duration of a launch, in nanoseconds, against overflow by wrong event times.
const LONGEST: i64 = 1 << 44;
/// Upper bound for the cost of two events, in nanoseconds. More time between two launches is the
/// program's.
const DEAREST: u32 = 1_300;
/// Maximum polling interval of a launch that waits for measured work, in nanoseconds.
pub(crate) const BUSY: i64 = 500_000;

const RESERVED: u32 = 0;
const UNDER_WAY: u32 = 1;
const VOID: u32 = 2;

/// The samples of one device. Zeros are an empty ring.
#[derive(Debug)]
pub(crate) struct Samples {
    lock: AtomicU32,
    head: AtomicU32,
    tail: AtomicU32,
    /// The event at which all measured work ends so far, and its context.
    end: AtomicU64,
    context: AtomicU64,
    /// The context of a destroy call in progress, whose events must not be queried; 0 if none.
    aside: AtomicU64,
    /// Sum of charges of the launches in flight.
    depth: AtomicI64,
    /// Time at which the work in flight exceeds its charge, by the monotonic clock; 0 if none is in
    /// flight.
    since: AtomicU64,
    /// Time of launches that is not charged yet.
    put_off: AtomicI64,
    /// Sums since the last report, in nanoseconds: durations of measured launches, and their
    /// durations had each been as fast as its kernel's fastest.
    took: AtomicU64,
    least: AtomicU64,
    /// Counted time of kernels longer than a time slice.
    long: AtomicU64,
    /// Time left out of the counts that may be the kernels' own.
    spared: AtomicU64,
    /// Difference between [`DEAREST`] and the cost of events, from the smallest gap between two
    /// launches.
    cheaper: AtomicU32,
    ring: [Sample; LENGTH],
    /// The fastest launch by kernel number, in nanoseconds; 0 if none.
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

    /// Returns true if another measured launch may be in flight: if their charges are below `most`
    /// nanoseconds. Always true if the work behind the oldest launch would not keep the device
    /// busy.
    pub(crate) fn has_room(&self, most: i64) -> bool {
        let head = self.head.load(Relaxed);
        let count = self.tail.load(Relaxed).wrapping_sub(head) as usize;
        let oldest = self.ring.get(head as usize % LENGTH).map_or(0, |sample| sample.charged.load(Relaxed));
        let depth = self.depth.load(Relaxed);
        let is_little = count < 2 || depth < most || depth.saturating_sub(oldest) < BUSY;
        count < LENGTH && is_little || self.aside.load(Relaxed) != 0
    }

    /// Stops the use of a context's events before a call that may destroy it. `nap` lets current
    /// users finish.
    pub(crate) fn pause_context(&self, context: u64, nap: impl Fn()) {
        // The holder makes only a few driver calls.
        for _ in 0..LENGTH {
            if let Some(_locked) = self.lock() {
                self.aside.store(context, Relaxed);
                return;
            }
            nap();
        }
        self.aside.store(context, Relaxed);
    }

    /// Resumes after the call.
    pub(crate) fn resume_context(&self, is_gone: bool) {
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

    /// Starts a sample and records its first event. `None` if the launch goes unmeasured. `tell`
    /// gets the time from which the work in flight is unpaid.
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

    /// Returns true if a measured launch is in flight or not yet read.
    #[inline]
    pub(crate) fn is_any(&self) -> bool {
        self.head.load(Relaxed) != self.tail.load(Relaxed)
    }

    /// Reads completed launches and returns the credit to add, in nanoseconds. If there are any,
    /// `tell` gets the time from which the remaining work is unpaid; 0 if none remains.
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
                    // The context was destroyed with its events.
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
            // The next launch is running now, because launches run one after the other.
            let charged = || now().wrapping_add_signed(self.depth.load(Relaxed));
            self.unpaid(if head == tail { 0 } else { charged() }, tell);
        }
        credit
    }

    /// Called under the lock, so that the last report is the current one.
    fn unpaid(&self, since: u64, tell: impl FnOnce(u64)) {
        self.since.store(since, Relaxed);
        tell(since);
    }

    /// The part of a launch's count that is charged now. Without the node's measurements, all of it
    /// and all deferred time.
    fn spread(&self, cost: &Cost, counts: u64, is_watched: bool) -> i64 {
        let usual = cost.usually(counts).filter(|_| is_watched);
        let most = if is_watched { PUT_OFF } else { 0 };
        let all = self.put_off.load(Relaxed) + counts as i64;
        let later = (all - usual.unwrap_or(counts) as i64).clamp(-most, most);
        self.put_off.store(later, Relaxed);
        all - later
    }

    /// Gives up the oldest launch: its thread may have exited during the launch, or its kernel
    /// never ends.
    pub(crate) fn give_up(&self) {
        let Some(_locked) = self.lock() else { return };
        let head = self.head.load(Relaxed);
        if head != self.tail.load(Relaxed)
            && let Some(sample) = self.ring.get(head as usize % LENGTH)
        {
            sample.state.store(VOID, Release);
        }
    }

    /// Returns the sums that were not reported yet, in the order of
    /// [`divvy_pages::account::Slot::add_measured`].
    pub(crate) fn untold(&self) -> Option<[u64; 4]> {
        let is_any = self.took.load(Relaxed) != 0;
        is_any.then(|| [&self.took, &self.least, &self.long, &self.spared].map(|sum| sum.swap(0, Relaxed)))
    }

    /// Compares a launch with the fastest of its kernel.
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

    /// Returns how far a launch moved the end of all work, and how long it ran.
    fn took(&self, sample: &Sample, timer: &impl Timer) -> Option<(u64, u64)> {
        let (begin, end) = (sample.begin.load(Relaxed), sample.end.load(Relaxed));
        let context = sample.context.load(Relaxed);
        let length = timer.elapsed(begin, end)?.clamp(0, LONGEST);
        let last = self.end.load(Relaxed);
        let moved =
            if last != 0 && self.context.load(Relaxed) == context { timer.elapsed(last, end) } else { None };
        if moved.is_none_or(|moved| moved > 0) {
            // The two events are swapped: the end event is kept until a later one is the end.
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

    /// Subtracts the cost of events from a measured duration, down to a quarter of it.
    ///
    /// A GPU takes time for an event and runs nothing beside it. On an H100 (driver 580.159), 1.28
    /// us pass between two adjacent events, and a measured kernel appears 1.95 us longer than in an
    /// unmeasured row. So the smallest gap between two measured launches is taken as the cost of an
    /// event, and 1.5 times that is subtracted.
    fn net(&self, length: u64) -> u64 {
        let apart = u64::from(DEAREST - self.cheaper.load(Relaxed));
        length.saturating_sub(apart + apart / 2).max(length / 4)
    }
}

impl Sample {
    /// Drops its events; new ones are created when it is used again.
    fn forget(&self) {
        self.begin.store(0, Relaxed);
        self.end.store(0, Relaxed);
    }

    /// Records the end after the launch, or discards the sample if the driver refused it.
    pub(crate) fn end(&self, timer: &impl Timer, launched: bool) {
        let measured = launched && timer.record(self.end.load(Relaxed));
        let state = if measured { UNDER_WAY } else { VOID };
        // Fails if the sample was given up.
        let _ = self.state.compare_exchange(RESERVED, state, Release, Relaxed);
    }
}

#[cfg(test)]
mod tests;
