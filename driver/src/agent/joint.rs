//! What several shares of a MIG instance had together, held against what each says that it had.
//!
//! NVML knows how much of its time an instance was at work (Hopper and later), and not by whose processes. Where
//! several shares have parts of it two things follow from that all the same.
//!
//! **Whether their words can be true.** A kernel that neighbours cut is charged what its fastest launches take, since
//! the node makes up for what that leaves out ([`super::arbiter`]). Here it cannot. So that holds as long as what the
//! shares say explains what the instance had. Where it does not, all counts that launches were measured to take, for
//! [`DOUBT`] at first and each time twice as long: then each share has its part at most, and less where its kernels are
//! cut. What is not explained even then is somebody's who is not paced. Nobody can say whose, so nobody is ended; it is
//! told of all of them ([`over_time`]). And the doubt is over, as it would leave the honest ones less beside that one.
//!
//! **How much longer kernels look than they are.** Those longer than a time slice look longer where neighbours cut in,
//! so what shares say is more than the instance had. What is missing they lack who had such kernels, which their
//! libraries tell: while kernels of two are under way each has half of that time, of three a third. How often that is
//! follows from how much of the time each has one under way, if they come as chance has it ([`losses`]); that they do
//! not quite is the same for all. Each rate is raised by what its share lacks. Who claims what it did not lose takes
//! from what others would get back, and never more than is idle.

use super::arbiter::{POINT, QUANTUM, SECOND};
use super::bell::Key;
use super::finding::{Finding, Kind};
use super::judge::about;
use super::look::{Device, Look, Share};
use super::meter::Metered;
use divvy_pages::GpuUuid;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// By the UUID of the MIG device.
pub(super) type Memory = BTreeMap<GpuUuid, Joint>;

/// For so long the words of shares are not taken that were no explanation, and at most.
const DOUBT: Duration = Duration::from_secs(30);
const LONGEST: Duration = Duration::from_secs(1800);
/// The instance may have had a part of so many more than they say, and a point.
const SLACK: u64 = 20;
/// And beyond that so much in all, in nanoseconds: kernels are charged a guess until they were measured, and what that lacked later.
const UNTOLD: u64 = SECOND / 5;
/// So much of it in doubt is no guess any more.
const TOO_MUCH: u64 = SECOND / 2;

/// What is known of the shares of an instance.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Joint {
    /// By what factor the kernels of each look longer, from 1 on.
    trims: BTreeMap<Key, f64>,
    /// Nanoseconds that the instance had and nobody has explained, and whether that was [`TOO_MUCH`] in doubt and goes on; and what both
    /// were in the last look, in nanoseconds a second.
    untold: u64,
    is_dark: bool,
    had: (u64, u64),
    doubted_until: Option<Instant>,
    lasts: Duration,
}

impl Default for Joint {
    fn default() -> Self {
        Self {
            trims: BTreeMap::new(),
            untold: 0,
            is_dark: false,
            had: (0, 0),
            doubted_until: None,
            lasts: DOUBT,
        }
    }
}

/// What a share was charged in the time since the last look, and what of it is for kernels that look longer where they
/// are cut; nanoseconds a second.
#[derive(Clone, Copy, Debug)]
struct Part {
    charged: u64,
    long: u64,
}

impl Joint {
    pub(super) fn trim(&self, share: &Key) -> f64 {
        self.trims.get(share).copied().unwrap_or(1.0)
    }

    pub(super) fn is_doubted(&self, now: Instant) -> bool {
        !self.is_dark && self.doubted_until.is_some_and(|until| now < until)
    }

