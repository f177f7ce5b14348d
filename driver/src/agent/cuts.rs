//! How much longer kernels of the shares of a MIG instance look than they are: pure.
//!
//! Kernels longer than a time slice look longer where neighbours cut in, and in doubt ([`super::joint`]) all do, so what shares
//! say is more than the instance had. What is missing they lack who had such kernels, which their libraries tell; where
//! nobody had, all. While kernels of two are under way each has half of that time, of three a third. How often that is
//! follows from how much of the time each has one under way, if they come as chance has it ([`cut`]); that they do not
//! quite is the same for all, and is what a look tells.
//!
//! Each rate is raised by what its share lacks; and as shares with larger rates have kernels under way more often, by what
//! they will lack then ([`raised`]): found look by look that would take half a dozen. Chance is no good guess of many that
//! wait for each other, whose rates it would throw from one end to the other, so that is followed no further again than what is
//! lacking now. Who claims what it did not lose takes from what others would get back, and never more than is idle.
//!
//! Of a device that has nothing left nobody has more by larger rates but from others, who wait longer for their turns and look longer by
//! that. So there none are raised for kernels that fit a time slice, and those that were fall by and by; longer ones would leave much of
//! it idle if theirs did.

use super::arbiter::{QUANTUM, SECOND};
use super::bell::Key;
use std::collections::BTreeMap;
use std::time::Duration;

/// Where kernels are cut for less than this part of the time by chance, nothing follows from how much they were.
const LEAST_CUT: f64 = 0.001;
/// Half of what kernels are cut more than was known is believed after so long.
const HALF: Duration = Duration::from_millis(700);
/// A device that is at work for so much of the time, in nanoseconds a second, has nothing left.
const FULL: u64 = SECOND / 100 * 97;
/// Half of what is believed of the part that long kernels are of what a share launches was so long ago: what it pays is of other launches than those that
/// have just ended, and of a small share a look may see either of them alone.
const MIX: Duration = Duration::from_secs(3);
/// What a look lacks by no more than chance, of the device's time: a kernel that began before it is charged in it, all at once. So a
/// look in which kernels are cut for less by chance tells little of how much they are.
const LUMPS: f64 = 0.02;
/// This part of what is believed of kernels that are cut is given up there for each [`HALF`].
const LOST: f64 = 4.0;
/// After so many steps what [`raised`] adds is far less than a point, or as much as it may be.
const STEPS: usize = 32;
/// Where a function is looked at from 0 to 1, and with what weight: Gauss and Legendre's four, which are exact up to x^7, and near enough beyond.
const POINTS: [(f64, f64); 4] = [
    (0.069_431_844_202_973_7, 0.173_927_422_568_726_9),
    (0.330_009_478_207_571_9, 0.326_072_577_431_273_1),
    (0.669_990_521_792_428_1, 0.326_072_577_431_273_1),
    (0.930_568_155_797_026_3, 0.173_927_422_568_726_9),
];

/// What is known of the shares of an instance.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Cuts {
    shares: BTreeMap<Key, Known>,
    /// How many times as much as by chance kernels are cut.
    times: f64,
}

/// Of a share.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Known {
    /// By what factor its kernels look longer, from 1 on.
    trim: f64,
    /// Seconds that it was charged lately, and for kernels that are cut.
    charged: f64,
    long: f64,
}

