//! The GPU time and the memory of each share since the last snapshot.
//!
//! GPU time is known from two sources, and both are reported. NVML measures what the processes
//! used. The library reports what they were charged and how long they waited, on a page that they
//! can write.

use super::entitlement::{Entitlement, NS_PER_SECOND};
use super::{Device, Share, ShareKey, Slot, Snapshot};
use divvy_api::top::ShareUsage;
use divvy_pages::Owner;
use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

/// Per cent of the GPU's time by pid; `None` if NVML does not report it.
pub(crate) type PercentByPid = Option<BTreeMap<u32, u32>>;

/// The counters of all slots at the last snapshot.
#[derive(Clone, Debug, Default)]
pub(crate) struct UsageHistory {
    /// By share and slot index.
    slots: BTreeMap<ShareKey, BTreeMap<usize, SlotCounters>>,
    /// By share, the time charged under quanta: exact also after processes exited.
    charged: BTreeMap<ShareKey, u64>,
    at: Option<Instant>,
    until: Option<SampleEnd>,
}

/// The time counters of a slot, in nanoseconds: charged, waited, charged for long kernels, and not
/// charged for short ones.
#[derive(Clone, Copy, Debug)]
struct SlotCounters {
    owner: Owner,
    counters: [u64; SLOT_COUNTERS],
}

const SLOT_COUNTERS: usize = 4;

/// The longest time between two NVML samples: GPUs take six samples a second or as few as one (nvml.h,
/// `nvmlUtilization_t`).
const SAMPLE_INTERVAL_MAX: Duration = Duration::from_secs(1);
/// How much later than that the next sample may arrive.
const SAMPLE_JITTER_MAX: Duration = Duration::from_millis(125);

impl UsageHistory {
    /// The time from which NVML is queried, in microseconds of the system clock. This is the end of
    /// the last samples or, if the clock was set since then, the time of the last snapshot.
    pub(crate) fn query_from_us(&self) -> u64 {
        let since = self.at.map_or(SAMPLE_INTERVAL_MAX, |at| at.elapsed());
        let by_clock = micros(system_time().saturating_sub(since));
        let is_plausible = |until: &SampleEnd| {
            let now = until.us.saturating_add(micros(until.at.elapsed()));
            now.abs_diff(micros(system_time())) < micros(SAMPLE_INTERVAL_MAX)
        };
        self.until.filter(is_plausible).map_or(by_clock, |until| until.us)
    }

    /// Whether NVML reports nothing only because it took no sample since the last snapshot. If no
    /// sample arrives for longer than the sample interval, the processes were idle.
    pub(crate) fn awaits_sample(&self, percent_by_pid: &PercentByPid) -> bool {
        let is_empty = percent_by_pid.as_ref().is_some_and(BTreeMap::is_empty);
        is_empty && self.until.is_some_and(|until| until.age() < SAMPLE_INTERVAL_MAX + SAMPLE_JITTER_MAX)
    }
}

/// The end of the time that NVML's samples cover.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SampleEnd {
    /// Microseconds of the system clock, which NVML uses.
    us: u64,
    at: Instant,
}

impl SampleEnd {
    /// `None` if the time is in the future or too long ago for a sample.
    pub(crate) fn from_us(us: u64) -> Option<Self> {
        let age =
            system_time().checked_sub(Duration::from_micros(us)).filter(|age| *age <= SAMPLE_INTERVAL_MAX)?;
        Some(Self { us, at: Instant::now().checked_sub(age)? })
    }

    /// `None` if the moment lies before the epoch of the system clock.
    pub(crate) fn at(at: Instant) -> Option<Self> {
        Some(Self { us: micros(system_time().checked_sub(at.elapsed())?), at })
    }

    pub(crate) fn age(self) -> Duration {
        self.at.elapsed()
    }
}