    /// After a look, `since` after the one before, at which the instance had so much.
    fn after(mut self, busy: u64, parts: Vec<(Key, Part)>, since: Duration, now: Instant) -> Self {
        let is_doubted = self.is_doubted(now);
        let said = parts.iter().fold(0_u64, |sum, (_, part)| sum.saturating_add(part.charged));
        let time = |rate: u64| (u128::from(rate) * since.as_nanos() / u128::from(SECOND)) as u64;
        let explained = said.saturating_add(said / SLACK).saturating_add(POINT);
        let untold = self.untold.saturating_add(time(busy)).saturating_sub(time(explained));
        let was_dark = self.is_dark;
        self.is_dark = busy > explained && (was_dark || is_doubted && untold >= TOO_MUCH);
        (self.untold, self.had) = (untold, (busy, said));
        if self.is_dark || was_dark {
            // Once that is over there is nothing left to doubt.
            (self.untold, self.doubted_until) = (0, None);
        } else if self.untold >= UNTOLD && !is_doubted {
            (self.untold, self.doubted_until) = (0, Some(now + self.lasts));
            self.lasts = (self.lasts * 2).min(LONGEST);
        } else if self.doubted_until.is_some_and(|until| now > until + self.lasts) {
            (self.doubted_until, self.lasts) = (None, DOUBT);
        }
        // In doubt all kernels are charged what they look like.
        let all = parts.iter().map(|(_, part)| Part {
            long: if is_doubted { part.charged } else { part.long.min(part.charged) },
            ..*part
        });
        let all: Vec<Part> = all.collect();
        let most = parts.len() as f64;
        let trims =
            parts.into_iter().zip(all.iter().zip(losses(busy, &all))).map(|((share, _), (part, lost))| {
                let before = self.trim(&share);
                let charged = part.charged as f64;
                // Who had next to nothing tells nothing.
                let trim = if part.charged < QUANTUM {
                    before
                } else {
                    charged / (charged - lost).max(charged / most)
                };
                // A kernel is cut by each of the others at most.
                (share, before.midpoint(trim).clamp(1.0, most))
            });
        self.trims = trims.collect();
        self
    }
}

/// What each was charged and has not had, in nanoseconds a second.
fn losses(busy: u64, parts: &[Part]) -> Vec<f64> {
    let said: f64 = parts.iter().map(|part| part.charged as f64).sum();
    let weight = |(at, part): (usize, &Part)| {
        let others = parts.iter().enumerate().filter(|(other, _)| *other != at);
        part.long as f64 * cut(others.map(|(_, part)| part.charged as f64 / SECOND as f64))
    };
    let weights: Vec<f64> = parts.iter().enumerate().map(weight).collect();
    let all: f64 = weights.iter().sum();
    let lost = (said - busy as f64).max(0.0);
    weights.iter().map(|weight| if all > 0.0 { lost * weight / all } else { 0.0 }).collect()
}

/// What a kernel loses of its time to others that have one under way with these chances: with N of them N parts of N + 1.
fn cut(others: impl Iterator<Item = f64>) -> f64 {
    // How likely it is that none of them has, one, two.
    let mut chances = vec![1.0];
    for other in others {
        let other = other.min(1.0);
        chances.push(0.0);
        for count in (0..chances.len()).rev() {
            let one_less = count.checked_sub(1).map_or(0.0, |less| chances[less]);
            chances[count] = chances[count] * (1.0 - other) + one_less * other;
        }
    }
    (0..).zip(&chances).map(|(count, chance)| f64::from(count) / f64::from(count + 1) * chance).sum()
}

/// After a look, of the instances whose time is known and of which several shares have parts; `since` is the time since the one
/// before.
pub(super) fn join(
    look: &Look,
    metered: &[Metered],
    since: Option<Duration>,
    before: &Memory,
    now: Instant,
) -> Memory {
    let mut parts: BTreeMap<GpuUuid, Vec<Option<(Key, Part)>>> = BTreeMap::new();
    for (share, metered) in look.shares.iter().zip(metered).filter(|(_, metered)| metered.busy.is_none()) {
        let Some(mig) = share.policy.mig else { continue };
        // Nothing is known of who has just come, nor of what those said who are gone.
        let part = metered.said.filter(|_| metered.is_steady).map(|(charged, _)| {
            // A share has no more than the instance, in whatever streams.
            (share.key(), Part { charged: charged.min(SECOND), long: metered.long })
        });
        parts.entry(mig).or_default().push(part);
    }
    let joint = |(mig, parts): (GpuUuid, Vec<Option<(Key, Part)>>)| {
        let before = before.get(&mig).cloned();
        let parts: Option<Vec<_>> = parts.into_iter().collect();
        let known = look.busy.get(&mig).zip(since).zip(parts);
        Some((
            mig,
            match (before, known) {
                (Some(before), Some(((busy, since), parts))) => before.after(*busy, parts, since, now),
                // Up to now they need not have been paced, and said nothing.
                (None, Some(_)) => Joint::default(),
                (before, None) => before?,
            },
        ))
    };
    parts.into_iter().filter_map(joint).collect()
}

