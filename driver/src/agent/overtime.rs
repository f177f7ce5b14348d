//! Who has more of a GPU's time than its ceiling: pure, from one look after the other.
//!
//! The library has launches wait, and the arbiter cuts the rate of a share that has too much until it has not. Whoever
//! still has it is not held by either: it goes without the library, forges what that goes by, misleads its measuring beyond any
//! trim, or has a kernel that does not end, which nothing in its process can stop.
//!
//! What counts is NVML's word alone, against the ceiling with a margin ([`bound`]). What a share has beyond that adds up,
//! and goes down by what it leaves; with [`TOO_MUCH`] of it there is a finding. So whoever takes all of a GPU is found in the fourth second
//! at a ceiling of 30 %, whoever takes a little is found later, and to pause in time gains nothing: nobody ever has more than that beyond
//! its bound before it is found.
//!
//! Where the share's own page proves it, two looks are enough: its balance is more than can be left ([`super::balance`]) while it
//! has more than it was granted. That holds for shares without a ceiling too, as neighbours' parts are taken by it. The looks that
//! only correct count as well: what they cut holds such a share for a second or two, and it would be let go and cut again
//! for ever, each time before somebody asks.
//!
//! A kernel that is under way cannot be held back, so an honest share goes beyond its ceiling by a kernel, and pays
//! for it with a wait. It is left alone as long as that kernel is shorter than [`TOO_MUCH`]; a longer one looks like one that
//! does not end.
//!
//! Where NVML names one process for each sample ([`super::names`]), nothing adds up of what is had beside others: an H100 that changes
//! between two programs with many short kernels is at work all of the time, half of it in each one's name, though they had a sixth. There
//! [`super::joint`] tells, and a page that proves it. Of a look in which samples named nobody else and nobody else says that it worked it counts,
//! which is beside somebody at work as likely as that one is never named.
//!
//! Ended is who hides, or else has most: the rate was cut for all processes of the share, so those that are held by it have little.
//! Of a MIG instance NVML knows the time of all its processes together alone ([`super::instances`]): there it is who hides, or else has most
//! of its memory.

use super::arbiter::{SECOND, Terms};
use super::finding::{Finding, Kind};
use super::judge::{about, suspect};
use super::look::{Look, Share};
use super::meter::{Metered, Times};
use super::process::Process;
use divvy_api::{ClaimUid, ShareId};
use std::collections::BTreeMap;
use std::time::Duration;

/// Of GPU time, in nanoseconds.
const TOO_MUCH: u64 = 2 * SECOND;

/// What each look that proves something adds to the evidence, and how much of it is enough.
const PROOF: u8 = 2;
const ENOUGH: u8 = 3;

/// By share.
pub(super) type Memory = BTreeMap<(ClaimUid, ShareId), Past>;

/// What is kept of a share from one look to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Past {
    /// Nanoseconds that it had beyond its bound, less what it left of it since.
    excess: u64,
    /// By its own page.
    evidence: u8,
    /// The last of it.
    proof: Option<Proof>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Proof {
    /// What the share had and was granted, in nanoseconds a second, and by how many nanoseconds its balance was too much.
    busy: u64,
    granted: u64,
    beyond: i64,
}

impl Past {
    /// Findings were looked for. Of what was proven by then half a proof stays: two in a row add up, those far apart do
    /// not, and nobody is found again without a new one, as who is left of a share whose offender was ended may be honest.
    pub(super) fn judged(&mut self) {
        self.evidence = (self.evidence / 2).min(PROOF / 2);
    }
}

/// What NVML may say of a share with that ceiling that is held, in nanoseconds a second: five points more, or a fifth.
fn bound(ceiling: u64) -> u64 {
    ceiling.saturating_add((SECOND / 20).max(ceiling / 5))
}

/// Of shares by their index, by how much their balance is more than it can be, in nanoseconds, and what they were granted, in
/// nanoseconds a second.
pub(super) type Forged = BTreeMap<usize, (i64, u64)>;

