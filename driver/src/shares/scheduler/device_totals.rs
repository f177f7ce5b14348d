//! Compares the total time of a device with what its shares report.
//!
//! NVML knows the busy time of a MIG instance (Hopper and later) but not of its processes. The same
//! holds for a GPU whose samples name one process each ([`super::sample_attribution`]). With
//! several shares on such a device, the total shows whether their reports can be true, and how much
//! longer their kernels look ([`super::preemption_inflation`]).

use super::controller::{Entitlement, NS_PER_SECOND, POINT};
use super::preemption_inflation::{Part, PreemptionInflation};
use super::under_charge::UnderCharge;
use crate::shares::snapshot::finding::{Finding, Kind};
use crate::shares::snapshot::usage::ShareTime;
use crate::shares::snapshot::{Device, Share, ShareKey, Snapshot};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

pub(crate) type DeviceTotals = BTreeMap<Device, DeviceTotal>;

/// Initial and maximum back-off while self-reported usage is ignored.
const DOUBT: Duration = Duration::from_secs(30);
const LONGEST: Duration = Duration::from_secs(1800);
/// The device may be active for this fraction longer than the shares report, and for a point.
const SLACK: u64 = 20;
/// Tolerated unexplained time in all, in nanoseconds: kernels are charged an estimate until they
/// are measured, and the difference later.
const UNTOLD: u64 = NS_PER_SECOND / 5;
/// During distrust, this unexplained time is no estimate any more.
const TOO_MUCH: u64 = NS_PER_SECOND / 2;

/// State of the shares of a device.
///
/// *Distrust.* A preempted kernel is charged the time of
/// its fastest launches, and the node adds what that leaves out. This holds while the shares'
/// reports explain the total. Otherwise all measured launch time is charged, for [`DOUBT`] at first
/// and twice as long each time. If something stays unexplained even then, one of the shares is not
/// paced. It is unknown which one, so all of them are reported ([`findings`]) and no process is
/// killed. The distrust ends then, because it would give honest shares less beside that one. It
/// also ends when a share leaves that was present when it began.
///
/// Only the time in which multiprocessors were active must be explained. A device that switches
/// between processes counts as busy during the switches. GPUs before Hopper do not report active
/// time, so nothing is distrusted there.
///
/// *Varying kernels* are charged less than they used. The undercharge explains the total as well,
/// and is charged to the shares to that extent ([`super::under_charge`]).
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DeviceTotal {
    cuts: PreemptionInflation,
    spared: UnderCharge,
    /// Unexplained time in nanoseconds; whether it was [`TOO_MUCH`] during distrust and continues;
    /// and both figures of the last snapshot, in nanoseconds per second.
    untold: u64,
    is_dark: bool,
    had: (u64, u64),
    doubted_until: Option<Instant>,
    lasts: Duration,
    /// The shares that were present when time was unexplained.
    doubted: BTreeSet<ShareKey>,
}

impl Default for DeviceTotal {
    fn default() -> Self {
        Self {
            cuts: PreemptionInflation::default(),
            spared: UnderCharge::default(),
            untold: 0,
            is_dark: false,
            had: (0, 0),
            doubted_until: None,
            lasts: DOUBT,
            doubted: BTreeSet::new(),
        }
    }
}

impl DeviceTotal {
    pub(crate) fn trim(&self, share: &ShareKey) -> f64 {
        self.cuts.trim(share) / self.spared.more(share)
    }

    pub(crate) fn is_doubted(&self, now: Instant) -> bool {
        !self.is_dark && self.doubted_until.is_some_and(|until| now < until)
    }

