//! Prepare and unprepare on hardware that works.

use super::world::{A100, H100, World, allocated, until};
use divvy_driver::engine::HeldState;
use std::time::Duration;

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

#[tokio::test]
async fn whole_gpu_is_given_and_given_back() {
    let world = World::up(H100);
    let node = world.start().await;
    let devices = node.prepare("a", "gpu-0").await.unwrap();
    assert_eq!(devices.len(), 1);
    assert_eq!(devices[0].device.as_str(), "gpu-0");
    assert_eq!(devices[0].cdi_ids, ["gpu.divvy.dev/claim=a-gpu-0"]);
    assert!(world.cdi_file("a").exists());
    world.expect_hardware(&["off"]);
    node.refused("b", "gpu-0", "claim ns/a").await;
    node.refused("b", SLICE, "claim ns/a").await;
    node.unprepare("a").await.unwrap();
    world.expect_no_trace();
    node.prepare("b", "gpu-0").await.unwrap();
}

#[tokio::test]
async fn mig_instance_is_made_and_the_gpu_is_whole_again() {
    let mut world = World::up(H100);
    world.hold_off = Duration::ZERO;
    let node = world.start().await;
    node.prepare("a", SLICE).await.unwrap();
    world.expect_hardware(&["mig 19@2+"]);
    node.refused("b", "gpu-0", "claim ns/a").await;
    node.refused("b", "gpu-0-mig-3g40gb-9-0", "claim ns/a").await;
    node.prepare("b", "gpu-0-mig-3g40gb-9-4").await.unwrap();
    world.expect_hardware(&["mig 19@2+ 9@4+"]);
    node.unprepare("a").await.unwrap();
    world.expect_hardware(&["mig 9@4+"]);
    node.unprepare("b").await.unwrap();
    until("MIG mode is off", || world.hardware() == ["off"]).await;
    world.expect_no_trace();
    node.prepare("c", "gpu-0").await.unwrap();
}

#[tokio::test]
async fn mode_stays_on_for_the_hold_off_and_whole_gpu_turns_it_off() {
    let world = World::up(H100);
    let node = world.start().await;
    node.prepare("a", SLICE).await.unwrap();
    node.unprepare("a").await.unwrap();
    world.expect_hardware(&["mig"]);
    node.prepare("b", SLICE).await.unwrap();
    node.unprepare("b").await.unwrap();
    world.expect_hardware(&["mig"]);
    node.prepare("c", "gpu-0").await.unwrap();
    world.expect_hardware(&["off"]);
    node.refused("d", SLICE, "claim ns/c").await;
}

#[tokio::test]
async fn mode_goes_off_after_a_restart_too() {
    let mut world = World::up(H100);
    let node = world.start().await;
    node.prepare("a", SLICE).await.unwrap();
    node.unprepare("a").await.unwrap();
    node.stop().await;
    world.expect_hardware(&["mig"]);
    world.hold_off = Duration::ZERO;
    let _node = world.start().await;
    until("MIG mode is off", || world.hardware() == ["off"]).await;
}

#[tokio::test]
async fn mode_that_an_administrator_turned_on_stays() {
    let mut world = World::up(H100);
    world.hold_off = Duration::ZERO;
    world.sim.update(|state| state.set_mig_mode(0, true)).unwrap();
    let node = world.start().await;
    node.prepare("a", SLICE).await.unwrap();
    node.unprepare("a").await.unwrap();
    node.stop().await;
    world.expect_hardware(&["mig"]);
}

#[tokio::test]
async fn preparing_again_answers_the_same_bytes() {
    let world = World::up(&format!("2x{H100}"));
    let devices = "gpu-1 gpu-0-mig-1g10gb-19-2 gpu-0-mig-3g40gb-9-4";
    let node = world.start().await;
    let first = node.prepare("a", devices).await.unwrap();
    let file = std::fs::read(world.cdi_file("a")).unwrap();
    assert_eq!(node.prepare("a", devices).await.unwrap(), first);
    assert_eq!(node.engine.prepared(&"a".into()).unwrap(), first);
    node.stop().await;

    let node = world.start().await;
    assert_eq!(node.engine.prepared(&"a".into()).unwrap(), first);
    assert_eq!(node.prepare("a", devices).await.unwrap(), first);
    assert_eq!(std::fs::read(world.cdi_file("a")).unwrap(), file);
    world.expect_hardware(&["mig 19@2+ 9@4+", "off"]);
}

