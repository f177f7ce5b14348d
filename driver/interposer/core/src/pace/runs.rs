//! Which launches of a short kernel are measured.
//!
//! To measure each would cost more than the kernel where a hundred thousand a second are launched. So launches are
//! measured in runs of [`RUN`] of one kernel, a thousand a second or so ([`A_SECOND`]), each of which stands for others;
//! how long the pause after a run is, is left to chance, so that a program with a rhythm of its own is not met at the
//! same beat for ever. Where fewer are launched, of all kernels together ([`Tempo`]), each is measured, however short:
//! one that a neighbour's time slice cut would otherwise be charged for dozens that were not.

use divvy_pages::sync::Ordering::Relaxed;
use divvy_pages::sync::{AtomicI32, AtomicU16, AtomicU32, AtomicU64};

const RUN: u32 = 8;
/// The first of a run only marks where the second begins.
const MEASURED: u32 = RUN - 1;
/// Launches that are measured in a second, if there are more, by how often kernels were launched of late.
const A_SECOND: u64 = 1000;
/// Between two runs lies so much of the device's time on average and twice as much at most, in nanoseconds: what goes
/// unmeasured nobody counts as queued ([`super::samples`]), and a burst of launches, which is all that a full GPU leaves a
/// share at a time, looks like a hundred thousand a second. (The shorter the kernels the more of them go by: to measure one
/// costs the program as much however short it is.)
const UNMEASURED: u64 = 3_000_000;
/// From one run to the next there are so many launches at most, on average.
const LONGEST: u32 = 2048;
/// How long the launches of all kernels are counted, in nanoseconds. A burst of one kernel shows by itself before.
const WINDOW: u64 = 100_000_000;
const SECOND: u64 = 1_000_000_000;

/// Whether and how a launch is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measure {
    No,
    /// The first of a run: from its end on the next are measured.
    Lead,
    /// It stands for so many launches.
    For(u32),
}

/// How often the short kernels of a process are launched, all together: a program has hundreds of them, each of which
/// may be rare. Zeros are a process that has launched none.
#[derive(Debug, Default)]
pub(super) struct Tempo {
    since: AtomicU64,
    launches: AtomicU64,
    /// Launches a second in the window before.
    rate: AtomicU64,
}

impl Tempo {
    /// With so many launches more, which have been since they were counted last: how many a second there are.
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

/// Of one kernel. Zeros are one that was never launched.
#[derive(Debug)]
pub(super) struct Runs {
    /// Launches until one is measured.
    left: AtomicI32,
    /// Launches that were measured.
    number: AtomicU16,
    /// Each for so many.
    stands_for: AtomicU16,
    /// Launches from the end of the last run to that of the next, and when the last ended.
    launches: AtomicU32,
    since: AtomicU64,
}

impl Runs {
    /// Whether the next launch is measured; it is counted if it is not.
    #[inline]
    pub(super) fn is_due(&self) -> bool {
        // Two threads may count one launch: nothing rests on it.
        let left = self.left.load(Relaxed);
        if left > 0 {
            self.left.store(left - 1, Relaxed);
        }
        left <= 0
    }

    /// How the next is measured, which is due. `seed` is another of each kernel; `now` in nanoseconds.
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

    /// A run ends: what each of the next stands for, and how many launches there are until then.
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

/// For how many launches of such a kernel one stands at most.
fn most(estimate: u64) -> u32 {
    let period = (UNMEASURED / estimate.max(1)).clamp(RUN.into(), LONGEST.into());
    period as u32 / MEASURED
}

/// How many launches are not measured after a run, if there is one run in so many: any number with the same chance.
fn pause(seed: u64, run: u32, period: u32) -> u32 {
    let mixed = (seed ^ u64::from(run)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 33) % u64::from(2 * (period - RUN) + 1)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::cell::Cell;

    /// Four million launches of so many kernels in turn, the next so many nanoseconds after each.
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

    /// Of one.
    fn launched(estimate: u64, every: impl Fn(u64) -> u64) -> (Vec<Measure>, u64) {
        launched_of(1, estimate, every)
    }

    fn stands_for(measure: &Measure) -> u64 {
        if let Measure::For(count) = measure { u64::from(*count) } else { 0 }
    }

    #[test]
    fn those_that_are_measured_stand_for_all() {
        for estimate in [100, 5_000, 20_000, 90_000] {
            for every in [1, 2, 5, 20, 60, 1000] {
                let (all, _) = launched(estimate, |_| estimate * every);
                let of_all = all.iter().map(stands_for).sum::<u64>() as f64 / all.len() as f64;
                assert!((0.95..1.05).contains(&of_all), "{estimate} every {every}: {of_all}");
            }
        }
    }

    #[test]
    fn a_thousand_a_second_are_measured_or_all() {
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
    fn of_what_a_burst_queues_no_more_goes_unmeasured_in_a_row_than_may_be_under_way() {
        for estimate in [100, 1500, 5_000, 20_000, 31_000, 50_000, 99_000] {
            let (all, _) = launched(estimate, |_| 1000);
            let rows = all.split(|measure| *measure != Measure::No);
            let longest = rows.map(|row| row.len() as u64 * estimate).max();
            assert!(longest <= Some(2 * UNMEASURED), "{estimate}: {longest:?}");
        }
    }

    #[test]
    fn many_kernels_are_measured_no_more_often_than_one() {
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
    fn who_launches_rarely_and_then_often_is_measured_for_what_it_does() {
        // Ten thousand one after the other, and a second later the next.
        let burst = |number: u64| if number.is_multiple_of(10_000) { SECOND } else { 5_000 };
        let (all, _) = launched(5_000, burst);
        let sum = all.iter().map(stands_for).sum::<u64>() as f64 / all.len() as f64;
        assert!((0.9..1.1).contains(&sum), "{sum}");
        assert!(all.iter().filter(|measure| **measure != Measure::No).count() < all.len() / 8);
    }
}
