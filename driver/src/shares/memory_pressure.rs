//! Handles shares that together hold more memory than their GPU has.
//!
//! A share that over-commits holds the excess as managed memory, which the GPU driver migrates
//! between device and host. If the working sets of the active shares do not fit, each share evicts
//! the memory of the others, and no share makes progress. This module detects such thrashing and
//! then lets one share at a time use the GPU. Decisions are a pure function of what the pages
//! report ([`decide`]); times are in nanoseconds of the monotonic clock.

use crate::shares::Shares;
use crate::shares::snapshot::collect::{self, FoundShare};
use crate::shares::snapshot::page_files::PageFiles;
use crate::shares::snapshot::{ShareKey, monotonic_ns};
use divvy_pages::{Fault, Flags, GpuUuid, Policy, SlotState};
use std::collections::BTreeMap;
use std::time::Duration;

/// Time between two polls of the pages. An audit per second is too slow: a share that thrashes
/// makes no progress.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Time between two polls while a probe runs or its result is awaited.
const PROBE_POLL_INTERVAL: Duration = Duration::from_millis(100);

const SECOND: u64 = 1_000_000_000;
/// Launches that take this many times as long as the fastest of their kernel are slow.
const SLOWDOWN_MIN: u64 = 5;
/// Launches must be slow for this long, or for the shorter time if a probe has just shown how fast
/// they can be.
const THRASHING_NS: u64 = 2 * SECOND;
const THRASHING_AFTER_PROBE_NS: u64 = 2 * SECOND / 5;
/// A turn lasts this many times as long as the change to it costs.
const TURN_PER_SWAP: u64 = 10;
/// Minimum and maximum length of a turn.
const TURN_BOUNDS_NS: (u64, u64) = (SECOND / 2, 30 * SECOND);
/// A probe starts after shares were active side by side for this long.
const PROBE_AFTER_NS: u64 = 3 * SECOND / 4;
/// A probe ends when launches ended in this many polls: one that began before the probe, one that
/// waited for evicted memory, and some that did not.
const PROBE_ACTIVE_POLLS: u32 = 4;
/// The next round of probes starts after this time.
const PROBE_INTERVAL_NS: u64 = 60 * SECOND;
/// It starts earlier if the shares hold more memory by then, but not before this many times the
/// length of the last round. Probes thus take at most a twentieth of the time.
const PROBE_PAUSE_FACTOR: u64 = 20;
/// A round has this many probes, of different shares.
const PROBES_PER_ROUND: u32 = 2;
/// The next probe of a round starts if thrashing did not show within this time after the last one.
const PROBE_RESULT_NS: u64 = SECOND;
/// For this long after a probe the fastest launch time is considered known.
const PROBE_VALID_NS: u64 = 5 * SECOND;
/// A wait for memory must be at least this long to count as thrashing.
const FAULT_WAIT_MIN_NS: u64 = SECOND / 20;
/// Minimum and maximum of the longest probe.
const PROBE_BOUNDS_NS: (u64, u64) = (2 * SECOND, 10 * SECOND);
/// "More memory" is more by the GPU's memory divided by this.
const GROWTH_DIVISOR: u64 = 20;
/// A share without a launch for this long is idle.
const IDLE_NS: u64 = SECOND / 4;
/// Speed at which memory returns to the device, used until it was measured: 2 MiB pages by fault
/// over a 12 GB/s bus.
const SWAP_BYTES_PER_SECOND: u64 = 10_000_000_000;
/// While little memory is free, shares are asked to trim their pools at most this often.
const TRIM_INTERVAL_NS: u64 = 10 * SECOND;
/// Less free memory than this part of the GPU counts as little.
const FREE_MIN_PERCENT: u64 = 5;

/// The GPUs whose shares may over-commit memory.
#[derive(Debug, Default)]
pub(crate) struct PressureState {
    /// The last audit found a share that may over-commit.
    pub(crate) is_any: bool,
    pub(crate) gpus: BTreeMap<GpuUuid, GpuPressure>,
}

impl PressureState {
    /// Time until the next poll.
    pub(crate) fn poll_interval(&self) -> Duration {
        let now = monotonic_ns();
        let is_urgent = self.gpus.values().any(|gpu| gpu.is_urgent(now));
        if is_urgent { PROBE_POLL_INTERVAL } else { POLL_INTERVAL }
    }
}

/// Whether a share may hold more memory than it has of its GPU.
pub(crate) fn may_overcommit(policy: &Policy) -> bool {
    policy.flags.has(Flags::UVM) && policy.mig.is_none()
}

/// The shares of a GPU.
#[derive(Default)]
struct GpuMemory {
    /// Bytes of the GPU.
    physical: u64,
    /// Bytes that shares without over-commitment hold.
    fixed: u64,
    reports: Vec<ShareReport>,
}

