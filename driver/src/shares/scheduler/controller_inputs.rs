//! Turns a snapshot into the inputs of the controller.
//!
//! [`super::controller`] and [`super::grants`] decide; here the usage of each share becomes its
//! demand. Nothing is kept: a new agent starts from the policies and the last grants. A share that
//! is seen for the first time and is active is expected to want all that it may use.

use super::controller::{self, CoRunners, Entitlement, NS_PER_SECOND, Seen};
use super::grant_table::GrantSummary;
use super::grants::{Attribution, ShareStatus};
use crate::shares::snapshot::usage::{PercentByPid, ShareTime, percent_to_ns};
use crate::shares::snapshot::{Share, ShareKey, Snapshot};
use std::collections::BTreeMap;

/// The priority of a share that precedes others, and above.
const HIGH: u32 = 1;

/// The time that a share without NVML measurements should have used, in nanoseconds per second. If
/// it waited for more, this is the grant. Otherwise it is at most what the share reports.
pub(crate) fn expected(had: Option<&GrantSummary>, metered: &ShareTime) -> u64 {
    let (Some(had), Some((charged, waited))) = (had, metered.reported_ns) else { return 0 };
    let (granted, _) = had.memory.granted();
    let is_held = had.memory.is_held(Seen { busy: charged, charged, waited }, had.company);
    let likely = charged as f64 / had.memory.trim(had.company.is_beside).max(1.0);
    if is_held { granted.min(NS_PER_SECOND) } else { granted.min(likely as u64) }
}

/// Returns the status of each share, by index. For a share with neighbours on its MIG instance,
/// `joint` returns the factor by which its kernels look longer, and whether the shares' reports
/// explain the total.
///
/// Where NVML does not report a share's own time, as on a MIG instance with several shares, its own
/// report sets its demand. Nothing is corrected by it. A share that claims to be idle gets less; a
/// share that claims to be active gets what its policy gives it beside active shares. So a false
/// report gains nothing, and costs others no more than a true one.
pub(crate) fn share_statuses(
    snapshot: &Snapshot,
    times: &PercentByPid,
    metered: &[ShareTime],
    had: &BTreeMap<ShareKey, GrantSummary>,
    joint: impl Fn(&Share) -> Option<(f64, bool)>,
) -> Vec<ShareStatus> {
    let all = times
        .iter()
        .flat_map(BTreeMap::values)
        .map(|percent| percent_to_ns(*percent))
        .sum::<u64>()
        .min(NS_PER_SECOND);
    let standing = |(share, metered): (&Share, &ShareTime)| {
        let (charged, waited) = metered.reported_ns.unwrap_or_default();
        let busy = metered.gpu_ns.unwrap_or(charged);
        // On an instance, only the time of a share that has it alone is known.
        let all = if share.policy.mig.is_none() { all } else { busy };
        // Not what its own processes had of each other: with many of them that would explain
        // anything. Nor does what others have explain why one has nothing.
        let between = if busy > 0 { all.saturating_sub(busy) } else { 0 };
        let seen = Seen { busy, charged, waited };
        let compute = share.policy.compute;
        let terms = Entitlement::of(compute);
        let (attribution, trim) = match (metered.gpu_ns, joint(share)) {
            (Some(_), _) => (Attribution::PerProcess, 1.0),
            (None, Some((trim, is_explained))) => (Attribution::DeviceTotal { is_explained }, trim),
            (None, None) => (Attribution::SelfReported, 1.0),
        };
        let (wants, memory) = match had.get(&share.key()) {
            // A share whose gate was closed could not show its demand.
            Some(had) => {
                let company = CoRunners { between, ..had.company };
                let wants = terms.wants(seen, had.memory.is_held(seen, company));
                let memory = match attribution {
                    Attribution::PerProcess => controller::corrected(had.memory, seen, company),
                    _ => had.memory.by_word(trim),
                };
                (wants.max(had.wanted.unwrap_or(0)), memory)
            }
            None => (if busy > 0 { terms.ceiling } else { 0 }, controller::ControllerState::default()),
        };
        let (is_high, is_limited) = (compute.priority >= HIGH, compute.is_limited());
        ShareStatus { terms, is_high, is_limited, wants, is_awake: false, turn: None, attribution, memory }
    };
    snapshot.shares.iter().zip(metered).map(standing).collect()
}

#[cfg(test)]
mod tests {
    use super::super::grants::tests::orders;
    use super::*;
    use crate::shares::snapshot::fixture::{CONTEXT, Fixture};
    use crate::shares::snapshot::usage::{UsageHistory, measure};
    use divvy_pages::{Compute, GpuUuid, Owner};
    use std::time::{Duration, Instant};

    const POINT: u64 = NS_PER_SECOND / 100;

