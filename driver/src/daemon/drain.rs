//! Closes NVML while the GPU driver is replaced: on SIGUSR1 until SIGUSR2, and while the GPU operator
//! announces an upgrade. Claims stay prepared, and their containers run on and can restart.

use crate::claims::engine::Engine;
use crate::cluster::driver_upgrade;
use crate::cluster::events::{EventSender, Reason};
use crate::cluster::node_object::NodeFields;
use crate::gpu::Gpus;
use anyhow::Context;
use divvy_api::text::error_chain;
use std::sync::Arc;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// Why NVML is closed; `None` while it is in use.
pub type Drained = Option<String>;

/// The signals; installed early, because their default action ends the process.
pub struct Signals {
    drain: Signal,
    resume: Signal,
}

impl Signals {
    /// Installs both handlers.
    ///
    /// # Errors
    /// The operating system refuses a handler.
    pub fn install() -> anyhow::Result<Self> {
        let install = |kind| signal(kind).context("signals");
        Ok(Self {
            drain: install(SignalKind::user_defined1())?,
            resume: install(SignalKind::user_defined2())?,
        })
    }
}

/// The task that drains and resumes.
pub struct Drain {
    pub signals: Signals,
    pub node: watch::Receiver<Arc<NodeFields>>,
    pub gpus: Gpus,
    pub engine: Engine,
    pub events: EventSender,
    pub state: watch::Sender<Drained>,
}

impl Drain {
    /// Runs for the life of the daemon.
    pub async fn run(mut self) {
        let mut by_signal = false;
        loop {
            let label = driver_upgrade::announced(&self.node.borrow_and_update().metadata.labels);
            let wanted = match (by_signal, label) {
                (_, Some(label)) => Some(self.reason(&label)),
                (true, None) => {
                    Some("NVML is closed on request; send SIGUSR2 to use the GPUs again".to_owned())
                }
                (false, None) => None,
            };
            self.apply(wanted).await;
            tokio::select! {
                _ = self.signals.drain.recv() => by_signal = true,
                _ = self.signals.resume.recv() => by_signal = false,
                changed = self.node.changed() => if changed.is_err() { return std::future::pending().await },
            }
        }
    }

    async fn apply(&self, wanted: Drained) {
        let before = self.state.send_replace(wanted.clone());
        match (before.is_some(), &wanted) {
            (false, Some(why)) => {
                self.gpus.drain().await;
                tracing::info!("{why}");
                self.events.node(Reason::DriverUpgrade, why);
            }
            (true, None) => {
                self.gpus.resume();
                tracing::info!("NVML is opened again");
            }
            (true, Some(_)) | (false, None) => {}
        }
    }

    /// The reason, with the claims whose containers may keep the kernel module in use.
    fn reason(&self, label: &str) -> String {
        let closed = format!("NVML is closed, because the GPU operator upgrades the driver ({label})");
        let held: Vec<String> = match self.engine.held() {
            Ok(held) => held.iter().map(|held| held.claim.to_string()).collect(),
            Err(error) => return format!("{closed}; the held claims are not known: {}", error_chain(&error)),
        };
        match held.is_empty() {
            true => closed,
            false => format!(
                "{closed}; containers of these claims may block the upgrade, delete their pods: {}",
                held.join(", ")
            ),
        }
    }
}
