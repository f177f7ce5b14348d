//! A model of a device that serves several processes in turns.
//!
//! A device that changes to the next process every time slice serves all processes with a kernel
//! under way at once, each at an equal part of its speed. If kernels arrive by chance, the
//! probability of each set of processes is proportional to the product of one number for each, its
//! odds, and to the factorial of their count. This holds for any kernel lengths (processor sharing;
//! Baskett, Chandy, Muntz and Palacios, J. ACM 22, 1975). All functions are pure.

/// Where a function of the time is looked at, and with what weight: Gauss and Laguerre's five,
/// which are exact up to eight others.
const POINTS: [(f64, f64); 5] = [
    (0.263_560_319_718_141, 0.521_755_610_582_808_2),
    (1.413_403_059_106_516_8, 0.398_666_811_083_175_8),
    (3.596_425_771_040_722, 0.075_942_449_681_707_63),
    (7.085_810_005_858_837, 0.003_611_758_679_922_049_3),
    (12.640_800_844_275_782, 0.000_023_369_972_385_776_23),
];
/// Number of steps after which the odds are exact enough.
const STEPS: usize = 32;
/// Maximum part of the time in which a share has a kernel in flight, or the device is busy: above
/// it the odds would diverge.
const MOST: f64 = 0.98;

/// For one process: the weight of all sets of the others, if each set counts once for every order of
/// its members. `with` is the same with this process among them.
#[derive(Clone, Copy, Debug, Default)]
struct Others {
    without: f64,
    with: f64,
}

impl Others {
    /// Its part of the device while it has a kernel in flight.
    fn had(self) -> f64 {
        self.without / self.with
    }
}

fn others(odds: &[f64]) -> Vec<Others> {
    let mut all = vec![Others::default(); odds.len()];
    for (time, weight) in POINTS {
        let product: f64 = odds.iter().map(|odds| 1.0 + odds * time).product::<f64>() * weight;
        for (others, odds) in all.iter_mut().zip(odds) {
            let left = product / (1.0 + odds * time);
            others.without += left;
            others.with += left * time;
        }
    }
    all
}

/// The part of the device that each share has while its kernel is in flight, by the parts of the
/// time in which shares have kernels in flight.
pub(crate) fn had(under_way: &[f64]) -> Vec<f64> {
    let alone = |part: &f64| part.min(MOST) / (1.0 - part.min(MOST));
    let alone: Vec<f64> = under_way.iter().map(alone).collect();
    let mut odds = alone.clone();
    for _ in 0..STEPS {
        let others = others(&odds);
        odds = alone.iter().zip(others).map(|(alone, others)| alone * others.had()).collect();
    }
    others(&odds).into_iter().map(Others::had).collect()
}

/// The same by the parts of the device that shares must get, whatever time they need for them. If
/// the sum is all of the device or more, nearly all is distributed.
pub(crate) fn had_of_parts(parts: &[f64]) -> Vec<f64> {
    let fits = (MOST / parts.iter().sum::<f64>()).min(1.0);
    let idle = 1.0 - parts.iter().sum::<f64>() * fits;
    let alone: Vec<f64> = parts.iter().map(|part| part * fits / idle).collect();
    let mut odds = alone.clone();
    for _ in 0..STEPS {
        // Half of the way, as all are changed at once.
        let nearer = |((odds, alone), others): ((&f64, &f64), Others)| (odds * alone / others.without).sqrt();
        odds = odds.iter().zip(&alone).zip(others(&odds)).map(nearer).collect();
    }
    others(&odds).into_iter().map(Others::had).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(is: &[f64], expected: &[f64]) {
        let are_near = is.iter().zip(expected).all(|(is, expected)| (is - expected).abs() < 2e-3);
        assert!(are_near && is.len() == expected.len(), "{is:?}, not {expected:?}");
    }

    #[test]
    fn active_kernel_gets_its_part_of_the_device() {
        check(&had(&[0.5]), &[1.0]);
        check(&had(&[0.5, 0.0]), &[1.0, 2.0 / 3.0]);
        check(&had(&[1.0; 4]), &[0.255; 4]);
    }

    /// A device that serves all that are there, one after the other for a moment each.
    fn simulated(odds: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let mut state = 1_u64;
        let mut chance = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f64 / (1_u64 << 24) as f64
        };
        // Kernels of mean length 1, which arrive at this rate while there is none.
        let mut there = vec![false; odds.len()];
        let (mut under_way, mut had, mut time) = (vec![0.0; odds.len()], vec![0.0; odds.len()], 0.0);
        for _ in 0..2_000_000 {
            let count = there.iter().filter(|there| **there).count() as f64;
            let rates: Vec<f64> = there
                .iter()
                .zip(odds)
                .map(|(there, odds)| if *there { 1.0 / count } else { *odds })
                .collect();
            let all: f64 = rates.iter().sum();
            let lasts = 1.0 / all;
            time += lasts;
            for at in (0..odds.len()).filter(|at| there[*at]) {
                under_way[at] += lasts;
                had[at] += lasts / count;
            }
            let mut left = chance() * all;
            let next = rates.iter().position(|rate| {
                left -= rate;
                left <= 0.0
            });
            let next = next.unwrap_or(odds.len() - 1);
            there[next] = !there[next];
        }
        let by_time = |sums: Vec<f64>| sums.into_iter().map(|sum| sum / time).collect::<Vec<_>>();
        (by_time(under_way), by_time(had))
    }

    #[test]
    fn model_matches_a_simulated_device() {
        for odds in [vec![0.3, 2.0], vec![0.2, 0.2, 3.0], vec![0.02, 0.5, 0.5, 1.0]] {
            let (under_way, had) = simulated(&odds);
            let near = |is: &[f64], expected: &[f64]| {
                let are_near =
                    is.iter().zip(expected).all(|(is, expected)| (is / expected - 1.0).abs() < 0.02);
                assert!(are_near, "{is:?}, not {expected:?} of {odds:?}");
            };
            let parts: Vec<f64> =
                had.iter().zip(&under_way).map(|(had, under_way)| had / under_way).collect();
            near(&super::had(&under_way), &parts);
            near(&had_of_parts(&had), &parts);
        }
    }

    proptest! {
        #[test]
        fn model_inverts_correctly(
            parts in proptest::collection::vec(0.001..0.4_f64, 1..9),
        ) {
            let sum: f64 = parts.iter().sum();
            let parts: Vec<f64> = parts.iter().map(|part| part * (0.9 / sum).min(1.0)).collect();
            let expected = had_of_parts(&parts);
            let under_way: Vec<f64> = parts.iter().zip(&expected).map(|(part, had)| part / had).collect();
            for (is, expected) in had(&under_way).iter().zip(&expected) {
                prop_assert!((is - expected).abs() < 0.01, "{is}, not {expected}");
            }
        }

        #[test]
        fn every_share_gets_some_part_of_the_device(
            parts in proptest::collection::vec(0.0..=2.0_f64, 1..20),
        ) {
            for had in [had(&parts), had_of_parts(&parts)] {
                prop_assert!(had.iter().all(|had| *had > 0.0 && *had <= 1.0 + 1e-9), "{had:?}");
            }
        }
    }
}
