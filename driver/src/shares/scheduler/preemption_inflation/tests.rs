//! Looks at devices of numbers, and what shares are made up for after them.

use super::super::controller::POINT;
use super::*;
use proptest::prelude::*;

/// A share that was charged these points, and of them these for long kernels.
pub(crate) fn part(charged: u64, long: u64) -> Part {
    Part { charged: charged * POINT, long: long * POINT, spared: 0, due: 0, ceiling: NS_PER_SECOND }
}

pub(crate) fn key(number: usize) -> ShareKey {
    (format!("c{number}").into(), "0".into())
}

/// The state after identical measurements of a second each.
fn after_looks(before: PreemptionInflation, looks: usize, busy: u64, parts: &[Part]) -> PreemptionInflation {
    let parts: Vec<_> = parts.iter().enumerate().map(|(number, part)| (key(number), *part)).collect();
    (0..looks).fold(before, |cuts, _| cuts.after(busy * POINT, &parts, Duration::from_secs(1), false))
}

/// The trims after as many more such looks as there are shares, on the mean: each has had all steps then.
fn mean_trims(mut cuts: PreemptionInflation, busy: u64, parts: &[Part]) -> Vec<f64> {
    let mut sums = vec![0.0; parts.len()];
    for _ in parts {
        cuts = after_looks(cuts, 1, busy, parts);
        sums.iter_mut().enumerate().for_each(|(at, sum)| *sum += cuts.trim(&key(at)));
    }
    sums.into_iter().map(|sum| sum / parts.len() as f64).collect()
}

#[test]
fn missing_time_belongs_to_preempted_kernels() {
    let check = |busy: u64, parts: &[Part], expected: &[f64]| {
        let trims = mean_trims(after_looks(PreemptionInflation::default(), 20, busy, parts), busy, parts);
        for (trim, expected) in trims.iter().zip(expected) {
            assert!((trim / expected - 1.0).abs() < 0.02, "{trims:?}, not {expected}, {busy} {parts:?}");
        }
    };
    check(80, &[part(30, 0), part(50, 0)], &[1.0, 1.0]);
    check(90, &[part(30, 0), part(50, 0)], &[1.0, 1.0]);
    check(70, &[part(30, 0), part(50, 50)], &[1.0, 1.37]);
    check(60, &[part(30, 0), part(50, 0)], &[1.5, 1.25]);
    // Both lose the same, and no more than by chance.
    check(61, &[part(30, 30), part(50, 50)], &[1.45, 1.23]);
    check(40, &[part(30, 30), part(50, 50)], &[1.45, 1.23]);
    check(71, &[part(30, 30), part(50, 50)], &[1.22, 1.125]);
    check(71, &[part(30, 30), part(50, 50), part(0, 0)], &[1.22, 1.125, 1.0]);
    // Kernels that are long for the better part.
    check(61, &[part(30, 16), part(50, 26)], &[1.45, 1.23]);
    // As often as there are shares, at most; by their own word, which may be anything.
    check(1, &[part(90, 90), part(50, u64::MAX / POINT)], &[1.85, 1.75]);
    // A share with more neighbours loses more.
    let parts = [part(30, 30), part(30, 0), part(20, 20)];
    let trims = mean_trims(after_looks(PreemptionInflation::default(), 20, 70, &parts), 70, &parts);
    assert!(trims[2] > trims[0] + 0.02 && trims[0] > 1.2 && trims[1] < 1.01, "{trims:?}");
}