/// Who is to be told of; `since` is the time since the last look.
pub(super) fn over_time(
    look: &Look,
    metered: &[Metered],
    times: &Times,
    since: Option<Duration>,
    forged: &Forged,
    before: &Memory,
) -> (Vec<Finding>, Memory) {
    let (mut findings, mut memory) = (Vec::new(), Memory::new());
    let Some(since) = since else { return (findings, before.clone()) };
    for ((at, share), metered) in look.shares.iter().enumerate().zip(metered) {
        let Some(busy) = metered.busy.or(metered.named) else {
            memory.extend(before.get_key_value(&share.key()).map(|(key, past)| (key.clone(), *past)));
            continue;
        };
        let ceiling = Terms::of(share.policy.compute).ceiling;
        let Past { excess, evidence, proof } = before.get(&share.key()).copied().unwrap_or_default();
        let is_known = metered.busy.is_some() || metered.is_sole;
        let excess = if bound(ceiling) < SECOND {
            let time = |rate: u64| (u128::from(rate) * since.as_nanos() / u128::from(SECOND)) as u64;
            // Of what is not known it had nothing, or looks in which it alone is named would add up in the end.
            let had = excess.saturating_add(if is_known { time(busy) } else { 0 });
            // No more is held against it than is enough.
            had.saturating_sub(time(bound(ceiling))).min(TOO_MUCH)
        } else {
            0
        };
        let forged = forged.get(&at).filter(|(_, granted)| busy > bound(*granted));
        let now = forged.map(|(beyond, granted)| Proof { busy, granted: *granted, beyond: *beyond });
        let evidence = evidence.saturating_add(if now.is_some() { PROOF } else { 0 });
        let past = Past { excess, evidence, proof: now.or(proof).filter(|_| evidence > 0) };
        if past != Past::default() {
            memory.insert(share.key(), past);
        }
        // Several looks have seen it.
        let is_long = excess == TOO_MUCH && is_known && busy > bound(ceiling);
        let is_proven = evidence >= ENOUGH;
        let (busy, why) = match past.proof.filter(|_| is_proven || now.is_some()) {
            _ if is_long => (busy, format!("the ceiling is {} %, though their rate is cut", points(ceiling))),
            Some(Proof { busy, granted, beyond }) => {
                let (granted, beyond) = (points(granted), beyond / 1_000_000);
                let said = format!("the account page said that {beyond} ms more were left than can be");
                (busy, format!("{granted} % were granted, and {said}"))
            }
            None => continue,
        };
        findings.extend(offender(look, at, times).map(|(process, percent)| {
            let all = points(busy);
            let text = match percent {
                Some(percent) => format!(
                    "it had {percent} % of the GPU's time in the last second, the claim's processes together {all} % where {why}"
                ),
                None => format!("the claim's processes had {all} % of the instance's time in the last second where {why}"),
            };
            let certain = is_long || is_proven;
            Finding { certain, ..about(share, Kind::OverTime, Some(suspect(process)), text) }
        }));
    }
    (findings, memory)
}

fn points(time: u64) -> u64 {
    time / (SECOND / 100)
}

/// The process that goes first, and its per cent where NVML says.
fn offender<'a>(look: &'a Look, at: usize, times: &Times) -> Option<(&'a Process, Option<u32>)> {
    let share: &Share = look.shares.get(at)?;
    let of_share =
        |pid: &u32| look.processes.get(pid).filter(|process| look.shares_of(process).contains(&at));
    let hides = |process: &Process| share.slots_of(process).next().is_none();
    if share.policy.mig.is_some() {
        let here = look.uses.iter().filter(|usage| usage.device == share.device());
        let here = here.filter_map(|usage| Some((of_share(&usage.pid)?, usage.bytes)));
        let first = here.max_by_key(|(process, bytes)| (hides(process), *bytes));
        return first.map(|(process, _)| (process, None));
    }
    let here = times.iter().flatten().filter_map(|(pid, percent)| Some((of_share(pid)?, *percent)));
    let first = here.max_by_key(|(process, percent)| (hides(process), *percent));
    first.map(|(process, percent)| (process, Some(percent)))
}

#[cfg(test)]
mod tests {
    use super::super::judge::tests::{CONTEXT, Scene};
    use super::super::look::Use;
    use super::*;
    use divvy_pages::{Compute, Flags, GpuUuid};
    use proptest::prelude::*;

    const POINT: u64 = SECOND / 100;
    const SINCE: Option<Duration> = Some(Duration::from_secs(1));

    /// A share with that ceiling; 7 and 8 are registered, 9 is not, 10 is another's.
    fn look(ceiling: u32) -> Look {
        let mut scene = Scene::share(10_000);
        for pid in [7, 8] {
            scene.process(pid).has(CONTEXT).slot(pid, CONTEXT);
        }
        scene.process(9).process(10).elsewhere_cgroup().sees("");
        let mut look = scene.look();
        look.shares[0].policy.compute = Compute { cores: ceiling, ceiling, ..Compute::default() };
        look
    }

    /// Second by second, what the processes had: the second in which somebody is found, and who.
    fn found(look: &Look, had: impl IntoIterator<Item = Vec<(u32, u32)>>) -> Option<(usize, Finding)> {
        let mut memory = Memory::new();
        for (second, had) in had.into_iter().enumerate() {
            let busy = had
                .iter()
                .filter(|(pid, _)| *pid != 10)
                .map(|(_, percent)| u64::from(*percent) * POINT)
                .sum();
            let times = Some(had.into_iter().collect());
            let metered = [Metered { busy: Some(busy), ..Metered::default() }];
            let (findings, after) = over_time(look, &metered, &times, SINCE, &Forged::new(), &memory);
            memory = after;
            if let Some(finding) = findings.into_iter().next() {
                return Some((second + 1, finding));
            }
        }
        None
    }

