use super::*;
use proptest::prelude::*;

const MS: u64 = 1_000_000;

/// Runs launches with these durations in nanoseconds. Returns what each counts as and is charged.
/// The node measures the share until launch `watched_until`.
fn charged(took: &[u64], watched_until: usize) -> Vec<(i64, i64)> {
    // SAFETY: atomics throughout, for which zeros are valid.
    #[allow(unsafe_code)]
    let (samples, cost): (Samples, Cost) = unsafe { core::mem::zeroed() };
    let charge = |(at, took): (usize, &u64)| {
        let is_watched = at < watched_until;
        let counts = cost.learn(*took, *took, is_watched);
        (counts as i64, samples.spread(&cost, counts, is_watched))
    };
    took.iter().enumerate().map(charge).collect()
}

#[test]
fn preemption_of_long_kernels_is_charged_evenly() {
    let spells: Vec<u64> = (0..600).map(|at| [8, 14][at / 5 % 2] * MS).collect();
    let all = charged(&spells, 600);
    let even = (10 * MS as i64)..(12 * MS as i64);
    let uneven: Vec<_> = all[200..].iter().filter(|(_, charged)| !even.contains(charged)).collect();
    assert!(uneven.is_empty(), "{uneven:?}");
}

#[test]
fn short_and_outlier_kernels_are_not_deferred() {
    let check = |took: &[u64], since: u64| {
        let all = charged(took, took.len());
        let put_off = |(counts, charged): &&(i64, i64)| *counts >= since as i64 && counts != charged;
        assert_eq!(all.iter().find(put_off), None);
    };
    check(&[MS, 3 * MS / 2].repeat(100), 0);
    check(&[vec![10 * MS; 100], vec![100 * MS; 40]].concat(), 50 * MS);
}

/// Times of events in nanoseconds, by number.
struct At(Vec<i64>);

impl Timer for At {
    fn context(&self) -> u64 {
        1
    }
    fn create(&self) -> u64 {
        0
    }
    fn destroy(&self, _: u64) {}
    fn record(&self, _: u64) -> bool {
        true
    }
    fn is_done(&self, _: u64) -> Option<bool> {
        Some(true)
    }
    fn elapsed(&self, from: u64, to: u64) -> Option<i64> {
        Some(self.0[to as usize] - self.0[from as usize])
    }
}

#[test]
fn event_overhead_is_not_charged() {
    // Launches by their events, and the expected duration of the last.
    let check = |events: &[(i64, i64)], expected: u64| {
        // SAFETY: atomics throughout, for which zeros are valid.
        #[allow(unsafe_code)]
        let (samples, mut sample): (Samples, Sample) = unsafe { core::mem::zeroed() };
        let timer =
            At([0].into_iter().chain(events.iter().flat_map(|(begin, end)| [*begin, *end])).collect());
        let mut took = None;
        for at in 0..events.len() as u64 {
            sample = Sample {
                context: AtomicU64::new(1),
                begin: AtomicU64::new(2 * at + 1),
                end: AtomicU64::new(2 * at + 2),
                ..sample
            };
            took = samples.took(&sample, &timer);
        }
        assert_eq!(took.map(|(moved, _)| moved), Some(expected), "{events:?}");
    };
    // A row of kernels of 5 us on an H100.
    let row: Vec<(i64, i64)> = (1..9).map(|at| (at * 8_200 - 6_920, at * 8_200)).collect();
    check(&row, 5_000);
    // A driver whose events cost nothing, with a pause before the last launch.
    check(&[(0, 5_000), (5_000, 10_000), (90_000, 95_000)], 5_000);
    // A program that pauses after each.
    check(&[(0, 5_000), (50_000, 55_000), (100_000, 105_000)], 3_050);
    // The result is never 0.
    check(&[(0, 1_000), (2_300, 3_300), (4_600, 5_600)], 250);
    // Overlapping kernels.
    check(&[(0, 5_000), (3_000, 8_000)], 3_000);
}

proptest! {
    #[test]
    fn deferred_charge_is_bounded(
        took in proptest::collection::vec(1..100 * MS, 1..300), watched_until in 0..300_usize,
    ) {
        let mut put_off = 0;
        for (at, (counts, charged)) in charged(&took, watched_until).into_iter().enumerate() {
            put_off += counts - charged;
            let most = if at < watched_until { PUT_OFF } else { 0 };
            prop_assert!(put_off.abs() <= most, "{put_off} at {at}");
        }
    }
}