    /// The state after a snapshot, `since` after the previous one, with the busy time of the device
    /// and, where known, of its multiprocessors.
    fn after(
        mut self,
        (busy, active): (u64, Option<u64>),
        parts: Vec<(ShareKey, Part)>,
        since: Duration,
        now: Instant,
    ) -> Self {
        let is_doubted = self.is_doubted(now);
        let was_doubted = now.checked_sub(since).is_some_and(|then| self.is_doubted(then));
        let said = parts
            .iter()
            .fold(0_u64, |sum, (_, part)| sum.saturating_add(part.charged).saturating_add(part.spared));
        let time = |rate: u64| (u128::from(rate) * since.as_nanos() / u128::from(NS_PER_SECOND)) as u64;
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
        // Kernels that are charged differently from now on have no history.
        let is_same = self.is_doubted(now) == was_doubted;
        (self.spared, self.cuts) = if is_same {
            let parts = spared.added(parts);
            // The total in NVML's samples may be from a time before a share began.
            (spared, self.cuts.after(busy.max(active), &parts, since, was_doubted))
        } else {
            Default::default()
        };
        self
    }
}

/// Updates the totals of devices with several shares whose total time is known. `since` is the time
/// since the last snapshot, `due` the time that each share should have had in nanoseconds per
/// second. The state of a GPU is kept while one of its shares is active alone.
pub(crate) fn update(
    snapshot: &Snapshot,
    metered: &[ShareTime],
    due: impl Fn(&Share, &ShareTime) -> u64,
    since: Option<Duration>,
    before: &DeviceTotals,
    now: Instant,
) -> DeviceTotals {
    let mut parts: BTreeMap<Device, Vec<Option<(ShareKey, Part)>>> = BTreeMap::new();
    let there: BTreeSet<(Device, ShareKey)> =
        snapshot.shares.iter().map(|share| (share.device(), share.key())).collect();
    for (share, metered) in
        snapshot.shares.iter().zip(metered).filter(|(_, metered)| metered.gpu_ns.is_none())
    {
        // Shares that have just come, and reports of shares that left, are unknown.
        let part = metered.reported_ns.filter(|_| metered.has_same_processes).map(|(charged, _)| {
            // A share has no more than the instance, in whatever streams.
            let part = Part {
                charged: charged.min(NS_PER_SECOND),
                long: metered.long_kernel_ns,
                spared: metered.undercharged_ns.min(NS_PER_SECOND),
                due: due(share, metered),
                ceiling: Entitlement::of(share.policy.compute).ceiling,
            };
            (share.key(), part)
        });
        parts.entry(share.device()).or_default().push(part);
    }
    let is_left = |(device, _): &(&Device, &DeviceTotal)| {
        let is_whole = device.mig.is_none() && !parts.contains_key(device);
        is_whole && there.iter().any(|(other, _)| other == *device)
    };
    let left: Vec<_> =
        before.iter().filter(is_left).map(|(device, joint)| (*device, joint.clone())).collect();
    let joint = |(device, parts): (Device, Vec<Option<(ShareKey, Part)>>)| {
        let are_there =
            |joint: &&DeviceTotal| joint.doubted.iter().all(|share| there.contains(&(device, share.clone())));
        let before = before.get(&device).filter(are_there).cloned();
        let parts: Option<Vec<_>> = parts.into_iter().collect();
        let known = snapshot.busy_ns(device).zip(since).zip(parts);
        Some((
            device,
            match (before, known) {
                (Some(before), Some(((busy, since), parts))) => {
                    let active = snapshot.sm_active_ns.get(&device.mig).copied();
                    before.after((busy, active), parts, since, now)
                }
                // Up to now they need not have been paced, and said nothing.
                (None, Some(_)) => DeviceTotal::default(),
                (before, None) => before?,
            },
        ))
    };
    parts.into_iter().filter_map(joint).chain(left).collect()
}

/// Findings about the shares of devices on which one share is not throttled. None if a process of
/// no share is on the device, because it may be the cause.
pub(crate) fn findings(snapshot: &Snapshot, joint: &DeviceTotals) -> Vec<Finding> {
    let is_of_shares = |device: &Device| {
        let processes = snapshot.uses.iter().filter(|usage| usage.device == *device);
        let mut known = processes.filter_map(|usage| snapshot.processes.get(&usage.pid));
        known.all(|process| !snapshot.shares_of(process).is_empty())
    };
    let tell = |share: &Share| {
        let joint = joint.get(&share.device()).filter(|joint| joint.is_dark)?;
        let device = if share.policy.mig.is_some() { "MIG instance" } else { "GPU" };
        let (had, said) = (joint.had.0 / POINT, joint.had.1 / POINT);
        let text = format!(
            "the shares of the claim's {device} used {had} % of its time in the last second, but their \
             processes report {said} %: one of them is not throttled"
        );
        let finding = Finding { certain: true, ..Finding::about(share, Kind::OverComputeLimit, None, text) };
        is_of_shares(&share.device()).then_some(finding)
    };
    snapshot.shares.iter().filter_map(tell).collect()
}

