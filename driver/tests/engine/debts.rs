//! Release never depends on sick hardware: what cannot be undone stays as a debt.

use super::test_node::{Driver, H100, TestNode, until};
use divvy_api::GpuUuid;
use divvy_model::inventory::Condition;
use divvy_sim::Code;
use divvy_sim::control::{Pattern, When};
use divvy_sim::state::State;

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";
const OVERLAPPING: &str = "gpu-0-mig-2g20gb-14-2";
const BESIDE: &str = "gpu-0-mig-1g10gb-19-4";

fn change(node: &TestNode, change: impl FnOnce(&mut State)) {
    node.sim
        .update(|state| {
            change(state);
            Ok(())
        })
        .unwrap();
}

fn fail_all(node: &TestNode, call: &str, code: Code) {
    change(node, |state| state.add_fault(Pattern::new(call), None, When::Before, code));
}

fn gpu(driver: &Driver) -> GpuUuid {
    driver.gpus.inventory().borrow().gpus[0].uuid.clone()
}

/// Checks that GPU 0 has this number of debts as conditions.
async fn expect_debts(driver: &Driver, count: usize) {
    let debts = || {
        let inventory = driver.gpus.inventory().borrow().clone();
        inventory.gpus[0].conditions.iter().filter(|it| matches!(it, Condition::Debt { .. })).count()
    };
    until("the debts are shown", || debts() == count).await;
}

/// Prepares and releases a MIG claim while NVML is closed (H4).
async fn with_debt_of_a_drain(node: &TestNode) -> Driver {
    let driver = node.start_driver().await;
    driver.prepare("a", SLICE).await.unwrap();
    driver.gpus.drain().await;
    driver.unprepare("a").await.unwrap();
    node.expect_no_claim_files();
    node.expect_hardware(&["mig 19@2+"]);
    driver
}

#[tokio::test]
async fn h4_release_while_drained_is_undone_after_the_drain() {
    let node = TestNode::new(H100);
    let driver = with_debt_of_a_drain(&node).await;
    expect_debts(&driver, 1).await;
    driver.gpus.resume();
    until("the instance is gone", || node.hardware() == ["mig"]).await;
    expect_debts(&driver, 0).await;
    driver.prepare("b", "gpu-0").await.unwrap();
}

#[tokio::test]
async fn debt_survives_a_restart_and_refuses_what_overlaps() {
    let node = TestNode::new(H100);
    with_debt_of_a_drain(&node).await.stop().await;
    fail_all(&node, "nvmlGpuInstanceDestroy", Code::Unknown);
    let driver = node.start_driver().await;
    expect_debts(&driver, 1).await;
    for device in ["gpu-0", SLICE, OVERLAPPING] {
        driver.expect_refused("b", device, "released claim ns/a").await;
    }
    driver.prepare("c", BESIDE).await.unwrap();
    change(&node, |state| state.clear_faults(None));
    driver.prepare("b", SLICE).await.unwrap();
    node.expect_hardware(&["mig 19@2+ 19@4+"]);
    expect_debts(&driver, 0).await;
}

/// Checks that an instance that an administrator created at the place of a debt is not destroyed.
async fn check_void(reset: impl FnOnce(&mut State)) {
    let node = TestNode::new(H100);
    with_debt_of_a_drain(&node).await.stop().await;
    change(&node, |state| {
        reset(state);
        state.set_mig_mode(0, true).unwrap();
        let place = divvy_sim::state::Placement { start: 2, size: 1 };
        let gi = state.create_gi(0, 19, Some(place)).unwrap();
        state.create_ci(0, gi.id, 0, None).unwrap();
    });
    let driver = node.start_driver().await;
    expect_debts(&driver, 0).await;
    node.expect_hardware(&["mig 19@2+"]);
    driver.expect_refused("b", "gpu-0", "which Divvy did not create").await;
}

#[tokio::test]
async fn debt_is_void_after_a_reboot() {
    check_void(State::reboot).await;
}

#[tokio::test]
async fn debt_is_void_after_a_reset() {
    check_void(|state| state.reset(0, true).unwrap()).await;
}

