//! Two instances of the driver at the same time, as in a rolling update.

use crate::harness::{DRIVER, H100, TestNode, WAIT_TIMEOUT};

const OLD: &str = "0d5b1f0e-6c1b-4a39-9a55-3f6a0d6c2b11";
const NEW: &str = "9c8d7e6f-1a2b-4c3d-8e9f-0a1b2c3d4e5f";
const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

#[tokio::test]
async fn new_instance_releases_claims_of_the_old_one() {
    let node = TestNode::new(H100).await;
    let old = node.start_daemon(&["--pod-uid", OLD]).await;
    let claim = node.claim("a", &[SLICE]);
    let devices = node.prepare(&claim).await.unwrap();
    let _new = node.spawn_daemon(&["--pod-uid", NEW]);
    node.kubelet.wait_registered(DRIVER, 2, WAIT_TIMEOUT).await.unwrap();
    // The kubelet calls the instance that registered last.
    assert_eq!(node.prepare(&claim).await.unwrap(), devices);
    let other = node.claim("b", &["gpu-0"]);
    node.prepare(&other).await.unwrap_err();
    assert_eq!(old.stop().await, Some(0));
    node.kubelet.wait_registered(DRIVER, 1, WAIT_TIMEOUT).await.unwrap();
    node.unprepare(&claim).await.unwrap();
    assert_eq!(node.claim_files(), [""; 0]);
    node.prepare_until_ok(&other).await;
}

#[tokio::test]
async fn both_instances_serve_at_once() {
    let node = TestNode::new("2xH100-SXM5-80GB").await;
    let _old = node.start_daemon(&["--pod-uid", OLD]).await;
    let _new = node.spawn_daemon(&["--pod-uid", NEW]);
    node.kubelet.wait_registered(DRIVER, 2, WAIT_TIMEOUT).await.unwrap();
    let plugins = node.kubelet.plugins(DRIVER);
    let claims = [node.claim("a", &[SLICE]), node.claim("b", &["gpu-0-mig-1g10gb-19-3"])];
    let both = tokio::join!(
        plugins[0].prepare(&claims[..1], WAIT_TIMEOUT),
        plugins[1].prepare(&claims[1..], WAIT_TIMEOUT),
    );
    for outcomes in [both.0, both.1] {
        assert!(outcomes.unwrap().values().all(Result::is_ok));
    }
    node.expect_hardware(&["mig 19@2 19@3", "off"]);
}

#[tokio::test]
async fn next_instance_removes_sockets_of_a_killed_one() {
    let node = TestNode::new(H100).await;
    node.start_daemon(&["--pod-uid", OLD]).await.kill();
    let _new = node.spawn_daemon(&["--pod-uid", NEW]);
    let registered = async || {
        loop {
            let plugins = node.kubelet.plugins(DRIVER);
            if plugins.len() == 1 && plugins[0].info.endpoint.contains(NEW) {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(WAIT_TIMEOUT, registered()).await.unwrap();
}
