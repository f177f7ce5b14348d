//! Hardware and host that fail: the claim gets its error, nothing stays behind.

use super::world::{H100, World, until};
use divvy_sim::Code;
use divvy_sim::control::{Pattern, When};
use std::time::Duration;

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

fn fault(world: &World, call: &str, nth: Option<u64>, when: When) {
    world
        .sim
        .update(|state| {
            state.add_fault(Pattern::new(call), nth, when, Code::Unknown);
            Ok(())
        })
        .unwrap();
}

fn hold(world: &World, call: &str, when: When) {
    world
        .sim
        .update(|state| {
            state.add_hold(Pattern { call: call.into(), gpu: Some(0) }, Some(1), when);
            Ok(())
        })
        .unwrap();
}

fn clear(world: &World) {
    world
        .sim
        .update(|state| {
            state.clear_faults(None);
            state.release(None);
            Ok(())
        })
        .unwrap();
}

/// A prepare with a call that fails leaves nothing, and the next one has what it wants.
async fn comes_to_nothing(call: &str, when: When) {
    let world = World::up(H100);
    let node = world.start().await;
    fault(&world, call, Some(1), when);
    node.refused("a", SLICE, "not prepared").await;
    assert_eq!(world.hardware(), ["off"], "{call}");
    world.expect_no_trace();
    node.prepare("a", SLICE).await.unwrap();
    world.expect_hardware(&["mig 19@2+"]);
}

#[tokio::test]
async fn what_was_made_but_answered_with_an_error_goes_again() {
    for call in [
        "nvmlDeviceSetMigMode",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceCreateComputeInstance*",
    ] {
        comes_to_nothing(call, When::After).await;
    }
}

#[tokio::test]
async fn failed_prepare_leaves_the_hardware_as_it_was() {
    for call in [
        "nvmlDeviceSetMigMode",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceCreateComputeInstance*",
        "nvmlComputeInstanceGetInfo_v2",
    ] {
        comes_to_nothing(call, When::Before).await;
    }
}

#[tokio::test]
async fn failed_prepare_takes_back_its_part_only() {
    let world = World::up(H100);
    let node = world.start().await;
    node.prepare("a", "gpu-0-mig-1g10gb-19-0").await.unwrap();
    fault(&world, "nvmlDeviceCreateGpuInstanceWithPlacement", Some(2), When::Before);
    node.refused("b", "gpu-0-mig-1g10gb-19-2 gpu-0-mig-3g40gb-9-4", "not prepared").await;
    world.expect_hardware(&["mig 19@0+"]);
}

#[tokio::test]
async fn failed_prepare_leaves_a_mode_that_was_on() {
    let world = World::up(H100);
    let node = world.start().await;
    node.prepare("a", SLICE).await.unwrap();
    node.unprepare("a").await.unwrap();
    fault(&world, "nvmlDeviceCreateGpuInstanceWithPlacement", Some(1), When::Before);
    node.refused("b", SLICE, "not prepared").await;
    world.expect_hardware(&["mig"]);
}

#[tokio::test]
async fn prepare_without_cdi_directory_fails_and_leaves_nothing() {
    let world = World::up(H100);
    let node = world.start().await;
    std::fs::remove_dir(&world.paths.cdi_dir).unwrap();
    node.refused("a", SLICE, "cannot be written").await;
    node.refused("b", "gpu-0", "cannot be written").await;
    world.expect_hardware(&["off"]);
    std::fs::create_dir(&world.paths.cdi_dir).unwrap();
    world.expect_no_trace();
    node.prepare("b", "gpu-0").await.unwrap();
}

#[tokio::test]
async fn prepare_without_state_directory_fails_before_the_hardware_changes() {
    let world = World::up(H100);
    let node = world.start().await;
    std::fs::remove_dir(world.claims()).unwrap();
    node.refused("a", SLICE, "its record cannot be kept").await;
    world.expect_hardware(&["off"]);
    std::fs::create_dir(world.claims()).unwrap();
    node.prepare("a", SLICE).await.unwrap();
}

#[tokio::test]
async fn failed_release_is_finished_by_the_next() {
    for call in ["nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy"] {
        let world = World::up(H100);
        let node = world.start().await;
        node.prepare("a", SLICE).await.unwrap();
        fault(&world, call, None, When::Before);
        let error = node.unprepare("a").await.unwrap_err();
        assert!(error.contains("ns/a") && error.contains("not given back yet"), "{error}");
        node.refused("b", "gpu-0", "claim ns/a").await;
        node.refused("a", SLICE, "cannot be undone yet").await;
        clear(&world);
        node.unprepare("a").await.unwrap();
        world.expect_hardware(&["mig"]);
        world.expect_no_trace();
    }
}

#[tokio::test]
async fn undo_that_fails_is_finished_by_the_next_prepare() {
    let world = World::up(H100);
    let node = world.start().await;
    fault(&world, "nvmlGpuInstanceCreateComputeInstance*", Some(1), When::Before);
    fault(&world, "nvmlGpuInstanceDestroy", Some(1), When::Before);
    node.refused("a", SLICE, "not prepared").await;
    world.expect_hardware(&["mig 19@2"]);
    node.prepare("a", SLICE).await.unwrap();
    world.expect_hardware(&["mig 19@2+"]);
}

