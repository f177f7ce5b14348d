//! Launches under exclusive quanta: a share launches only while the node grants it the device.
//!
//! Launches form batches of about [`BATCH_NS`]. An event after each batch (a mark) bounds the work
//! in flight, and the GPU time between events is charged to the share. The quantum ends by its time
//! on the policy page: the process lets its work complete, says so in its slot, rings the doorbell
//! and waits for the next one. While no other share waits, or without an agent, the share's token
//! bucket alone holds it to its ceiling.

use crate::pages::SharePages;
use crate::process_state::Device;
use crate::system::System;
use crate::throttle::{Bucket, Timer};
use divvy_pages::account::QuantumState;
use divvy_pages::policy::UNBOUNDED;
use divvy_pages::sync::Ordering::{Acquire, Relaxed, Release, SeqCst};
use divvy_pages::sync::{AtomicI32, AtomicU32, AtomicU64};
use divvy_pages::{AccountPage, Flags, PolicyPage};

/// GPU time of a batch, in nanoseconds. A hand-over waits for the batches in flight. Each costs two
/// events at most, of 1.3 us (H100, driver 580.159), which is a quarter of a per cent.
const BATCH_NS: u64 = 1_000_000;
/// Work in flight when a batch begins, in nanoseconds: enough to keep the device busy while the
/// launching thread sleeps. But always one batch, however long.
const IN_FLIGHT_NS: u64 = 3_000_000;
/// Maximum launches of a batch, so that a kernel that becomes longer is noticed.
const BATCH_LAUNCHES_MAX: u32 = 4096;
/// Bounds of the pause between two queries of an event, in nanoseconds.
const POLL_NS: (u64, u64) = (20_000, 250_000);
/// A launch that work on another device may wait for begins at most this long after the end of the
/// quantum, in nanoseconds: a part of the deadline of a hand-over.
const AWAITED_NS: u64 = 5_000_000;
/// Minimum interval between two rings about a pause of the program, in nanoseconds.
const RING_INTERVAL_NS: u64 = 1_000_000;
/// Upper bound of the time between two events, in nanoseconds, against overflow by wrong times.
const LONGEST_NS: i64 = 1 << 44;
/// One more than batches may be in flight: the event before the oldest is still needed.
const MARKS: usize = 4;

/// The work of a process in flight on one device. Zeros are the initial state.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Pipeline {
    /// Launches that may still join the open batch without a mark, and the quantum of that batch.
    left: AtomicI32,
    number: AtomicU32,
    lock: AtomicU32,
    is_open: AtomicU32,
    /// Launches of a batch, and the expected GPU time of one in nanoseconds.
    batch: AtomicU32,
    /// The quantum that this process has ended.
    finished: AtomicU32,
    expected_ns: AtomicU64,
    head: AtomicU32,
    tail: AtomicU32,
    /// When the last completed batch ended, and the last one began, in nanoseconds of the monotonic clock.
    end: AtomicU64,
    last_began: AtomicU64,
    /// The context of a destroy call in progress, whose events must not be queried; 0 if none.
    aside: AtomicU64,
    last_ring: AtomicU64,
    /// Nonzero while the slot says that this process works.
    is_working: AtomicU32,
    _word: u32,
    marks: [Mark; MARKS],
}

/// A batch: events at its begin and end.
#[derive(Debug)]
struct Mark {
    context: AtomicU64,
    begin: AtomicU64,
    end: AtomicU64,
    /// When `begin` was recorded, by the monotonic clock.
    began: AtomicU64,
    launches: AtomicU32,
    /// Nonzero if it was recorded: the batch does not follow the one before.
    is_first: AtomicU32,
}

/// Whether a launch may begin a batch now.
enum Permission {
    /// The share has the device until then.
    Quantum { number: u32, ends: u64 },
    /// Only its token bucket limits it.
    Tokens { number: u32, rate: u64 },
    /// Another share has the device. The word has this value until that changes, or until a time.
    Wait { number: u32, until: u64 },
}

