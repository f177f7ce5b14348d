//! What each share has and had, for whoever looks on: pure, from one [`Look`].
//!
//! Two things are known of compute time, and both are told. What the processes *had* is NVML's word. What
//! they were *charged*, and how long they waited, is their own, on a page that they write.

use super::arbiter::{SECOND, Terms};
use super::look::{Device, Look, Share, Slot};
use divvy_api::top::ShareNow;
use divvy_api::{ClaimUid, ShareId};
use divvy_pages::Owner;
use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime};

/// Per cent by process id; none where NVML does not say.
pub(super) type Times = Option<BTreeMap<u32, u32>>;

/// What slots have counted, by share and number.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    slots: BTreeMap<(ClaimUid, ShareId), BTreeMap<usize, Said>>,
    at: Option<Instant>,
    until: Option<Until>,
}

/// Nanoseconds charged, waited, charged for long kernels and not charged of shorter ones, by the owner of a slot.
#[derive(Clone, Copy, Debug)]
struct Said {
    owner: Owner,
    words: [u64; WORDS],
}

const WORDS: usize = 4;

/// How long NVML's samples may be apart: what it says ends no longer ago than this.
const LAG: Duration = Duration::from_secs(1);
/// And the next may come by so much later.
const LATE: Duration = Duration::from_millis(125);

impl Memory {
    /// The time from which NVML is to be asked, in microseconds of the system clock: where it ended the last time, unless
    /// the clock was set since then.
    pub(super) fn since_us(&self) -> u64 {
        let since = self.at.map_or(LAG, |at| at.elapsed());
        let of_clock = micros(wall().saturating_sub(since));
        let is_known = |until: &Until| {
            let now = until.us.saturating_add(micros(until.at.elapsed()));
            now.abs_diff(micros(wall())) < micros(LAG)
        };
        self.until.filter(is_known).map_or(of_clock, |until| until.us)
    }

    /// Whether NVML says nothing as it has taken no sample since the last look: GPUs take six a second or as few as one
    /// (nvml.h, of `nvmlUtilization_t`). That nobody had any time is so where none comes for longer.
    pub(super) fn awaits(&self, times: &Times) -> bool {
        let is_empty = times.as_ref().is_some_and(BTreeMap::is_empty);
        is_empty && self.until.is_some_and(|until| until.ago() < LAG + LATE)
    }
}

/// Up to when NVML told what processes had.
#[derive(Clone, Copy, Debug)]
pub(super) struct Until {
    /// Of the system clock, as NVML has it.
    us: u64,
    at: Instant,
}

impl Until {
    /// None where that is no time at which a sample can just have been taken.
    pub(super) fn of(us: u64) -> Option<Self> {
        let ago = wall().checked_sub(Duration::from_micros(us)).filter(|ago| *ago <= LAG)?;
        Some(Self { us, at: Instant::now().checked_sub(ago)? })
    }

    /// Of what was told of that moment; none before the first second of the system clock.
    pub(super) fn at(at: Instant) -> Option<Self> {
        Some(Self { us: micros(wall().checked_sub(at.elapsed())?), at })
    }

    pub(super) fn ago(self) -> Duration {
        self.at.elapsed()
    }
}

fn wall() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Of one share, in nanoseconds a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Metered {
    /// None where NVML does not say.
    pub(super) busy: Option<u64>,
    /// Where it does not, of a whole GPU: what it had by the samples that name it, which is right on the mean of many.
    pub(super) named: Option<u64>,
    /// And these named nobody else since the last look, nor did anybody say that it worked.
    pub(super) is_sole: bool,
    /// And what it had if its word is true, less what neighbours cut from its kernels: for people.
    pub(super) likely: Option<u64>,
    /// Charged and waited; none at the first look.
    pub(super) said: Option<(u64, u64)>,
    /// Charged for kernels longer than a time slice.
    pub(super) long: u64,
    /// Not charged though it may have had it ([`divvy_pages::account::SlotReport::spared_ns`]).
    pub(super) spared: u64,
    /// No process came or went since the last look: what those said that are gone is not known.
    pub(super) is_steady: bool,
}