/// What is to be told of the shares of instances on which somebody is not paced. Nothing where a process is on the instance that is
/// none of theirs: it may be that one.
pub(super) fn over_time(look: &Look, joint: &Memory) -> Vec<Finding> {
    let is_of_shares = |device: &Device| {
        let processes = look.uses.iter().filter(|usage| usage.device == *device);
        let mut known = processes.filter_map(|usage| look.processes.get(&usage.pid));
        known.all(|process| !look.shares_of(process).is_empty())
    };
    let tell = |share: &Share| {
        let joint = joint.get(&share.policy.mig?).filter(|joint| joint.is_dark)?;
        let (had, said) = (joint.had.0 / POINT, joint.had.1 / POINT);
        let text = format!(
            "the shares of the claim's MIG instance had {had} % of its time together in the last second, where their processes say {said} %: one of them is not paced"
        );
        let finding = Finding { certain: true, ..about(share, Kind::OverTime, None, text) };
        is_of_shares(&share.device()).then_some(finding)
    };
    look.shares.iter().filter_map(tell).collect()
}

#[cfg(test)]
mod tests {
    use super::super::judge::tests::{CONTEXT, Scene};
    use super::*;

    /// That was charged so many points, of which so many for long kernels.
    fn part(charged: u64, long: u64) -> Part {
        Part { charged: charged * POINT, long: long * POINT }
    }

    fn key(number: usize) -> Key {
        (format!("c{number}").into(), "0".into())
    }

    /// Looks a second apart at which the instance had so many points.
    fn after(looks: &[(u64, Vec<Part>)]) -> (Joint, Instant) {
        let mut now = Instant::now();
        let mut joint = Joint::default();
        for (busy, parts) in looks {
            now += Duration::from_secs(1);
            let parts = parts.iter().enumerate().map(|(number, part)| (key(number), *part)).collect();
            joint = joint.after(busy * POINT, parts, Duration::from_secs(1), now);
        }
        (joint, now)
    }

    #[test]
    fn what_the_instance_did_not_have_is_missing_to_those_whose_kernels_are_cut() {
        let check = |busy: u64, parts: &[Part], expected: &[f64]| {
            let (joint, _) = after(&vec![(busy, parts.to_vec()); 20]);
            for (number, expected) in expected.iter().enumerate() {
                let trim = joint.trim(&key(number));
                assert!((trim - expected).abs() < 0.01, "{trim} {busy} {parts:?}");
            }
        };
        check(80, &[part(30, 0), part(50, 0)], &[1.0, 1.0]);
        check(79, &[part(30, 0), part(50, 0)], &[1.0, 1.0]);
        // Both lose the same.
        check(60, &[part(30, 30), part(50, 50)], &[1.5, 1.25]);
        check(70, &[part(30, 0), part(50, 50)], &[1.0, 1.25]);
        check(70, &[part(30, 30), part(50, 50), part(0, 0)], &[1.2, 50.0 / 45.0, 1.0]);
        // As often as there are shares, at most; by their own word, which may be anything.
        check(1, &[part(30, 30), part(50, u64::MAX / POINT)], &[2.0, 2.0]);
        // Who has more neighbours loses more.
        check(70, &[part(30, 30), part(30, 0), part(20, 20)], &[1.227, 1.0, 1.286]);
    }

    #[test]
    fn rates_that_are_raised_by_what_is_missing_come_to_rest_where_nothing_is() {
        // Kernels of two are under way at random: each loses half of the time in which both are.
        let rates = |asked: [f64; 2]| {
            let (mut joint, mut had) = (Joint::default(), [0.0; 2]);
            for _ in 0..30 {
                let charged = [0, 1].map(|at| (asked[at] * joint.trim(&key(at))).min(100.0));
                let lost = charged[0] * charged[1] / 200.0;
                had = charged.map(|charged| charged - lost);
                let parts = charged.map(|charged| part(charged as u64, charged as u64));
                let parts = parts.into_iter().enumerate().map(|(at, part)| (key(at), part)).collect();
                let busy = ((had[0] + had[1]) * POINT as f64) as u64;
                joint = joint.after(busy, parts, Duration::from_secs(1), Instant::now());
            }
            had
        };
        for asked in [[30.0, 50.0], [10.0, 80.0], [45.0, 45.0]] {
            let had = rates(asked);
            assert!((0..2).all(|at| (had[at] - asked[at]).abs() < 2.0), "{had:?} of {asked:?}");
        }
    }

