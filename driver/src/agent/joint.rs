//! What several shares of a device had together, held against what each says that it had.
//!
//! NVML knows how much of its time a MIG instance was at work (Hopper and later), and not by whose processes; nor does it
//! of a GPU whose samples name one process each ([`super::names`]). Where
//! several shares have parts of it two things follow from that all the same.
//!
//! **Whether their words can be true.** A kernel that neighbours cut is charged what its fastest launches take, since
//! the node makes up for what that leaves out ([`super::arbiter`]). Here it cannot. So that holds as long as what the
//! shares say explains what the instance had. Where it does not, all counts that launches were measured to take, for
//! [`DOUBT`] at first and each time twice as long. What is not explained even then is somebody's who is not paced. Nobody can
//! say whose, so nobody is ended; it is told of all of them ([`over_time`]). And the doubt is over, as it would leave the honest
//! ones less beside that one. It is over too when a share is gone that was there when it began: it may have been that one's.
//! What must be explained is the time in which multiprocessors were active, on the mean of them: a device that changes from one process to
//! another is at work for nobody, all of the time if both have many short kernels and pauses. GPUs before Hopper do not
//! tell that, and nothing is doubted there; and of narrow kernels less is seen.
//!
//! **Kernels that vary** are charged less than they had; what shares were spared by that explains what the device had as well, and is charged
//! them as far as it did ([`super::spared`]).
//!
//! **How much longer kernels look than they are** follows from what they say that the instance did not have ([`super::cuts`]).

use super::arbiter::{POINT, SECOND, Terms};
use super::bell::Key;
use super::cuts::{Cuts, Part};
use super::finding::{Finding, Kind};
use super::judge::about;
use super::look::{Device, Look, Share};
use super::meter::Metered;
use super::spared::Spared;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

pub(super) type Memory = BTreeMap<Device, Joint>;

/// For so long the words of shares are not taken that were no explanation, and at most.
const DOUBT: Duration = Duration::from_secs(30);
const LONGEST: Duration = Duration::from_secs(1800);
/// The device may have had a part of so many more than they say, and a point.
const SLACK: u64 = 20;
/// And beyond that so much in all, in nanoseconds: kernels are charged a guess until they were measured, and what that lacked later.
const UNTOLD: u64 = SECOND / 5;
/// So much of it in doubt is no guess any more.
const TOO_MUCH: u64 = SECOND / 2;

/// What is known of the shares of a device.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Joint {
    cuts: Cuts,
    spared: Spared,
    /// Nanoseconds that the device had and nobody has explained, and whether that was [`TOO_MUCH`] in doubt and goes on; and what both
    /// were in the last look, in nanoseconds a second.
    untold: u64,
    is_dark: bool,
    had: (u64, u64),
    doubted_until: Option<Instant>,
    lasts: Duration,
    /// Of whom something was not explained.
    doubted: BTreeSet<Key>,
}

impl Default for Joint {
    fn default() -> Self {
        Self {
            cuts: Cuts::default(),
            spared: Spared::default(),
            untold: 0,
            is_dark: false,
            had: (0, 0),
            doubted_until: None,
            lasts: DOUBT,
            doubted: BTreeSet::new(),
        }
    }
}

impl Joint {
    pub(super) fn trim(&self, share: &Key) -> f64 {
        self.cuts.trim(share) / self.spared.more(share)
    }

    pub(super) fn is_doubted(&self, now: Instant) -> bool {
        !self.is_dark && self.doubted_until.is_some_and(|until| now < until)
    }

    /// After a look, `since` after the one before, at which the device had so much, and its multiprocessors where that is known.
    fn after(
        mut self,
        (busy, active): (u64, Option<u64>),
        parts: Vec<(Key, Part)>,
        since: Duration,
        now: Instant,
    ) -> Self {
        let is_doubted = self.is_doubted(now);
        let was_doubted = now.checked_sub(since).is_some_and(|then| self.is_doubted(then));
        let said = parts
            .iter()
            .fold(0_u64, |sum, (_, part)| sum.saturating_add(part.charged).saturating_add(part.spared));
        let time = |rate: u64| (u128::from(rate) * since.as_nanos() / u128::from(SECOND)) as u64;
        let explained = said.saturating_add(said / SLACK).saturating_add(POINT);
        let spared = self.spared.after(active, &parts, since);
        let active = active.unwrap_or(0);
        let untold = self.untold.saturating_add(time(active)).saturating_sub(time(explained));
        let was_dark = self.is_dark;
        self.is_dark = active > explained && (was_dark || is_doubted && untold >= TOO_MUCH);
        (self.untold, self.had) = (untold, (active, said));
        if self.is_dark || was_dark {
            // Once that is over there is nothing left to doubt.
            (self.untold, self.doubted_until) = (0, None);
        } else if self.untold >= UNTOLD && !is_doubted {
            (self.untold, self.doubted_until) = (0, Some(now + self.lasts));
            self.lasts = (self.lasts * 2).min(LONGEST);
            self.doubted.extend(parts.iter().map(|(share, _)| share.clone()));
        } else if self.doubted_until.is_some_and(|until| now > until + self.lasts) {
            (self.doubted_until, self.lasts) = (None, DOUBT);
            self.doubted.clear();
        }
        // Of kernels that are charged otherwise from now on nothing is known.
        let is_same = self.is_doubted(now) == was_doubted;
        (self.spared, self.cuts) = if is_same {
            let parts = spared.added(parts);
            // What NVML's samples say that it had may be of a time before somebody began.
            (spared, self.cuts.after(busy.max(active), &parts, since, was_doubted))
        } else {
            Default::default()
        };
        self
    }
}

