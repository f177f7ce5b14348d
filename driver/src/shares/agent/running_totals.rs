//! Running totals of the shares of a GPU since this agent first saw each of them, in nanoseconds.
//!
//! Account pages are written by processes of the share. A counter that decreases adds nothing, and a
//! share cannot have used more GPU time than passed. The counters of a slot begin at 0 with a new
//! owner, and a dead owner's stay until another process takes the slot.

use crate::shares::scheduler::quantum_table::QuantumUsage;
use crate::shares::snapshot::usage::ShareTime;
use crate::shares::snapshot::{AUDIT_INTERVAL, Account, Share, ShareKey, Snapshot};
use divvy_api::top::{GpuTimeAttribution, ShareTotals, ShareUsage};
use divvy_pages::SlotState;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const NS_PER_MS: u64 = 1_000_000;
/// After a longer pause between audits, for example while NVML was closed, the newest samples of NVML
/// say nothing about most of the pause. The reports of the library are complete: they are counters.
const SAMPLED_TIME_MAX: Duration = AUDIT_INTERVAL.saturating_mul(10);

#[derive(Clone, Debug, Default)]
pub(super) struct RunningTotals {
    shares: BTreeMap<ShareKey, ShareTotal>,
}

#[derive(Clone, Debug)]
struct ShareTotal {
    first_seen: Instant,
    used_ns: u64,
    throttled_ns: u64,
    /// `None` until its launches need quanta.
    quanta: Option<QuantumUsage>,
    attribution: Option<GpuTimeAttribution>,
    /// Its processes measure with events, so other measurements are not added.
    is_measured_by_events: bool,
    last: Option<PageCounters>,
    last_quanta: QuantumUsage,
}

/// Counters of an account page at the last snapshot.
#[derive(Clone, Debug)]
struct PageCounters {
    charged_ns: u64,
    /// Throttled time by slot, process and generation.
    waited_ns: BTreeMap<(usize, u32, u16), u64>,
}

impl RunningTotals {
    /// Adds what the pages and the quanta of all shares gained since the last snapshot. `quanta` has
    /// the shares whose launches needed quanta since then.
    pub(super) fn add_counters(
        &mut self,
        snapshot: &Snapshot,
        quanta: &BTreeMap<ShareKey, QuantumUsage>,
        now: Instant,
    ) {
        let mut before = std::mem::take(&mut self.shares);
        for share in &snapshot.shares {
            let key = share.key();
            let quanta = quanta.get(&key).copied();
            let total = match before.remove(&key) {
                Some(mut total) => {
                    total.add(share, quanta, now);
                    total
                }
                None => ShareTotal::new(share, quanta, now),
            };
            self.shares.insert(key, total);
        }
    }

    /// Adds the measured GPU time of shares that do not measure it with events. `since` is the time
    /// that the measurement covers; `None` at the first one.
    pub(super) fn add_measured(
        &mut self,
        snapshot: &Snapshot,
        times: &[ShareTime],
        since: Option<Duration>,
        now: Instant,
    ) {
        for (share, time) in snapshot.shares.iter().zip(times) {
            let Some(total) = self.shares.get_mut(&share.key()) else { continue };
            let since = since.unwrap_or_default();
            let Some((ns_per_second, attribution)) =
                measured(time, since).filter(|_| !total.is_measured_by_events)
            else {
                continue;
            };
            let gain = (ns_per_second as f64 * since.as_secs_f64()) as u64;
            total.use_time(gain, attribution, now);
        }
    }

    /// Writes the totals into the report of an audit.
    pub(super) fn complete(&self, usage: &mut [ShareUsage]) {
        for share in usage {
            let key = (share.claim_uid.clone(), share.share.clone());
            if let Some(total) = self.shares.get(&key) {
                share.gpu_time_attribution = total.attribution;
                share.totals = Some(total.report());
            }
        }
    }
}

/// The GPU time in nanoseconds per second from the best source other than events.
fn measured(time: &ShareTime, since: Duration) -> Option<(u64, GpuTimeAttribution)> {
    let by_nvml = time.gpu_ns.filter(|_| since <= SAMPLED_TIME_MAX).map(|ns| (ns, GpuTimeAttribution::Nvml));
    let by_samples = || time.estimated_ns.map(|ns| (ns, GpuTimeAttribution::Samples));
    let by_report = || time.reported_ns.map(|(charged, _)| (charged, GpuTimeAttribution::Reported));
    by_nvml.or_else(by_samples).or_else(by_report)
}

