//! A driver that starts where another was killed, and hardware that forgot.

use super::world::{H100, World, allocated, until};
use divvy_driver::engine::HeldState;
use divvy_driver::plan::{self, View};
use divvy_driver::records::{ClaimRecord, Locks, Records};
use divvy_model::Mig;
use std::collections::BTreeSet;
use std::time::Duration;

const SLICE: &str = "gpu-0-mig-1g10gb-19-2";

/// Leaves a record of the claim as a killed driver leaves it; the hardware is
/// the caller's.
async fn leave(world: &World, claim: &str, device: &str, state: HeldState) {
    let node = world.start().await;
    let inventory = node.gpus.inventory().borrow().clone();
    node.stop().await;
    let claim = allocated(claim, device);
    let pool = "node".into();
    let view = View { pool: &pool, inventory: &inventory, held: &[], mig_enabled: &BTreeSet::new() };
    let record = ClaimRecord { state, ..ClaimRecord::intent(&plan::plan(&claim, view).unwrap()) };
    let locks = Locks::open(&world.paths.state_dir).unwrap();
    let mut locked = locks.lock(&record.gpus(), Duration::from_secs(10)).await.unwrap();
    for gpu in locked.gpus_mut() {
        gpu.set_mig_ours(true).unwrap();
    }
    Records::open(&world.paths.state_dir).unwrap().write(&mut locked, &record).unwrap();
}

/// Does the first of the steps: mode, GPU instance, compute instance, CDI file.
fn hardware_after(world: &World, steps: usize) {
    let sim = &world.sim;
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
        std::fs::write(world.cdi_file("a"), "{}").unwrap();
    }
}

#[tokio::test]
async fn a_claim_killed_between_any_two_steps_is_undone() {
    for state in [HeldState::Intent, HeldState::Releasing] {
        for steps in 0..=4 {
            let world = World::up(H100);
            leave(&world, "a", SLICE, state).await;
            hardware_after(&world, steps);
            let node = world.start().await;
            assert_eq!(node.report.undone.len(), 1, "after {steps} steps");
            assert!(node.report.unsettled.is_empty(), "{:?}", node.report.unsettled);
            world.expect_hardware(&[if steps == 0 { "off" } else { "mig" }]);
            world.expect_no_trace();
            node.prepare("a", SLICE).await.unwrap();
            world.expect_hardware(&["mig 19@2+"]);
        }
    }
}

#[tokio::test]
async fn a_prepared_claim_is_made_again_from_any_state() {
    for steps in 0..=4 {
        let world = World::up(H100);
        leave(&world, "a", SLICE, HeldState::Prepared).await;
        hardware_after(&world, steps);
        let node = world.start().await;
        assert_eq!(node.report.restored.len(), 1, "after {steps} steps: {:?}", node.report);
        world.expect_hardware(&["mig 19@2+"]);
        assert!(node.engine.prepared(&"a".into()).is_some());
        node.unprepare("a").await.unwrap();
        world.expect_hardware(&["mig"]);
        world.expect_no_trace();
    }
}

#[tokio::test]
async fn a_reboot_keeps_what_was_prepared() {
    let world = World::up(&format!("2x{H100}"));
    let node = world.start().await;
    let devices = "gpu-1 gpu-0-mig-1g10gb-19-2 gpu-0-mig-3g40gb-9-4";
    let before = node.prepare("a", devices).await.unwrap();
    node.stop().await;
    world.reboot_gpus();
    std::fs::remove_file(world.cdi_file("a")).unwrap();
    world.expect_hardware(&["off", "off"]);

    let node = world.start().await;
    assert_eq!(node.report.restored.len(), 1);
    world.expect_hardware(&["mig 19@2+ 9@4+", "off"]);
    assert_eq!(node.engine.prepared(&"a".into()).unwrap(), before);
    assert!(world.cdi_file("a").exists());
}

