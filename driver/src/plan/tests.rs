//! Claims and what is there already, and the steps they take; this file: whole GPUs
//! and MIG instances.

mod shared;
mod shares;
mod world;

use super::*;
use divvy_api::config::{AppliedConfig, DeviceConfig, ShareConfig, Source};
use divvy_api::sharing::{Injection, Interval, MpsSettings, Sharing};
use divvy_model::inventory::{ComputeInstance, MigMode, MigProfile, MigToggle, Origin};
use divvy_model::{GpuInstance, GpuNumber, Mig, Placement};
use world::*;

#[test]
fn whole_gpu_takes_no_hardware_step_when_mig_is_off() {
    for toggle in [HOPPER, AMPERE] {
        check(&world(toggle, MigMode::Off), "gpu-0", &["write CDI file"], &["remove CDI file"]);
    }
    let mut plain = world(HOPPER, MigMode::Off);
    plain.gpu.mig = Mig::Unsupported;
    check(&plain, "gpu-0", &["write CDI file"], &["remove CDI file"]);
}

#[test]
fn whole_gpu_turns_mig_off_first() {
    let steps = ["disable MIG", "write CDI file"];
    check(&world(HOPPER, MigMode::On), "gpu-0", &steps, &["remove CDI file"]);
    // The inventory has not seen yet that we turned it on.
    let mut early = world(HOPPER, MigMode::Off);
    early.mig_enabled.insert(uuid());
    check(&early, "gpu-0", &steps, &["remove CDI file"]);
    // What was ours and is gone is nobody's, though the inventory still lists it.
    let late = world(HOPPER, MigMode::On).instance(Origin::Ours, 19, 0, 1, 1);
    check(&late, "gpu-0", &steps, &["remove CDI file"]);
}

#[test]
fn mig_device_takes_mode_instance_and_compute_instance() {
    let undo = ["remove CDI file", "destroy compute instances in 19 at 2:1", "destroy 19 at 2:1"];
    for mode in [MigMode::Off, MigMode::On] {
        check(
            &world(HOPPER, mode),
            "gpu-0-mig-1g10gb-19-2",
            &["enable MIG", "create 19 at 2:1", "create compute instance in 19 at 2:1", "write CDI file"],
            &undo,
        );
    }
    check(
        &world(AMPERE, MigMode::On),
        "gpu-0-mig-1g10gb-19-2",
        &["create 19 at 2:1", "create compute instance in 19 at 2:1", "write CDI file"],
        &undo,
    );
}

#[test]
fn several_devices_of_one_claim_are_made_in_order() {
    check(
        &world(HOPPER, MigMode::Off),
        "gpu-0-mig-1g10gb-19-0 gpu-0-mig-3g40gb-9-4",
        &[
            "enable MIG",
            "create 19 at 0:1",
            "create compute instance in 19 at 0:1",
            "create 9 at 4:4",
            "create compute instance in 9 at 4:4",
            "write CDI file",
        ],
        &[
            "remove CDI file",
            "destroy compute instances in 9 at 4:4",
            "destroy 9 at 4:4",
            "destroy compute instances in 19 at 0:1",
            "destroy 19 at 0:1",
        ],
    );
}

#[test]
fn ampere_mode_is_never_toggled() {
    check_refused(&world(AMPERE, MigMode::On), "gpu-0", "needs MIG mode off");
    check_refused(&world(AMPERE, MigMode::Off), "gpu-0-mig-1g10gb-19-0", "needs MIG mode on");
}

#[test]
fn foreign_instance_is_taken_as_it_is_and_left() {
    let whole = world(HOPPER, MigMode::On).instance(Origin::Foreign, 19, 0, 1, 1);
    check(&whole, "gpu-0-mig-1g10gb-19-0", &["write CDI file"], &["remove CDI file"]);
    assert!(planned(&whole, "gpu-0-mig-1g10gb-19-0").unwrap().meets_foreign);
    let hollow = world(HOPPER, MigMode::On).instance(Origin::Foreign, 19, 0, 1, 0);
    check(
        &hollow,
        "gpu-0-mig-1g10gb-19-0",
        &["create compute instance in 19 at 0:1", "write CDI file"],
        &["remove CDI file", "destroy compute instances in 19 at 0:1"],
    );
}

