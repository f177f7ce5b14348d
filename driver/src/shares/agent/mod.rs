//! The agent: audits the shares of each GPU once a second and divides the GPU's time between them.
//!
//! An audit compares each share's account page with what NVML and the kernel report. The agent does
//! not trust the page, because processes of the container write it. The agent keeps no state that
//! must survive a restart: limits are on the pages, measurements are in the slots, and ownership
//! follows from cgroups, mounts and the hook's files. While no agent runs, all limits stay as they
//! are. The agent knows only claim UIDs: no API server and no claim records.

mod container_watch;
mod locks;
mod running_totals;

pub use crate::shares::enforcement::remediation::{Action, Report};
pub use crate::shares::scheduler::TimeLaw;
pub use crate::shares::snapshot::AUDIT_INTERVAL;
pub use crate::shares::snapshot::finding::{Finding, KillPolicy, Kind, Suspect};

use crate::gpu::Gpus;
use crate::paths::HostPaths;
use crate::shares::enforcement::{
    checks, compute_limit, context_size, remediation, slot_corrections, ungranted,
};
use crate::shares::memory_pressure::{self, PressureState};
use crate::shares::scheduler::fast_sampling::{self, FastSampling};
use crate::shares::scheduler::grant_table::PlannedShare;
use crate::shares::scheduler::grants::ShareStatus;
use crate::shares::scheduler::wakeup::WakeupThread;
use crate::shares::scheduler::{balance_check, controller_inputs, device_totals, sample_attribution};
use crate::shares::snapshot::collect::{self, FoundShare};
use crate::shares::snapshot::nvml_query::{self, NvmlReport, Utilization};
use crate::shares::snapshot::page_files::PageFiles;
use crate::shares::snapshot::process::ProcessCache;
use crate::shares::snapshot::{Account, Share, Snapshot, monotonic_ns, usage};
use crate::shares::{ACCOUNT, Contexts, POLICY, Shares};
use container_watch::ContainerWatch;
use divvy_api::top::ShareUsage;
use divvy_model::Inventory;
use divvy_nvml::{GpuQueue, NvmlError};
use divvy_pages::GpuUuid;
use futures::StreamExt;
use futures::future::join_all;
use futures::stream::FuturesUnordered;
use locks::GpuLocks;
use running_totals::RunningTotals;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Instant, SystemTime};
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;

/// Capacity of the report channel. When it is full, further reports appear in the log only.
const REPORT_QUEUE_CAPACITY: usize = 256;

/// The agent of a node.
///
/// ```text
/// pages ─▶ NVML: memory and ─▶ pages again,  ─▶ Snapshot ─┬▶ checks ───────────▶ findings ─▶ reports, kill
/// (1st copy)   time by process   /proc (2nd copy)         ├▶ slot_corrections ─▶ account pages
///                                                         ├▶ controller ─┬▶ grants ─▶ policy pages
///                                doorbells of shares ─▶ wakeup thread ───┘
///                                                         └▶ usage ────────────▶ reports (`divvy top`)
/// ```
///
/// Between two audits the agent also does three things:
///
/// - It sets the GPU driver's own limits as soon as the hook reports a new container (`container_watch`).
/// - It takes extra snapshots when shares start or stop working. These only correct rates
///   (`fast_sampling`).
/// - It polls shares that may hold more memory than the GPU has (`memory_pressure`).
pub struct Agent {
    gpus: Gpus,
    inventory: watch::Receiver<Arc<Inventory>>,
    inner: Arc<Inner>,
    reports: mpsc::Sender<Report>,
}

/// The part of the agent that blocking threads use.
struct Inner {
    shares: Shares,
    contexts: Contexts,
    files: PageFiles,
    process_root: PathBuf,
    cgroup_root: PathBuf,
    locks: GpuLocks,
    kill_policy: KillPolicy,
    wakeup: WakeupThread,
}

