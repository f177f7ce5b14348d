//! Time on a partition: which process runs when.
//!
//! By default processes share a partition by round robin with a time slice, as on a real GPU. A
//! process's work is a length on its own timeline: `submitted` is its end, `served` the progress.
//! Overlapping kernels of one process count once. Clients of MPS run *in order* of submission
//! across processes instead, and their timeline is the monotonic clock. No thread runs in the
//! background: each caller first advances the schedule to the present under the partition's lock,
//! which also takes the samples that are due.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::gpu_process::GpuProcess;
use super::gpu_usage::GpuUsage;
use super::layout::{Engine, ROWS, SAMPLE_PERIOD_NS, SAMPLES_KEPT, Work};
use super::locks::Locks;

/// Spins on a lock before checking whether its holder is alive.
const SPINS_PER_OWNER_CHECK: u32 = 10_000;

/// A point on a GPU process's timeline, in ns.
pub type Mark = u64;

/// A kernel or another stretch of work.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// The work starts no earlier than this point.
    pub after: Mark,
    /// Duration on an idle GPU, in ns.
    pub length: u64,
    /// Whether it touches the managed memory of its process.
    pub touches: bool,
}

/// The monotonic clock, in ns.
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is writable for the answer. The call cannot fail: every kernel has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The partition's lock, released when dropped.
pub(super) struct PartitionGuard<'l>(&'l AtomicU64);

impl Drop for PartitionGuard<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

impl GpuUsage {
    pub(super) fn engine(&self, partition: usize) -> &Engine {
        &self.get().partitions[partition].engine
    }

    pub(super) fn work(&self, row: usize) -> &Work {
        &self.get().rows[row].work
    }

