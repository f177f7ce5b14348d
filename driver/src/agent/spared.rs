//! What shares of a device had beyond what they were charged: pure.
//!
//! A kernel that fits a time slice is charged little more than its fastest launches where it takes far longer than these, since
//! neighbours may have cut it. Launches of one grid that are now short and now long look the same. How much of that is their own
//! shows in what all shares had together: where the device was at work for longer than they were charged, each had more by
//! the same factor, as far as its library says that it was spared so much. So whose kernels do not vary loses little by neighbours
//! whose kernels do, and whoever varies them to be charged less is charged all the same. The other way, in proportion to what each was
//! spared, lost: a small share on a full device waits for most of its turns, so that much of what its kernels took looks like theirs.

use super::arbiter::QUANTUM;
use super::bell::Key;
use super::cuts::{Part, believed};
use std::collections::BTreeMap;
use std::time::Duration;

/// By what factor each share had more than it was charged, from 1 on.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Spared(BTreeMap<Key, f64>);

impl Spared {
    pub(super) fn more(&self, share: &Key) -> f64 {
        self.0.get(share).copied().unwrap_or(1.0)
    }

    /// After a time in which the device was at work for so many nanoseconds a second.
    pub(super) fn after(&self, active: u64, parts: &[(Key, Part)], since: Duration) -> Self {
        let factor = factor(active, parts);
        let believed = believed(since);
        let more = |(share, part): &(Key, Part)| {
            let before = self.more(share);
            // Who had next to nothing tells nothing.
            let now = if part.charged < QUANTUM { before } else { factor.min(most(part)) };
            (share.clone(), before + (now - before) * believed)
        };
        Self(parts.iter().map(more).collect())
    }

    /// What each had by that.
    pub(super) fn added(&self, parts: Vec<(Key, Part)>) -> Vec<(Key, Part)> {
        let add = |(share, part): (Key, Part)| {
            let charged = (part.charged as f64 * self.more(&share)) as u64;
            (share, Part { charged, ..part })
        };
        parts.into_iter().map(add).collect()
    }
}

/// By what factor a share had more at most.
fn most(part: &Part) -> f64 {
    1.0 + part.spared as f64 / part.charged.max(1) as f64
}

/// The factor, the same for all as far as each may have had so much, that explains what the device had.
fn factor(active: u64, parts: &[(Key, Part)]) -> f64 {
    let mut by_most: Vec<&Part> = parts.iter().map(|(_, part)| part).collect();
    by_most.sort_by(|one, other| most(one).total_cmp(&most(other)));
    let (mut left, mut charged) =
        (active as f64, by_most.iter().map(|part| part.charged as f64).sum::<f64>());
    for part in by_most {
        let factor = left / charged.max(1.0);
        if factor <= most(part) {
            return factor.max(1.0);
        }
        left -= part.charged as f64 + part.spared as f64;
        charged -= part.charged as f64;
    }
    f64::MAX
}

#[cfg(test)]
mod tests {
    use super::super::arbiter::{POINT, SECOND};
    use super::super::cuts::tests::{key, part};
    use super::*;
    use proptest::prelude::*;

    /// That was charged and spared so many points.
    fn spared(charged: u64, spared: u64) -> Part {
        Part { spared: spared * POINT, ..part(charged, 0) }
    }

    /// What is known after ten looks of a second at which the device had so much.
    fn after(active: u64, parts: &[Part]) -> Vec<f64> {
        let parts: Vec<_> = parts.iter().enumerate().map(|(number, part)| (key(number), *part)).collect();
        let look = |spared: Spared, _| spared.after(active, &parts, Duration::from_secs(1));
        let known = (0..10).fold(Spared::default(), look);
        parts.iter().map(|(share, _)| known.more(share)).collect()
    }

    #[test]
    fn what_a_device_had_beyond_what_was_charged_is_of_all_alike_as_far_as_they_were_spared_it() {
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
        // What nobody explains is nobody's.
        check(99, &[spared(30, 3), spared(50, 5)], &[1.1, 1.1]);
        check(99, &[spared(0, 50), spared(50, 50)], &[1.0, 1.98]);
    }

    #[test]
    fn a_look_is_believed_by_and_by() {
        let parts = [(key(0), spared(50, 20))];
        let half = Spared::default().after(60 * POINT, &parts, Duration::from_millis(700));
        assert!((half.more(&key(0)) - 1.1).abs() < 0.01, "{half:?}");
        assert_eq!(half.added(parts.into())[0].1.charged / POINT, 55);
        assert_eq!(half.more(&key(1)), 1.0);
    }

    proptest! {
        #[test]
        fn nobody_had_less_than_it_was_charged_nor_more_than_it_was_spared_nor_all_more_than_the_device(
            active in 0..=SECOND,
            parts in proptest::collection::vec((0..=SECOND, 0..=SECOND), 1..8),
        ) {
            let parts: Vec<Part> =
                parts.into_iter().map(|(charged, spared)| Part { charged, long: 0, spared }).collect();
            let more = after(active, &parts);
            for (more, part) in more.iter().zip(&parts) {
                prop_assert!(*more >= 1.0 - 1e-9 && *more <= most(part) + 1e-9, "{more} of {part:?}");
            }
            let sum = |of: &dyn Fn((&f64, &Part)) -> f64| more.iter().zip(&parts).map(of).sum::<f64>();
            let (had, charged) = (sum(&|(more, part)| more * part.charged as f64), sum(&|(_, part)| part.charged as f64));
            prop_assert!(had <= charged.max(active as f64) * (1.0 + 1e-6) + 1.0, "{had} of {active}, {charged}");
        }
    }
}