#[tokio::test]
async fn undo_that_fails_is_finished_without_being_asked() {
    let world = World::up(H100);
    let node = world.start().await;
    fault(&world, "nvmlGpuInstanceCreateComputeInstance*", Some(1), When::Before);
    fault(&world, "nvmlGpuInstanceDestroy", Some(1), When::Before);
    node.refused("a", SLICE, "not prepared").await;
    until("the claim is undone", || node.engine.held().is_empty()).await;
    world.expect_hardware(&["mig"]);
    world.expect_no_trace();
}

/// A call that hangs: the claim is answered, retries are answered at once, the
/// other GPU works on, and when the call returns its effect is undone.
#[tokio::test]
async fn hung_create_is_answered_and_undone_when_it_returns() {
    for (call, when) in [
        ("nvmlDeviceSetMigMode", When::Before),
        ("nvmlDeviceSetMigMode", When::After),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", When::Before),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", When::After),
        ("nvmlGpuInstanceCreateComputeInstance", When::Before),
        ("nvmlGpuInstanceCreateComputeInstance", When::After),
    ] {
        let mut world = World::up(&format!("2x{H100}"));
        world.limits.create = Duration::from_secs(1);
        world.limits.mig_mode = Duration::from_secs(1);
        let node = world.start().await;
        hold(&world, call, when);
        node.refused("a", SLICE, "has not returned").await;
        node.refused("a", SLICE, "has not returned").await;
        // A mode that may come on late is no claim's; an instance that may come is.
        let released = node.unprepare("a").await;
        assert_eq!(released.is_ok(), call == "nvmlDeviceSetMigMode", "{released:?}");
        until("the GPU is marked", || {
            node.gpus.inventory().borrow().gpus.iter().any(|gpu| !gpu.conditions.is_empty())
        })
        .await;
        node.refused("b", "gpu-0", "has not returned").await;
        node.prepare("c", "gpu-1").await.unwrap();
        clear(&world);
        until("the late call is undone", || node.engine.held().len() == 1).await;
        until("the mark is gone", || {
            node.gpus.inventory().borrow().gpus.iter().all(|gpu| gpu.conditions.is_empty())
        })
        .await;
        node.prepare("b", SLICE).await.unwrap();
        assert_eq!(world.hardware(), ["mig 19@2+", "off"], "{call} held {when:?}");
    }
}

#[tokio::test]
async fn hung_destroy_is_finished_when_it_returns() {
    for when in [When::Before, When::After] {
        let mut world = World::up(H100);
        world.limits.destroy = Duration::from_secs(1);
        let node = world.start().await;
        node.prepare("a", SLICE).await.unwrap();
        hold(&world, "nvmlGpuInstanceDestroy", when);
        assert!(node.unprepare("a").await.unwrap_err().contains("has not returned"));
        assert!(node.unprepare("a").await.unwrap_err().contains("is stuck"));
        clear(&world);
        until("the claim is released", || node.engine.held().is_empty()).await;
        world.expect_hardware(&["mig"]);
        node.unprepare("a").await.unwrap();
    }
}

#[tokio::test]
async fn claims_on_a_lost_gpu_can_be_released() {
    let world = World::up(&format!("2x{H100}"));
    let node = world.start().await;
    node.prepare("slice", SLICE).await.unwrap();
    node.prepare("whole", "gpu-1").await.unwrap();
    for slot in [0, 1] {
        world.sim.update(|state| state.lose(slot, true)).unwrap();
    }
    node.unprepare("slice").await.unwrap();
    node.unprepare("whole").await.unwrap();
    world.expect_no_trace();
}

#[tokio::test]
async fn mode_that_cannot_be_turned_off_is_tried_again() {
    let mut world = World::up(H100);
    world.hold_off = Duration::from_millis(20);
    let node = world.start().await;
    node.prepare("a", SLICE).await.unwrap();
    fault(&world, "nvmlDeviceSetMigMode", Some(1), When::Before);
    node.unprepare("a").await.unwrap();
    until("MIG mode is off", || world.hardware() == ["off"]).await;
}

/// The kubelet, which asks for every pod's claims again after a reboot, comes before the next round.
#[tokio::test]
async fn what_could_not_be_restored_is_when_the_kubelet_asks() {
    let world = World::up(H100);
    let node = world.start().await;
    let before = node.prepare("a", SLICE).await.unwrap();
    node.stop().await;
    world.reboot_gpus();
    fault(&world, "nvmlDeviceCreateGpuInstance*", Some(1), When::Before);
    let node = world.start().await;
    assert_eq!(node.report.unsettled.len(), 1, "{:?}", node.report);
    assert_eq!(node.prepare("a", SLICE).await.unwrap(), before);
    world.expect_hardware(&["mig 19@2+"]);
    node.unprepare("a").await.unwrap();
    world.expect_no_trace();
}
