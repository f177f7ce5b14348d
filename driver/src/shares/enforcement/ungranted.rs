//! Finds processes that work without a grant, and shares that show too low charges, under exclusive
//! quanta ([`crate::shares::scheduler::explained`] has the tests).
//!
//! NVML's process samples name the process, so it is killed. The active time of a device or MIG
//! instance names none, so all of its shares are reported. Times are nanoseconds.

use crate::shares::scheduler::explained::{ActiveTimeTest, SampleTest, Sampled, Unexplained};
use crate::shares::scheduler::quantum_table::ShareGrants;
use crate::shares::snapshot::entitlement::NS_PER_SECOND;
use crate::shares::snapshot::finding::{Finding, Kind, Suspect};
use crate::shares::snapshot::usage::{PercentByPid, SampleEnd};
use crate::shares::snapshot::{Device, Share, ShareKey, Snapshot};
use std::collections::BTreeMap;
use std::time::Duration;

/// Samples may begin and end this much earlier or later than their time stamps.
const EDGE_NS: u64 = 10_000_000;
/// Samples that name one process each cannot have more per cent in all. Where they do, the driver
/// reports only the newest sample of each process, and they say nothing about the others.
const PERCENT_MAX: u32 = 105;

/// The grants of each device whose shares launch under quanta.
pub(crate) type Grants = BTreeMap<Device, Vec<ShareGrants>>;

/// NVML's samples since the last snapshot.
#[derive(Clone, Copy)]
pub(crate) struct Seen<'a> {
    pub(crate) percent_by_pid: &'a PercentByPid,
    pub(crate) is_per_process: bool,
    pub(crate) until: Option<SampleEnd>,
}

/// The tests of one GPU, from one snapshot to the next.
#[derive(Debug, Default)]
pub(crate) struct UngrantedTests {
    samples: BTreeMap<ShareKey, SampleTest>,
    active: BTreeMap<Device, ActiveTimeTest>,
    /// The end of the last samples, by the monotonic clock.
    sampled_until: Option<u64>,
}

impl UngrantedTests {
    /// Adds a snapshot, `since` after the last one. Returns the findings, and the devices whose charges
    /// have to be corrected.
    pub(crate) fn add(
        &mut self,
        snapshot: &Snapshot,
        seen: Seen<'_>,
        since: Option<Duration>,
        grants: &Grants,
        now: u64,
    ) -> (Vec<Finding>, BTreeMap<Device, Unexplained>) {
        let to = seen.until.map_or(now, |until| now.saturating_sub(nanoseconds(until.age())));
        let from = self.sampled_until.replace(to).filter(|from| *from < to);
        let (mut findings, mut unexplained) = (Vec::new(), BTreeMap::new());
        self.samples.retain(|key, _| grants.values().flatten().any(|share| share.key == *key));
        self.active.retain(|device, _| grants.contains_key(device));
        if let Some(from) = from {
            let found = self.add_samples(snapshot, seen, grants, from, to);
            unexplained.extend(found.iter().map(|(device, _)| (*device, Unexplained::Ungranted)));
            findings.extend(found.into_iter().map(|(_, finding)| finding));
        }
        if let Some(since) = since {
            for (device, is) in self.add_active(snapshot, since, grants, now) {
                if are_all_of_shares(snapshot, device) {
                    let of_device = snapshot.shares.iter().filter(|share| share.device() == device);
                    findings.extend(of_device.map(|share| unnamed(share, &is)));
                }
                unexplained.entry(device).or_insert(is);
            }
        }
        (findings, unexplained)
    }

    fn add_samples(
        &mut self,
        snapshot: &Snapshot,
        Seen { percent_by_pid, is_per_process, .. }: Seen<'_>,
        grants: &Grants,
        from: u64,
        to: u64,
    ) -> Vec<(Device, Finding)> {
        let Some(percent_by_pid) = percent_by_pid else { return Vec::new() };
        let sum = percent_by_pid.values().fold(0_u32, |sum, percent| sum.saturating_add(*percent));
        if sum > PERCENT_MAX && !is_per_process {
            return Vec::new();
        }
        let span = to - from;
        let time = |percent: u32| span * u64::from(percent.min(100)) / 100;
        let mut found = Vec::new();
        for (device, shares) in grants.iter().filter(|(device, _)| device.mig.is_none()) {
            for ShareGrants { key, log, .. } in shares {
                let at = snapshot.shares.iter().position(|share| share.key() == *key);
                // Launches of an observed share do not wait for quanta.
                let Some(at) = at.filter(|at| !snapshot.shares[*at].is_observe_only()) else { continue };
                let is_of_it = |pid: &u32| {
                    let process = snapshot.processes.get(pid);
                    process.is_some_and(|process| snapshot.shares_of(process).iter().eq([&at]))
                };
                let named = percent_by_pid.iter().filter(|(pid, _)| is_of_it(pid));
                let named = named.map(|(pid, percent)| (*pid, time(*percent))).collect();
                let granted = log.within(from.saturating_sub(EDGE_NS), to + EDGE_NS);
                let sampled = Sampled { span, busy: time(sum), named };
                let Some(pid) = self.samples.entry(key.clone()).or_default().add(&sampled, granted) else {
                    continue;
                };
                let Some(process) = snapshot.processes.get(&pid) else { continue };
                let percent = |ns: u64| (ns * 100 / span.max(1)).min(100);
                let text = format!(
                    "NVML's samples name it for {} % of the GPU's time in the last second, but its share was \
                     granted {} %: it launches without a grant",
                    percent(sampled.named.get(&pid).copied().unwrap_or(0)),
                    percent(granted),
                );
                let share = &snapshot.shares[at];
                let suspect = Some(Suspect::of(process));
                let finding = Finding::about(share, Kind::OverComputeLimit, suspect, text);
                found.push((*device, Finding { certain: true, ..finding }));
            }
        }
        found
    }

