//! Finds shares that use more GPU time than their ceiling although their rate was cut.
//!
//! The library delays launches, and the controller cuts the rate of a share that uses too much. A
//! share that exceeds its ceiling nevertheless bypasses the library, forges what the library reads,
//! misleads its measurements, or runs a kernel that does not end. Times are in nanoseconds, rates
//! in nanoseconds per second.

use crate::shares::snapshot::entitlement::{Entitlement, NS_PER_SECOND};
use crate::shares::snapshot::finding::{Finding, Kind, Suspect};
use crate::shares::snapshot::process::Process;
use crate::shares::snapshot::usage::{PercentByPid, ShareTime};
use crate::shares::snapshot::{Share, ShareKey, Snapshot};
use std::collections::BTreeMap;
use std::time::Duration;

/// GPU time beyond the bound that makes a finding certain. An honest share can exceed its ceiling
/// by one kernel, which it pays for with a wait; a kernel longer than this looks like one that does
/// not end.
const EXCESS_MAX_NS: u64 = 2 * NS_PER_SECOND;

/// Each snapshot with a forged balance adds this to the evidence.
const EVIDENCE_PER_PROOF: u8 = 2;
/// Two proofs in a row reach it; two proofs that are far apart do not.
const EVIDENCE_REQUIRED: u8 = 3;

/// By share.
pub(crate) type ExcessHistory = BTreeMap<ShareKey, Excess>;

/// State of a share that is passed from one snapshot to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Excess {
    /// GPU time used beyond the bound, less the time left unused since, in nanoseconds.
    excess: u64,
    /// Evidence from forged balances.
    evidence: u8,
    /// The last forged balance.
    proof: Option<Proof>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Proof {
    /// Used and granted time, in nanoseconds per second.
    used: u64,
    granted: u64,
    /// Nanoseconds by which the balance was too large.
    beyond: i64,
}

impl Excess {
    /// Called after findings were checked. Half a proof remains, so that two proofs in a row add up
    /// and two distant ones do not. No share is found again without a new proof: once its offender
    /// was killed, the rest may be honest.
    pub(crate) fn decay_evidence(&mut self) {
        self.evidence = (self.evidence / 2).min(EVIDENCE_PER_PROOF / 2);
    }
}

/// The rate that NVML may report for an honest share with this ceiling: five points or a fifth more.
fn bound(ceiling: u64) -> u64 {
    ceiling.saturating_add((NS_PER_SECOND / 20).max(ceiling / 5))
}

/// By share index: the nanoseconds by which the balance exceeds what is possible, and the granted rate.
pub(crate) type ForgedBalances = BTreeMap<usize, (i64, u64)>;