#[test]
fn shortfall_is_given_to_all_preempted_shares() {
    let trims = |long: u64, due: u64| {
        let parts = [45, 20].map(|charged| Part { due: due * POINT, ..part(charged, long) });
        mean_trims(after_looks(PreemptionInflation::default(), 20, 50, &parts), 50, &parts)
    };
    // The target of each share, in points.
    let check = |long: u64, due: u64, expected: std::ops::Range<f64>| {
        for (trim, without) in trims(long, due).into_iter().zip(trims(long, 0)) {
            let more = (trim / without - 1.0) * due as f64;
            assert!(expected.contains(&more), "{more}, not {expected:?}, {long} {due}");
        }
    };
    let nothing = -1e-6..1e-6;
    check(20, 25, nothing.clone());
    // A point, less what a larger trim makes of what they wish for while they are charged the same.
    check(20, 28, 0.6..1.0);
    check(20, 100, 0.6..1.0);
    check(0, 100, nothing);
}

#[test]
fn short_kernels_raise_no_rates_on_a_full_device() {
    let after = |before: PreemptionInflation, busy: u64, long: u64| {
        let parts = [(key(0), part(30, long)), (key(1), part(75, 0))];
        let look =
            |cuts: PreemptionInflation, _| cuts.after(busy * POINT, &parts, Duration::from_secs(1), false);
        (0..40).fold(before, look)
    };
    let raised = after(PreemptionInflation::default(), 90, 0);
    let check = |cuts: &PreemptionInflation, is_raised: bool| {
        assert_eq!(cuts.trim(&key(0)) > 1.01, is_raised, "{cuts:?}");
    };
    check(&raised, true);
    check(&after(PreemptionInflation::default(), 99, 30), true);
    check(&after(PreemptionInflation::default(), 99, 0), false);
    // Earlier measurements are forgotten.
    check(&after(raised, 99, 0), false);
    // One kernel looked long: of the others nothing follows.
    let looks_long = Part { long: POINT / 4, ..part(10, 0) };
    let mut cuts = after_looks(PreemptionInflation::default(), 1, 99, &[looks_long, part(90, 0)]);
    assert!(cuts.trim(&key(0)) > 1.01, "it is long: {cuts:?}");
    for _ in 0..5 {
        cuts = after_looks(cuts, 1, 99, &[part(10, 0), part(90, 0)]);
        assert!(cuts.trim(&key(0)) < 1.05, "{cuts:?}");
    }
}

#[test]
fn guessed_kernel_times_exceed_no_target() {
    let parts = [part(30, 0), part(30, 0), part(30, 0)];
    let look = |cuts: PreemptionInflation, busy: u64| after_looks(cuts, 1, busy, &parts);
    // Before they were measured the library charged a third too much.
    let cuts = look(look(PreemptionInflation::default(), 60), 90);
    assert!(cuts.trim(&key(0)) < 1.01, "{cuts:?}");
    // GrantSummary it been believed, a device that is full by that would say at once that nothing is missing.
    let raised = look(look(look(PreemptionInflation::default(), 90), 60), 60);
    assert!(raised.trim(&key(0)) > 1.2, "{raised:?}");
    let full = [part(33, 0), part(33, 0), part(33, 0)];
    let cuts = after_looks(raised, 3, 99, &full);
    assert!(cuts.trim(&key(0)) < 1.1, "{cuts:?}");
}

#[test]
fn kernels_across_samples_keep_their_length() {
    let after = |longs: [u64; 2]| {
        let look = |cuts: PreemptionInflation, number: usize| {
            let parts = [(key(0), part(10, longs[number % 2])), (key(1), part(60, 60))];
            cuts.after(60 * POINT, &parts, Duration::from_secs(1), false)
        };
        let (before, after) = (
            (0..39).fold(PreemptionInflation::default(), look),
            (0..40).fold(PreemptionInflation::default(), look),
        );
        (before.trim(&key(0)) + after.trim(&key(0))) / 2.0
    };
    let check = |longs: [u64; 2], expected: f64| {
        assert!((after(longs) - expected).abs() < 0.2, "{} of {longs:?}", after(longs));
    };
    let steady = after([10, 10]);
    assert!(steady > 1.5, "{steady}");
    check([0, 20], steady);
    check([20, 0], steady);
    check([0, 0], 1.0);
}

