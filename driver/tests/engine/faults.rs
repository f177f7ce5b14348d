//! Failures of hardware and host: the claim gets an error and nothing is left behind.

use super::test_node::{H100, TestNode, until};
use divvy_sim::Code;
use divvy_sim::control::{Pattern, When};
use std::time::Duration;

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

fn fail_call(node: &TestNode, call: &str, nth: Option<u64>, when: When) {
    node.sim
        .update(|state| {
            state.add_fault(Pattern::new(call), nth, when, Code::Unknown);
            Ok(())
        })
        .unwrap();
}

fn hold_call(node: &TestNode, call: &str, when: When) {
    node.sim
        .update(|state| {
            state.add_hold(Pattern { call: call.into(), gpu: Some(0) }, Some(1), when);
            Ok(())
        })
        .unwrap();
}

fn clear_faults(node: &TestNode) {
    node.sim
        .update(|state| {
            state.clear_faults(None);
            state.release(None);
            Ok(())
        })
        .unwrap();
}

/// Checks that a prepare in which `call` fails leaves nothing, and that the next prepare succeeds.
async fn check_failed_prepare(call: &str, when: When) {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    fail_call(&node, call, Some(1), when);
    driver.expect_refused("a", SLICE, "not prepared").await;
    assert_eq!(node.hardware(), ["off"], "{call}");
    node.expect_no_claim_files();
    driver.prepare("a", SLICE).await.unwrap();
    node.expect_hardware(&["mig 19@2+"]);
}

#[tokio::test]
async fn effects_of_a_call_that_reported_an_error_are_undone() {
    for call in [
        "nvmlDeviceSetMigMode",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceCreateComputeInstance*",
    ] {
        check_failed_prepare(call, When::After).await;
    }
}

#[tokio::test]
async fn failed_prepare_leaves_the_hardware_unchanged() {
    for call in [
        "nvmlDeviceSetMigMode",
        "nvmlDeviceCreateGpuInstanceWithPlacement",
        "nvmlGpuInstanceCreateComputeInstance*",
        "nvmlComputeInstanceGetInfo_v2",
    ] {
        check_failed_prepare(call, When::Before).await;
    }
}

#[tokio::test]
async fn failed_prepare_undoes_only_its_own_changes() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.prepare("a", "gpu-0-mig-1g10gb-19-0").await.unwrap();
    fail_call(&node, "nvmlDeviceCreateGpuInstanceWithPlacement", Some(2), When::Before);
    driver.expect_refused("b", "gpu-0-mig-1g10gb-19-2 gpu-0-mig-3g40gb-9-4", "not prepared").await;
    node.expect_hardware(&["mig 19@0+"]);
}

#[tokio::test]
async fn failed_prepare_keeps_mig_mode_that_was_on() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.prepare("a", SLICE).await.unwrap();
    driver.unprepare("a").await.unwrap();
    fail_call(&node, "nvmlDeviceCreateGpuInstanceWithPlacement", Some(1), When::Before);
    driver.expect_refused("b", SLICE, "not prepared").await;
    node.expect_hardware(&["mig"]);
}

#[tokio::test]
async fn prepare_without_cdi_directory_fails_and_leaves_nothing() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    std::fs::remove_dir(&node.paths.cdi_dir).unwrap();
    driver.expect_refused("a", SLICE, "cannot be written").await;
    driver.expect_refused("b", "gpu-0", "cannot be written").await;
    node.expect_hardware(&["off"]);
    std::fs::create_dir(&node.paths.cdi_dir).unwrap();
    node.expect_no_claim_files();
    driver.prepare("b", "gpu-0").await.unwrap();
}

#[tokio::test]
async fn prepare_without_state_directory_changes_no_hardware() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    std::fs::remove_dir(node.records_dir()).unwrap();
    driver.expect_refused("a", SLICE, "its record cannot be written or read").await;
    node.expect_hardware(&["off"]);
    std::fs::create_dir(node.records_dir()).unwrap();
    driver.prepare("a", SLICE).await.unwrap();
}

#[tokio::test]
async fn failed_release_is_finished_by_the_next_prepare() {
    for call in ["nvmlComputeInstanceDestroy", "nvmlGpuInstanceDestroy"] {
        let node = TestNode::new(H100);
        let driver = node.start_driver().await;
        driver.prepare("a", SLICE).await.unwrap();
        fail_call(&node, call, None, When::Before);
        driver.unprepare("a").await.unwrap();
        driver.expect_refused("b", "gpu-0", "claim ns/a").await;
        driver.expect_refused("a", SLICE, "claim ns/a").await;
        clear_faults(&node);
        driver.prepare("b", "gpu-0").await.unwrap();
        node.expect_hardware(&["off"]);
        driver.unprepare("b").await.unwrap();
        node.expect_no_claim_files();
    }
}

