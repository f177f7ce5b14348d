//! Layout of the mapped file: partitions, rows, and the memory and time that each row uses.
//!
//! The file consists of atomics. Memory is in granules, managed memory in pages, time in
//! nanoseconds.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::catalogue::TimeSlicing;

/// Unit in which memory is counted: CUDA's smallest allocation.
pub const GRANULE_BYTES: u64 = 512;

/// A process that is attached to a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    pub place: Place,
    /// The process id in this process's PID namespace; if it has none there, the id in its own.
    pub pid: u32,
    pub name: String,
    pub bytes: u64,
}

/// Unit in which managed memory migrates.
pub const MANAGED_PAGE_BYTES: u64 = 2 << 20;
/// Must change with the layout.
pub(super) const MAGIC: u64 = 0x6469_7676_7963_7508;
/// Maximum number of attached processes. [`Word`] has twelve bits for the row.
pub(super) const ROWS: usize = 4096;
/// The whole GPU, and the GPU instances 0 to 14.
pub(super) const PARTITIONS_PER_GPU: usize = 16;
/// Maximum number of cgroup limits that apply to one process: its own cgroup's and its ancestors'.
pub(super) const LIMITS_PER_ROW: usize = 4;
const PARTITIONS: usize = 32 * PARTITIONS_PER_GPU;

/// Content of the file. Apart from the magic number, all zeros means no processes and no GPUs.
#[repr(C)]
pub(super) struct Map {
    pub(super) magic: AtomicU64,
    /// Rows from this one on were never used.
    pub(super) high_water: AtomicU64,
    spare: [AtomicU64; 62],
    /// [`locks::token`](super::locks::token) of each row's process, or 0.
    pub(super) owners: [AtomicU64; ROWS],
    pub(super) partitions: [Partition; PARTITIONS],
    pub(super) rows: [Row; ROWS],
}

/// A GPU, or a GPU instance.
#[repr(C, align(128))]
pub(super) struct Partition {
    /// Memory in use and the last change, see [`Word`].
    pub(super) word: AtomicU64,
    /// Granules that GPU processes may use.
    pub(super) limit: AtomicU64,
    /// Granules that the partition has.
    pub(super) total: AtomicU64,
    /// [`GpuUsage::PRESENT`](super::GpuUsage::PRESENT) or 0.
    pub(super) flags: AtomicU64,
    /// Identifies this incarnation of the GPU or instance: changes with a reset or recreation.
    pub(super) epoch: AtomicU64,
    /// Generation of the state that has the cgroup limits of this partition; 0 without limits.
    pub(super) limits: AtomicU64,
    /// Pages of managed memory that are resident on the partition.
    pub(super) managed_resident: AtomicU64,
    pub(super) engine: Engine,
}

/// The use of one partition by one process.
#[repr(C, align(128))]
pub(super) struct Row {
    /// Index of the partition.
    pub(super) partition: AtomicU32,
    /// Compute instance id.
    pub(super) ci: AtomicU32,
    /// Granules in use.
    pub(super) used: AtomicU64,
    /// The change in progress, see [`Intent`]; 0 if none.
    pub(super) intent: AtomicU64,
    /// Pages of managed memory that are resident on the partition, in addition to `used`.
    pub(super) managed_resident: AtomicU64,
    /// Numbers of the cgroup limits that apply to the process; 0 for none.
    pub(super) limits: [AtomicU64; LIMITS_PER_ROW],
    /// Number of the last change that another process has seen applied.
    pub(super) applied: AtomicU64,
    /// Number of the last announced change. The next process in this row continues the count.
    pub(super) number: AtomicU64,
    /// The partition's epoch when the process attached.
    pub(super) epoch: AtomicU64,
    /// Pages of managed memory that the process's kernels touch, resident or not.
    pub(super) managed_total: AtomicU64,
    /// Monotonic time at which a kernel last touched them, in ns.
    pub(super) last_touch: AtomicU64,
    /// `comm` of the process.
    pub(super) name: [AtomicU64; 2],
    pub(super) work: Work,
}

/// A partition's use in granules, and the row and number of the change that led to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Word {
    pub(super) used: u32,
    pub(super) row: usize,
    pub(super) number: u32,
}

/// Bits of a change number.
pub(super) const NUMBER_BITS: u32 = 20;
const NUMBER_MASK: u32 = (1 << NUMBER_BITS) - 1;

impl Word {
    pub(super) const fn pack(self) -> u64 {
        (self.used as u64) << 32 | (self.row as u64) << NUMBER_BITS | self.number as u64
    }

