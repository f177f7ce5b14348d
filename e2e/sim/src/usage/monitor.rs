//! Reads how much GPU time other processes use, without using any.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::gpu_process::AttachError;
use super::gpu_usage::GpuUsage;
use super::layout::{Place, SAMPLE_PERIOD_NS, SAMPLES_KEPT};
use super::locks::Locks;
use super::time::now;

/// Number of sample periods that can be queried: as many as the real driver keeps
/// (`NV2080_CTRL_PERF_GPUMON_SAMPLE_COUNT_PERFMON_UTIL`).
const PERIODS_QUERYABLE: u64 = 72;

/// A process that reads GPU time. It has a row without a partition, so that a partition lock that
/// it holds when it is killed can be taken over like a GPU process's.
#[derive(Debug)]
pub struct UsageMonitor {
    usage: Arc<GpuUsage>,
    locks: Locks,
    row: usize,
}

/// GPU time that a process has used since it attached to a partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessTime {
    pub place: Place,
    /// As [`ProcessUsage::pid`](super::ProcessUsage::pid).
    pub pid: u32,
    pub name: String,
    /// Nanoseconds of GPU time. Overlapping kernels of one process count once.
    pub gpu_ns: u64,
    /// Monotonic time of the measurement, in ns.
    pub at: u64,
}

/// The times of a partition, in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionTimes {
    /// Monotonic time of the measurement.
    pub at: u64,
    /// GPU time of all processes, also of those that have exited.
    pub served_ns: u64,
    /// Time of the changes between processes.
    pub switch_ns: u64,
}

impl PartitionTimes {
    /// Busy time, as NVML reports it.
    pub const fn busy_ns(self) -> u64 {
        self.served_ns + self.switch_ns
    }
}

/// How busy a partition was, from its samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Utilization {
    /// Monotonic time of the last sample, in ns.
    pub at: u64,
    /// Time that the samples cover, in ns.
    pub span: u64,
    /// Part of `span` in which the partition was busy, in ns.
    pub busy: u64,
    /// Part of `busy` in which the partition changed between processes, in ns.
    pub switching: u64,
    /// Processes with GPU time in `span`: process id as in
    /// [`ProcessUsage::pid`](super::ProcessUsage::pid), and nanoseconds.
    pub processes: Vec<(u32, u64)>,
}

/// A process and the samples that name it, on a GPU where each sample names only one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedProcess {
    /// As [`ProcessUsage::pid`](super::ProcessUsage::pid).
    pub pid: u32,
    /// Monotonic time of the last sample that names the process, in ns.
    pub at: u64,
    /// Busy time of the partition in the samples that name the process, in ns.
    pub busy: u64,
    /// Time that all samples cover, in ns.
    pub span: u64,
}

impl UsageMonitor {
    pub fn new(usage: &Arc<GpuUsage>) -> Result<Self, AttachError> {
        let locks = usage.locks()?;
        let row = usage.claim_row(locks, |row| row.partition.store(u32::MAX, Ordering::Relaxed))?;
        Ok(Self { usage: Arc::clone(usage), locks, row })
    }

    /// Whether this process made the monitor. After a fork, the child has a copy of its parent's.
    pub fn is_own(&self) -> bool {
        self.usage.owns(self.row)
    }

    /// The GPU time that each living process has used until now.
    pub fn process_times(&self) -> Vec<ProcessTime> {
        let uses = self.usage.processes_by_row(|_| true);
        let partitions: BTreeSet<usize> =
            uses.iter().filter_map(|(_, found)| found.place.partition()).collect();
        let mut all = Vec::new();
        for partition in partitions {
            let _held = self.usage.lock_partition(self.locks, partition, self.row);
            let at = now();
            self.usage.advance(partition, at);
            for (row, found) in uses.iter().filter(|(_, found)| found.place.partition() == Some(partition)) {
                let (place, pid, name) = (found.place, found.pid, found.name.clone());
                all.push(ProcessTime {
                    place,
                    pid,
                    name,
                    gpu_ns: self.usage.gpu_ns_since_attach(*row, at),
                    at,
                });
            }
        }
        all
    }

