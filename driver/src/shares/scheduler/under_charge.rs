//! Charges shares for time that their varying kernels used but were not charged.
//!
//! A kernel that fits a time slice is charged little more than its fastest launch, because
//! neighbours may have preempted the slower ones. Kernels that vary by themselves look the same. If
//! the device was busy for longer than all charges, each share used more by the same factor, at
//! most by what its library says it was spared. So shares with steady kernels lose little, and
//! varying kernels avoid no charge. All functions are pure.

use super::controller::QUANTUM;
use super::preemption_inflation::Part;
use super::shortfall::kept;
use crate::shares::snapshot::ShareKey;
use std::collections::BTreeMap;
use std::time::Duration;

/// Half-life of earlier measurements.
const HALF: Duration = Duration::from_millis(700);

/// The time of the device and its shares in the last snapshots, weighted by age, and the factor by
/// which each share used more than it was charged. The factor is computed from sums and is not a
/// mean of factors. So the first snapshot counts fully, and noise does not only add up, as it would
/// with factors that are never below 1.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct UnderCharge {
    /// Seconds, and in nanoseconds for how much of them the device was at work.
    time: f64,
    active: f64,
    shares: BTreeMap<ShareKey, Sums>,
}

/// Sums of a share in nanoseconds, and its factor, at least 1.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sums {
    charged: f64,
    spared: f64,
    more: f64,
}

impl UnderCharge {
    pub(crate) fn more(&self, share: &ShareKey) -> f64 {
        self.shares.get(share).map_or(1.0, |sums| sums.more)
    }

    /// The state after a measurement of the device's active time, in nanoseconds per second.
    /// Without a measurement the state stays.
    pub(crate) fn after(&self, active: Option<u64>, parts: &[(ShareKey, Part)], since: Duration) -> Self {
        let Some(active) = active else { return self.clone() };
        // Measurements of a share with other co-runners do not apply any more.
        let are_same = self.shares.len() == parts.len()
            && parts.iter().all(|(share, _)| self.shares.contains_key(share));
        let kept = if are_same { kept(since, HALF) } else { 0.0 };
        let seconds = since.as_secs_f64();
        let sums = |(share, part): &(ShareKey, Part)| {
            let before = self.shares.get(share);
            let sum = |of: fn(&Sums) -> f64, now: u64| before.map_or(0.0, of) * kept + now as f64 * seconds;
            let (charged, spared) =
                (sum(|sums| sums.charged, part.charged), sum(|sums| sums.spared, part.spared));
            (share.clone(), Sums { charged, spared, more: self.more(share) })
        };
        let mut shares: BTreeMap<ShareKey, Sums> = parts.iter().map(sums).collect();
        let (time, active) = (self.time * kept + seconds, self.active * kept + active as f64 * seconds);
        let factor = factor(active, shares.values());
        // A share with almost no time gives no information.
        for sums in shares.values_mut().filter(|sums| sums.charged >= QUANTUM as f64 * time) {
            sums.more = factor.min(sums.most());
        }
        Self { time, active, shares }
    }

    /// The corrected time of each share.
    pub(crate) fn added(&self, parts: Vec<(ShareKey, Part)>) -> Vec<(ShareKey, Part)> {
        let add = |(share, part): (ShareKey, Part)| {
            let charged = (part.charged as f64 * self.more(&share)) as u64;
            (share, Part { charged, ..part })
        };
        parts.into_iter().map(add).collect()
    }
}

impl Sums {
    /// By what factor the share had more at most.
    fn most(&self) -> f64 {
        1.0 + self.spared / self.charged.max(1.0)
    }
}

/// The common factor that explains the device's time, limited by the maximum of each share.
fn factor<'a>(active: f64, shares: impl Iterator<Item = &'a Sums>) -> f64 {
    let mut by_most: Vec<&Sums> = shares.collect();
    by_most.sort_by(|one, other| one.most().total_cmp(&other.most()));
    let (mut left, mut charged) = (active, by_most.iter().map(|sums| sums.charged).sum::<f64>());
    for sums in by_most {
        let factor = left / charged.max(1.0);
        if factor <= sums.most() {
            return factor.max(1.0);
        }
        left -= sums.charged + sums.spared;
        charged -= sums.charged;
    }
    f64::MAX
}

#[cfg(test)]
mod tests {
    use super::super::controller::{NS_PER_SECOND, POINT};
    use super::super::preemption_inflation::tests::{key, part};
    use super::*;
    use proptest::prelude::*;