/// State of one GPU that is passed from one audit to the next.
#[derive(Default)]
struct GpuState {
    slots: checks::SlotHistory,
    processes: ProcessCache,
    remediation: remediation::State,
    /// When findings were last checked; `None` before the first audit.
    audited_at: Option<Instant>,
    usage: usage::UsageHistory,
    running_totals: RunningTotals,
    attribution: sample_attribution::AttributionState,
    balances: balance_check::BalanceHistory,
    device_totals: device_totals::DeviceTotals,
    compute_limit: compute_limit::ExcessHistory,
    ungranted: ungranted::UngrantedTests,
    /// The smallest context seen on this GPU, in bytes.
    context_bytes: Option<u64>,
}

impl GpuState {
    /// Whether findings are due again. The tolerance of a tenth allows for timers that fire early.
    fn is_due(&self, now: Instant) -> bool {
        self.audited_at.is_none_or(|at| now.duration_since(at) >= AUDIT_INTERVAL * 9 / 10)
    }
}

impl Agent {
    /// Returns an agent and the receiver of its reports.
    pub fn new(
        gpus: Gpus,
        paths: &HostPaths,
        kill_policy: KillPolicy,
        law: TimeLaw,
    ) -> (Self, mpsc::Receiver<Report>) {
        let (reports, receiver) = mpsc::channel(REPORT_QUEUE_CAPACITY);
        let inner = Inner {
            shares: Shares::new(paths),
            contexts: Contexts::new(paths),
            files: PageFiles::default(),
            process_root: paths.process_root.clone(),
            cgroup_root: paths.sys_root.join("fs/cgroup"),
            locks: GpuLocks::new(&paths.run_dir),
            kill_policy,
            wakeup: WakeupThread::new(law),
        };
        (Self { inventory: gpus.inventory(), gpus, inner: Arc::new(inner), reports }, receiver)
    }

