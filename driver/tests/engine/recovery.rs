//! Start of a driver after a kill, and after hardware lost its state.

use super::test_node::{Driver, H100, TestNode, allocated, until};
use divvy_driver::claims::plan::{self, View};
use divvy_driver::claims::records::HeldState;
use divvy_driver::claims::records::{ClaimRecord, Locks, Records};
use divvy_model::Mig;
use std::collections::BTreeSet;
use std::time::Duration;

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

/// Writes a record of the claim as a killed driver leaves it. The caller sets up the hardware.
async fn write_record(node: &TestNode, claim: &str, device: &str, state: HeldState) {
    let driver = node.start_driver().await;
    let inventory = driver.gpus.inventory().borrow().clone();
    driver.stop().await;
    let claim = allocated(claim, device);
    let pool = "node".into();
    let view =
        View { pool: &pool, inventory: &inventory, held: &[], debts: &[], mig_enabled: &BTreeSet::new() };
    let record =
        ClaimRecord { state, ..ClaimRecord::intent(&plan::plan(&claim, view).unwrap(), Default::default()) };
    let locks = Locks::open(&node.paths.state_dir).unwrap();
    let mut locked = locks.lock(&record.gpus(), Duration::from_secs(10)).await.unwrap();
    for gpu in locked.gpus_mut() {
        gpu.set_mig_ours(true).unwrap();
    }
    Records::open(&node.paths.state_dir).unwrap().write(&mut locked, &record).unwrap();
}

/// Applies the first `steps` of these steps: MIG mode, GPU instance, compute instance, CDI file.
fn apply_steps(node: &TestNode, steps: usize) {
    let sim = &node.sim;
    if steps > 0 {
        sim.update(|state| state.set_mig_mode(0, true)).unwrap();
    }
    if steps > 1 {
        let placement = divvy_sim::state::Placement { start: 2, size: 1 };
        let gi = sim.update(|state| state.create_gi(0, 19, Some(placement))).unwrap();
        if steps > 2 {
            sim.update(|state| state.create_ci(0, gi.id, 0, None)).unwrap();
        }
    }
    if steps > 3 {
        std::fs::write(node.cdi_file("a"), "{}").unwrap();
    }
}

#[tokio::test]
async fn claim_killed_between_any_two_steps_is_undone() {
    for state in [HeldState::Intent, HeldState::Releasing] {
        for steps in 0..=4 {
            let node = TestNode::new(H100);
            write_record(&node, "a", SLICE, state).await;
            apply_steps(&node, steps);
            let driver = node.start_driver().await;
            assert_eq!(driver.report.undone.len(), 1, "after {steps} steps");
            assert!(driver.report.failed.is_empty(), "{:?}", driver.report.failed);
            node.expect_hardware(&[if steps == 0 { "off" } else { "mig" }]);
            node.expect_no_claim_files();
            driver.prepare("a", SLICE).await.unwrap();
            node.expect_hardware(&["mig 19@2+"]);
        }
    }
}

#[tokio::test]
async fn prepared_claim_is_restored_from_any_hardware_state() {
    for steps in 0..=4 {
        let node = TestNode::new(H100);
        write_record(&node, "a", SLICE, HeldState::Prepared).await;
        apply_steps(&node, steps);
        let driver = node.start_driver().await;
        assert_eq!(driver.report.restored.len(), 1, "after {steps} steps: {:?}", driver.report);
        node.expect_hardware(&["mig 19@2+"]);
        assert!(driver.engine.prepared(&"a".into()).is_some());
        driver.unprepare("a").await.unwrap();
        node.expect_hardware(&["mig"]);
        node.expect_no_claim_files();
    }
}

#[tokio::test]
async fn prepared_claims_are_restored_after_a_reboot() {
    let node = TestNode::new(&format!("2x{H100}"));
    let driver = node.start_driver().await;
    let devices = "gpu-1 gpu-0-mig-1g10gb-19-2 gpu-0-mig-3g40gb-9-4";
    let before = driver.prepare("a", devices).await.unwrap();
    driver.stop().await;
    node.reboot_gpus();
    std::fs::remove_file(node.cdi_file("a")).unwrap();
    node.expect_hardware(&["off", "off"]);

    let driver = node.start_driver().await;
    assert_eq!(driver.report.restored.len(), 1);
    node.expect_hardware(&["mig 19@2+ 9@4+", "off"]);
    assert_eq!(driver.engine.prepared(&"a".into()).unwrap(), before);
    assert!(node.cdi_file("a").exists());
}

#[tokio::test]
async fn instances_lost_at_runtime_are_recreated() {
    let node = TestNode::new(H100);
    let driver = node.start_driver().await;
    driver.prepare("a", SLICE).await.unwrap();
    until("the inventory shows the instance", || {
        let inventory = driver.gpus.inventory().borrow().clone();
        matches!(&inventory.gpus[0].mig, Mig::Supported { instances, .. } if !instances.is_empty())
    })
    .await;
    node.sim.update(|state| state.reset(0, true)).unwrap();
    until("the instance is back", || node.hardware() == ["mig 19@2+"]).await;
}

