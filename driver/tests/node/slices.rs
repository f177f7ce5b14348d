//! The published ResourceSlices follow the state of the node.

use crate::harness::{H100, NODE, TestNode, until};
use divvy_kubelet::dra::v1::Claim;
use k8s_openapi::api::resource::v1::ResourceSlice;
use std::time::Duration;

/// The devices of a GPU without MIG.
const L4_DEVICES: [&str; 4] = ["gpu-0", "gpu-0-mps", "gpu-0-share", "gpu-0-timeslice"];

#[tokio::test]
async fn pool_is_republished_after_a_kubelet_restart() {
    let mut node = TestNode::new(H100).await;
    let _daemon = node.start_daemon(&[]).await;
    // The last slice.
    until("all devices are published", || node.published().contains(&"gpu-0-mps".to_owned())).await;
    let all = node.published();
    assert!(all.contains(&"gpu-0-mig-1g10gb-19-2".to_owned()), "{all:?}");
    node.kubelet.restart();
    assert_eq!(node.published(), [""; 0]);
    until("the pool is complete again", || node.published() == all).await;
}

#[tokio::test]
async fn pool_is_published_only_after_registration() {
    let mut node = TestNode::new("L4").await;
    node.kubelet.stop();
    let daemon = node.spawn_daemon(&[]);
    let socket = node.path("k/plugins_registry/gpu.divvy.dev@reg.sock");
    until("the registration socket exists", || socket.exists()).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(node.api.list::<ResourceSlice>().len(), 0);
    node.kubelet.restart();
    until("gpu-0 is published", || node.published() == L4_DEVICES).await;
    // The daemon logs this once the API server has answered.
    until("the daemon logs the publication", || daemon.log().contains("published generation")).await;
    let log = daemon.log();
    let (before, _) = log.split_once("published generation").expect("the publication is logged");
    assert!(before.contains("registered with the kubelet"), "{log}");
}

#[tokio::test]
async fn pool_is_published_without_a_kubelet_after_a_delay() {
    let node = TestNode::new("L4").await;
    node.kubelet.stop();
    let _daemon = node.spawn_daemon(&[]);
    until("gpu-0 is published", || node.published() == L4_DEVICES).await;
}

#[tokio::test]
async fn slices_stay_published_when_the_driver_stops() {
    let node = TestNode::new("L4").await;
    let daemon = node.start_daemon(&[]).await;
    until("gpu-0 is published", || node.published() == L4_DEVICES).await;
    daemon.stop().await;
    assert_eq!(node.published(), L4_DEVICES);
}

#[tokio::test]
async fn pool_is_empty_until_the_gpu_driver_is_installed() {
    let node = TestNode::new("L4").await;
    let library = node.sim.root().join("usr/lib/x86_64-linux-gnu");
    let moved = node.path("moved");
    std::fs::rename(&library, &moved).unwrap();
    let _daemon = node.start_daemon(&[]).await;
    until("an empty pool is published", || node.api.list::<ResourceSlice>().len() == 1).await;
    assert_eq!(node.published(), [""; 0]);
    let claim = node.claim("a", &["gpu-0"]);
    node.prepare(&claim).await.unwrap_err();
    std::fs::rename(&moved, &library).unwrap();
    until("gpu-0 is published", || node.published() == L4_DEVICES).await;
    node.prepare_until_ok(&claim).await;
}

#[tokio::test]
async fn kernel_modules_are_loaded_by_nvidia_modprobe() {
    let node = TestNode::new("L4").await;
    node.update_sim(|state| {
        state.host.bare = true;
        state.reboot();
    });
    let helper = node.sim.root().join("usr/bin/nvidia-modprobe");
    std::fs::remove_file(&helper).unwrap();
    let deps = std::env::current_exe().unwrap();
    let program = deps.ancestors().nth(2).unwrap().join("divvy-sim");
    assert!(program.exists(), "no {}; build it with `cargo build -p divvy-sim`", program.display());
    // A copy, because the program finds its simulator by its own path.
    std::fs::copy(program, &helper).unwrap();
    let _daemon = node.start_daemon(&[]).await;
    until("gpu-0 is published", || node.published() == L4_DEVICES).await;
    node.prepare_until_ok(&node.claim("a", &["gpu-0"])).await;
}

#[tokio::test]
async fn drain_unloads_the_gpu_driver_until_resumed() {
    let node = TestNode::new("L4").await;
    let daemon = node.start_daemon(&[]).await;
    until("gpu-0 is published", || node.published() == L4_DEVICES).await;
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
    let claim = node.claim("a", &["gpu-0"]);
    node.prepare(&claim).await.unwrap_err();
    assert_eq!(node.published(), L4_DEVICES);
    signal("-USR2");
    node.prepare_until_ok(&claim).await;
}

#[tokio::test]
async fn claims_do_not_change_the_pool() {
    let node = TestNode::new("2xH100-SXM5-80GB").await;
    let _daemon = node.start_daemon(&["--mig-hold-off", "0ms"]).await;
    until("all devices are published", || node.published().contains(&"gpu-1-mps".to_owned())).await;
    let versions = || {
        let slices = node.api.list::<ResourceSlice>();
        let version = |slice: ResourceSlice| {
            let meta = slice.metadata;
            (meta.name, meta.resource_version, slice.spec.pool.generation)
        };
        slices.into_iter().map(version).collect::<Vec<_>>()
    };
    let before = versions();
    let devices = ["gpu-0-mig-1g10gb-19-2", "gpu-0-mig-3g40gb-9-4", "gpu-1-mig-2g20gb-14-0"];
    let claims = devices.map(|device| node.claim(device, &[device]));
    let cycle = async |claim: &Claim| {
        for _ in 0..40 {
            node.prepare(claim).await.unwrap();
            node.unprepare(claim).await.unwrap();
        }
    };
    tokio::join!(cycle(&claims[0]), cycle(&claims[1]), cycle(&claims[2]));
    assert_eq!(versions(), before);
    // A foreign instance does change the pool. An update that claims had caused would have been published
    // before.
    node.update_sim(|state| {
        state.set_mig_mode(0, true).unwrap();
        state.create_gi(0, 19, Some(divvy_sim::state::Placement { start: 3, size: 1 })).unwrap();
    });
    until("the foreign instance is published", || versions() != before).await;
    let generations =
        |versions: Vec<(_, _, i64)>| versions.into_iter().map(|(.., generation)| generation).max();
    assert_eq!(generations(versions()), generations(before).map(|generation| generation + 1));
}

#[tokio::test]
async fn device_plugin_taints_all_devices_and_spares_prepared_claims() {
    let node = TestNode::new(H100).await;
    let put = |count: &str| {
        node.api.put(serde_json::json!({
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE},
            "status": {"allocatable": {"cpu": "8", "nvidia.com/gpu": count}},
        }))
    };
    put("8");
    let daemon = node.start_daemon(&[]).await;
    let tainted = || {
        let devices: Vec<_> = node.published_devices().collect();
        let has = |device: &&k8s_openapi::api::resource::v1::Device| {
            device.taints.iter().flatten().any(|taint| taint.key == "gpu.divvy.dev/device-plugin")
        };
        (devices.iter().filter(has).count(), devices.len())
    };
    until("every device is tainted", || matches!(tainted(), (some, all) if some == all && all > 0)).await;
    daemon.wait_log("a device plugin serves 8 nvidia.com/gpu on this node").await;
    // The claim was allocated before the device plugin appeared.
    node.prepare(&node.claim("a", &["gpu-0"])).await.unwrap();
    put("0");
    until("no device is tainted", || tainted().0 == 0).await;
}
