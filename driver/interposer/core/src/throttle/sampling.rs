//! Which launches of a short kernel are measured.
//!
//! Measuring each launch would cost more than the kernel at 100,000 launches a second. So launches
//! are measured in runs of [`RUN`] of one kernel, about [`A_SECOND`] a second, and each represents
//! others. The pause after a run is random, so that no program rhythm is met at the same beat. If
//! all kernels together are launched rarely ([`Tempo`]), each launch is measured, because one
//! preempted launch must not be charged for dozens of others.

use divvy_pages::sync::Ordering::Relaxed;
use divvy_pages::sync::{AtomicI32, AtomicU16, AtomicU32, AtomicU64};

const RUN: u32 = 8;
/// The first launch of a run only marks the start of the second.
const MEASURED: u32 = RUN - 1;
/// Measured launches per second, if there are more, by the recent launch rate.
const A_SECOND: u64 = 1000;
/// Unmeasured time between two runs, in nanoseconds of the device: on average this, at most twice
/// as much. Unmeasured work is not counted as queued ([`super::samples`]). And a burst of launches,
/// all that a full GPU leaves a share at a time, looks like 100,000 a second.
const UNMEASURED: u64 = 3_000_000;
/// Maximum average number of launches from one run to the next.
const LONGEST: u32 = 2048;
/// Window for counting the launches of all kernels, in nanoseconds. A burst of one kernel shows
/// earlier.
const WINDOW: u64 = 100_000_000;
const SECOND: u64 = 1_000_000_000;

/// How a launch is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measure {
    No,
    /// The first launch of a run: the next are measured from its end.
    Lead,
    /// It represents this many launches.
    For(u32),
}

/// Launch rate of all short kernels of a process together; a program has hundreds of them, each of
/// which may be rare. Zeros are the initial state.
#[derive(Debug, Default)]
pub(super) struct Tempo {
    since: AtomicU64,
    launches: AtomicU64,
    /// Launches per second in the previous window.
    rate: AtomicU64,
}

impl Tempo {
    /// Counts launches and returns the rate per second.
    fn counted(&self, launches: u32, now: u64) -> u64 {
        let all = self.launches.fetch_add(launches.into(), Relaxed).saturating_add(launches.into());
        let since = self.since.load(Relaxed);
        let window = now.saturating_sub(since);
        if window >= WINDOW && self.since.compare_exchange(since, now, Relaxed, Relaxed).is_ok() {
            self.launches.store(0, Relaxed);
            self.rate.store(all.saturating_mul(SECOND) / window, Relaxed);
        }
        self.rate.load(Relaxed)
    }
}

/// The runs of one kernel. Zeros are a kernel that was never launched.
#[derive(Debug)]
pub(super) struct Runs {
    /// Launches until one is measured.
    left: AtomicI32,
    /// Measured launches.
    number: AtomicU16,
    /// Launches that each measured one represents.
    stands_for: AtomicU16,
    /// Launches from the end of the last run to that of the next, and the time of the last end.
    launches: AtomicU32,
    since: AtomicU64,
}

impl Runs {
    /// Returns true if the next launch is measured; counts it otherwise.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        // Two threads may count one launch, which is harmless.
        let left = self.left.load(Relaxed);
        if left > 0 {
            self.left.store(left - 1, Relaxed);
        }
        left <= 0
    }

    /// Returns how the next launch, which is due, is measured. `seed` differs per kernel; `now` in
    /// nanoseconds.
    #[cold]
    pub(super) fn next(&self, estimate: u64, seed: u64, tempo: &Tempo, now: impl Fn() -> u64) -> Measure {
        let number = u32::from(self.number.fetch_add(1, Relaxed));
        let stands_for = u32::from(self.stands_for.load(Relaxed)).clamp(1, most(estimate));
        if number % RUN == MEASURED {
            self.ends(number / RUN, estimate, seed, tempo, now());
        }
        match stands_for {
            2.. if number.is_multiple_of(RUN) => Measure::Lead,
            _ => Measure::For(stands_for),
        }
    }

    /// Ends a run: sets what each next launch represents, and how many launches pass until then.
    fn ends(&self, run: u32, estimate: u64, seed: u64, tempo: &Tempo, now: u64) {
        let since = now.saturating_sub(self.since.swap(now, Relaxed)).max(1);
        let launches = self.launches.load(Relaxed).max(RUN);
        let rate = u64::from(launches).saturating_mul(SECOND) / since;
        let all = tempo.counted(launches, now);
        let stands_for = u32::try_from(rate.max(all) / A_SECOND).unwrap_or(u32::MAX).clamp(1, most(estimate));
        let pause = if stands_for == 1 { 0 } else { pause(seed, run, stands_for * MEASURED) };
        self.stands_for.store(stands_for as u16, Relaxed);
        self.launches.store(pause + RUN, Relaxed);
        self.left.store(pause as i32, Relaxed);
    }
}