/// By the index of the share; and the time since the last look.
pub(super) fn meter(
    look: &Look,
    times: &Times,
    until: Option<Until>,
    memory: Memory,
    now: Instant,
) -> (Vec<Metered>, Option<Duration>, Memory) {
    let since = memory.at.map(|at| now.duration_since(at)).filter(|since| !since.is_zero());
    let by_second =
        |ns: u64, since: Duration| (u128::from(ns) * u128::from(SECOND) / since.as_nanos()) as u64;
    let had = times.as_ref().map(|times| busy(look, times));
    let mut before = memory.slots;
    let mut slots = BTreeMap::new();
    let mut all = Vec::new();
    for (at, share) in look.shares.iter().enumerate() {
        let known = before.remove(&share.key());
        let is_known = known.is_some();
        let mut of_share = known.unwrap_or_default();
        let ([charged, waited, long, spared], is_steady) = said(share, &mut of_share);
        let since = since.filter(|_| is_known);
        all.push(Metered {
            busy: match share.policy.mig {
                None => had.as_ref().map(|had| had.get(&at).copied().unwrap_or(0)),
                // Who has just come may have it from another.
                Some(mig) => look.busy.get(&mig).filter(|_| is_known && is_sole(look, at)).copied(),
            },
            said: since.map(|since| (by_second(charged, since), by_second(waited, since))),
            long: since.map_or(0, |since| by_second(long, since)),
            spared: since.map_or(0, |since| by_second(spared, since)),
            is_steady: since.is_some() && is_steady,
            ..Metered::default()
        });
        slots.insert(share.key(), of_share);
    }
    (all, since, Memory { slots, at: Some(now), until })
}

/// Of so many per cent: nanoseconds a second.
pub(super) fn time(percent: u32) -> u64 {
    u64::from(percent) * (SECOND / 100)
}

/// The device is no other share's, and all processes on it are this one's, as far as they are still there.
fn is_sole(look: &Look, at: usize) -> bool {
    let device = look.shares[at].device();
    if look.shares.iter().filter(|share| share.device() == device).count() > 1 {
        return false;
    }
    let mut here = look.uses.iter().filter(|usage| usage.device == device);
    here.all(|usage| {
        look.processes.get(&usage.pid).is_none_or(|process| look.shares_of(process).contains(&at))
    })
}

