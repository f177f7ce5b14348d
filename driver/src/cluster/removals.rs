//! Puts what the controller says about modes that are off into the inventory, from annotations of the
//! Node. The publisher then removes or restores devices, and prepare refuses claims that overlap a
//! claim on a removed device; see [`divvy_model::closing`].

use crate::cluster::node_object::NodeFields;
use crate::gpu::Gpus;
use divvy_model::Removals;
use std::sync::Arc;
use tokio::sync::watch;

/// Follows the Node for the life of the daemon.
pub async fn follow(mut node: watch::Receiver<Arc<NodeFields>>, gpus: Gpus) {
    let mut last = Removals::default();
    loop {
        let annotations = node.borrow_and_update().metadata.annotations.clone();
        let now = Removals::parse(annotations.removable.as_deref(), annotations.allocated.as_deref());
        if now != last {
            for entry in now.allocated.iter().filter(|entry| !last.allocated.contains(entry)) {
                let (claim, device) = (&entry.claim, &entry.device);
                tracing::warn!("claim {claim} is allocated on {device}, which was not published");
            }
            gpus.set_removals(now.clone());
            last = now;
        }
        if node.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}
