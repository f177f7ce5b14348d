//! `--decommission` removes everything that the driver added to the node.

use crate::harness::{H100, TestNode, until};
use crate::observation::{address, wait_for};
use k8s_openapi::api::resource::v1::ResourceSlice;

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

/// The names of the entries of a directory of the test node.
fn entries(node: &TestNode, name: &str) -> Vec<String> {
    let dir = std::fs::read_dir(node.path(name)).into_iter().flatten().flatten();
    dir.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[track_caller]
fn expect_nothing_left(node: &TestNode) {
    for dir in ["cdi", "run", "k/plugins", "k/plugins_registry"] {
        assert_eq!(entries(node, dir), [""; 0], "{dir}");
    }
    assert_eq!(node.api.list::<ResourceSlice>().len(), 0);
}

#[tokio::test]
async fn decommission_restores_the_original_node_state() {
    let node = TestNode::new("2xH100-SXM5-80GB").await;
    let daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &[SLICE]);
    node.prepare(&claim).await.unwrap();
    node.unprepare(&claim).await.unwrap();
    daemon.stop().await;
    node.expect_hardware(&["mig", "off"]);
    std::fs::write(node.cdi_dir().join("gpu.divvy.dev-claim_lost.json"), "{}").unwrap();

    // Twice, because the container may be restarted after the decommission.
    for _ in 0..2 {
        let address = address();
        let daemon = node.spawn_daemon(&["--decommission", "--http-address", &address]);
        let ready = wait_for(&address, "/readyz", "[+]decommissioned ok").await;
        assert!(ready.contains("200 OK"), "{ready}");
        node.expect_hardware(&["off", "off"]);
        expect_nothing_left(&node);
        assert_eq!(daemon.stop().await, Some(0));
    }
}

#[tokio::test]
async fn decommission_waits_for_prepared_claims() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &[SLICE]);
    let devices = node.prepare(&claim).await.unwrap();
    daemon.stop().await;

    let address = address();
    let _daemon = node.spawn_daemon(&["--decommission", "--http-address", &address]);
    let unready = wait_for(&address, "/readyz", "ns/a").await;
    assert!(unready.contains("503"), "{unready}");
    assert_eq!(node.prepare_until_ok(&claim).await, devices);
    node.unprepare(&claim).await.unwrap();
    wait_for(&address, "/readyz", "[+]decommissioned ok").await;
    node.expect_hardware(&["off"]);
    expect_nothing_left(&node);
}

#[tokio::test]
async fn disabling_mig_mode_is_retried_until_it_succeeds() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    let claim = node.claim("a", &[SLICE]);
    node.prepare(&claim).await.unwrap();
    node.unprepare(&claim).await.unwrap();
    daemon.stop().await;
    node.fail_call("nvmlDeviceSetMigMode", None);
    let address = address();
    let _daemon = node.spawn_daemon(&["--decommission", "--http-address", &address]);
    wait_for(&address, "/readyz", "MIG mode cannot be disabled on GPU-").await;
    node.clear_faults();
    until("MIG mode is off", || node.hardware() == ["off"]).await;
    wait_for(&address, "/readyz", "[+]decommissioned ok").await;
}