/// Returns the findings and the new history. `since` is the time since the last snapshot.
///
/// - *Excess.* Only NVML's measurement counts, compared with the ceiling and a margin ([`bound`]).
///   Time beyond the bound adds up, unused time is subtracted, and [`EXCESS_MAX_NS`] makes a
///   finding. A share with a ceiling of 30 % that takes the whole GPU is found in the fourth
///   second. A small excess takes longer, and pausing gains nothing: no share gets more than that
///   beyond its bound before it is found.
///
/// - *Forged balance.* If the share's page has a balance that is impossible
///   ([`crate::shares::scheduler::balance_check`]) while it uses more than it was granted, two
///   snapshots are enough. This covers shares without a ceiling too, because they take their
///   neighbours' time. Snapshots between two audits count as well. The cut that they cause holds
///   the share for a second or two, so an audit alone might never see the excess.
///
/// - *Samples that name one process each* ([`crate::shares::scheduler::sample_attribution`]) do not
///   add up. On an H100, two programs with many short kernels were each measured at half of the
///   time although they used a sixth. There, [`crate::shares::scheduler::device_totals`] and forged
///   balances decide. A snapshot counts only if its samples named no other share and no other share
///   reported work.
pub(crate) fn check(
    snapshot: &Snapshot,
    times: &[ShareTime],
    percent_by_pid: &PercentByPid,
    since: Option<Duration>,
    forged: &ForgedBalances,
    before: &ExcessHistory,
) -> (Vec<Finding>, ExcessHistory) {
    let (mut findings, mut history) = (Vec::new(), ExcessHistory::new());
    let Some(since) = since else { return (findings, before.clone()) };
    for ((at, share), time) in snapshot.shares.iter().enumerate().zip(times) {
        let Some(used) = time.gpu_ns.or(time.sampled_ns) else {
            history.extend(before.get_key_value(&share.key()).map(|(key, past)| (key.clone(), *past)));
            continue;
        };
        let ceiling = Entitlement::of(share.policy.compute).ceiling;
        let Excess { excess, evidence, proof } = before.get(&share.key()).copied().unwrap_or_default();
        let is_measured = time.gpu_ns.is_some() || time.is_sole_user;
        let excess = if bound(ceiling) < NS_PER_SECOND {
            let elapsed =
                |rate: u64| (u128::from(rate) * since.as_nanos() / u128::from(NS_PER_SECOND)) as u64;
            // Unmeasured time counts as zero. Otherwise the few measured snapshots would add up over time.
            let used = excess.saturating_add(if is_measured { elapsed(used) } else { 0 });
            // The excess is capped, so that a share recovers quickly.
            used.saturating_sub(elapsed(bound(ceiling))).min(EXCESS_MAX_NS)
        } else {
            0
        };
        let forged = forged.get(&at).filter(|(_, granted)| used > bound(*granted));
        let now = forged.map(|(beyond, granted)| Proof { used, granted: *granted, beyond: *beyond });
        let evidence = evidence.saturating_add(if now.is_some() { EVIDENCE_PER_PROOF } else { 0 });
        let past = Excess { excess, evidence, proof: now.or(proof).filter(|_| evidence > 0) };
        if past != Excess::default() {
            history.insert(share.key(), past);
        }
        // Several snapshots contributed to it.
        let is_lasting = excess == EXCESS_MAX_NS && is_measured && used > bound(ceiling);
        let is_proven = evidence >= EVIDENCE_REQUIRED;
        let (used, why) = match past.proof.filter(|_| is_proven || now.is_some()) {
            _ if is_lasting => {
                (used, format!("the ceiling is {} %, and their rate was cut", points(ceiling)))
            }
            Some(Proof { used, granted, beyond }) => {
                let (granted, beyond) = (points(granted), beyond / 1_000_000);
                let forged = format!("the account page showed {beyond} ms more time left than is possible");
                (used, format!("{granted} % were granted, and {forged}"))
            }
            None => continue,
        };
        findings.extend(offender(snapshot, at, percent_by_pid).map(|(process, percent)| {
            let all = points(used);
            let text = match percent {
                Some(percent) => format!(
                    "it used {percent} % of the GPU's time in the last second, and the claim's processes \
                     {all} % together; {why}"
                ),
                None => format!(
                    "the claim's processes used {all} % of the instance's time in the last second; {why}"
                ),
            };
            let certain = is_lasting || is_proven;
            let suspect = Some(Suspect::of(process));
            Finding { certain, ..Finding::about(share, Kind::OverComputeLimit, suspect, text) }
        }));
    }
    (findings, history)
}

/// Converts a rate to per cent.
fn points(rate: u64) -> u64 {
    rate / (NS_PER_SECOND / 100)
}