/// Nanoseconds a second that the processes of each share had, by index. What a process of several shares had is theirs by
/// their guarantees.
fn busy(look: &Look, times: &BTreeMap<u32, u32>) -> BTreeMap<usize, u64> {
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

/// What the slots of a share said since the last time, and whether they are the same; and what they say now in its place.
fn said(share: &Share, slots: &mut BTreeMap<usize, Said>) -> ([u64; WORDS], bool) {
    let now: &[Slot] = share.account.as_ref().map(|account| account.slots.as_slice()).unwrap_or_default();
    let mut sums = [0_u64; WORDS];
    let mut said = BTreeMap::new();
    for slot in now.iter().filter(|slot| slot.is_live()) {
        let report = &slot.report;
        let words = [report.charged_ns, report.waited_ns, report.long_ns, report.spared_ns];
        let is = Said { owner: report.owner, words };
        if let Some(was) = slots.get(&report.index).filter(|was| was.owner == is.owner) {
            for ((sum, is), was) in sums.iter_mut().zip(is.words).zip(was.words) {
                // Tenants write these words: whatever they say is a number.
                *sum = sum.saturating_add(is.saturating_sub(was));
            }
        }
        said.insert(report.index, is);
    }
    let are_same =
        slots.iter().map(|(at, was)| (at, was.owner)).eq(said.iter().map(|(at, is)| (at, is.owner)));
    *slots = said;
    (sums, are_same)
}

/// All that is told of the shares; `at` is in milliseconds of the system clock.
pub(super) fn told(look: &Look, metered: &[Metered], at_ms: u64) -> Vec<ShareNow> {
    let percent = |ns: u64| u32::try_from((ns + SECOND / 200) / (SECOND / 100)).unwrap_or(u32::MAX);
    let bytes = measured(look);
    let tell = |(at, share): (usize, &Share)| {
        let terms = Terms::of(share.policy.compute);
        let Metered { busy, likely, said, .. } = metered.get(at).copied().unwrap_or_default();
        let account = share.account.as_ref().ok();
        let live = account.map_or(0, |account| account.slots.iter().filter(|slot| slot.is_live()).count());
        let Device { gpu, mig } = share.device();
        ShareNow {
            at_ms,
            namespace: None,
            claim: None,
            claim_uid: share.claim.clone(),
            share: share.id.clone(),
            gpu: format!("GPU-{gpu}"),
            mig: mig.map(|mig| format!("MIG-{mig}")),
            memory_limit_bytes: share.policy.memory.limit,
            memory_used_bytes: account.map(|account| account.used),
            memory_measured_bytes: bytes.get(at).copied().flatten(),
            guarantee_percent: percent(terms.guarantee),
            ceiling_percent: percent(terms.ceiling),
            weight: terms.weight,
            priority: share.policy.compute.priority,
            busy_percent: busy.or(likely).map(percent),
            charged_percent: said.map(|(charged, _)| percent(charged)),
            throttled_ms: said.map(|(_, waited)| waited / 1_000_000),
            processes: u32::try_from(live).unwrap_or(u32::MAX),
        }
    };
    look.shares.iter().enumerate().map(tell).collect()
}

/// Bytes that the GPU driver says the processes of each share have of its device, by index; each process is asked for
/// once whose it is.
fn measured(look: &Look) -> Vec<Option<u64>> {
    let mut all = vec![Some(0_u64); look.shares.len()];
    for usage in &look.uses {
        let Some(process) = look.processes.get(&usage.pid) else { continue };
        let mut here = look.shares_of(process);
        here.retain(|at| look.shares[*at].device() == usage.device);
        for at in &here {
            let sum = all[*at].zip(usage.bytes).filter(|_| here.len() == 1);
            all[*at] = sum.map(|(sum, bytes)| sum.saturating_add(bytes));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::judge::tests::{CONTEXT, Scene};
    use super::super::look::Use;
    use super::*;
    use divvy_pages::{Compute, GpuUuid};

    const MIB: u64 = 1 << 20;

    /// A share of 30 to 60 % whose process 7 has counted so much.
    fn look(charged: u64, waited: u64) -> Look {
        let mut scene = Scene::share(10_000);
        scene.process(7).has(CONTEXT + 20).slot(7, CONTEXT);
        let mut look = scene.look();
        look.shares[0].policy.compute = Compute { cores: 30, ceiling: 60, priority: 2, ..Compute::default() };
        let slots = look.shares[0].account.as_mut().expect("a page");
        let report = &mut slots.slots[0].report;
        (report.charged_ns, report.waited_ns) = (charged, waited);
        look
    }

    fn times(all: &[(u32, u32)]) -> Times {
        Some(all.iter().copied().collect())
    }

    #[test]
    fn what_a_share_had_is_of_the_time_since_the_last_look() {
        let begin = Instant::now();
        let (metered, since, memory) = meter(&look(5, 5), &times(&[(7, 20)]), None, Memory::default(), begin);
        assert_eq!((metered, since), (vec![Metered { busy: Some(SECOND / 5), ..Metered::default() }], None));
        let later = look(5 + SECOND, 5 + 3 * SECOND);
        let two = Duration::from_secs(2);
        let (metered, since, _) = meter(&later, &times(&[(7, 40)]), None, memory.clone(), begin + two);
        let said = Some((SECOND / 2, SECOND / 2 * 3));
        assert_eq!(
            (metered.as_slice(), since),
            (
                [Metered { busy: Some(SECOND / 5 * 2), said, is_steady: true, ..Metered::default() }]
                    .as_slice(),
                Some(two)
            )
        );
        let told = told(&later, &metered, 9);
        let [now] = told.as_slice() else { panic!("one share") };
        assert_eq!((now.guarantee_percent, now.ceiling_percent, now.weight, now.priority), (30, 60, 1, 2));
        assert_eq!(
            (now.busy_percent, now.charged_percent, now.throttled_ms),
            (Some(40), Some(50), Some(1500))
        );
        assert_eq!((now.memory_used_bytes, now.processes, now.at_ms), (Some(CONTEXT * MIB), 1, 9));
        assert_eq!(now.memory_measured_bytes, Some((CONTEXT + 20) * MIB));
    }

    #[test]
    fn what_nobody_knows_is_not_told() {
        let now = Instant::now();
        let (metered, ..) = meter(&look(0, 0), &None, None, Memory::default(), now);
        assert_eq!(metered, [Metered::default()]);
        let mut instance = look(0, 0);
        instance.shares[0].policy.mig = Some(GpuUuid([7; 16]));
        let (metered, ..) = meter(&instance, &times(&[(7, 40)]), None, Memory::default(), now);
        assert_eq!(metered, [Metered::default()]);
        // Whose the memory of a process with two shares is.
        let mut scene = Scene::share(10_000);
        scene.second_share(10_000).process(7).has(20);
        let told = told(&scene.look(), &[], 0);
        assert_eq!(told.iter().map(|now| now.memory_measured_bytes).collect::<Vec<_>>(), [None, None]);
    }

    #[test]
    fn what_an_instance_had_is_its_one_shares_where_nobody_else_is_on_it() {
        const MIG: GpuUuid = GpuUuid([7; 16]);
        let begin = Instant::now();
        let on = |change: fn(&mut Look)| {
            let mut look = look(0, 0);
            look.shares[0].policy.mig = Some(MIG);
            look.uses[0].device.mig = Some(MIG);
            look.busy = [(MIG, SECOND / 5)].into();
            change(&mut look);
            look
        };
        let (metered, _, memory) = meter(&on(|_| ()), &None, None, Memory::default(), begin);
        assert_eq!(metered, [Metered::default()], "it may be another's that was there before");
        let check = |change: fn(&mut Look), expected: Option<u64>| {
            let later = begin + Duration::from_secs(1);
            let (metered, ..) = meter(&on(change), &None, None, memory.clone(), later);
            assert_eq!(metered[0].busy, expected);
        };
        check(|_| (), Some(SECOND / 5));
        check(|look| look.busy = [].into(), None);
        fn another(look: &mut Look, is_there: bool) {
            let mut scene = Scene::share(10_000);
            let stranger = scene.process(9).elsewhere_cgroup().sees("").has(20).look();
            let usage = Use { device: look.uses[0].device, ..stranger.uses[0] };
            look.uses.push(usage);
            look.processes.extend(stranger.processes.into_iter().filter(|_| is_there));
        }
        check(|look| another(look, true), None);
        // It has ended, and was of those who could be there; or it is on another instance.
        check(|look| another(look, false), Some(SECOND / 5));
        check(
            |look| {
                another(look, true);
                look.uses[1].device.mig = Some(GpuUuid([8; 16]));
            },
            Some(SECOND / 5),
        );
    }

    #[test]
    fn where_no_sample_was_taken_since_the_last_look_nobody_is_said_to_have_had_nothing() {
        let check = |ago_ms: Option<u64>, had: &Times, expected: bool| {
            let until = ago_ms.and_then(|ago| {
                let at = Instant::now().checked_sub(Duration::from_millis(ago))?;
                Some(Until { us: micros(wall()) - ago * 1000, at })
            });
            let memory = Memory { until, ..Memory::default() };
            assert_eq!(memory.awaits(had), expected, "{ago_ms:?} {had:?}");
        };
        check(Some(500), &times(&[]), true);
        check(Some(1000), &times(&[]), true);
        check(Some(2000), &times(&[]), false);
        check(None, &times(&[]), false);
        check(Some(500), &times(&[(7, 1)]), false);
        check(Some(500), &None, false);
    }

    #[test]
    fn nvml_is_asked_from_where_it_ended_unless_that_is_no_time_to_go_by() {
        let now = micros(wall());
        let since = |us: Option<u64>, at: Option<Instant>| {
            let until = us.and_then(Until::of);
            Memory { at, until, ..Memory::default() }.since_us()
        };
        let at = Some(Instant::now());
        assert_eq!(since(Some(now - 150_000), at), now - 150_000);
        // Nothing was told, or by a clock that is not this one's: from the last look, or a second ago.
        for us in [None, Some(0), Some(now + 5_000_000), Some(now - 5_000_000)] {
            assert!(since(us, at).abs_diff(now) < 500_000, "{us:?}");
            assert!(since(us, None).abs_diff(now - 1_000_000) < 500_000, "{us:?}");
        }
        // The clock was set.
        let until = Until { us: now + 60_000_000, at: Instant::now() };
        let memory = Memory { at, until: Some(until), ..Memory::default() };
        assert!(memory.since_us().abs_diff(now) < 500_000);
    }
}