/// Time since the epoch.
fn system_time() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// The GPU time of a share since the last snapshot, in nanoseconds per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShareTime {
    /// Measured by NVML; `None` if NVML does not report it.
    pub(crate) gpu_ns: Option<u64>,
    /// Used instead of `gpu_ns` if samples name one process each: the samples that name the share.
    /// Right on average.
    pub(crate) sampled_ns: Option<u64>,
    /// With `sampled_ns`: the samples named no other share, and no other share reported work.
    pub(crate) is_sole_user: bool,
    /// With `sampled_ns`: the share's own report, less the preemption of its kernels. For display only.
    pub(crate) estimated_ns: Option<u64>,
    /// Charged and waited, as the library reports; `None` at the first snapshot.
    pub(crate) reported_ns: Option<(u64, u64)>,
    /// Charged for kernels that are longer than a time slice.
    pub(crate) long_kernel_ns: u64,
    /// Possibly used but not charged ([`divvy_pages::account::SlotReport::undercharged_ns`]).
    pub(crate) undercharged_ns: u64,
    /// No process came or went since the last snapshot. The counters of a process that exited are lost.
    pub(crate) has_same_processes: bool,
}

/// Measures each share. Returns the times by share index, the time since the last snapshot, and the
/// new history.
pub(crate) fn measure(
    snapshot: &Snapshot,
    percent_by_pid: &PercentByPid,
    until: Option<SampleEnd>,
    history: UsageHistory,
    now: Instant,
) -> (Vec<ShareTime>, Option<Duration>, UsageHistory) {
    let since = history.at.map(|at| now.duration_since(at)).filter(|since| !since.is_zero());
    let per_second =
        |ns: u64, since: Duration| (u128::from(ns) * u128::from(NS_PER_SECOND) / since.as_nanos()) as u64;
    let measured = percent_by_pid.as_ref().map(|percent| gpu_time(snapshot, percent));
    let mut before = history.slots;
    let (mut slots, mut exactly_charged) = (BTreeMap::new(), BTreeMap::new());
    let mut times = Vec::new();
    for (at, share) in snapshot.shares.iter().enumerate() {
        let known = before.remove(&share.key());
        let is_known = known.is_some();
        let mut counters = known.unwrap_or_default();
        let ([charged, waited, long, undercharged], has_same_processes) = count_since(share, &mut counters);
        let since = since.filter(|_| is_known);
        let exact = share.account.as_ref().map_or(0, |account| account.charged_ns);
        let before = history.charged.get(&share.key()).copied().unwrap_or(exact);
        let charged = charged.max(exact.saturating_sub(before));
        exactly_charged.insert(share.key(), exact);
        times.push(ShareTime {
            gpu_ns: match share.policy.mig {
                None => measured.as_ref().map(|measured| measured.get(&at).copied().unwrap_or(0)),
                // The time of a new share may still include that of an earlier one.
                Some(mig) => {
                    snapshot.mig_busy_ns.get(&mig).filter(|_| is_known && is_alone(snapshot, at)).copied()
                }
            },
            reported_ns: since.map(|since| (per_second(charged, since), per_second(waited, since))),
            long_kernel_ns: since.map_or(0, |since| per_second(long, since)),
            undercharged_ns: since.map_or(0, |since| per_second(undercharged, since)),
            has_same_processes: since.is_some() && has_same_processes,
            ..ShareTime::default()
        });
        slots.insert(share.key(), counters);
    }
    (times, since, UsageHistory { slots, charged: exactly_charged, at: Some(now), until })
}

/// Converts per cent of a GPU's time to nanoseconds per second.
pub(crate) fn percent_to_ns(percent: u32) -> u64 {
    u64::from(percent) * (NS_PER_SECOND / 100)
}

/// Whether the share is the only one on its device and all running processes there belong to it.
fn is_alone(snapshot: &Snapshot, at: usize) -> bool {
    let device = snapshot.shares[at].device();
    if snapshot.shares.iter().filter(|share| share.device() == device).count() > 1 {
        return false;
    }
    let mut here = snapshot.uses.iter().filter(|usage| usage.device == device);
    here.all(|usage| {
        snapshot.processes.get(&usage.pid).is_none_or(|process| snapshot.shares_of(process).contains(&at))
    })
}

