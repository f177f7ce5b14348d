//! The published pool follows the node.

use crate::harness::{H100, NODE, World, until};
use divvy_kubelet::dra::v1::Claim;
use k8s_openapi::api::resource::v1::ResourceSlice;
use std::time::Duration;

/// Devices of a GPU that cannot be cut.
const WHOLE: [&str; 3] = ["gpu-0", "gpu-0-mps", "gpu-0-timeslice"];

#[tokio::test]
async fn the_pool_is_published_and_comes_back_after_a_kubelet_start() {
    let mut world = World::up(H100).await;
    let _daemon = world.start(&[]).await;
    until("gpu-0 is published", || world.published().contains(&"gpu-0".to_owned())).await;
    let all = world.published();
    assert!(all.contains(&"gpu-0-mig-1g10gb-19-2".to_owned()), "{all:?}");
    world.kubelet.restart();
    assert_eq!(world.published(), [""; 0]);
    until("the pool is whole again", || world.published() == all).await;
}

#[tokio::test]
async fn nothing_is_published_before_the_kubelet_calls_this_instance() {
    let mut world = World::up("L4").await;
    world.kubelet.stop();
    let daemon = world.spawn(&[]);
    let socket = world.path("k/plugins_registry/gpu.divvy.dev@reg.sock");
    until("the kubelet could find it", || socket.exists()).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(world.api.list::<ResourceSlice>().len(), 0);
    world.kubelet.restart();
    until("gpu-0 is published", || world.published() == WHOLE).await;
    // It says so once the server has answered.
    until("it says so", || daemon.log().contains("published generation")).await;
    let log = daemon.log();
    let (before, _) = log.split_once("published generation").expect("it says so");
    assert!(before.contains("registered with the kubelet"), "{log}");
}

#[tokio::test]
async fn a_kubelet_that_is_down_keeps_nobody_from_publishing_for_long() {
    let world = World::up("L4").await;
    world.kubelet.stop();
    let _daemon = world.spawn(&[]);
    until("gpu-0 is published", || world.published() == WHOLE).await;
}

#[tokio::test]
async fn what_is_published_stays_when_the_driver_stops() {
    let world = World::up("L4").await;
    let daemon = world.start(&[]).await;
    until("gpu-0 is published", || world.published() == WHOLE).await;
    daemon.stop().await;
    assert_eq!(world.published(), WHOLE);
}

#[tokio::test]
async fn a_gpu_driver_that_comes_late_is_waited_for_with_an_empty_pool() {
    let world = World::up("L4").await;
    let library = world.sim.root().join("usr/lib/x86_64-linux-gnu");
    let away = world.path("away");
    std::fs::rename(&library, &away).unwrap();
    let _daemon = world.start(&[]).await;
    until("an empty pool is published", || world.api.list::<ResourceSlice>().len() == 1).await;
    assert_eq!(world.published(), [""; 0]);
    let claim = world.claim("a", &["gpu-0"]);
    world.prepare(&claim).await.unwrap_err();
    std::fs::rename(&away, &library).unwrap();
    until("gpu-0 is published", || world.published() == WHOLE).await;
    world.prepare_until_ok(&claim).await;
}

#[tokio::test]
async fn a_node_without_kernel_modules_is_made_ready_by_the_drivers_own_helper() {
    let world = World::up("L4").await;
    world.change(|state| {
        state.host.bare = true;
        state.reboot();
    });
    let helper = world.sim.root().join("usr/bin/nvidia-modprobe");
    std::fs::remove_file(&helper).unwrap();
    let deps = std::env::current_exe().unwrap();
    let program = deps.ancestors().nth(2).unwrap().join("divvy-sim");
    assert!(program.exists(), "no {}; build it with `cargo build -p divvy-sim`", program.display());
    // A copy: the program finds its simulator from where it lies.
    std::fs::copy(program, &helper).unwrap();
    let _daemon = world.start(&[]).await;
    until("gpu-0 is published", || world.published() == WHOLE).await;
    world.prepare_until_ok(&world.claim("a", &["gpu-0"])).await;
}