    /// A share with these charged and undercharged points.
    fn spared(charged: u64, spared: u64) -> Part {
        Part { spared: spared * POINT, ..part(charged, 0) }
    }

    /// The state after ten measurements of a second with this active time of the device.
    fn after(active: u64, parts: &[Part]) -> Vec<f64> {
        let parts: Vec<_> = parts.iter().enumerate().map(|(number, part)| (key(number), *part)).collect();
        let look = |spared: UnderCharge, _| spared.after(Some(active), &parts, Duration::from_secs(1));
        let known = (0..10).fold(UnderCharge::default(), look);
        parts.iter().map(|(share, _)| known.more(share)).collect()
    }

    #[test]
    fn uncharged_time_is_split_by_a_common_factor() {
        let check = |active: u64, parts: &[Part], expected: &[f64]| {
            let is = after(active * POINT, parts);
            let are_near = is.iter().zip(expected).all(|(is, expected)| (is - expected).abs() < 0.01);
            assert!(are_near, "{is:?} of {active}, {parts:?}");
        };
        check(80, &[spared(30, 9), spared(50, 9)], &[1.0, 1.0]);
        // Less than it says.
        check(60, &[spared(30, 9), spared(50, 9)], &[1.0, 1.0]);
        check(88, &[spared(30, 9), spared(50, 15)], &[1.1, 1.1]);
        // The kernels of one do not vary.
        check(85, &[spared(30, 0), spared(50, 20)], &[1.0, 1.1]);
        check(90, &[spared(40, 2), spared(20, 10), spared(20, 10)], &[1.05, 1.2, 1.2]);
        // Unexplained time is charged to no share.
        check(99, &[spared(30, 3), spared(50, 5)], &[1.1, 1.1]);
        check(99, &[spared(0, 50), spared(50, 50)], &[1.0, 1.98]);
    }

    #[test]
    fn first_sample_counts_fully_and_later_ones_gradually() {
        let parts = [(key(0), spared(50, 20))];
        let after = |spared: &UnderCharge, active: Option<u64>, ms: u64| {
            spared.after(active.map(|active| active * POINT), &parts, Duration::from_millis(ms))
        };
        let check = |spared: &UnderCharge, expected: f64| {
            assert!((spared.more(&key(0)) - expected).abs() < 0.01, "{spared:?}");
        };
        let first = after(&UnderCharge::default(), Some(60), 700);
        check(&first, 1.2);
        assert_eq!(first.added(parts.clone().into())[0].1.charged / POINT, 60);
        assert_eq!(first.more(&key(1)), 1.0);
        check(&after(&first, None, 700), 1.2);
        // Two thirds of what counts are of the second look.
        check(&after(&first, Some(54), 700), 1.12);
        // A deficit in one measurement offsets an excess in another.
        check(&after(&after(&UnderCharge::default(), Some(45), 700), Some(55), 700), 1.033);
    }

    #[test]
    fn state_is_reset_when_the_shares_change() {
        let parts = |shares: usize| -> Vec<_> { (0..shares).map(|at| (key(at), spared(30, 20))).collect() };
        let second = Duration::from_secs(1);
        let before = UnderCharge::default().after(Some(45 * POINT), &parts(1), second);
        let after = before.after(Some(66 * POINT), &parts(2), second);
        assert!([0, 1].iter().all(|at| (after.more(&key(*at)) - 1.1).abs() < 0.01), "{after:?}");
    }

    proptest! {
        #[test]
        fn corrected_time_is_bounded_by_charge_and_device_total(
            active in 0..=NS_PER_SECOND,
            parts in proptest::collection::vec((0..=NS_PER_SECOND, 0..=NS_PER_SECOND), 1..8),
        ) {
            let part = |(charged, spared)| Part { charged, long: 0, spared, due: 0, ceiling: NS_PER_SECOND };
            let parts: Vec<Part> = parts.into_iter().map(part).collect();
            let more = after(active, &parts);
            for (more, part) in more.iter().zip(&parts) {
                let most = 1.0 + part.spared as f64 / part.charged.max(1) as f64;
                prop_assert!(*more >= 1.0 - 1e-9 && *more <= most + 1e-9, "{more} of {part:?}");
            }
            let sum = |of: &dyn Fn((&f64, &Part)) -> f64| more.iter().zip(&parts).map(of).sum::<f64>();
            let had = sum(&|(more, part)| more * part.charged as f64);
            let charged = sum(&|(_, part)| part.charged as f64);
            let bound = charged.max(active as f64) * (1.0 + 1e-6) + 1.0;
            prop_assert!(had <= bound, "{had} of {active}, {charged}");
        }
    }
}
