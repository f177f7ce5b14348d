//! Compensates what the shares of a device lack together.
//!
//! Preemption is estimated by chance ([`super::preemption_inflation`]). Kernels that arrive more or
//! less evenly are preempted differently, and for small shares the missing time is too small to
//! see. But the busy time of the device is known exactly, and so are the targets of the shares that
//! wait. Their common shortfall is compensated gradually, by the same part of each target. Because
//! waiting is self-reported, a share gets at most one point by it. All functions are pure.

use std::time::Duration;

/// Half-life of the correction.
const HALF: Duration = Duration::from_millis(4000);
/// Part of the shortfall that is corrected per second.
const FOLLOWED: f64 = 1.0;
/// NVML tells whole per cent, so that less than this is nothing; in seconds a second, as all of these.
const SLACK: f64 = 0.005;
/// Maximum correction of a share.
const MOST: f64 = 0.01;
/// A share with a smaller target is not corrected.
pub(crate) const LEAST: f64 = 1e-4;

/// The correction after a measurement, by the sum of the targets and the time that the device was
/// busy.
pub(crate) fn after(before: f64, due: f64, had: f64, since: Duration) -> f64 {
    let lacks = FOLLOWED * since.as_secs_f64() * (due - had - SLACK);
    (before * kept(since, HALF) + lacks).clamp(0.0, 1.0)
}

/// The factor by which a share with this target is granted more, by the common correction.
pub(crate) fn more(part: f64, due: f64) -> f64 {
    if due < LEAST { 1.0 } else { 1.0 + part.min(MOST / due) }
}

/// The part that remains after this time with this half-life.
pub(crate) fn kept(since: Duration, half: Duration) -> f64 {
    0.5_f64.powf(since.as_secs_f64() / half.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LOOK: Duration = Duration::from_secs(1);

    /// The final part of shares, in points, by their target and their part without the correction.
    fn settles(due: f64, without: f64, looks: usize) -> f64 {
        let had = |lack: f64| without / 100.0 * (1.0 + lack / (due / 100.0));
        let lack = (0..looks).fold(0.0, |lack, _| after(lack, due / 100.0, had(lack), LOOK));
        had(lack) * 100.0
    }

    #[test]
    fn most_of_a_shortfall_is_compensated() {
        let check = |due: f64, without: f64, expected: f64| {
            let had = settles(due, without, 20);
            assert!((had - expected).abs() < 0.1, "{had} of {due}, {without} without");
        };
        check(100.0, 97.0, 99.1);
        check(20.0, 14.0, 18.5);
        check(50.0, 50.0, 50.0);
        check(50.0, 49.6, 49.6);
        check(50.0, 55.0, 55.0);
    }

    #[test]
    fn compensation_is_at_most_one_point() {
        let check = |part: f64, due: f64, points: f64| {
            let given = (more(part, due) - 1.0) * due * 100.0;
            assert!((given - points).abs() < 1e-9, "{given} of {due}");
        };
        check(0.02, 0.3, 0.6);
        check(0.2, 0.3, 1.0);
        check(0.2, 0.01, 0.2);
        check(9.0, 0.0, 0.0);
    }

    proptest! {
        #[test]
        fn compensation_never_lowers_a_rate(
            before in 0.0..1.0,
            due in 0.0..1e12,
            had in 0.0..1e12,
            since in any::<Duration>(),
            part in 0.0..1e12,
        ) {
            let lack = after(before, due, had, since);
            prop_assert!((0.0..=1.0).contains(&lack));
            prop_assert!((1.0..=1.0 + MOST / LEAST).contains(&more(part, due)));
        }
    }
}