    pub(super) const fn unpack(word: u64) -> Self {
        Self {
            used: (word >> 32) as u32,
            row: (word >> NUMBER_BITS) as usize & (ROWS - 1),
            number: word as u32 & NUMBER_MASK,
        }
    }
}

/// An announced change: its number, and the granules that the row uses after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Intent {
    pub(super) used: u32,
    pub(super) number: u32,
}

impl Intent {
    pub(super) const fn pack(self) -> u64 {
        // Numbers are never 0, so neither is a packed intent.
        (self.used as u64) << 32 | self.number as u64
    }

    pub(super) const fn unpack(word: u64) -> Option<Self> {
        if word == 0 { None } else { Some(Self { used: (word >> 32) as u32, number: word as u32 }) }
    }
}

/// The number after `number`. Skips 0, which means none.
pub(super) const fn next_number(number: u64) -> u32 {
    let next = (number as u32 + 1) & NUMBER_MASK;
    if next == 0 { 1 } else { next }
}

/// Whether change `one` is later than `other`. Numbers wrap around, so this holds only for changes
/// that are less than half the number range apart.
pub(super) const fn is_later(one: u32, other: u32) -> bool {
    let ahead = one.wrapping_sub(other) & NUMBER_MASK;
    ahead != 0 && ahead <= NUMBER_MASK / 2
}

/// A GPU, or a compute instance and its GPU instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub slot: usize,
    /// GPU instance and compute instance ids.
    pub instance: Option<(u32, u32)>,
}

impl Place {
    /// Index of the partition, if the slot and id are in range.
    pub(super) fn partition(self) -> Option<usize> {
        partition_index(self.slot, self.instance.map(|(gi, _)| gi))
    }
}

pub(super) fn partition_index(slot: usize, gi: Option<u32>) -> Option<usize> {
    let within = gi.map_or(Some(0), |gi| usize::try_from(gi).ok().map(|gi| gi + 1))?;
    (within < PARTITIONS_PER_GPU && slot < PARTITIONS / PARTITIONS_PER_GPU)
        .then_some(slot * PARTITIONS_PER_GPU + within)
}

/// Number of past turns whose start a row keeps.
const TURNS_KEPT: usize = 512;
/// Interval between two samples of GPU time: the real driver takes six a second.
pub(super) const SAMPLE_PERIOD_NS: u64 = 1_000_000_000 / 6;
/// Samples that are kept: more than the real driver's 72
/// (`NV2080_CTRL_PERF_GPUMON_SAMPLE_COUNT_PERFMON_UTIL`).
pub(super) const SAMPLES_KEPT: usize = 128;

/// Total times in ns at the last samples, a ring indexed by sample number.
#[repr(transparent)]
pub(super) struct Samples([AtomicU64; SAMPLES_KEPT]);

impl Samples {
    pub(super) fn fill(&self, total: u64) {
        self.0.iter().for_each(|sample| sample.store(total, Ordering::Relaxed));
    }

    pub(super) fn note(&self, number: u64, total: u64) {
        self.0[number as usize % SAMPLES_KEPT].store(total, Ordering::Relaxed);
    }

    /// Time that was added in the last `periods` periods before sample `last`, in ns.
    pub(super) fn gained(&self, last: u64, periods: u64) -> u64 {
        let at = |number: u64| self.0[number as usize % SAMPLES_KEPT].load(Ordering::Relaxed);
        at(last).saturating_sub(at(last.saturating_sub(periods.min(SAMPLES_KEPT as u64 - 1))))
    }
}

/// Time slice by the level of `nvidia-smi compute-policy --set-timeslice`.
pub(super) const fn time_slice(level: u32, of_model: &TimeSlicing) -> Duration {
    match level {
        2 => Duration::from_millis(10),
        3 => Duration::from_millis(30),
        _ => Duration::from_micros(of_model.slice_us as u64),
    }
}

/// [`Engine::last_row`] after the process in that row has exited.
pub(super) const EXITED: u64 = u64::MAX;