/// After a look, of the devices whose time is known and of which several shares have parts; `since` is the time since the one
/// before, and `due` what each was to have in it, in nanoseconds a second. Of a GPU what is known stays while one of them works alone.
pub(super) fn join(
    look: &Look,
    metered: &[Metered],
    due: impl Fn(&Share, &Metered) -> u64,
    since: Option<Duration>,
    before: &Memory,
    now: Instant,
) -> Memory {
    let mut parts: BTreeMap<Device, Vec<Option<(Key, Part)>>> = BTreeMap::new();
    let there: BTreeSet<(Device, Key)> =
        look.shares.iter().map(|share| (share.device(), share.key())).collect();
    for (share, metered) in look.shares.iter().zip(metered).filter(|(_, metered)| metered.busy.is_none()) {
        // Nothing is known of who has just come, nor of what those said who are gone.
        let part = metered.said.filter(|_| metered.is_steady).map(|(charged, _)| {
            // A share has no more than the instance, in whatever streams.
            let part = Part {
                charged: charged.min(SECOND),
                long: metered.long,
                spared: metered.spared.min(SECOND),
                due: due(share, metered),
                ceiling: Terms::of(share.policy.compute).ceiling,
            };
            (share.key(), part)
        });
        parts.entry(share.device()).or_default().push(part);
    }
    let is_left = |(device, _): &(&Device, &Joint)| {
        let is_whole = device.mig.is_none() && !parts.contains_key(device);
        is_whole && there.iter().any(|(other, _)| other == *device)
    };
    let left: Vec<_> =
        before.iter().filter(is_left).map(|(device, joint)| (*device, joint.clone())).collect();
    let joint = |(device, parts): (Device, Vec<Option<(Key, Part)>>)| {
        let are_there =
            |joint: &&Joint| joint.doubted.iter().all(|share| there.contains(&(device, share.clone())));
        let before = before.get(&device).filter(are_there).cloned();
        let parts: Option<Vec<_>> = parts.into_iter().collect();
        let known = look.busy_of(device).zip(since).zip(parts);
        Some((
            device,
            match (before, known) {
                (Some(before), Some(((busy, since), parts))) => {
                    let active = look.active.get(&device.mig).copied();
                    before.after((busy, active), parts, since, now)
                }
                // Up to now they need not have been paced, and said nothing.
                (None, Some(_)) => Joint::default(),
                (before, None) => before?,
            },
        ))
    };
    parts.into_iter().filter_map(joint).chain(left).collect()
}

/// What is to be told of the shares of devices on which somebody is not paced. Nothing where a process is on the device that is
/// none of theirs: it may be that one.
pub(super) fn over_time(look: &Look, joint: &Memory) -> Vec<Finding> {
    let is_of_shares = |device: &Device| {
        let processes = look.uses.iter().filter(|usage| usage.device == *device);
        let mut known = processes.filter_map(|usage| look.processes.get(&usage.pid));
        known.all(|process| !look.shares_of(process).is_empty())
    };
    let tell = |share: &Share| {
        let joint = joint.get(&share.device()).filter(|joint| joint.is_dark)?;
        let device = if share.policy.mig.is_some() { "MIG instance" } else { "GPU" };
        let (had, said) = (joint.had.0 / POINT, joint.had.1 / POINT);
        let text = format!(
            "the shares of the claim's {device} had {had} % of its time together in the last second, where their processes say {said} %: one of them is not paced"
        );
        let finding = Finding { certain: true, ..about(share, Kind::OverTime, None, text) };
        is_of_shares(&share.device()).then_some(finding)
    };
    look.shares.iter().filter_map(tell).collect()
}

#[cfg(test)]
mod tests {
    use super::super::cuts::tests::{key, part};
    use super::super::judge::tests::{CONTEXT, Scene};
    use super::*;
    use divvy_pages::GpuUuid;

    const MIG: GpuUuid = GpuUuid([7; 16]);
    const DEVICE: Device = Device { gpu: GpuUuid([1; 16]), mig: Some(MIG) };

