//! `NodeUnprepareResources` calls.

use crate::harness::{DRIVER, H100, TestNode, WAIT_TIMEOUT, claim_ref, until};

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

#[tokio::test]
async fn last_release_destroys_instances_and_disables_mig() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&["--mig-hold-off", "0ms"]).await;
    let claims = [node.claim("a", &[SLICE]), node.claim("b", &["gpu-0-mig-3g40gb-9-4"])];
    node.kubelet.prepare(DRIVER, &claims).await.unwrap();
    node.expect_hardware(&["mig 19@2 9@4"]);
    let outcomes = node.kubelet.unprepare(DRIVER, &claims).await.unwrap();
    assert!(outcomes.values().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(node.claim_files(), [""; 0]);
    until("MIG mode is off", || node.hardware() == ["off"]).await;
}

#[tokio::test]
async fn unprepare_needs_neither_claim_object_nor_api_server() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    node.api.set_unavailable(true);
    node.unprepare(&claim).await.unwrap();
    node.unprepare(&claim).await.unwrap();
    node.unprepare(&claim_ref("never-seen")).await.unwrap();
    assert_eq!(node.claim_files(), [""; 0]);
}

#[tokio::test]
async fn unprepare_succeeds_and_leaves_a_debt_to_the_gpu() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &[SLICE]);
    node.prepare(&claim).await.unwrap();
    node.fail_call("nvmlGpuInstanceDestroy", None);
    node.unprepare(&claim).await.unwrap();
    assert_eq!(node.claim_files(), [""; 0]);
    let whole = node.claim("b", &["gpu-0"]);
    let error = node.prepare(&whole).await.unwrap_err();
    assert!(error.contains("released claim ns/a"), "{error}");
    node.clear_faults();
    node.prepare(&whole).await.unwrap();
}

#[tokio::test]
async fn claim_is_released_after_kubelet_and_driver_restarts() {
    let mut node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &[SLICE]);
    node.prepare(&claim).await.unwrap();
    daemon.kill();
    node.kubelet.restart();
    let _daemon = node.spawn_daemon(&[]);
    let claims = std::slice::from_ref(&claim);
    // The kubelet retries until the driver is registered again.
    node.kubelet.prepare_until_ok(DRIVER, claims, WAIT_TIMEOUT).await.unwrap();
    node.unprepare(&claim).await.unwrap();
    assert_eq!(node.claim_files(), [""; 0]);
}