/// The schedule of a partition.
#[repr(C)]
pub(super) struct Engine {
    /// Row of the process that holds the lock, from 1; 0 if free.
    pub(super) lock: AtomicU64,
    /// Monotonic time up to which the schedule was advanced, in ns.
    pub(super) clock: AtomicU64,
    /// Row that runs now, from 1; 0 while no row has work.
    pub(super) turn: AtomicU64,
    /// Remaining time of the current time slice, in ns.
    pub(super) slice_left: AtomicU64,
    /// Length of a time slice, in ns.
    pub(super) time_slice: AtomicU64,
    /// Time that a change to another process takes, in ns.
    pub(super) switch_cost: AtomicU64,
    /// Remaining time of the change to the row that has the turn, in ns.
    pub(super) switch_left: AtomicU64,
    /// Row that had the last turn, from 1; 0 before the first turn; [`EXITED`].
    pub(super) last_row: AtomicU64,
    /// In-order work: the monotonic time at which it ends, and its total since the partition exists
    /// (ns).
    pub(super) in_order_end: AtomicU64,
    pub(super) in_order_ns: AtomicU64,
    /// Total time that round-robin turns have run, in ns.
    pub(super) run_ns: AtomicU64,
    /// Total time of the changes between processes, in ns.
    pub(super) switch_ns: AtomicU64,
    /// Number of the last sample (monotonic time in sample periods), and the busy times at the last
    /// samples.
    pub(super) last_sample: AtomicU64,
    pub(super) samples: Samples,
    /// `switch_ns` at the last samples.
    pub(super) switch_samples: Samples,
    /// One bit for each row that has work.
    pub(super) active: [AtomicU64; ROWS / 64],
}

/// Meetings of a process that have not taken place.
pub(super) const MEETINGS_KEPT: usize = 64;

/// A point of a timeline from which a kernel waits until another kernel of its process runs on
/// another partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Appointment {
    /// Point of the timeline at which the kernel begins.
    pub(super) mark: u64,
    pub(super) meeting: Meeting,
}

/// Two kernels of one process that wait for each other on two partitions. Each sets its own word to
/// the number of the round and waits until the peer's word has it. An address identifies a word; its
/// content is not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meeting {
    pub own: u64,
    pub peer: u64,
    /// Number of the round, from 1. Consecutive rounds of a word have consecutive numbers.
    pub round: u64,
}

/// The meetings of a row: a ring of appointments, and what the row has announced.
#[repr(C)]
pub(super) struct Meetings {
    added: AtomicU64,
    kept: AtomicU64,
    appointments: [[AtomicU64; 4]; MEETINGS_KEPT],
    /// Address of the word that the row's last meeting kernel has set.
    word: AtomicU64,
    /// The last rounds that the word was set to, and the times at which it was set. A peer can be one
    /// round behind.
    announced: [[AtomicU64; 2]; 2],
}

impl Meetings {
    /// Forgets all appointments and announcements.
    pub(super) fn clear(&self) {
        self.kept.store(self.added.load(Ordering::Relaxed), Ordering::Relaxed);
        self.word.store(0, Ordering::Relaxed);
        self.announced.iter().flatten().for_each(|word| word.store(0, Ordering::Relaxed));
    }

    /// The next appointment, if any.
    pub(super) fn next(&self) -> Option<Appointment> {
        let kept = self.kept.load(Ordering::Relaxed);
        (kept < self.added.load(Ordering::Relaxed)).then(|| {
            let [mark, own, peer, round] = self.appointments[kept as usize % MEETINGS_KEPT]
                .each_ref()
                .map(|word| word.load(Ordering::Relaxed));
            Appointment { mark, meeting: Meeting { own, peer, round } }
        })
    }

    pub(super) fn is_full(&self) -> bool {
        let waiting = self.added.load(Ordering::Relaxed) - self.kept.load(Ordering::Relaxed);
        waiting >= MEETINGS_KEPT as u64
    }

    /// Adds an appointment. There must be room.
    pub(super) fn add(&self, appointment: Appointment) {
        let Appointment { mark, meeting: Meeting { own, peer, round } } = appointment;
        let added = self.added.load(Ordering::Relaxed);
        let place = &self.appointments[added as usize % MEETINGS_KEPT];
        for (word, value) in place.iter().zip([mark, own, peer, round]) {
            word.store(value, Ordering::Relaxed);
        }
        self.added.store(added + 1, Ordering::Relaxed);
    }

