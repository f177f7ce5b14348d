//! Metrics of the daemon. Counters and histograms are updated as things happen; gauges are read from
//! the daemon's state at each scrape, so they cannot be out of date.

use divvy_api::top::{ShareTotals, ShareUsage};
use divvy_api::{ClaimUid, GpuUuid, ShareId};
use divvy_daemon::process::Process;
use divvy_model::Inventory;
use divvy_model::inventory::{Condition, Presence};
use divvy_model::xid;
use divvy_slices::Published;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::watch;

/// Result of preparing, unpreparing or reconciling a claim.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

/// A finding of the share audit, and the action that was taken.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FindingLabels {
    finding: &'static str,
    action: &'static str,
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
struct GpuHealth {
    gpu: u32,
    uuid: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct XidLabels {
    uuid: String,
    xid: u64,
    class: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ShareLabels {
    namespace: String,
    claim: String,
    device: String,
    share: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AttributionLabels {
    #[prometheus(flatten)]
    share: ShareLabels,
    attribution: &'static str,
}

/// Values for the gauges of claims and shares, read at each scrape.
#[derive(Clone, Debug, Default)]
pub struct ClaimGauges {
    /// Records that were quarantined since the start.
    pub quarantined: u64,
    /// GPU instances without a record.
    pub unmanaged_instances: usize,
    /// Number of claims by the state of their record.
    pub claims: Vec<(&'static str, usize)>,
    pub shares: Vec<ShareGauges>,
}

/// A share and its memory, in bytes.
#[derive(Clone, Debug)]
pub struct ShareGauges {
    pub namespace: String,
    pub claim_uid: ClaimUid,
    pub claim: String,
    pub device: String,
    pub share: ShareId,
    pub memory_limit: u64,
    /// `None` while the share's account page cannot be read.
    pub memory_used: Option<u64>,
}

type ClaimSource = Box<dyn Fn() -> ClaimGauges + Send + Sync>;

/// Seconds of GPU time. The families of shares are filled at each scrape.
type SecondsCounters = Family<ShareLabels, Counter<f64, AtomicU64>>;
type ShareCounters = Family<ShareLabels, Counter>;

type Histograms = Family<ResultLabel, Histogram, fn() -> Histogram>;

/// All metrics of the daemon; a clone has the same metrics.
#[derive(Clone)]
pub struct Metrics {
    shared: Arc<Shared>,
}

struct Shared {
    registry: Mutex<Registry>,
    sources: OnceLock<(ClaimSource, watch::Receiver<Arc<Inventory>>)>,
    /// The shares of each GPU as last audited.
    audited: Mutex<BTreeMap<divvy_pages::GpuUuid, Vec<ShareUsage>>>,
    prepare: Histograms,
    unprepare: Histograms,
    quarantined: Counter,
    unmanaged_instances: Gauge,
    reconciled: Family<ResultLabel, Counter>,
    events_dropped: Counter,
    statuses: Family<ResultLabel, Counter>,
    findings: Family<FindingLabels, Counter>,
    audit: Histogram,
    config_refused: Gauge,
    without_shares: Gauge,
    in_sync: Gauge,
    degraded: Gauge,
    closing_modes: Gauge,
    slices: Gauge,
    devices: Gauge,
    slice_writes: Counter,
    ready: Gauge,
    claims: Family<ClaimState, Gauge>,
    share_limits: Family<ShareLabels, Gauge>,
    share_uses: Family<ShareLabels, Gauge>,
    share_times: ShareTimes,
    gpus: Family<GpuPresence, Gauge>,
    conditions: Family<GpuCondition, Gauge>,
    health: Family<GpuHealth, Gauge>,
    xids: Family<XidLabels, Counter>,
    process: Process,
}

/// GPU time of shares since the daemon first saw them.
#[derive(Default)]
struct ShareTimes {
    used: SecondsCounters,
    throttled: SecondsCounters,
    granted: SecondsCounters,
    hand_overs: ShareCounters,
    late_hand_overs: ShareCounters,
    attribution: Family<AttributionLabels, Gauge>,
}

impl ShareTimes {
    fn register(&self, registry: &mut Registry) {
        let mut seconds = |name: &str, help: &str, counters: &SecondsCounters| {
            registry.register_with_unit(name, help, Unit::Seconds, counters.clone());
        };
        seconds(
            "divvy_share_gpu",
            "GPU time used by a share; divvy_share_gpu_time_attribution says how it is known",
            &self.used,
        );
        seconds(
            "divvy_share_throttled",
            "Time for which launches of a share were throttled, summed over all threads",
            &self.throttled,
        );
        seconds("divvy_share_granted", "Time for which a share had the device", &self.granted);
        registry.register(
            "divvy_share_hand_overs",
            "Times that a share got the device",
            self.hand_overs.clone(),
        );
        registry.register(
            "divvy_share_late_hand_overs",
            "Times that a share had to share the device because its work did not complete in time",
            self.late_hand_overs.clone(),
        );
        registry.register(
            "divvy_share_gpu_time_attribution",
            "1 for the source of the GPU time of a share: events, nvml, samples or reported",
            self.attribution.clone(),
        );
    }

    fn clear(&self) {
        [&self.used, &self.throttled, &self.granted].into_iter().for_each(Family::clear);
        [&self.hand_overs, &self.late_hand_overs].into_iter().for_each(Family::clear);
        self.attribution.clear();
    }

    /// Sets the counters of one share. The families were cleared before.
    fn set(&self, share: &ShareLabels, usage: &ShareUsage) {
        if let Some(attribution) = usage.gpu_time_attribution {
            let labels = AttributionLabels { share: share.clone(), attribution: attribution.name() };
            self.attribution.get_or_create(&labels).set(1);
        }
        let Some(totals) = usage.totals else { return };
        let ShareTotals { gpu_time_used_ms, throttled_ms, granted_ms, hand_overs, late_hand_overs } = totals;
        let seconds = |counters: &SecondsCounters, ms: Option<u64>| {
            if let Some(ms) = ms {
                counters.get_or_create(share).inc_by(ms as f64 / 1000.0);
            }
        };
        seconds(&self.used, Some(gpu_time_used_ms));
        seconds(&self.throttled, Some(throttled_ms));
        seconds(&self.granted, granted_ms);
        for (counters, count) in [(&self.hand_overs, hand_overs), (&self.late_hand_overs, late_hand_overs)] {
            if let Some(count) = count {
                counters.get_or_create(share).inc_by(count);
            }
        }
    }
}

/// Buckets in seconds, from a prepare of a whole GPU (a millisecond) to the kubelet's deadline.
fn histogram() -> Histogram {
    Histogram::new([0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 45.0])
}

impl Default for Metrics {
    fn default() -> Self {
        let shared = Shared {
            registry: Mutex::default(),
            sources: OnceLock::new(),
            audited: Mutex::default(),
            prepare: Family::new_with_constructor(histogram as fn() -> Histogram),
            unprepare: Family::new_with_constructor(histogram as fn() -> Histogram),
            quarantined: Counter::default(),
            unmanaged_instances: Gauge::default(),
            reconciled: Family::default(),
            events_dropped: Counter::default(),
            statuses: Family::default(),
            findings: Family::default(),
            audit: histogram(),
            config_refused: Gauge::default(),
            without_shares: Gauge::default(),
            in_sync: Gauge::default(),
            degraded: Gauge::default(),
            closing_modes: Gauge::default(),
            slices: Gauge::default(),
            devices: Gauge::default(),
            slice_writes: Counter::default(),
            ready: Gauge::default(),
            claims: Family::default(),
            share_limits: Family::default(),
            share_uses: Family::default(),
            share_times: ShareTimes::default(),
            gpus: Family::default(),
            conditions: Family::default(),
            health: Family::default(),
            xids: Family::default(),
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
            "Time to prepare a claim, by result",
            seconds(),
            self.prepare.clone(),
        );
        registry.register_with_unit(
            "divvy_unprepare",
            "Time to unprepare a claim, by result",
            seconds(),
            self.unprepare.clone(),
        );
        registry.register("divvy_claims", "Claims with a record on this node, by state", self.claims.clone());
        registry.register_with_unit(
            "divvy_share_memory_limit",
            "Memory limit of a share",
            Unit::Bytes,
            self.share_limits.clone(),
        );
        registry.register_with_unit(
            "divvy_share_memory_used",
            "Device memory in use by a share, according to its account page",
            Unit::Bytes,
            self.share_uses.clone(),
        );
        self.share_times.register(registry);
        registry.register("divvy_gpus", "GPUs of this node, by presence", self.gpus.clone());
        registry.register(
            "divvy_gpu_condition",
            "1 while the GPU has this condition",
            self.conditions.clone(),
        );
        registry.register(
            "divvy_gpu_health",
            "1 for the worst health state of the GPU and its MIG instances",
            self.health.clone(),
        );
        registry.register(
            "divvy_gpu_xids",
            "XID errors of the GPU driver, by number and class",
            self.xids.clone(),
        );
        registry.register(
            "divvy_records_quarantined",
            "Claim records that could not be read and were quarantined",
            self.quarantined.clone(),
        );
        registry.register(
            "divvy_unmanaged_mig_instances",
            "GPU instances that Divvy did not create and that no claim uses",
            self.unmanaged_instances.clone(),
        );
        registry.register(
            "divvy_reconciled_claims",
            "Claims that reconciliation with the API server released or prepared again",
            self.reconciled.clone(),
        );
        registry.register(
            "divvy_events_dropped",
            "Kubernetes events that were dropped because of rate limits or a full queue",
            self.events_dropped.clone(),
        );
        registry.register(
            "divvy_claim_status_writes",
            "Writes of status.devices of prepared claims, by result",
            self.statuses.clone(),
        );
        registry.register(
            "divvy_share_findings",
            "Findings of the share audit, by kind and action taken",
            self.findings.clone(),
        );
        registry.register_with_unit(
            "divvy_share_audit",
            "Time to audit the shares of a GPU",
            seconds(),
            self.audit.clone(),
        );
        registry.register(
            "divvy_node_config_refused",
            "1 while the node configuration file is refused and the last valid one stays in force",
            self.config_refused.clone(),
        );
        registry.register(
            "divvy_node_gpus_without_shares",
            "GPUs whose policy offers shares and that cannot offer them",
            self.without_shares.clone(),
        );
        registry.register(
            "divvy_pool_in_sync",
            "1 while the ResourceSlices on the API server match the hardware",
            self.in_sync.clone(),
        );
        registry.register(
            "divvy_closing_modes",
            "Modes of GPUs that the node configuration turns off and whose devices are still published",
            self.closing_modes.clone(),
        );
        registry.register(
            "divvy_slices",
            "ResourceSlices of this node on the API server",
            self.slices.clone(),
        );
        registry.register(
            "divvy_devices",
            "Devices in the ResourceSlices of this node",
            self.devices.clone(),
        );
        registry.register(
            "divvy_slice_writes",
            "Writes of ResourceSlices: created, updated and deleted",
            self.slice_writes.clone(),
        );
        registry.register(
            "divvy_pool_degraded",
            "1 while the API server lacks a feature that is needed to publish all devices",
            self.degraded.clone(),
        );
        registry.register("divvy_ready", "1 while /readyz reports ready", self.ready.clone());
        self.process.register(registry);
    }
}

impl Metrics {
    /// Sets the sources of the gauges. Only the first call has an effect.
    pub fn watch(
        &self,
        claims: impl Fn() -> ClaimGauges + Send + Sync + 'static,
        inventory: watch::Receiver<Arc<Inventory>>,
    ) {
        let _ = self.shared.sources.set((Box::new(claims), inventory));
    }

    /// Counts a prepare and its duration.
    pub fn prepared(&self, ok: bool, took: Duration) {
        self.shared.prepare.get_or_create(&result_label(ok)).observe(took.as_secs_f64());
    }

    /// Counts an unprepare and its duration.
    pub fn unprepared(&self, ok: bool, took: Duration) {
        self.shared.unprepare.get_or_create(&result_label(ok)).observe(took.as_secs_f64());
    }

    /// Counts a claim that reconciliation released or prepared.
    pub fn reconciled(&self, ok: bool) {
        self.shared.reconciled.get_or_create(&result_label(ok)).inc();
    }

    /// Counts an XID of a GPU.
    pub fn xid(&self, gpu: &GpuUuid, number: u64) {
        let labels = XidLabels { uuid: gpu.to_string(), xid: number, class: xid::class_name(number) };
        self.shared.xids.get_or_create(&labels).inc();
    }

    /// Counts an event that was not sent.
    pub fn event_dropped(&self) {
        self.shared.events_dropped.inc();
    }

    /// Counts a write of the status of a prepared claim.
    pub fn status_written(&self, ok: bool) {
        self.shared.statuses.get_or_create(&result_label(ok)).inc();
    }

    /// Counts a finding of the share audit and the action taken.
    pub fn found(&self, finding: &'static str, action: &'static str) {
        self.shared.findings.get_or_create(&FindingLabels { finding, action }).inc();
    }

    /// Records an audit of a GPU's shares: its duration and the usage that it found.
    pub fn audited(&self, gpu: divvy_pages::GpuUuid, took: Duration, shares: &[ShareUsage]) {
        self.shared.audit.observe(took.as_secs_f64());
        let mut audited = self.shared.audited.lock().unwrap_or_else(PoisonError::into_inner);
        audited.insert(gpu, shares.to_vec());
    }

    /// Sets whether the node configuration file is refused.
    pub fn config_refused(&self, refused: bool) {
        self.shared.config_refused.set(refused.into());
    }

    /// Sets the number of GPUs that should offer shares and cannot.
    pub fn gpus_without_shares(&self, count: usize) {
        self.shared.without_shares.set(count as i64);
    }

    /// Sets the state of the published pool.
    pub fn published(&self, pool: &Published) {
        self.shared.in_sync.set(pool.in_sync.into());
        self.shared.degraded.set(pool.degraded.is_some().into());
        self.shared.closing_modes.set(pool.modes_off.closings().len() as i64);
        self.shared.slices.set(pool.slices as i64);
        self.shared.devices.set(pool.devices as i64);
        self.shared.slice_writes.inner().store(pool.writes, Ordering::Relaxed);
    }

    /// Renders all metrics in the OpenMetrics text format.
    pub fn render(&self, ready: bool) -> Result<String, std::fmt::Error> {
        // One scrape at a time, because it fills the families anew.
        let registry = self.shared.registry.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.ready.set(ready.into());
        self.update_gauges();
        self.shared.process.update();
        let mut out = String::new();
        encode(&mut out, &registry)?;
        Ok(out)
    }

    fn update_gauges(&self) {
        let Some((claims, inventory)) = self.shared.sources.get() else { return };
        let now = claims();
        self.shared.quarantined.inner().store(now.quarantined, Ordering::Relaxed);
        self.shared.unmanaged_instances.set(now.unmanaged_instances as i64);
        for (state, count) in now.claims {
            self.shared.claims.get_or_create(&ClaimState { state }).set(count as i64);
        }
        self.shared.share_limits.clear();
        self.shared.share_uses.clear();
        self.shared.share_times.clear();
        let audited = self.shared.audited.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let audited: BTreeMap<(&ClaimUid, &ShareId), &ShareUsage> =
            audited.values().flatten().map(|usage| ((&usage.claim_uid, &usage.share), usage)).collect();
        for ShareGauges { namespace, claim_uid, claim, device, share, memory_limit, memory_used } in
            now.shares
        {
            let usage = audited.get(&(&claim_uid, &share));
            let label = ShareLabels { namespace, claim, device, share: share.to_string() };
            let bytes = |amount: u64| i64::try_from(amount).unwrap_or(i64::MAX);
            self.shared.share_limits.get_or_create(&label).set(bytes(memory_limit));
            if let Some(used) = memory_used {
                self.shared.share_uses.get_or_create(&label).set(bytes(used));
            }
            // A share that ended is not held any more, so its counters vanish.
            if let Some(usage) = usage {
                self.shared.share_times.set(&label, usage);
            }
        }
        let inventory = inventory.borrow().clone();
        let presences =
            [(Presence::Present, "present"), (Presence::Unread, "unread"), (Presence::Missing, "missing")];
        for (presence, name) in presences {
            let count = inventory.gpus.iter().filter(|gpu| gpu.presence == presence).count();
            self.shared.gpus.get_or_create(&GpuPresence { presence: name }).set(count as i64);
        }
        self.shared.conditions.clear();
        self.shared.health.clear();
        for gpu in &inventory.gpus {
            let (uuid, state) = (gpu.uuid.to_string(), gpu.health().as_str());
            if gpu.presence == Presence::Present {
                let label = GpuHealth { gpu: gpu.number.0, uuid, state };
                self.shared.health.get_or_create(&label).set(1);
            }
            let conditions = gpu.conditions.iter().map(|condition| match condition {
                Condition::Health(finding) => finding.state.as_str(),
                Condition::Mps { .. } => "mps",
                Condition::MigUnreadable { .. } => "mig-unreadable",
                Condition::Debt { .. } => "not-undone",
                Condition::HandedOver => "handed-over",
            });
            for condition in conditions.chain(inventory.device_plugin.as_ref().map(|_| "device-plugin")) {
                let label = GpuCondition { gpu: gpu.number.0, uuid: gpu.uuid.to_string(), condition };
                self.shared.conditions.get_or_create(&label).set(1);
            }
        }
    }
}

fn result_label(ok: bool) -> ResultLabel {
    ResultLabel { result: if ok { "ok" } else { "error" } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_api::top::GpuTimeAttribution;

    fn check(text: &str, line: &str) {
        assert!(text.lines().any(|found| found.starts_with(line)), "{line} is not in\n{text}");
    }

    #[test]
    fn metrics_are_rendered_under_their_names() {
        let metrics = Metrics::default();
        metrics.prepared(true, Duration::from_millis(3));
        metrics.unprepared(false, Duration::from_secs(1));
        metrics.xid(&"GPU-0".into(), 31);
        metrics.xid(&"GPU-0".into(), 4711);
        let text = metrics.render(true).unwrap();
        check(&text, "divvy_build_info{version=\"");
        check(&text, "divvy_prepare_seconds_count{result=\"ok\"} 1");
        check(&text, "divvy_unprepare_seconds_count{result=\"error\"} 1");
        check(&text, "divvy_records_quarantined_total 0");
        check(&text, "divvy_gpu_xids_total{uuid=\"GPU-0\",xid=\"31\",class=\"application\"} 1");
        check(&text, "divvy_gpu_xids_total{uuid=\"GPU-0\",xid=\"4711\",class=\"unknown\"} 1");
        check(&text, "divvy_unmanaged_mig_instances 0");
        check(&text, "process_resident_memory_bytes ");
        check(&text, "process_start_time_seconds ");
        check(&text, "divvy_ready 1");
        assert!(text.ends_with("# EOF\n"));
    }

    fn usage(share: &str, attribution: GpuTimeAttribution, totals: ShareTotals) -> ShareUsage {
        ShareUsage {
            sampled_at_ms: 0,
            namespace: None,
            claim: None,
            claim_uid: "uid".into(),
            share: share.into(),
            gpu: "GPU-0".to_owned(),
            mig: None,
            memory_limit_bytes: 0,
            memory_used_bytes: None,
            memory_used_nvml_bytes: None,
            compute_request_percent: 0,
            compute_limit_percent: 100,
            weight: 1,
            priority: 0,
            compute_used_nvml_percent: None,
            compute_used_percent: None,
            throttled_ms: None,
            processes: 0,
            gpu_time_attribution: Some(attribution),
            totals: Some(totals),
        }
    }

    #[test]
    fn share_totals_are_counters_of_held_shares() {
        let metrics = Metrics::default();
        let held = Arc::new(Mutex::new(vec!["s0", "s1", "s2"]));
        let source = held.clone();
        let shares = move || ClaimGauges {
            shares: source.lock().unwrap().iter().map(|share| gauges(share)).collect(),
            ..ClaimGauges::default()
        };
        metrics.watch(shares, watch::channel(Arc::default()).1);
        let by_quanta = ShareTotals {
            gpu_time_used_ms: 1500,
            throttled_ms: 2250,
            granted_ms: Some(1750),
            hand_overs: Some(90),
            late_hand_overs: Some(2),
        };
        let by_rates = ShareTotals { gpu_time_used_ms: 20, ..ShareTotals::default() };
        let audited = [
            usage("s0", GpuTimeAttribution::Events, by_quanta),
            usage("s1", GpuTimeAttribution::Samples, by_rates),
            usage("not-held", GpuTimeAttribution::Nvml, by_rates),
        ];
        metrics.audited(divvy_pages::GpuUuid([1; 16]), Duration::ZERO, &audited);
        // A second scrape counts nothing twice.
        metrics.render(true).unwrap();
        let text = metrics.render(true).unwrap();
        let labels =
            |share: &str| format!(r#"namespace="ns",claim="c",device="gpu-0-share",share="{share}""#);
        let one = labels("s0");
        check(&text, "# UNIT divvy_share_gpu_seconds seconds");
        for line in [
            format!("divvy_share_gpu_seconds_total{{{one}}} 1.5"),
            format!("divvy_share_throttled_seconds_total{{{one}}} 2.25"),
            format!("divvy_share_granted_seconds_total{{{one}}} 1.75"),
            format!("divvy_share_hand_overs_total{{{one}}} 90"),
            format!("divvy_share_late_hand_overs_total{{{one}}} 2"),
            format!("divvy_share_gpu_time_attribution{{{one},attribution=\"events\"}} 1"),
            format!("divvy_share_gpu_seconds_total{{{}}} 0.02", labels("s1")),
            format!("divvy_share_gpu_time_attribution{{{},attribution=\"samples\"}} 1", labels("s1")),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        let of = |share: &str| text.lines().filter(|line| line.contains(&labels(share))).count();
        assert_eq!([of("s0"), of("s1"), of("s2"), of("not-held")], [7, 4, 1, 0], "{text}");
        held.lock().unwrap().clear();
        let text = metrics.render(true).unwrap();
        assert!(!text.contains("share=\""), "{text}");
    }

    fn gauges(share: &str) -> ShareGauges {
        ShareGauges {
            namespace: "ns".to_owned(),
            claim_uid: "uid".into(),
            claim: "c".to_owned(),
            device: "gpu-0-share".to_owned(),
            share: share.into(),
            memory_limit: 1,
            memory_used: None,
        }
    }
}
