//! How much longer kernels of the shares of a MIG instance look than they are: pure.
//!
//! Kernels longer than a time slice look longer where neighbours cut in, and in doubt ([`super::joint`]) all do, so what shares
//! say is more than the instance had. What is missing they lack who had such kernels, which their libraries tell; where
//! nobody had, all. How much each lacks follows from how much of the time it has one under way, if they come as chance has it ([`turns`]):
//! each rate is raised so that its share has what it is to have beside the others, whose rates are raised as well. What is missing
//! in a look tells whether they come so; more than by chance they never meet for long. Who claims what it did not lose
//! takes from what others would get back, and where nothing is missing has [`LUMPS`] at most.
//!
//! **Steps.** Shares whose kernels come equally often would stay in step or out of it, and chance would be none. So rates
//! are a little larger in one look and smaller in another, in none the same for two.
//!
//! **What is measured and what is paid.** A share may pay for long kernels seconds after they ran, and for several at once, as when
//! its first looked long. So what it has under way is what was measured of long kernels, and what it pays for others. Those of a
//! share whose kernels are long for the better part count as such: beside others they wait for their turn, which is far longer than
//! they are. And programs that begin together have long kernels under way far more often than later, so nobody makes room for more
//! than another's ceiling.
//!
//! Of a device that has nothing left nobody has more by larger rates but from others, who wait longer for their turns and look longer by
//! that. So there none are raised for kernels that fit a time slice, and those that were fall by and by, or as soon as nothing is missing;
//! longer ones would leave much of it idle if theirs did.

use super::arbiter::{QUANTUM, SECOND};
use super::bell::Key;
use super::turns;
use std::collections::BTreeMap;
use std::time::Duration;

/// Where kernels are cut for less than this part of the time by chance, nothing follows from how much they were.
const LEAST_CUT: f64 = 0.001;
/// Half of what is believed of the last looks was so long ago.
const HALF: Duration = Duration::from_millis(1000);
/// And of what part of its kernels is long: of a small share few looks see any.
const MIX: Duration = Duration::from_secs(10);
/// A device that is at work for so much of the time, in nanoseconds a second, has nothing left.
const FULL: u64 = SECOND / 100 * 97;
/// What looks lack by no more than chance, of the device's time: a kernel that began before one ends in it. So where kernels
/// are cut for less they tell little of how much.
const LUMPS: f64 = 0.02;
/// This part of what is believed of kernels that are cut is kept there for each [`HALF`].
const KEPT: f64 = 0.8;
/// A rate is larger and smaller by so much of it, where its kernels are cut. In a look two shares of 30 % whose kernels take 10 ms then pass each other
/// a few times; with a quarter of that they were in step, or out of it, for seconds, of which the one that is over was made up for.
const STEP: f64 = 0.12;

/// What is known of the shares of an instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Cuts {
    shares: BTreeMap<Key, Known>,
    /// Seconds, and for how many of them the instance was at work; those longer ago count for less.
    time: f64,
    busy: f64,
    /// How many times as much as by chance kernels are cut, where none is long.
    times: f64,
    looks: usize,
}

/// Of a share: by what factor its kernels look longer, from 1 on, and seconds, those longer ago counting for less.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Known {
    trim: f64,
    /// For which it was charged, and had long kernels under way, by [`MIX`].
    charged: f64,
    long: f64,
    /// For which it had kernels under way, and would have had them if none were cut, by [`HALF`].
    under_way: f64,
    wish: f64,
}

/// What a share was charged in the time since the last look, what of it is for kernels that look longer where they
/// are cut, what more it may have had, and what it is to have at most; nanoseconds a second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) charged: u64,
    pub(super) long: u64,
    pub(super) spared: u64,
    pub(super) ceiling: u64,
}

impl Cuts {
    /// By what factor the kernels of a share look longer.
    pub(super) fn trim(&self, share: &Key) -> f64 {
        self.shares.get(share).map_or(1.0, |known| known.trim)
    }