#[tokio::test]
async fn a_lost_cdi_file_is_written_again() {
    let world = World::up(H100);
    let node = world.start().await;
    let first = node.prepare("a", SLICE).await.unwrap();
    let file = std::fs::read(world.cdi_file("a")).unwrap();
    std::fs::remove_file(world.cdi_file("a")).unwrap();
    assert_eq!(node.engine.prepared(&"a".into()), None);
    assert_eq!(node.prepare("a", SLICE).await.unwrap(), first);
    assert_eq!(std::fs::read(world.cdi_file("a")).unwrap(), file);
}

#[tokio::test]
async fn unknown_claims_are_released_already() {
    let node = World::up(H100);
    let node = node.start().await;
    for uid in ["never-seen", "", "../../etc/passwd", ".", &"x".repeat(5000)] {
        node.unprepare(uid).await.unwrap();
        assert_eq!(node.engine.prepared(&uid.into()), None);
    }
    node.refused("../a", "gpu-0", "cannot be the UID of a claim").await;
}

#[tokio::test]
async fn claims_side_by_side_on_one_gpu_each_get_their_own() {
    let world = World::up(H100);
    let node = world.start().await;
    let names: Vec<String> = (0..7).map(|start| format!("gpu-0-mig-1g10gb-19-{start}")).collect();
    let all = names.iter().enumerate().map(|(n, device)| {
        let (engine, claim) = (node.engine.clone(), allocated(&format!("c{n}"), device));
        tokio::spawn(async move { engine.prepare(&claim).await })
    });
    for prepared in all.collect::<Vec<_>>() {
        prepared.await.unwrap().unwrap();
    }
    world.expect_hardware(&["mig 19@0+ 19@1+ 19@2+ 19@3+ 19@4+ 19@5+ 19@6+"]);
    let all = (0..7).map(|n| {
        let engine = node.engine.clone();
        tokio::spawn(async move { engine.unprepare(&format!("c{n}").as_str().into()).await })
    });
    for released in all.collect::<Vec<_>>() {
        released.await.unwrap().unwrap();
    }
    world.expect_hardware(&["mig"]);
    world.expect_no_trace();
}

#[tokio::test]
async fn of_two_claims_on_one_part_exactly_one_gets_it() {
    let world = World::up(H100);
    let node = world.start().await;
    let (one, two) = tokio::join!(node.prepare("a", "gpu-0"), node.prepare("b", SLICE));
    assert_ne!(one.is_ok(), two.is_ok());
    assert_eq!(node.engine.held().len(), 1);
    assert_eq!(node.engine.held()[0].state, HeldState::Prepared);
}

#[tokio::test]
async fn another_allocation_of_the_same_claim_replaces_the_first() {
    let world = World::up(H100);
    let node = world.start().await;
    node.prepare("a", SLICE).await.unwrap();
    let moved = node.prepare("a", "gpu-0-mig-1g10gb-19-5").await.unwrap();
    assert_eq!(moved[0].device.as_str(), "gpu-0-mig-1g10gb-19-5");
    world.expect_hardware(&["mig 19@5+"]);
}

#[tokio::test]
async fn ampere_mode_is_left_as_it_is() {
    let world = World::up(&format!("2x{A100}"));
    world.sim.update(|state| state.set_mig_mode(0, true)).unwrap();
    let node = world.start().await;
    node.refused("a", "gpu-0", "needs MIG mode off").await;
    node.refused("a", "gpu-1-mig-1g5gb-19-0", "needs MIG mode on").await;
    node.prepare("a", "gpu-0-mig-1g5gb-19-0").await.unwrap();
    node.prepare("b", "gpu-1").await.unwrap();
    world.expect_hardware(&["mig 19@0+", "off"]);
    node.unprepare("a").await.unwrap();
    node.unprepare("b").await.unwrap();
    world.expect_hardware(&["mig", "off"]);
}

