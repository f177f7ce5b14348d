//! Who looks at the time that others have, and has none.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::engine::now;
use super::guest::EnterError;
use super::locks::Locks;
use super::map::{Ledger, Place};
use super::samples::PERIOD;

/// So many periods back a process's use can be asked for, as of the real driver
/// (`NV2080_CTRL_PERF_GPUMON_SAMPLE_COUNT_PERFMON_UTIL`).
const REMEMBERED: u64 = 72;

/// A process that looks. It has a row without a part, so that a lock that it holds when it is killed is taken over as
/// that of a guest is.
#[derive(Debug)]
pub struct Watcher {
    ledger: Arc<Ledger>,
    locks: Locks,
    row: usize,
}

/// What a process has had of a part since it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    pub place: Place,
    /// As [`Use::pid`](super::Use::pid).
    pub pid: u32,
    pub name: String,
    /// Nanoseconds of the part's time; kernels of one process that overlap are one.
    pub served: u64,
    /// When that was, in ns of the monotonic clock.
    pub at: u64,
}

/// How busy a part was, by samples.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// When the last sample was taken, in ns of the monotonic clock.
    pub at: u64,
    /// What the samples span, in ns.
    pub span: u64,
    /// Nanoseconds of it in which the part was at work.
    pub busy: u64,
    /// The processes that had some of it, and how much; as [`Use::pid`](super::Use::pid).
    pub processes: Vec<(u32, u64)>,
}

/// What samples say of a process that each name one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Named {
    /// As [`Use::pid`](super::Use::pid).
    pub pid: u32,
    /// When the last that names it was taken, in ns of the monotonic clock.
    pub at: u64,
    /// Nanoseconds in which the part was at work, in those that name it.
    pub busy: u64,
    /// What all samples span, in ns.
    pub span: u64,
}

impl Watcher {
    pub fn new(ledger: &Arc<Ledger>) -> Result<Self, EnterError> {
        let locks = ledger.locks()?;
        let row = ledger.take_any(locks, |row| row.part.store(u32::MAX, Ordering::Relaxed))?;
        Ok(Self { ledger: Arc::clone(ledger), locks, row })
    }

    /// False in a child after a fork, which has its parent's in its memory.
    pub fn is_own(&self) -> bool {
        self.ledger.owns(self.row)
    }

    /// What each living process has had up to now.
    pub fn served(&self) -> Vec<Served> {
        let uses = self.ledger.uses_by_row(|_| true);
        let parts: BTreeSet<usize> = uses.iter().filter_map(|(_, found)| found.place.part()).collect();
        let mut all = Vec::new();
        for part in parts {
            let _held = self.ledger.hold(self.locks, part, self.row);
            let at = now();
            self.ledger.play(part, at);
            for (row, found) in uses.iter().filter(|(_, found)| found.place.part() == Some(part)) {
                let (place, pid, name) = (found.place, found.pid, found.name.clone());
                all.push(Served { place, pid, name, served: self.ledger.had(*row, at), at });
            }
        }
        all
    }

    /// Time now and what a part has been at work until now, since the simulator was made; both in ns.
    pub fn busy(&self, place: Place) -> Option<(u64, u64)> {
        let part = place.part()?;
        let _held = self.ledger.hold(self.locks, part, self.row);
        let at = now();
        self.ledger.play(part, at);
        Some((at, self.ledger.busy_at(part, at)))
    }

    /// The same of the last period of samples.
    pub fn last_sampled(&self, place: Place) -> Option<Sampled> {
        self.sampled(place, now().saturating_sub(PERIOD))
    }

    /// How busy a part was from a time of the monotonic clock on, by whole periods of samples; none if no period has
    /// ended since.
    pub fn sampled(&self, place: Place, since: u64) -> Option<Sampled> {
        self.periods(place, since, |last, periods, of| of(last, periods))
    }

    /// The same where each sample names one process, with as much chance as that one had of it.
    pub fn named(&self, place: Place, since: u64) -> Option<Vec<Named>> {
        self.periods(place, since, |last, periods, of| {
            let mut all: Vec<Named> = Vec::new();
            for number in last.saturating_sub(periods) + 1..=last {
                let Sampled { at, busy, processes, .. } = of(number, 1);
                let sum: u64 = processes.iter().map(|(_, had)| had).sum();
                // Another throw for each sample, and the same for whoever asks again.
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
                    None => all.push(Named { pid: *pid, at, busy, span: periods * PERIOD }),
                }
            }
            all
        })
    }

    /// What follows from the last period of samples that has ended and how many have since then, by what is sampled up to
    /// one over so many of them; none if none has.
    fn periods<T>(
        &self,
        place: Place,
        since: u64,
        tell: impl FnOnce(u64, u64, &dyn Fn(u64, u64) -> Sampled) -> T,
    ) -> Option<T> {
        let part = place.part()?;
        let uses = self.ledger.uses_by_row(|other| other == part);
        let _held = self.ledger.hold(self.locks, part, self.row);
        let at = now();
        self.ledger.play(part, at);
        let (engine, last) = (self.ledger.engine(part), at / PERIOD);
        let periods = last.saturating_sub(since / PERIOD).min(REMEMBERED);
        let of = |last: u64, periods: u64| {
            let mut processes: Vec<(u32, u64)> = Vec::new();
            for (row, found) in uses.iter().filter(|(_, found)| found.place.part() == Some(part)) {
                let had = self.ledger.work(*row).samples.gained(last, periods);
                // Two libraries in one process are two guests.
                match processes.iter_mut().find(|(pid, _)| *pid == found.pid) {
                    Some((_, sum)) => *sum += had,
                    None => processes.push((found.pid, had)),
                }
            }
            processes.retain(|(_, had)| *had > 0);
            let (span, busy) = (periods * PERIOD, engine.samples.gained(last, periods));
            Sampled { at: last * PERIOD, span, busy, processes }
        };
        (periods > 0).then(|| tell(last, periods, &of))
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.ledger.give(self.locks, self.row);
    }
}

const _: () = assert!(REMEMBERED < super::samples::SAMPLES as u64);