/// Polls the shares of all GPUs that this agent owns, and applies the decisions. `set_turns` sets
/// the order of the turns and their length in nanoseconds; an empty order ends them.
pub(crate) fn poll(
    shares: &Shares,
    files: &PageFiles,
    owns: impl Fn(GpuUuid) -> bool,
    set_turns: impl Fn(GpuUuid, Vec<ShareKey>, u64),
    mut before: BTreeMap<GpuUuid, GpuPressure>,
) -> BTreeMap<GpuUuid, GpuPressure> {
    let mut by_gpu: BTreeMap<_, GpuMemory> = BTreeMap::new();
    for found in collect::find_shares(shares, files, |policy| owns(policy.gpu)) {
        let memory = by_gpu.entry(found.policy.gpu).or_default();
        memory.physical = memory.physical.max(found.policy.memory.physical);
        match ShareReport::of(&found) {
            Some(report) => memory.reports.push(report),
            None => {
                let used = found.account().map_or(0, |page| page.used());
                memory.fixed = memory.fixed.saturating_add(used);
            }
        }
    }
    let now = monotonic_ns();
    let update = |(gpu, GpuMemory { physical, fixed, reports }): (GpuUuid, GpuMemory)| {
        let state = before.remove(&gpu).unwrap_or_default();
        let before = state.turn_reason();
        let (decision, state) = decide(physical.saturating_sub(fixed), &reports, state, now);
        for (claim, share) in &decision.trims {
            if let Err(cause) = shares.trim(claim, share) {
                tracing::debug!(%claim, %share, %cause, "share not asked to trim its memory pools");
            }
        }
        let after = decision.reason;
        if before != after {
            log_change(gpu, before, after, decision.turn_ns / 1_000_000);
        }
        if before.is_some() || after.is_some() {
            set_turns(gpu, decision.order, decision.turn_ns);
        }
        (gpu, state)
    };
    by_gpu.into_iter().filter(|(_, memory)| !memory.reports.is_empty()).map(update).collect()
}

fn log_change(gpu: GpuUuid, before: Option<TurnReason>, after: Option<TurnReason>, turn_ms: u64) {
    match (before, after) {
        (_, Some(TurnReason::Thrashing)) => {
            tracing::info!(%gpu, turn_ms, "shares evict each other's memory: they use the GPU in turns");
        }
        (Some(TurnReason::Thrashing), _) => tracing::info!(%gpu, "shares use the GPU side by side again"),
        (_, Some(TurnReason::Probe)) => {
            tracing::debug!(%gpu, "more memory held than the GPU has: probing one share alone");
        }
        (_, None) => tracing::debug!(%gpu, "probe finished"),
    }
}

/// The current report of a share. Its processes write it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ShareReport {
    key: ShareKey,
    /// It has high priority.
    is_high: bool,
    /// Bytes in total.
    used: u64,
    /// Bytes of managed memory among them.
    managed: u64,
    /// Total time of the measured launches since its processes started.
    launch_ns: u64,
    /// The time of these launches at the fastest speed of their kernels.
    fastest_ns: u64,
    /// A counter that grows while the share is active.
    activity: u64,
    /// How often it was refused memory.
    refusals: u64,
}

impl ShareReport {
    /// `None` if the share cannot over-commit or its page cannot be read.
    fn of(found: &FoundShare) -> Option<Self> {
        let policy = &found.policy;
        let page = found.account().filter(|_| may_overcommit(policy))?;
        let mut report = Self {
            key: found.key(),
            is_high: policy.compute.priority > 0,
            used: page.used(),
            managed: 0,
            launch_ns: 0,
            fastest_ns: 0,
            activity: page.refilled_at(),
            refusals: page.fault_count(Fault::Refused),
        };
        // Containers write these counters, so any value is possible.
        for slot in page.slots().filter(|slot| slot.owner.state() == SlotState::Live) {
            let add = |sum: &mut u64, more: u64| *sum = sum.wrapping_add(more);
            report.managed = report.managed.saturating_add(slot.managed);
            add(&mut report.launch_ns, slot.measured_ns);
            add(&mut report.fastest_ns, slot.fastest_ns);
            add(&mut report.activity, slot.charged_ns);
            add(&mut report.activity, slot.measured_ns);
        }
        report.managed = managed(report.managed, report.used, policy.memory.soft);
        Some(report)
    }
}

/// The managed memory of a share in bytes. Everything beyond its claim must be managed, so a share
/// cannot avoid turns by reporting less.
fn managed(reported: u64, used: u64, claimed: u64) -> u64 {
    reported.max(used.saturating_sub(claimed)).min(used)
}

/// State of a GPU that is passed from one poll to the next.
#[derive(Clone, Debug, Default)]
pub(crate) struct GpuPressure {
    shares: BTreeMap<ShareKey, ShareActivity>,
    turns: Option<Turns>,
    /// Since when several active shares hold more memory than the GPU has.
    contended_since: Option<u64>,
    round: Option<ProbeRound>,
    /// Number of probes so far.
    probes: usize,
    /// When shares were last asked to trim their pools.
    trimmed_at: Option<u64>,
}

impl GpuPressure {
    /// Why shares use the GPU in turns, if they do.
    fn turn_reason(&self) -> Option<TurnReason> {
        self.turns.as_ref().map(|turns| turns.reason)
    }
}

#[derive(Clone, Debug)]
struct ShareActivity {
    report: ShareReport,
    /// When it was last active, or was first seen.
    active_at: u64,
    /// It was active at least once.
    was_active: bool,
    /// Since when launches are slow, and their actual and fastest time since then.
    slow: Option<(u64, u64, u64)>,
    /// Time that it waited for memory since it last became active.
    waited: u64,
    /// When most of the launch time was last a wait for memory.
    thrashed_at: Option<u64>,
    /// Number of polls since turns began in which launches had ended.
    active_polls: u32,
}

/// Why shares use the GPU in turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TurnReason {
    /// To measure how fast launches can be.
    Probe,
    /// Shares evict each other's memory.
    Thrashing,
}