/// What a share was charged in the time since the last look, what of it is for kernels that look longer where they
/// are cut, and what more it may have had; nanoseconds a second.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) charged: u64,
    pub(super) long: u64,
    pub(super) spared: u64,
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
        let whole = |nanoseconds: u64| nanoseconds as f64 / SECOND as f64;
        let charged: Vec<f64> = parts.iter().map(|(_, part)| whole(part.charged)).collect();
        let cuts = cut(&charged);
        let by_chance = |long: &[f64]| long.iter().zip(&cuts).map(|(long, cut)| long * cut).sum::<f64>();
        let lately: Vec<Known> = parts.iter().map(|(share, part)| self.lately(share, part, since)).collect();
        let long: Vec<f64> =
            charged.iter().zip(&lately).map(|(charged, known)| charged * known.part()).collect();
        // Where none is long what is missing is of the others.
        let are_all = is_doubted || by_chance(&long) < LEAST_CUT;
        let long = if are_all { &charged } else { &long };
        let by_chance = by_chance(long);
        if by_chance > LEAST_CUT {
            let now = (charged.iter().sum::<f64>() - whole(busy)).max(0.0) / by_chance;
            // More is believed by and by: kernels that are new look longest, as their libraries have measured few.
            let believed = believed(since) * by_chance / (by_chance + LUMPS);
            let more = if busy < FULL || is_doubted || !are_all {
                self.times + (now - self.times) * believed
            } else {
                self.times * (1.0 - believed / LOST)
            };
            self.times = now.min(more);
        }
        // Who had next to nothing tells nothing.
        let known = |at: &usize| parts[*at].1.charged >= QUANTUM;
        let wish = |(at, (share, _)): (usize, &(Key, Part))| Wish {
            rate: charged[at] / self.trim(share),
            long: if known(&at) { long[at] / charged[at] } else { 0.0 },
        };
        let wishes: Vec<Wish> = parts.iter().enumerate().map(wish).collect();
        let rates = raised(&wishes, self.times);
        let most = parts.len() as f64;
        let trim = |at: usize| {
            let (share, wish, before) = (&parts[at].0, &wishes[at], lately[at].trim);
            if !known(&at) {
                return (share.clone(), lately[at]);
            }
            // By what is lost now, or as much further again.
            let now = 1.0 / (1.0 - self.times * wish.long * cuts[at]).max(1.0 / most);
            let further = now + (now - before);
            let trim = (rates[at] / wish.rate).clamp(now.min(further), now.max(further));
            (share.clone(), Known { trim: trim.clamp(1.0, most), ..lately[at] })
        };
        let shares = (0..parts.len()).map(trim).collect();
        Self { shares, ..self }
    }

    /// What was known of a share, with what it was charged since.
    fn lately(&self, share: &Key, part: &Part, since: Duration) -> Known {
        let before = self.shares.get(share).copied().unwrap_or(Known { trim: 1.0, charged: 0.0, long: 0.0 });
        let kept = 0.5_f64.powf(since.as_secs_f64() / MIX.as_secs_f64());
        let seconds = |rate: u64| rate as f64 / SECOND as f64 * since.as_secs_f64();
        let charged = before.charged * kept + seconds(part.charged);
        Known { charged, long: before.long * kept + seconds(part.long.min(SECOND)), ..before }
    }
}

impl Known {
    /// The part of what it was charged that is for kernels that are cut.
    fn part(&self) -> f64 {
        if self.charged > 0.0 { (self.long / self.charged).min(1.0) } else { 0.0 }
    }
}

/// The part of what a look tells that is believed of a change, so long after the one before.
pub(super) fn believed(since: Duration) -> f64 {
    1.0 - 0.5_f64.powf(since.as_secs_f64() / HALF.as_secs_f64())
}

/// What a share would be charged were no kernel cut, and the part of it that may be; of the instance's time.
#[derive(Clone, Copy, Debug)]
struct Wish {
    rate: f64,
    long: f64,
}

/// What each is to be charged for that, where kernels are cut so many times as much as by chance. A kernel is cut by each of the
/// others at most.
fn raised(wishes: &[Wish], cuts: f64) -> Vec<f64> {
    let mut rates: Vec<f64> = wishes.iter().map(|wish| wish.rate).collect();
    // Each step adds to all of them, and less than the one before.
    for _ in 0..STEPS {
        let raise = |(wish, cut): (&Wish, f64)| {
            wish.rate / (1.0 - cuts * wish.long * cut).max(1.0 / wishes.len() as f64)
        };
        rates = wishes.iter().zip(cut(&rates)).map(raise).collect();
    }
    rates
}

