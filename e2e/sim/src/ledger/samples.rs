//! Samples: six times a second of played time, what each guest and each part have had.
//!
//! The real driver keeps such samples for `nvmlDeviceGetProcessUtilization`. Here they are taken when turns are played,
//! so they are there whenever somebody asks, who plays first; nothing runs in the background.

use std::sync::atomic::{AtomicU64, Ordering};

use super::map::Ledger;

/// Between two samples of what has been served.
pub(super) const PERIOD: u64 = 1_000_000_000 / 6;
/// Samples that are remembered: more than the real driver's 72 (`NV2080_CTRL_PERF_GPUMON_SAMPLE_COUNT_PERFMON_UTIL`).
pub(super) const SAMPLES: usize = 128;

/// Totals at the last samples, by number; in ns.
#[repr(transparent)]
pub(super) struct Samples([AtomicU64; SAMPLES]);

impl Samples {
    pub(super) fn fill(&self, total: u64) {
        self.0.iter().for_each(|sample| sample.store(total, Ordering::Relaxed));
    }

    fn note(&self, number: u64, total: u64) {
        self.0[number as usize % SAMPLES].store(total, Ordering::Relaxed);
    }

    /// What came between the last sample and the one so many periods before it.
    pub(super) fn gained(&self, last: u64, periods: u64) -> u64 {
        let at = |number: u64| self.0[number as usize % SAMPLES].load(Ordering::Relaxed);
        at(last).saturating_sub(at(last.saturating_sub(periods.min(SAMPLES as u64 - 1))))
    }
}

impl Ledger {
    /// Takes the samples up to that time, since whose last one nothing has been served. The part's lock is held.
    pub(super) fn sample(&self, part: usize, time: u64) {
        let (engine, last) = (self.engine(part), time / PERIOD);
        let next = engine.sample.load(Ordering::Relaxed) + 1;
        if next > last {
            return;
        }
        let numbers = next.max((last + 1).saturating_sub(SAMPLES as u64))..=last;
        for number in numbers.clone() {
            engine.samples.note(number, self.busy_at(part, number * PERIOD));
        }
        for row in self.rows_of(part) {
            let work = self.work(row);
            for number in numbers.clone() {
                work.samples.note(number, work.served_at(number * PERIOD));
            }
        }
        engine.sample.store(last, Ordering::Relaxed);
    }

    /// Rows of guests of a part.
    pub(super) fn rows_of(&self, part: usize) -> impl Iterator<Item = usize> {
        let map = self.get();
        let of_it = move |row: &usize| {
            map.owners[*row].load(Ordering::Relaxed) != 0
                && map.rows[*row].part.load(Ordering::Relaxed) as usize == part
        };
        (0..self.high()).filter(of_it)
    }

    /// Time that the part has been at work, in ns; as [`Work::served_at`](super::engine::Work::served_at).
    pub(super) fn busy_at(&self, part: usize, time: u64) -> u64 {
        let engine = self.engine(part);
        let ahead = engine.end.load(Ordering::Relaxed).saturating_sub(time);
        let ordered = engine.ordered.load(Ordering::Relaxed).saturating_sub(ahead);
        engine.ran.load(Ordering::Relaxed) + ordered
    }

    /// What the guest of a row has had since it came. The part's lock is held, and it is played up to that time.
    pub(super) fn had(&self, row: usize, time: u64) -> u64 {
        let work = self.work(row);
        work.served_at(time).saturating_sub(work.base.load(Ordering::Relaxed))
    }
}