impl ShareTotal {
    /// Earlier counters are not known to be of this share's time under this agent.
    fn new(share: &Share, quanta: Option<QuantumUsage>, now: Instant) -> Self {
        let account = share.account.as_ref().ok();
        let is_measured_by_events = quanta.is_some() && account.is_some_and(Account::knows_quanta);
        Self {
            first_seen: now,
            used_ns: 0,
            throttled_ns: 0,
            quanta: quanta.map(|_| QuantumUsage::default()),
            attribution: is_measured_by_events.then_some(GpuTimeAttribution::Events),
            is_measured_by_events,
            last: account.map(PageCounters::of),
            last_quanta: quanta.unwrap_or_default(),
        }
    }

    fn add(&mut self, share: &Share, quanta: Option<QuantumUsage>, now: Instant) {
        if let Some(quanta) = quanta {
            self.add_quanta(quanta);
        }
        // While the page cannot be read nothing is added. The next snapshot adds it.
        let Ok(account) = &share.account else { return };
        self.is_measured_by_events = quanta.is_some() && account.knows_quanta();
        let counters = PageCounters::of(account);
        if let Some(last) = self.last.replace(counters.clone()) {
            self.throttled_ns = self.throttled_ns.saturating_add(counters.waited_since(&last));
            if self.is_measured_by_events {
                let gain = counters.charged_ns.saturating_sub(last.charged_ns);
                self.use_time(gain, GpuTimeAttribution::Events, now);
            }
        }
    }

    fn use_time(&mut self, gain: u64, attribution: GpuTimeAttribution, now: Instant) {
        let most = now.duration_since(self.first_seen).as_nanos();
        let used = self.used_ns.saturating_add(gain);
        self.used_ns = used.min(u64::try_from(most).unwrap_or(u64::MAX));
        self.attribution = Some(attribution);
    }

    /// Counters of the table begin at 0 again when a page was recreated.
    fn add_quanta(&mut self, now: QuantumUsage) {
        let last = std::mem::replace(&mut self.last_quanta, now);
        let is_restarted = now.granted_ns < last.granted_ns || now.hand_overs < last.hand_overs;
        let last = if is_restarted { QuantumUsage::default() } else { last };
        let sum = self.quanta.get_or_insert_default();
        let add = |sum: &mut u64, now: u64, last: u64| *sum = sum.saturating_add(now.saturating_sub(last));
        add(&mut sum.granted_ns, now.granted_ns, last.granted_ns);
        add(&mut sum.hand_overs, now.hand_overs, last.hand_overs);
        add(&mut sum.late_hand_overs, now.late_hand_overs, last.late_hand_overs);
    }

    fn report(&self) -> ShareTotals {
        ShareTotals {
            gpu_time_used_ms: self.used_ns / NS_PER_MS,
            throttled_ms: self.throttled_ns / NS_PER_MS,
            granted_ms: self.quanta.map(|quanta| quanta.granted_ns / NS_PER_MS),
            hand_overs: self.quanta.map(|quanta| quanta.hand_overs),
            late_hand_overs: self.quanta.map(|quanta| quanta.late_hand_overs),
        }
    }
}

impl PageCounters {
    fn of(account: &Account) -> Self {
        // Also of dead processes: what they waited last is not known before.
        let has_owner = |state| matches!(state, SlotState::Live | SlotState::Dead);
        let slots = account.slots.iter().map(|slot| &slot.report);
        let waited = slots.filter(|slot| has_owner(slot.owner.state())).map(|slot| {
            let owner = (slot.index, slot.owner.pid(), slot.owner.generation());
            (owner, slot.waited_ns)
        });
        Self { charged_ns: account.charged_ns, waited_ns: waited.collect() }
    }

