//! Reconciliation of claim records with the API server at start.

use crate::harness::{DRIVER, H100, NODE, TestNode, until};
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

/// Writes a pod of this node that uses the claim.
fn pod(node: &TestNode, name: &str, claim: &str, phase: &str) {
    node.api.put(json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "ns", "name": name, "uid": name},
        "spec": {
            "nodeName": NODE, "containers": [],
            "resourceClaims": [{"name": "x", "resourceClaimName": claim}],
        },
        "status": {"phase": phase},
    }));
}

/// Writes a claim that is allocated on this node and reserved for the pod.
fn reserved(node: &TestNode, claim: &str, device: &str, pod: &str) {
    let result = json!({"request": "r", "driver": DRIVER, "pool": NODE, "device": device});
    node.put_claim(
        claim,
        json!({
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": pod}],
        }),
    );
}

#[tokio::test]
async fn record_of_a_deleted_claim_is_released_at_start() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    node.prepare(&node.claim("gone", &["gpu-0-mig-1g10gb-19-0"])).await.unwrap();
    node.prepare(&node.claim("kept", &["gpu-0-mig-1g10gb-19-1"])).await.unwrap();
    node.prepare(&node.claim("used", &["gpu-0-mig-1g10gb-19-2"])).await.unwrap();
    daemon.kill();
    node.api.delete::<ResourceClaim>("ns", "gone");
    node.api.delete::<ResourceClaim>("ns", "used");
    pod(&node, "p", "used", "Running");
    let _daemon = node.spawn_daemon(&[]);
    until("the claim is released", || node.hardware() == ["mig 19@1 19@2"]).await;
}

#[tokio::test]
async fn unreachable_api_server_releases_nothing() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &["gpu-0-mig-1g10gb-19-0"]);
    node.prepare(&claim).await.unwrap();
    daemon.kill();
    node.api.set_unavailable(true);
    let daemon = node.spawn_daemon(&["--read-timeout", "200ms"]);
    daemon.wait_log("records not reconciled").await;
    node.expect_hardware(&["mig 19@0"]);
    node.api.delete::<ResourceClaim>("ns", "a");
    node.api.set_unavailable(false);
    until("the claim is released", || node.claim_files().is_empty()).await;
}

#[tokio::test]
async fn claim_of_a_running_pod_without_record_is_prepared() {
    let node = TestNode::new(H100).await;
    reserved(&node, "held", "gpu-0-mig-1g10gb-19-0", "running");
    pod(&node, "running", "held", "Running");
    reserved(&node, "waiting", "gpu-0-mig-1g10gb-19-1", "pending");
    pod(&node, "pending", "waiting", "Pending");
    let daemon = node.start_daemon(&[]).await;
    daemon.wait_log("a claim in use without a record was prepared again").await;
    node.expect_hardware(&["mig 19@0"]);
}
