//! Health of GPUs: each error leads to a condition and a refused prepare until the hardware has recovered.

use super::test_node::{Driver, H100, TestNode, until};
use divvy_driver::gpu::HEALTH_POLL_INTERVAL;
use divvy_model::HealthState;
use divvy_sim::State;
use divvy_sim::control::{Pattern, When};
use std::time::{Duration, Instant};

const SLICE: &str = "gpu-0-mig-1g10gb-19-0";
const OTHER_SLICE: &str = "gpu-0-mig-1g10gb-19-1";
/// From a fatal XID to the condition; the publisher's write follows.
const REACTION_TIMEOUT: Duration = Duration::from_secs(1);

/// A node that reads the health of its GPUs often.
fn fast_node(gpus: &str) -> TestNode {
    let mut node = TestNode::new(gpus);
    node.health_poll = Duration::from_millis(100);
    node
}

fn change(node: &TestNode, change: impl FnOnce(&mut State)) {
    node.sim
        .update(|state| {
            change(state);
            Ok(())
        })
        .unwrap();
}

fn health(driver: &Driver, slot: usize) -> HealthState {
    driver.gpus.inventory().borrow().gpus[slot].health()
}

async fn until_health(driver: &Driver, slot: usize, state: HealthState) {
    until("the GPU has the state", || health(driver, slot) == state).await;
}

/// Waits until NVML's events arrive. Those before the registration are lost.
async fn until_events_arrive(node: &TestNode, driver: &Driver) {
    let mut events = driver.gpus.events();
    loop {
        change(node, |state| state.xid(0, 13, None).unwrap());
        if tokio::time::timeout(Duration::from_millis(100), events.recv()).await.is_ok() {
            return;
        }
    }
}

/// Sends an XID and checks that its condition appears in time.
async fn send_xid(node: &TestNode, driver: &Driver, slot: usize, xid: u64, state: HealthState) {
    let begun = Instant::now();
    change(node, |sim| sim.xid(slot, xid, None).unwrap());
    until_health(driver, slot, state).await;
    assert!(begun.elapsed() < REACTION_TIMEOUT, "XID {xid}: {:?}", begun.elapsed());
}

async fn check_h3_xid(xid: u64, state: HealthState) {
    let node = fast_node(&format!("2x{H100}"));
    // A reset sets this counter back.
    change(&node, |state| state.gpus[0].health.ecc_uncorrected = 1);
    let driver = node.start_driver().await;
    until_events_arrive(&node, &driver).await;
    send_xid(&node, &driver, 0, xid, state).await;
    driver.expect_refused("a", "gpu-0", &format!("XID {xid}:")).await;
    driver.expect_refused("a", SLICE, &format!("XID {xid}:")).await;
    driver.prepare("b", "gpu-1").await.unwrap();
    // Several polls report that no action is needed, and the mark stays.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(health(&driver, 0), state);
    change(&node, |state| state.reset(0, true).unwrap());
    until_health(&driver, 0, HealthState::Healthy).await;
    driver.prepare("a", "gpu-0").await.unwrap();
}

#[tokio::test]
async fn h3_xid_79_refuses_prepare_until_reset() {
    check_h3_xid(79, HealthState::Lost).await;
}

#[tokio::test]
async fn h3_xid_48_refuses_prepare_until_reset() {
    check_h3_xid(48, HealthState::NeedsReset).await;
}

#[tokio::test]
async fn h3_xid_95_refuses_prepare_until_reset() {
    check_h3_xid(95, HealthState::NeedsReset).await;
}

#[tokio::test]
async fn h3_xid_154_refuses_prepare_until_reset() {
    check_h3_xid(154, HealthState::NeedsReset).await;
}

#[tokio::test]
async fn h3_recovery_action_refuses_prepare_until_it_is_cleared() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    until_events_arrive(&node, &driver).await;
    let begun = Instant::now();
    change(&node, |state| {
        state.set_recovery_action(0, 2).unwrap();
        state.xid(0, 154, None).unwrap();
    });
    until_health(&driver, 0, HealthState::Lost).await;
    assert!(begun.elapsed() < REACTION_TIMEOUT);
    driver.expect_refused("a", "gpu-0", "recovery action is node reboot").await;
    change(&node, |state| state.set_recovery_action(0, 0).unwrap());
    until_health(&driver, 0, HealthState::Healthy).await;
    driver.prepare("a", "gpu-0").await.unwrap();
}

#[tokio::test]
async fn recovery_action_is_read_at_start() {
    let node = TestNode::new(H100);
    change(&node, |state| state.set_recovery_action(0, 1).unwrap());
    let driver = node.start_driver().await;
    until_health(&driver, 0, HealthState::NeedsReset).await;
    driver.expect_refused("a", "gpu-0", "recovery action is GPU reset").await;
}