    /// A share of 30 % whose process 7 has counted these nanoseconds.
    fn snapshot(charged: u64, waited: u64) -> Snapshot {
        let mut fixture = Fixture::share(10_000);
        fixture.process(7).has(CONTEXT).slot(7, CONTEXT);
        let mut snapshot = fixture.snapshot();
        snapshot.shares[0].policy.compute = Compute { cores: 30, ceiling: 30, ..Compute::default() };
        let slots = snapshot.shares[0].account.as_mut().expect("a page");
        let report = &mut slots.slots[0].report;
        (report.charged_ns, report.waited_ns) = (charged, waited);
        snapshot
    }

    fn nothing(_: &Share) -> Option<(f64, bool)> {
        None
    }

    fn times(all: &[(u32, u32)]) -> PercentByPid {
        Some(all.iter().copied().collect())
    }

    /// After a first snapshot, others two seconds apart: the rate of the share in points after the last.
    fn after(first: &Snapshot, others: &[&Snapshot], times: &PercentByPid) -> u64 {
        let mut at = Instant::now();
        let decided = |standings: &[ShareStatus]| {
            let [standing] = standings else { panic!("one share") };
            orders(&[*standing])[0]
        };
        let idle = Some(BTreeMap::new());
        let (metered, _, mut memory) = measure(first, &idle, None, UsageHistory::default(), at);
        let mut order = decided(&share_statuses(first, &idle, &metered, &BTreeMap::new(), nothing));
        assert_eq!(order.rate, Some(30 * POINT));
        for snapshot in others {
            at += Duration::from_secs(2);
            let had =
                [(first.shares[0].key(), GrantSummary { memory: order.memory, ..GrantSummary::default() })]
                    .into();
            let (metered, _, after) = measure(snapshot, times, None, memory, at);
            (order, memory) = (decided(&share_statuses(snapshot, times, &metered, &had, nothing)), after);
        }
        order.rate.expect("it is limited") / POINT
    }

    #[test]
    fn expected_time_is_the_grant_if_the_share_waited() {
        let terms = Entitlement { guarantee: 30 * POINT, ceiling: 30 * POINT, weight: 1 };
        let (_, memory) = controller::ControllerState::inherited([1.0, 1.5].map(f64::to_bits)).rate(
            terms,
            30 * POINT,
            true,
        );
        let company = CoRunners { is_beside: true, lasted: NS_PER_SECOND, ..CoRunners::default() };
        let had = GrantSummary { memory, company, ..GrantSummary::default() };
        let check = |said: Option<(u64, u64)>, expected: u64| {
            let said = said.map(|(charged, waited)| (charged * POINT, waited * POINT));
            let due = super::expected(Some(&had), &ShareTime { reported_ns: said, ..ShareTime::default() });
            assert_eq!((due + POINT / 2) / POINT, expected, "{said:?}");
        };
        check(Some((24, 60)), 30);
        check(Some((45, 5)), 30);
        // With a trim of one and a half.
        check(Some((24, 0)), 16);
        check(Some((90, 0)), 30);
        check(None, 0);
        assert_eq!(
            expected(
                None,
                &ShareTime { reported_ns: Some((NS_PER_SECOND, NS_PER_SECOND)), ..ShareTime::default() }
            ),
            0
        );
    }

    #[test]
    fn rate_rises_after_waiting_and_falls_after_excess() {
        let before = snapshot(5, 5);
        let worked = |seconds: u64| snapshot(5 + 30 * seconds * POINT, 5 + seconds * NS_PER_SECOND);
        let (two, four) = (worked(2), worked(4));
        let check = |snapshots: &[&Snapshot], had: u32, expected: u64| {
            assert_eq!(after(&before, snapshots, &times(&[(7, had)])), expected, "{had}");
        };
        check(&[&two], 30, 30);
        check(&[&two], 60, 15);
        // Once may be its begin.
        check(&[&two], 25, 30);
        check(&[&two, &four], 25, 35);
        // It waited for nothing; another's time.
        let idle = snapshot(5 + 50 * POINT, 5);
        check(&[&idle, &idle], 25, 30);
        assert_eq!(after(&before, &[&two, &four], &times(&[(8, 60)])), 30);
    }

    #[test]
    fn share_that_used_its_full_rate_demands_its_ceiling() {
        let (first, idle, at) = (snapshot(5, 5), Some(BTreeMap::new()), Instant::now());
        let (metered, _, memory) = measure(&first, &idle, None, UsageHistory::default(), at);
        let standing = share_statuses(&first, &idle, &metered, &BTreeMap::new(), nothing)[0];
        let had = [(
            first.shares[0].key(),
            GrantSummary { memory: orders(&[standing])[0].memory, ..GrantSummary::default() },
        )]
        .into();
        // It waits for each launch: 20 % of the GPU, and 50 ms a second in launches.
        let wants = |charged: u64| {
            let second = snapshot(5 + 2 * charged * POINT, 5 + 10 * POINT);
            let times = times(&[(7, 20)]);
            let (metered, ..) = measure(&second, &times, None, memory.clone(), at + Duration::from_secs(2));
            share_statuses(&second, &times, &metered, &had, nothing)[0].wants / POINT
        };
        assert_eq!([wants(30), wants(20)], [30, 26]);
    }