#[test]
fn room_is_bounded_by_the_ceilings() {
    let trim_beside = |ceiling: u64| {
        let small = Part { ceiling: ceiling * POINT, ..part(30, 30) };
        after_looks(PreemptionInflation::default(), 1, 70, &[small, part(60, 60)]).trim(&key(1))
    };
    assert!(trim_beside(1) < 1.03 && trim_beside(30) > 1.15, "{} {}", trim_beside(1), trim_beside(30));
}

#[test]
fn rates_rise_until_no_time_is_missing() {
    // They meet more often than by chance, by this factor.
    let check = |asked: [f64; 2], times: f64| {
        let (mut cuts, mut before) = (PreemptionInflation::default(), asked);
        for look in 0..30 {
            let charged = [0, 1].map(|at| (asked[at] * cuts.trim(&key(at))).min(100.0));
            let parts_had = processor_sharing_model::had(&charged.map(|charged| charged / 100.0));
            let had = [0, 1].map(|at| charged[at] * (1.0 - (1.0 - parts_had[at]) * times));
            // A step up and a step down.
            let mean = [0, 1].map(|at| (had[at] + before[at]) / 2.0);
            before = had;
            // That they meet as by chance is expected of all, and is not quite forgotten of these.
            let near = if times < 1.0 { 2.0 } else { 1.0 };
            let are_right = (0..2).all(|at| (mean[at] - asked[at]).abs() < near);
            assert!(look < 8 || are_right, "{mean:?} of {asked:?} after {look} looks, {times}");
            let parts = charged.map(|charged| part(charged as u64, charged as u64));
            let parts: Vec<_> = parts.into_iter().enumerate().map(|(at, part)| (key(at), part)).collect();
            let busy = ((had[0] + had[1]) * POINT as f64) as u64;
            cuts = cuts.after(busy, &parts, Duration::from_secs(1), false);
        }
    };
    for asked in [[30.0, 50.0], [10.0, 80.0], [45.0, 45.0]] {
        for times in [0.0, 0.3, 1.0] {
            check(asked, times);
        }
    }
}

#[test]
fn equal_kernels_do_not_stay_in_step() {
    let parts = [part(45, 45), part(45, 45), part(20, 20)];
    let mut cuts = after_looks(PreemptionInflation::default(), 20, 75, &parts);
    let (mut faster, mut sums) = ([0, 0], [0.0, 0.0]);
    for _ in 0..6 {
        cuts = after_looks(cuts, 1, 75, &parts);
        let trims = [0, 1].map(|at| cuts.trim(&key(at)));
        faster[usize::from(trims[1] > trims[0])] += 1;
        sums = [0, 1].map(|at| sums[at] + trims[at]);
    }
    assert!(faster[0] > 0 && faster[1] > 0, "{faster:?}");
    assert!((sums[0] - sums[1]).abs() < 0.01, "{sums:?}");
}

proptest! {
    #[test]
    fn preemption_factor_is_at_most_the_share_count(
        looks in proptest::collection::vec(
            (
                any::<u64>(),
                proptest::collection::vec((any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()), 1..6),
                any::<Duration>(),
                any::<bool>(),
            ),
            1..10,
        ),
    ) {
        let mut cuts = PreemptionInflation::default();
        for (busy, parts, since, is_doubted) in looks {
            let part = |(number, (charged, long, due, ceiling))| {
                (key(number), Part { charged, long, spared: 0, due, ceiling })
            };
            let parts: Vec<_> = parts.into_iter().enumerate().map(part).collect();
            cuts = cuts.after(busy, &parts, since, is_doubted);
            let most = parts.len() as f64 + 1e-9;
            let is_bounded = |share: &ShareKey| (1.0 - 1e-9..=most).contains(&cuts.trim(share));
            prop_assert!(parts.iter().all(|(share, _)| is_bounded(share)), "{:?}", cuts);
        }
    }
}