#[tokio::test]
async fn bad_record_is_quarantined_and_the_driver_starts() {
    let node = TestNode::new(&format!("2x{H100}"));
    let driver = node.start_driver().await;
    driver.prepare("a", SLICE).await.unwrap();
    driver.prepare("b", "gpu-1").await.unwrap();
    driver.stop().await;
    let path = node.records_dir().join("a.json");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    std::fs::write(node.records_dir().join("c.json"), br#"{"format":9,"crc32":"","record":{}}"#).unwrap();
    std::fs::write(node.records_dir().join("b.part"), b"half").unwrap();

    let driver = node.start_driver().await;
    let causes: Vec<&str> = driver.report.quarantined.iter().map(|(_, cause)| cause.as_str()).collect();
    assert!(causes[0].starts_with("damaged"), "{causes:?}");
    assert_eq!(causes[1], "written in format 9; this build reads up to 3");
    assert_eq!(TestNode::files(&node.records_dir()), ["b.json"]);
    assert_eq!(TestNode::files(&node.paths.state_dir.join("quarantine")), ["a.json.0", "c.json.0"]);
    assert_eq!(driver.engine.quarantined(), 2);
    // The instance of the damaged record is reported, stays, and can be claimed.
    assert_eq!(driver.report.unmanaged.len(), 1);
    node.expect_hardware(&["mig 19@2+", "off"]);
    assert!(driver.engine.prepared(&"b".into()).is_some());
    driver.unprepare("a").await.unwrap();
    driver.prepare("a", SLICE).await.unwrap();
}

#[tokio::test]
async fn unmanaged_instances_are_destroyed_only_if_exclusive() {
    let mut node = TestNode::new(H100);
    apply_steps(&node, 3);
    let driver = node.start_driver().await;
    assert_eq!(driver.report.unmanaged.len(), 1);
    assert_eq!(driver.engine.unmanaged()[0].profile_id, 19);
    node.expect_hardware(&["mig 19@2+"]);
    driver.stop().await;

    node.exclusive = true;
    let driver = node.start_driver().await;
    assert!(driver.report.unmanaged.is_empty());
    node.expect_hardware(&["mig"]);
    until("the inventory shows no unmanaged instance", || driver.engine.unmanaged().is_empty()).await;
}

#[tokio::test]
async fn claim_of_a_missing_gpu_is_restored_when_it_returns() {
    let node = TestNode::new(&format!("2x{H100}"));
    let driver = node.start_driver().await;
    driver.prepare("a", "gpu-1-mig-1g10gb-19-2").await.unwrap();
    driver.stop().await;
    node.sim
        .update(|state| {
            state.lose(1, false)?;
            state.reboot();
            Ok(())
        })
        .unwrap();
    let driver = node.start_driver().await;
    assert_eq!(driver.report.failed.len(), 1);
    driver.stop().await;
    node.sim
        .update(|state| {
            state.find(1)?;
            state.reboot();
            Ok(())
        })
        .unwrap();
    let driver = node.start_driver().await;
    assert_eq!(driver.report.restored.len(), 1, "{:?}", driver.report);
    node.expect_hardware(&["off", "mig 19@2+"]);
}

#[tokio::test]
async fn claim_of_a_missing_gpu_can_be_released() {
    for state in [HeldState::Intent, HeldState::Prepared, HeldState::Releasing] {
        let node = TestNode::new(&format!("2x{H100}"));
        write_record(&node, "a", SLICE, state).await;
        node.sim
            .update(|state| {
                state.lose(0, false)?;
                state.reboot();
                Ok(())
            })
            .unwrap();
        let driver = node.start_driver().await;
        driver.unprepare("a").await.unwrap();
        node.expect_no_claim_files();
    }
}

#[tokio::test]
async fn claim_sets_up_what_a_released_one_could_not_recover() {
    let node = TestNode::new(H100);
    let driver = node.start_driver_long_timeslice().await;
    for claim in ["a", "b"] {
        driver.prepare(claim, "share:gpu-0-timeslice").await.unwrap();
    }
    driver.stop().await;
    node.reboot_gpus();
    let restore = node.hide_nvidia_smi();
    let driver = node.start_driver_long_timeslice().await;
    driver.unprepare("a").await.unwrap();
    driver.prepare("c", "share:gpu-0-timeslice").await.unwrap();
    let interval = || node.sim.read().unwrap().gpus[0].timeslice;
    assert_eq!(interval(), 0);
    restore();
    until("the interval is set again", || interval() == 3).await;
}

/// Checks that an instance is created again after a reset without an event, as in the moment before
/// events arrive.
async fn check_silent_reset(node: TestNode, then: impl AsyncFnOnce(&Driver)) {
    node.sim
        .update(|state| {
            state.gpus[0].energy.mj = 1_000_000_000;
            Ok(())
        })
        .unwrap();
    let driver = node.start_driver().await;
    driver.prepare("a", "gpu-0-mig-7g80gb-0-0").await.unwrap();
    let gpu = driver.gpus.inventory().borrow().gpus[0].uuid.clone();
    // The second reading may have been scheduled before the first.
    for _ in 0..2 {
        driver.gpus.refresh(&gpu).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    node.sim
        .update(|state| {
            state.reset(0, true)?;
            state.events.queue.clear();
            Ok(())
        })
        .unwrap();
    then(&driver).await;
    until("the instance is there", || node.hardware() == ["mig 0@0+"]).await;
}

#[tokio::test]
async fn silent_reset_is_found_by_prepare() {
    check_silent_reset(TestNode::new(H100), async |driver| {
        driver.prepare("a", "gpu-0-mig-7g80gb-0-0").await.unwrap_err();
    })
    .await;
}

#[tokio::test]
async fn silent_reset_is_found_by_the_health_poll() {
    let mut node = TestNode::new(H100);
    node.health_poll = Duration::from_millis(50);
    check_silent_reset(node, async |_| ()).await;
}