    #[test]
    fn beside_others_samples_that_name_one_process_are_held_against_nobody() {
        let look = look(30);
        let mut memory = Memory::new();
        for second in 0..1000 {
            // By chance nobody else was named now and then.
            let is_sole = second % 10 == 0;
            let metered = [Metered { named: Some(100 * POINT), is_sole, ..Metered::default() }];
            let times = Some([(7, 100)].into());
            let (findings, after) = over_time(&look, &metered, &times, SINCE, &Forged::new(), &memory);
            assert!(findings.is_empty(), "{findings:?}");
            memory = after;
        }
        // But for a page that proves it, and where nobody else was named.
        let metered = [Metered { named: Some(100 * POINT), is_sole: true, ..Metered::default() }];
        let times = Some([(7, 100)].into());
        let found = (0..4).filter(|_| {
            let (findings, after) =
                over_time(&look, &metered, &times, SINCE, &Forged::new(), &memory.clone());
            memory = after;
            !findings.is_empty()
        });
        assert_eq!(found.count(), 1);
        let mut memory = Memory::new();
        let metered = [Metered { named: Some(100 * POINT), ..Metered::default() }];
        let forged: Forged = [(0, (SECOND as i64, 30 * POINT))].into();
        let times = Some([(7, 100)].into());
        (_, memory) = over_time(&look, &metered, &times, SINCE, &forged, &memory);
        let (findings, _) = over_time(&look, &metered, &times, SINCE, &forged, &memory);
        assert_eq!(findings.len(), 1);
    }

    #[test]
    fn who_stays_above_its_ceiling_is_found_the_sooner_the_more_it_has() {
        let check = |ceiling: u32, had: &[(u32, u32)], expected: Option<(usize, u32)>| {
            let is = found(&look(ceiling), (0..60).map(|_| had.to_vec()));
            let is = is.map(|(second, finding)| (second, finding.process.map(|process| process.pid)));
            assert_eq!(is, expected.map(|(second, pid)| (second, Some(pid))), "{ceiling}: {had:?}");
        };
        check(30, &[(7, 100)], Some((4, 7)));
        check(30, &[(7, 60)], Some((9, 7)));
        check(10, &[(7, 100)], Some((3, 7)));
        check(30, &[(7, 36)], None);
        check(1, &[(7, 51)], Some((5, 7)));
        check(1, &[(7, 6)], None);
        // The whole, or nearly.
        check(0, &[(7, 100)], None);
        check(84, &[(7, 100)], None);
        // Who has most; who hides; never somebody else's.
        check(30, &[(7, 20), (8, 66), (10, 90)], Some((4, 8)));
        check(30, &[(7, 76), (9, 10)], Some((4, 9)));
    }

    #[test]
    fn to_pause_in_time_gains_nothing_for_long() {
        let turns = |on: usize, off: usize| {
            (0..600).map(move |second| vec![(7, if second % (on + off) < on { 100 } else { 0 })])
        };
        assert!(found(&look(30), turns(3, 1)).is_some_and(|(second, _)| second <= 8));
        assert!(found(&look(30), turns(1, 1)).is_some_and(|(second, _)| second <= 20));
        // What its ceiling allows over time, in long kernels.
        assert!(found(&look(30), turns(3, 7)).is_none());
        assert!(found(&look(10), turns(2, 18)).is_none());
    }

    #[test]
    fn nothing_is_found_where_nothing_is_known_and_who_is_observed_is_only_reported() {
        let mut instance = look(30);
        instance.shares[0].policy.mig = Some(GpuUuid([7; 16]));
        let past = Past { excess: TOO_MUCH, ..Past::default() };
        let before = Memory::from([(instance.shares[0].key(), past)]);
        let times = Some(BTreeMap::from([(7, 100)]));
        let (findings, _) =
            over_time(&instance, &[Metered::default()], &times, SINCE, &Forged::new(), &before);
        assert!(findings.is_empty());
        // Who was found once is not forgotten for a look at which nothing is known.
        let (_, after) = over_time(&instance, &[Metered::default()], &None, SINCE, &Forged::new(), &before);
        assert_eq!(after, before);
        let mut observed = look(30);
        observed.shares[0].policy.flags = Flags::OBSERVE_ONLY;
        let found = found(&observed, (0..9).map(|_| vec![(7, 100)]));
        assert!(found.is_some_and(|(_, finding)| finding.report_only && finding.certain));
    }