#[derive(Clone, Debug)]
struct Turns {
    reason: TurnReason,
    since: u64,
    /// Cost of a change to the next share.
    swap_ns: u64,
}

/// The last probes that followed each other.
#[derive(Clone, Copy, Debug)]
struct ProbeRound {
    ended_at: u64,
    /// Their length together.
    took: u64,
    count: u32,
    /// Bytes held by all shares at the end.
    used: u64,
}

/// The decision after a poll.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Decision {
    /// `None`: all shares use the GPU side by side.
    reason: Option<TurnReason>,
    /// The shares that take turns, in order.
    order: Vec<ShareKey>,
    turn_ns: u64,
    /// Shares that should free unused memory of their pools.
    trims: Vec<ShareKey>,
}

/// Decides after a poll of a GPU with `physical` bytes for these shares.
///
/// *Thrashing* shows in the launch times that libraries report. For [`THRASHING_NS`], launches take
/// more than [`SLOWDOWN_MIN`] times as long as the fastest of their kernel, while the shares hold
/// more memory than the GPU has. Time sharing makes kernels slower as well, but only by
/// the number of shares. Then the shares with managed memory take turns, until they fit or only one
/// is active. A turn lasts ten times as long as it takes to bring back evicted memory.
///
/// *Probes.* If every launch of a kernel had to wait, there is no fast launch to compare with. So
/// if too much memory is held and two shares are active, one share soon gets the GPU alone for a
/// moment, and then another one. The probe ends after launches ended in [`PROBE_ACTIVE_POLLS`]
/// polls, when no launch waits for evicted memory any more. Afterwards thrashing counts after
/// [`THRASHING_AFTER_PROBE_NS`] already. If it does not show within [`PROBE_RESULT_NS`], another
/// share is probed. After that, two shares whose launches wait for memory once more are sufficient.
/// If there is no thrashing, the next round starts a minute later, or earlier if more memory is
/// held.
///
/// A share that reports false values can at most force turns on a GPU that is over-committed. It
/// gains no time by that.
///
/// *Pools* that keep unused memory are trimmed when a share was refused memory that cannot migrate,
/// or when little memory is free. Idle shares and the refused share itself are asked. The cost is
/// that their pools must grow again later.
fn decide(physical: u64, reports: &[ShareReport], state: GpuPressure, now: u64) -> (Decision, GpuPressure) {
    let GpuPressure { shares: mut before, mut trimmed_at, .. } = state;
    let mut shares = BTreeMap::new();
    let (mut refused, mut idle) = (Vec::new(), Vec::new());
    for report in reports {
        let known = before.remove(&report.key);
        if known.as_ref().is_some_and(|known| report.refusals > known.report.refusals) {
            refused.push(report.key.clone());
        }
        let known = ShareActivity::after(known, report, now);
        if now.saturating_sub(known.active_at) >= SECOND {
            idle.push(report.key.clone());
        }
        shares.insert(report.key.clone(), known);
    }
    let mut state = GpuPressure { shares, ..state };
    state.update_turns(physical, reports, now);
    let mut decision = Decision::default();
    if let Some(turns) = &state.turns {
        decision.reason = Some(turns.reason);
        (decision.order, decision.turn_ns) = match turns.reason {
            TurnReason::Probe => (probe_order(reports, state.probes), turns.longest_probe()),
            TurnReason::Thrashing => (turn_order(reports), turns.turn_ns().min(TURN_BOUNDS_NS.1)),
        };
    }
    let fixed =
        reports.iter().map(|report| report.used.saturating_sub(report.managed)).fold(0, u64::saturating_add);
    let is_low = fixed > physical - physical / 100 * FREE_MIN_PERCENT;
    let is_due = trimmed_at.is_none_or(|at| now.saturating_sub(at) >= TRIM_INTERVAL_NS);
    if !refused.is_empty() || is_low && is_due {
        idle.retain(|key| !refused.contains(key));
        decision.trims = refused.into_iter().chain(idle).collect();
        trimmed_at = Some(now);
    }
    (decision, GpuPressure { trimmed_at, ..state })
}

fn with_managed(reports: &[ShareReport]) -> impl Iterator<Item = &ShareReport> {
    reports.iter().filter(|report| report.managed > 0)
}

/// The order of a probe: first the share to probe, then those that wait. The first one changes from
/// probe to probe.
fn probe_order(reports: &[ShareReport], probes: usize) -> Vec<ShareKey> {
    let mut order: Vec<ShareKey> = with_managed(reports).map(|report| report.key.clone()).collect();
    let first = probes % order.len().max(1);
    order.rotate_left(first);
    order
}

/// The order of turns. If there are shares with high priority and others, every other turn has high priority.
fn turn_order(reports: &[ShareReport]) -> Vec<ShareKey> {
    let (high, low): (Vec<&ShareReport>, Vec<&ShareReport>) =
        with_managed(reports).partition(|report| report.is_high);
    let rounds = if high.is_empty() || low.is_empty() { 0 } else { high.len().max(low.len()) };
    let pairs = (0..rounds).flat_map(|at| [high[at % high.len()], low[at % low.len()]]);
    let one_class = high.iter().chain(&low).copied().filter(|_| rounds == 0);
    pairs.chain(one_class).map(|report| report.key.clone()).collect()
}

