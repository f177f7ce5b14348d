//! What the arbiter goes by, from one look.
//!
//! [`super::arbiter`] and [`super::orders`] decide; here NVML's processes become shares, and what slots count from
//! their begin becomes what they counted in the last second.
//!
//! Nothing is kept: the next agent begins with what the policies and the last grants say. Of a share that it sees for
//! the first time it knows only that it works, and takes it to want all that it may have.

use super::arbiter::{self, SECOND, Seen, Terms};
use super::desk::Had;
use super::look::{Look, Share, Slot};
use super::orders::Standing;
use divvy_api::{ClaimUid, ShareId};
use divvy_pages::Owner;
use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

type Key = (ClaimUid, ShareId);

/// From one second to the next, of one GPU: what slots said, by share and number.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    shares: BTreeMap<Key, BTreeMap<usize, Said>>,
    /// When that was.
    at: Option<Instant>,
}

/// Nanoseconds charged and waited, by the owner of a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Said {
    owner: Owner,
    charged: u64,
    waited: u64,
}

/// Per cent by process id; none where NVML does not say.
pub(super) type Times = Option<BTreeMap<u32, u32>>;

impl Memory {
    /// The time from which NVML is to be asked, in microseconds of the system clock.
    pub(super) fn since_us(&self) -> u64 {
        let ago = self.at.map_or(Duration::from_secs(1), |at| at.elapsed());
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        now.saturating_sub(ago).as_micros() as u64
    }
}

/// The priority of a share that precedes others, and above.
const HIGH: u32 = 1;

/// Whole GPUs' shares as they stand, by index. Nothing of instances, and nothing at all where NVML
/// does not say who had what: there the policies hold as they are.
pub(super) fn standings(
    look: &Look,
    times: &Times,
    had: &BTreeMap<Key, Had>,
    memory: Memory,
    now: Instant,
) -> (Vec<(usize, Standing)>, Memory) {
    let Some(times) = times else { return (Vec::new(), Memory::default()) };
    let since = memory.at.map(|at| now.duration_since(at)).filter(|since| !since.is_zero());
    let mut before = memory.shares;
    let busy = busy(look, times);
    let all = times.values().map(|percent| time(*percent)).sum::<u64>().min(SECOND);
    let (mut standings, mut shares) = (Vec::new(), BTreeMap::new());
    for (at, share) in look.shares.iter().enumerate().filter(|(_, share)| share.policy.mig.is_none()) {
        let mut slots = before.remove(&share.key()).unwrap_or_default();
        let (charged, waited) = said(share, &mut slots);
        shares.insert(share.key(), slots);
        let by_second = |ns: u64| match since {
            Some(since) => (u128::from(ns) * u128::from(SECOND) / since.as_nanos()) as u64,
            None => 0,
        };
        let busy = busy.get(&at).copied().unwrap_or(0);
        // Not what its own processes had of each other: with many of them that would explain anything. Nor does what
        // others have explain why one has nothing.
        let between = if busy > 0 { all.saturating_sub(busy) } else { 0 };
        let seen = Seen { busy, charged: by_second(charged), waited: by_second(waited) };
        let compute = share.policy.compute;
        let terms = Terms::of(compute);
        let (wants, memory) = match had.get(&share.key()) {
            // Who was kept out could not show what it wants.
            Some(had) => {
                let memory = arbiter::corrected(had.memory, seen, between);
                (terms.wants(seen).max(had.wanted.unwrap_or(0)), memory)
            }
            None => (if busy > 0 { terms.ceiling } else { 0 }, arbiter::Memory::default()),
        };
        let (is_high, is_limited) = (compute.priority >= HIGH, compute.is_limited());
        standings
            .push((at, Standing { terms, is_high, is_limited, wants, is_awake: false, turn: None, memory }));
    }
    (standings, Memory { shares, at: Some(now) })
}

/// Of so many per cent: nanoseconds a second.
fn time(percent: u32) -> u64 {
    u64::from(percent) * (SECOND / 100)
}

/// Nanoseconds a second that the processes of each share had, by index. What a process of several shares had is theirs by
/// their guarantees.
pub(super) fn busy(look: &Look, times: &BTreeMap<u32, u32>) -> BTreeMap<usize, u64> {
    let mut busy: BTreeMap<usize, u64> = BTreeMap::new();
    for (pid, percent) in times {
        let Some(process) = look.processes.get(pid) else { continue };
        let had = time(*percent);
        let all: Vec<(usize, u64)> = look
            .shares_of(process)
            .into_iter()
            .map(|at| (at, u64::from(look.shares[at].policy.compute.cores.max(1))))
            .collect();
        let sum: u64 = all.iter().map(|(_, cores)| cores).sum();
        for (at, cores) in all {
            let sum_of = busy.entry(at).or_default();
            *sum_of = sum_of.saturating_add(had * cores / sum.max(1)).min(SECOND);
        }
    }
    busy
}