#[tokio::test]
async fn a_drain_lets_go_of_the_gpu_driver_until_it_is_taken_back() {
    let world = World::up("L4").await;
    let daemon = world.start(&[]).await;
    until("gpu-0 is published", || world.published() == WHOLE).await;
    let loaded = || {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", daemon.pid())).unwrap();
        maps.contains("libnvidia-ml")
    };
    let signal = |name: &str| {
        let sent = std::process::Command::new("kill").args([name, &daemon.pid().to_string()]).status();
        assert!(sent.unwrap().success());
    };
    assert!(loaded());
    signal("-USR1");
    until("the library is unloaded", || !loaded()).await;
    let claim = world.claim("a", &["gpu-0"]);
    world.prepare(&claim).await.unwrap_err();
    assert_eq!(world.published(), WHOLE);
    signal("-USR2");
    world.prepare_until_ok(&claim).await;
}

#[tokio::test]
async fn claims_never_change_the_pool() {
    let world = World::up("2xH100-SXM5-80GB").await;
    let _daemon = world.start(&["--mig-hold-off", "0ms"]).await;
    until("gpu-0 is published", || world.published().contains(&"gpu-0".to_owned())).await;
    let versions = || {
        let slices = world.api.list::<ResourceSlice>();
        let version = |slice: ResourceSlice| {
            let meta = slice.metadata;
            (meta.name, meta.resource_version, slice.spec.pool.generation)
        };
        slices.into_iter().map(version).collect::<Vec<_>>()
    };
    let before = versions();
    let devices = ["gpu-0-mig-1g10gb-19-2", "gpu-0-mig-3g40gb-9-4", "gpu-1-mig-2g20gb-14-0"];
    let claims = devices.map(|device| world.claim(device, &[device]));
    let cycle = async |claim: &Claim| {
        for _ in 0..40 {
            world.prepare(claim).await.unwrap();
            world.unprepare(claim).await.unwrap();
        }
    };
    tokio::join!(cycle(&claims[0]), cycle(&claims[1]), cycle(&claims[2]));
    assert_eq!(versions(), before);
    // A stranger's instance does change it: what was left out above would have come before.
    world.change(|state| {
        state.set_mig_mode(0, true).unwrap();
        state.create_gi(0, 19, Some(divvy_sim::state::Placement { start: 3, size: 1 })).unwrap();
    });
    until("the stranger's instance is published", || versions() != before).await;
    let generations =
        |versions: Vec<(_, _, i64)>| versions.into_iter().map(|(.., generation)| generation).max();
    assert_eq!(generations(versions()), generations(before).map(|generation| generation + 1));
}

#[tokio::test]
async fn a_device_plugin_on_the_node_keeps_new_claims_away_and_prepared_ones_alive() {
    let world = World::up(H100).await;
    let put = |count: &str| {
        world.api.put(serde_json::json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE},
            "status": {"allocatable": {"cpu": "8", "nvidia.com/gpu": count}},
        }))
    };
    put("8");
    let daemon = world.start(&[]).await;
    let tainted = || {
        let slices = world.api.list::<ResourceSlice>();
        let devices: Vec<_> =
            slices.into_iter().flat_map(|slice| slice.spec.devices.unwrap_or_default()).collect();
        let has = |device: &&k8s_openapi::api::resource::v1::Device| {
            device.taints.iter().flatten().any(|taint| taint.key == "gpu.divvy.dev/device-plugin")
        };
        (devices.iter().filter(has).count(), devices.len())
    };
    until("every device is tainted", || matches!(tainted(), (some, all) if some == all && all > 0)).await;
    daemon.wait_log("a device plugin serves 8 nvidia.com/gpu on this node").await;
    // It was allocated before the plugin came.
    world.prepare(&world.claim("a", &["gpu-0"])).await.unwrap();
    put("0");
    until("no device is tainted", || tainted().0 == 0).await;
}