#[test]
fn foreign_instance_stands_in_the_way_of_all_else() {
    let world = world(HOPPER, MigMode::On).instance(Origin::Foreign, 19, 0, 1, 1);
    for device in ["gpu-0", "gpu-0-mig-3g40gb-9-0", "gpu-0-mig-1g10gb-me-20-0"] {
        check_refused(&world, device, "which Divvy did not make");
        assert!(planned(&world, device).unwrap_err().meets_foreign());
    }
    check(
        &world,
        "gpu-0-mig-3g40gb-9-4",
        &["enable MIG", "create 9 at 4:4", "create compute instance in 9 at 4:4", "write CDI file"],
        &["remove CDI file", "destroy compute instances in 9 at 4:4", "destroy 9 at 4:4"],
    );
}

#[test]
fn two_modes_never_live_on_one_gpu() {
    let whole = world(HOPPER, MigMode::Off).held("other", Part::Whole { gpu: uuid() });
    check_refused(&whole, "gpu-0", "claim ns/other");
    check_refused(&whole, "gpu-0-mig-1g10gb-19-0", "claim ns/other");
    let sliced = world(HOPPER, MigMode::On).held("other", Part::Instance(key(19, 0, 1)));
    check_refused(&sliced, "gpu-0", "claim ns/other");
}

#[test]
fn placements_of_two_claims_never_overlap() {
    let world = world(HOPPER, MigMode::On).held("other", Part::Instance(key(9, 0, 4)));
    for device in ["gpu-0-mig-3g40gb-9-0", "gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-me-20-3"] {
        check_refused(&world, device, "claim ns/other");
    }
    assert!(planned(&world, "gpu-0-mig-1g10gb-19-4").is_ok());
}

#[test]
fn own_devices_never_overlap() {
    for devices in [
        "gpu-0 gpu-0",
        "gpu-0 gpu-0-mig-1g10gb-19-0",
        "gpu-0-mig-1g10gb-19-0 gpu-0",
        "gpu-0-mig-1g10gb-19-0 gpu-0-mig-3g40gb-9-0",
    ] {
        check_refused(&world(HOPPER, MigMode::Off), devices, "same claim");
    }
}

#[test]
fn own_record_is_not_in_the_way() {
    let world = world(HOPPER, MigMode::Off).held("me", Part::Whole { gpu: uuid() });
    assert!(planned(&world, "gpu-0").is_ok());
}

#[test]
fn unknown_devices_and_pools_are_refused() {
    let world = world(HOPPER, MigMode::Off);
    for device in [
        "gpu-1",
        "nonsense",
        "gpu-00",
        "gpu-0-mig-1g10gb-19-7",
        "gpu-0-mig-1g10gb-18-0",
        "gpu-0-mig-2g10gb-19-0",
    ] {
        check_refused(&world, device, &format!("device {device} is not on this node"));
    }
    check_refused(&world, "elsewhere/gpu-0", "this node's pool is node");
    let mut plain = world.clone();
    plain.gpu.mig = Mig::Unsupported;
    check_refused(&plain, "gpu-0-mig-1g10gb-19-0", "is not on this node");
}

#[test]
fn unusable_gpus_are_refused() {
    let mut missing = world(HOPPER, MigMode::Off);
    missing.gpu.presence = Presence::Missing;
    check_refused(&missing, "gpu-0", "is missing");
    check_refused(&missing, "admin:gpu-0", "is missing");
    for condition in [Condition::Lost, Condition::Stuck { call: "nvmlX".into() }] {
        let mut sick = world(HOPPER, MigMode::Off);
        sick.gpu.conditions.push(condition.clone());
        check_refused(&sick, "gpu-0", &condition.to_string());
        check_refused(&sick, "gpu-0-mig-1g10gb-19-0", &condition.to_string());
    }
}

