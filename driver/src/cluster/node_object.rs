//! Follows the Node object of this node: one watch for all parts of the daemon that need it.

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::api::{WatchEvent, WatchParams};
use kube::{Api, Client};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Server-side timeout of a watch of the Node, in seconds.
const WATCH_TIMEOUT_SECONDS: u32 = 290;
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// The fields of a Node that are needed. The whole object, with its list of images, arrives with each
/// heartbeat of the kubelet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct NodeFields {
    #[serde(default)]
    pub metadata: MetadataFields,
    #[serde(default)]
    pub status: StatusFields,
}

/// Fields of a Node's metadata.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct MetadataFields {
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub annotations: AnnotationFields,
}

/// The annotations that the controller writes; see [`divvy_model::closing`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct AnnotationFields {
    #[serde(rename = "gpu.divvy.dev/removable")]
    pub removable: Option<String>,
    #[serde(rename = "gpu.divvy.dev/allocated")]
    pub allocated: Option<String>,
}

/// Fields of a Node's status.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct StatusFields {
    #[serde(default)]
    pub allocatable: BTreeMap<String, String>,
}

/// Follows the Node for the life of the daemon. Until it is read, the fields are empty.
pub async fn follow(client: Client, node: String, fields: watch::Sender<Arc<NodeFields>>) {
    loop {
        let followed = async {
            let params = WatchParams::default()
                .fields(&format!("metadata.name={node}"))
                .timeout(WATCH_TIMEOUT_SECONDS);
            // A watch from version 0 starts with the current object.
            let nodes: Api<Node> = Api::all(client.clone());
            let request = kube::core::Request::new(nodes.resource_url()).watch(&params, "0");
            let request = request.map_err(kube::Error::BuildRequest)?;
            let mut events = client.request_events::<NodeFields>(request).await?.boxed();
            while let Some(event) = events.try_next().await? {
                if let WatchEvent::Added(now) | WatchEvent::Modified(now) = event {
                    fields.send_if_modified(|known| {
                        let changed = **known != now;
                        if changed {
                            *known = Arc::new(now);
                        }
                        changed
                    });
                }
            }
            Ok::<(), kube::Error>(())
        };
        if let Err(cause) = followed.await {
            tracing::debug!(%cause, "cannot watch the Node object");
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_model::closing::{ALLOCATED, REMOVABLE};
    use serde_json::json;

    #[test]
    fn annotations_of_the_controller_are_read() {
        let annotations = json!({REMOVABLE: "mps@7:0", ALLOCATED: "[]", "other": "x"});
        let node = json!({"metadata": {"annotations": annotations}});
        let fields: NodeFields = serde_json::from_value(node).expect("a node");
        let AnnotationFields { removable, allocated } = fields.metadata.annotations;
        assert_eq!((removable.as_deref(), allocated.as_deref()), (Some("mps@7:0"), Some("[]")));
    }
}
