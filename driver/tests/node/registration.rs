//! The kubelet finds the driver, whoever of the two starts, stops or fails.

use crate::harness::{DRIVER, H100, PATIENCE, World, until};
use divvy_fakes::kubelet::{HealthService, KubeletOptions, Service, Versions};

fn sockets(world: &World) -> Vec<bool> {
    ["k/plugins/gpu.divvy.dev/dra.sock", "k/plugins_registry/gpu.divvy.dev@reg.sock"]
        .map(|socket| world.path(socket).exists())
        .to_vec()
}

#[tokio::test]
async fn the_newest_services_are_chosen() {
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let plugin = world.kubelet.plugins(DRIVER).remove(0);
    assert_eq!((plugin.service, plugin.health_service), (Service::V1, Some(HealthService::V1)));
}

#[tokio::test]
async fn an_older_kubelet_is_served_by_the_older_services() {
    let options = KubeletOptions { versions: Versions::OnlyV1beta1, ..KubeletOptions::default() };
    let world = World::with(H100, options).await;
    let _daemon = world.start(&[]).await;
    let plugin = world.kubelet.plugins(DRIVER).remove(0);
    assert_eq!((plugin.service, plugin.health_service), (Service::V1beta1, Some(HealthService::V1alpha1)));
    let claim = world.claim("a", &["gpu-0"]);
    assert_eq!(world.prepare(&claim).await.unwrap()[0].cdi_device_ids, ["gpu.divvy.dev/claim=a-gpu-0"]);
    world.unprepare(&claim).await.unwrap();
    until("health is known", || plugin.health().len() > 1).await;
}

#[tokio::test]
async fn a_kubelet_that_restarts_finds_the_driver_again() {
    let mut world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    world.kubelet.restart();
    world.kubelet.wait_registered(DRIVER, 1, PATIENCE).await.unwrap();
    world.prepare(&world.claim("a", &["gpu-0"])).await.unwrap();
}

#[tokio::test]
async fn a_kubelet_that_starts_late_finds_the_driver() {
    let mut world = World::up(H100).await;
    world.kubelet.stop();
    let daemon = world.spawn(&[]);
    until("both sockets are there", || sockets(&world) == [true, true]).await;
    world.kubelet.restart();
    world.kubelet.wait_registered(DRIVER, 1, PATIENCE).await.unwrap();
    drop(daemon);
}

#[tokio::test]
async fn a_driver_that_stops_takes_its_sockets_with_it_and_comes_back() {
    let world = World::up(H100).await;
    let daemon = world.start(&[]).await;
    assert_eq!(daemon.stop().await, Some(0));
    assert_eq!(sockets(&world), [false, false]);
    world.kubelet.wait_registered(DRIVER, 0, PATIENCE).await.unwrap();
    let _daemon = world.start(&[]).await;
}

#[tokio::test]
async fn a_driver_that_was_killed_replaces_its_stale_sockets() {
    let world = World::up(H100).await;
    world.start(&[]).await.kill();
    assert_eq!(sockets(&world), [true, true]);
    let _daemon = world.spawn(&[]);
    let claim = world.claim("a", &["gpu-0"]);
    let claims = std::slice::from_ref(&claim);
    world.kubelet.prepare_until_ok(DRIVER, claims, PATIENCE).await.unwrap();
}

#[tokio::test]
async fn a_refused_registration_is_told_and_succeeds_when_the_kubelet_relents() {
    let options = KubeletOptions { refuse: 2, ..KubeletOptions::default() };
    let world = World::with(H100, options).await;
    let daemon = world.start(&[]).await;
    daemon.wait_log("the kubelet refused the registration").await;
    let errors = world.kubelet.registration_errors();
    assert_eq!(errors.iter().filter(|error| error.contains("told to refuse")).count(), 2);
}

#[tokio::test]
async fn one_connection_carries_every_call() {
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let plugin = world.kubelet.plugins(DRIVER).remove(0);
    let claim = world.claim("a", &["gpu-0"]);
    until("health is known", || !plugin.health().is_empty()).await;
    for _ in 0..3 {
        world.prepare(&claim).await.unwrap();
        world.unprepare(&claim).await.unwrap();
    }
    assert_eq!(plugin.connections(), 1);
}