struct Locked<'a>(&'a AtomicU32);

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.0.store(0, Release);
    }
}

impl Pipeline {
    fn lock(&self, nap: impl Fn()) -> Locked<'_> {
        while self.lock.compare_exchange(0, 1, Acquire, Relaxed).is_err() {
            nap();
        }
        Locked(&self.lock)
    }

    /// Charges a launch to the open batch. Returns true if it needs no mark.
    #[inline]
    pub(crate) fn join_batch(&self, page: &PolicyPage) -> bool {
        let left = self.left.load(Relaxed);
        if left <= 0 || page.quantum().load(Relaxed) != self.number.load(Relaxed) {
            return false;
        }
        // Two threads may read the same number, which is harmless.
        self.left.store(left - 1, Relaxed);
        true
    }

    fn outstanding(&self) -> u32 {
        self.tail.load(Relaxed).wrapping_sub(self.head.load(Relaxed))
    }

    fn is_empty(&self) -> bool {
        self.outstanding() == 0 && self.is_open.load(Relaxed) == 0
    }

    /// Expected GPU time of the batches in flight, in nanoseconds.
    fn in_flight_ns(&self) -> u64 {
        u64::from(self.outstanding()) * self.expected_ns.load(Relaxed)
    }

    fn has_room(&self) -> bool {
        let allowed = IN_FLIGHT_NS / self.expected_ns.load(Relaxed).max(1);
        u64::from(self.outstanding()) < allowed.clamp(2, MARKS as u64 - 1)
    }

    fn poll_ns(&self) -> u64 {
        (self.expected_ns.load(Relaxed) / 8).clamp(POLL_NS.0, POLL_NS.1)
    }

    fn mark(&self, index: u32) -> &Mark {
        &self.marks[index as usize % MARKS]
    }

    /// Prepares the events of the next batch. Records the first if the device has nothing of this
    /// process to do, so that a pause is not charged. Called under the lock.
    fn begin(&self, timer: &impl Timer, number: u32, now: u64) {
        let tail = self.tail.load(Relaxed);
        let (mark, before) = (self.mark(tail), self.mark(tail.wrapping_sub(1)));
        let context = timer.context();
        let is_other = mark.context.swap(context, Relaxed) != context;
        for event in [&mark.begin, &mark.end] {
            let old = event.load(Relaxed);
            if is_other && old != 0 {
                timer.destroy(old);
            }
            if is_other || old == 0 {
                event.store(timer.create(), Relaxed);
            }
        }
        let follows = self.outstanding() > 0 && before.context.load(Relaxed) == context;
        let is_marked = !follows && timer.record(mark.begin.load(Relaxed));
        mark.began.store(now, Relaxed);
        self.last_began.store(now, Relaxed);
        mark.is_first.store(is_marked.into(), Relaxed);
        if !follows && !is_marked {
            // Charged from now on by the clock.
            self.end.store(now, Relaxed);
        }
        self.number.store(number, Relaxed);
        self.is_open.store(1, Relaxed);
        let batch = self.batch.load(Relaxed).max(1);
        mark.launches.store(batch, Relaxed);
        self.left.store(batch as i32 - 2, Relaxed);
    }

    /// Ends the open batch with a mark. Called under the lock.
    fn close(&self, timer: &impl Timer) {
        if self.is_open.swap(0, Relaxed) == 0 {
            return;
        }
        let tail = self.tail.load(Relaxed);
        let mark = self.mark(tail);
        let left = self.left.swap(0, Relaxed).max(0) as u32;
        mark.launches.store(mark.launches.load(Relaxed).saturating_sub(left).max(1), Relaxed);
        // Without a mark nothing is known of the batch: nothing is captured into it that runs now.
        if mark.context.load(Relaxed) == timer.context() && timer.record(mark.end.load(Relaxed)) {
            self.tail.store(tail.wrapping_add(1), Relaxed);
        }
    }

    /// Passes the begin and end of each completed batch to `charge`, in nanoseconds of the monotonic
    /// clock. Called under the lock.
    fn harvest(&self, timer: &impl Timer, now: impl Fn() -> u64, mut charge: impl FnMut(u64, u64)) {
        let tail = self.tail.load(Relaxed);
        while self.head.load(Relaxed) != tail && self.aside.load(Relaxed) == 0 {
            let head = self.head.load(Relaxed);
            let mark = self.mark(head);
            let end = mark.end.load(Relaxed);
            let is_done = timer.is_done(end);
            if is_done == Some(false) {
                return;
            }
            self.head.store(head.wrapping_add(1), Relaxed);
            let (from, began) = match mark.is_first.load(Relaxed) {
                0 => (self.mark(head.wrapping_sub(1)).end.load(Relaxed), self.end.load(Relaxed)),
                _ => (mark.begin.load(Relaxed), mark.began.load(Relaxed)),
            };
            let took = is_done.filter(|_| from != 0).and_then(|_| timer.elapsed(from, end));
            // Events of a destroyed context tell nothing.
            let took =
                took.map_or_else(|| now().saturating_sub(began), |took| took.clamp(0, LONGEST_NS) as u64);
            let end = began.saturating_add(took);
            charge(began, end);
            self.end.store(end, Relaxed);
            self.learn(took, mark.launches.load(Relaxed).max(1));
        }
    }

    /// Adapts the number of launches in a batch. It grows in steps of two, because a mistake costs
    /// the others time; it shrinks at once.
    fn learn(&self, took: u64, launches: u32) {
        let each = (took / u64::from(launches)).max(1);
        let wanted = u32::try_from(BATCH_NS / each).unwrap_or(u32::MAX);
        let batch = wanted.min(launches.saturating_mul(2)).clamp(1, BATCH_LAUNCHES_MAX);
        self.batch.store(batch, Relaxed);
        // Kernels differ, so the longest of late is expected.
        let late = self.expected_ns.load(Relaxed) / 4 * 3;
        self.expected_ns.store((each * u64::from(batch)).max(late), Relaxed);
    }

    /// Stops the use of a context's events before a call that may destroy it.
    pub(crate) fn pause_context(&self, context: u64, nap: impl Fn()) {
        let _locked = self.lock(nap);
        self.aside.store(context, Relaxed);
    }

    /// Resumes after that call. If the context is gone, so are its events and its work.
    pub(crate) fn resume_context(&self, is_gone: bool, nap: impl Fn()) {
        let _locked = self.lock(nap);
        let context = self.aside.swap(0, Relaxed);
        if context == 0 || !is_gone {
            return;
        }
        for mark in self.marks.iter().filter(|mark| mark.context.load(Relaxed) == context) {
            for word in [&mark.context, &mark.begin, &mark.end] {
                word.store(0, Relaxed);
            }
        }
        self.is_open.store(0, Relaxed);
        self.left.store(0, Relaxed);
    }
}

