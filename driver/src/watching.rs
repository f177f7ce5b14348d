//! Turns the state of the daemon's parts into readiness, events and metrics,
//! so that the parts themselves need not know who looks on.

use crate::agent::{Done, Finding, Kind, Report};
use crate::cdi;
use crate::engine::{Daemons, Engine, lost};
use crate::events::{Events, Reason};
use crate::metrics::Metrics;
use crate::readiness::{Condition, Readiness};
use crate::registration::Registered;
use crate::service::chain;
use crate::status::{LimitKept, Statuses};
use divvy_api::{ClaimRef, ClaimUid, ShareId};
use divvy_model::Inventory;
use divvy_model::inventory::{self, Presence};
use divvy_slices::Published;
use k8s_openapi::jiff::Timestamp;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Watches the inventory.
pub struct Gpus {
    pub inventory: watch::Receiver<Arc<Inventory>>,
    pub readiness: Readiness,
    pub events: Events,
}

impl Gpus {
    /// Until the inventory ends.
    pub async fn run(mut self) {
        loop {
            let now = self.inventory.borrow_and_update().clone();
            let missing = || Err("waiting for the GPU driver".to_owned());
            let driver = if now.driver_version.is_empty() { missing() } else { Ok(()) };
            self.readiness.set(Condition::GpuDriver, driver);
            for gpu in &now.gpus {
                let name = format!("gpu-{} ({})", gpu.number, gpu.uuid);
                if gpu.presence == Presence::Missing && !now.driver_version.is_empty() {
                    self.events
                        .node(Reason::GpuMissing, &format!("{name} is missing; its devices are tainted"));
                }
                for condition in &gpu.conditions {
                    let reason = match condition {
                        inventory::Condition::Stuck { .. } => Reason::GpuStuck,
                        inventory::Condition::Lost => Reason::GpuLost,
                        inventory::Condition::Mps { .. } => Reason::MpsUnhealthy,
                    };
                    self.events.node(reason, &format!("{name}: {condition}; its devices are tainted"));
                }
            }
            if self.inventory.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

/// Watches the MPS control daemons of claims.
pub struct MpsDaemons {
    pub daemons: watch::Receiver<Arc<Daemons>>,
    pub events: Events,
}

impl MpsDaemons {
    /// Until the engine ends.
    pub async fn run(mut self) {
        let mut last = self.daemons.borrow_and_update().clone();
        while self.daemons.changed().await.is_ok() {
            let now = self.daemons.borrow_and_update().clone();
            for (part, claim) in lost(&last, &now) {
                let start = now.get(part).and_then(|daemon| daemon.incarnation).unwrap_or_default();
                tracing::warn!(%claim, %part, start, "MPS control daemon restarted under its clients");
                let note = format!(
                    "MPS control daemon for {part} restarted (start {start}); its clients are lost: containers must restart"
                );
                self.events.claim(claim, Reason::MpsRestarted, &note);
            }
            last = now;
        }
        std::future::pending().await
    }
}

/// Watches whether containers could get GPUs.
pub struct Cdi {
    pub cdi: cdi::Cdi,
    pub inventory: watch::Receiver<Arc<Inventory>>,
    pub readiness: Readiness,
    pub events: Events,
}

/// A directory that was made or a module that was loaded is noticed this late.
const CDI_AGAIN: Duration = Duration::from_secs(15);

impl Cdi {
    /// After each change of the inventory, and again for as long as something is missing.
    pub async fn run(mut self) {
        loop {
            let driver = !self.inventory.borrow_and_update().driver_version.is_empty();
            let cdi = self.cdi.clone();
            let checked =
                tokio::task::spawn_blocking(move || cdi.check().map_err(|error| chain(&error))).await;
            let checked = checked.unwrap_or_else(|_| Err("the check failed; see the log".to_owned()));
            if let (true, Err(why)) = (driver, &checked) {
                self.events.node(Reason::NotReady, why);
            }
            self.readiness.set(Condition::Cdi, checked);
            tokio::select! {
                () = tokio::time::sleep(CDI_AGAIN) => {}
                changed = self.inventory.changed() => {
                    if changed.is_err() {
                        return std::future::pending().await;
                    }
                }
            }
        }
    }
}

/// Watches what the agent tells of shares.
pub struct Shares {
    pub reports: mpsc::Receiver<Report>,
    pub engine: Engine,
    pub statuses: Statuses,
    pub events: Events,
    pub metrics: Metrics,
}

/// A claim whose processes come and go has one event in that time for each sort of finding.
const SAID_AGAIN: Duration = Duration::from_secs(60);

impl Shares {
    /// Until the agent is gone.
    pub async fn run(mut self) {
        let mut said: HashMap<(Option<ClaimUid>, Kind), Instant> = HashMap::new();
        // Shares of which the worst is told already.
        let mut broken: HashSet<(ClaimUid, ShareId)> = HashSet::new();
        while let Some(report) = self.reports.recv().await {
            match report {
                Report::Audited { took } => self.metrics.audited(took),
                Report::Well { claim, share } => {
                    broken.remove(&(claim.clone(), share.clone()));
                    self.tell(&claim, &share, true, "Kept", "nothing is wrong with the share any more").await;
                }
                Report::Found { finding, done } => {
                    let (kind, name) = (finding.kind, done.name());
                    self.metrics.found(kind.name(), name);
                    let now = Instant::now();
                    said.retain(|_, at| now.duration_since(*at) < SAID_AGAIN);
                    if said.contains_key(&(finding.claim.clone(), kind)) {
                        continue;
                    }
                    said.insert((finding.claim.clone(), kind), now);
                    let share = finding.claim.clone().zip(finding.share.clone());
                    let worse = share.is_none_or(|share| match kind.breaks() {
                        true => broken.insert(share),
                        false => !broken.contains(&share),
                    });
                    self.found(&finding, done, worse).await;
                }
            }
        }
        std::future::pending().await
    }

    /// Says it in an event, and in the condition where it is the worst so far.
    async fn found(&self, finding: &Finding, done: Done, worst: bool) {
        let done = match done {
            Done::Reported => "",
            Done::Ended => "; it was ended",
            Done::NotEnded => "; it could not be ended, see the log of the node daemon",
        };
        let (Some(uid), Some(share)) = (&finding.claim, &finding.share) else {
            return self.events.node(Reason::StrangerOnGpu, &format!("{finding}{done}"));
        };
        let message = format!("{finding}{done}");
        if let Some(claim) = self.claim(uid).await {
            let reason = if finding.kind.breaks() { Reason::ShareBroken } else { Reason::ShareDoubtful };
            self.events.claim(&claim, reason, &format!("claim {claim}, share {share}: {message}"));
        }
        if worst {
            self.tell(uid, share, !finding.kind.breaks(), finding.kind.reason(), &message).await;
        }
    }

    /// Writes the condition of a share's device.
    async fn tell(&self, uid: &ClaimUid, share: &ShareId, kept: bool, reason: &'static str, message: &str) {
        let Some(claim) = self.claim(uid).await else { return };
        let mut devices = self.engine.facts(uid);
        if let Some(facts) = devices.iter_mut().find(|facts| facts.share_id.as_ref() == Some(share)) {
            let since = Timestamp::now();
            facts.limit = Some(LimitKept { kept, reason, message: message.to_owned(), since });
            self.statuses.prepared(&claim, devices);
        }
    }

    /// The claim's name; none of one that was released meanwhile. It stands in a file.
    async fn claim(&self, uid: &ClaimUid) -> Option<ClaimRef> {
        let (engine, uid) = (self.engine.clone(), uid.clone());
        let held = tokio::task::spawn_blocking(move || engine.held()).await.ok()?;
        held.into_iter().map(|held| held.claim).find(|claim| claim.uid == uid)
    }
}

/// Watches what the kubelet says of us.
pub struct Registration {
    pub registered: watch::Receiver<Registered>,
    pub readiness: Readiness,
}

impl Registration {
    /// Until the registration socket is gone.
    pub async fn run(mut self) {
        loop {
            let state = match &*self.registered.borrow_and_update() {
                Registered::NotYet => Err("waiting for the kubelet".to_owned()),
                Registered::Yes => Ok(()),
                Registered::Refused { error } => {
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

/// Watches what the API server has of the pool.
pub struct Publishing {
    pub published: watch::Receiver<Published>,
    pub readiness: Readiness,
    pub events: Events,
    pub metrics: Metrics,
}

impl Publishing {
    /// Until the publisher is gone.
    pub async fn run(mut self) {
        loop {
            let now = self.published.borrow_and_update().clone();
            self.metrics.published(&now);
            if let Some(why) = &now.degraded {
                self.events.node(Reason::PoolDegraded, why);
            }
            // A pool that is on the server stays there while the server is away.
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
