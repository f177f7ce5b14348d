//! `--leave`: the node as it was before.

use crate::harness::{H100, World, until};
use crate::observation::{address, wait_for};
use k8s_openapi::api::resource::v1::ResourceSlice;

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

/// What lies below a directory of the test, the directory itself apart.
fn below(world: &World, name: &str) -> Vec<String> {
    let entries = std::fs::read_dir(world.path(name)).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[track_caller]
fn expect_nothing_left(world: &World) {
    for dir in ["cdi", "run", "k/plugins", "k/plugins_registry"] {
        assert_eq!(below(world, dir), [""; 0], "{dir}");
    }
    assert_eq!(world.api.list::<ResourceSlice>().len(), 0);
}

#[tokio::test]
async fn a_node_that_was_left_is_as_before() {
    let world = World::up("2xH100-SXM5-80GB").await;
    let daemon = world.start(&[]).await;
    let claim = world.claim("a", &[SLICE]);
    world.prepare(&claim).await.unwrap();
    world.unprepare(&claim).await.unwrap();
    daemon.stop().await;
    world.expect_hardware(&["mig", "off"]);
    std::fs::write(world.cdi_dir().join("gpu.divvy.dev-claim_lost.json"), "{}").unwrap();

    // Again as well: a container may be restarted after it has left.
    for _ in 0..2 {
        let address = address();
        let daemon = world.spawn(&["--leave", "--http-address", &address]);
        let ready = wait_for(&address, "/readyz", "[+]left ok").await;
        assert!(ready.contains("200 OK"), "{ready}");
        world.expect_hardware(&["off", "off"]);
        expect_nothing_left(&world);
        assert_eq!(daemon.stop().await, Some(0));
    }
}

#[tokio::test]
async fn a_claim_that_is_held_is_served_to_its_end() {
    let world = World::up(H100).await;
    let daemon = world.start(&[]).await;
    let claim = world.claim("a", &[SLICE]);
    let devices = world.prepare(&claim).await.unwrap();
    daemon.stop().await;

    let address = address();
    let _daemon = world.spawn(&["--leave", "--http-address", &address]);
    let unready = wait_for(&address, "/readyz", "ns/a").await;
    assert!(unready.contains("503"), "{unready}");
    assert_eq!(world.prepare_until_ok(&claim).await, devices);
    world.unprepare(&claim).await.unwrap();
    wait_for(&address, "/readyz", "[+]left ok").await;
    world.expect_hardware(&["off"]);
    expect_nothing_left(&world);
}

#[tokio::test]
async fn mig_mode_that_cannot_be_turned_off_is_tried_until_it_can() {
    let world = World::up(H100).await;
    let daemon = world.start(&[]).await;
    let claim = world.claim("a", &[SLICE]);
    world.prepare(&claim).await.unwrap();
    world.unprepare(&claim).await.unwrap();
    daemon.stop().await;
    world.fault("nvmlDeviceSetMigMode", None);
    let address = address();
    let _daemon = world.spawn(&["--leave", "--http-address", &address]);
    wait_for(&address, "/readyz", "MIG mode cannot be turned off on GPU-").await;
    world.release();
    until("MIG mode is off", || world.hardware() == ["off"]).await;
    wait_for(&address, "/readyz", "[+]left ok").await;
}