    #[test]
    fn on_an_instance_it_is_who_hides_or_has_most_memory() {
        let check = |sizes: &[(u32, u64)], expected: u32| {
            let mut look = look(30);
            look.shares[0].policy.mig = Some(GpuUuid([7; 16]));
            let device = look.shares[0].device();
            look.uses =
                sizes.iter().map(|(pid, bytes)| Use { pid: *pid, device, bytes: Some(*bytes) }).collect();
            look.processes.get_mut(&9).expect("it hides").cgroups = look.processes[&7].cgroups.clone();
            let metered = [Metered { busy: Some(SECOND), ..Metered::default() }];
            let mut memory = Memory::new();
            let mut second = || {
                let (found, after) = over_time(&look, &metered, &None, SINCE, &Forged::new(), &memory);
                memory = after;
                found.into_iter().next()
            };
            assert!([second(), second(), second()].iter().all(Option::is_none), "as on a whole GPU");
            let finding = second().expect("in the fourth second");
            assert_eq!((finding.process.map(|process| process.pid), finding.certain), (Some(expected), true));
            assert!(finding.text.starts_with("the claim's processes had 100 % of the instance's time"));
        };
        check(&[(7, 20), (8, 30)], 8);
        check(&[(7, 20), (8, 30), (10, 90)], 8);
        check(&[(7, 20), (8, 30), (9, 10)], 9);
    }

    #[test]
    fn whose_page_says_what_cannot_be_is_found_at_once_where_it_has_more_than_was_granted() {
        let check = |ceiling: u32, busy: u32, granted: u64, expected: bool| {
            let metered = [Metered { busy: Some(u64::from(busy) * POINT), ..Metered::default() }];
            let times = Some([(7, busy)].into());
            let forged = [(0, (200_000_000, granted * POINT))].into();
            let (findings, _) = over_time(&look(ceiling), &metered, &times, SINCE, &forged, &Memory::new());
            assert_eq!(findings.len(), usize::from(expected), "{ceiling} {busy} {granted}");
            // Looks may be off for once.
            assert!(findings.iter().all(|finding| !finding.certain));
        };
        check(30, 100, 30, true);
        check(30, 36, 30, false);
        check(0, 100, 70, true);
        check(0, 70, 70, false);
    }

    #[test]
    fn two_looks_that_prove_it_are_enough_though_the_cut_holds_in_between() {
        // Whether each look proves it, and whether findings are looked for then: how often it is found for certain.
        let check = |looks: &[(bool, bool)], expected: usize| {
            let (mut memory, mut found) = (Memory::new(), 0);
            for (proves, is_due) in looks {
                let busy = if *proves { 70 } else { 5 };
                let metered = [Metered { busy: Some(busy * POINT), ..Metered::default() }];
                let forged = [(0, (200_000_000, 30 * POINT))].into();
                let times = Some([(7, busy as u32)].into());
                let (findings, after) = over_time(&look(0), &metered, &times, SINCE, &forged, &memory);
                memory = after;
                if *is_due {
                    found += findings.iter().filter(|finding| finding.certain).count();
                    memory.values_mut().for_each(Past::judged);
                }
            }
            assert_eq!(found, expected, "{looks:?}");
        };
        const DUE: bool = true;
        check(&[(true, DUE), (true, DUE)], 1);
        check(&[(true, !DUE), (true, !DUE), (false, DUE)], 1);
        check(&[(true, DUE), (false, !DUE), (true, !DUE), (false, DUE)], 1);
        check(&[(true, !DUE), (false, DUE), (true, DUE)], 1);
        check(&[(true, DUE), (true, DUE), (true, DUE)], 2);
        // Once, and again much later.
        check(&[(true, !DUE), (true, !DUE)], 0);
        check(&[(true, DUE), (false, DUE), (true, DUE)], 0);
        check(&[(true, !DUE), (false, DUE), (false, DUE), (true, DUE)], 0);
        // Who is left when the offender was ended.
        check(&[(true, !DUE), (true, !DUE), (true, !DUE), (true, DUE), (false, DUE), (false, DUE)], 1);
    }

    proptest! {
        /// A share that goes beyond its ceiling by a kernel and waits for it is never found, whatever their lengths
        /// and wherever the looks fall.
        #[test]
        fn who_pays_for_its_kernels_is_left_alone(
            ceiling in 1_u32..84,
            lengths in prop::collection::vec(1_u64..2000, 1..40),
            phase in 0_u64..1000,
        ) {
            // Milliseconds in which it works.
            let mut working = vec![false; phase as usize];
            for length in lengths {
                working.extend((0..length).map(|_| true));
                working.extend((0..length * (100 - u64::from(ceiling)) / u64::from(ceiling)).map(|_| false));
            }
            let seconds = working.chunks(1000).map(|second| {
                vec![(7, second.iter().filter(|works| **works).count() as u32 / 10)]
            });
            prop_assert!(found(&look(ceiling), seconds).is_none());
        }
    }
}
