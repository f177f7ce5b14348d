//! Monitors turn the state of the daemon's parts into readiness, events and metrics, so that the parts
//! need not know about them.

use crate::claims::engine::{Engine, HeldPart};
use crate::claims::mps_daemons::{MpsDaemons, lost_daemons};
use crate::claims::records::RecordError;
use crate::cluster::claim_status::{ClaimStatusSender, DEVICE_HEALTHY, DeviceCondition, DeviceKey};
use crate::cluster::events::{EventSender, Reason};
use crate::daemon::drain::Drained;
use crate::gpu::GpuCounts;
use crate::gpu::part::Part;
use crate::kubelet::registration::RegistrationState;
use crate::metrics::Metrics;
use crate::shares::agent::{Action, Kind, Report};
use crate::shares::report::Top;
use crate::{cdi, shares};
use divvy_api::names::DRIVER;
use divvy_api::text::error_chain;
use divvy_api::top::ShareUsage;
use divvy_api::{ClaimRef, ClaimUid, GpuUuid, ShareId};
use divvy_daemon::http;
use divvy_model::inventory::Presence;
use divvy_model::{Finding, Gpu, HealthState, Inventory, Placement, TaintEffect, inventory};
use divvy_slices::Published;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client};
use std::collections::HashSet;
use std::collections::hash_map::{Entry, HashMap};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{broadcast, mpsc, watch};

/// Readiness conditions of the node daemon. If all are met, a claim that is scheduled here can be
/// prepared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// Recovery from the local records is done.
    Recovered,
    /// The GPU driver is loaded, and NVML lists all GPUs that the kernel driver shows.
    GpuDriver,
    /// The node configuration file is valid, or none is configured.
    NodeConfig,
    /// CDI files can be written, and the files that they refer to exist.
    Cdi,
    /// Every GPU whose policy offers shares offers them. Optional: the other modes work without it.
    Shares,
    /// The pool is published.
    Published,
    /// The kubelet has registered this instance.
    Registered,
}

impl http::Condition for Condition {
    const ALL: &'static [Self] = &[
        Self::Recovered,
        Self::GpuDriver,
        Self::NodeConfig,
        Self::Cdi,
        Self::Shares,
        Self::Published,
        Self::Registered,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Recovered => "recovered",
            Self::GpuDriver => "gpu-driver",
            Self::NodeConfig => "node-config",
            Self::Cdi => "cdi",
            Self::Shares => "shares",
            Self::Published => "published",
            Self::Registered => "registered",
        }
    }

    fn is_required(self) -> bool {
        self != Self::Shares
    }
}

/// The readiness of the node daemon.
pub type Readiness = http::Readiness<Condition>;

/// Reports the GPU driver and failed GPUs. Each change of a GPU is one event of the node.
pub struct GpuMonitor {
    pub inventory: watch::Receiver<Arc<Inventory>>,
    pub drained: watch::Receiver<Drained>,
    /// See [`crate::gpu::Gpus::shortage`].
    pub shortage: watch::Receiver<Option<GpuCounts>>,
    pub readiness: Readiness,
    pub events: EventSender,
}

impl GpuMonitor {
    /// Runs until the inventory ends.
    pub async fn run(mut self) {
        let mut last = Arc::new(Inventory::default());
        loop {
            let now = self.inventory.borrow_and_update().clone();
            let driver = match (self.drained.borrow_and_update().clone(), *self.shortage.borrow_and_update())
            {
                (Some(why), _) => Err(why),
                _ if now.driver_version.is_empty() => Err("waiting for the GPU driver".to_owned()),
                (None, Some(counts)) => Err(counts.to_string()),
                (None, None) => Ok(()),
            };
            self.readiness.set(Condition::GpuDriver, driver);
            for gpu in &now.gpus {
                let before = last.gpus.iter().find(|before| before.uuid == gpu.uuid);
                for (reason, note) in gpu_changes(before, gpu, !now.driver_version.is_empty()) {
                    self.events.node(reason, &note);
                }
            }
            last = now;
            let ended = tokio::select! {
                changed = self.inventory.changed() => changed.is_err(),
                changed = self.drained.changed() => changed.is_err(),
                changed = self.shortage.changed() => changed.is_err(),
            };
            if ended {
                return std::future::pending().await;
            }
        }
    }
}