    fn add_active(
        &mut self,
        snapshot: &Snapshot,
        since: Duration,
        grants: &Grants,
        now: u64,
    ) -> Vec<(Device, Unexplained)> {
        let span = nanoseconds(since);
        let mut found = Vec::new();
        for (device, shares) in grants {
            let Some(active) = snapshot.sm_active_ns.get(&device.mig) else { continue };
            let are_known = shares.iter().all(|share| share.log.knows(now.saturating_sub(span)));
            let active = (u128::from(*active) * u128::from(span) / u128::from(NS_PER_SECOND)) as u64;
            let levels = shares.iter().map(|share| (share.key.clone(), share.level)).collect();
            let test = self.active.entry(*device).or_default();
            if !are_known {
                *test = ActiveTimeTest::default();
                continue;
            }
            found.extend(test.add(active, span, levels).map(|is| (*device, is)));
        }
        found
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Whether all processes of a device belong to shares. Another one may be the cause.
fn are_all_of_shares(snapshot: &Snapshot, device: Device) -> bool {
    let processes = snapshot.uses.iter().filter(|usage| usage.device == device);
    let mut known = processes.filter_map(|usage| snapshot.processes.get(&usage.pid));
    known.all(|process| !snapshot.shares_of(process).is_empty())
}

/// A finding about each share of a device: it is not known which one is the cause.
fn unnamed(share: &Share, unexplained: &Unexplained) -> Finding {
    let device = if share.policy.mig.is_some() { "MIG instance" } else { "GPU" };
    let cause = match unexplained {
        Unexplained::LowCharges(_) => "the charges of one of them are too low",
        Unexplained::Ungranted => "one of them launches without a grant",
    };
    let text = format!("the charges of the {device}'s shares do not explain its active time: {cause}");
    let finding = Finding::about(share, Kind::OverComputeLimit, None, text);
    Finding { certain: true, ..finding }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::scheduler::explained::{GrantLog, ShareLevel};
    use crate::shares::snapshot::fixture::{CONTEXT, Fixture};
    use crate::shares::snapshot::mounts;
    use crate::shares::snapshot::process::Cgroups;
    use divvy_pages::{Flags, GpuUuid};

    const SECOND: u64 = NS_PER_SECOND;
    const MIG: GpuUuid = GpuUuid([7; 16]);

    /// Two shares of a device. Processes 7 and 8 are of the first one, and process 9 is
    /// unknown.
    struct Node {
        snapshot: Snapshot,
        tests: UngrantedTests,
        now: u64,
        logs: [GrantLog; 2],
        levels: [ShareLevel; 2],
    }

    impl Node {
        fn new(change: impl FnOnce(&mut Snapshot)) -> Self {
            let mut fixture = Fixture::share(10_000);
            fixture.process(7).has(CONTEXT).slot(7, CONTEXT);
            fixture.process(8).has(CONTEXT).slot(8, CONTEXT);
            let mut snapshot = fixture.snapshot();
            let mut other = snapshot.shares[0].clone();
            (other.claim, other.containers) = ("other".into(), Vec::new());
            other.page.share = "other/share-0".to_owned();
            snapshot.shares.push(other);
            change(&mut snapshot);
            let now = 100 * SECOND;
            let logs = [GrantLog::new(0), GrantLog::new(0)];
            Self { snapshot, tests: UngrantedTests::default(), now, logs, levels: Default::default() }
        }

        fn on_instance() -> Self {
            Self::new(|snapshot| {
                snapshot.shares.iter_mut().for_each(|share| share.policy.mig = Some(MIG));
                snapshot.uses.iter_mut().for_each(|usage| usage.device.mig = Some(MIG));
            })
        }

        /// A second later: the shares were granted and charged these per cent one after the other, NVML
        /// named the processes for these, and the device was active for `active` per cent.
        fn second(
            &mut self,
            granted: [u64; 2],
            charged: [u64; 2],
            named: &[(u32, u32)],
            active: u64,
        ) -> (Vec<Finding>, Option<Unexplained>) {
            let (mut at, percent) = (self.now, |part: u64| part * SECOND / 100);
            for index in 0..2 {
                let end = at + percent(granted[index]);
                self.logs[index].set(granted[index] > 0, at);
                self.logs[index].set(false, end);
                self.levels[index].charged += percent(charged[index]);
                self.levels[index].granted += percent(granted[index]);
                at = end;
            }
            self.now += SECOND;
            let device = self.snapshot.shares[0].device();
            self.snapshot.sm_active_ns = [(device.mig, percent(active))].into();
            let of = |(share, index): (&Share, usize)| ShareGrants {
                key: share.key(),
                log: self.logs[index].clone(),
                level: self.levels[index],
            };
            let grants = [(device, self.snapshot.shares.iter().zip(0..2).map(of).collect())].into();
            let percent_by_pid = Some(named.iter().copied().collect());
            let seen = Seen { percent_by_pid: &percent_by_pid, is_per_process: false, until: None };
            let since = Some(Duration::from_secs(1));
            let (findings, mut unexplained) = self.tests.add(&self.snapshot, seen, since, &grants, self.now);
            (findings, unexplained.remove(&device))
        }
    }

    #[test]
    fn process_that_ignores_grants_is_named() {
        let mut node = Node::new(|_| ());
        let mut findings =
            (0..6).map(|_| node.second([0, 100], [0, 60], &[(7, 20), (8, 50), (9, 30)], 100).0);
        let found = findings.position(|found| found.iter().any(|finding| finding.process.is_some()));
        assert!(found.is_some_and(|second| second <= 4), "{found:?}");
        let mut node = Node::new(|_| ());
        let named: Vec<_> = (0..6)
            .flat_map(|_| node.second([0, 100], [0, 100], &[(8, 60), (7, 10), (9, 30)], 100).0)
            .filter_map(|finding| Some((finding.process?.pid, finding.certain)))
            .collect();
        assert_eq!(named.first(), Some(&(8, true)));
    }

    #[test]
    fn honest_shares_are_not_blamed() {
        let check = |node: &mut Node, granted: [u64; 2], named: &[&[(u32, u32)]]| {
            for second in 0..300 {
                let named = named[second % named.len()];
                let (findings, unexplained) = node.second(granted, granted, named, 98);
                assert!(findings.is_empty() && unexplained.is_none(), "{findings:?} {unexplained:?}");
            }
        };
        check(&mut Node::new(|_| ()), [30, 68], &[&[(7, 40), (9, 60)], &[(7, 20), (9, 80)]]);
        check(&mut Node::new(|_| ()), [98, 0], &[&[(7, 50), (8, 48)]]);
        // The driver reports the newest sample of each process.
        check(&mut Node::new(|_| ()), [10, 88], &[&[(7, 98), (9, 98)]]);
        // Launches of an observed share do not wait.
        let observe = |snapshot: &mut Snapshot| snapshot.shares[0].policy.flags = Flags::OBSERVE_ONLY;
        check(&mut Node::new(observe), [10, 88], &[&[(7, 70), (9, 28)]]);
        // No samples name processes of an instance.
        check(&mut Node::on_instance(), [30, 68], &[&[]]);
    }

    #[test]
    fn kernel_from_before_the_gate_is_not_blamed() {
        let mut node = Node::new(|_| ());
        node.logs[0] = GrantLog::new(node.now + 10 * SECOND);
        for second in 0..10 {
            let (findings, unexplained) = node.second([0, 50], [0, 50], &[(7, 50), (9, 50)], 100);
            assert!(findings.is_empty() && unexplained.is_none(), "{second}: {findings:?}");
        }
    }

    #[test]
    fn unexplained_time_of_an_instance_is_reported() {
        let mut node = Node::on_instance();
        let mut found = (0..6).map(|_| node.second([60, 0], [60, 0], &[], 100));
        let (findings, unexplained) =
            found.find(|(findings, _)| !findings.is_empty()).expect("within six seconds");
        assert_eq!((findings.len(), unexplained), (2, Some(Unexplained::Ungranted)));
        assert!(findings.iter().all(|finding| finding.certain && finding.process.is_none()));
        // A process of no share may be the cause. The charges are corrected nevertheless.
        let mut node = Node::on_instance();
        let stranger = node.snapshot.processes.get_mut(&8).expect("a process");
        (stranger.cgroups, stranger.mounts) = (Cgroups::parse("0::/kubepods/c2\n"), mounts::parse(""));
        let last = (0..6).map(|_| node.second([60, 0], [60, 0], &[], 100)).last();
        let (findings, unexplained) = last.expect("six seconds");
        assert_eq!((findings.len(), unexplained), (0, Some(Unexplained::Ungranted)));
    }
}