#[tokio::test]
async fn xids_of_a_program_change_nothing() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    until_events_arrive(&node, &driver).await;
    let mut events = driver.gpus.events();
    for xid in [13, 31, 43, 45, 68, 109, 999] {
        change(&node, |state| state.xid(0, xid, None).unwrap());
        while !matches!(events.recv().await, Ok(divvy_nvml::Event::Xid { xid: got, .. }) if got == xid) {}
    }
    assert_eq!(health(&driver, 0), HealthState::Healthy);
    driver.prepare("a", "gpu-0").await.unwrap();
}

#[tokio::test]
async fn silent_death_is_found_by_the_poll() {
    assert_eq!(HEALTH_POLL_INTERVAL, Duration::from_secs(10), "two polls and a write fit in 30 s");
    let node = fast_node(&format!("2x{H100}"));
    let driver = node.start_driver().await;
    // No event is queued.
    change(&node, |state| state.gpus[1].lost = true);
    until_health(&driver, 1, HealthState::Lost).await;
    driver.expect_refused("a", "gpu-1", "is lost").await;
    driver.prepare("b", "gpu-0").await.unwrap();
    change(&node, |state| state.find(1).unwrap());
    until_health(&driver, 1, HealthState::Healthy).await;
}

#[tokio::test]
async fn gpu_that_asks_for_a_reset_is_refused() {
    let node = fast_node(H100);
    let driver = node.start_driver().await;
    let pattern = Pattern::new("nvmlDeviceGetTotalEccErrors");
    change(&node, |state| state.add_fault(pattern, None, When::Before, divvy_sim::Code::ResetRequired));
    until_health(&driver, 0, HealthState::NeedsReset).await;
    driver.expect_refused("a", "gpu-0", "asks for a reset").await;
    change(&node, |state| state.clear_faults(None));
    until_health(&driver, 0, HealthState::Healthy).await;
}

#[tokio::test]
async fn instance_error_concerns_only_its_placement() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    until_events_arrive(&node, &driver).await;
    driver.prepare("a", SLICE).await.unwrap();
    let gi = node.sim.read().unwrap().gpus[0].instances[0].id;
    until("the instance is known", || {
        let inventory = driver.gpus.inventory().borrow().clone();
        inventory.instance(&inventory.gpus[0].uuid, gi).is_some()
    })
    .await;
    change(&node, |state| state.xid(0, 95, Some((gi, 0))).unwrap());
    until_health(&driver, 0, HealthState::NeedsReset).await;
    driver.expect_refused("b", "gpu-0-mig-2g20gb-14-0", "GPU instance at 0 is needs-reset").await;
    driver.prepare("c", OTHER_SLICE).await.unwrap();
    // The finding ends with the instance, even if another one takes its place at once.
    driver.unprepare("a").await.unwrap();
    driver.prepare("a", SLICE).await.unwrap();
    until_health(&driver, 0, HealthState::Healthy).await;
}

#[tokio::test]
async fn mark_survives_a_restart_and_ends_with_a_reboot() {
    let node = TestNode::new(H100);
    let boot_id = node.paths.proc_root.join("sys/kernel/random/boot_id");
    let boot = |id: &str| {
        std::fs::create_dir_all(boot_id.parent().unwrap()).unwrap();
        std::fs::write(&boot_id, id).unwrap();
    };
    boot("one");
    let driver = node.start_driver().await;
    until_events_arrive(&node, &driver).await;
    send_xid(&node, &driver, 0, 79, HealthState::Lost).await;
    driver.stop().await;

    let driver = node.start_driver().await;
    driver.expect_refused("a", "gpu-0", "XID 79").await;
    driver.stop().await;

    node.reboot_gpus();
    boot("two");
    let driver = node.start_driver().await;
    driver.prepare("a", "gpu-0").await.unwrap();
}

#[tokio::test]
async fn prepare_reads_a_gpu_again_after_a_failed_reading() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.prepare("a", "gpu-0-mig-1g10gb-19-2").await.unwrap();
    let gpu = driver.gpus.inventory().borrow().gpus[0].uuid.clone();
    change(&node, |state| {
        state.add_fault(
            Pattern::new("nvmlDeviceGetGpuInstances"),
            None,
            When::Before,
            divvy_sim::Code::Unknown,
        );
    });
    driver.gpus.refresh(&gpu).await;
    driver.expect_refused("b", "gpu-0-mig-1g10gb-19-4", "MIG state cannot be read").await;
    change(&node, |state| state.clear_faults(None));
    driver.prepare("b", "gpu-0-mig-1g10gb-19-4").await.unwrap();
}
