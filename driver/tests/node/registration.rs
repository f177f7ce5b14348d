//! Registration with the kubelet when either side starts, stops or fails.

use crate::harness::{DRIVER, H100, TestNode, WAIT_TIMEOUT, until};
use divvy_fakes::kubelet::{HealthService, KubeletOptions, Service, Versions};

fn sockets(node: &TestNode) -> Vec<bool> {
    ["k/plugins/gpu.divvy.dev/dra.sock", "k/plugins_registry/gpu.divvy.dev@reg.sock"]
        .map(|socket| node.path(socket).exists())
        .to_vec()
}

#[tokio::test]
async fn newest_kubelet_services_are_chosen() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let plugin = node.kubelet.plugins(DRIVER).remove(0);
    assert_eq!((plugin.service, plugin.health_service), (Service::V1, Some(HealthService::V1)));
}

#[tokio::test]
async fn older_kubelet_is_served_over_v1beta1() {
    let options = KubeletOptions { versions: Versions::OnlyV1beta1, ..KubeletOptions::default() };
    let node = TestNode::with_kubelet(H100, options).await;
    let _daemon = node.start_daemon(&[]).await;
    let plugin = node.kubelet.plugins(DRIVER).remove(0);
    assert_eq!((plugin.service, plugin.health_service), (Service::V1beta1, Some(HealthService::V1alpha1)));
    let claim = node.claim("a", &["gpu-0"]);
    assert_eq!(node.prepare(&claim).await.unwrap()[0].cdi_device_ids, ["gpu.divvy.dev/claim=a-gpu-0"]);
    node.unprepare(&claim).await.unwrap();
    until("health is known", || plugin.health().len() > 1).await;
}

#[tokio::test]
async fn restarted_kubelet_finds_the_driver() {
    let mut node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    node.kubelet.restart();
    node.kubelet.wait_registered(DRIVER, 1, WAIT_TIMEOUT).await.unwrap();
    node.prepare(&node.claim("a", &["gpu-0"])).await.unwrap();
}

#[tokio::test]
async fn kubelet_started_after_the_driver_finds_it() {
    let mut node = TestNode::new(H100).await;
    node.kubelet.stop();
    let daemon = node.spawn_daemon(&[]);
    until("both sockets exist", || sockets(&node) == [true, true]).await;
    node.kubelet.restart();
    node.kubelet.wait_registered(DRIVER, 1, WAIT_TIMEOUT).await.unwrap();
    drop(daemon);
}

#[tokio::test]
async fn stopped_driver_removes_its_sockets_and_can_restart() {
    let node = TestNode::new(H100).await;
    let daemon = node.start_daemon(&[]).await;
    assert_eq!(daemon.stop().await, Some(0));
    assert_eq!(sockets(&node), [false, false]);
    node.kubelet.wait_registered(DRIVER, 0, WAIT_TIMEOUT).await.unwrap();
    let _daemon = node.start_daemon(&[]).await;
}

#[tokio::test]
async fn killed_driver_replaces_its_stale_sockets() {
    let node = TestNode::new(H100).await;
    node.start_daemon(&[]).await.kill();
    assert_eq!(sockets(&node), [true, true]);
    let _daemon = node.spawn_daemon(&[]);
    let claim = node.claim("a", &["gpu-0"]);
    let claims = std::slice::from_ref(&claim);
    node.kubelet.prepare_until_ok(DRIVER, claims, WAIT_TIMEOUT).await.unwrap();
}

#[tokio::test]
async fn refused_registration_is_logged_and_retried() {
    let options = KubeletOptions { refuse: 2, ..KubeletOptions::default() };
    let node = TestNode::with_kubelet(H100, options).await;
    let daemon = node.start_daemon(&[]).await;
    daemon.wait_log("the kubelet refused the registration").await;
    let errors = node.kubelet.registration_errors();
    assert_eq!(errors.iter().filter(|error| error.contains("refuses this registration")).count(), 2);
}

#[tokio::test]
async fn one_connection_carries_every_call() {
    let node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    let plugin = node.kubelet.plugins(DRIVER).remove(0);
    let claim = node.claim("a", &["gpu-0"]);
    until("health is known", || !plugin.health().is_empty()).await;
    for _ in 0..3 {
        node.prepare(&claim).await.unwrap();
        node.unprepare(&claim).await.unwrap();
    }
    assert_eq!(plugin.connections(), 1);
}