/// The time that the processes of each share used, in nanoseconds per second by share index. The
/// time of a process with several shares is split in proportion to their guarantees.
fn gpu_time(snapshot: &Snapshot, percent_by_pid: &BTreeMap<u32, u32>) -> BTreeMap<usize, u64> {
    let mut times: BTreeMap<usize, u64> = BTreeMap::new();
    for (pid, percent) in percent_by_pid {
        let Some(process) = snapshot.processes.get(pid) else { continue };
        let used = percent_to_ns(*percent);
        let shares: Vec<(usize, u64)> = snapshot
            .shares_of(process)
            .into_iter()
            .map(|at| (at, u64::from(snapshot.shares[at].policy.compute.cores.max(1))))
            .collect();
        let sum: u64 = shares.iter().map(|(_, cores)| cores).sum();
        for (at, cores) in shares {
            let time = times.entry(at).or_default();
            *time = time.saturating_add(used * cores / sum.max(1)).min(NS_PER_SECOND);
        }
    }
    times
}

/// Adds up what the counters of a share's slots gained since the last snapshot, and replaces them
/// by the current ones. The second result is whether the slots have the same owners as before.
fn count_since(share: &Share, slots: &mut BTreeMap<usize, SlotCounters>) -> ([u64; SLOT_COUNTERS], bool) {
    let now: &[Slot] = share.account.as_ref().map(|account| account.slots.as_slice()).unwrap_or_default();
    let mut sums = [0_u64; SLOT_COUNTERS];
    let mut current = BTreeMap::new();
    for slot in now.iter().filter(|slot| slot.is_live()) {
        let report = &slot.report;
        let counters = [report.charged_ns, report.waited_ns, report.long_kernel_ns, report.undercharged_ns];
        let is = SlotCounters { owner: report.owner, counters };
        if let Some(was) = slots.get(&report.index).filter(|was| was.owner == is.owner) {
            for ((sum, is), was) in sums.iter_mut().zip(is.counters).zip(was.counters) {
                // Containers write these counters, so any value is possible.
                *sum = sum.saturating_add(is.saturating_sub(was));
            }
        }
        current.insert(report.index, is);
    }
    let are_same =
        slots.iter().map(|(at, was)| (at, was.owner)).eq(current.iter().map(|(at, is)| (at, is.owner)));
    *slots = current;
    (sums, are_same)
}

/// The usage that `divvy top` shows, without running totals. `sampled_at_ms` is in milliseconds of
/// the system clock.
pub(crate) fn report(snapshot: &Snapshot, times: &[ShareTime], sampled_at_ms: u64) -> Vec<ShareUsage> {
    let percent =
        |ns: u64| u32::try_from((ns + NS_PER_SECOND / 200) / (NS_PER_SECOND / 100)).unwrap_or(u32::MAX);
    let bytes = nvml_memory(snapshot);
    let usage = |(at, share): (usize, &Share)| {
        let entitlement = Entitlement::of(share.policy.compute);
        let ShareTime { gpu_ns, estimated_ns, reported_ns, .. } = times.get(at).copied().unwrap_or_default();
        let account = share.account.as_ref().ok();
        let live = account.map_or(0, |account| account.slots.iter().filter(|slot| slot.is_live()).count());
        let Device { gpu, mig } = share.device();
        ShareUsage {
            sampled_at_ms,
            namespace: None,
            claim: None,
            claim_uid: share.claim.clone(),
            share: share.id.clone(),
            gpu: format!("GPU-{gpu}"),
            mig: mig.map(|mig| format!("MIG-{mig}")),
            memory_limit_bytes: share.policy.memory.limit,
            memory_used_bytes: account.map(|account| account.used),
            memory_used_nvml_bytes: bytes.get(at).copied().flatten(),
            compute_request_percent: percent(entitlement.guarantee),
            compute_limit_percent: percent(entitlement.ceiling),
            weight: entitlement.weight,
            priority: share.policy.compute.priority,
            compute_used_nvml_percent: gpu_ns.or(estimated_ns).map(percent),
            compute_used_percent: reported_ns.map(|(charged, _)| percent(charged)),
            throttled_ms: reported_ns.map(|(_, waited)| waited / 1_000_000),
            processes: u32::try_from(live).unwrap_or(u32::MAX),
            gpu_time_attribution: None,
            totals: None,
        }
    };
    snapshot.shares.iter().enumerate().map(usage).collect()
}