impl GpuPressure {
    /// Starts, continues or ends turns.
    fn update_turns(&mut self, physical: u64, reports: &[ShareReport], now: u64) {
        let used = reports.iter().map(|report| report.used).fold(0, u64::saturating_add);
        let over = used.saturating_sub(physical);
        let count = with_managed(reports).count() as u64;
        let measured = self.shares.values_mut().filter_map(|share| share.take_wait(now)).max();
        let is_contended = over > 0 && count > 1;
        let active = self.shares.values().filter(|share| share.is_active(THRASHING_NS, now)).count();
        if !is_contended || active < 2 {
            self.contended_since = None;
        }
        let Some(turns) = self.turns.take() else {
            if !is_contended {
                return;
            }
            let long =
                if self.was_probed(PROBE_VALID_NS, now) { THRASHING_AFTER_PROBE_NS } else { THRASHING_NS };
            let is_slow = self.shares.values().any(|share| share.is_slow(count, long, now));
            let reason = if is_slow || self.probes_show_thrashing(now) {
                TurnReason::Thrashing
            } else if active >= 2 && self.is_probe_due(used, physical, now) {
                TurnReason::Probe
            } else {
                return;
            };
            let swap_ns = (u128::from(over) * u128::from(SECOND) / u128::from(SWAP_BYTES_PER_SECOND)) as u64;
            self.turns = Some(Turns { reason, since: now, swap_ns });
            for share in self.shares.values_mut() {
                (share.waited, share.active_polls) = (0, 0);
            }
            return;
        };
        let passed = now.saturating_sub(turns.since);
        match turns.reason {
            TurnReason::Probe => {
                let is_done = self.shares.values().any(|share| share.active_polls >= PROBE_ACTIVE_POLLS);
                if is_contended && !is_done && passed < turns.longest_probe() {
                    self.turns = Some(turns);
                    return;
                }
                let before = self.round.filter(|before| before.count < PROBES_PER_ROUND);
                let (took, count) = before.map_or((0, 0), |before| (before.took, before.count));
                self.round = Some(ProbeRound { ended_at: now, took: took + passed, count: count + 1, used });
                self.probes = self.probes.wrapping_add(1);
                // Slow launches during a probe are no sign: they waited for launches that were under way.
                for share in self.shares.values_mut() {
                    (share.slow, share.waited) = (None, 0);
                }
            }
            TurnReason::Thrashing if is_contended => {
                // Waits of the first turn include launches that began before it.
                let measured = measured.filter(|_| passed > turns.turn_ns());
                let swap_ns =
                    measured.map_or(turns.swap_ns, |measured| u64::midpoint(turns.swap_ns, measured));
                let turns = Turns { swap_ns, ..turns };
                // After a full round in which only one share was active, turns end.
                let round = turns.turn_ns().saturating_mul(turn_order(reports).len() as u64 + 1);
                let active = self.shares.values().filter(|share| share.is_active(round, now)).count();
                self.turns = (passed <= round || active > 1).then_some(turns);
            }
            TurnReason::Thrashing => {}
        }
    }

    /// Whether a probe may start now.
    fn is_probe_due(&mut self, used: u64, physical: u64, now: u64) -> bool {
        let since = *self.contended_since.get_or_insert(now);
        // Slow launches are being measured already.
        let is_measuring = self.shares.values().any(|share| share.slow.is_some());
        let is_next = self.round.is_some_and(|round| round.count < PROBES_PER_ROUND)
            && !self.was_probed(PROBE_RESULT_NS, now);
        let is_new_round = self.round.is_none_or(|round| {
            let since = now.saturating_sub(round.ended_at);
            let has_more = used > round.used.saturating_add(physical / GROWTH_DIVISOR);
            since >= round.took.saturating_mul(PROBE_PAUSE_FACTOR) && (has_more || since >= PROBE_INTERVAL_NS)
        });
        !is_measuring && (is_next || is_new_round && now.saturating_sub(since) >= PROBE_AFTER_NS)
    }

    fn was_probed(&self, within: u64, now: u64) -> bool {
        self.round.is_some_and(|round| now.saturating_sub(round.ended_at) <= within)
    }

    /// Whether the next poll should be soon: a probe is about to start, runs, or is about to show its result.
    fn is_urgent(&self, now: u64) -> bool {
        let is_new = self.contended_since.is_some_and(|since| now.saturating_sub(since) <= PROBE_AFTER_NS);
        self.turn_reason() == Some(TurnReason::Probe)
            || self.turn_reason().is_none() && (is_new || self.was_probed(PROBE_RESULT_NS, now))
    }

    /// Whether two shares thrash, now that a full round of probes measured their fastest launches.
    fn probes_show_thrashing(&self, now: u64) -> bool {
        let Some(round) = self.round.filter(|_| self.was_probed(PROBE_VALID_NS, now)) else { return false };
        let thrashing = self.shares.values().filter(|share| share.thrashed_at > Some(round.ended_at));
        round.count >= PROBES_PER_ROUND && thrashing.count() > 1
    }
}

impl Turns {
    fn turn_ns(&self) -> u64 {
        self.swap_ns.saturating_mul(TURN_PER_SWAP).clamp(TURN_BOUNDS_NS.0, TURN_BOUNDS_NS.1)
    }

    /// The length of a probe in which no launch ends.
    fn longest_probe(&self) -> u64 {
        self.turn_ns().clamp(PROBE_BOUNDS_NS.0, PROBE_BOUNDS_NS.1)
    }
}