    /// Looks a second apart at which the device had so many points.
    fn after(looks: &[(u64, Vec<Part>)]) -> (Joint, Instant) {
        let mut now = Instant::now();
        let mut joint = Joint::default();
        for (busy, parts) in looks {
            now += Duration::from_secs(1);
            let parts = parts.iter().enumerate().map(|(number, part)| (key(number), *part)).collect();
            joint = joint.after((busy * POINT, Some(busy * POINT)), parts, Duration::from_secs(1), now);
        }
        (joint, now)
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
    fn a_device_that_is_at_work_for_nobody_and_one_that_tells_less_are_no_reason_to_doubt() {
        for active in [Some(40 * POINT), None] {
            let mut joint = Joint::default();
            let mut now = Instant::now();
            for _ in 0..60 {
                now += Duration::from_secs(1);
                let parts = [(key(0), part(24, 0)), (key(1), part(17, 0))].into();
                joint = joint.after((SECOND, active), parts, Duration::from_secs(1), now);
                assert!(!joint.is_doubted(now) && !joint.is_dark, "{joint:?}");
            }
            assert!((joint.trim(&key(0)) - 1.0).abs() < 1e-9);
        }
    }

    #[test]
    fn what_shares_were_spared_explains_as_much_and_makes_their_rates_smaller() {
        let spares =
            |spared: u64| [part(30, 0), part(50, 0)].map(|part| Part { spared: spared * POINT, ..part });
        let check = |active: u64, spared: u64, is_doubted: bool, trim: f64| {
            let (joint, _) = after(&vec![(active, spares(spared).into()); 9]);
            assert_eq!(joint.lasts > DOUBT, is_doubted, "{joint:?}");
            assert!((joint.trim(&key(1)) - trim).abs() < 0.01, "{} {joint:?}", joint.trim(&key(1)));
        };
        check(96, 0, true, 1.0);
        check(96, 10, false, 80.0 / 96.0);
        check(80, 10, false, 1.0);
        check(64, 10, false, 1.20);
    }

    #[test]
    fn in_doubt_whatever_is_missing_is_of_kernels_that_are_cut() {
        let odd = (90, vec![part(30, 0), part(50, 0)]);
        let (joint, _) = after(&[vec![odd.clone(); 4], vec![(60, odd.1); 20]].concat());
        assert!((joint.trim(&key(0)) - 1.5).abs() < 0.01, "{joint:?}");
    }

    #[test]
    fn what_nobody_explains_in_doubt_is_told_of_all_and_as_long_as_it_goes_on() {
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
            let found = over_time(&look, &[(DEVICE, joint)].into());
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
        let mut scene = Scene::share(10_000);
        scene.second_share(10_000);
        let mut look = scene.look();
        look.shares.iter_mut().for_each(|share| share.policy.mig = Some(MIG));
        (look.busy, look.active) = ([(MIG, SECOND)].into(), [(Some(MIG), SECOND)].into());
        let since = Some(Duration::from_secs(4));
        let says = |is_steady| Metered { said: Some((10 * POINT, 0)), is_steady, ..Metered::default() };
        let join = |all: [Metered; 2], before: &Memory| {
            super::join(&look, &all, |_, _| 0, since, before, Instant::now())
        };
        let nobody = Memory::new();
        assert_eq!(join([says(true), Metered::default()], &nobody), nobody);
        let first = join([says(true); 2], &nobody);
        assert_eq!(first, [(DEVICE, Joint::default())].into());
        for unknown in [says(false), Metered::default()] {
            assert_eq!(join([says(true), unknown], &first), first);
        }
        assert!(join([says(true); 2], &first)[&DEVICE].is_doubted(Instant::now()));
    }

    #[test]
    fn a_doubt_is_over_when_a_share_is_gone_that_it_began_with_and_for_nobody_who_comes() {
        let mut look = Scene::share(10_000).look();
        look.shares[0].policy.mig = Some(MIG);
        let of = |name: &str| Share { claim: name.into(), ..look.shares[0].clone() };
        let all = ["a", "b", "c", "d"].map(of);
        let now = Instant::now();
        let join = |at: &[usize], busy: u64, before: &Memory| {
            let says = Metered { said: Some((10 * POINT, 0)), is_steady: true, ..Metered::default() };
            let shares = at.iter().map(|at| all[*at].clone()).collect();
            let (busy, active) = ([(MIG, busy * POINT)].into(), [(Some(MIG), busy * POINT)].into());
            let look = Look { shares, busy, active, ..look.clone() };
            super::join(&look, &vec![says; at.len()], |_, _| 0, Some(Duration::from_secs(4)), before, now)
        };
        let doubted = join(&[0, 1, 2], 90, &join(&[0, 1, 2], 90, &Memory::new()));
        let check = |at: &[usize], expected: bool| {
            let joint = join(at, 10 * at.len() as u64, &doubted);
            assert_eq!(joint[&DEVICE].is_doubted(now), expected, "{at:?}");
        };
        check(&[0, 1, 2], true);
        check(&[0, 1, 2, 3], true);
        check(&[0, 2], false);
        check(&[0, 2, 3], false);
    }
}
