//! What a claim's owner and the kubelet hear of its MPS control daemon.

use crate::harness::{DRIVER, H100, NODE, World, until};
use crate::keeper::FakeKeeper;
use divvy_api::mps::Phase;
use divvy_fakes::kubelet::DeviceHealth;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::json;

fn health(world: &World, device: &str) -> Option<DeviceHealth> {
    let plugin = world.kubelet.plugins(DRIVER).pop()?;
    plugin.health().remove(&(NODE.to_owned(), device.to_owned()))
}

/// What is told, as `kind/name`.
fn told(world: &World, reason: &str) -> Vec<String> {
    let events = world.api.list::<Event>().into_iter();
    let about = |event: Event| {
        let regarding = event.regarding?;
        Some(format!("{}/{}", regarding.kind?, regarding.name?))
    };
    let mut about: Vec<String> =
        events.filter(|event| event.reason.as_deref() == Some(reason)).filter_map(about).collect();
    about.sort();
    about
}

/// Devices with a taint of that key.
fn tainted(world: &World, key: &str) -> Vec<String> {
    let slices = world.api.list::<ResourceSlice>();
    let devices = slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default());
    let has = |device: &k8s_openapi::api::resource::v1::Device| {
        device.taints.iter().flatten().any(|taint| taint.key == format!("{DRIVER}/{key}"))
    };
    devices.filter(has).map(|device| device.name).collect()
}

#[tokio::test]
async fn a_daemon_that_is_sick_or_restarts_is_told_to_all_who_care() {
    let world = World::up(H100).await;
    let keeper = FakeKeeper::start(&world.run_dir());
    let _daemon = world.start(&[]).await;
    let result = json!({
        "request": "r", "driver": DRIVER, "pool": NODE, "device": "gpu-0-mps", "shareID": "s-1",
        "consumedCapacity": {"threads": "10", "memory": "1Gi", "clients": "1"},
    });
    let claim = world.put_claim(
        "a",
        json!({
            "allocation": {"devices": {"results": [result]}},
            "reservedFor": [{"resource": "pods", "name": "pod-1", "uid": "p-1"}],
        }),
    );
    world.prepare(&claim).await.unwrap();
    until("it is healthy", || health(&world, "gpu-0-mps") == Some(DeviceHealth::Healthy)).await;

    keeper.set(Phase::Down { cause: "it died".to_owned() });
    let sick = || matches!(health(&world, "gpu-0-mps"), Some(DeviceHealth::Unhealthy { .. }));
    until("it is unhealthy", sick).await;
    assert_eq!(health(&world, "gpu-0-timeslice"), Some(DeviceHealth::Healthy));
    until("it alone is tainted", || tainted(&world, "mps-unhealthy") == ["gpu-0-mps"]).await;

    keeper.restart();
    keeper.set(Phase::Ready);
    until("pod and claim are told", || told(&world, "MpsRestarted") == ["Pod/pod-1", "ResourceClaim/a"])
        .await;
    until("it is healthy again", || health(&world, "gpu-0-mps") == Some(DeviceHealth::Healthy)).await;
    until("the taint is lifted", || tainted(&world, "mps-unhealthy").is_empty()).await;
    world.unprepare(&claim).await.unwrap();
}