/// The events of a change of a GPU: the conditions that are new, or that the GPU is healthy again.
fn gpu_changes(before: Option<&Gpu>, gpu: &Gpu, has_driver: bool) -> Vec<(Reason, String)> {
    let name = format!("gpu-{} ({})", gpu.number, gpu.uuid);
    let mut changes = Vec::new();
    let was_missing = before.is_some_and(|before| before.presence == Presence::Missing);
    if gpu.presence == Presence::Missing && has_driver && !was_missing {
        changes.push((Reason::GpuMissing, format!("{name} is missing; its devices are tainted")));
    }
    for condition in &gpu.conditions {
        if before.is_some_and(|before| before.conditions.contains(condition)) {
            continue;
        }
        let (reason, remedy) = match condition {
            inventory::Condition::Health(Finding { state, .. }) => {
                (Reason::of_health(*state), format!("; to recover, {}", state.remedy()))
            }
            inventory::Condition::Mps { .. } => (Reason::MpsUnhealthy, String::new()),
            inventory::Condition::MigUnreadable { .. } => (Reason::MigUnreadable, String::new()),
            inventory::Condition::Debt { .. } => (Reason::NotUndone, String::new()),
            inventory::Condition::HandedOver => (Reason::GpuHandedOver, String::new()),
        };
        let taint = match gpu.effect(condition) {
            TaintEffect::None => "",
            TaintEffect::NoSchedule | TaintEffect::NoExecute => "; its devices are tainted",
        };
        changes.push((reason, format!("{name}: {condition}{taint}{remedy}")));
    }
    let was_unhealthy = before.is_some_and(|before| before.findings().next().is_some());
    if was_unhealthy && gpu.presence == Presence::Present && gpu.findings().next().is_none() {
        changes.push((Reason::GpuHealthy, format!("{name} is healthy again")));
    }
    changes
}

/// Counts the XIDs of the GPU driver.
pub struct XidMonitor {
    pub events: broadcast::Receiver<divvy_nvml::Event>,
    pub metrics: Metrics,
}

impl XidMonitor {
    /// Runs until the GPU manager ends.
    pub async fn run(mut self) {
        loop {
            match self.events.recv().await {
                Ok(divvy_nvml::Event::Xid { gpu, xid, .. }) => self.metrics.xid(&gpu, xid),
                // In a flood some are not counted.
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return std::future::pending().await,
            }
        }
    }
}

/// Reports the health of the devices of held claims: an event of the claim and its pods, and the
/// condition `DeviceHealthy` of the device, once per change.
pub struct ClaimHealthMonitor {
    pub inventory: watch::Receiver<Arc<Inventory>>,
    pub engine: Engine,
    pub statuses: ClaimStatusSender,
    pub events: EventSender,
    pub client: Client,
}

/// Interval of checks while a GPU is unhealthy, for claims that are prepared in the meantime.
const CLAIM_HEALTH_INTERVAL: Duration = Duration::from_secs(30);
/// Timeout of reading one claim at the start.
const CLAIM_READ_TIMEOUT: Duration = Duration::from_secs(10);

/// The health of a device of a claim: the reason of its event, and the finding.
type DeviceHealth = (Reason, String);

impl ClaimHealthMonitor {
    /// Runs until the inventory ends.
    pub async fn run(mut self) {
        let mut reported = self.reported().await;
        loop {
            let now = self.inventory.borrow_and_update().clone();
            let is_healthy = now.gpus.iter().all(|gpu| health_of(gpu, None).is_none());
            if !is_healthy || !reported.is_empty() {
                self.update(&now, &mut reported).await;
            }
            tokio::select! {
                changed = self.inventory.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
                () = tokio::time::sleep(CLAIM_HEALTH_INTERVAL), if !is_healthy => {}
            }
        }
    }