impl ShareActivity {
    fn after(before: Option<Self>, report: &ShareReport, now: u64) -> Self {
        let Some(before) = before else {
            return Self {
                report: report.clone(),
                active_at: now,
                was_active: false,
                slow: None,
                waited: 0,
                thrashed_at: None,
                active_polls: 0,
            };
        };
        // The sums shrink when a process exits.
        let launch = report.launch_ns.checked_sub(before.report.launch_ns);
        let fastest = report.fastest_ns.checked_sub(before.report.fastest_ns);
        let (launch, fastest) = launch.zip(fastest).unwrap_or((0, 0));
        let is_active = report.activity != before.report.activity;
        let active_at = if is_active { now } else { before.active_at };
        let slow = match before.slow {
            _ if launch == 0 => before.slow,
            // It has been slow for as long as these launches took.
            None => Some((now.saturating_sub(launch.min(THRASHING_NS)), launch, fastest)),
            Some((since, all, all_fastest)) => {
                Some((since, all.saturating_add(launch), all_fastest.saturating_add(fastest)))
            }
        };
        // A share that is idle does not thrash.
        let is_recent = now.saturating_sub(active_at) < THRASHING_NS;
        let is_slow = |(_, all, fastest): &(u64, u64, u64)| *all > fastest.saturating_mul(SLOWDOWN_MIN);
        let slow = slow.filter(|slow| is_recent && is_slow(slow));
        // Launches are always a little slower than the fastest one.
        let wait = if launch > fastest.saturating_mul(2) { launch.saturating_sub(fastest) } else { 0 };
        let waited = before.waited.saturating_add(wait);
        let has_thrashed = launch.saturating_sub(fastest) >= FAULT_WAIT_MIN_NS
            && launch > fastest.saturating_mul(SLOWDOWN_MIN);
        let thrashed_at = if has_thrashed { Some(now) } else { before.thrashed_at };
        let active_polls = before.active_polls.saturating_add(u32::from(launch > 0));
        let was_active = before.was_active || is_active;
        Self { report: report.clone(), active_at, was_active, slow, waited, thrashed_at, active_polls }
    }

    /// Whether it was slower for `long` than time sharing between `count` shares explains.
    fn is_slow(&self, count: u64, long: u64, now: u64) -> bool {
        let is_far = |(since, launch, fastest): (u64, u64, u64)| {
            now.saturating_sub(since) >= long && launch > fastest.saturating_mul(SLOWDOWN_MIN.max(2 * count))
        };
        self.slow.is_some_and(is_far)
    }

    /// Whether it holds managed memory and was active within this time.
    fn is_active(&self, within: u64, now: u64) -> bool {
        self.report.managed > 0 && self.was_active && now.saturating_sub(self.active_at) <= within
    }

