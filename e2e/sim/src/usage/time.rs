//! Time on a partition: which process runs when.
//!
//! By default processes share a partition by round robin with a time slice, as on a real GPU. A
//! process's work is a length on its own timeline: `submitted` is its end, `served` the progress.
//! Overlapping kernels of one process count once. A kernel that waits for another one uses GPU time
//! without progress on the timeline. A change to another process takes time in which
//! the partition is busy and no process runs. Clients of MPS run *in order* of submission across
//! processes instead, without such changes, and their timeline is the monotonic clock. No thread
//! runs in the background: each caller first advances the schedule to the present under the
//! partition's lock, which also takes the samples that are due.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::gpu_process::GpuProcess;
use super::gpu_usage::GpuUsage;
use super::layout::{Appointment, EXITED, Engine, Meeting, ROWS, SAMPLE_PERIOD_NS, SAMPLES_KEPT, Work};
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
    /// The kernel first waits for another one. Clients of MPS do not wait.
    pub meeting: Option<Meeting>,
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
        while time < now {
            let Some(row) = engine.turn.load(Ordering::Relaxed).checked_sub(1).map(|row| row as usize % ROWS)
            else {
                break;
            };
            let switching = engine.switch_left.load(Ordering::Relaxed);
            if switching > 0 {
                let passed = switching.min(until.saturating_sub(time));
                time += passed;
                engine.switch_left.store(switching - passed, Ordering::Relaxed);
                add(&engine.switch_ns, passed);
            } else {
                self.run_turn(partition, row, &mut time, until);
            }
            if time >= until {
                self.take_samples(partition, time);
                until = now.min(next_sample());
            }
        }
        self.take_samples(partition, now);
        engine.clock.store(now, Ordering::Relaxed);
    }

    /// Runs the work of the row that has the turn, until `until` at most. Advances `time`.
    fn run_turn(&self, partition: usize, row: usize, time: &mut u64, until: u64) {
        let (engine, work) = (self.engine(partition), self.work(row));
        let served = work.served.load(Ordering::Relaxed);
        let rest = work.submitted.load(Ordering::Relaxed).saturating_sub(served);
        let left = engine.slice_left.load(Ordering::Relaxed);
        let next = work.meetings.next().filter(|_| rest > 0);
        let room = left.min(until.saturating_sub(*time));
        let run = match next.map(|next| (next, next.mark.saturating_sub(served))) {
            Some((Appointment { meeting, .. }, 0)) => {
                work.meetings.announce(meeting.own, meeting.round, *time);
                let wait = self.peer_announced_at(row, meeting).map(|at| at.saturating_sub(*time));
                if wait == Some(0) {
                    work.meetings.keep();
                    work.begin(*time, served);
                    return;
                }
                let run = room.min(wait.unwrap_or(u64::MAX));
                add(&work.waited, run);
                run
            }
            next => {
                let run = room.min(rest).min(next.map_or(u64::MAX, |(_, before)| before));
                work.served.store(served + run, Ordering::Release);
                run
            }
        };
        let rest = rest - (work.served.load(Ordering::Relaxed) - served);
        *time += run;
        add(&engine.run_ns, run);
        engine.slice_left.store(left - run, Ordering::Relaxed);
        if rest == 0 {
            engine.active[row / 64].fetch_and(!(1 << (row % 64)), Ordering::Relaxed);
        }
        if rest == 0 || run == left {
            self.start_next_turn(partition, row, *time);
        }
    }

    /// The time at which another row of the same process announced the peer of a meeting.
    fn peer_announced_at(&self, row: usize, meeting: Meeting) -> Option<u64> {
        self.rows_of_same_process(row)
            .find_map(|other| self.work(other).meetings.announced_at(meeting.peer, meeting.round))
    }

    /// The other rows of a row's process.
    fn rows_of_same_process(&self, row: usize) -> impl Iterator<Item = usize> {
        let owners = &self.get().owners;
        let owner = owners[row].load(Ordering::Acquire);
        (0..self.high_water())
            .filter(move |other| *other != row && owners[*other].load(Ordering::Acquire) == owner)
    }

    /// Starts the turn of the next row with work after `last`, in cyclic order.
    fn start_next_turn(&self, partition: usize, last: usize, time: u64) {
        let engine = self.engine(partition);
        let high = self.high_water().max(1);
        match next_active(&engine.active, last, high) {
            // The same process continues in its next time slice.
            Some(row) if row == last => engine.slice_left.store(engine.slice(), Ordering::Relaxed),
            Some(row) => self.start_turn(partition, row, time),
            None => engine.turn.store(0, Ordering::Relaxed),
        }
    }

    /// Starts the turn of a row, whose work begins after the change to its process.
    fn start_turn(&self, partition: usize, row: usize, time: u64) {
        let (engine, work, me) = (self.engine(partition), self.work(row), row as u64 + 1);
        let last = engine.last_row.swap(me, Ordering::Relaxed);
        let is_same = last == me || last == 0;
        let switch = if is_same { 0 } else { engine.switch_cost.load(Ordering::Relaxed) };
        engine.turn.store(me, Ordering::Relaxed);
        engine.slice_left.store(engine.slice(), Ordering::Relaxed);
        engine.switch_left.store(switch, Ordering::Relaxed);
        work.begin(time + switch, work.served.load(Ordering::Relaxed));
    }

    /// Drops the unfinished work and the managed memory of a row.
    pub(super) fn discard_work(&self, partition: usize, row: usize) {
        let Ok(locks) = self.locks() else { return };
        let _held = self.lock_partition(locks, partition, row);
        let (work, time) = (self.work(row), now());
        self.advance(partition, time);
        work.submitted.store(work.served.load(Ordering::Relaxed), Ordering::Relaxed);
        work.meetings.clear();
        // The next process in this row is another one. Fails if other work ran since.
        let _ = self.engine(partition).last_row.compare_exchange(
            row as u64 + 1,
            EXITED,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
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

impl Engine {
    /// Length of a time slice, in ns.
    fn slice(&self) -> u64 {
        self.time_slice.load(Ordering::Relaxed).max(1)
    }
}

/// Adds to a sum that only the holder of the partition's lock changes.
fn add(sum: &AtomicU64, ns: u64) {
    sum.store(sum.load(Ordering::Relaxed) + ns, Ordering::Relaxed);
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
    ///
    /// Waits while too many of its kernels wait for other kernels.
    pub fn submit(&self, kernel: Kernel) -> (Mark, Mark) {
        while kernel.meeting.is_some() && self.work().meetings.is_full() {
            self.wait_for(self.work().meetings.next().map_or(0, |next| next.mark + 1), Duration::ZERO);
        }
        let _held = self.usage().lock_partition(self.locks(), self.partition_index(), self.row());
        self.submit_at(kernel, now())
    }

    /// The same at a monotonic time in ns. The caller holds the partition's lock.
    fn submit_at(&self, kernel: Kernel, time: u64) -> (Mark, Mark) {
        let (usage, partition, row) = (self.usage(), self.partition_index(), self.row());
        let engine = usage.engine(partition);
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
        let mut begin = work.served.load(Ordering::Relaxed).max(kernel.after);
        if let Some(meeting) = kernel.meeting {
            // After all work before it: while it waits, the timeline stands still.
            begin = begin.max(work.submitted.load(Ordering::Relaxed));
            work.meetings.add(Appointment { mark: begin, meeting });
        }
        // A kernel that waits is part of the work even if it is over at once after that.
        let end = begin + kernel.length.max(u64::from(kernel.meeting.is_some()));
        if end > work.submitted.load(Ordering::Relaxed) {
            work.submitted.store(end, Ordering::Relaxed);
            engine.active[row / 64].fetch_or(1 << (row % 64), Ordering::Relaxed);
            if engine.turn.load(Ordering::Relaxed) == 0 {
                usage.start_turn(partition, row, time);
            }
        }
        (begin, end)
    }

    /// The point up to which all submitted work is done.
    pub fn progress(&self) -> Mark {
        if self.in_order() {
            return now();
        }
        self.advance_peers();
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
            engine.switch_samples.note(number, engine.switch_ns.load(Ordering::Relaxed));
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

    /// Total busy time of the partition at `time`, in ns. A change between processes is busy time, as
    /// in the graphics utilization of an H100 (`driver/nvml/src/gpm.rs`). The conditions of
    /// [`Work::served_at`](super::layout::Work::served_at) apply.
    pub(super) fn busy_at(&self, partition: usize, time: u64) -> u64 {
        let engine = self.engine(partition);
        let ahead = engine.in_order_end.load(Ordering::Relaxed).saturating_sub(time);
        let ordered = engine.in_order_ns.load(Ordering::Relaxed).saturating_sub(ahead);
        engine.run_ns.load(Ordering::Relaxed) + engine.switch_ns.load(Ordering::Relaxed) + ordered
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
/// Sleep of a process whose kernel waits for another kernel: short compared to a kernel of 1 ms.
const MEETING_POLL_INTERVAL: Duration = Duration::from_micros(100);

impl GpuProcess {
    /// Waits until the timeline reaches a point. Sleeps at first and spins for the last `spins`,
    /// because a sleeping thread wakes about 100 us late. The real driver spins all the time by
    /// default (`CU_CTX_SCHED_AUTO`), which would starve the other simulated processes of CPU time.
    /// Other processes' work can delay the point, so the remaining time is checked repeatedly.
    pub fn wait_for(&self, mark: Mark, spins: Duration) {
        loop {
            self.advance_peers();
            let (rest, spins) = match self.remaining(mark) {
                Remaining::Time(0) => return,
                Remaining::Time(rest) => (Duration::from_nanos(rest), spins),
                Remaining::Meeting => (MEETING_POLL_INTERVAL, Duration::ZERO),
            };
            match rest.min(MAX_SLEEP).checked_sub(spins) {
                Some(pause) => std::thread::sleep(pause),
                None => {
                    let until = now() + rest.as_nanos() as u64;
                    while now() < until {
                        std::hint::spin_loop();
                    }
                }
            }
        }
    }

    /// How long until a point is reached, if the process that runs now does not die.
    fn remaining(&self, mark: Mark) -> Remaining {
        if self.in_order() {
            return Remaining::Time(mark.saturating_sub(now()));
        }
        let (usage, partition, row) = (self.usage(), self.partition_index(), self.row());
        let _held = usage.lock_partition(self.locks(), partition, row);
        usage.advance(partition, now());
        let rest_of =
            |row: usize, mark: Mark| mark.saturating_sub(usage.work(row).served.load(Ordering::Relaxed));
        let meeting = self.work().meetings.next().map(|next| next.mark).filter(|begin| *begin < mark);
        let own = rest_of(row, meeting.unwrap_or(mark));
        if own == 0 {
            return if meeting.is_some() { Remaining::Meeting } else { Remaining::Time(0) };
        }
        let engine = usage.engine(partition);
        let turn = engine.turn.load(Ordering::Relaxed).checked_sub(1).map(|row| row as usize % ROWS);
        let switching = engine.switch_left.load(Ordering::Relaxed);
        Remaining::Time(match turn.filter(|other| *other != row) {
            Some(other) => {
                let end = usage.work(other).submitted.load(Ordering::Relaxed);
                let turn = rest_of(other, end).min(engine.slice_left.load(Ordering::Relaxed));
                own + switching + turn + engine.switch_cost.load(Ordering::Relaxed)
            }
            None => own + switching,
        })
    }

    /// Advances the schedules on which kernels of this process run that its kernels here wait for.
    fn advance_peers(&self) {
        if self.in_order() || self.work().meetings.next().is_none() {
            return;
        }
        let (usage, row) = (self.usage(), self.row());
        for other in usage.rows_of_same_process(row) {
            let partition = usage.get().rows[other].partition.load(Ordering::Relaxed) as usize;
            if partition < usage.get().partitions.len() {
                let _held = usage.lock_partition(self.locks(), partition, row);
                usage.advance(partition, now());
            }
        }
    }

    fn work(&self) -> &Work {
        self.usage().work(self.row())
    }
}

/// The distance to a point of a timeline.
enum Remaining {
    /// Nanoseconds.
    Time(u64),
    /// A kernel that waits for another one.
    Meeting,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage::Place;
    use crate::usage::layout::PARTITIONS_PER_GPU;
    use proptest::prelude::*;
    use std::sync::Arc;

    const MS: u64 = 1_000_000;
    const SLICE: u64 = 2 * MS;
    const COST: u64 = MS / 10;
    /// A time after which the tests submit their work.
    const START: u64 = 1000 * MS;

    /// A GPU with processes on it, whose times are chosen by the test.
    struct Schedule {
        processes: Vec<GpuProcess>,
        usage: Arc<GpuUsage>,
        _dir: tempfile::TempDir,
    }

    impl Schedule {
        fn new(processes: usize, cost: u64) -> Self {
            let dir = tempfile::tempdir().expect("a directory");
            GpuUsage::create(dir.path()).expect("a file");
            let usage = Arc::new(GpuUsage::open(dir.path()).expect("the file"));
            for (gpu, partition) in
                usage.get().partitions.iter().step_by(PARTITIONS_PER_GPU).take(2).enumerate()
            {
                partition.flags.store(GpuUsage::PRESENT, Ordering::Relaxed);
                partition.engine.time_slice.store(SLICE, Ordering::Relaxed);
                partition.engine.switch_cost.store(cost, Ordering::Relaxed);
                usage.advance(gpu * PARTITIONS_PER_GPU, START);
            }
            let mut all = Self { processes: Vec::new(), usage, _dir: dir };
            (0..processes).for_each(|_| all.attach(0));
            all
        }

        fn attach(&mut self, slot: usize) {
            let place = Place { slot, instance: None };
            self.processes.push(GpuProcess::attach(&self.usage, place).expect("a GPU"));
        }

        fn submit(&self, process: usize, length: u64, at: u64) -> Mark {
            self.submit_meeting(process, length, at, None)
        }

        fn submit_meeting(&self, process: usize, length: u64, at: u64, meeting: Option<Meeting>) -> Mark {
            let kernel = Kernel { after: 0, length, touches: false, meeting };
            self.processes[process].submit_at(kernel, START + at).1
        }

        /// GPU time of each process at a time after the start.
        fn served_at(&self, at: u64) -> Vec<u64> {
            self.usage.advance(0, START + at);
            self.processes.iter().map(GpuProcess::served).collect()
        }

        fn busy_at(&self, at: u64) -> u64 {
            self.usage.advance(0, START + at);
            self.usage.busy_at(0, START + at)
        }
    }

    #[test]
    fn change_to_another_process_takes_time() {
        let schedule = Schedule::new(2, COST);
        let ends = [schedule.submit(0, 4 * MS, 0), schedule.submit(1, 3 * MS, 0)];
        assert_eq!(schedule.served_at(SLICE + COST / 2), [SLICE, 0]);
        assert_eq!(schedule.served_at(2 * SLICE + COST), [SLICE, SLICE]);
        assert_eq!(schedule.served_at(7 * MS + 3 * COST - 1), [2 * SLICE, 3 * MS - 1]);
        // The changes are busy time.
        assert_eq!(schedule.busy_at(20 * MS), 7 * MS + 3 * COST);
        let ended = |process: usize| schedule.processes[process].time_of(ends[process]) - START;
        assert_eq!([ended(0), ended(1)], [3 * SLICE + 2 * COST, 7 * MS + 3 * COST]);
    }

    #[test]
    fn process_that_continues_pays_no_change() {
        let schedule = Schedule::new(2, COST);
        schedule.submit(0, 3 * SLICE, 0);
        assert_eq!(schedule.served_at(3 * SLICE), [3 * SLICE, 0]);
        schedule.submit(0, MS, 10 * MS);
        assert_eq!(schedule.served_at(11 * MS), [3 * SLICE + MS, 0]);
        // An idle GPU keeps the context of the last process.
        schedule.submit(1, MS, 20 * MS);
        assert_eq!(schedule.served_at(21 * MS), [3 * SLICE + MS, MS - COST]);
    }

    #[test]
    fn process_in_the_row_of_an_exited_one_is_another() {
        let mut schedule = Schedule::new(1, COST);
        schedule.submit(0, MS, 0);
        let before = schedule.served_at(MS)[0];
        schedule.processes.clear();
        schedule.attach(0);
        // Detaching has advanced the schedule to the present.
        let present = now() - START;
        schedule.submit(0, MS, present);
        assert_eq!(schedule.served_at(present + MS), [before + MS - COST]);
    }

    /// Processes 0 and 1 on the first GPU, and 2 on the second, whose kernels wait for those of 0.
    fn with_peer() -> (Schedule, impl Fn(&Schedule, usize, u64) -> Mark) {
        let mut schedule = Schedule::new(2, 0);
        schedule.attach(1);
        let submit = |schedule: &Schedule, process: usize, round: u64| {
            let (own, peer) = if process == 0 { (16, 32) } else { (32, 16) };
            schedule.submit_meeting(process, MS, 0, Some(Meeting { own, peer, round }))
        };
        (schedule, submit)
    }

    #[test]
    fn kernel_waits_until_its_peer_runs() {
        let (schedule, submit) = with_peer();
        let ends = [1, 2].map(|round| submit(&schedule, 0, round));
        // It uses GPU time while it waits, in turns with the other process.
        schedule.submit(1, 4 * MS, 0);
        assert_eq!(schedule.served_at(8 * MS), [0, 4 * MS, 0]);
        assert_eq!(schedule.usage.gpu_ns_since_attach(schedule.processes[0].row(), START), 4 * MS);
        // The peer was submitted at 0, but its GPU is first advanced now.
        let peers = [1, 2].map(|round| submit(&schedule, 2, round));
        schedule.usage.advance(PARTITIONS_PER_GPU, START + 10 * MS);
        assert_eq!(schedule.served_at(10 * MS), [2 * MS, 4 * MS, MS]);
        schedule.usage.advance(PARTITIONS_PER_GPU, START + 11 * MS);
        let reached = |process: usize, mark: Mark| schedule.processes[process].time_of(mark) - START;
        assert_eq!(ends.map(|mark| reached(0, mark)), [9 * MS, 10 * MS]);
        // The second meeting was at 9 ms, when the peer's schedule had been advanced to 10 ms.
        assert_eq!(peers.map(|mark| reached(2, mark)), [MS, 11 * MS]);
    }

    #[test]
    fn kernel_without_a_peer_waits_until_its_process_exits() {
        let (mut schedule, submit) = with_peer();
        submit(&schedule, 0, 1);
        assert_eq!(schedule.served_at(500 * MS), [0, 0, 0]);
        assert_eq!(schedule.busy_at(500 * MS), 500 * MS);
        drop(schedule.processes.remove(0));
        let present = now() - START;
        schedule.submit(0, MS, present);
        assert_eq!(schedule.served_at(present + MS)[0], MS);
    }

    proptest! {
        /// All work is served, and the GPU is busy with it and with changes of equal length.
        #[test]
        fn switching_delays_work_and_loses_none(
            lengths in proptest::collection::vec(1..8 * MS, 2..6), cost in 0..MS,
        ) {
            let schedule = Schedule::new(lengths.len(), cost);
            for (process, length) in lengths.iter().enumerate() {
                schedule.submit(process, *length, 0);
            }
            let end = 1000 * MS;
            prop_assert_eq!(schedule.served_at(end), lengths.clone());
            let switched = schedule.busy_at(end) - lengths.iter().sum::<u64>();
            prop_assert_eq!(switched.checked_rem(cost).unwrap_or(0), 0);
            prop_assert!(switched >= (lengths.len() as u64 - 1) * cost);
        }

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