/// Maximum number of launches that one of such a kernel represents.
fn most(estimate: u64) -> u32 {
    let period = (UNMEASURED / estimate.max(1)).clamp(RUN.into(), LONGEST.into());
    period as u32 / MEASURED
}

/// Random number of unmeasured launches after a run, for one run per `period` launches; uniform.
fn pause(seed: u64, run: u32, period: u32) -> u32 {
    let mixed = (seed ^ u64::from(run)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 33) % u64::from(2 * (period - RUN) + 1)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;

    /// Simulates 4 million launches of `kernels` kernels in turn, with `every` nanoseconds between
    /// launches.
    fn launched_of(kernels: usize, estimate: u64, every: impl Fn(u64) -> u64) -> (Vec<Measure>, u64) {
        // SAFETY: atomics throughout, for which zeros are valid.
        #[allow(unsafe_code)]
        let (tempo, runs): (Tempo, [Runs; 300]) = unsafe { core::mem::zeroed() };
        let clock = Cell::new(SECOND);
        let all = (0..4_000_000_u64).map(|number| {
            clock.set(clock.get() + every(number));
            let (runs, seed) = (
                &runs[number as usize % kernels],
                (number % kernels as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
            );
            if runs.is_due() { runs.next(estimate, seed, &tempo, || clock.get()) } else { Measure::No }
        });
        (all.collect(), clock.get() - SECOND)
    }

    /// The same for one kernel.
    fn launched(estimate: u64, every: impl Fn(u64) -> u64) -> (Vec<Measure>, u64) {
        launched_of(1, estimate, every)
    }

    fn stands_for(measure: &Measure) -> u64 {
        if let Measure::For(count) = measure { u64::from(*count) } else { 0 }
    }

    #[test]
    fn measured_launches_represent_all() {
        for estimate in [100, 5_000, 20_000, 90_000] {
            for every in [1, 2, 5, 20, 60, 1000] {
                let (all, _) = launched(estimate, |_| estimate * every);
                let of_all = all.iter().map(stands_for).sum::<u64>() as f64 / all.len() as f64;
                assert!((0.95..1.05).contains(&of_all), "{estimate} every {every}: {of_all}");
            }
        }
    }

    #[test]
    fn at_least_a_thousand_launches_a_second_are_measured() {
        let check = |estimate: u64, every: u64, expected: std::ops::Range<f64>| {
            let (all, took) = launched(estimate, |_| every);
            let measured = all.iter().filter(|measure| **measure != Measure::No).count();
            let a_second = measured as f64 * 1e9 / took as f64;
            assert!(expected.contains(&a_second), "{estimate} every {every}: {a_second}");
        };
        check(20_000, 40_000_000, 24.9..25.1);
        check(20_000, 1_100_000, 909.0..910.0);
        for every in [20_000, 50_000, 100_000, 300_000] {
            check(20_000, every, 900.0..3500.0);
        }
    }

    #[test]
    fn unmeasured_work_in_a_row_is_bounded() {
        for estimate in [100, 1500, 5_000, 20_000, 31_000, 50_000, 99_000] {
            let (all, _) = launched(estimate, |_| 1000);
            let rows = all.split(|measure| *measure != Measure::No);
            let longest = rows.map(|row| row.len() as u64 * estimate).max();
            assert!(longest <= Some(2 * UNMEASURED), "{estimate}: {longest:?}");
        }
    }

    #[test]
    fn sampling_rate_is_independent_of_kernel_count() {
        for kernels in [10, 100, 300] {
            // 50,000 a second.
            let (all, took) = launched_of(kernels, 20_000, |_| 20_000);
            let measured = all.iter().filter(|measure| **measure != Measure::No).count();
            let a_second = measured as f64 * 1e9 / took as f64;
            assert!((1000.0..4000.0).contains(&a_second), "{kernels}: {a_second}");
            let sum = all.iter().map(stands_for).sum::<u64>() as f64 / all.len() as f64;
            assert!((0.95..1.05).contains(&sum), "{kernels}: {sum}");
        }
    }

    #[test]
    fn bursty_launches_are_sampled_correctly() {
        // 10,000 in sequence, and the next a second later.
        let burst = |number: u64| if number.is_multiple_of(10_000) { SECOND } else { 5_000 };
        let (all, _) = launched(5_000, burst);
        let sum = all.iter().map(stands_for).sum::<u64>() as f64 / all.len() as f64;
        assert!((0.9..1.1).contains(&sum), "{sum}");
        assert!(all.iter().filter(|measure| **measure != Measure::No).count() < all.len() / 8);
    }
}
