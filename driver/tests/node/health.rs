//! Device health that the kubelet receives.

use crate::harness::{DRIVER, NODE, TestNode, WAIT_TIMEOUT, until};
use divvy_fakes::kubelet::{DeviceHealth, KubeletOptions, Versions};

fn health(node: &TestNode, device: &str) -> Option<DeviceHealth> {
    let plugin = node.kubelet.plugins(DRIVER).pop()?;
    plugin.health().remove(&(NODE.to_owned(), device.to_owned()))
}

async fn check_loss(versions: Versions) {
    let options = KubeletOptions { versions, ..KubeletOptions::default() };
    let node = TestNode::with_kubelet("2xL4", options).await;
    let _daemon = node.start_daemon(&[]).await;
    for device in ["gpu-0", "gpu-1"] {
        until(device, || health(&node, device) == Some(DeviceHealth::Healthy)).await;
    }
    node.update_sim(|state| state.lose(0, false).unwrap());
    // NVML reports a lost GPU only when it is called.
    let _ = node.prepare(&node.claim("a", &["gpu-0"])).await;
    let lost = |health: Option<DeviceHealth>| matches!(health, Some(DeviceHealth::Unhealthy { .. }));
    until("the lost GPU is unhealthy", || lost(health(&node, "gpu-0"))).await;
    assert_eq!(health(&node, "gpu-1"), Some(DeviceHealth::Healthy));
}

#[tokio::test]
async fn lost_gpu_is_unhealthy_and_its_neighbour_is_not() {
    check_loss(Versions::All).await;
}

#[tokio::test]
async fn health_is_served_over_v1alpha1_too() {
    check_loss(Versions::OnlyV1beta1).await;
}

#[tokio::test]
async fn health_is_unknown_while_the_driver_is_down() {
    let node = TestNode::new("L4").await;
    let daemon = node.start_daemon(&[]).await;
    until("gpu-0 is healthy", || health(&node, "gpu-0") == Some(DeviceHealth::Healthy)).await;
    daemon.kill();
    let plugin = node.kubelet.plugins(DRIVER).remove(0);
    until("the kubelet knows no health", || plugin.health().is_empty()).await;
    let _daemon = node.spawn_daemon(&[]);
    until("gpu-0 is healthy again", || health(&node, "gpu-0") == Some(DeviceHealth::Healthy)).await;
    node.kubelet.wait_registered(DRIVER, 1, WAIT_TIMEOUT).await.unwrap();
}