    /// Reports what changed since the last call.
    async fn update(&self, now: &Inventory, reported: &mut BTreeMap<DeviceKey, DeviceHealth>) {
        // Without a GPU driver nothing is known.
        if now.driver_version.is_empty() {
            return;
        }
        // Until the records can be read again, the reported findings stay.
        let Some(held) = self.held().await else { return };
        let is_held = |uid: &ClaimUid| held.iter().any(|part| part.claim.uid == *uid);
        reported.retain(|device, _| is_held(&device.claim));
        let mut changed = BTreeMap::new();
        for part in &held {
            let placement = match &part.part {
                Part::Whole { .. } => None,
                Part::Instance(key) => Some(key.placement),
            };
            let Some(gpu) = now.gpus.iter().find(|gpu| gpu.uuid == *part.part.gpu()) else { continue };
            let key = DeviceKey {
                claim: part.claim.uid.clone(),
                device: part.device.clone(),
                share_id: part.share_id.clone(),
            };
            let health = health_of(gpu, placement);
            if reported.get(&key) == health.as_ref() {
                continue;
            }
            let (reason, text) =
                health.clone().unwrap_or((Reason::GpuHealthy, "the device is healthy again".to_owned()));
            let note = format!("claim {}, device {}: {text}", part.claim, part.device);
            self.events.claim(&part.claim, reason, &note);
            let condition = DeviceCondition {
                is_true: matches!(reason, Reason::GpuHealthy | Reason::GpuDegraded),
                reason: format!("{reason:?}"),
                message: text,
                since: Timestamp::now(),
            };
            self.statuses.set_health_condition(key.clone(), condition, is_held);
            changed.insert(part.claim.uid.clone(), part.claim.clone());
            match health {
                Some(health) => reported.insert(key, health),
                None => reported.remove(&key),
            };
        }
        for claim in changed.into_values() {
            let (engine, uid) = (self.engine.clone(), claim.uid.clone());
            let facts = tokio::task::spawn_blocking(move || engine.facts(&uid)).await.unwrap_or_default();
            self.statuses.prepared(&claim, facts);
        }
    }

    /// The findings that an earlier daemon reported, from the status of the held claims.
    async fn reported(&self) -> BTreeMap<DeviceKey, DeviceHealth> {
        let mut reported = BTreeMap::new();
        let held = self.held().await.unwrap_or_default();
        let claims: BTreeMap<ClaimUid, ClaimRef> =
            held.into_iter().map(|part| (part.claim.uid.clone(), part.claim)).collect();
        for claim in claims.values() {
            let api: Api<ResourceClaim> = Api::namespaced(self.client.clone(), &claim.namespace);
            let found = match tokio::time::timeout(CLAIM_READ_TIMEOUT, api.get(&claim.name)).await {
                Ok(Ok(found)) => found,
                Ok(Err(_)) => continue,
                // Without the API server, conditions stay until the next change of their device.
                Err(_) => break,
            };
            let devices = found.status.and_then(|status| status.devices).unwrap_or_default();
            for device in devices.into_iter().filter(|device| device.driver == DRIVER) {
                let conditions = device.conditions.unwrap_or_default();
                let Some(condition) = conditions.into_iter().find(|one| one.type_ == DEVICE_HEALTHY) else {
                    continue;
                };
                let reason = HealthState::ALL.into_iter().map(Reason::of_health).chain([Reason::GpuMissing]);
                let reason = { reason }.find(|reason| format!("{reason:?}") == condition.reason);
                let Some(reason) = reason.filter(|reason| *reason != Reason::GpuHealthy) else { continue };
                let key = DeviceKey {
                    claim: claim.uid.clone(),
                    device: device.device.as_str().into(),
                    share_id: device.share_id.map(|share| share.as_str().into()),
                };
                let known = DeviceCondition {
                    is_true: condition.status == "True",
                    reason: condition.reason,
                    message: condition.message.clone(),
                    since: condition.last_transition_time.0,
                };
                self.statuses.set_health_condition(key.clone(), known, |uid| claims.contains_key(uid));
                reported.insert(key, (reason, condition.message));
            }
        }
        reported
    }

    /// The devices of the held claims. `None` if they are not known.
    async fn held(&self) -> Option<Vec<HeldPart>> {
        let engine = self.engine.clone();
        read_records(move || engine.held_parts()).await
    }
}