#[test]
fn administrators_look_on() {
    let busy = world(HOPPER, MigMode::On).held("other", Part::Instance(key(19, 0, 1))).instance(
        Origin::Foreign,
        9,
        4,
        4,
        1,
    );
    for devices in ["admin:gpu-0", "admin:gpu-0-mig-1g10gb-19-0", "admin:gpu-0 admin:gpu-0-mig-3g40gb-9-0"] {
        check(&busy, devices, &["write CDI file"], &["remove CDI file"]);
    }
    let plan = planned(&busy, "admin:gpu-0").unwrap();
    assert_eq!(plan.devices[0].share_id, Some("s".into()), "it is an allocation of the device by name");
    // The same claim may look at the whole GPU and own a part of it.
    assert!(planned(&world(HOPPER, MigMode::Off), "admin:gpu-0 gpu-0-mig-1g10gb-19-0").is_ok());
}

proptest::proptest! {
    /// Whatever claims come and go, the parts that are held share no memory slice,
    /// and shares of one part no memory.
    #[test]
    fn held_parts_never_share_a_slice(
        asks in proptest::collection::vec((0..6usize, 0..14usize, 0..14usize, proptest::bool::ANY), 1..30),
    ) {
        let names = [
            "gpu-0", "gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-4", "gpu-0-mig-1g10gb-me-20-0",
            "gpu-0-mig-1g10gb-me-20-6", "gpu-0-mig-3g40gb-9-0", "gpu-0-mig-3g40gb-9-4", "gpu-1",
            "share:gpu-0-timeslice", "share:gpu-0-mps", "share:gpu-0=30Gi,0", "share:gpu-0=50Gi,0",
            "share:gpu-0-mig-1g10gb-19-0=4Gi,0", "share:gpu-0-mig-3g40gb-9-4=5Gi,0",
        ];
        let mut now = world(HOPPER, MigMode::Off);
        for (claim, one, two, leaves) in asks {
            let claim = format!("c{claim}");
            now.held.retain(|holding| !(leaves && holding.claim.name == claim));
            if let Ok(plan) = planned(&now, &format!("{} {}", names[one], names[two])) {
                now.held.retain(|holding| holding.claim.name != claim);
                for device in plan.devices {
                    now = now.held_as(&claim, device.part, device.access, true);
                }
            }
            let modes: BTreeSet<Mode> = now.held.iter().map(|holding| holding.part.mode(holding.access)).collect();
            proptest::prop_assert!(modes.len() <= 1, "{:?}", now.held);
            // Those who share a part have it together.
            let mut parts: Vec<(&Part, Access)> = Vec::new();
            for holding in &now.held {
                if !parts.iter().any(|(part, access)| **part == holding.part && access.joins(holding.access)) {
                    parts.push((&holding.part, holding.access));
                }
            }
            let mut slices = [0; 8];
            for (part, _) in &parts {
                let covered = match part {
                    Part::Whole { .. } => 0..8,
                    Part::Instance(key) => key.placement.slices(),
                };
                covered.for_each(|slice| slices[slice as usize] += 1);
                let of_part = now.held.iter().filter(|holding| holding.part == **part);
                let taken: u64 = of_part.filter_map(|holding| holding.access.limits()).map(|of| of.memory).sum();
                let there = if matches!(part, Part::Whole { .. }) { 80 << 30 } else { 9856 << 20 };
                proptest::prop_assert!(taken <= there, "{:?}", now.held);
            }
            proptest::prop_assert!(slices.iter().all(|holders| *holders <= 1), "{:?}", now.held);
        }
    }
}