    /// The times of a partition since the simulator was created.
    pub fn times(&self, place: Place) -> Option<PartitionTimes> {
        let partition = place.partition()?;
        let _held = self.usage.lock_partition(self.locks, partition, self.row);
        let at = now();
        self.usage.advance(partition, at);
        let switch_ns = self.usage.engine(partition).switch_ns.load(Ordering::Relaxed);
        Some(PartitionTimes { at, served_ns: self.usage.busy_at(partition, at) - switch_ns, switch_ns })
    }

    /// How busy the partition was in the last sample period.
    pub fn last_utilization(&self, place: Place) -> Option<Utilization> {
        self.utilization(place, now().saturating_sub(SAMPLE_PERIOD_NS))
    }

    /// How busy a partition was since a monotonic time in ns, in whole sample periods. None if no
    /// period has ended since.
    pub fn utilization(&self, place: Place, since: u64) -> Option<Utilization> {
        self.periods(place, since, |last, periods, of| of(last, periods))
    }

    /// As [`utilization`](Self::utilization), but each sample names one process, chosen with a
    /// probability proportional to its GPU time.
    pub fn named_processes(&self, place: Place, since: u64) -> Option<Vec<NamedProcess>> {
        self.periods(place, since, |last, periods, of| {
            let mut all: Vec<NamedProcess> = Vec::new();
            for number in last.saturating_sub(periods) + 1..=last {
                let Utilization { at, busy, processes, .. } = of(number, 1);
                let sum: u64 = processes.iter().map(|(_, had)| had).sum();
                // A hash of the sample number: another choice for each sample, but the same for
                // every caller.
                let throw = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(31);
                let mut left =
                    (throw.wrapping_mul(0xff51_afd7_ed55_8ccd) >> 20).checked_rem(sum).unwrap_or(0);
                let named = processes.iter().find(|(_, had)| {
                    let is_named = left < *had;
                    left = left.saturating_sub(*had);
                    is_named
                });
                let Some((pid, _)) = named else { continue };
                match all.iter_mut().find(|known| known.pid == *pid) {
                    Some(known) => (known.at, known.busy) = (at, known.busy + busy),
                    None => all.push(NamedProcess { pid: *pid, at, busy, span: periods * SAMPLE_PERIOD_NS }),
                }
            }
            all
        })
    }

    /// Advances the partition, then calls `evaluate`. Returns none if no sample period has ended
    /// since `since`.
    ///
    /// The arguments of `evaluate` are the number of the last sample, the number of periods since
    /// `since`, and a function that returns the utilization over a number of periods up to a
    /// sample.
    fn periods<T>(
        &self,
        place: Place,
        since: u64,
        evaluate: impl FnOnce(u64, u64, &dyn Fn(u64, u64) -> Utilization) -> T,
    ) -> Option<T> {
        let partition = place.partition()?;
        let uses = self.usage.processes_by_row(|other| other == partition);
        let _held = self.usage.lock_partition(self.locks, partition, self.row);
        let at = now();
        self.usage.advance(partition, at);
        let (engine, last) = (self.usage.engine(partition), at / SAMPLE_PERIOD_NS);
        let periods = last.saturating_sub(since / SAMPLE_PERIOD_NS).min(PERIODS_QUERYABLE);
        let of = |last: u64, periods: u64| {
            let mut processes: Vec<(u32, u64)> = Vec::new();
            for (row, found) in uses.iter().filter(|(_, found)| found.place.partition() == Some(partition)) {
                let had = self.usage.work(*row).samples.gained(last, periods);
                // Two libraries in one process have two rows.
                match processes.iter_mut().find(|(pid, _)| *pid == found.pid) {
                    Some((_, sum)) => *sum += had,
                    None => processes.push((found.pid, had)),
                }
            }
            processes.retain(|(_, had)| *had > 0);
            Utilization {
                at: last * SAMPLE_PERIOD_NS,
                span: periods * SAMPLE_PERIOD_NS,
                busy: engine.samples.gained(last, periods),
                switching: engine.switch_samples.gained(last, periods),
                processes,
            }
        };
        (periods > 0).then(|| evaluate(last, periods, &of))
    }
}

impl Drop for UsageMonitor {
    fn drop(&mut self) {
        self.usage.release_row(self.locks, self.row);
    }
}

const _: () = assert!(PERIODS_QUERYABLE < SAMPLES_KEPT as u64);