/// The worst finding about a device of a GPU: a MIG instance at `placement`, or the whole GPU. `None` if it
/// is healthy.
fn health_of(gpu: &Gpu, placement: Option<Placement>) -> Option<DeviceHealth> {
    if gpu.presence == Presence::Missing {
        return Some((Reason::GpuMissing, "GPU is missing".to_owned()));
    }
    let findings = gpu.conditions.iter().filter_map(|condition| match condition {
        inventory::Condition::Health(finding) if condition.concerns(placement) => Some(finding),
        _ => None,
    });
    let worst = findings.min_by_key(|finding| std::cmp::Reverse(finding.state))?;
    Some((Reason::of_health(worst.state), format!("{worst}; to recover, {}", worst.state.remedy())))
}

/// Reports whether the node configuration file is refused.
pub struct NodeConfigMonitor {
    pub refused: watch::Receiver<Option<String>>,
    pub readiness: Readiness,
}

impl NodeConfigMonitor {
    /// Runs until the configuration is not followed any more.
    pub async fn run(mut self) {
        loop {
            let state = self.refused.borrow_and_update().clone().map_or(Ok(()), Err);
            self.readiness.set(Condition::NodeConfig, state);
            if self.refused.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

/// Reports GPUs whose policy offers shares and that cannot offer them.
pub struct ShareOfferMonitor {
    /// See [`crate::cluster::node_config::Policies::without_shares`].
    pub without: watch::Receiver<BTreeSet<GpuUuid>>,
    /// Why no shares can be offered, with the remedy.
    pub cause: String,
    pub inventory: watch::Receiver<Arc<Inventory>>,
    pub readiness: Readiness,
    pub events: EventSender,
    pub metrics: Metrics,
}

impl ShareOfferMonitor {
    /// Runs until the inventory ends.
    pub async fn run(mut self) {
        let mut reported = 0;
        loop {
            let count = {
                let (inventory, without) =
                    (self.inventory.borrow_and_update(), self.without.borrow_and_update());
                inventory.gpus.iter().filter(|gpu| without.contains(&gpu.uuid)).count()
            };
            self.metrics.gpus_without_shares(count);
            let why = format!("{count} GPUs offer no shares: {}", self.cause);
            if count != reported && count > 0 {
                tracing::error!("no shares are offered: {}", self.cause);
                self.events.node(Reason::SharesNotOffered, &why);
            }
            reported = count;
            self.readiness.set(Condition::Shares, if count == 0 { Ok(()) } else { Err(why) });
            let ended = tokio::select! {
                changed = self.inventory.changed() => changed.is_err(),
                changed = self.without.changed() => changed.is_err(),
            };
            if ended {
                return std::future::pending().await;
            }
        }
    }
}

/// Reports restarts of the MPS control daemons of claims.
pub struct MpsMonitor {
    pub daemons: watch::Receiver<Arc<MpsDaemons>>,
    pub events: EventSender,
}

impl MpsMonitor {
    /// Runs until the engine ends.
    pub async fn run(mut self) {
        let mut last = self.daemons.borrow_and_update().clone();
        while self.daemons.changed().await.is_ok() {
            let now = self.daemons.borrow_and_update().clone();
            for (part, claim) in lost_daemons(&last, &now) {
                let start = now.get(part).and_then(|daemon| daemon.incarnation).unwrap_or_default();
                tracing::warn!(
                    %claim, %part, start,
                    "MPS control daemon restarted; its clients must restart"
                );
                let note = format!(
                    "MPS control daemon for {part} restarted (start {start}) and lost its clients: restart \
                     the containers"
                );
                self.events.claim(claim, Reason::MpsRestarted, &note);
            }
            last = now;
        }
        std::future::pending().await
    }
}

/// Reports whether containers can get GPUs.
pub struct CdiMonitor {
    pub cdi: cdi::Cdi,
    pub inventory: watch::Receiver<Arc<Inventory>>,
    pub drained: watch::Receiver<Drained>,
    pub readiness: Readiness,
    pub events: EventSender,
}

/// Interval of the check. A created directory or a loaded module is noticed within this time.
const CDI_CHECK_INTERVAL: Duration = Duration::from_secs(15);

impl CdiMonitor {
    /// Checks after each change of the inventory and at each interval, but not while NVML is drained.
    pub async fn run(mut self) {
        loop {
            let has_driver = !self.inventory.borrow_and_update().driver_version.is_empty();
            // The check may load kernel modules, which an upgrade of the driver has just unloaded.
            let is_drained = self.drained.borrow_and_update().is_some();
            if !is_drained {
                let cdi = self.cdi.clone();
                let check = move || cdi.check().map_err(|error| error_chain(&error));
                let checked = tokio::task::spawn_blocking(check).await;
                let checked = checked.unwrap_or_else(|_| Err("the check panicked; see the log".to_owned()));
                if let (true, Err(why)) = (has_driver, &checked) {
                    self.events.node(Reason::NotReady, why);
                }
                self.readiness.set(Condition::Cdi, checked);
            }
            tokio::select! {
                () = tokio::time::sleep(CDI_CHECK_INTERVAL) => {}
                changed = self.inventory.changed() => {
                    if changed.is_err() {
                        return std::future::pending().await;
                    }
                }
                changed = self.drained.changed() => {
                    if changed.is_err() {
                        return std::future::pending().await;
                    }
                }
            }
        }
    }
}

/// Reports the findings of the share audit.
pub struct ShareMonitor {
    pub reports: mpsc::Receiver<Report>,
    pub pages: shares::Shares,
    pub top: Top,
    pub engine: Engine,
    pub statuses: ClaimStatusSender,
    pub events: EventSender,
    pub metrics: Metrics,
}

type ShareKey = (ClaimUid, ShareId);

/// Time before another event for the same claim and kind of finding, since processes may come and go.
const EVENT_REPEAT_INTERVAL: Duration = Duration::from_secs(60);
/// Time without a finding after which the condition of a share becomes true again. It keeps the
/// condition stable when a killed process restarts.
const VIOLATION_CLEAR_DELAY: Duration = Duration::from_secs(10);

impl ShareMonitor {
    /// Runs until the agent ends.
    pub async fn run(mut self) {
        let mut events_sent: HashMap<(Option<ClaimUid>, Kind), Instant> = HashMap::new();
        // Shares whose condition is false because of a violation.
        let mut violated: HashSet<ShareKey> = HashSet::new();
        // Shares without a finding, and since when. Initially those reported by an earlier daemon.
        let mut clear_since: HashMap<ShareKey, Instant> =
            self.pages.reported_violations().into_iter().map(|share| (share, Instant::now())).collect();
        while let Some(report) = self.reports.recv().await {
            match report {
                Report::Audited { took, gpu, shares } => {
                    self.metrics.audited(gpu, took, &shares);
                    self.update_top(format!("GPU-{gpu}"), shares).await;
                    let over: Vec<_> =
                        clear_since.extract_if(|_, since| since.elapsed() >= VIOLATION_CLEAR_DELAY).collect();
                    for (share, _) in over {
                        violated.remove(&share);
                        self.set_condition(
                            &share,
                            true,
                            "Enforced",
                            "no violation of the share's limits is known",
                        )
                        .await;
                    }
                }
                Report::Resolved { claim, share } => {
                    clear_since.insert((claim, share), Instant::now());
                }
                Report::Found { finding, action } => {
                    let kind = finding.kind;
                    self.metrics.found(kind.name(), action.name());
                    let share = finding.claim.clone().zip(finding.share.clone());
                    let message = format!("{finding}{}", action_text(action));
                    events_sent.retain(|_, at| at.elapsed() < EVENT_REPEAT_INTERVAL);
                    if let Entry::Vacant(first) = events_sent.entry((finding.claim.clone(), kind)) {
                        first.insert(Instant::now());
                        self.send_event(share.as_ref(), kind, &message).await;
                    }
                    let Some(share) = share else { continue };
                    clear_since.remove(&share);
                    let worst = match kind.violates_limit() {
                        true => violated.insert(share.clone()),
                        false => !violated.contains(&share),
                    };
                    if worst {
                        self.set_condition(&share, !kind.violates_limit(), kind.reason(), &message).await;
                    }
                }
            }
        }
        std::future::pending().await
    }

    /// Writes the usage for `divvy top`.
    async fn update_top(&mut self, gpu: String, shares: Vec<ShareUsage>) {
        if self.top.has_unknown(&shares) {
            // Without the records, names stay as they are.
            if let Some(held) = self.held().await {
                self.top.set_names(held);
            }
        }
        // The file is in memory, so no other thread is needed.
        if let Err(cause) = self.top.write(gpu, shares) {
            tracing::debug!(%cause, "cannot write the usage for divvy top; it shows the previous one");
        }
    }

    /// Sends an event about the claim if it is still held, or about the node for unmanaged processes.
    async fn send_event(&self, share: Option<&ShareKey>, kind: Kind, message: &str) {
        let Some((uid, share)) = share else {
            return self.events.node(Reason::UnmanagedGpuProcess, message);
        };
        let mut held = self.held().await.into_iter().flatten();
        if let Some(claim) = held.find(|claim| claim.uid == *uid) {
            let reason = match kind.violates_limit() {
                true => Reason::ShareLimitViolated,
                false => Reason::ShareUnverified,
            };
            self.events.claim(&claim, reason, &format!("claim {claim}, share {share}: {message}"));
        }
    }

    /// Sets the condition of a share's device, and stores for the next daemon whether it is false.
    async fn set_condition(&self, of: &ShareKey, enforced: bool, reason: &'static str, message: &str) {
        let (uid, share) = of;
        let held = self.held().await.unwrap_or_default();
        let Some(claim) = held.iter().find(|claim| claim.uid == *uid) else { return };
        if let Err(cause) = self.pages.set_violation_reported(uid, share, reason != "Enforced") {
            tracing::debug!(
                %claim, %cause,
                "cannot store the condition; a restarted daemon does not clear it"
            );
        }
        let limit = DeviceCondition {
            is_true: enforced,
            reason: reason.to_owned(),
            message: message.to_owned(),
            since: Timestamp::now(),
        };
        self.statuses
            .set_limit_condition(uid, share, limit, |uid| held.iter().any(|claim| claim.uid == *uid));
        self.statuses.prepared(claim, self.engine.facts(uid));
    }

    /// The held claims. `None` if they are not known.
    async fn held(&self) -> Option<Vec<ClaimRef>> {
        let engine = self.engine.clone();
        let held = read_records(move || engine.held()).await?;
        Some(held.into_iter().map(|held| held.claim).collect())
    }
}

/// Reads records on another thread, because they are files. `None` if one of them cannot be read.
async fn read_records<T: Send + 'static>(
    read: impl FnOnce() -> Result<T, RecordError> + Send + 'static,
) -> Option<T> {
    match tokio::task::spawn_blocking(read).await {
        Ok(Ok(read)) => Some(read),
        Ok(Err(error)) => {
            tracing::warn!(error = &error as &dyn std::error::Error, "the held claims are not known");
            None
        }
        // The daemon is stopping.
        Err(_) => None,
    }
}

/// The part of a message that names the action.
fn action_text(action: Action) -> &'static str {
    match action {
        Action::Reported => "",
        Action::Killed => "; it was killed",
        Action::KillFailed => "; it could not be killed, see the log of the node daemon",
    }
}

/// Reports the state of the registration with the kubelet.
pub struct RegistrationMonitor {
    pub registered: watch::Receiver<RegistrationState>,
    pub readiness: Readiness,
}

impl RegistrationMonitor {
    /// Runs until the registration socket is closed.
    pub async fn run(mut self) {
        loop {
            let state = match &*self.registered.borrow_and_update() {
                RegistrationState::Pending => Err("waiting for the kubelet".to_owned()),
                RegistrationState::Registered => Ok(()),
                RegistrationState::Refused { error } => {
                    Err(format!("the kubelet refused the registration: {error}"))
                }
            };
            self.readiness.set(Condition::Registered, state);
            if self.registered.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

/// Reports the state of the published pool.
pub struct PublishMonitor {
    pub published: watch::Receiver<Published>,
    pub readiness: Readiness,
    pub events: EventSender,
    pub metrics: Metrics,
}

impl PublishMonitor {
    /// Runs until the publisher ends.
    pub async fn run(mut self) {
        loop {
            let now = self.published.borrow_and_update().clone();
            self.metrics.published(&now);
            if let Some(why) = &now.degraded {
                self.events.node(Reason::PoolDegraded, why);
            }
            // A published pool stays on the API server during an outage.
            let state = match (now.generation, now.error) {
                (0, Some(error)) => Err(error),
                (0, None) => Err("waiting for the API server".to_owned()),
                _ => Ok(()),
            };
            self.readiness.set(Condition::Published, state);
            if self.published.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}