#[cfg(test)]
mod tests {
    use super::super::preemption_inflation::tests::{key, part};
    use super::*;
    use crate::shares::snapshot::fixture::{CONTEXT, Fixture};
    use divvy_pages::GpuUuid;

    const MIG: GpuUuid = GpuUuid([7; 16]);
    const DEVICE: Device = Device { gpu: GpuUuid([1; 16]), mig: Some(MIG) };

    /// Snapshots a second apart, with the active time of the device in points.
    fn after(snapshots: &[(u64, Vec<Part>)]) -> (DeviceTotal, Instant) {
        let mut now = Instant::now();
        let mut joint = DeviceTotal::default();
        for (busy, parts) in snapshots {
            now += Duration::from_secs(1);
            let parts = parts.iter().enumerate().map(|(number, part)| (key(number), *part)).collect();
            joint = joint.after((busy * POINT, Some(busy * POINT)), parts, Duration::from_secs(1), now);
        }
        (joint, now)
    }

    #[test]
    fn unexplained_totals_distrust_reports_with_back_off() {
        let odd = (90, vec![part(30, 0), part(50, 0)]);
        let even = (80, odd.1.clone());
        let check = |snapshots: &[&(u64, Vec<Part>)], expected: Option<u64>| {
            let (joint, now) = after(&snapshots.iter().copied().cloned().collect::<Vec<_>>());
            let until = joint.doubted_until.map(|until| until.saturating_duration_since(now).as_secs());
            assert_eq!(until, expected, "{joint:?}");
            assert_eq!(joint.is_doubted(now), expected.is_some_and(|until| until > 0));
        };
        check(&[&odd; 3], None);
        // Time that was measured with a delay.
        check(&[&odd, &odd, &odd, &even, &odd], None);
        check(&[&odd; 4], Some(30));
        check(&[&[&odd; 4][..], &[&even; 31], &[&odd; 4]].concat(), Some(60));
        check(&[&[&odd; 4][..], &[&even; 45]].concat(), Some(0));
        // It was forgotten.
        check(&[&[&odd; 4][..], &[&even; 95]].concat(), None);
    }

    #[test]
    fn idle_activity_is_no_reason_for_distrust() {
        for active in [Some(40 * POINT), None] {
            let mut joint = DeviceTotal::default();
            let mut now = Instant::now();
            for _ in 0..60 {
                now += Duration::from_secs(1);
                let parts = [(key(0), part(24, 0)), (key(1), part(17, 0))].into();
                joint = joint.after((NS_PER_SECOND, active), parts, Duration::from_secs(1), now);
                assert!(!joint.is_doubted(now) && !joint.is_dark, "{joint:?}");
            }
            assert!((joint.trim(&key(0)) - 1.0).abs() < 1e-9);
        }
    }