impl<S: System> Device<'_, S> {
    fn pipeline(&self) -> Option<&Pipeline> {
        self.local.pipelines.get(self.index as usize)
    }

    /// Runs `call` while the share has the device. `only`: see [`Device::launch`].
    #[cold]
    pub(crate) fn launch_exclusive(
        &self,
        share: &SharePages,
        page: &PolicyPage,
        timer: &impl Timer,
        only: bool,
        call: impl FnOnce() -> i32,
    ) -> i32 {
        let Some(pipeline) = self.pipeline() else { return call() };
        let nap = || self.process.system.sleep(0);
        share.refresh();
        if only {
            self.fill_fast_path_exclusive(page, pipeline);
        }
        let is_last = {
            let _locked = pipeline.lock(nap);
            let is_open = pipeline.is_open.load(Relaxed) != 0;
            let is_same = pipeline.number.load(Relaxed) == page.quantum().load(SeqCst);
            if is_open && !is_same {
                pipeline.close(timer);
            }
            is_open && is_same
        };
        let mut is_single = false;
        if !is_last {
            is_single = self.begin_batch(share, page, pipeline, timer);
        }
        let answer = call();
        if is_last || is_single {
            let _locked = pipeline.lock(nap);
            pipeline.close(timer);
        }
        answer
    }

    /// Waits until a batch may begin, and begins it. Returns true if it has one launch.
    fn begin_batch(
        &self,
        share: &SharePages,
        page: &PolicyPage,
        pipeline: &Pipeline,
        timer: &impl Timer,
    ) -> bool {
        let system = &self.process.system;
        let is_observing = share.flags().has(Flags::OBSERVE_ONLY);
        let mut waits = Waiting { since: None };
        let is_single = loop {
            self.collect(share, page, pipeline, timer);
            let now = system.now();
            let number = match self.permission(share, page, pipeline, now) {
                Permission::Wait { number, .. } if is_observing => number,
                Permission::Wait { number, until } => {
                    waits.report(self, now);
                    if pipeline.is_empty() {
                        self.wait_for_quantum(share, page, number, until);
                    } else {
                        // The device is idle from when this work completes until that is noticed.
                        system.sleep(POLL_NS.0);
                    }
                    continue;
                }
                Permission::Quantum { number, ends } => {
                    // Work in flight would last until the end.
                    let is_over = now.saturating_add(pipeline.in_flight_ns()) >= ends;
                    if is_over && !self.may_be_awaited(pipeline, ends, now) {
                        pipeline.finished.store(number, Relaxed);
                        continue;
                    }
                    number
                }
                Permission::Tokens { number, rate } => match self.has_tokens(share, pipeline, rate, now) {
                    Err(pause) if !is_observing => {
                        self.report_throttling();
                        waits.report(self, now);
                        // Collected soon, so that the node learns when the device is free.
                        let pause = if pipeline.is_empty() { pause } else { pause.min(pipeline.poll_ns()) };
                        system.wait(page.quantum(), number, now.saturating_add(pause));
                        continue;
                    }
                    _ => number,
                },
            };
            if !pipeline.has_room() {
                system.sleep(pipeline.poll_ns());
                continue;
            }
            let _locked = pipeline.lock(|| system.sleep(0));
            if pipeline.is_empty() {
                self.update_slot(|slot| slot.set_unmeasured_since(now));
            }
            self.say(pipeline, QuantumState::Working, number);
            if page.quantum().load(SeqCst) == number || is_observing {
                pipeline.begin(timer, number, now);
                break pipeline.batch.load(Relaxed) <= 1;
            }
            // The node has just taken the device away.
            if pipeline.is_empty() {
                self.say(pipeline, QuantumState::Drained, number);
            }
        };
        waits.report(self, system.now());
        is_single
    }

    /// Whether work in flight on another device may wait for this launch, as in collective
    /// operations: it was launched before the quantum of this device ended.
    fn may_be_awaited(&self, pipeline: &Pipeline, ends: u64, now: u64) -> bool {
        let is_other = |other: &&Pipeline| !core::ptr::eq(*other, pipeline) && !other.is_empty();
        let mut others = self.local.pipelines.iter().zip(self.local.devices()).map(|(other, _)| other);
        now < ends.saturating_add(AWAITED_NS)
            && others.any(|other| is_other(&other) && other.last_began.load(Relaxed) < ends)
    }

    fn permission(&self, share: &SharePages, page: &PolicyPage, pipeline: &Pipeline, now: u64) -> Permission {
        let number = page.quantum().load(SeqCst);
        let until = page.quanta_expire();
        if now >= until {
            return Permission::Tokens { number, rate: share.rate(now) };
        }
        if number == 0 || number == pipeline.finished.load(Relaxed) {
            return Permission::Wait { number, until };
        }
        match page.quantum_ends() {
            0 => Permission::Tokens { number, rate: share.rate(now) },
            ends => Permission::Quantum { number, ends },
        }
    }

    /// Whether the bucket has tokens beyond the work in flight; else the time until then, in
    /// nanoseconds.
    fn has_tokens(&self, share: &SharePages, pipeline: &Pipeline, rate: u64, now: u64) -> Result<(), u64> {
        let Some(page) = share.account().filter(|_| rate != UNBOUNDED) else { return Ok(()) };
        let bucket = Bucket { page, rate, burst: share.burst_ns(rate) };
        bucket.has_more_than(pipeline.in_flight_ns(), now)
    }

    /// Says in the slot that a launch waits, rings, and sleeps until the node grants a quantum.
    ///
    /// It rings at each call: a quantum may have come and gone while this process slept, and then the
    /// node waits for the ring.
    fn wait_for_quantum(&self, share: &SharePages, page: &PolicyPage, number: u32, until: u64) {
        let system = &self.process.system;
        self.update_slot(|slot| slot.set_quantum(QuantumState::Waiting, number));
        if let Some(account) = share.account() {
            ring(system, account);
        }
        system.wait(page.quantum(), number, until);
    }

    /// Charges completed batches, and says in the slot when none is left.
    fn collect(&self, share: &SharePages, policy: &PolicyPage, pipeline: &Pipeline, timer: &impl Timer) {
        let system = &self.process.system;
        let _locked = pipeline.lock(|| system.sleep(0));
        let Some(page) = share.account() else { return };
        let rate = share.rate(system.now());
        let bucket = Bucket { page, rate, burst: share.burst_ns(rate) };
        let head = pipeline.head.load(Relaxed);
        pipeline.harvest(
            timer,
            || system.now(),
            |begin, end| {
                let charged = i64::try_from(bucket.page.charge_interval(begin, end)).unwrap_or(i64::MAX);
                bucket.charge(charged, policy.quantum_ends() != 0, system.now());
                self.update_slot(|slot| slot.add_gpu_time(charged, 0));
            },
        );
        if !pipeline.is_empty() {
            if pipeline.head.load(Relaxed) != head {
                self.update_slot(|slot| slot.set_unmeasured_since(pipeline.end.load(Relaxed)));
            }
        } else if pipeline.is_working.load(Relaxed) != 0 {
            self.update_slot(|slot| slot.set_unmeasured_since(0));
            self.say(pipeline, QuantumState::Drained, pipeline.number.load(Relaxed));
            let now = system.now();
            // Another share waits, and the program may pause.
            if policy.quantum_ends() != 0
                && now.saturating_sub(pipeline.last_ring.load(Relaxed)) >= RING_INTERVAL_NS
            {
                pipeline.last_ring.store(now, Relaxed);
                ring(system, page);
            }
        }
    }

    fn say(&self, pipeline: &Pipeline, state: QuantumState, number: u32) {
        pipeline.is_working.store((state == QuantumState::Working).into(), Relaxed);
        self.update_slot(|slot| slot.set_quantum(state, number));
    }

    /// Marks the open batch before the program waits for the device.
    pub fn mark_before_wait(&self, timer: &impl Timer) {
        let Some((_, pipeline)) = self.pages.exclusive().zip(self.pipeline()) else { return };
        if pipeline.is_open.load(Relaxed) != 0 {
            let _locked = pipeline.lock(|| self.process.system.sleep(0));
            pipeline.close(timer);
        }
    }

    /// Collects what has completed, after the program has waited or polled: it may not launch again.
    pub(crate) fn collect_exclusive(&self, timer: &impl Timer) {
        if let Some(((share, page), pipeline)) = self.pages.exclusive().zip(self.pipeline())
            && pipeline.is_working.load(Relaxed) != 0
        {
            self.collect(share, page, pipeline, timer);
        }
    }
}

/// A launch that waits.
struct Waiting {
    since: Option<u64>,
}

impl Waiting {
    /// Reports the wait as it passes.
    fn report<S: System>(&mut self, device: &Device<'_, S>, now: u64) {
        if let Some(since) = self.since.replace(now) {
            device.update_slot(|slot| slot.add_gpu_time(0, now.saturating_sub(since)));
        }
    }
}

fn ring<S: System>(system: &S, account: &AccountPage) {
    account.doorbell().fetch_add(1, Relaxed);
    system.wake(account.doorbell());
}