    #[test]
    fn words_that_do_not_explain_what_the_instance_had_are_not_taken_for_a_while_and_then_longer() {
        let odd = (90, vec![part(30, 0), part(50, 0)]);
        let even = (80, odd.1.clone());
        let check = |looks: &[&(u64, Vec<Part>)], expected: Option<u64>| {
            let (joint, now) = after(&looks.iter().copied().cloned().collect::<Vec<_>>());
            let until = joint.doubted_until.map(|until| until.saturating_duration_since(now).as_secs());
            assert_eq!(until, expected, "{joint:?}");
            assert_eq!(joint.is_doubted(now), expected.is_some_and(|until| until > 0));
        };
        check(&[&odd; 3], None);
        // What was not measured at once.
        check(&[&odd, &odd, &odd, &even, &odd], None);
        check(&[&odd; 4], Some(30));
        check(&[&[&odd; 4][..], &[&even; 31], &[&odd; 4]].concat(), Some(60));
        check(&[&[&odd; 4][..], &[&even; 45]].concat(), Some(0));
        // It was forgotten.
        check(&[&[&odd; 4][..], &[&even; 95]].concat(), None);
    }

    #[test]
    fn in_doubt_whatever_is_missing_is_of_kernels_that_are_cut() {
        let odd = (90, vec![part(30, 0), part(50, 0)]);
        let (joint, _) = after(&[vec![odd.clone(); 4], vec![(60, odd.1); 20]].concat());
        assert!((joint.trim(&key(0)) - 1.5).abs() < 0.01, "{joint:?}");
    }

    #[test]
    fn what_nobody_explains_in_doubt_is_told_of_all_and_as_long_as_it_goes_on() {
        const MIG: GpuUuid = GpuUuid([7; 16]);
        let odd = (90, vec![part(30, 0), part(10, 0)]);
        let even = (40, odd.1.clone());
        let check = |looks: &[&(u64, Vec<Part>)], stranger: bool, expected: &[&str]| {
            let (joint, _) = after(&looks.iter().copied().cloned().collect::<Vec<_>>());
            let mut scene = Scene::share(10_000);
            scene.second_share(10_000).process(7).has(CONTEXT).slot(7, CONTEXT);
            if stranger {
                scene.process(9).elsewhere_cgroup().sees("").has(20);
            }
            let mut look = scene.look();
            look.shares.iter_mut().for_each(|share| share.policy.mig = Some(MIG));
            look.uses.iter_mut().for_each(|usage| usage.device.mig = Some(MIG));
            let found = over_time(&look, &[(MIG, joint)].into());
            assert!(found.iter().all(|finding| finding.process.is_none() && finding.certain));
            assert_eq!(found.len(), expected.len(), "{found:?}");
            for (finding, expected) in found.iter().zip(expected) {
                assert!(finding.text.contains(expected), "{finding}");
            }
        };
        let both = &["90 % of its time together in the last second, where their processes say 40 %"; 2];
        check(&[&odd; 2], false, &[]);
        check(&[&odd; 4], false, both);
        check(&[&odd; 5], false, both);
        check(&[&odd; 5], true, &[]);
        check(&[&odd, &odd, &odd, &odd, &even], false, &[]);
        check(&[&even; 9], false, &[]);
    }

    #[test]
    fn who_was_not_paced_yet_has_just_come_or_is_gone_is_held_against_nobody() {
        const MIG: GpuUuid = GpuUuid([7; 16]);
        let mut scene = Scene::share(10_000);
        scene.second_share(10_000);
        let mut look = scene.look();
        look.shares.iter_mut().for_each(|share| share.policy.mig = Some(MIG));
        look.busy = [(MIG, SECOND)].into();
        let since = Some(Duration::from_secs(4));
        let says = |is_steady| Metered { said: Some((10 * POINT, 0)), is_steady, ..Metered::default() };
        let join =
            |all: [Metered; 2], before: &Memory| super::join(&look, &all, since, before, Instant::now());
        let nobody = Memory::new();
        assert_eq!(join([says(true), Metered::default()], &nobody), nobody);
        let first = join([says(true); 2], &nobody);
        assert_eq!(first, [(MIG, Joint::default())].into());
        for unknown in [says(false), Metered::default()] {
            assert_eq!(join([says(true), unknown], &first), first);
        }
        assert!(join([says(true); 2], &first)[&MIG].is_doubted(Instant::now()));
    }
}