/// The process of a share to kill, and its per cent of GPU time where NVML reports that.
///
/// An unregistered process comes first, then the one with the most time: the rate was cut for all
/// processes of the share, so those that are throttled have little. On a MIG instance NVML knows
/// only the time of all processes together ([`crate::shares::snapshot::mig_totals`]), so the
/// process with the most memory is taken there.
fn offender<'a>(
    snapshot: &'a Snapshot,
    at: usize,
    percent_by_pid: &PercentByPid,
) -> Option<(&'a Process, Option<u32>)> {
    let share: &Share = snapshot.shares.get(at)?;
    let of_share =
        |pid: &u32| snapshot.processes.get(pid).filter(|process| snapshot.shares_of(process).contains(&at));
    let is_unregistered = |process: &Process| share.slots_of(process).next().is_none();
    if share.policy.mig.is_some() {
        let here = snapshot.uses.iter().filter(|usage| usage.device == share.device());
        let here = here.filter_map(|usage| Some((of_share(&usage.pid)?, usage.bytes)));
        let first = here.max_by_key(|(process, bytes)| (is_unregistered(process), *bytes));
        return first.map(|(process, _)| (process, None));
    }
    let here = percent_by_pid.iter().flatten().filter_map(|(pid, percent)| Some((of_share(pid)?, *percent)));
    let first = here.max_by_key(|(process, percent)| (is_unregistered(process), *percent));
    first.map(|(process, percent)| (process, Some(percent)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::snapshot::ProcessMemory;
    use crate::shares::snapshot::fixture::{CONTEXT, Fixture};
    use divvy_pages::{Compute, Flags, GpuUuid};
    use proptest::prelude::*;

    const POINT: u64 = NS_PER_SECOND / 100;
    const SINCE: Option<Duration> = Some(Duration::from_secs(1));

    /// A share with this ceiling. Processes 7 and 8 are registered, 9 is not, 10 is not the share's.
    fn snapshot(ceiling: u32) -> Snapshot {
        let mut fixture = Fixture::share(10_000);
        for pid in [7, 8] {
            fixture.process(pid).has(CONTEXT).slot(pid, CONTEXT);
        }
        fixture.process(9).process(10).elsewhere_cgroup().sees("");
        let mut snapshot = fixture.snapshot();
        snapshot.shares[0].policy.compute = Compute { cores: ceiling, ceiling, ..Compute::default() };
        snapshot
    }

    /// Feeds the per cent of each process, one item per second. Returns the first finding and its second.
    fn found(
        snapshot: &Snapshot,
        had: impl IntoIterator<Item = Vec<(u32, u32)>>,
    ) -> Option<(usize, Finding)> {
        let mut memory = ExcessHistory::new();
        for (second, had) in had.into_iter().enumerate() {
            let busy = had
                .iter()
                .filter(|(pid, _)| *pid != 10)
                .map(|(_, percent)| u64::from(*percent) * POINT)
                .sum();
            let times = Some(had.into_iter().collect());
            let metered = [ShareTime { gpu_ns: Some(busy), ..ShareTime::default() }];
            let (findings, after) =
                super::check(snapshot, &metered, &times, SINCE, &ForgedBalances::new(), &memory);
            memory = after;
            if let Some(finding) = findings.into_iter().next() {
                return Some((second + 1, finding));
            }
        }
        None
    }

    #[test]
    fn samples_that_name_one_process_are_no_evidence() {
        let snapshot = snapshot(30);
        let mut memory = ExcessHistory::new();
        for second in 0..1000 {
            // By chance, some snapshots name no other process.
            let is_sole = second % 10 == 0;
            let metered =
                [ShareTime { sampled_ns: Some(100 * POINT), is_sole_user: is_sole, ..ShareTime::default() }];
            let times = Some([(7, 100)].into());
            let (findings, after) =
                super::check(&snapshot, &metered, &times, SINCE, &ForgedBalances::new(), &memory);
            assert!(findings.is_empty(), "{findings:?}");
            memory = after;
        }
        // A forged balance and a sole user do count.
        let metered =
            [ShareTime { sampled_ns: Some(100 * POINT), is_sole_user: true, ..ShareTime::default() }];
        let times = Some([(7, 100)].into());
        let found = (0..4).filter(|_| {
            let (findings, after) =
                super::check(&snapshot, &metered, &times, SINCE, &ForgedBalances::new(), &memory.clone());
            memory = after;
            !findings.is_empty()
        });
        assert_eq!(found.count(), 1);
        let mut memory = ExcessHistory::new();
        let metered = [ShareTime { sampled_ns: Some(100 * POINT), ..ShareTime::default() }];
        let forged: ForgedBalances = [(0, (NS_PER_SECOND as i64, 30 * POINT))].into();
        let times = Some([(7, 100)].into());
        (_, memory) = super::check(&snapshot, &metered, &times, SINCE, &forged, &memory);
        let (findings, _) = super::check(&snapshot, &metered, &times, SINCE, &forged, &memory);
        assert_eq!(findings.len(), 1);
    }

    #[test]
    fn a_larger_excess_is_found_sooner() {
        let check = |ceiling: u32, had: &[(u32, u32)], expected: Option<(usize, u32)>| {
            let is = found(&snapshot(ceiling), (0..60).map(|_| had.to_vec()));
            let is = is.map(|(second, finding)| (second, finding.process.map(|process| process.pid)));
            assert_eq!(is, expected.map(|(second, pid)| (second, Some(pid))), "{ceiling}: {had:?}");
        };
        check(30, &[(7, 100)], Some((4, 7)));
        check(30, &[(7, 60)], Some((9, 7)));
        check(10, &[(7, 100)], Some((3, 7)));
        check(30, &[(7, 36)], None);
        check(1, &[(7, 51)], Some((5, 7)));
        check(1, &[(7, 6)], None);
        // A ceiling of the whole GPU, or nearly.
        check(0, &[(7, 100)], None);
        check(84, &[(7, 100)], None);
        // The process with most time, then an unregistered one, and never another share's.
        check(30, &[(7, 20), (8, 66), (10, 90)], Some((4, 8)));
        check(30, &[(7, 76), (9, 10)], Some((4, 9)));
    }

    #[test]
    fn pausing_does_not_avoid_detection() {
        let turns = |on: usize, off: usize| {
            (0..600).map(move |second| vec![(7, if second % (on + off) < on { 100 } else { 0 })])
        };
        assert!(found(&snapshot(30), turns(3, 1)).is_some_and(|(second, _)| second <= 8));
        assert!(found(&snapshot(30), turns(1, 1)).is_some_and(|(second, _)| second <= 20));
        // On average within the ceiling, in long kernels.
        assert!(found(&snapshot(30), turns(3, 7)).is_none());
        assert!(found(&snapshot(10), turns(2, 18)).is_none());
    }

    #[test]
    fn nothing_is_found_without_measurements() {
        let mut instance = snapshot(30);
        instance.shares[0].policy.mig = Some(GpuUuid([7; 16]));
        let past = Excess { excess: EXCESS_MAX_NS, ..Excess::default() };
        let before = ExcessHistory::from([(instance.shares[0].key(), past)]);
        let times = Some(BTreeMap::from([(7, 100)]));
        let (findings, _) =
            super::check(&instance, &[ShareTime::default()], &times, SINCE, &ForgedBalances::new(), &before);
        assert!(findings.is_empty());
        // A snapshot without measurements does not clear the history.
        let (_, after) =
            super::check(&instance, &[ShareTime::default()], &None, SINCE, &ForgedBalances::new(), &before);
        assert_eq!(after, before);
        let mut observed = snapshot(30);
        observed.shares[0].policy.flags = Flags::OBSERVE_ONLY;
        let found = found(&observed, (0..9).map(|_| vec![(7, 100)]));
        assert!(found.is_some_and(|(_, finding)| finding.report_only && finding.certain));
    }

    #[test]
    fn on_an_instance_the_process_with_most_memory_is_named() {
        let check = |sizes: &[(u32, u64)], expected: u32| {
            let mut snapshot = snapshot(30);
            snapshot.shares[0].policy.mig = Some(GpuUuid([7; 16]));
            let device = snapshot.shares[0].device();
            snapshot.uses = sizes
                .iter()
                .map(|(pid, bytes)| ProcessMemory { pid: *pid, device, bytes: Some(*bytes) })
                .collect();
            snapshot.processes.get_mut(&9).expect("it hides").cgroups =
                snapshot.processes[&7].cgroups.clone();
            let metered = [ShareTime { gpu_ns: Some(NS_PER_SECOND), ..ShareTime::default() }];
            let mut memory = ExcessHistory::new();
            let mut second = || {
                let (found, after) =
                    super::check(&snapshot, &metered, &None, SINCE, &ForgedBalances::new(), &memory);
                memory = after;
                found.into_iter().next()
            };
            assert!([second(), second(), second()].iter().all(Option::is_none), "as on a whole GPU");
            let finding = second().expect("in the fourth second");
            assert_eq!((finding.process.map(|process| process.pid), finding.certain), (Some(expected), true));
            assert!(finding.text.starts_with("the claim's processes used 100 % of the instance's time"));
        };
        check(&[(7, 20), (8, 30)], 8);
        check(&[(7, 20), (8, 30), (10, 90)], 8);
        check(&[(7, 20), (8, 30), (9, 10)], 9);
    }

    #[test]
    fn forged_balance_with_excess_use_is_found_at_once() {
        let check = |ceiling: u32, busy: u32, granted: u64, expected: bool| {
            let metered = [ShareTime { gpu_ns: Some(u64::from(busy) * POINT), ..ShareTime::default() }];
            let times = Some([(7, busy)].into());
            let forged = [(0, (200_000_000, granted * POINT))].into();
            let (findings, _) =
                super::check(&snapshot(ceiling), &metered, &times, SINCE, &forged, &ExcessHistory::new());
            assert_eq!(findings.len(), usize::from(expected), "{ceiling} {busy} {granted}");
            // A single snapshot may be wrong.
            assert!(findings.iter().all(|finding| !finding.certain));
        };
        check(30, 100, 30, true);
        check(30, 36, 30, false);
        check(0, 100, 70, true);
        check(0, 70, 70, false);
    }

    #[test]
    fn two_proofs_are_sufficient_despite_a_cut_in_between() {
        // For each snapshot: whether it is a proof and whether findings are checked. `expected` is the
        // number of certain findings.
        let check = |snapshots: &[(bool, bool)], expected: usize| {
            let (mut memory, mut found) = (ExcessHistory::new(), 0);
            for (proves, is_due) in snapshots {
                let busy = if *proves { 70 } else { 5 };
                let metered = [ShareTime { gpu_ns: Some(busy * POINT), ..ShareTime::default() }];
                let forged = [(0, (200_000_000, 30 * POINT))].into();
                let times = Some([(7, busy as u32)].into());
                let (findings, after) = super::check(&snapshot(0), &metered, &times, SINCE, &forged, &memory);
                memory = after;
                if *is_due {
                    found += findings.iter().filter(|finding| finding.certain).count();
                    memory.values_mut().for_each(Excess::decay_evidence);
                }
            }
            assert_eq!(found, expected, "{snapshots:?}");
        };
        const DUE: bool = true;
        check(&[(true, DUE), (true, DUE)], 1);
        check(&[(true, !DUE), (true, !DUE), (false, DUE)], 1);
        check(&[(true, DUE), (false, !DUE), (true, !DUE), (false, DUE)], 1);
        check(&[(true, !DUE), (false, DUE), (true, DUE)], 1);
        check(&[(true, DUE), (true, DUE), (true, DUE)], 2);
        // Two distant proofs.
        check(&[(true, !DUE), (true, !DUE)], 0);
        check(&[(true, DUE), (false, DUE), (true, DUE)], 0);
        check(&[(true, !DUE), (false, DUE), (false, DUE), (true, DUE)], 0);
        // The remaining processes, after the offender was killed.
        check(&[(true, !DUE), (true, !DUE), (true, !DUE), (true, DUE), (false, DUE), (false, DUE)], 1);
    }

    proptest! {
        /// A share that exceeds its ceiling by one kernel and then waits is never found, for any kernel
        /// lengths and any times of the snapshots.
        #[test]
        fn share_that_waits_for_its_kernels_is_never_found(
            ceiling in 1_u32..84,
            lengths in prop::collection::vec(1_u64..2000, 1..40),
            phase in 0_u64..1000,
        ) {
            // One item per millisecond: whether the share runs.
            let mut working = vec![false; phase as usize];
            for length in lengths {
                working.extend((0..length).map(|_| true));
                working.extend((0..length * (100 - u64::from(ceiling)) / u64::from(ceiling)).map(|_| false));
            }
            let seconds = working.chunks(1000).map(|second| {
                vec![(7, second.iter().filter(|works| **works).count() as u32 / 10)]
            });
            prop_assert!(found(&snapshot(ceiling), seconds).is_none());
        }
    }
}