/// What a kernel of each loses of its time to others that have one under way with these chances: with N of them N parts of N + 1.
fn cut(rates: &[f64]) -> Vec<f64> {
    // The mean of 1 / (N + 1) is the integral of that of x^N from 0 to 1, and this the product of one factor for each of the others:
    // 1 where it has none under way, x where it has.
    let mut left = vec![0.0; rates.len()];
    for (x, weight) in POINTS {
        let factor = |rate: &f64| 1.0 - rate.min(1.0) * (1.0 - x);
        let all: f64 = rates.iter().map(factor).product();
        left.iter_mut().zip(rates).for_each(|(left, rate)| *left += weight * all / factor(rate));
    }
    left.iter().map(|left| 1.0 - left).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::arbiter::POINT;
    use super::*;
    use proptest::prelude::*;

    /// That was charged so many points, of which so many for long kernels.
    pub(in super::super) fn part(charged: u64, long: u64) -> Part {
        Part { charged: charged * POINT, long: long * POINT, spared: 0 }
    }

    pub(in super::super) fn key(number: usize) -> Key {
        (format!("c{number}").into(), "0".into())
    }

    #[test]
    fn what_the_instance_did_not_have_is_missing_to_those_whose_kernels_are_cut() {
        let check = |busy: u64, parts: &[Part], expected: &[f64]| {
            let parts: Vec<_> = parts.iter().enumerate().map(|(number, part)| (key(number), *part)).collect();
            let after = |cuts: Cuts, _| cuts.after(busy * POINT, &parts, Duration::from_secs(1), false);
            let cuts = (0..20).fold(Cuts::default(), after);
            for (number, expected) in expected.iter().enumerate() {
                let trim = cuts.trim(&key(number));
                assert!((trim - expected).abs() < 0.01, "{trim} {busy} {parts:?}");
            }
        };
        check(80, &[part(30, 0), part(50, 0)], &[1.0, 1.0]);
        check(90, &[part(30, 0), part(50, 0)], &[1.0, 1.0]);
        // Both lose the same.
        check(60, &[part(30, 30), part(50, 50)], &[1.5, 1.25]);
        check(70, &[part(30, 0), part(50, 50)], &[1.0, 1.25]);
        check(60, &[part(30, 0), part(50, 0)], &[1.5, 1.25]);
        check(70, &[part(30, 30), part(50, 50), part(0, 0)], &[1.2, 50.0 / 45.0, 1.0]);
        // As often as there are shares, at most; by their own word, which may be anything.
        check(1, &[part(30, 30), part(50, u64::MAX / POINT)], &[2.0, 2.0]);
        // Who has more neighbours loses more.
        check(70, &[part(30, 30), part(30, 0), part(20, 20)], &[1.227, 1.0, 1.286]);
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
    }

    #[test]
    fn kernels_that_end_in_another_look_than_they_are_paid_in_are_as_long() {
        let after = |longs: [u64; 2]| {
            let look = |cuts: Cuts, number: usize| {
                let parts = [(key(0), part(10, longs[number % 2])), (key(1), part(60, 60))];
                cuts.after(60 * POINT, &parts, Duration::from_secs(1), false)
            };
            (0..40).fold(Cuts::default(), look).trim(&key(0))
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
    fn rates_are_raised_within_a_few_looks_until_nothing_is_missing_and_stay_there() {
        // Kernels of two are under way so much more often than by chance: each loses half of the time in which both are.
        let check = |asked: [f64; 2], times: f64| {
            let mut cuts = Cuts::default();
            for look in 0..30 {
                let charged = [0, 1].map(|at| (asked[at] * cuts.trim(&key(at))).min(100.0));
                let lost = charged[0] * charged[1] / 200.0 * times;
                let had = charged.map(|charged| charged - lost);
                let are_right = (0..2).all(|at| (had[at] - asked[at]).abs() < 1.0);
                assert!(look < 8 || are_right, "{had:?} of {asked:?} after {look} looks");
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
        check([30.0, 30.0], 1.5);
    }

    #[test]
    fn with_some_others_under_way_a_kernel_has_its_part_of_the_time() {
        let check = |others: &[f64], expected: f64| {
            let cut = cut(&[&[0.5], others].concat())[0];
            assert!((cut - expected).abs() < 3e-3, "{cut} of {others:?}");
        };
        check(&[], 0.0);
        check(&[0.3], 0.15);
        check(&[1.0, 1.0], 2.0 / 3.0);
        check(&[0.5, 0.5], 0.5 / 2.0 + 0.25 * 2.0 / 3.0);
        check(&[1.0; 7], 7.0 / 8.0);
        check(&[1.0; 15], 15.0 / 16.0);
    }

    proptest! {
        #[test]
        fn whatever_shares_say_no_kernel_is_cut_by_more_than_each_of_the_others(
            looks in proptest::collection::vec(
                (
                    any::<u64>(),
                    proptest::collection::vec((any::<u64>(), any::<u64>()), 1..6),
                    any::<Duration>(),
                    any::<bool>(),
                ),
                1..10,
            ),
        ) {
            let mut cuts = Cuts::default();
            for (busy, parts, since, is_doubted) in looks {
                let part = |(number, (charged, long))| (key(number), Part { charged, long, spared: 0 });
                let parts: Vec<_> = parts.into_iter().enumerate().map(part).collect();
                cuts = cuts.after(busy, &parts, since, is_doubted);
                let most = parts.len() as f64 + 1e-9;
                prop_assert!(parts.iter().all(|(share, _)| (1.0 - 1e-9..=most).contains(&cuts.trim(share))), "{:?}", cuts);
            }
        }
    }
}
