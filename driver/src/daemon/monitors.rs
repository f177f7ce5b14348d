//! Monitors turn the state of the daemon's parts into readiness, events and metrics, so that the parts
//! need not know about them.

use crate::claims::engine::Engine;
use crate::claims::mps_daemons::{MpsDaemons, lost_daemons};
use crate::cluster::claim_status::{ClaimStatusSender, LimitCondition};
use crate::cluster::events::{EventSender, Reason};
use crate::gpu::GpuCounts;
use crate::kubelet::registration::RegistrationState;
use crate::metrics::Metrics;
use crate::shares::agent::{Action, Kind, Report};
use crate::shares::report::Top;
use crate::{cdi, shares};
use divvy_api::text::error_chain;
use divvy_api::top::ShareUsage;
use divvy_api::{ClaimRef, ClaimUid, ShareId};
use divvy_daemon::http;
use divvy_model::inventory::Presence;
use divvy_model::{HealthState, Inventory, inventory};
use divvy_slices::Published;
use k8s_openapi::jiff::Timestamp;
use std::collections::HashSet;
use std::collections::hash_map::{Entry, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

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
    /// The pool is published.
    Published,
    /// The kubelet has registered this instance.
    Registered,
}

impl http::Condition for Condition {
    const ALL: &'static [Self] =
        &[Self::Recovered, Self::GpuDriver, Self::NodeConfig, Self::Cdi, Self::Published, Self::Registered];

    fn name(self) -> &'static str {
        match self {
            Self::Recovered => "recovered",
            Self::GpuDriver => "gpu-driver",
            Self::NodeConfig => "node-config",
            Self::Cdi => "cdi",
            Self::Published => "published",
            Self::Registered => "registered",
        }
    }
}

/// The readiness of the node daemon.
pub type Readiness = http::Readiness<Condition>;

/// Reports the GPU driver and failed GPUs.
pub struct GpuMonitor {
    pub inventory: watch::Receiver<Arc<Inventory>>,
    /// See [`crate::gpu::Gpus::shortage`].
    pub shortage: watch::Receiver<Option<GpuCounts>>,
    pub readiness: Readiness,
    pub events: EventSender,
}

impl GpuMonitor {
    /// Runs until the inventory ends.
    pub async fn run(mut self) {
        loop {
            let now = self.inventory.borrow_and_update().clone();
            let shortage = *self.shortage.borrow_and_update();
            let driver = match shortage {
                _ if now.driver_version.is_empty() => Err("waiting for the GPU driver".to_owned()),
                Some(counts) => Err(counts.to_string()),
                None => Ok(()),
            };
            self.readiness.set(Condition::GpuDriver, driver);
            for gpu in &now.gpus {
                let name = format!("gpu-{} ({})", gpu.number, gpu.uuid);
                if gpu.presence == Presence::Missing && !now.driver_version.is_empty() {
                    self.events
                        .node(Reason::GpuMissing, &format!("{name} is missing; its devices are tainted"));
                }
                for condition in &gpu.conditions {
                    let reason = match condition {
                        inventory::Condition::Health(finding) => match finding.state {
                            HealthState::Stuck => Reason::GpuStuck,
                            HealthState::Lost => Reason::GpuLost,
                            HealthState::NeedsReset => Reason::GpuNeedsReset,
                            HealthState::Degraded | HealthState::Healthy => Reason::GpuDegraded,
                        },
                        inventory::Condition::Mps { .. } => Reason::MpsUnhealthy,
                        inventory::Condition::MigUnreadable { .. } => Reason::MigUnreadable,
                        inventory::Condition::Debt { .. } => Reason::NotUndone,
                        inventory::Condition::HandedOver => Reason::GpuHandedOver,
                    };
                    self.events.node(reason, &format!("{name}: {condition}; its devices are tainted"));
                }
            }
            let changed = tokio::select! {
                changed = self.inventory.changed() => changed,
                changed = self.shortage.changed() => changed,
            };
            if changed.is_err() {
                return std::future::pending().await;
            }
        }
    }
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
    pub readiness: Readiness,
    pub events: EventSender,
}

/// Interval of the check. A created directory or a loaded module is noticed within this time.
const CDI_CHECK_INTERVAL: Duration = Duration::from_secs(15);

impl CdiMonitor {
    /// Checks after each change of the inventory and at each interval.
    pub async fn run(mut self) {
        loop {
            let driver = !self.inventory.borrow_and_update().driver_version.is_empty();
            let cdi = self.cdi.clone();
            let checked =
                tokio::task::spawn_blocking(move || cdi.check().map_err(|error| error_chain(&error))).await;
            let checked = checked.unwrap_or_else(|_| Err("the check panicked; see the log".to_owned()));
            if let (true, Err(why)) = (driver, &checked) {
                self.events.node(Reason::NotReady, why);
            }
            self.readiness.set(Condition::Cdi, checked);
            tokio::select! {
                () = tokio::time::sleep(CDI_CHECK_INTERVAL) => {}
                changed = self.inventory.changed() => {
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
                    self.metrics.audited(took);
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
            let held = self.held().await;
            self.top.set_names(held);
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
        if let Some(claim) = self.held().await.into_iter().find(|claim| claim.uid == *uid) {
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
        let held = self.held().await;
        let Some(claim) = held.iter().find(|claim| claim.uid == *uid) else { return };
        if let Err(cause) = self.pages.set_violation_reported(uid, share, reason != "Enforced") {
            tracing::debug!(
                %claim, %cause,
                "cannot store the condition; a restarted daemon does not clear it"
            );
        }
        let limit = LimitCondition { enforced, reason, message: message.to_owned(), since: Timestamp::now() };
        self.statuses
            .set_limit_condition(uid, share, limit, |uid| held.iter().any(|claim| claim.uid == *uid));
        self.statuses.prepared(claim, self.engine.facts(uid));
    }

    /// The held claims. Their records are files, so another thread reads them.
    async fn held(&self) -> Vec<ClaimRef> {
        let engine = self.engine.clone();
        let held = tokio::task::spawn_blocking(move || engine.held()).await.unwrap_or_default();
        held.into_iter().map(|held| held.claim).collect()
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
