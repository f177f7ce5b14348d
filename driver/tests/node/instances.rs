//! Two instances of the driver, as in a rolling update.

use crate::harness::{DRIVER, H100, PATIENCE, World};

const OLD: &str = "0d5b1f0e-6c1b-4a39-9a55-3f6a0d6c2b11";
const NEW: &str = "9c8d7e6f-1a2b-4c3d-8e9f-0a1b2c3d4e5f";
const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

#[tokio::test]
async fn what_one_instance_prepared_the_other_releases() {
    let world = World::up(H100).await;
    let old = world.start(&["--pod-uid", OLD]).await;
    let claim = world.claim("a", &[SLICE]);
    let devices = world.prepare(&claim).await.unwrap();
    let _new = world.spawn(&["--pod-uid", NEW]);
    world.kubelet.wait_registered(DRIVER, 2, PATIENCE).await.unwrap();
    // The most recent instance is called.
    assert_eq!(world.prepare(&claim).await.unwrap(), devices);
    let other = world.claim("b", &["gpu-0"]);
    world.prepare(&other).await.unwrap_err();
    assert_eq!(old.stop().await, Some(0));
    world.kubelet.wait_registered(DRIVER, 1, PATIENCE).await.unwrap();
    world.unprepare(&claim).await.unwrap();
    assert_eq!(world.traces(), [""; 0]);
    world.prepare_until_ok(&other).await;
}

#[tokio::test]
async fn both_instances_serve_at_once() {
    let world = World::up("2xH100-SXM5-80GB").await;
    let _old = world.start(&["--pod-uid", OLD]).await;
    let _new = world.spawn(&["--pod-uid", NEW]);
    world.kubelet.wait_registered(DRIVER, 2, PATIENCE).await.unwrap();
    let plugins = world.kubelet.plugins(DRIVER);
    let claims = [world.claim("a", &[SLICE]), world.claim("b", &["gpu-0-mig-1g10gb-19-3"])];
    let both =
        tokio::join!(plugins[0].prepare(&claims[..1], PATIENCE), plugins[1].prepare(&claims[1..], PATIENCE),);
    for outcomes in [both.0, both.1] {
        assert!(outcomes.unwrap().values().all(Result::is_ok));
    }
    world.expect_hardware(&["mig 19@2 19@3", "off"]);
}

#[tokio::test]
async fn sockets_of_an_instance_that_was_killed_are_removed_by_the_next() {
    let world = World::up(H100).await;
    world.start(&["--pod-uid", OLD]).await.kill();
    let _new = world.spawn(&["--pod-uid", NEW]);
    let registered = async || {
        loop {
            let plugins = world.kubelet.plugins(DRIVER);
            if plugins.len() == 1 && plugins[0].info.endpoint.contains(NEW) {
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, registered()).await.unwrap();
}
