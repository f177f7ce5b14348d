//! Turns the state of the daemon's parts into readiness, events and metrics,
//! so that the parts themselves need not know who looks on.

use crate::agent::{Done, Kind, Report};
use crate::cdi;
use crate::engine::{Daemons, Engine, lost};
use crate::events::{Events, Reason};
use crate::metrics::Metrics;
use crate::readiness::{Condition, Readiness};
use crate::registration::Registered;
use crate::service::chain;
use crate::shares;
use crate::status::{LimitKept, Statuses};
use crate::top::Top;
use divvy_api::top::ShareNow;
use divvy_api::{ClaimRef, ClaimUid, ShareId};
use divvy_model::Inventory;
use divvy_model::inventory::{self, Presence};
use divvy_slices::Published;
use k8s_openapi::jiff::Timestamp;
use std::collections::HashSet;
use std::collections::hash_map::{Entry, HashMap};
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
    pub pages: shares::Shares,
    pub top: Top,
    pub engine: Engine,
    pub statuses: Statuses,
    pub events: Events,
    pub metrics: Metrics,
}

type OfClaim = (ClaimUid, ShareId);

/// A claim whose processes come and go has one event in that time for each sort of finding.
const SAID_AGAIN: Duration = Duration::from_secs(60);
/// After so long without a finding nothing is wrong with a share any more: whoever is ended
/// and starts again does not make the condition go back and forth.
const OVER: Duration = Duration::from_secs(10);

impl Shares {
    /// Until the agent is gone.
    pub async fn run(mut self) {
        let mut said: HashMap<(Option<ClaimUid>, Kind), Instant> = HashMap::new();
        // Shares of which the worst is told already.
        let mut broken: HashSet<OfClaim> = HashSet::new();
        // Shares with nothing wrong since; at first those of which a daemon before has told.
        let mut well: HashMap<OfClaim, Instant> =
            self.pages.told().into_iter().map(|share| (share, Instant::now())).collect();
        while let Some(report) = self.reports.recv().await {
            match report {
                Report::Audited { took, gpu, shares } => {
                    self.metrics.audited(took);
                    self.show(format!("GPU-{gpu}"), shares).await;
                    let over: Vec<_> = well.extract_if(|_, since| since.elapsed() >= OVER).collect();
                    for (share, _) in over {
                        broken.remove(&share);
                        self.tell(&share, true, "Kept", "nothing is wrong with the share any more").await;
                    }
                }
                Report::Well { claim, share } => {
                    well.insert((claim, share), Instant::now());
                }
                Report::Found { finding, done } => {
                    let kind = finding.kind;
                    self.metrics.found(kind.name(), done.name());
                    let share = finding.claim.clone().zip(finding.share.clone());
                    let message = format!("{finding}{}", after(done));
                    said.retain(|_, at| at.elapsed() < SAID_AGAIN);
                    if let Entry::Vacant(first) = said.entry((finding.claim.clone(), kind)) {
                        first.insert(Instant::now());
                        self.say(share.as_ref(), kind, &message).await;
                    }
                    let Some(share) = share else { continue };
                    well.remove(&share);
                    let worst = match kind.breaks() {
                        true => broken.insert(share.clone()),
                        false => !broken.contains(&share),
                    };
                    if worst {
                        self.tell(&share, !kind.breaks(), kind.reason(), &message).await;
                    }
                }
            }
        }
        std::future::pending().await
    }

    /// Has `divvy top` see it.
    async fn show(&mut self, gpu: String, shares: Vec<ShareNow>) {
        if self.top.lacks(&shares) {
            let held = self.held().await;
            self.top.learn(held);
        }
        // Not worth a thread: a file in memory.
        if let Err(cause) = self.top.write(gpu, shares) {
            tracing::debug!(%cause, "divvy top will show what was before");
        }
    }

    /// Says it in an event: about a claim that is still held, or about the node.
    async fn say(&self, share: Option<&OfClaim>, kind: Kind, message: &str) {
        let Some((uid, share)) = share else {
            return self.events.node(Reason::StrangerOnGpu, message);
        };
        if let Some(claim) = self.held().await.into_iter().find(|claim| claim.uid == *uid) {
            let reason = if kind.breaks() { Reason::ShareBroken } else { Reason::ShareDoubtful };
            self.events.claim(&claim, reason, &format!("claim {claim}, share {share}: {message}"));
        }
    }

    /// Writes the condition of a share's device, and remembers for the next daemon that it did.
    async fn tell(&self, of: &OfClaim, kept: bool, reason: &'static str, message: &str) {
        let (uid, share) = of;
        let held = self.held().await;
        let Some(claim) = held.iter().find(|claim| claim.uid == *uid) else { return };
        if let Err(cause) = self.pages.tell(uid, share, reason != "Kept") {
            tracing::debug!(%claim, %cause, "the next daemon will not know of the condition");
        }
        let limit = LimitKept { kept, reason, message: message.to_owned(), since: Timestamp::now() };
        self.statuses.limit(uid, share, limit, |uid| held.iter().any(|claim| claim.uid == *uid));
        self.statuses.prepared(claim, self.engine.facts(uid));
    }

    /// The claims that are held, which stand in files.
    async fn held(&self) -> Vec<ClaimRef> {
        let engine = self.engine.clone();
        let held = tokio::task::spawn_blocking(move || engine.held()).await.unwrap_or_default();
        held.into_iter().map(|held| held.claim).collect()
    }
}

/// What was done about a finding.
fn after(done: Done) -> &'static str {
    match done {
        Done::Reported => "",
        Done::Ended => "; it was ended",
        Done::NotEnded => "; it could not be ended, see the log of the node daemon",
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