    /// Once the share is idle: the time that it waited for memory while it was last active.
    fn take_wait(&mut self, now: u64) -> Option<u64> {
        let is_idle = now.saturating_sub(self.active_at) >= IDLE_NS;
        (is_idle && self.waited > 0).then(|| std::mem::take(&mut self.waited))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;
    const PHYSICAL: u64 = 10 * GIB;
    /// Time between two polls.
    const POLL_NS: u64 = SECOND / 4;

    fn key(name: &str) -> ShareKey {
        (name.into(), "share".into())
    }

    fn share(name: &str, used: u64, managed: u64) -> ShareReport {
        ShareReport {
            key: key(name),
            is_high: false,
            used,
            managed,
            launch_ns: 0,
            fastest_ns: 0,
            activity: 0,
            refusals: 0,
        }
    }

    /// Two shares with 6 GiB each, 1 GiB of it managed.
    fn two() -> [ShareReport; 2] {
        ["a", "b"].map(|name| share(name, 6 * GIB, GIB))
    }

    /// Polls shares whose launches are `slow` times as long as the fastest; 0 means idle. Returns the
    /// decision of each poll.
    fn run(
        all: &mut [ShareReport],
        slow: &[u64],
        state: &mut GpuPressure,
        from: u64,
        polls: u64,
    ) -> Vec<Decision> {
        let poll = |at: u64| {
            for (report, slow) in all.iter_mut().zip(slow).filter(|(_, slow)| **slow > 0) {
                report.launch_ns += POLL_NS / 2;
                report.fastest_ns += POLL_NS / 2 / slow;
                report.activity += 1;
            }
            let (decision, after) = decide(PHYSICAL, all, std::mem::take(state), from + at * POLL_NS);
            *state = after;
            decision
        };
        (1..=polls).map(poll).collect()
    }

    /// For each decision: whether shares take turns because they thrash.
    fn are_turns(decisions: &[Decision]) -> Vec<bool> {
        decisions.iter().map(|decision| decision.reason == Some(TurnReason::Thrashing)).collect()
    }

    /// For each decision: whether it is a probe.
    fn are_probes(decisions: &[Decision]) -> Vec<bool> {
        decisions.iter().map(|decision| decision.reason == Some(TurnReason::Probe)).collect()
    }

    #[test]
    fn thrashing_shares_take_turns_within_three_seconds() {
        let (mut all, mut state) = (two(), GpuPressure::default());
        let before = run(&mut all, &[1, 1], &mut state, 0, 60);
        assert!(!are_turns(&before).contains(&true), "no thrashing yet");
        let during = run(&mut all, &[20, 20], &mut state, 15 * SECOND, 12);
        let first = are_turns(&during).iter().position(|is_turn| *is_turn).expect("turns");
        assert!((4..12).contains(&first), "poll {first}");
        let last = during.last().expect("polls");
        assert_eq!(last.order, [key("a"), key("b")]);
        assert!(last.turn_ns > SECOND && last.turn_ns < 4 * SECOND, "{}", last.turn_ns);
    }

    #[test]
    fn shares_that_fit_or_are_slightly_slow_take_no_turns() {
        let check = |mut all: Vec<ShareReport>, slow: &[u64]| {
            let decisions = run(&mut all, slow, &mut GpuPressure::default(), 0, 40);
            assert!(!are_turns(&decisions).contains(&true), "{slow:?}");
        };
        check(two().to_vec(), &[4, 4]);
        check(two().to_vec(), &[0, 0]);
        check(vec![share("a", 4 * GIB, GIB), share("b", 6 * GIB, GIB)], &[20, 20]);
        check(vec![share("a", 6 * GIB, GIB), share("b", 6 * GIB, 0)], &[20, 20]);
        check(vec![share("a", 12 * GIB, 2 * GIB)], &[20]);
    }

    const MS: u64 = 1_000_000;

    /// The share in turn, and since when.
    #[derive(Default)]
    struct Turn(Option<(ShareKey, u64)>);

    impl Turn {
        fn follow(&mut self, decision: &Decision, now: u64) {
            let at = self.0.as_ref().and_then(|(key, since)| {
                let at = decision.order.iter().position(|one| one == key)?;
                let is_over = now - since >= decision.turn_ns;
                Some(if is_over { (at + 1, now) } else { (at, *since) })
            });
            let (at, since) = at.unwrap_or((0, now));
            let count = decision.order.len().max(1);
            self.0 = decision.order.get(at % count).map(|key| (key.clone(), since));
        }

        /// Whether there are no turns, or it is this share's.
        fn is_for(&self, key: &ShareKey) -> bool {
            self.0.as_ref().is_none_or(|(one, _)| one == key)
        }
    }

    /// Polls shares whose launches take 1 ms alone and `beside` ms side by side. Turns follow the
    /// decisions, which are returned.
    fn run_with_turns(
        all: &mut [ShareReport],
        beside: u64,
        state: &mut GpuPressure,
        from: u64,
        polls: u64,
    ) -> Vec<Decision> {
        let mut fastest = vec![u64::MAX; all.len()];
        let mut turn = Turn::default();
        let poll = |at: u64| {
            for (report, fastest) in all.iter_mut().zip(&mut fastest) {
                if !turn.is_for(&report.key) {
                    continue;
                }
                let length = if turn.0.is_some() { MS } else { beside * MS };
                *fastest = length.min(*fastest);
                let launches = POLL_NS / length;
                (report.launch_ns, report.fastest_ns) =
                    (report.launch_ns + launches * length, report.fastest_ns + launches * *fastest);
                report.activity += launches;
            }
            let (decision, after) = decide(PHYSICAL, all, std::mem::take(state), from + at * POLL_NS);
            turn.follow(&decision, from + at * POLL_NS);
            *state = after;
            decision
        };
        (1..=polls).map(poll).collect()
    }

    #[test]
    fn shares_that_always_thrashed_take_turns_after_a_probe() {
        let (mut all, mut state) = (two(), GpuPressure::default());
        let decisions = run_with_turns(&mut all, 100, &mut state, 0, 40);
        let (probes, taken) = (are_probes(&decisions), are_turns(&decisions));
        let first = probes.iter().position(|is_probe| *is_probe).expect("a probe");
        assert!((4..12).contains(&first), "poll {first}");
        let last = probes.iter().rposition(|is_probe| *is_probe).expect("a probe");
        assert!(last - first <= 4 * PROBE_ACTIVE_POLLS as usize, "{first} to {last}");
        let turns = taken.iter().position(|is_turn| *is_turn).expect("turns");
        assert!(turns > last && turns < last + 12 && !taken[turns..].contains(&false), "{last}, {turns}");
    }

    /// A share whose launches take 10 ms, and `fetch` longer if its memory was evicted: side by side
    /// every launch, alone the first one.
    struct Tenant {
        report: ShareReport,
        fetch: u64,
        fastest: u64,
        is_alone: bool,
        /// Length and remaining time of the current launch.
        length: u64,
        left: u64,
    }

    impl Tenant {
        fn new(report: ShareReport, fetch: u64, left: u64) -> Self {
            Self { report, fetch, fastest: u64::MAX, is_alone: false, length: 10 * MS + fetch, left }
        }

        fn work(&mut self, mut time: u64, is_alone: bool) {
            self.report.activity += 1;
            while time >= self.left {
                time -= self.left;
                self.fastest = self.fastest.min(self.length);
                (self.report.launch_ns, self.report.fastest_ns) =
                    (self.report.launch_ns + self.length, self.report.fastest_ns + self.fastest);
                self.length = 10 * MS + if is_alone && self.is_alone { 0 } else { self.fetch };
                (self.is_alone, self.left) = (is_alone, self.length);
            }
            self.left -= time;
        }
    }

    /// Runs two shares. Returns when they last ran side by side, and the final decision.
    fn side_by_side(fetch: u64, phase: u64) -> (u64, Decision) {
        let [a, b] = two();
        let mut tenants = [Tenant::new(a, fetch, phase), Tenant::new(b, fetch, fetch)];
        let (mut state, mut decision, mut turn) =
            (GpuPressure::default(), Decision::default(), Turn::default());
        let (mut now, mut beside) = (0, 0);
        while now < 20 * SECOND {
            let pause = if state.is_urgent(now) { SECOND / 10 } else { POLL_NS };
            now += pause;
            for tenant in &mut tenants {
                if turn.is_for(&tenant.report.key) {
                    tenant.work(pause, turn.0.is_some());
                } else {
                    tenant.is_alone = false;
                }
            }
            beside = if turn.0.is_none() { now } else { beside };
            let all = tenants.each_ref().map(|tenant| tenant.report.clone());
            (decision, state) = decide(PHYSICAL, &all, state, now);
            turn.follow(&decision, now);
        }
        (beside, decision)
    }

    #[test]
    fn shares_that_were_never_fast_take_turns_in_three_seconds() {
        for (fetch, phase) in
            [100, 200, 350].into_iter().flat_map(|fetch| (1..10).map(move |at| (fetch, fetch * at / 10)))
        {
            let (beside, decision) = side_by_side(fetch * MS, phase * MS);
            assert_eq!(decision.reason, Some(TurnReason::Thrashing));
            assert!(beside <= 3 * SECOND, "{fetch} ms, {phase} ms: {} ms", beside / MS);
        }
    }

    #[test]
    fn shares_with_short_waits_run_side_by_side_again() {
        // As fast as alone, as slow as time sharing explains, and a little slower.
        for fetch in [0, 10, 30] {
            let (beside, decision) = side_by_side(fetch * MS, 1);
            assert!(decision.order.is_empty() && beside >= 20 * SECOND, "{fetch} ms: {decision:?}");
        }
    }

    #[test]
    fn two_slow_shares_after_probes_show_thrashing_one_does_not() {
        let check = |waits: [u64; 2], expected: bool| {
            let (mut all, mut state) = (two(), GpuPressure::default());
            run_with_turns(&mut all, 2, &mut state, 0, 20);
            assert!(state.round.is_some_and(|round| round.count == PROBES_PER_ROUND), "{:?}", state.round);
            // One slow launch of a quarter of a second.
            for (report, waits) in all.iter_mut().zip(waits) {
                (report.launch_ns, report.fastest_ns) =
                    (report.launch_ns + waits * SECOND / 4, report.fastest_ns + waits * SECOND / 100);
                report.activity += 1;
            }
            let (decision, _) = decide(PHYSICAL, &all, state, 21 * POLL_NS);
            assert_eq!(decision.reason == Some(TurnReason::Thrashing), expected, "{waits:?}");
        };
        check([1, 0], false);
        check([1, 1], true);
    }

    #[test]
    fn probes_without_result_are_short_and_rare() {
        let (mut all, mut state) = (two(), GpuPressure::default());
        let decisions = run_with_turns(&mut all, 2, &mut state, 0, 4 * 60 * 5);
        let probes = are_probes(&decisions).into_iter().filter(|is_probe| *is_probe).count();
        assert!((4 * PROBE_ACTIVE_POLLS as usize..=decisions.len() / 20).contains(&probes), "{probes} polls");
        assert!(!are_turns(&decisions).contains(&true));
        let mut firsts: Vec<&ShareKey> =
            decisions.iter().filter_map(|decision| decision.order.first()).collect();
        firsts.dedup();
        assert_eq!(firsts[..2], [&key("a"), &key("b")]);
        // A share that holds more memory triggers another probe.
        let from = 5 * 60 * SECOND;
        all[0].used += GIB;
        let decisions = run_with_turns(&mut all, 2, &mut state, from, 4 * 25);
        assert!(are_probes(&decisions).contains(&true));
    }

    #[test]
    fn no_probe_if_memory_fits_or_one_share_is_active() {
        let check = |mut all: Vec<ShareReport>, slow: &[u64]| {
            let decisions = run(&mut all, slow, &mut GpuPressure::default(), 0, 300);
            assert!(decisions.iter().all(|decision| decision.order.is_empty()), "{slow:?}");
        };
        check(vec![share("a", 4 * GIB, GIB), share("b", 6 * GIB, GIB)], &[1, 1]);
        check(two().to_vec(), &[1, 0]);
        check(vec![share("a", 6 * GIB, GIB), share("b", 6 * GIB, 0)], &[1, 1]);
    }

    #[test]
    fn memory_beyond_the_claim_counts_as_managed() {
        assert_eq!(managed(3, 10, 8), 3);
        assert_eq!(managed(0, 10, 8), 2);
        assert_eq!(managed(0, 10, 12), 0);
        assert_eq!(managed(u64::MAX, 10, 8), 10);
    }

    #[test]
    fn every_other_turn_has_high_priority() {
        let of = |names: &[(&str, bool)]| {
            let shares = names
                .iter()
                .map(|(name, is_high)| ShareReport { is_high: *is_high, ..share(name, GIB, GIB) });
            let order = turn_order(&shares.collect::<Vec<_>>());
            order.into_iter().map(|(claim, _)| claim.to_string()).collect::<String>()
        };
        assert_eq!(of(&[("a", false), ("b", false)]), "ab");
        assert_eq!(of(&[("a", true), ("b", true)]), "ab");
        assert_eq!(of(&[("a", false), ("b", false), ("c", true)]), "cacb");
        assert_eq!(of(&[("a", false), ("b", true), ("c", true)]), "baca");
    }

    #[test]
    fn turns_end_when_their_cause_ends() {
        let taken = || {
            let (mut all, mut state) = (two(), GpuPressure::default());
            assert!(are_turns(&run(&mut all, &[20, 20], &mut state, 0, 20)).contains(&true));
            (all, state)
        };
        let (mut all, mut state) = taken();
        all[0].used = 3 * GIB;
        assert_eq!(are_turns(&run(&mut all, &[20, 20], &mut state, 5 * SECOND, 1)), [false], "they fit");
        let (mut all, mut state) = taken();
        let alone = are_turns(&run(&mut all, &[1, 0], &mut state, 5 * SECOND, 200));
        assert!(alone[0] && !alone[199], "one share is active");
        let (mut all, mut state) = taken();
        assert!(!are_turns(&run(&mut all, &[1, 1], &mut state, 5 * SECOND, 200)).contains(&false));
    }

    #[test]
    fn turn_length_is_ten_times_the_swap_cost() {
        let (mut all, mut state) = (two(), GpuPressure::default());
        run(&mut all, &[20, 20], &mut state, 0, 20);
        // From now on a swap costs 400 ms, and the shares are active alternately.
        let mut last = Decision::default();
        for round in 0..20_usize {
            all[round % 2].launch_ns += 2 * SECOND / 5;
            let slow = if round % 2 == 0 { [1, 0] } else { [0, 1] };
            let decisions = run(&mut all, &slow, &mut state, (5 + 2 * round as u64) * SECOND, 8);
            last = decisions.last().cloned().expect("polls");
        }
        assert!(last.turn_ns.abs_diff(4 * SECOND) < SECOND / 5, "{}", last.turn_ns);
    }

    #[test]
    fn pools_are_trimmed_after_a_refusal() {
        let mut all = [share("active", GIB, 0), share("idle", GIB, 0), share("refused", GIB, 0)];
        let mut state = GpuPressure::default();
        let mut run = |all: &mut [ShareReport], at: u64| run(all, &[1, 0, 0], &mut state, at * SECOND, 8);
        assert!(run(&mut all, 0).iter().all(|decision| decision.trims.is_empty()));
        all[2].refusals += 1;
        let decisions = run(&mut all, 2);
        assert_eq!(decisions[0].trims, [key("refused"), key("idle")]);
        assert!(decisions[1..].iter().all(|decision| decision.trims.is_empty()), "once");
        all[1].used = 8 * GIB;
        let decisions: Vec<Decision> = (4..24).step_by(2).flat_map(|at| run(&mut all, at)).collect();
        let asked = decisions.iter().filter(|decision| !decision.trims.is_empty()).count();
        assert!((1..=3).contains(&asked), "rarely, while little memory is free: {asked}");
    }

    proptest! {
        /// Any report is possible, because containers write it.
        #[test]
        fn turns_are_bounded_for_any_reports(
            polls in proptest::collection::vec(proptest::collection::vec(any::<[u64; 6]>(), 0..4), 1..20),
        ) {
            let mut state = GpuPressure::default();
            for (poll, at) in polls.iter().zip(0_u64..) {
                let all: Vec<ShareReport> = poll
                    .iter()
                    .zip(["a", "b", "c", "d"])
                    .map(|([used, managed, launch, fastest, activity, refusals], name)| ShareReport {
                        launch_ns: *launch,
                        fastest_ns: *fastest,
                        activity: *activity,
                        refusals: *refusals,
                        ..share(name, *used, *managed)
                    })
                    .collect();
                let (decision, after) = decide(PHYSICAL, &all, state, at * SECOND);
                state = after;
                let bounds = TURN_BOUNDS_NS.0..=TURN_BOUNDS_NS.1;
                prop_assert!(decision.order.is_empty() || bounds.contains(&decision.turn_ns));
                prop_assert!(decision.order.len() != 1);
                prop_assert_eq!(decision.order.is_empty(), decision.reason.is_none());
                let is_there = |key: &ShareKey| all.iter().any(|report| report.key == *key);
                prop_assert!(decision.order.iter().chain(&decision.trims).all(is_there));
            }
        }

        /// For any reports, even if the memory in use keeps growing.
        #[test]
        fn probes_take_a_bounded_part_of_the_time(
            polls in proptest::collection::vec((0..2 * POLL_NS, any::<bool>(), 0..GIB), 1..2000),
        ) {
            let (mut all, mut state, mut taken) = (two(), GpuPressure::default(), 0_u64);
            for ((took, works, more), at) in polls.iter().zip(1_u64..) {
                for report in &mut all {
                    // All launches are as fast as the fastest.
                    report.launch_ns += took;
                    report.fastest_ns += took;
                    report.activity += u64::from(*works);
                    report.used += more;
                }
                let (decision, after) = decide(PHYSICAL, &all, state, at * POLL_NS);
                state = after;
                taken += u64::from(!decision.order.is_empty());
                prop_assert!(decision.reason != Some(TurnReason::Thrashing));
                let first_round = u64::from(PROBES_PER_ROUND) * (PROBE_BOUNDS_NS.1 + POLL_NS);
                let bound = first_round + at * POLL_NS / PROBE_PAUSE_FACTOR;
                prop_assert!(taken * POLL_NS <= bound, "{} of {}", taken, at);
            }
        }
    }
}
