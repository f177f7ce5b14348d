//! Device health as the kubelet sees it.

use crate::harness::{DRIVER, NODE, PATIENCE, World, until};
use divvy_fakes::kubelet::{DeviceHealth, KubeletOptions, Versions};

fn health(world: &World, device: &str) -> Option<DeviceHealth> {
    let plugin = world.kubelet.plugins(DRIVER).pop()?;
    plugin.health().remove(&(NODE.to_owned(), device.to_owned()))
}

async fn check_loss(versions: Versions) {
    let options = KubeletOptions { versions, ..KubeletOptions::default() };
    let world = World::with("2xL4", options).await;
    let _daemon = world.start(&[]).await;
    for device in ["gpu-0", "gpu-1"] {
        until(device, || health(&world, device) == Some(DeviceHealth::Healthy)).await;
    }
    world.change(|state| state.lose(0, false).unwrap());
    // NVML tells of a lost GPU when it is called.
    let _ = world.prepare(&world.claim("a", &["gpu-0"])).await;
    let lost = |health: Option<DeviceHealth>| matches!(health, Some(DeviceHealth::Unhealthy { .. }));
    until("the lost GPU is unhealthy", || lost(health(&world, "gpu-0"))).await;
    assert_eq!(health(&world, "gpu-1"), Some(DeviceHealth::Healthy));
}

#[tokio::test]
async fn a_lost_gpu_is_unhealthy_and_its_neighbour_is_not() {
    check_loss(Versions::All).await;
}

#[tokio::test]
async fn health_comes_over_the_older_service_too() {
    check_loss(Versions::OnlyV1beta1).await;
}

#[tokio::test]
async fn health_is_unknown_while_the_driver_is_away() {
    let world = World::up("L4").await;
    let daemon = world.start(&[]).await;
    until("gpu-0 is healthy", || health(&world, "gpu-0") == Some(DeviceHealth::Healthy)).await;
    daemon.kill();
    let plugin = world.kubelet.plugins(DRIVER).remove(0);
    until("nothing is known", || plugin.health().is_empty()).await;
    let _daemon = world.spawn(&[]);
    until("gpu-0 is healthy again", || health(&world, "gpu-0") == Some(DeviceHealth::Healthy)).await;
    world.kubelet.wait_registered(DRIVER, 1, PATIENCE).await.unwrap();
}
