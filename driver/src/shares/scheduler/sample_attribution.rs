//! Handles samples of a GPU's time that name one process each.
//!
//! Where processes take turns on a GPU, a sample may hold the time of all of them and name only one,
//! with a probability that equals its part ([`divvy_nvml::ProcessUtilization::is_per_process`]). For
//! a share that is active alone this is as good as its own time. Beside others, five such samples a
//! second show each share's time only after minutes. So only their total is known, as on a MIG
//! instance.

use super::controller::NS_PER_SECOND;
use crate::shares::snapshot::usage::{PercentByPid, ShareTime, percent_to_ns};
use crate::shares::snapshot::{ShareKey, Snapshot};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A share that was active within this time may still be. A share with a third of the time that
/// reports nothing may be named by none of five samples a second for a second or two.
const LATELY: Duration = Duration::from_secs(5);
/// The state of a GPU.
#[derive(Clone, Debug, Default)]
pub(crate) struct AttributionState {
    /// NVML's samples were seen to be per process. Until then they may name one process each, as on
    /// most GPUs. All five samples of a second may name the share with most of the time, so taking
    /// them as each share's own time would be wrong by half.
    pub(crate) is_per_process: bool,
    /// When a share was last seen to work, by its report or by samples; `None`: a process without a
    /// share.
    worked: BTreeMap<Option<ShareKey>, Instant>,
}

/// Returns the total time of all processes in nanoseconds per second, if samples name one process
/// each and more than one share, or a share and an unmanaged process, is active. Then the time of
/// each share is moved to `sampled_ns`.
pub(crate) fn attribute(
    snapshot: &Snapshot,
    times: &PercentByPid,
    is_per_process: Option<bool>,
    metered: &mut [ShareTime],
    memory: &mut AttributionState,
    now: Instant,
) -> Option<u64> {
    memory.is_per_process = is_per_process.unwrap_or(memory.is_per_process);
    let times = times.as_ref().filter(|_| !memory.is_per_process)?;
    let mut of_gpu: Vec<_> =
        snapshot.shares.iter().zip(metered).filter(|(share, _)| share.policy.mig.is_none()).collect();
    let works = |metered: &ShareTime| {
        metered.gpu_ns.is_some_and(|busy| busy > 0)
            || metered.reported_ns.is_some_and(|(charged, _)| charged > 0)
    };
    let at_work = of_gpu.iter().filter(|(_, metered)| works(metered)).map(|(share, _)| Some(share.key()));
    let others = times.keys().any(|pid| is_of_none(snapshot, *pid)).then_some(None);
    let at_work: Vec<_> = at_work.chain(others).collect();
    let is_sole = at_work.len() == 1;
    memory.worked.extend(at_work.into_iter().map(|who| (who, now)));
    let is_there = |who: &Option<ShareKey>| {
        who.as_ref().is_none_or(|key| of_gpu.iter().any(|(share, _)| share.key() == *key))
    };
    memory.worked.retain(|who, at| is_there(who) && now.duration_since(*at) < LATELY);
    if memory.worked.len() < 2 {
        return None;
    }
    for (_, metered) in &mut of_gpu {
        metered.is_sole_user = is_sole && works(metered);
        metered.sampled_ns = metered.gpu_ns.take();
    }
    Some(times.values().map(|percent| percent_to_ns(*percent)).sum::<u64>().min(NS_PER_SECOND))
}

/// Whether a process belongs to no share. A process that has ended belongs to none.
fn is_of_none(snapshot: &Snapshot, pid: u32) -> bool {
    snapshot.processes.get(&pid).is_none_or(|process| snapshot.shares_of(process).is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::snapshot::fixture::{CONTEXT, Fixture};

    fn times(all: &[(u32, u32)]) -> PercentByPid {
        Some(all.iter().copied().collect())
    }

    #[test]
    fn sampled_attribution_knows_only_the_total() {
        let mut fixture = Fixture::share(10_000);
        fixture
            .second_share(10_000)
            .process(7)
            .has(CONTEXT)
            .slot(7, CONTEXT)
            .process(8)
            .elsewhere_cgroup()
            .sees("");
        let snapshot = fixture.snapshot();
        let says = |busy: u64, charged: u64| ShareTime {
            gpu_ns: Some(busy * NS_PER_SECOND / 100),
            reported_ns: Some((charged * NS_PER_SECOND / 100, 0)),
            ..ShareTime::default()
        };
        let now = Instant::now();
        // For each share its measured and its reported time, and the processes that samples name.
        let check = |is_per_process: Option<bool>,
                     all: [(u64, u64); 2],
                     told: &[(u32, u32)],
                     expected: Option<u64>| {
            let mut metered = all.map(|(busy, charged)| says(busy, charged));
            let mut memory = AttributionState::default();
            let whole = attribute(&snapshot, &times(told), is_per_process, &mut metered, &mut memory, now);
            assert_eq!(
                whole.map(|whole| whole / (NS_PER_SECOND / 100)),
                expected,
                "{is_per_process:?} {all:?} {told:?}"
            );
            assert!(metered.iter().all(|metered| metered.gpu_ns.is_none() == expected.is_some()));
        };
        let (both, one) = ([(60, 30), (20, 50)], [(80, 30), (0, 50)]);
        check(Some(false), both, &[(7, 60), (9, 20)], Some(80));
        check(Some(false), one, &[(7, 80)], Some(80));
        check(Some(true), both, &[(7, 80)], None);
        // Nothing was seen of it yet.
        check(None, both, &[(7, 80)], Some(80));
        // One share works alone, or beside a process without a share.
        check(Some(false), [(30, 30), (0, 0)], &[(7, 30)], None);
        check(Some(false), [(30, 30), (0, 0)], &[(7, 30), (8, 40)], Some(70));
        // A result is kept.
        for is_per_process in [true, false] {
            let mut memory = AttributionState::default();
            let mut metered = one.map(|(busy, charged)| says(busy, charged));
            attribute(
                &snapshot,
                &times(&[(7, 60), (8, 20)]),
                Some(is_per_process),
                &mut metered,
                &mut memory,
                now,
            );
            let mut metered = one.map(|(busy, charged)| says(busy, charged));
            let whole = attribute(&snapshot, &times(&[(7, 80)]), None, &mut metered, &mut memory, now);
            assert_eq!(whole.is_none(), is_per_process);
        }
        // No sample named the other share for a second, which proves nothing: it may have used as
        // much time.
        let mut memory = AttributionState::default();
        let mut metered = one.map(|(busy, charged)| says(busy, charged));
        attribute(&snapshot, &times(&[(7, 60), (8, 20)]), Some(false), &mut metered, &mut memory, now);
        let mut alone = |after: u64| {
            let mut metered = [(80, 30), (0, 0)].map(|(busy, charged)| says(busy, charged));
            let now = now + Duration::from_secs(after);
            attribute(&snapshot, &times(&[(7, 80)]), None, &mut metered, &mut memory, now).is_none()
        };
        assert_eq!([alone(1), alone(4), alone(6)], [false, false, true]);
    }
}