#[tokio::test]
async fn administrators_look_on_and_hold_nothing() {
    let world = World::up(H100);
    let node = world.start().await;
    node.prepare("a", SLICE).await.unwrap();
    let answer = node.prepare("admin", "admin:gpu-0 admin:gpu-0-mig-3g40gb-9-4").await.unwrap();
    assert_eq!(answer.len(), 2);
    world.expect_hardware(&["mig 19@2+"]);
    node.unprepare("a").await.unwrap();
    node.prepare("b", "gpu-0").await.unwrap();
    node.unprepare("admin").await.unwrap();
    node.unprepare("b").await.unwrap();
    world.expect_no_trace();
    // One claim may own a device and look at it; the CDI file names it once.
    let both = node.prepare("c", "gpu-0 admin:gpu-0").await.unwrap();
    assert_eq!(both[0].cdi_ids, both[1].cdi_ids);
    let file: serde_json::Value =
        serde_json::from_slice(&std::fs::read(world.cdi_file("c")).unwrap()).unwrap();
    assert_eq!(file["devices"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn foreign_instance_is_taken_and_left() {
    let mut world = World::up(H100);
    world.hold_off = Duration::ZERO;
    world.sim.update(|state| state.set_mig_mode(0, true)).unwrap();
    world.sim.update(|state| state.create_gi(0, 9, None)).unwrap();
    let world = world;
    let foreign = world.hardware()[0].replace("mig ", "");
    let node = world.start().await;
    assert_eq!(node.report.unexplained.len(), 1);
    let device = format!("gpu-0-mig-3g40gb-{}", foreign.replace('@', "-"));
    node.refused("b", "gpu-0", "which Divvy did not make").await;
    node.prepare("a", &device).await.unwrap();
    world.expect_hardware(&[&format!("mig {foreign}+")]);
    node.refused("b", "gpu-0", "claim ns/a").await;
    node.unprepare("a").await.unwrap();
    world.expect_hardware(&[&format!("mig {foreign}")]);
    world.expect_no_trace();
}

#[tokio::test]
async fn two_drivers_at_once_see_each_other() {
    let world = World::up(H100);
    let (old, new) = (world.start().await, world.start().await);
    old.prepare("a", SLICE).await.unwrap();
    new.refused("b", "gpu-0", "claim ns/a").await;
    new.refused("b", SLICE, "claim ns/a").await;
    new.prepare("b", "gpu-0-mig-1g10gb-19-3").await.unwrap();
    let answer = old.prepare("b", "gpu-0-mig-1g10gb-19-3").await.unwrap();
    assert_eq!(new.prepare("b", "gpu-0-mig-1g10gb-19-3").await.unwrap(), answer);
    old.unprepare("b").await.unwrap();
    new.unprepare("a").await.unwrap();
    world.expect_no_trace();
    new.prepare("c", "gpu-0").await.unwrap();
    world.expect_hardware(&["off"]);
    old.refused("d", SLICE, "claim ns/c").await;
}

#[tokio::test]
async fn a_device_node_that_is_gone_is_made_while_others_are_served() {
    use std::os::unix::fs::PermissionsExt;
    let world = World::up(H100);
    let node = world.start().await;
    node.prepare("a", "gpu-0").await.unwrap();
    // A helper that is done only when this test, on the same thread, says so.
    let (device, log, go) =
        (world.sim.root().join("dev/nvidia0"), world.sim.root().join("asked"), world.sim.root().join("go"));
    let helper = world.sim.root().join("usr/bin/nvidia-modprobe");
    let script = format!(
        "#!/bin/sh\necho \"$*\" >> {}\nwhile [ ! -e {} ]; do sleep 0.01; done\n: > {}\n",
        log.display(),
        go.display(),
        device.display()
    );
    std::fs::remove_file(&device).unwrap();
    // A copy, so that no file that this process has open for writing is executed.
    let part = world.sim.root().join("helper");
    std::fs::write(&part, script).unwrap();
    std::fs::set_permissions(&part, std::fs::Permissions::from_mode(0o755)).unwrap();
    // There may be one already.
    let _ = std::fs::remove_file(&helper);
    assert!(std::process::Command::new("cp").arg("-p").args([&part, &helper]).status().unwrap().success());
    let serving = async {
        until("the helper runs", || log.exists()).await;
        std::fs::write(&go, "").unwrap();
    };
    let (again, ()) = tokio::join!(node.prepare("a", "gpu-0"), serving);
    again.unwrap();
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "-c 0\n", "asked once, not given up");
    assert!(device.exists());
}