    /// After a time in which the instance had so much, in nanoseconds a second; in doubt all kernels are charged what they look like.
    pub(super) fn after(
        mut self,
        busy: u64,
        parts: &[(Key, Part)],
        since: Duration,
        is_doubted: bool,
    ) -> Self {
        // Of shares beside which others work now, what was before says nothing.
        let is_known = |(share, _): &(Key, Part)| self.shares.contains_key(share);
        let is_first = self.shares.len() != parts.len() || !parts.iter().all(is_known);
        if is_first {
            self = Self::default();
        }
        let kept = kept(since, HALF);
        self.time = self.time * kept + since.as_secs_f64();
        self.busy = self.busy * kept + seconds(busy, since);
        let shares: Vec<Known> = parts.iter().map(|(share, part)| self.lately(share, part, since)).collect();
        let by_time =
            |of: fn(&Known) -> f64| shares.iter().map(|share| of(share) / self.time).collect::<Vec<f64>>();
        let (under_way, wishes) = (by_time(|share| share.under_way), by_time(|share| share.wish));
        let had = turns::had(&under_way);
        let cut = |at: usize| under_way[at] * (1.0 - had[at]);
        let by_chance = |long: &[f64]| (0..long.len()).map(|at| long[at] * cut(at)).sum::<f64>();
        let long: Vec<f64> = shares.iter().map(Known::part).collect();
        // Where none is long what is missing is of the others.
        let are_all = is_doubted || by_chance(&long) < LEAST_CUT;
        if are_all && is_first {
            // Kernels are charged a guess until they were measured: what that is too much is missing once.
            let nothing = |known: Known| Known { under_way: 0.0, wish: 0.0, ..known };
            let known = parts.iter().zip(shares).map(|((share, _), known)| (share.clone(), nothing(known)));
            return Self { shares: known.collect(), ..Self::default() };
        }
        let long = if are_all { vec![1.0; parts.len()] } else { long };
        let missing = under_way.iter().sum::<f64>() - self.busy / self.time;
        let most = parts.len() as f64;
        let times = if are_all {
            // Of a device that has nothing left what is missing is no reason to raise rates.
            let falls = self.times * KEPT.powf(since.as_secs_f64() / HALF.as_secs_f64());
            let most = if busy < FULL || is_doubted { most } else { falls };
            self.times = times(missing, by_chance(&long), LEAST_CUT).clamp(0.0, most);
            self.times
        } else {
            times(missing, by_chance(&long), LUMPS).clamp(0.0, 1.0)
        };
        // Short ones come too often to be in step.
        let step = if are_all { 0.0 } else { STEP };
        self.looks = self.looks.wrapping_add(1);
        let wished = turns::had_of_parts(&wishes);
        let trim = |at: usize| {
            let ((share, part), known) = (&parts[at], shares[at]);
            // Who had next to nothing tells nothing.
            if part.charged < QUANTUM {
                return (share.clone(), known);
            }
            let place = ((at + self.looks) % parts.len()) as f64 / (most - 1.0).max(1.0);
            let step = step * (2.0 * place - 1.0) * times * long[at] * (1.0 - wishes[at]).max(0.0);
            let left = 1.0 - times * long[at] * (1.0 - wished[at]);
            (share.clone(), Known { trim: ((1.0 + step) / left.max(1.0 / most)).clamp(1.0, most), ..known })
        };
        self.shares = (0..parts.len()).map(trim).collect();
        self
    }

    /// What was known of a share, with what it said since.
    fn lately(&self, share: &Key, part: &Part, since: Duration) -> Known {
        let nothing = Known { trim: 1.0, charged: 0.0, long: 0.0, under_way: 0.0, wish: 0.0 };
        let before = self.shares.get(share).copied().unwrap_or(nothing);
        let (charged, long) = (seconds(part.charged, since), seconds(part.long.min(SECOND), since));
        let mix = kept(since, MIX);
        let known =
            Known { charged: before.charged * mix + charged, long: before.long * mix + long, ..before };
        let under_way = (long + charged * (1.0 - known.long_part())).min(since.as_secs_f64());
        let kept = kept(since, HALF);
        Known {
            under_way: before.under_way * kept + under_way,
            // Launches that began together looked long once, and are no more than it may have.
            wish: before.wish * kept + (under_way / before.trim).min(seconds(part.ceiling, since)),
            ..known
        }
    }
}