    /// The next appointment has taken place.
    pub(super) fn keep(&self) {
        self.kept.store(self.kept.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Sets the row's word to a round at a time, unless it has that round.
    pub(super) fn announce(&self, word: u64, round: u64, time: u64) {
        let [known_round, known_time] = &self.announced[round as usize % 2];
        if self.word.load(Ordering::Relaxed) != word || known_round.load(Ordering::Relaxed) != round {
            known_time.store(time, Ordering::Relaxed);
            self.word.store(word, Ordering::Relaxed);
            known_round.store(round, Ordering::Release);
        }
    }

    /// The time at which the row set the word to this round or a later one.
    pub(super) fn announced_at(&self, word: u64, round: u64) -> Option<u64> {
        let reached = self.announced.iter().filter(|[known, _]| known.load(Ordering::Acquire) >= round);
        let times = reached.map(|[_, time]| time.load(Ordering::Relaxed));
        times.min().filter(|_| self.word.load(Ordering::Relaxed) == word)
    }
}

/// The work of a row, in ns on its own timeline.
#[repr(C)]
pub(super) struct Work {
    /// End of all submitted work.
    pub(super) submitted: AtomicU64,
    /// Point up to which the work is done.
    pub(super) served: AtomicU64,
    /// 1 for a client of MPS, whose work runs in order.
    pub(super) in_order: AtomicU64,
    /// Position on the timeline when the process attached.
    pub(super) base: AtomicU64,
    /// GPU time in which its kernels have waited for other kernels, since the process attached.
    pub(super) waited: AtomicU64,
    pub(super) meetings: Meetings,
    /// Number of turns that have begun. For the last of them: the time of their start, and `served`
    /// at that time. For in-order work a turn is a stretch without gaps, which may begin in the
    /// future.
    turns: AtomicU64,
    turn_starts: [[AtomicU64; 2]; TURNS_KEPT],
    /// GPU time at the last samples.
    pub(super) samples: Samples,
}

impl Work {
    /// Resets the row for a new process. The timeline continues.
    pub(super) fn forget(&self) {
        self.in_order.store(0, Ordering::Relaxed);
        self.waited.store(0, Ordering::Relaxed);
        self.meetings.clear();
        let served = self.served.load(Ordering::Relaxed);
        self.base.store(served, Ordering::Relaxed);
        self.samples.fill(served);
    }

    /// GPU time that the row had received at a given time. The partition must have been advanced up
    /// to that time, and nothing may have been submitted before it since.
    pub(super) fn served_at(&self, time: u64) -> u64 {
        if self.in_order.load(Ordering::Relaxed) == 0 {
            return self.served.load(Ordering::Relaxed) + self.waited.load(Ordering::Relaxed);
        }
        let mut end = self.submitted.load(Ordering::Relaxed);
        for (_, [start, served]) in self.last_turns() {
            if start <= time {
                return served + (time - start).min(end.saturating_sub(served));
            }
            end = served;
        }
        end
    }

    /// The turns that are kept, latest first: turn number, start time and `served` at the start.
    pub(super) fn last_turns(&self) -> impl Iterator<Item = (u64, [u64; 2])> {
        let turns = self.turns.load(Ordering::Acquire);
        (0..turns).rev().take(TURNS_KEPT).map(|turn| {
            let [start, served] = &self.turn_starts[turn as usize % TURNS_KEPT];
            (turn, [start.load(Ordering::Relaxed), served.load(Ordering::Relaxed)])
        })
    }

    /// Records the start of a turn: its time, and `served` at that time. Replaces a turn in which no
    /// work was done.
    pub(super) fn begin(&self, start: u64, served: u64) {
        let is_empty = self.last_turns().next().is_some_and(|(_, [_, at_start])| at_start == served);
        let turns = self.turns.load(Ordering::Relaxed) - u64::from(is_empty);
        let [kept_start, kept_served] = &self.turn_starts[turns as usize % TURNS_KEPT];
        kept_start.store(start, Ordering::Relaxed);
        kept_served.store(served, Ordering::Relaxed);
        self.turns.store(turns + 1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn word_round_trips_through_packing(used: u32, row in 0..ROWS, number in 0..=NUMBER_MASK) {
            let word = Word { used, row, number };
            prop_assert_eq!(Word::unpack(word.pack()), word);
        }

        #[test]
        fn next_change_number_is_later(number in 0..=NUMBER_MASK) {
            let next = next_number(number.into());
            prop_assert!(next != 0);
            prop_assert!(is_later(next, number));
            prop_assert!(!is_later(number, next) && !is_later(number, number));
            let announced = Intent { used: 0, number: next };
            prop_assert_eq!(Intent::unpack(announced.pack()), Some(announced));
        }
    }

    #[test]
    fn each_instance_has_its_own_partition() {
        assert_eq!(
            (partition_index(0, None), partition_index(0, Some(0)), partition_index(0, Some(14))),
            (Some(0), Some(1), Some(15))
        );
        assert_eq!((partition_index(1, None), partition_index(31, Some(14))), (Some(16), Some(511)));
        assert_eq!((partition_index(0, Some(15)), partition_index(32, None)), (None, None));
    }
}
