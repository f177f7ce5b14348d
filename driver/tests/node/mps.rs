//! Reports about an MPS control daemon to the claim's owner and to the kubelet.

use crate::harness::{DRIVER, H100, NODE, TestNode, until};
use crate::supervisor::FakeSupervisor;
use divvy_api::mps::Phase;
use divvy_fakes::kubelet::DeviceHealth;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::json;

fn health(node: &TestNode, device: &str) -> Option<DeviceHealth> {
    let plugin = node.kubelet.plugins(DRIVER).pop()?;
    plugin.health().remove(&(NODE.to_owned(), device.to_owned()))
}

/// The objects of all events with this reason, as `kind/name`.
fn event_objects(node: &TestNode, reason: &str) -> Vec<String> {
    let events = node.api.list::<Event>().into_iter();
    let object = |event: Event| {
        let regarding = event.regarding?;
        Some(format!("{}/{}", regarding.kind?, regarding.name?))
    };
    let mut objects: Vec<String> =
        events.filter(|event| event.reason.as_deref() == Some(reason)).filter_map(object).collect();
    objects.sort();
    objects
}

/// The devices with a taint of this key.
fn tainted(node: &TestNode, key: &str) -> Vec<String> {
    let slices = node.api.list::<ResourceSlice>();
    let devices = slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
    let has = |device: &k8s_openapi::api::resource::v1::Device| {
        device.taints.iter().flatten().any(|taint| taint.key == format!("{DRIVER}/{key}"))
    };
    devices.filter(has).map(|device| device.name).collect()
}

#[tokio::test]
async fn mps_failure_and_restart_reach_kubelet_pod_and_claim() {
    let node = TestNode::new(H100).await;
    let supervisor = FakeSupervisor::start(&node.run_dir());
    let _daemon = node.start_daemon(&[]).await;
    let result = json!({
        "request": "r", "driver": DRIVER, "pool": NODE, "device": "gpu-0-mps", "shareID": "s-1",
        "consumedCapacity": {"threads": "10", "memory": "1Gi", "clients": "1"},
    });
    let claim = node.put_claim(
        "a",
        json!({
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": "pod-1", "uid": "p-1"}],
        }),
    );
    node.prepare(&claim).await.unwrap();
    until("the device is healthy", || health(&node, "gpu-0-mps") == Some(DeviceHealth::Healthy)).await;

    supervisor.set(Phase::Down { cause: "it died".to_owned() });
    let unhealthy = || matches!(health(&node, "gpu-0-mps"), Some(DeviceHealth::Unhealthy { .. }));
    until("the device is unhealthy", unhealthy).await;
    assert_eq!(health(&node, "gpu-0-timeslice"), Some(DeviceHealth::Healthy));
    until("only this device is tainted", || tainted(&node, "mps-unhealthy") == ["gpu-0-mps"]).await;

    supervisor.restart();
    supervisor.set(Phase::Ready);
    until("pod and claim have an event", || {
        event_objects(&node, "MpsRestarted") == ["Pod/pod-1", "ResourceClaim/a"]
    })
    .await;
    until("the device is healthy again", || health(&node, "gpu-0-mps") == Some(DeviceHealth::Healthy)).await;
    until("the taint is removed", || tainted(&node, "mps-unhealthy").is_empty()).await;
    node.unprepare(&claim).await.unwrap();
}
