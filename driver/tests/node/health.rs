//! Health of devices: the kubelet's stream, taints, events, conditions and metrics.

use super::observation::{address, wait_for};
use crate::harness::{DRIVER, NODE, TestNode, WAIT_TIMEOUT, until};
use divvy_fakes::kubelet::{DeviceHealth, KubeletOptions, Versions};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The required time from a fatal XID to the taint at the API server.
const TAINT_TIMEOUT: Duration = Duration::from_secs(2);
/// The required time from a death without an event to the taint.
const SILENT_DEATH_TIMEOUT: Duration = Duration::from_secs(30);

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

/// Key and effect of the taints of a device at the API server.
fn taints(node: &TestNode, device: &str) -> Vec<String> {
    let slices = node.api.list::<ResourceSlice>();
    let mut devices = slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
    let found = devices.find(|found| found.name == device);
    let taints = found.and_then(|device| device.taints).unwrap_or_default();
    taints.into_iter().map(|taint| format!("{}:{}", taint.key, taint.effect)).collect()
}

/// Type, reason and note of each event about the object.
fn events(node: &TestNode, kind: &str, name: &str) -> Vec<String> {
    let regards = |event: &Event| {
        event
            .regarding
            .as_ref()
            .is_some_and(|about| about.kind.as_deref() == Some(kind) && about.name.as_deref() == Some(name))
    };
    let text = |event: Event| Some(format!("{} {}: {}", event.type_?, event.reason?, event.note?));
    node.api.list::<Event>().into_iter().filter(regards).filter_map(text).collect()
}

fn condition(node: &TestNode, claim: &str) -> Option<Value> {
    let devices = node.api.get::<ResourceClaim>("ns", claim)?.status?.devices?;
    let conditions = serde_json::to_value(devices.first()?.conditions.as_ref()?).unwrap();
    conditions.get(0).cloned()
}

fn is_condition(node: &TestNode, claim: &str, status: &str, reason: &str) -> bool {
    let matches = |found: Value| {
        (found["type"].as_str(), found["status"].as_str(), found["reason"].as_str())
            == (Some("DeviceHealthy"), Some(status), Some(reason))
    };
    condition(node, claim).is_some_and(matches)
}

#[tokio::test]
async fn h3_fatal_xid_is_tainted_and_reported_until_reset() {
    let node = TestNode::new("2xL4").await;
    let address = address();
    let daemon = node.start_daemon(&["--http-address", &address]).await;
    let claim = node.put_claim(
        "a",
        json!({
            "allocation": {"devices": {"results": [
                {"request": "r", "driver": DRIVER, "pool": NODE, "device": "gpu-0"},
            ]}},
            "reservedFor": [{"resource": "pods", "name": "pod-1", "uid": "p-1"}],
        }),
    );
    node.prepare(&claim).await.unwrap();
    node.prepare(&node.claim("b", &["gpu-1"])).await.unwrap();
    until("gpu-0 is published", || node.published().contains(&"gpu-0".to_owned())).await;
    // A reset sets this counter back.
    node.update_sim(|state| state.gpus[0].health.ecc_uncorrected = 1);

    let begun = Instant::now();
    node.update_sim(|state| state.xid(0, 31, None).unwrap());
    node.update_sim(|state| state.xid(0, 79, None).unwrap());
    until("gpu-0 is tainted", || taints(&node, "gpu-0") == ["gpu.divvy.dev/gpu-lost:NoSchedule"]).await;
    assert!(begun.elapsed() < TAINT_TIMEOUT, "{:?}", begun.elapsed());
    assert_eq!(taints(&node, "gpu-1"), [""; 0]);
    let refused = node.prepare(&node.claim("c", &["gpu-0"])).await.unwrap_err();
    assert!(refused.contains("XID 79: GPU has fallen off the bus"), "{refused}");

    let lost = "Warning GpuLost: claim ns/a, device gpu-0: GPU is lost: XID 79: GPU has fallen off the bus; \
         to recover, reboot the node, or replace the GPU if it does not come back";
    until("the claim has an event", || events(&node, "ResourceClaim", "a") == [lost]).await;
    until("the pod has an event", || events(&node, "Pod", "pod-1") == [lost]).await;
    until("the node has an event", || {
        events(&node, "Node", NODE).iter().any(|event| event.contains("GpuLost: gpu-0 ("))
    })
    .await;
    until("the condition is false", || is_condition(&node, "a", "False", "GpuLost")).await;
    assert_eq!((events(&node, "ResourceClaim", "b"), condition(&node, "b")), (Vec::new(), None));
    let metrics = wait_for(&address, "/metrics", "class=\"lost\"} 1").await;
    assert!(metrics.contains("xid=\"31\",class=\"application\"} 1"), "{metrics}");
    assert!(metrics.contains("state=\"lost\"} 1") && metrics.contains("state=\"healthy\"} 1"), "{metrics}");

    // A reset while the daemon is down is noticed, and the claim's condition recovers.
    daemon.stop().await;
    node.update_sim(|state| state.reset(0, true).unwrap());
    let _daemon = node.start_daemon(&[]).await;
    until("the taint is gone", || taints(&node, "gpu-0").is_empty()).await;
    until("the condition is true", || is_condition(&node, "a", "True", "GpuHealthy")).await;
    until("the claim has another event", || {
        events(&node, "ResourceClaim", "a").iter().any(|event| event.starts_with("Normal GpuHealthy: "))
    })
    .await;
}

#[tokio::test]
async fn silent_death_is_tainted_in_time() {
    let node = TestNode::new("L4").await;
    let _daemon = node.start_daemon(&[]).await;
    until("gpu-0 is published", || node.published().contains(&"gpu-0".to_owned())).await;
    let begun = Instant::now();
    node.update_sim(|state| state.gpus[0].lost = true);
    until("gpu-0 is tainted", || taints(&node, "gpu-0") == ["gpu.divvy.dev/gpu-lost:NoSchedule"]).await;
    assert!(begun.elapsed() < SILENT_DEATH_TIMEOUT, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn node_configuration_chooses_the_effect() {
    let node = TestNode::new("2xL4").await;
    let file = node.path("effects.yaml");
    let text = "apiVersion: resource.divvy.dev/v1alpha1\nkind: NodeConfig\nrules:\n  \
         - health: {needsReset: None, lost: NoExecute}\n";
    std::fs::write(&file, text).unwrap();
    let _daemon = node.start_daemon(&["--config", file.to_str().unwrap()]).await;
    until("gpu-0 is published", || node.published().contains(&"gpu-0".to_owned())).await;
    node.update_sim(|state| {
        state.set_recovery_action(0, 1).unwrap();
        state.set_recovery_action(1, 2).unwrap();
    });
    until("gpu-1 is tainted", || taints(&node, "gpu-1") == ["gpu.divvy.dev/gpu-lost:NoExecute"]).await;
    let unhealthy = |health: Option<DeviceHealth>| matches!(health, Some(DeviceHealth::Unhealthy { .. }));
    until("gpu-0 is unhealthy for the kubelet", || unhealthy(health(&node, "gpu-0"))).await;
    assert_eq!(taints(&node, "gpu-0"), [""; 0]);
    node.prepare(&node.claim("a", &["gpu-0"])).await.unwrap();
}
