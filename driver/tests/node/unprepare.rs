//! NodeUnprepareResources.

use crate::harness::{DRIVER, H100, PATIENCE, World, reference, until};

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

#[tokio::test]
async fn the_last_release_gives_the_gpu_back_whole() {
    let world = World::up(H100).await;
    let _daemon = world.start(&["--mig-hold-off", "0ms"]).await;
    let claims = [world.claim("a", &[SLICE]), world.claim("b", &["gpu-0-mig-3g40gb-9-4"])];
    world.kubelet.prepare(DRIVER, &claims).await.unwrap();
    world.expect_hardware(&["mig 19@2 9@4"]);
    let outcomes = world.kubelet.unprepare(DRIVER, &claims).await.unwrap();
    assert!(outcomes.values().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(world.traces(), [""; 0]);
    until("MIG mode is off", || world.hardware() == ["off"]).await;
}

#[tokio::test]
async fn unprepare_needs_neither_the_claim_nor_the_api_server() {
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let claim = world.claim("a", &["gpu-0"]);
    world.prepare(&claim).await.unwrap();
    world.api.set_unavailable(true);
    world.unprepare(&claim).await.unwrap();
    world.unprepare(&claim).await.unwrap();
    world.unprepare(&reference("never-seen")).await.unwrap();
    assert_eq!(world.traces(), [""; 0]);
}

#[tokio::test]
async fn an_unprepare_that_failed_succeeds_when_the_cause_is_gone() {
    let world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    let claim = world.claim("a", &[SLICE]);
    world.prepare(&claim).await.unwrap();
    world.fault("nvmlGpuInstanceDestroy", None);
    let error = world.unprepare(&claim).await.unwrap_err();
    assert!(error.contains("claim ns/a"), "{error}");
    world.release();
    world.unprepare(&claim).await.unwrap();
    assert_eq!(world.traces(), [""; 0]);
}

#[tokio::test]
async fn a_claim_is_released_after_kubelet_and_driver_were_restarted() {
    let mut world = World::up(H100).await;
    let daemon = world.start(&[]).await;
    let claim = world.claim("a", &[SLICE]);
    world.prepare(&claim).await.unwrap();
    daemon.kill();
    world.kubelet.restart();
    let _daemon = world.spawn(&[]);
    let claims = std::slice::from_ref(&claim);
    // The kubelet asks again until the driver is back.
    world.kubelet.prepare_until_ok(DRIVER, claims, PATIENCE).await.unwrap();
    world.unprepare(&claim).await.unwrap();
    assert_eq!(world.traces(), [""; 0]);
}
