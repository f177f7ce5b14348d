//! What the arbiter goes by, from one look, and what it decides, to the policy pages.
//!
//! [`super::arbiter`] decides; here NVML's processes become shares, and what slots count from
//! their begin becomes what they counted in the last second.
//!
//! Nothing is kept: the next agent begins with what the policies say and finds the trims again in
//! two seconds. Until there is one, the last rates stand.

use super::arbiter::{self, SECOND, Seen, Terms};
use super::look::{Look, Share, Slot};
use crate::shares::Shares;
use divvy_api::{ClaimUid, ShareId};
use divvy_pages::Owner;
use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

type Key = (ClaimUid, ShareId);

/// From one second to the next, of one GPU.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    shares: BTreeMap<Key, Kept>,
    /// When that was.
    at: Option<Instant>,
}

#[derive(Clone, Debug, Default)]
struct Kept {
    trim: arbiter::Memory,
    /// What slots said, by number.
    slots: BTreeMap<usize, Said>,
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

/// The rates that shares are to have from now on, by index. Nothing of instances, and nothing at all where NVML
/// does not say who had what: there the policies hold as they stand.
pub(super) fn rates(look: &Look, times: &Times, memory: Memory, now: Instant) -> (Vec<(usize, u64)>, Memory) {
    let whole = || look.shares.iter().enumerate().filter(|(_, share)| share.policy.mig.is_none());
    let Some(times) = times else { return (Vec::new(), Memory::default()) };
    let since = memory.at.map(|at| now.duration_since(at)).filter(|since| !since.is_zero());
    let mut before = memory.shares;
    let busy = busy(look, times);
    let (mut terms, mut kept) = (Vec::new(), Vec::new());
    for (at, share) in whole() {
        let mut of_share = before.remove(&share.key()).unwrap_or_default();
        let (charged, waited) = said(share, &mut of_share.slots);
        let by_second = |ns: u64| match since {
            Some(since) => (u128::from(ns) * u128::from(SECOND) / since.as_nanos()) as u64,
            None => 0,
        };
        let busy = busy.get(&at).copied().unwrap_or(0);
        let seen = Seen { busy, charged: by_second(charged), waited: by_second(waited) };
        terms.push((Terms::of(share.policy.compute), seen));
        kept.push((at, share, of_share));
    }
    let mut rates = Vec::new();
    let mut shares = BTreeMap::new();
    let targets = arbiter::targets(&terms);
    for (((at, share, mut of_share), (terms, seen)), target) in kept.into_iter().zip(terms).zip(targets) {
        let (rate, trim) = arbiter::rate(terms, seen, target, of_share.trim);
        // One that is not limited goes by no rate.
        if share.policy.compute.is_limited() {
            rates.push((at, rate));
        }
        of_share.trim = trim;
        shares.insert(share.key(), of_share);
    }
    (rates, Memory { shares, at: Some(now) })
}

/// For so long a rate holds: an audit may come late, and two may be lost.
const GRANT: Duration = Duration::from_millis(3500);

/// Writes rates to the pages, for a while: a rate goes by who works beside whom, which nobody would see
/// change if this process were gone. Policies then hold as they stand.
pub(super) fn write(look: &Look, rates: &[(usize, u64)], shares: &Shares) {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now = Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32);
    let until = u64::try_from((now + GRANT).as_nanos()).unwrap_or(u64::MAX);
    for (at, rate) in rates {
        let Some(Share { claim, id, .. }) = look.shares.get(*at) else { continue };
        if let Err(cause) = shares.grant(claim, id, *rate, until) {
            tracing::debug!(%claim, share = %id, %cause, "compute rate not written");
        }
    }
}

/// Nanoseconds a second that the processes of each share had, by index. What a process of several
/// shares had is theirs by their guarantees.
pub(super) fn busy(look: &Look, times: &BTreeMap<u32, u32>) -> BTreeMap<usize, u64> {
    let mut busy: BTreeMap<usize, u64> = BTreeMap::new();
    for (pid, percent) in times {
        let Some(process) = look.processes.get(pid) else { continue };
        let had = u64::from(*percent) * (SECOND / 100);
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

    /// After a first look, one two seconds later: the rate of the share in points.
    fn after(first: &Look, second: &Look, had: &Times) -> u64 {
        let begin = Instant::now();
        let (rates, memory) = rates(first, &times(&[]), Memory::default(), begin);
        assert_eq!(rates, [(0, 30 * POINT)]);
        let (rates, _) = super::rates(second, had, memory, begin + Duration::from_secs(2));
        rates.first().expect("a share").1 / POINT
    }

    #[test]
    fn who_had_too_little_and_waited_gets_more_and_who_had_too_much_less() {
        let (before, worked) = (look(5, 5), look(5 + 60 * 10 * POINT, 5 + SECOND));
        let check = |second: &Look, had: u32, expected: u64| {
            assert_eq!(after(&before, second, &times(&[(7, had)])), expected, "{had}");
        };
        check(&worked, 25, 35);
        check(&worked, 30, 30);
        check(&worked, 60, 15);
        // It waited for nothing; another's time.
        check(&look(5 + 50 * POINT, 5), 25, 30);
        assert_eq!(after(&before, &worked, &times(&[(8, 60)])), 30);
    }

    #[test]
    fn what_another_owner_of_the_slot_counted_is_not_counted() {
        let mut second = look(60 * POINT, 2 * SECOND);
        let slots = second.shares[0].account.as_mut().expect("a page");
        slots.slots[0].report.owner = Owner(slots.slots[0].report.owner.0 + (1 << 32));
        assert_eq!(after(&look(5, 5), &second, &times(&[(7, 25)])), 30);
    }

    #[test]
    fn nothing_is_decided_where_nothing_is_known() {
        let now = Instant::now();
        assert!(rates(&look(0, 0), &None, Memory::default(), now).0.is_empty());
        let mut instance = look(0, 0);
        instance.shares[0].policy.mig = Some(GpuUuid([7; 16]));
        assert!(rates(&instance, &times(&[]), Memory::default(), now).0.is_empty());
    }
}
