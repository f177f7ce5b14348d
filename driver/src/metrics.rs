//! What a scrape shows. Counters and histograms are kept as things happen;
//! gauges are taken from the daemon's own state at the scrape, so they cannot lag.

use crate::engine::{Engine, HeldState};
use divvy_daemon::process::Process;
use divvy_model::Inventory;
use divvy_model::inventory::{Condition, Presence};
use divvy_slices::Published;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use tokio::sync::watch;

/// How a claim's prepare or unprepare ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    result: &'static str,
}

/// What the agent found, and what it did.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Found {
    finding: &'static str,
    done: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClaimState {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuPresence {
    presence: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct GpuCondition {
    gpu: u32,
    uuid: String,
    condition: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfShare {
    namespace: String,
    claim: String,
    device: String,
    share: String,
}

type Histograms = Family<Outcome, Histogram, fn() -> Histogram>;

/// All metrics of the daemon; a clone is the same.
#[derive(Clone)]
pub struct Metrics {
    shared: Arc<Shared>,
}

struct Shared {
    registry: Mutex<Registry>,
    sources: OnceLock<(Engine, watch::Receiver<Arc<Inventory>>)>,
    prepare: Histograms,
    unprepare: Histograms,
    quarantined: Counter,
    unexplained: Gauge,
    reconciled: Family<Outcome, Counter>,
    events_dropped: Counter,
    statuses: Family<Outcome, Counter>,
    findings: Family<Found, Counter>,
    audit: Histogram,
    config_refused: Gauge,
    in_sync: Gauge,
    degraded: Gauge,
    slices: Gauge,
    devices: Gauge,
    slice_writes: Counter,
    ready: Gauge,
    claims: Family<ClaimState, Gauge>,
    share_limits: Family<OfShare, Gauge>,
    share_uses: Family<OfShare, Gauge>,
    gpus: Family<GpuPresence, Gauge>,
    conditions: Family<GpuCondition, Gauge>,
    process: Process,
}

/// From a whole-GPU prepare in a millisecond to the kubelet's deadline.
fn histogram() -> Histogram {
    Histogram::new([0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 45.0])
}

impl Default for Metrics {
    fn default() -> Self {
        let shared = Shared {
            registry: Mutex::default(),
            sources: OnceLock::new(),
            prepare: Family::new_with_constructor(histogram as fn() -> Histogram),
            unprepare: Family::new_with_constructor(histogram as fn() -> Histogram),
            quarantined: Counter::default(),
            unexplained: Gauge::default(),
            reconciled: Family::default(),
            events_dropped: Counter::default(),
            statuses: Family::default(),
            findings: Family::default(),
            audit: histogram(),
            config_refused: Gauge::default(),
            in_sync: Gauge::default(),
            degraded: Gauge::default(),
            slices: Gauge::default(),
            devices: Gauge::default(),
            slice_writes: Counter::default(),
            ready: Gauge::default(),
            claims: Family::default(),
            share_limits: Family::default(),
            share_uses: Family::default(),
            gpus: Family::default(),
            conditions: Family::default(),
            process: Process::default(),
        };
        let mut registry = Registry::default();
        shared.register(&mut registry);
        Self { shared: Arc::new(Shared { registry: Mutex::new(registry), ..shared }) }
    }
}

impl Shared {
    fn register(&self, registry: &mut Registry) {
        let build = Info::new([("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("divvy_build", "Version of this daemon", build);
        let seconds = || Unit::Seconds;
        registry.register_with_unit(
            "divvy_prepare",
            "Time to prepare a claim",
            seconds(),
            self.prepare.clone(),
        );
        registry.register_with_unit(
            "divvy_unprepare",
            "Time to unprepare a claim",
            seconds(),
            self.unprepare.clone(),
        );
        registry.register("divvy_claims", "Claims with a record on this node", self.claims.clone());
        registry.register_with_unit(
            "divvy_share_memory_limit",
            "Device memory that a share may have",
            Unit::Bytes,
            self.share_limits.clone(),
        );
        registry.register_with_unit(
            "divvy_share_memory_used",
            "Device memory that a share has, by its own account",
            Unit::Bytes,
            self.share_uses.clone(),
        );
        registry.register("divvy_gpus", "GPUs of this node", self.gpus.clone());
        registry.register(
            "divvy_gpu_condition",
            "1 while the condition keeps a GPU from being handed out",
            self.conditions.clone(),
        );
        registry.register(
            "divvy_records_quarantined",
            "Records that could not be read and were set aside",
            self.quarantined.clone(),
        );
        registry.register(
            "divvy_unexplained_instances",
            "GPU instances that no record explains",
            self.unexplained.clone(),
        );
        registry.register(
            "divvy_reconciled_claims",
            "Claims that were put right against the API server",
            self.reconciled.clone(),
        );
        registry.register(
            "divvy_events_dropped",
            "Kubernetes events not sent because there were too many",
            self.events_dropped.clone(),
        );
        registry.register(
            "divvy_claim_status_writes",
            "Writes of status.devices of prepared claims",
            self.statuses.clone(),
        );
        registry.register(
            "divvy_share_findings",
            "What was found not to be as it must be about shares, and what was done",
            self.findings.clone(),
        );
        registry.register_with_unit(
            "divvy_share_audit",
            "Time to hold the shares of a GPU against what the GPU driver and the kernel say",
            seconds(),
            self.audit.clone(),
        );
        registry.register(
            "divvy_node_config_refused",
            "1 while the node configuration file is refused and what was read before holds",
            self.config_refused.clone(),
        );
        registry.register(
            "divvy_pool_in_sync",
            "1 while the API server has the pool as the hardware is",
            self.in_sync.clone(),
        );
        registry.register(
            "divvy_slices",
            "ResourceSlices of this node on the API server",
            self.slices.clone(),
        );
        registry.register("divvy_devices", "Devices published in them", self.devices.clone());
        registry.register(
            "divvy_slice_writes",
            "ResourceSlices created, updated and deleted",
            self.slice_writes.clone(),
        );
        registry.register(
            "divvy_pool_degraded",
            "1 while the server keeps the pool from being published whole",
            self.degraded.clone(),
        );
        registry.register("divvy_ready", "1 while /readyz says yes", self.ready.clone());
        self.process.register(registry);
    }
}

impl Metrics {
    /// Where gauges are taken from, known once the engine runs.
    pub fn watch(&self, engine: Engine, inventory: watch::Receiver<Arc<Inventory>>) {
        // Set once by the node; a second call would change nothing.
        let _ = self.shared.sources.set((engine, inventory));
    }

    /// A claim was prepared, or refused.
    pub fn prepared(&self, ok: bool, took: Duration) {
        self.shared.prepare.get_or_create(&outcome(ok)).observe(took.as_secs_f64());
    }

    /// A claim was unprepared, or not.
    pub fn unprepared(&self, ok: bool, took: Duration) {
        self.shared.unprepare.get_or_create(&outcome(ok)).observe(took.as_secs_f64());
    }

    /// A claim was put right by reconciliation.
    pub fn reconciled(&self, ok: bool) {
        self.shared.reconciled.get_or_create(&outcome(ok)).inc();
    }

    /// An event was not sent.
    pub fn event_dropped(&self) {
        self.shared.events_dropped.inc();
    }

    /// The status of a prepared claim was written or not.
    pub fn status_written(&self, ok: bool) {
        self.shared.statuses.get_or_create(&outcome(ok)).inc();
    }

    /// The agent found something about a share.
    pub fn found(&self, finding: &'static str, done: &'static str) {
        self.shared.findings.get_or_create(&Found { finding, done }).inc();
    }

    /// The shares of a GPU were audited.
    pub fn audited(&self, took: Duration) {
        self.shared.audit.observe(took.as_secs_f64());
    }

    /// Whether the node configuration file cannot be used.
    pub fn config_refused(&self, refused: bool) {
        self.shared.config_refused.set(refused.into());
    }

    /// State of the published pool.
    pub fn published(&self, pool: &Published) {
        self.shared.in_sync.set(pool.in_sync.into());
        self.shared.degraded.set(pool.degraded.is_some().into());
        self.shared.slices.set(pool.slices as i64);
        self.shared.devices.set(pool.devices as i64);
        self.shared.slice_writes.inner().store(pool.writes, Ordering::Relaxed);
    }

    /// The scrape's text.
    pub fn render(&self, ready: bool) -> Result<String, std::fmt::Error> {
        self.shared.ready.set(ready.into());
        self.take_gauges();
        self.shared.process.take();
        let registry = self.shared.registry.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let mut out = String::new();
        encode(&mut out, &registry)?;
        Ok(out)
    }

    fn take_gauges(&self) {
        let Some((engine, inventory)) = self.shared.sources.get() else { return };
        self.shared.quarantined.inner().store(engine.quarantined(), Ordering::Relaxed);
        self.shared.unexplained.set(engine.unexplained().len() as i64);
        let held = engine.held();
        for (state, name) in [
            (HeldState::Intent, "intent"),
            (HeldState::Prepared, "prepared"),
            (HeldState::Releasing, "releasing"),
        ] {
            let count = held.iter().filter(|claim| claim.state == state).count();
            self.shared.claims.get_or_create(&ClaimState { state: name }).set(count as i64);
        }
        self.shared.share_limits.clear();
        self.shared.share_uses.clear();
        for held in engine.shares() {
            let label = OfShare {
                namespace: held.claim.namespace,
                claim: held.claim.name,
                device: held.device.to_string(),
                share: held.share.to_string(),
            };
            let bytes = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX);
            self.shared.share_limits.get_or_create(&label).set(bytes(held.limit));
            if let Some(used) = held.used {
                self.shared.share_uses.get_or_create(&label).set(bytes(used));
            }
        }
        let inventory = inventory.borrow().clone();
        for (presence, name) in [(Presence::Present, "present"), (Presence::Missing, "missing")] {
            let count = inventory.gpus.iter().filter(|gpu| gpu.presence == presence).count();
            self.shared.gpus.get_or_create(&GpuPresence { presence: name }).set(count as i64);
        }
        self.shared.conditions.clear();
        for gpu in &inventory.gpus {
            let conditions = gpu.conditions.iter().map(|condition| match condition {
                Condition::Stuck { .. } => "stuck",
                Condition::Lost => "lost",
                Condition::Mps { .. } => "mps",
            });
            for condition in conditions.chain(inventory.device_plugin.as_ref().map(|_| "device-plugin")) {
                let label = GpuCondition { gpu: gpu.number.0, uuid: gpu.uuid.to_string(), condition };
                self.shared.conditions.get_or_create(&label).set(1);
            }
        }
    }
}

fn outcome(ok: bool) -> Outcome {
    Outcome { result: if ok { "ok" } else { "error" } }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, line: &str) {
        assert!(text.lines().any(|found| found.starts_with(line)), "{line} is not in\n{text}");
    }

    #[test]
    fn a_scrape_shows_what_happened_under_the_names_the_field_expects() {
        let metrics = Metrics::default();
        metrics.prepared(true, Duration::from_millis(3));
        metrics.unprepared(false, Duration::from_secs(1));
        let text = metrics.render(true).unwrap();
        check(&text, "divvy_build_info{version=\"");
        check(&text, "divvy_prepare_seconds_count{result=\"ok\"} 1");
        check(&text, "divvy_unprepare_seconds_count{result=\"error\"} 1");
        check(&text, "divvy_records_quarantined_total 0");
        check(&text, "divvy_unexplained_instances 0");
        check(&text, "process_resident_memory_bytes ");
        check(&text, "process_start_time_seconds ");
        check(&text, "divvy_ready 1");
        assert!(text.ends_with("# EOF\n"));
    }
}