impl Known {
    /// The part of what it was charged that is for long kernels.
    fn long_part(&self) -> f64 {
        if self.charged > 0.0 { (self.long / self.charged).min(1.0) } else { 0.0 }
    }

    /// And for those that count as such.
    fn part(&self) -> f64 {
        (2.0 * self.long_part()).min(1.0)
    }
}

/// What of something is left after so long, if after that time it is a half.
pub(super) fn kept(since: Duration, half: Duration) -> f64 {
    0.5_f64.powf(since.as_secs_f64() / half.as_secs_f64())
}

/// How many times as much as by chance kernels are cut, if that much of the device's time is missing; so much is expected to be
/// by chance alone.
fn times(missing: f64, by_chance: f64, expected: f64) -> f64 {
    (missing + expected) / (by_chance + expected)
}

/// Of that time, at so many nanoseconds a second.
fn seconds(rate: u64, since: Duration) -> f64 {
    rate as f64 / SECOND as f64 * since.as_secs_f64()
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::arbiter::POINT;
    use super::*;
    use proptest::prelude::*;

    /// That was charged so many points, of which so many for long kernels.
    pub(in super::super) fn part(charged: u64, long: u64) -> Part {
        Part { charged: charged * POINT, long: long * POINT, spared: 0, ceiling: SECOND }
    }

    pub(in super::super) fn key(number: usize) -> Key {
        (format!("c{number}").into(), "0".into())
    }

    /// What is known after so many looks of a second that all say the same.
    fn after_looks(before: Cuts, looks: usize, busy: u64, parts: &[Part]) -> Cuts {
        let parts: Vec<_> = parts.iter().enumerate().map(|(number, part)| (key(number), *part)).collect();
        (0..looks).fold(before, |cuts, _| cuts.after(busy * POINT, &parts, Duration::from_secs(1), false))
    }

    /// The trims after as many more such looks as there are shares, on the mean: each has had all steps then.
    fn mean_trims(mut cuts: Cuts, busy: u64, parts: &[Part]) -> Vec<f64> {
        let mut sums = vec![0.0; parts.len()];
        for _ in parts {
            cuts = after_looks(cuts, 1, busy, parts);
            sums.iter_mut().enumerate().for_each(|(at, sum)| *sum += cuts.trim(&key(at)));
        }
        sums.into_iter().map(|sum| sum / parts.len() as f64).collect()
    }

    #[test]
    fn what_the_instance_did_not_have_is_missing_to_those_whose_kernels_are_cut() {
        let check = |busy: u64, parts: &[Part], expected: &[f64]| {
            let trims = mean_trims(after_looks(Cuts::default(), 20, busy, parts), busy, parts);
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
        // Who has more neighbours loses more.
        let parts = [part(30, 30), part(30, 0), part(20, 20)];
        let trims = mean_trims(after_looks(Cuts::default(), 20, 70, &parts), 70, &parts);
        assert!(trims[2] > trims[0] + 0.02 && trims[0] > 1.2 && trims[1] < 1.01, "{trims:?}");
    }

    #[test]
    fn where_a_device_has_nothing_left_short_kernels_are_no_reason_to_raise_rates() {
        let after = |before: Cuts, busy: u64, long: u64| {
            let parts = [(key(0), part(30, long)), (key(1), part(75, 0))];
            let look = |cuts: Cuts, _| cuts.after(busy * POINT, &parts, Duration::from_secs(1), false);
            (0..40).fold(before, look)
        };
        let raised = after(Cuts::default(), 90, 0);
        let check = |cuts: &Cuts, is_raised: bool| {
            assert_eq!(cuts.trim(&key(0)) > 1.01, is_raised, "{cuts:?}");
        };
        check(&raised, true);
        check(&after(Cuts::default(), 99, 30), true);
        check(&after(Cuts::default(), 99, 0), false);
        // What was found before that is forgotten.
        check(&after(raised, 99, 0), false);
        // One kernel looked long: of the others nothing follows.
        let looks_long = Part { long: POINT / 4, ..part(10, 0) };
        let mut cuts = after_looks(Cuts::default(), 1, 99, &[looks_long, part(90, 0)]);
        assert!(cuts.trim(&key(0)) > 1.01, "it is long: {cuts:?}");
        for _ in 0..5 {
            cuts = after_looks(cuts, 1, 99, &[part(10, 0), part(90, 0)]);
            assert!(cuts.trim(&key(0)) < 1.05, "{cuts:?}");
        }
    }

    #[test]
    fn a_guess_at_what_kernels_take_leaves_nobody_more_than_it_is_to_have() {
        let parts = [part(30, 0), part(30, 0), part(30, 0)];
        let look = |cuts: Cuts, busy: u64| after_looks(cuts, 1, busy, &parts);
        // Before they were measured the library charged a third too much.
        let cuts = look(look(Cuts::default(), 60), 90);
        assert!(cuts.trim(&key(0)) < 1.01, "{cuts:?}");
        // Had it been believed, a device that is full by that would say at once that nothing is missing.
        let raised = look(look(look(Cuts::default(), 90), 60), 60);
        assert!(raised.trim(&key(0)) > 1.2, "{raised:?}");
        let full = [part(33, 0), part(33, 0), part(33, 0)];
        let cuts = after_looks(raised, 3, 99, &full);
        assert!(cuts.trim(&key(0)) < 1.1, "{cuts:?}");
    }

    #[test]
    fn kernels_that_end_in_another_look_than_they_are_paid_in_are_as_long() {
        let after = |longs: [u64; 2]| {
            let look = |cuts: Cuts, number: usize| {
                let parts = [(key(0), part(10, longs[number % 2])), (key(1), part(60, 60))];
                cuts.after(60 * POINT, &parts, Duration::from_secs(1), false)
            };
            let (before, after) = ((0..39).fold(Cuts::default(), look), (0..40).fold(Cuts::default(), look));
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
    fn nobody_makes_room_for_more_than_another_may_have() {
        let trim_beside = |ceiling: u64| {
            let small = Part { ceiling: ceiling * POINT, ..part(30, 30) };
            after_looks(Cuts::default(), 1, 70, &[small, part(60, 60)]).trim(&key(1))
        };
        assert!(trim_beside(1) < 1.03 && trim_beside(30) > 1.15, "{} {}", trim_beside(1), trim_beside(30));
    }

    #[test]
    fn rates_are_raised_within_a_few_looks_until_nothing_is_missing_and_stay_there() {
        // They meet so many times as often as by chance.
        let check = |asked: [f64; 2], times: f64| {
            let (mut cuts, mut before) = (Cuts::default(), asked);
            for look in 0..30 {
                let charged = [0, 1].map(|at| (asked[at] * cuts.trim(&key(at))).min(100.0));
                let parts_had = turns::had(&charged.map(|charged| charged / 100.0));
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
    fn shares_whose_kernels_come_equally_often_do_not_stay_in_step() {
        let parts = [part(45, 45), part(45, 45), part(20, 20)];
        let mut cuts = after_looks(Cuts::default(), 20, 75, &parts);
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
        fn whatever_shares_say_no_kernel_is_cut_by_more_than_each_of_the_others(
            looks in proptest::collection::vec(
                (
                    any::<u64>(),
                    proptest::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 1..6),
                    any::<Duration>(),
                    any::<bool>(),
                ),
                1..10,
            ),
        ) {
            let mut cuts = Cuts::default();
            for (busy, parts, since, is_doubted) in looks {
                let part = |(number, (charged, long, ceiling))| (key(number), Part { charged, long, spared: 0, ceiling });
                let parts: Vec<_> = parts.into_iter().enumerate().map(part).collect();
                cuts = cuts.after(busy, &parts, since, is_doubted);
                let most = parts.len() as f64 + 1e-9;
                prop_assert!(parts.iter().all(|(share, _)| (1.0 - 1e-9..=most).contains(&cuts.trim(share))), "{:?}", cuts);
            }
        }
    }
}