    fn waited_since(&self, last: &Self) -> u64 {
        let gains = self
            .waited_ns
            .iter()
            .map(|(owner, waited)| waited.saturating_sub(last.waited_ns.get(owner).copied().unwrap_or(0)));
        gains.fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::snapshot::AccountError;
    use crate::shares::snapshot::entitlement::NS_PER_SECOND;
    use crate::shares::snapshot::fixture::{CONTEXT, Fixture, live};
    use divvy_pages::account::QuantumState;

    const MS: u64 = NS_PER_MS;

    /// A share with the page counter of charged time, and the waited time of these processes.
    fn snapshot(charged_ns: u64, waited_ns: &[(u32, u64)]) -> Snapshot {
        let mut fixture = Fixture::share(10_000);
        for (pid, waited_ns) in waited_ns {
            fixture.process(*pid).slot(*pid, CONTEXT);
            let report = &mut fixture.slot_mut(*pid).report;
            (report.waited_ns, report.quantum) = (*waited_ns, Some((QuantumState::Drained, 1)));
        }
        fixture.account(0).charged_ns = charged_ns;
        fixture.snapshot()
    }

    fn quanta(granted_ns: u64, hand_overs: u64, late_hand_overs: u64) -> BTreeMap<ShareKey, QuantumUsage> {
        let usage = QuantumUsage { used_ns: 0, granted_ns, hand_overs, late_hand_overs };
        [(snapshot(0, &[]).shares[0].key(), usage)].into()
    }

    struct Agent {
        totals: RunningTotals,
        now: Instant,
    }

    impl Agent {
        fn start() -> Self {
            Self { totals: RunningTotals::default(), now: Instant::now() }
        }

        /// A second later.
        fn sees(
            &mut self,
            snapshot: &Snapshot,
            quanta: &BTreeMap<ShareKey, QuantumUsage>,
            time: ShareTime,
        ) -> (ShareTotals, Option<GpuTimeAttribution>) {
            let since = Duration::from_secs(1);
            self.now += since;
            self.totals.add_counters(snapshot, quanta, self.now);
            self.totals.add_measured(snapshot, &[time], Some(since), self.now);
            let mut usage = crate::shares::snapshot::usage::report(snapshot, &[], 0);
            self.totals.complete(&mut usage);
            (usage[0].totals.expect("totals"), usage[0].gpu_time_attribution)
        }

        fn throttled_ms(&mut self, snapshot: &Snapshot) -> u64 {
            self.sees(snapshot, &BTreeMap::new(), ShareTime::default()).0.throttled_ms
        }
    }

    #[test]
    fn totals_survive_the_exit_of_a_process() {
        let mut agent = Agent::start();
        assert_eq!(agent.throttled_ms(&snapshot(0, &[(7, 0)])), 0);
        assert_eq!(agent.throttled_ms(&snapshot(0, &[(7, 30 * MS), (8, 5 * MS)])), 35, "a new process");
        // The process exited: the node, and then another process, marks its slot dead.
        let mut dead = snapshot(0, &[(7, 40 * MS), (8, 5 * MS)]);
        let slot = &mut dead.shares[0].account.as_mut().expect("a page").slots[0].report;
        (slot.node_line.dead, slot.node_line.owner) = (true, slot.owner);
        assert_eq!(agent.throttled_ms(&dead), 45);
        let slot = &mut dead.shares[0].account.as_mut().expect("a page").slots[0].report;
        slot.owner.0 += 1 << 48;
        assert_eq!(slot.owner.state(), SlotState::Dead);
        assert_eq!(agent.throttled_ms(&dead), 45);
        // Another process has its slot.
        let mut next = snapshot(0, &[(7, 2 * MS), (8, 6 * MS)]);
        next.shares[0].account.as_mut().expect("a page").slots[0].report.owner = live(7, 2);
        assert_eq!(agent.throttled_ms(&next), 48);
        assert_eq!(agent.throttled_ms(&snapshot(0, &[])), 48, "all exited");
    }

    #[test]
    fn restarted_agent_begins_at_zero() {
        let mut agent = Agent::start();
        let (charged, waited) = (500 * NS_PER_SECOND, 70 * NS_PER_SECOND);
        let first = agent.sees(
            &snapshot(charged, &[(7, waited)]),
            &quanta(9 * NS_PER_SECOND, 40, 3),
            ShareTime::default(),
        );
        let zero = ShareTotals {
            granted_ms: Some(0),
            hand_overs: Some(0),
            late_hand_overs: Some(0),
            ..ShareTotals::default()
        };
        assert_eq!(first, (zero, Some(GpuTimeAttribution::Events)));
        let (next, _) = agent.sees(
            &snapshot(charged + 200 * MS, &[(7, waited + 100 * MS)]),
            &quanta(9 * NS_PER_SECOND + 250 * MS, 50, 4),
            ShareTime::default(),
        );
        let expected = ShareTotals {
            gpu_time_used_ms: 200,
            throttled_ms: 100,
            granted_ms: Some(250),
            hand_overs: Some(10),
            late_hand_overs: Some(1),
        };
        assert_eq!(next, expected);
    }

    #[test]
    fn recreated_page_restarts_the_counters_of_quanta() {
        let mut agent = Agent::start();
        let mut sees = |granted_ms: u64, hand_overs: u64, late: u64| {
            let quanta = quanta(granted_ms * MS, hand_overs, late);
            let (totals, _) = agent.sees(&snapshot(0, &[]), &quanta, ShareTime::default());
            (totals.granted_ms, totals.hand_overs, totals.late_hand_overs)
        };
        sees(0, 0, 0);
        assert_eq!(sees(100, 5, 1), (Some(100), Some(5), Some(1)));
        assert_eq!(sees(40, 2, 1), (Some(140), Some(7), Some(2)));
        assert_eq!(sees(60, 3, 1), (Some(160), Some(8), Some(2)));
    }

    #[test]
    fn used_time_comes_from_one_source_at_a_time() {
        use GpuTimeAttribution::{Events, Nvml, Reported, Samples};
        let by_nvml = ShareTime { gpu_ns: Some(300 * MS), ..ShareTime::default() };
        let reported = ShareTime { reported_ns: Some((200 * MS, 0)), ..ShareTime::default() };
        let by_samples = ShareTime { estimated_ns: Some(100 * MS), ..reported };
        let mut agent = Agent::start();
        let mut sees = |charged_ms: u64, is_quantum: bool, time| {
            let quanta = if is_quantum { quanta(0, 0, 0) } else { BTreeMap::new() };
            let (totals, attribution) = agent.sees(&snapshot(charged_ms * MS, &[(7, 0)]), &quanta, time);
            (totals.gpu_time_used_ms, attribution, totals.hand_overs.is_some())
        };
        assert_eq!(sees(0, false, ShareTime::default()), (0, None, false));
        assert_eq!(sees(0, false, by_nvml), (300, Some(Nvml), false));
        assert_eq!(sees(0, false, by_samples), (400, Some(Samples), false));
        assert_eq!(sees(0, false, reported), (600, Some(Reported), false));
        assert_eq!(sees(50, true, by_nvml), (650, Some(Events), true));
        assert_eq!(sees(50, false, by_nvml), (950, Some(Nvml), true));
    }

    #[test]
    fn samples_are_not_extrapolated_over_a_pause() {
        let minute = Duration::from_secs(60);
        let time =
            ShareTime { gpu_ns: Some(900 * MS), reported_ns: Some((100 * MS, 0)), ..ShareTime::default() };
        let mut agent = Agent::start();
        let snapshot = snapshot(0, &[]);
        agent.sees(&snapshot, &BTreeMap::new(), ShareTime::default());
        agent.totals.add_measured(&snapshot, &[time], Some(minute), agent.now + minute);
        let (totals, attribution) = agent.sees(&snapshot, &BTreeMap::new(), ShareTime::default());
        assert_eq!((totals.gpu_time_used_ms, attribution), (6000, Some(GpuTimeAttribution::Reported)));
    }

    #[test]
    fn library_without_quanta_is_measured_otherwise() {
        let mut old = snapshot(0, &[(7, 0)]);
        old.shares[0].account.as_mut().expect("a page").slots[0].report.quantum = None;
        let mut agent = Agent::start();
        let reported = ShareTime { reported_ns: Some((200 * MS, 0)), ..ShareTime::default() };
        agent.sees(&old, &quanta(0, 0, 0), ShareTime::default());
        let (totals, attribution) = agent.sees(&old, &quanta(0, 0, 0), reported);
        assert_eq!((totals.gpu_time_used_ms, attribution), (200, Some(GpuTimeAttribution::Reported)));
    }

    #[test]
    fn forged_and_unreadable_pages_add_no_more_than_passed() {
        let mut agent = Agent::start();
        let mut used = |snapshot: &Snapshot| {
            agent.sees(snapshot, &quanta(0, 0, 0), ShareTime::default()).0.gpu_time_used_ms
        };
        used(&snapshot(0, &[]));
        let mut leased = snapshot(0, &[]);
        leased.shares[0].account = Err(AccountError::Leased);
        assert_eq!(used(&leased), 0);
        assert_eq!(used(&snapshot(600 * MS, &[])), 600);
        assert_eq!(used(&snapshot(0, &[])), 600);
        assert_eq!(used(&snapshot(u64::MAX, &[])), 4000);
    }

    #[test]
    fn ended_share_is_forgotten() {
        let mut agent = Agent::start();
        agent.throttled_ms(&snapshot(0, &[(7, 0)]));
        assert_eq!(agent.throttled_ms(&snapshot(0, &[(7, 9 * MS)])), 9);
        agent.totals.add_counters(&Snapshot::default(), &BTreeMap::new(), agent.now);
        assert_eq!(agent.throttled_ms(&snapshot(0, &[(7, 9 * MS)])), 0);
    }
}
