//! Detects a device plugin that offers GPUs of this node, which would then be used twice.
//!
//! A served resource appears in the Node's `status.allocatable`. A stopped plugin leaves its resource
//! there with the count zero, and resources backed by DRA never appear. A count above zero for an
//! NVIDIA resource means that a device plugin runs; then every GPU gets the taint
//! `gpu.divvy.dev/device-plugin`. Prepared claims keep their GPUs.

use crate::cluster::events::{EventSender, Reason};
use crate::cluster::node_object::NodeFields;
use crate::gpu::Gpus;
use divvy_api::Quantity;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::watch;

/// An NVIDIA resource that a device plugin serves, and its count.
fn served(allocatable: &BTreeMap<String, String>) -> Option<(&str, &str)> {
    let ours = |name: &str| {
        name == "nvidia.com/gpu" || name == "nvidia.com/gpu.shared" || name.starts_with("nvidia.com/mig-")
    };
    // An unreadable count does not count as zero.
    let none = |count: &str| count.parse::<Quantity>().is_ok_and(|count| count == Quantity::count(0));
    let mut all = allocatable.iter().filter(|(name, count)| ours(name) && !none(count));
    all.next().map(|(name, count)| (name.as_str(), count.as_str()))
}

/// Follows the Node for the life of the daemon.
pub async fn follow(mut node: watch::Receiver<Arc<NodeFields>>, gpus: Gpus, events: EventSender) {
    let mut reported = None;
    loop {
        let fields = node.borrow_and_update().clone();
        let now = served(&fields.status.allocatable);
        let resource = now.map(|(resource, _)| resource.to_owned());
        if resource != reported {
            report(now, &events);
            gpus.set_device_plugin(resource.clone());
            reported = resource;
        }
        if node.changed().await.is_err() {
            return std::future::pending().await;
        }
    }
}

fn report(served: Option<(&str, &str)>, events: &EventSender) {
    match served {
        Some((resource, count)) => {
            let note = format!(
                "a device plugin serves {count} {resource} on this node; its GPUs take no new claims until \
                 the count is zero: remove the device plugin from the node"
            );
            tracing::warn!("{note}");
            events.node(Reason::DevicePlugin, &note);
        }
        None => tracing::info!("no device plugin serves GPUs of this node any more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(allocatable: &[(&str, &str)], expected: Option<&str>) {
        let all = allocatable.iter().map(|(name, count)| ((*name).to_owned(), (*count).to_owned())).collect();
        assert_eq!(served(&all).map(|(name, _)| name), expected, "{allocatable:?}");
    }

    #[test]
    fn count_above_zero_of_an_nvidia_resource_is_a_device_plugin() {
        check(&[], None);
        check(&[("cpu", "8"), ("memory", "16Gi"), ("nvidia.com/gpu", "0")], None);
        check(&[("nvidia.com/gpu", "8")], Some("nvidia.com/gpu"));
        check(&[("nvidia.com/gpu", "0"), ("nvidia.com/gpu.shared", "4")], Some("nvidia.com/gpu.shared"));
        check(&[("nvidia.com/mig-1g.10gb", "1")], Some("nvidia.com/mig-1g.10gb"));
        check(&[("amd.com/gpu", "8"), ("nvidia.com/gpudirect", "1")], None);
        check(&[("nvidia.com/gpu", "many")], Some("nvidia.com/gpu"));
    }
}