#[tokio::test]
async fn failed_undo_is_finished_by_the_next_prepare() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    fail_call(&node, "nvmlGpuInstanceCreateComputeInstance*", Some(1), When::Before);
    fail_call(&node, "nvmlGpuInstanceDestroy", Some(1), When::Before);
    driver.expect_refused("a", SLICE, "not prepared").await;
    node.expect_hardware(&["mig 19@2"]);
    driver.prepare("a", SLICE).await.unwrap();
    node.expect_hardware(&["mig 19@2+"]);
}

#[tokio::test]
async fn failed_undo_is_retried_in_the_background() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    fail_call(&node, "nvmlGpuInstanceCreateComputeInstance*", Some(1), When::Before);
    fail_call(&node, "nvmlGpuInstanceDestroy", Some(1), When::Before);
    driver.expect_refused("a", SLICE, "not prepared").await;
    until("the claim is undone", || driver.engine.held().unwrap().is_empty()).await;
    node.expect_hardware(&["mig"]);
    node.expect_no_claim_files();
}

/// While a call hangs, the claim and its retries are answered and the other GPU stays usable. When the call
/// returns, its effect is undone.
#[tokio::test]
async fn hung_create_is_answered_and_undone_on_return() {
    for (call, when) in [
        ("nvmlDeviceSetMigMode", When::Before),
        ("nvmlDeviceSetMigMode", When::After),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", When::Before),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", When::After),
        ("nvmlGpuInstanceCreateComputeInstance", When::Before),
        ("nvmlGpuInstanceCreateComputeInstance", When::After),
    ] {
        let mut node = TestNode::new(&format!("2x{H100}"));
        node.timeouts.create = Duration::from_secs(1);
        node.timeouts.mig_mode = Duration::from_secs(1);
        let driver = node.start_driver().await;
        hold_call(&node, call, when);
        driver.expect_refused("a", SLICE, "has not returned").await;
        driver.expect_refused("a", SLICE, "has not returned").await;
        driver.unprepare("a").await.unwrap();
        until("the GPU has a condition", || {
            driver.gpus.inventory().borrow().gpus.iter().any(|gpu| !gpu.conditions.is_empty())
        })
        .await;
        driver.expect_refused("b", "gpu-0", "has not returned").await;
        driver.prepare("c", "gpu-1").await.unwrap();
        clear_faults(&node);
        until("the late call is undone", || driver.engine.held().unwrap().len() == 1).await;
        until("the condition is gone", || {
            driver.gpus.inventory().borrow().gpus.iter().all(|gpu| gpu.conditions.is_empty())
        })
        .await;
        driver.prepare("b", SLICE).await.unwrap();
        assert_eq!(node.hardware(), ["mig 19@2+", "off"], "{call} held {when:?}");
    }
}

#[tokio::test]
async fn hung_destroy_is_finished_on_return() {
    for when in [When::Before, When::After] {
        let mut node = TestNode::new(H100);
        node.timeouts.destroy = Duration::from_secs(1);
        let driver = node.start_driver().await;
        driver.prepare("a", SLICE).await.unwrap();
        hold_call(&node, "nvmlGpuInstanceDestroy", when);
        driver.unprepare("a").await.unwrap();
        driver.expect_refused("b", "gpu-0", "has not returned").await;
        clear_faults(&node);
        until("the instance is gone", || node.hardware() == ["mig"]).await;
        node.expect_no_claim_files();
    }
}

#[tokio::test]
async fn claims_on_a_lost_gpu_can_be_released() {
    let node = TestNode::new(&format!("2x{H100}"));
    let driver = node.start_driver().await;
    driver.prepare("slice", SLICE).await.unwrap();
    driver.prepare("whole", "gpu-1").await.unwrap();
    for slot in [0, 1] {
        node.sim.update(|state| state.lose(slot, true)).unwrap();
    }
    driver.unprepare("slice").await.unwrap();
    driver.unprepare("whole").await.unwrap();
    node.expect_no_claim_files();
}

#[tokio::test]
async fn disabling_mig_mode_is_retried() {
    let mut node = TestNode::new(H100);
    node.hold_off = Duration::from_millis(20);
    let driver = node.start_driver().await;
    driver.prepare("a", SLICE).await.unwrap();
    fail_call(&node, "nvmlDeviceSetMigMode", Some(1), When::Before);
    driver.unprepare("a").await.unwrap();
    until("MIG mode is off", || node.hardware() == ["off"]).await;
}

/// After a reboot, the kubelet prepares every pod's claims again, before the driver's next retry.
#[tokio::test]
async fn failed_restore_is_completed_by_the_next_prepare() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    let before = driver.prepare("a", SLICE).await.unwrap();
    driver.stop().await;
    node.reboot_gpus();
    fail_call(&node, "nvmlDeviceCreateGpuInstance*", Some(1), When::Before);
    let driver = node.start_driver().await;
    assert_eq!(driver.report.failed.len(), 1, "{:?}", driver.report);
    assert_eq!(driver.prepare("a", SLICE).await.unwrap(), before);
    node.expect_hardware(&["mig 19@2+"]);
    driver.unprepare("a").await.unwrap();
    node.expect_no_claim_files();
}
