//! The device plugin of the world before DRA, as far as it concerns us: while it
//! hands out GPUs of this node, we must not.
//!
//! Who serves a resource shows in the Node's `status.allocatable`. A plugin that
//! has gone leaves its name there with the count zero; resources backed by DRA
//! never appear, since the scheduler reads those from slices. So a count above
//! zero under one of our names is somebody else's, and then every GPU carries the
//! taint `gpu.divvy.dev/device-plugin`. What is prepared already stays.

use crate::events::{Events, Reason};
use crate::gpus::Gpus;
use divvy_api::Quantity;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::api::{WatchEvent, WatchParams};
use kube::{Api, Client};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::time::Duration;

/// Life of one watch of the Node, in seconds.
const WATCH: u32 = 290;
const AGAIN: Duration = Duration::from_secs(10);

/// Of a Node, what matters here: it is sent anew with each heartbeat of the
/// kubelet's status, images and all.
#[derive(Clone, Debug, Default, Deserialize)]
struct Seen {
    #[serde(default)]
    status: Status,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Status {
    #[serde(default)]
    allocatable: BTreeMap<String, String>,
}

/// The resource of ours that a device plugin serves, with its count.
fn served(allocatable: &BTreeMap<String, String>) -> Option<(&str, &str)> {
    let ours = |name: &str| {
        name == "nvidia.com/gpu" || name == "nvidia.com/gpu.shared" || name.starts_with("nvidia.com/mig-")
    };
    // What cannot be read is not nothing.
    let none = |count: &str| count.parse::<Quantity>().is_ok_and(|count| count == Quantity::count(0));
    let mut all = allocatable.iter().filter(|(name, count)| ours(name) && !none(count));
    all.next().map(|(name, count)| (name.as_str(), count.as_str()))
}

/// Follows the Node for ever.
pub async fn follow(client: Client, node: String, gpus: Gpus, events: Events) {
    let mut known = None;
    loop {
        let followed = async {
            let params = WatchParams::default().fields(&format!("metadata.name={node}")).timeout(WATCH);
            // From version 0 the object as it is comes first.
            let nodes: Api<Node> = Api::all(client.clone());
            let request = kube::core::Request::new(nodes.resource_url()).watch(&params, "0");
            let request = request.map_err(kube::Error::BuildRequest)?;
            let mut seen = client.request_events::<Seen>(request).await?.boxed();
            while let Some(event) = seen.try_next().await? {
                if let WatchEvent::Added(node) | WatchEvent::Modified(node) = event {
                    let now = served(&node.status.allocatable);
                    let resource = now.map(|(resource, _)| resource.to_owned());
                    if resource != known {
                        tell(now, &events);
                        gpus.set_device_plugin(resource.clone());
                        known = resource;
                    }
                }
            }
            Ok::<(), kube::Error>(())
        };
        if let Err(cause) = followed.await {
            tracing::debug!(%cause, "the node's allocatable resources cannot be followed");
            tokio::time::sleep(AGAIN).await;
        }
    }
}

fn tell(served: Option<(&str, &str)>, events: &Events) {
    match served {
        Some((resource, count)) => {
            let note = format!(
                "a device plugin serves {count} {resource} on this node; its GPUs take no new claims until that \
                 is zero: remove the device plugin from the node"
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
    fn a_count_above_zero_under_a_name_of_ours_is_a_device_plugin() {
        check(&[], None);
        check(&[("cpu", "8"), ("memory", "16Gi"), ("nvidia.com/gpu", "0")], None);
        check(&[("nvidia.com/gpu", "8")], Some("nvidia.com/gpu"));
        check(&[("nvidia.com/gpu", "0"), ("nvidia.com/gpu.shared", "4")], Some("nvidia.com/gpu.shared"));
        check(&[("nvidia.com/mig-1g.10gb", "1")], Some("nvidia.com/mig-1g.10gb"));
        check(&[("amd.com/gpu", "8"), ("nvidia.com/gpudirect", "1")], None);
        check(&[("nvidia.com/gpu", "many")], Some("nvidia.com/gpu"));
    }
}
