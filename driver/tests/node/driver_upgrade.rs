//! Driver upgrades as the GPU operator does them: labels of the Node, modules unloaded, a new driver.

use crate::harness::{NODE, TestNode, until};
use crate::observation::{address, wait_for};
use divvy_sim::driver_root;
use serde_json::json;

/// Puts the Node with this value of the label that the driver manager sets.
fn label(node: &TestNode, value: &str) {
    node.api.put(json!({
        "apiVersion": "v1", "kind": "Node",
        "metadata": {"name": NODE, "labels": {"nvidia.com/gpu.deploy.client": value}},
    }));
}

#[tokio::test]
async fn upgrade_by_the_gpu_operator_drains_and_resumes() {
    let node = TestNode::new("2xL4").await;
    label(&node, "true");
    let address = address();
    let daemon = node.start_daemon(&["--http-address", &address]).await;
    let running = node.claim("running", &["gpu-0"]);
    let answer = node.prepare(&running).await.unwrap();
    wait_for(&address, "/readyz", "200 OK").await;

    label(&node, "paused-for-driver-upgrade");
    let unready = wait_for(&address, "/readyz", "the GPU operator upgrades the driver").await;
    assert!(unready.contains("delete their pods: ns/running"), "{unready}");
    until("the modules can be unloaded", || driver_root::unload_driver(&node.sim).is_ok()).await;
    // The container of the running claim restarts: the kubelet prepares the claim again.
    assert_eq!(node.prepare(&running).await.unwrap(), answer);
    assert!(node.prepare(&node.claim("new", &["gpu-1"])).await.is_err());
    // The labels are set back before the new driver is loaded.
    label(&node, "true");
    wait_for(&address, "/readyz", "waiting for the GPU driver").await;
    driver_root::load_driver(&node.sim, "590.44.01").unwrap();
    node.prepare_until_ok(&node.claim("new", &["gpu-1"])).await;
    assert_eq!(node.prepare(&running).await.unwrap(), answer);
    wait_for(&address, "/readyz", "200 OK").await;
    drop(daemon);
}