    #[test]
    fn counters_of_another_slot_owner_are_ignored() {
        let mut second = snapshot(60 * POINT, 2 * NS_PER_SECOND);
        let slots = second.shares[0].account.as_mut().expect("a page");
        slots.slots[0].report.owner = Owner(slots.slots[0].report.owner.0 + (1 << 32));
        assert_eq!(after(&snapshot(5, 5), &[&second, &second], &times(&[(7, 25)])), 30);
    }

    #[test]
    fn self_reported_usage_sets_demand_but_corrects_nothing() {
        let begin = Instant::now();
        let at = |charged: u64, waited: u64| {
            let mut snapshot = snapshot(charged * POINT, waited * POINT);
            snapshot.shares[0].policy.mig = Some(GpuUuid([7; 16]));
            snapshot.shares[0].policy.compute = Compute { ceiling: 80, ..snapshot.shares[0].policy.compute };
            snapshot
        };
        let (_, _, memory) = measure(&at(0, 0), &None, None, UsageHistory::default(), begin);
        let owes = controller::ControllerState::inherited([0.5f64, 3.0].map(f64::to_bits));
        let check = |charged: u64,
                     waited: u64,
                     joint: Option<(f64, bool)>,
                     expected: (u64, Attribution, [f64; 2])| {
            let snapshot = at(charged, waited);
            let (metered, ..) =
                measure(&snapshot, &None, None, memory.clone(), begin + Duration::from_secs(1));
            let had =
                [(snapshot.shares[0].key(), GrantSummary { memory: owes, ..GrantSummary::default() })].into();
            let is = share_statuses(&snapshot, &None, &metered, &had, |_| joint)[0];
            let trims = [is.memory.trim(false), is.memory.trim(true)];
            assert_eq!((is.wants / POINT, is.attribution, trims), expected, "{charged} {waited}");
        };
        check(0, 0, None, (0, Attribution::SelfReported, [0.5, 1.0]));
        check(20, 0, None, (26, Attribution::SelfReported, [0.5, 1.0]));
        check(30, 70, None, (80, Attribution::SelfReported, [0.5, 1.0]));
        check(30, 70, Some((1.5, true)), (80, Attribution::DeviceTotal { is_explained: true }, [0.5, 1.5]));
        check(30, 70, Some((1.5, false)), (80, Attribution::DeviceTotal { is_explained: false }, [0.5, 1.5]));
    }

    #[test]
    fn sole_share_of_an_instance_is_corrected_by_its_total() {
        const MIG: GpuUuid = GpuUuid([7; 16]);
        let at = |seconds: u64, busy: u64| {
            let mut snapshot = snapshot(30 * seconds * POINT, seconds * NS_PER_SECOND);
            snapshot.shares[0].policy.mig = Some(MIG);
            snapshot.uses[0].device.mig = Some(MIG);
            snapshot.mig_busy_ns = [(MIG, busy * POINT)].into();
            snapshot
        };
        // NVML's time of a process is not that of an instance.
        let times = times(&[(8, 90)]);
        let begin = Instant::now();
        let (metered, _, memory) = measure(&at(0, 0), &times, None, UsageHistory::default(), begin);
        let first = share_statuses(&at(0, 0), &times, &metered, &BTreeMap::new(), nothing)[0];
        assert_eq!(
            (first.attribution, first.wants),
            (Attribution::SelfReported, 0),
            "it may be another's that was there before"
        );
        let rate = |busy: u64| {
            let (mut memory, mut had, mut rate) = (memory.clone(), BTreeMap::new(), None);
            for second in 1..=2 {
                let snapshot = at(second, busy);
                let now = begin + Duration::from_secs(second);
                let (metered, _, after) = measure(&snapshot, &times, None, memory, now);
                let order = orders(&share_statuses(&snapshot, &times, &metered, &had, nothing))[0];
                had = [(
                    snapshot.shares[0].key(),
                    GrantSummary { memory: order.memory, ..GrantSummary::default() },
                )]
                .into();
                (memory, rate) = (after, order.rate);
            }
            rate.expect("it is limited") / POINT
        };
        // Beside others a kernel may look longer than it is: not here.
        assert_eq!([rate(30), rate(60), rate(20)], [30, 15, 30]);
    }

    #[test]
    fn new_and_excluded_shares_demand_their_ceiling() {
        let snapshot = snapshot(0, 0);
        let wants = |had: &BTreeMap<ShareKey, GrantSummary>, busy: u32| {
            let times = times(&[(7, busy)]);
            let (metered, ..) = measure(&snapshot, &times, None, UsageHistory::default(), Instant::now());
            share_statuses(&snapshot, &times, &metered, had, nothing)[0].wants / POINT
        };
        assert_eq!([wants(&BTreeMap::new(), 5), wants(&BTreeMap::new(), 0)], [30, 0]);
        let had = |wanted| {
            let had = GrantSummary { wanted, ..GrantSummary::default() };
            [(snapshot.shares[0].key(), had)].into()
        };
        assert_eq!([wants(&had(None), 5), wants(&had(Some(20 * POINT)), 5)], [7, 20]);
    }
}