/// What the slots of a share charged and waited since the last time, and what they say now in its place.
pub(super) fn said(share: &Share, slots: &mut BTreeMap<usize, Said>) -> (u64, u64) {
    let now: &[Slot] = share.account.as_ref().map(|account| account.slots.as_slice()).unwrap_or_default();
    let (mut charged, mut waited) = (0_u64, 0_u64);
    let mut said = BTreeMap::new();
    for slot in now.iter().filter(|slot| slot.is_live()) {
        let report = &slot.report;
        let is = Said { owner: report.owner, charged: report.charged_ns, waited: report.waited_ns };
        if let Some(was) = slots.get(&report.index).filter(|was| was.owner == is.owner) {
            // Tenants write these words: whatever they say is a number.
            charged = charged.saturating_add(is.charged.saturating_sub(was.charged));
            waited = waited.saturating_add(is.waited.saturating_sub(was.waited));
        }
        said.insert(report.index, is);
    }
    *slots = said;
    (charged, waited)
}

#[cfg(test)]
mod tests {
    use super::super::judge::tests::{CONTEXT, Scene};
    use super::super::orders::orders;
    use super::*;
    use divvy_pages::{Compute, GpuUuid};

    const POINT: u64 = SECOND / 100;

    /// A share of 30 % whose process 7 has counted so much.
    fn look(charged: u64, waited: u64) -> Look {
        let mut scene = Scene::share(10_000);
        scene.process(7).has(CONTEXT).slot(7, CONTEXT);
        let mut look = scene.look();
        look.shares[0].policy.compute = Compute { cores: 30, ceiling: 30, ..Compute::default() };
        let slots = look.shares[0].account.as_mut().expect("a page");
        let report = &mut slots.slots[0].report;
        (report.charged_ns, report.waited_ns) = (charged, waited);
        look
    }

    fn times(all: &[(u32, u32)]) -> Times {
        Some(all.iter().copied().collect())
    }

    /// After a first look, others two seconds apart: the rate of the share in points after the last.
    fn after(first: &Look, others: &[&Look], times: &Times) -> u64 {
        let mut at = Instant::now();
        let decided = |standings: &[(usize, Standing)]| {
            let [(0, standing)] = standings else { panic!("one share") };
            orders(&[*standing])[0]
        };
        let idle = Some(BTreeMap::new());
        let (all, mut memory) = standings(first, &idle, &BTreeMap::new(), Memory::default(), at);
        let mut order = decided(&all);
        assert_eq!(order.rate, Some(30 * POINT));
        for look in others {
            at += Duration::from_secs(2);
            let had = [(first.shares[0].key(), Had { memory: order.memory, wanted: None })].into();
            let (all, after) = standings(look, times, &had, memory, at);
            (order, memory) = (decided(&all), after);
        }
        order.rate.expect("it is limited") / POINT
    }

    #[test]
    fn who_had_too_little_and_waited_gets_more_and_who_had_too_much_less() {
        let before = look(5, 5);
        let worked = |seconds: u64| look(5 + 30 * seconds * POINT, 5 + seconds * SECOND);
        let (two, four) = (worked(2), worked(4));
        let check = |looks: &[&Look], had: u32, expected: u64| {
            assert_eq!(after(&before, looks, &times(&[(7, had)])), expected, "{had}");
        };
        check(&[&two], 30, 30);
        check(&[&two], 60, 15);
        // Once may be its begin.
        check(&[&two], 25, 30);
        check(&[&two, &four], 25, 35);
        // It waited for nothing; another's time.
        let idle = look(5 + 50 * POINT, 5);
        check(&[&idle, &idle], 25, 30);
        assert_eq!(after(&before, &[&two, &four], &times(&[(8, 60)])), 30);
    }

    #[test]
    fn what_another_owner_of_the_slot_counted_is_not_counted() {
        let mut second = look(60 * POINT, 2 * SECOND);
        let slots = second.shares[0].account.as_mut().expect("a page");
        slots.slots[0].report.owner = Owner(slots.slots[0].report.owner.0 + (1 << 32));
        assert_eq!(after(&look(5, 5), &[&second, &second], &times(&[(7, 25)])), 30);
    }

    #[test]
    fn nothing_is_decided_where_nothing_is_known() {
        let found = |look: &Look, times: &Times| {
            standings(look, times, &BTreeMap::new(), Memory::default(), Instant::now()).0
        };
        assert!(found(&look(0, 0), &None).is_empty());
        let mut instance = look(0, 0);
        instance.shares[0].policy.mig = Some(GpuUuid([7; 16]));
        assert!(found(&instance, &times(&[])).is_empty());
    }

    #[test]
    fn who_is_seen_for_the_first_time_and_who_was_kept_out_wants_what_it_may_have() {
        let look = look(0, 0);
        let wants = |had: &BTreeMap<Key, Had>, busy: u32| {
            standings(&look, &times(&[(7, busy)]), had, Memory::default(), Instant::now()).0[0].1.wants
                / POINT
        };
        assert_eq!([wants(&BTreeMap::new(), 5), wants(&BTreeMap::new(), 0)], [30, 0]);
        let had = |wanted| {
            let had = Had { memory: arbiter::Memory::default(), wanted };
            [(look.shares[0].key(), had)].into()
        };
        assert_eq!([wants(&had(None), 5), wants(&had(Some(20 * POINT)), 5)], [7, 20]);
    }
}