    /// Takes the partition's lock for a row. Takes it over from a holder that has died, even in the
    /// middle of an update.
    pub(super) fn lock_partition(&self, locks: Locks, partition: usize, row: usize) -> PartitionGuard<'_> {
        let lock = &self.engine(partition).lock;
        let me = row as u64 + 1;
        let mut spins_done = 0;
        loop {
            let Err(holder) = lock.compare_exchange_weak(0, me, Ordering::Acquire, Ordering::Relaxed) else {
                return PartitionGuard(lock);
            };
            spins_done += 1;
            if spins_done % SPINS_PER_OWNER_CHECK == 0 {
                let dead = holder.checked_sub(1).is_some_and(|other| {
                    let other = other as usize % ROWS;
                    let owner = self.get().owners[other].load(Ordering::Acquire);
                    owner == 0 || locks.holder(other, owner, super::locks::token()).is_none()
                });
                if dead && lock.compare_exchange(holder, me, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                    return PartitionGuard(lock);
                }
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
    }

    /// Advances the schedule to `now`. The caller holds the partition's lock.
    pub(super) fn advance(&self, partition: usize, now: u64) {
        let engine = self.engine(partition);
        let mut time = engine.clock.load(Ordering::Relaxed).min(now);
        let next_sample = || (engine.last_sample.load(Ordering::Relaxed) + 1) * SAMPLE_PERIOD_NS;
        let mut until = now.min(next_sample());
        let slice = engine.time_slice.load(Ordering::Relaxed).max(1);
        while time < now {
            let Some(row) = engine.turn.load(Ordering::Relaxed).checked_sub(1).map(|row| row as usize % ROWS)
            else {
                break;
            };
            let work = self.work(row);
            let served = work.served.load(Ordering::Relaxed);
            let rest = work.submitted.load(Ordering::Relaxed).saturating_sub(served);
            let left = engine.slice_left.load(Ordering::Relaxed);
            let run = rest.min(left).min(until.saturating_sub(time));
            time += run;
            engine.run_ns.store(engine.run_ns.load(Ordering::Relaxed) + run, Ordering::Relaxed);
            work.served.store(served + run, Ordering::Release);
            engine.slice_left.store(left - run, Ordering::Relaxed);
            if run == rest {
                engine.active[row / 64].fetch_and(!(1 << (row % 64)), Ordering::Relaxed);
                self.start_next_turn(partition, row, time, slice);
            } else if run == left {
                self.start_next_turn(partition, row, time, slice);
            }
            if time >= until {
                self.take_samples(partition, time);
                until = now.min(next_sample());
            }
        }
        self.take_samples(partition, now);
        engine.clock.store(now, Ordering::Relaxed);
    }

    /// Starts the turn of the next row with work after `last`, in cyclic order.
    fn start_next_turn(&self, partition: usize, last: usize, time: u64, slice: u64) {
        let engine = self.engine(partition);
        engine.slice_left.store(slice, Ordering::Relaxed);
        let high = self.high_water().max(1);
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

    /// Drops the unfinished work and the managed memory of a row.
    pub(super) fn discard_work(&self, partition: usize, row: usize) {
        let Ok(locks) = self.locks() else { return };
        let _held = self.lock_partition(locks, partition, row);
        let (work, time) = (self.work(row), now());
        self.advance(partition, time);
        work.submitted.store(work.served.load(Ordering::Relaxed), Ordering::Relaxed);
        self.forget_managed(partition, row);
    }

    /// The time at which a row reached a point of its timeline, in ns of the monotonic clock.
    fn time_of(&self, row: usize, mark: Mark) -> u64 {
        let mut oldest = 0;
        for (turn, [start, served]) in self.work(row).last_turns() {
            if served < mark || turn == 0 {
                return start + mark.saturating_sub(served);
            }
            oldest = start;
        }
        // Earlier than the turns that are kept: the start of the oldest is the best known time.
        oldest
    }
}

/// The next set bit after `last` in cyclic order, below `high`.
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

impl GpuProcess {
    /// From now on its kernels run in order with those of all other such processes, as for clients
    /// of MPS.
    pub fn run_in_order(&self) {
        self.usage().work(self.row()).in_order.store(1, Ordering::Relaxed);
    }

    pub(super) fn in_order(&self) -> bool {
        self.usage().work(self.row()).in_order.load(Ordering::Relaxed) == 1
    }

    /// Submits work. Returns the points of the timeline where it begins and ends.
    pub fn submit(&self, kernel: Kernel) -> (Mark, Mark) {
        let (usage, partition, row) = (self.usage(), self.partition_index(), self.row());
        let _held = usage.lock_partition(self.locks(), partition, row);
        let (engine, time) = (usage.engine(partition), now());
        usage.advance(partition, time);
        let kernel = match self.own().managed_total.load(Ordering::Relaxed) {
            1.. if kernel.touches => {
                Kernel { length: kernel.length + usage.fault_in(partition, row, time), ..kernel }
            }
            _ => kernel,
        };
        if self.in_order() {
            let begin = engine.in_order_end.load(Ordering::Relaxed).max(kernel.after).max(time);
            engine.in_order_end.store(begin + kernel.length, Ordering::Relaxed);
            engine.in_order_ns.fetch_add(kernel.length, Ordering::Relaxed);
            let (work, had) = (usage.work(row), usage.work(row).served.load(Ordering::Relaxed));
            let last = work.last_turns().next();
            if last.is_none_or(|(_, [start, served])| start + (had - served) != begin) {
                work.begin(begin, had);
            }
            work.served.fetch_add(kernel.length, Ordering::Relaxed);
            work.submitted.fetch_add(kernel.length, Ordering::Relaxed);
            return (begin, begin + kernel.length);
        }
        let work = usage.work(row);
        let begin = work.served.load(Ordering::Relaxed).max(kernel.after);
        let end = begin + kernel.length;
        if end > work.submitted.load(Ordering::Relaxed) {
            work.submitted.store(end, Ordering::Relaxed);
            engine.active[row / 64].fetch_or(1 << (row % 64), Ordering::Relaxed);
            if engine.turn.load(Ordering::Relaxed) == 0 {
                engine.turn.store(row as u64 + 1, Ordering::Relaxed);
                engine.slice_left.store(engine.time_slice.load(Ordering::Relaxed).max(1), Ordering::Relaxed);
                usage.begin(row, time);
            }
        }
        (begin, end)
    }

    /// The point up to which all submitted work is done.
    pub fn progress(&self) -> Mark {
        if self.in_order() {
            return now();
        }
        let (usage, partition, row) = (self.usage(), self.partition_index(), self.row());
        let _held = usage.lock_partition(self.locks(), partition, row);
        usage.advance(partition, now());
        usage.work(row).served.load(Ordering::Relaxed)
    }

    /// The progress as of the last time that any process advanced the schedule. Never ahead of the
    /// real progress.
    #[inline]
    pub fn last_progress(&self) -> Mark {
        if self.in_order() { now() } else { self.served() }
    }

    /// The monotonic time at which its work reached a point, in ns. The point must have been
    /// reached.
    pub fn time_of(&self, mark: Mark) -> u64 {
        if self.in_order() { mark } else { self.usage().time_of(self.row(), mark) }
    }

    /// GPU time that its work has received, in ns.
    pub fn served(&self) -> u64 {
        self.usage().work(self.row()).served.load(Ordering::Relaxed)
    }
}

impl GpuUsage {
    /// Takes the samples that are due at `time`. The caller holds the partition's lock and has
    /// advanced the schedule to no later than the last due sample.
    pub(super) fn take_samples(&self, partition: usize, time: u64) {
        let (engine, last) = (self.engine(partition), time / SAMPLE_PERIOD_NS);
        let next = engine.last_sample.load(Ordering::Relaxed) + 1;
        if next > last {
            return;
        }
        let numbers = next.max((last + 1).saturating_sub(SAMPLES_KEPT as u64))..=last;
        for number in numbers.clone() {
            engine.samples.note(number, self.busy_at(partition, number * SAMPLE_PERIOD_NS));
        }
        for row in self.rows_of(partition) {
            let work = self.work(row);
            for number in numbers.clone() {
                work.samples.note(number, work.served_at(number * SAMPLE_PERIOD_NS));
            }
        }
        engine.last_sample.store(last, Ordering::Relaxed);
    }

    /// Rows of the GPU processes on a partition.
    pub(super) fn rows_of(&self, partition: usize) -> impl Iterator<Item = usize> {
        let map = self.get();
        let of_it = move |row: &usize| {
            map.owners[*row].load(Ordering::Relaxed) != 0
                && map.rows[*row].partition.load(Ordering::Relaxed) as usize == partition
        };
        (0..self.high_water()).filter(of_it)
    }

    /// Total busy time of the partition at `time`, in ns. The conditions of
    /// [`Work::served_at`](super::layout::Work::served_at) apply.
    pub(super) fn busy_at(&self, partition: usize, time: u64) -> u64 {
        let engine = self.engine(partition);
        let ahead = engine.in_order_end.load(Ordering::Relaxed).saturating_sub(time);
        let ordered = engine.in_order_ns.load(Ordering::Relaxed).saturating_sub(ahead);
        engine.run_ns.load(Ordering::Relaxed) + ordered
    }

    /// GPU time that the row's process has received since it attached, in ns. The caller holds the
    /// partition's lock and has advanced the schedule to `time`.
    pub(super) fn gpu_ns_since_attach(&self, row: usize, time: u64) -> u64 {
        let work = self.work(row);
        work.served_at(time).saturating_sub(work.base.load(Ordering::Relaxed))
    }
}

/// Longest sleep before a waiting process checks its progress again.
const MAX_SLEEP: Duration = Duration::from_millis(20);

impl GpuProcess {
    /// Waits until the timeline reaches a point. Sleeps at first and spins for the last `spins`,
    /// because a sleeping thread wakes about 100 us late. The real driver spins all the time by
    /// default (`CU_CTX_SCHED_AUTO`), which would starve the other simulated processes of CPU time.
    /// Other processes' work can delay the point, so the remaining time is checked repeatedly.
    pub fn wait_for(&self, mark: Mark, spins: Duration) {
        loop {
            let rest = self.remaining_ns(mark);
            if rest == 0 {
                return;
            }
            match Duration::from_nanos(rest).min(MAX_SLEEP).checked_sub(spins) {
                Some(pause) => std::thread::sleep(pause),
                None => {
                    let until = now() + rest;
                    while now() < until {
                        std::hint::spin_loop();
                    }
                }
            }
        }
    }

    /// Nanoseconds until a point is reached, if the process that runs now does not die.
    fn remaining_ns(&self, mark: Mark) -> u64 {
        if self.in_order() {
            return mark.saturating_sub(now());
        }
        let (usage, partition, row) = (self.usage(), self.partition_index(), self.row());
        let _held = usage.lock_partition(self.locks(), partition, row);
        usage.advance(partition, now());
        let rest_of =
            |row: usize, mark: Mark| mark.saturating_sub(usage.work(row).served.load(Ordering::Relaxed));
        let own = rest_of(row, mark);
        let engine = usage.engine(partition);
        let turn = engine.turn.load(Ordering::Relaxed).checked_sub(1).map(|row| row as usize % ROWS);
        match turn.filter(|other| own > 0 && *other != row) {
            Some(other) => {
                let end = usage.work(other).submitted.load(Ordering::Relaxed);
                own + rest_of(other, end).min(engine.slice_left.load(Ordering::Relaxed))
            }
            None => own,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn next_active_row_is_the_first_after_the_last(
            bits in proptest::collection::btree_set(0..300_usize, 0..20), last in 0..300_usize,
        ) {
            let words: Vec<AtomicU64> = (0..ROWS / 64)
                .map(|at| bits.iter().filter(|bit| *bit / 64 == at).map(|bit| 1 << (bit % 64)).sum())
                .map(AtomicU64::new)
                .collect();
            let expected = bits.range(last + 1..).next().or_else(|| bits.first()).copied();
            prop_assert_eq!(next_active(&words, last, 300), expected);
        }
    }
}
