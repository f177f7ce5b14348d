//! Records against the API server, at a start.

use crate::harness::{DRIVER, H100, NODE, World, until};
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::json;

/// A pod of this node that uses the claim.
fn pod(world: &World, name: &str, claim: &str, phase: &str) {
    world.api.put(json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": "ns", "name": name, "uid": name},
        "spec": {"nodeName": NODE, "containers": [], "resourceClaims": [{"name": "x", "resourceClaimName": claim}]},
        "status": {"phase": phase},
    }));
}

/// The claim, allocated here and reserved for the pod.
fn reserved(world: &World, claim: &str, device: &str, pod: &str) {
    world.put_claim(
        claim,
        json!({
            "allocation": {"devices": {"results": [{"request": "r", "driver": DRIVER, "pool": NODE, "device": device}]}},
            "reservedFor": [{"resource": "pods", "name": pod, "uid": pod}],
        }),
    );
}

#[tokio::test]
async fn a_record_whose_claim_is_gone_is_released_at_the_next_start() {
    let world = World::up(H100).await;
    let daemon = world.start(&[]).await;
    world.prepare(&world.claim("gone", &["gpu-0-mig-1g10gb-19-0"])).await.unwrap();
    world.prepare(&world.claim("kept", &["gpu-0-mig-1g10gb-19-1"])).await.unwrap();
    world.prepare(&world.claim("used", &["gpu-0-mig-1g10gb-19-2"])).await.unwrap();
    daemon.kill();
    world.api.delete::<ResourceClaim>("ns", "gone");
    world.api.delete::<ResourceClaim>("ns", "used");
    pod(&world, "p", "used", "Running");
    let _daemon = world.spawn(&[]);
    until("the claim is released", || world.hardware() == ["mig 19@1 19@2"]).await;
}

#[tokio::test]
async fn silence_of_the_api_server_releases_nothing() {
    let world = World::up(H100).await;
    let daemon = world.start(&[]).await;
    let claim = world.claim("a", &["gpu-0-mig-1g10gb-19-0"]);
    world.prepare(&claim).await.unwrap();
    daemon.kill();
    world.api.set_unavailable(true);
    let daemon = world.spawn(&["--read-within", "200ms"]);
    daemon.wait_log("records not reconciled").await;
    world.expect_hardware(&["mig 19@0"]);
    world.api.delete::<ResourceClaim>("ns", "a");
    world.api.set_unavailable(false);
    until("the claim is released", || world.traces().is_empty()).await;
}

#[tokio::test]
async fn a_claim_that_a_running_pod_holds_without_a_record_is_prepared() {
    let world = World::up(H100).await;
    reserved(&world, "held", "gpu-0-mig-1g10gb-19-0", "running");
    pod(&world, "running", "held", "Running");
    reserved(&world, "waiting", "gpu-0-mig-1g10gb-19-1", "pending");
    pod(&world, "pending", "waiting", "Pending");
    let daemon = world.start(&[]).await;
    daemon.wait_log("a claim in use without a record was prepared again").await;
    world.expect_hardware(&["mig 19@0"]);
}