    /// Runs until the task is dropped. A GPU that does not answer delays no other GPU.
    pub async fn run(self) {
        let agent = &self;
        let mut tick = tokio::time::interval(AUDIT_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pressure_tick = tokio::time::interval(memory_pressure::POLL_INTERVAL);
        pressure_tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pressure = PressureState::default();
        let mut states: BTreeMap<GpuUuid, GpuState> = BTreeMap::new();
        let mut busy: BTreeSet<GpuUuid> = BTreeSet::new();
        let mut audits = FuturesUnordered::new();
        let mut containers = ContainerWatch::new();
        let mut limit_updates = FuturesUnordered::new();
        let mut sampling = FastSampling::default();
        loop {
            tokio::select! {
                Some((gpu, state)) = audits.next() => {
                    busy.remove(&gpu);
                    states.insert(gpu, state);
                }
                _ = pressure_tick.tick(), if pressure.is_any => {
                    pressure = agent.poll_pressure(pressure).await;
                    pressure_tick.reset_after(pressure.poll_interval());
                }
                Some(()) = limit_updates.next() => {}
                changes = agent.inner.wakeup.activity_changes() => {
                    if sampling.begin(changes, Instant::now()) {
                        tick.reset_after(fast_sampling::FIRST);
                    }
                }
                // One update at a time: changes that arrive meanwhile are handled by the next one.
                () = containers.changed(), if limit_updates.is_empty() => {
                    containers.watch(&agent.inner.shares);
                    let (by_gpu, _) = agent.find_shares(BTreeSet::new()).await;
                    // Audit at once: until then the new share's launches are not paced.
                    if sampling.comes(agent.gpus_with_new_share(&by_gpu), Instant::now()) {
                        tick.reset_immediately();
                    }
                    limit_updates.push(agent.set_all_driver_limits(by_gpu));
                }
                _ = tick.tick() => {
                    if containers.is_inactive() {
                        containers.watch(&agent.inner.shares);
                    }
                    let now = Instant::now();
                    let is_skipped =
                        |(gpu, state): &(&_, &GpuState)| !state.is_due(now) && !sampling.has(gpu, now);
                    let skipped: BTreeSet<_> =
                        states.iter().filter(is_skipped).map(|(gpu, _)| *gpu).collect();
                    let (by_gpu, may_overcommit) = agent.find_shares(skipped.clone()).await;
                    pressure.is_any = may_overcommit;
                    states.retain(|gpu, _| by_gpu.contains_key(gpu));
                    agent.inner.wakeup.retain_gpus(|gpu| by_gpu.contains_key(gpu));
                    for (gpu, found) in by_gpu {
                        if !skipped.contains(&gpu) && busy.insert(gpu) {
                            let state = states.remove(&gpu).unwrap_or_default();
                            audits.push(async move { (gpu, agent.audit(gpu, found, state).await) });
                        }
                    }
                    if sampling.is_any(now) {
                        tick.reset_after(fast_sampling::PAUSE);
                    }
                }
            }
        }
    }

    /// Polls the shares that may hold more memory than their GPUs have, and applies the decision.
    async fn poll_pressure(&self, state: PressureState) -> PressureState {
        let inner = self.inner.clone();
        let polled = tokio::task::spawn_blocking(move || {
            let owns = |gpu| inner.locks.holds(gpu);
            let set_turns = |gpu, order, quantum_ns| inner.wakeup.set_turns(gpu, order, quantum_ns);
            memory_pressure::poll(&inner.shares, &inner.files, owns, set_turns, state.gpus)
        });
        // After a panic, which is logged, the state starts empty.
        PressureState { is_any: state.is_any, gpus: polled.await.unwrap_or_default() }
    }

    /// Returns the shares of each GPU that this agent holds the lock of, and whether any share may
    /// over-commit memory. GPUs in `skipped` get an empty list.
    async fn find_shares(&self, skipped: BTreeSet<GpuUuid>) -> (BTreeMap<GpuUuid, Vec<FoundShare>>, bool) {
        // Most nodes have no shares, and listing this in-memory directory is not worth a thread.
        if self.inner.shares.claims().is_empty() {
            self.inner.files.close_removed();
            self.inner.locks.retain(|_| false);
            return Default::default();
        }
        let inner = self.inner.clone();
        let found = tokio::task::spawn_blocking(move || {
            let (mut by_gpu, mut may_overcommit) = (BTreeMap::<_, Vec<FoundShare>>::new(), false);
            // The lock is tried once per GPU, not once per share.
            let mut owned = BTreeMap::new();
            let found = collect::find_shares(&inner.shares, &inner.files, |policy| {
                let is_owned =
                    *owned.entry(policy.gpu).or_insert_with(|| inner.locks.try_acquire(policy.gpu));
                if is_owned {
                    by_gpu.entry(policy.gpu).or_default();
                    may_overcommit |= memory_pressure::may_overcommit(policy);
                }
                is_owned && !skipped.contains(&policy.gpu)
            });
            found.into_iter().for_each(|share| by_gpu.entry(share.policy.gpu).or_default().push(share));
            inner.locks.retain(|gpu| by_gpu.contains_key(gpu));
            (by_gpu, may_overcommit)
        });
        found.await.unwrap_or_default()
    }

    /// GPUs with several shares of which at least one is not in the grant table yet.
    fn gpus_with_new_share(
        &self,
        by_gpu: &BTreeMap<GpuUuid, Vec<FoundShare>>,
    ) -> impl Iterator<Item = GpuUuid> {
        let is_new = |gpu: GpuUuid, found: &FoundShare| !self.inner.wakeup.has(gpu, &found.key());
        let has_new = move |(gpu, found): &(&GpuUuid, &Vec<FoundShare>)| {
            found.len() > 1 && found.iter().any(|found| is_new(**gpu, found))
        };
        by_gpu.iter().filter(has_new).map(|(gpu, _)| *gpu)
    }

    /// Audits one GPU. Without a report of NVML, for example while NVML is closed, only the slots of dead
    /// processes are marked: a container that starts again needs their memory.
    async fn audit(&self, gpu: GpuUuid, found: Vec<FoundShare>, state: GpuState) -> GpuState {
        let started = Instant::now();
        let report = match self.queue(gpu) {
            Some(queue) => {
                let is_per_process = state.attribution.is_per_process;
                let report = self.query(gpu, &queue, &found, &state.usage, is_per_process).await;
                // The GPU manager reports faults of the GPU itself.
                report.inspect_err(|error| tracing::debug!(%gpu, %error, "GPU not audited")).ok()
            }
            None => None,
        };
        let Some(report) = report else {
            let inner = self.inner.clone();
            let marked = tokio::task::spawn_blocking(move || inner.mark_dead_slots(gpu, found, state));
            // After a panic, which is logged, the state starts empty.
            return marked.await.unwrap_or_default();
        };
        let inner = self.inner.clone();
        let audited = tokio::task::spawn_blocking(move || inner.audit(gpu, found, report, state));
        let Ok((state, mut reports, shares)) = audited.await else {
            // After a panic, which is logged, the state starts empty.
            return GpuState::default();
        };
        reports.extend(shares.map(|shares| Report::Audited { took: started.elapsed(), gpu, shares }));
        for report in reports {
            if self.reports.try_send(report).is_err() {
                tracing::debug!("report dropped: the report queue is full");
            }
        }
        state
    }

    /// Sets the driver's limits, then asks NVML for the memory and the time of each process.
    async fn query(
        &self,
        gpu: GpuUuid,
        queue: &GpuQueue,
        found: &[FoundShare],
        history: &usage::UsageHistory,
        is_per_process: bool,
    ) -> Result<NvmlReport, NvmlError> {
        let driver_limited = self.set_driver_limits(queue, found).await?;
        let inventory = self.inventory.borrow().clone();
        nvml_query::query(gpu, &inventory, queue, found, history, is_per_process, driver_limited).await
    }

    /// Sets the driver's limits of all containers on all GPUs.
    async fn set_all_driver_limits(&self, by_gpu: BTreeMap<GpuUuid, Vec<FoundShare>>) {
        let set = async |(gpu, found): (GpuUuid, Vec<FoundShare>)| {
            if let Some(queue) = self.queue(gpu)
                && let Err(error) = self.set_driver_limits(&queue, &found).await
            {
                tracing::debug!(%gpu, %error, "limits not set in the GPU driver");
            }
        };
        join_all(by_gpu.into_iter().map(set)).await;
    }

    /// Sets the memory limit of each container in the GPU driver, where the driver supports that.
    /// Returns the ids of the containers whose limit the driver enforces.
    async fn set_driver_limits(
        &self,
        queue: &GpuQueue,
        found: &[FoundShare],
    ) -> Result<BTreeSet<String>, NvmlError> {
        let mut limited = BTreeSet::new();
        for (id, dir, limit) in collect::container_limits(found, &self.inner.cgroup_root) {
            match queue.limit_cgroup_memory(dir, limit).await {
                Ok(true) => drop(limited.insert(id)),
                // This GPU driver has no such limits.
                Ok(false) => break,
                // The container may just have exited. Its processes are audited as usual.
                Err(error @ NvmlError::Call { .. }) => {
                    tracing::debug!(container = id, %error, "GPU driver rejected a container's limit");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(limited)
    }

    fn queue(&self, gpu: GpuUuid) -> Option<GpuQueue> {
        let inventory = self.inventory.borrow().clone();
        let known = inventory.gpus.iter().find(|known| GpuUuid::parse(known.uuid.as_str()) == Some(gpu))?;
        self.gpus.queue(&known.uuid).ok()
    }
}

impl Inner {
    /// Evaluates one snapshot of a GPU. Every snapshot corrects the rates of the shares. Findings,
    /// account page writes and usage follow once per [`AUDIT_INTERVAL`], so that two snapshots that
    /// confirm a finding are that far apart.
    fn audit(
        &self,
        gpu: GpuUuid,
        found: Vec<FoundShare>,
        NvmlReport { uses, driver_limited, utilization }: NvmlReport,
        mut state: GpuState,
    ) -> (GpuState, Vec<Report>, Option<Vec<ShareUsage>>) {
        let (process_root, cgroup_root) = (&self.process_root, &self.cgroup_root);
        let now = Instant::now();
        let is_due = state.is_due(now);
        let cache = &mut state.processes;
        let snapshot =
            collect::take_snapshot(found, &self.files, uses, cache, !is_due, process_root, cgroup_root);
        let mut snapshot = Snapshot { driver_limited, ..snapshot };
        // Before the shares are planned anew, so that it says how they launched until now.
        state.running_totals.add_counters(&snapshot, &self.wakeup.quantum_usage(gpu), now);
        let (mut state, times, over_limit) = match utilization {
            Some(utilization) => self.schedule(gpu, &mut snapshot, utilization, state, now),
            // The next snapshot covers this time as well.
            None => (state, Vec::new(), Vec::new()),
        };
        let (mut reports, mut usage_report) = (Vec::new(), None);
        if is_due {
            let findings = checks::check(&snapshot, &state.slots).into_iter().chain(over_limit).collect();
            // Kill first: an offender should not run on while slots are written.
            reports = state.remediation.respond(findings, &self.kill_policy, &self.process_root);
            self.learn_context_size(gpu, &snapshot, &mut state);
            slot_corrections::apply(&snapshot, &self.shares, &self.files, &self.process_root);
            (state.slots, state.audited_at) = (checks::live_slots(&snapshot), Some(now));
            state.compute_limit.values_mut().for_each(compute_limit::Excess::decay_evidence);
            let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            let mut shares = usage::report(&snapshot, &times, at.as_millis() as u64);
            state.running_totals.complete(&mut shares);
            usage_report = Some(shares);
            state.processes = state.processes.next(snapshot.processes);
        }
        (state, reports, usage_report)
    }

    /// Marks the slots of dead processes. Corrections of the others stay as they were measured last.
    fn mark_dead_slots(&self, gpu: GpuUuid, found: Vec<FoundShare>, mut state: GpuState) -> GpuState {
        let cache = &mut state.processes;
        let (process_root, cgroup_root) = (&self.process_root, &self.cgroup_root);
        let snapshot =
            collect::take_snapshot(found, &self.files, Vec::new(), cache, false, process_root, cgroup_root);
        state.running_totals.add_counters(&snapshot, &self.wakeup.quantum_usage(gpu), Instant::now());
        slot_corrections::apply(&snapshot, &self.shares, &self.files, process_root);
        state
    }

    /// Measures the GPU time of each share, checks it against the ceiling, and sets the rates that
    /// hold from now on.
    fn schedule(
        &self,
        gpu: GpuUuid,
        snapshot: &mut Snapshot,
        Utilization { percent_by_pid, is_per_process, mig_busy_ns, sm_active_ns, until }: Utilization,
        mut state: GpuState,
        now: Instant,
    ) -> (GpuState, Vec<usage::ShareTime>, Vec<Finding>) {
        (snapshot.mig_busy_ns, snapshot.sm_active_ns) = (mig_busy_ns, sm_active_ns);
        let percent_by_pid = &percent_by_pid;
        let (mut times, since, usage) =
            usage::measure(snapshot, percent_by_pid, until, state.usage.clone(), now);
        snapshot.gpu_busy_ns = sample_attribution::attribute(
            snapshot,
            percent_by_pid,
            is_per_process,
            &mut times,
            &mut state.attribution,
            now,
        );
        let snapshot = &*snapshot;
        let age = until.map(usage::SampleEnd::age).unwrap_or_default();
        let granted = self.wakeup.since(gpu, age);
        let expected = |share: &Share, time: &_| controller_inputs::expected(granted.get(&share.key()), time);
        let totals = device_totals::update(snapshot, &times, expected, since, &state.device_totals, now);
        let statuses =
            controller_inputs::share_statuses(snapshot, percent_by_pid, &times, &granted, |share| {
                let total = totals.get(&share.device())?;
                Some((total.trim(&share.key()), !total.is_doubted(now)))
            });
        for (share, time) in
            snapshot.shares.iter().zip(&mut times).filter(|(_, time)| time.sampled_ns.is_some())
        {
            let factor = totals.get(&share.device()).map_or(1.0, |total| total.trim(&share.key()));
            time.estimated_ns = time.reported_ns.map(|(charged, _)| (charged as f64 / factor) as u64);
        }
        state.running_totals.add_measured(snapshot, &times, since, now);
        self.plan(gpu, snapshot, statuses);
        let (forged, balances) =
            balance_check::beyond(snapshot, &times, &granted, &state.balances, since, monotonic_ns());
        let granted_rate = |at: usize| Some(granted.get(&snapshot.shares.get(at)?.key())?.memory.granted().0);
        let forged =
            forged.into_iter().filter_map(|(at, beyond)| Some((at, (beyond, granted_rate(at)?)))).collect();
        let (mut findings, compute_limit) =
            compute_limit::check(snapshot, &times, percent_by_pid, since, &forged, &state.compute_limit);
        // Under quanta the charges are exact, and compared with the grants instead.
        let grants = self.wakeup.grants(gpu);
        let of_rates = totals.iter().filter(|(device, _)| !grants.contains_key(device));
        let of_rates = of_rates.map(|(device, total)| (*device, total.clone())).collect();
        findings.extend(device_totals::findings(snapshot, &of_rates));
        let seen =
            ungranted::Seen { percent_by_pid, is_per_process: state.attribution.is_per_process, until };
        let (ungranted, unexplained) = state.ungranted.add(snapshot, seen, since, &grants, monotonic_ns());
        findings.extend(ungranted);
        for (device, unexplained) in unexplained {
            self.wakeup.correct(&device, unexplained);
        }
        (GpuState { usage, balances, device_totals: totals, compute_limit, ..state }, times, findings)
    }

    /// Records the size of a context, which shares created later are charged per context.
    fn learn_context_size(&self, gpu: GpuUuid, snapshot: &Snapshot, state: &mut GpuState) {
        let smallest = context_size::smallest(snapshot)
            .filter(|bytes| state.context_bytes.is_none_or(|known| *bytes < known));
        let Some(bytes) = smallest else { return };
        match self.contexts.record(gpu, bytes) {
            Ok(is_new) => {
                state.context_bytes = Some(bytes);
                if is_new {
                    let mib = bytes >> 20;
                    tracing::info!(%gpu, mib, "context size measured; new shares are charged it per context");
                }
            }
            // The next audit retries.
            Err(cause) => tracing::debug!(%gpu, %cause, "context size not recorded"),
        }
    }

    /// Hands the shares to the grant table, which divides the time of the GPU and of its MIG instances.
    fn plan(&self, gpu: GpuUuid, snapshot: &Snapshot, statuses: Vec<ShareStatus>) {
        let planned = snapshot.shares.iter().zip(statuses).filter_map(|(share, status)| {
            let dir = self.shares.of(&share.claim, &share.id);
            // Open since this snapshot was taken, unless the share was removed or its page is leased.
            let account = self.files.cached(&dir.join(ACCOUNT))?;
            Some(PlannedShare {
                key: share.key(),
                mig: share.policy.mig,
                policy: dir.join(POLICY),
                account,
                compute: share.policy.compute,
                suits_quanta: suits_quanta(share),
                standing: status,
            })
        });
        self.wakeup.plan(gpu, planned.collect());
    }
}

/// Whether a share can be granted exclusive quanta. A library of an earlier version knows none. Memory
/// that is over-committed has its own turns, for which the library measures each kernel.
fn suits_quanta(share: &Share) -> bool {
    let knows_quanta = share.account.as_ref().map_or(true, Account::knows_quanta);
    knows_quanta && !memory_pressure::may_overcommit(&share.policy)
}