#[tokio::test]
async fn reset_before_the_prepare_voids_no_debt() {
    let node = TestNode::new(H100);
    change(&node, |state| state.gpus[0].energy.mj = 1_000_000_000);
    let driver = node.start_driver_long_timeslice().await;
    until("the health was read", || driver.gpus.last_health(&gpu(&driver)).is_some()).await;
    change(&node, |state| state.reset(0, true).unwrap());
    driver.prepare("a", "share:gpu-0-timeslice").await.unwrap();
    let restore = node.hide_nvidia_smi();
    driver.unprepare("a").await.unwrap();
    expect_debts(&driver, 1).await;
    restore();
    expect_debts(&driver, 0).await;
    assert_eq!(node.sim.read().unwrap().gpus[0].timeslice, 0);
}

#[tokio::test]
async fn record_of_another_boot_destroys_no_later_instance() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.prepare("a", SLICE).await.unwrap();
    driver.stop().await;
    change(&node, |state| {
        state.reboot();
        state.set_mig_mode(0, true).unwrap();
        let gi = state.create_gi(0, 19, Some(divvy_sim::state::Placement { start: 2, size: 1 })).unwrap();
        state.create_ci(0, gi.id, 0, None).unwrap();
    });
    let driver = node.start_driver().await;
    driver.unprepare("a").await.unwrap();
    node.expect_hardware(&["mig 19@2+"]);
    node.expect_no_claim_files();
}

/// The interval is reset when `nvidia-smi` is back (H6).
#[tokio::test]
async fn h6_release_without_nvidia_smi_leaves_a_debt() {
    let node = TestNode::new(H100);
    let driver = node.start_driver_long_timeslice().await;
    driver.prepare("a", "share:gpu-0-timeslice").await.unwrap();
    let restore = node.hide_nvidia_smi();
    driver.unprepare("a").await.unwrap();
    node.expect_no_claim_files();
    expect_debts(&driver, 1).await;
    driver.expect_refused("b", "gpu-0", "reset time slice").await;
    restore();
    driver.prepare("b", "gpu-0").await.unwrap();
    assert_eq!(node.sim.read().unwrap().gpus[0].timeslice, 0);
    expect_debts(&driver, 0).await;
}

#[tokio::test]
async fn claim_on_a_sick_gpu_is_released_whatever_it_answers() {
    for code in [Code::Unknown, Code::GpuIsLost, Code::ResetRequired, Code::InUse, Code::NoPermission] {
        let node = TestNode::new(H100);
        let driver = node.start_driver().await;
        driver.prepare("a", SLICE).await.unwrap();
        fail_all(&node, "nvmlComputeInstanceDestroy", code);
        driver.unprepare("a").await.unwrap();
        node.expect_no_claim_files();
        expect_debts(&driver, 1).await;
        change(&node, |state| state.clear_faults(None));
        until("the instance is gone", || node.hardware() == ["mig"]).await;
        expect_debts(&driver, 0).await;
    }
}

#[tokio::test]
async fn claim_with_a_living_process_is_not_released() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.prepare("a", SLICE).await.unwrap();
    fail_all(&node, "nvmlComputeInstanceDestroy", Code::Unknown);
    let process = node.use_claim("a");
    assert!(driver.unprepare("a").await.unwrap_err().contains("not released yet"));
    driver.expect_refused("b", "gpu-0", "claim ns/a").await;
    drop(process);
    driver.unprepare("a").await.unwrap();
    expect_debts(&driver, 1).await;
}

#[tokio::test]
async fn quarantined_record_of_a_newer_build_keeps_its_devices() {
    let node = TestNode::new(&format!("2x{H100}"));
    let driver = node.start_driver().await;
    driver.prepare("slice", SLICE).await.unwrap();
    driver.prepare("whole", "gpu-1").await.unwrap();
    driver.stop().await;
    for claim in ["slice", "whole"] {
        let path = node.records_dir().join(format!("{claim}.json"));
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replacen("\"format\":1", "\"format\":99", 1)).unwrap();
    }
    let in_use = node.use_claim("slice");
    let driver = node.start_driver().await;
    assert_eq!(driver.report.quarantined.len(), 2);
    node.expect_hardware(&["mig 19@2+", "off"]);
    driver.expect_refused("b", "gpu-0", "released claim ns/slice").await;
    // No process uses the other claim.
    driver.prepare("c", "gpu-1").await.unwrap();
    driver.unprepare("c").await.unwrap();
    // The reconciler prepares a claim without a record again while a pod uses it.
    driver.prepare("slice", SLICE).await.unwrap();
    driver.unprepare("slice").await.unwrap();
    node.expect_hardware(&["mig 19@2+", "off"]);
    drop(in_use);
    driver.prepare("b", "gpu-0 gpu-1").await.unwrap();
    node.expect_hardware(&["off", "off"]);
}