#[tokio::test]
async fn instances_that_vanish_under_a_running_driver_are_made_again() {
    let world = World::up(H100);
    let node = world.start().await;
    node.prepare("a", SLICE).await.unwrap();
    until("the instance was seen", || {
        let inventory = node.gpus.inventory().borrow().clone();
        matches!(&inventory.gpus[0].mig, Mig::Supported { instances, .. } if !instances.is_empty())
    })
    .await;
    world.sim.update(|state| state.reset(0, true)).unwrap();
    until("the instance is back", || world.hardware() == ["mig 19@2+"]).await;
}

#[tokio::test]
async fn a_bad_record_is_set_aside_and_the_driver_starts() {
    let world = World::up(&format!("2x{H100}"));
    let node = world.start().await;
    node.prepare("a", SLICE).await.unwrap();
    node.prepare("b", "gpu-1").await.unwrap();
    node.stop().await;
    let path = world.claims().join("a.json");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
    std::fs::write(world.claims().join("c.json"), br#"{"format":9,"crc32":"","record":{}}"#).unwrap();
    std::fs::write(world.claims().join("b.part"), b"half").unwrap();

    let node = world.start().await;
    let causes: Vec<&str> = node.report.quarantined.iter().map(|(_, cause)| cause.as_str()).collect();
    assert!(causes[0].starts_with("damaged"), "{causes:?}");
    assert_eq!(causes[1], "written in format 9; this build reads up to 3");
    assert_eq!(World::files(&world.claims()), ["b.json"]);
    assert_eq!(World::files(&world.paths.state_dir.join("quarantine")), ["a.json.0", "c.json.0"]);
    assert_eq!(node.engine.quarantined(), 2);
    // What only the damaged record explained is reported, left, and can be claimed.
    assert_eq!(node.report.unexplained.len(), 1);
    world.expect_hardware(&["mig 19@2+", "off"]);
    assert!(node.engine.prepared(&"b".into()).is_some());
    node.unprepare("a").await.unwrap();
    node.prepare("a", SLICE).await.unwrap();
}

#[tokio::test]
async fn unexplained_instances_go_only_where_the_node_is_ours() {
    let mut world = World::up(H100);
    hardware_after(&world, 3);
    let node = world.start().await;
    assert_eq!(node.report.unexplained.len(), 1);
    assert_eq!(node.engine.unexplained()[0].profile_id, 19);
    world.expect_hardware(&["mig 19@2+"]);
    node.stop().await;

    world.exclusive = true;
    let node = world.start().await;
    assert!(node.report.unexplained.is_empty());
    world.expect_hardware(&["mig"]);
    until("the inventory shows it", || node.engine.unexplained().is_empty()).await;
}

#[tokio::test]
async fn a_gpu_that_comes_late_is_settled_when_it_comes() {
    let world = World::up(&format!("2x{H100}"));
    let node = world.start().await;
    node.prepare("a", "gpu-1-mig-1g10gb-19-2").await.unwrap();
    node.stop().await;
    world
        .sim
        .update(|state| {
            state.lose(1, false)?;
            state.reboot();
            Ok(())
        })
        .unwrap();
    let node = world.start().await;
    assert_eq!(node.report.unsettled.len(), 1);
    node.stop().await;
    world
        .sim
        .update(|state| {
            state.find(1)?;
            state.reboot();
            Ok(())
        })
        .unwrap();
    let node = world.start().await;
    assert_eq!(node.report.restored.len(), 1, "{:?}", node.report);
    world.expect_hardware(&["off", "mig 19@2+"]);
}

#[tokio::test]
async fn a_claim_of_a_missing_gpu_can_be_released() {
    for state in [HeldState::Intent, HeldState::Prepared, HeldState::Releasing] {
        let world = World::up(&format!("2x{H100}"));
        leave(&world, "a", SLICE, state).await;
        world
            .sim
            .update(|state| {
                state.lose(0, false)?;
                state.reboot();
                Ok(())
            })
            .unwrap();
        let node = world.start().await;
        node.unprepare("a").await.unwrap();
        world.expect_no_trace();
    }
}