/// Device memory in bytes that NVML reports for each share, by index. `None` if a process with
/// several shares has some of it, because its memory cannot be assigned to one of them.
fn nvml_memory(snapshot: &Snapshot) -> Vec<Option<u64>> {
    let mut all = vec![Some(0_u64); snapshot.shares.len()];
    for usage in &snapshot.uses {
        let Some(process) = snapshot.processes.get(&usage.pid) else { continue };
        let mut here = snapshot.shares_of(process);
        here.retain(|at| snapshot.shares[*at].device() == usage.device);
        for at in &here {
            let sum = all[*at].zip(usage.bytes).filter(|_| here.len() == 1);
            all[*at] = sum.map(|(sum, bytes)| sum.saturating_add(bytes));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::snapshot::ProcessMemory;
    use crate::shares::snapshot::fixture::{CONTEXT, Fixture};
    use divvy_pages::{Compute, GpuUuid};

    const MIB: u64 = 1 << 20;

    /// A share of 30 to 60 % whose process 7 reports this charged and waited time, in nanoseconds.
    fn snapshot(charged: u64, waited: u64) -> Snapshot {
        let mut fixture = Fixture::share(10_000);
        fixture.process(7).has(CONTEXT + 20).slot(7, CONTEXT);
        let mut snapshot = fixture.snapshot();
        snapshot.shares[0].policy.compute =
            Compute { cores: 30, ceiling: 60, priority: 2, ..Compute::default() };
        let slots = snapshot.shares[0].account.as_mut().expect("a page");
        let report = &mut slots.slots[0].report;
        (report.charged_ns, report.waited_ns) = (charged, waited);
        snapshot
    }

    fn times(all: &[(u32, u32)]) -> PercentByPid {
        Some(all.iter().copied().collect())
    }

    #[test]
    fn usage_covers_the_time_since_the_last_snapshot() {
        let begin = Instant::now();
        let (metered, since, memory) =
            measure(&snapshot(5, 5), &times(&[(7, 20)]), None, UsageHistory::default(), begin);
        assert_eq!(
            (metered, since),
            (vec![ShareTime { gpu_ns: Some(NS_PER_SECOND / 5), ..ShareTime::default() }], None)
        );
        let later = snapshot(5 + NS_PER_SECOND, 5 + 3 * NS_PER_SECOND);
        let two = Duration::from_secs(2);
        let (metered, since, _) = measure(&later, &times(&[(7, 40)]), None, memory.clone(), begin + two);
        let reported = Some((NS_PER_SECOND / 2, NS_PER_SECOND / 2 * 3));
        assert_eq!(
            (metered.as_slice(), since),
            (
                [ShareTime {
                    gpu_ns: Some(NS_PER_SECOND / 5 * 2),
                    reported_ns: reported,
                    has_same_processes: true,
                    ..ShareTime::default()
                }]
                .as_slice(),
                Some(two)
            )
        );
        let usage = report(&later, &metered, 9);
        let [now] = usage.as_slice() else { panic!("one share") };
        assert_eq!(
            (now.compute_request_percent, now.compute_limit_percent, now.weight, now.priority),
            (30, 60, 1, 2)
        );
        assert_eq!(
            (now.compute_used_nvml_percent, now.compute_used_percent, now.throttled_ms),
            (Some(40), Some(50), Some(1500))
        );
        assert_eq!((now.memory_used_bytes, now.processes, now.sampled_at_ms), (Some(CONTEXT * MIB), 1, 9));
        assert_eq!(now.memory_used_nvml_bytes, Some((CONTEXT + 20) * MIB));
    }

    #[test]
    fn unknown_usage_is_not_reported() {
        let now = Instant::now();
        let (metered, ..) = measure(&snapshot(0, 0), &None, None, UsageHistory::default(), now);
        assert_eq!(metered, [ShareTime::default()]);
        let mut instance = snapshot(0, 0);
        instance.shares[0].policy.mig = Some(GpuUuid([7; 16]));
        let (metered, ..) = measure(&instance, &times(&[(7, 40)]), None, UsageHistory::default(), now);
        assert_eq!(metered, [ShareTime::default()]);
        // The memory of a process with two shares belongs to neither.
        let mut fixture = Fixture::share(10_000);
        fixture.second_share(10_000).process(7).has(20);
        let usage = report(&fixture.snapshot(), &[], 0);
        assert_eq!(usage.iter().map(|now| now.memory_used_nvml_bytes).collect::<Vec<_>>(), [None, None]);
    }

    #[test]
    fn instance_total_belongs_to_its_only_share() {
        const MIG: GpuUuid = GpuUuid([7; 16]);
        let begin = Instant::now();
        let on = |change: fn(&mut Snapshot)| {
            let mut snapshot = snapshot(0, 0);
            snapshot.shares[0].policy.mig = Some(MIG);
            snapshot.uses[0].device.mig = Some(MIG);
            snapshot.mig_busy_ns = [(MIG, NS_PER_SECOND / 5)].into();
            change(&mut snapshot);
            snapshot
        };
        let (metered, _, memory) = measure(&on(|_| ()), &None, None, UsageHistory::default(), begin);
        assert_eq!(metered, [ShareTime::default()], "the time may belong to an earlier share");
        let check = |change: fn(&mut Snapshot), expected: Option<u64>| {
            let later = begin + Duration::from_secs(1);
            let (metered, ..) = measure(&on(change), &None, None, memory.clone(), later);
            assert_eq!(metered[0].gpu_ns, expected);
        };
        check(|_| (), Some(NS_PER_SECOND / 5));
        check(|snapshot| snapshot.mig_busy_ns = [].into(), None);
        fn another(snapshot: &mut Snapshot, is_there: bool) {
            let mut fixture = Fixture::share(10_000);
            let other = fixture.process(9).elsewhere_cgroup().sees("").has(20).snapshot();
            let usage = ProcessMemory { device: snapshot.uses[0].device, ..other.uses[0] };
            snapshot.uses.push(usage);
            snapshot.processes.extend(other.processes.into_iter().filter(|_| is_there));
        }
        check(|snapshot| another(snapshot, true), None);
        // The other process exited, or it is on another instance.
        check(|snapshot| another(snapshot, false), Some(NS_PER_SECOND / 5));
        check(
            |snapshot| {
                another(snapshot, true);
                snapshot.uses[1].device.mig = Some(GpuUuid([8; 16]));
            },
            Some(NS_PER_SECOND / 5),
        );
    }

    #[test]
    fn missing_sample_is_awaited() {
        let check = |ago_ms: Option<u64>, had: &PercentByPid, expected: bool| {
            let until = ago_ms.and_then(|ago| {
                let at = Instant::now().checked_sub(Duration::from_millis(ago))?;
                Some(SampleEnd { us: micros(system_time()) - ago * 1000, at })
            });
            let memory = UsageHistory { until, ..UsageHistory::default() };
            assert_eq!(memory.awaits_sample(had), expected, "{ago_ms:?} {had:?}");
        };
        check(Some(500), &times(&[]), true);
        check(Some(1000), &times(&[]), true);
        check(Some(2000), &times(&[]), false);
        check(None, &times(&[]), false);
        check(Some(500), &times(&[(7, 1)]), false);
        check(Some(500), &None, false);
    }

    #[test]
    fn nvml_is_queried_from_the_last_sample() {
        let now = micros(system_time());
        let since = |us: Option<u64>, at: Option<Instant>| {
            let until = us.and_then(SampleEnd::from_us);
            UsageHistory { at, until, ..UsageHistory::default() }.query_from_us()
        };
        let at = Some(Instant::now());
        assert_eq!(since(Some(now - 150_000), at), now - 150_000);
        // No sample, or an implausible time: query from the last snapshot, or a second ago.
        for us in [None, Some(0), Some(now + 5_000_000), Some(now - 5_000_000)] {
            assert!(since(us, at).abs_diff(now) < 500_000, "{us:?}");
            assert!(since(us, None).abs_diff(now - 1_000_000) < 500_000, "{us:?}");
        }
        // The system clock was set.
        let until = SampleEnd { us: now + 60_000_000, at: Instant::now() };
        let memory = UsageHistory { at, until: Some(until), ..UsageHistory::default() };
        assert!(memory.query_from_us().abs_diff(now) < 500_000);
    }
}