    #[test]
    fn undercharged_time_explains_use_and_lowers_rates() {
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
    fn during_distrust_missing_time_counts_as_preemption() {
        let odd = (90, vec![part(30, 0), part(50, 0)]);
        let (joint, _) = after(&[vec![odd.clone(); 4], vec![(60, odd.1); 20]].concat());
        assert!((joint.trim(&key(0)) - 1.5).abs() < 0.01, "{joint:?}");
    }

    #[test]
    fn unexplained_use_is_reported_for_all_shares() {
        let odd = (90, vec![part(30, 0), part(10, 0)]);
        let even = (40, odd.1.clone());
        let check = |snapshots: &[&(u64, Vec<Part>)], stranger: bool, expected: &[&str]| {
            let (joint, _) = after(&snapshots.iter().copied().cloned().collect::<Vec<_>>());
            let mut fixture = Fixture::share(10_000);
            fixture.second_share(10_000).process(7).has(CONTEXT).slot(7, CONTEXT);
            if stranger {
                fixture.process(9).elsewhere_cgroup().sees("").has(20);
            }
            let mut snapshot = fixture.snapshot();
            snapshot.shares.iter_mut().for_each(|share| share.policy.mig = Some(MIG));
            snapshot.uses.iter_mut().for_each(|usage| usage.device.mig = Some(MIG));
            let found = findings(&snapshot, &[(DEVICE, joint)].into());
            assert!(found.iter().all(|finding| finding.process.is_none() && finding.certain));
            assert_eq!(found.len(), expected.len(), "{found:?}");
            for (finding, expected) in found.iter().zip(expected) {
                assert!(finding.text.contains(expected), "{finding}");
            }
        };
        let both = &["used 90 % of its time in the last second, but their processes report 40 %"; 2];
        check(&[&odd; 2], false, &[]);
        check(&[&odd; 4], false, both);
        check(&[&odd; 5], false, both);
        check(&[&odd; 5], true, &[]);
        check(&[&odd, &odd, &odd, &odd, &even], false, &[]);
        check(&[&even; 9], false, &[]);
    }

    #[test]
    fn new_and_gone_shares_cause_no_distrust() {
        let mut fixture = Fixture::share(10_000);
        fixture.second_share(10_000);
        let mut snapshot = fixture.snapshot();
        snapshot.shares.iter_mut().for_each(|share| share.policy.mig = Some(MIG));
        (snapshot.mig_busy_ns, snapshot.sm_active_ns) =
            ([(MIG, NS_PER_SECOND)].into(), [(Some(MIG), NS_PER_SECOND)].into());
        let since = Some(Duration::from_secs(4));
        let says = |is_steady| ShareTime {
            reported_ns: Some((10 * POINT, 0)),
            has_same_processes: is_steady,
            ..ShareTime::default()
        };
        let update = |all: [ShareTime; 2], before: &DeviceTotals| {
            super::update(&snapshot, &all, |_, _| 0, since, before, Instant::now())
        };
        let nobody = DeviceTotals::new();
        assert_eq!(update([says(true), ShareTime::default()], &nobody), nobody);
        let first = update([says(true); 2], &nobody);
        assert_eq!(first, [(DEVICE, DeviceTotal::default())].into());
        for unknown in [says(false), ShareTime::default()] {
            assert_eq!(update([says(true), unknown], &first), first);
        }
        assert!(update([says(true); 2], &first)[&DEVICE].is_doubted(Instant::now()));
    }

    #[test]
    fn distrust_ends_when_a_share_leaves() {
        let mut snapshot = Fixture::share(10_000).snapshot();
        snapshot.shares[0].policy.mig = Some(MIG);
        let of = |name: &str| Share { claim: name.into(), ..snapshot.shares[0].clone() };
        let all = ["a", "b", "c", "d"].map(of);
        let now = Instant::now();
        let update = |at: &[usize], busy: u64, before: &DeviceTotals| {
            let says = ShareTime {
                reported_ns: Some((10 * POINT, 0)),
                has_same_processes: true,
                ..ShareTime::default()
            };
            let shares = at.iter().map(|at| all[*at].clone()).collect();
            let (busy, active) = ([(MIG, busy * POINT)].into(), [(Some(MIG), busy * POINT)].into());
            let snapshot = Snapshot { shares, mig_busy_ns: busy, sm_active_ns: active, ..snapshot.clone() };
            super::update(
                &snapshot,
                &vec![says; at.len()],
                |_, _| 0,
                Some(Duration::from_secs(4)),
                before,
                now,
            )
        };
        let doubted = update(&[0, 1, 2], 90, &update(&[0, 1, 2], 90, &DeviceTotals::new()));
        let check = |at: &[usize], expected: bool| {
            let joint = update(at, 10 * at.len() as u64, &doubted);
            assert_eq!(joint[&DEVICE].is_doubted(now), expected, "{at:?}");
        };
        check(&[0, 1, 2], true);
        check(&[0, 1, 2, 3], true);
        check(&[0, 2], false);
        check(&[0, 2, 3], false);
    }
}
