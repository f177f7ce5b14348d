//! Turns the state of the daemon's parts into readiness, events and metrics,
//! so that the parts themselves need not know who looks on.

use crate::cdi;
use crate::engine::{Daemons, lost};
use crate::events::{Events, Reason};
use crate::metrics::Metrics;
use crate::readiness::{Condition, Readiness};
use crate::registration::Registered;
use crate::service::chain;
use divvy_model::Inventory;
use divvy_model::inventory::{self, Presence};
use divvy_slices::Published;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

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
