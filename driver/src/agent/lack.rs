//! What the shares of a device lack together of what they are to have: pure.
//!
//! How much longer kernels look that neighbours cut is known as chance has it ([`super::cuts`]). Kernels that come more evenly or less
//! so are cut otherwise, and of small shares what is missing is too little to tell. But for how long the device was at work is known
//! exactly, and so is what those are to have who wait for more: what they lack together follows, and shows what the model of
//! chance leaves out. It is made up for by and by, as a look has a kernel more or less by chance, and not all of it, as what is found in one
//! look is answered in the next. Of what each lacks nothing is said by that, so all are given the same part of what they are to have.
//!
//! Who waits says so itself. So nobody is given more than a point by it, which is the most that a lie is worth, to all.

use super::cuts::kept;
use std::time::Duration;

/// Half of what is made up for is forgotten in so long.
const HALF: Duration = Duration::from_millis(4000);
/// So much of what is lacking is made up for in a second.
const FOLLOWED: f64 = 1.0;
/// NVML tells whole per cent, so that less than this is nothing; in seconds a second, as all of these.
const SLACK: f64 = 0.005;
/// What each is given at most.
const MOST: f64 = 0.01;
/// Who is to have less than this is given nothing.
pub(super) const LEAST: f64 = 1e-4;

/// What is made up for after a look, at which shares were to have so much together and the device had that.
pub(super) fn after(before: f64, due: f64, had: f64, since: Duration) -> f64 {
    let lacks = FOLLOWED * since.as_secs_f64() * (due - had - SLACK);
    (before * kept(since, HALF) + lacks).clamp(0.0, 1.0)
}

/// By what factor a share is given more that is to have so much, where all are given such a part.
pub(super) fn more(part: f64, due: f64) -> f64 {
    if due < LEAST { 1.0 } else { 1.0 + part.min(MOST / due) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LOOK: Duration = Duration::from_secs(1);

    /// What shares have, in points, that are to have so many and without this would have others.
    fn settles(due: f64, without: f64, looks: usize) -> f64 {
        let had = |lack: f64| without / 100.0 * (1.0 + lack / (due / 100.0));
        let lack = (0..looks).fold(0.0, |lack, _| after(lack, due / 100.0, had(lack), LOOK));
        had(lack) * 100.0
    }

    #[test]
    fn the_better_part_of_what_is_lacking_is_made_up_for_and_nothing_where_nothing_is() {
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
    fn nobody_is_given_more_than_a_point() {
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
        fn whatever_is_said_no_rate_is_smaller_by_it(
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
