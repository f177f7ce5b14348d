//! Steps of claims for whole GPUs and MIG instances.

mod fixture;
mod shared;
mod shares;

use super::*;
use divvy_api::config::{AppliedConfig, DeviceConfig, ShareConfig, Source};
use divvy_api::sharing::{Injection, Interval, MpsSettings, Sharing};
use divvy_model::inventory::{ComputeInstance, MigMode, MigProfile, MigToggle, Origin};
use divvy_model::{Finding, GpuInstance, GpuNumber, HealthState, Mig, Placement, Removals};
use fixture::*;

#[test]
fn whole_gpu_takes_no_hardware_step_when_mig_is_off() {
    for toggle in [HOPPER, AMPERE] {
        check(&node(toggle, MigMode::Off), "gpu-0", &["write CDI file"], &["remove CDI file"]);
    }
    let mut plain = node(HOPPER, MigMode::Off);
    plain.gpu.mig = Mig::Unsupported;
    check(&plain, "gpu-0", &["write CDI file"], &["remove CDI file"]);
}

#[test]
fn whole_gpu_turns_mig_off_first() {
    let steps = ["disable MIG", "write CDI file"];
    check(&node(HOPPER, MigMode::On), "gpu-0", &steps, &["remove CDI file"]);
    // The inventory does not show the enabled mode yet.
    let mut early = node(HOPPER, MigMode::Off);
    early.mig_enabled.insert(uuid());
    check(&early, "gpu-0", &steps, &["remove CDI file"]);
    // An instance of Divvy without a record is gone, although the inventory still shows it.
    let late = node(HOPPER, MigMode::On).instance(Origin::Ours, 19, 0, 1, 1);
    check(&late, "gpu-0", &steps, &["remove CDI file"]);
}

#[test]
fn mig_device_takes_mode_instance_and_compute_instance() {
    let undo = ["remove CDI file", "destroy compute instances in 19 at 2:1", "destroy 19 at 2:1"];
    for mode in [MigMode::Off, MigMode::On] {
        check(
            &node(HOPPER, mode),
            "gpu-0-mig-1g10gb-19-2",
            &["enable MIG", "create 19 at 2:1", "create compute instance in 19 at 2:1", "write CDI file"],
            &undo,
        );
    }
    check(
        &node(AMPERE, MigMode::On),
        "gpu-0-mig-1g10gb-19-2",
        &["create 19 at 2:1", "create compute instance in 19 at 2:1", "write CDI file"],
        &undo,
    );
}

#[test]
fn several_devices_of_one_claim_are_made_in_order() {
    check(
        &node(HOPPER, MigMode::Off),
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
    check_refused(&node(AMPERE, MigMode::On), "gpu-0", "needs MIG mode off");
    check_refused(&node(AMPERE, MigMode::Off), "gpu-0-mig-1g10gb-19-0", "needs MIG mode on");
}

#[test]
fn foreign_instance_is_used_and_not_destroyed() {
    let whole = node(HOPPER, MigMode::On).instance(Origin::Foreign, 19, 0, 1, 1);
    check(&whole, "gpu-0-mig-1g10gb-19-0", &["write CDI file"], &["remove CDI file"]);
    assert!(planned(&whole, "gpu-0-mig-1g10gb-19-0").unwrap().involves_foreign);
    let hollow = node(HOPPER, MigMode::On).instance(Origin::Foreign, 19, 0, 1, 0);
    check(
        &hollow,
        "gpu-0-mig-1g10gb-19-0",
        &["create compute instance in 19 at 0:1", "write CDI file"],
        &["remove CDI file", "destroy compute instances in 19 at 0:1"],
    );
}

#[test]
fn foreign_instance_blocks_overlapping_devices() {
    let node = node(HOPPER, MigMode::On).instance(Origin::Foreign, 19, 0, 1, 1);
    for device in ["gpu-0", "gpu-0-mig-3g40gb-9-0", "gpu-0-mig-1g10gb-me-20-0"] {
        check_refused(&node, device, "which Divvy did not create");
        assert!(planned(&node, device).unwrap_err().may_be_outdated());
    }
    check(
        &node,
        "gpu-0-mig-3g40gb-9-4",
        &["enable MIG", "create 9 at 4:4", "create compute instance in 9 at 4:4", "write CDI file"],
        &["remove CDI file", "destroy compute instances in 9 at 4:4", "destroy 9 at 4:4"],
    );
}

#[test]
fn gpu_has_only_one_mode_at_a_time() {
    let whole = node(HOPPER, MigMode::Off).held("other", Part::Whole { gpu: uuid() });
    check_refused(&whole, "gpu-0", "claim ns/other");
    check_refused(&whole, "gpu-0-mig-1g10gb-19-0", "claim ns/other");
    let sliced = node(HOPPER, MigMode::On).held("other", Part::Instance(key(19, 0, 1)));
    check_refused(&sliced, "gpu-0", "claim ns/other");
}

#[test]
fn placements_of_two_claims_never_overlap() {
    let node = node(HOPPER, MigMode::On).held("other", Part::Instance(key(9, 0, 4)));
    for device in ["gpu-0-mig-3g40gb-9-0", "gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-me-20-3"] {
        check_refused(&node, device, "claim ns/other");
    }
    assert!(planned(&node, "gpu-0-mig-1g10gb-19-4").is_ok());
}

#[test]
fn own_devices_never_overlap() {
    for devices in [
        "gpu-0 gpu-0",
        "gpu-0 gpu-0-mig-1g10gb-19-0",
        "gpu-0-mig-1g10gb-19-0 gpu-0",
        "gpu-0-mig-1g10gb-19-0 gpu-0-mig-3g40gb-9-0",
    ] {
        check_refused(&node(HOPPER, MigMode::Off), devices, "same claim");
    }
}

#[test]
fn own_record_does_not_block_the_claim() {
    let node = node(HOPPER, MigMode::Off).held("me", Part::Whole { gpu: uuid() });
    assert!(planned(&node, "gpu-0").is_ok());
}

#[test]
fn unknown_devices_and_pools_are_refused() {
    let node = node(HOPPER, MigMode::Off);
    for device in [
        "gpu-1",
        "nonsense",
        "gpu-00",
        "gpu-0-mig-1g10gb-19-7",
        "gpu-0-mig-1g10gb-18-0",
        "gpu-0-mig-2g10gb-19-0",
    ] {
        check_refused(&node, device, &format!("device {device} is not on this node"));
    }
    check_refused(&node, "elsewhere/gpu-0", "this node's pool is node");
    let mut plain = node.clone();
    plain.gpu.mig = Mig::Unsupported;
    check_refused(&plain, "gpu-0-mig-1g10gb-19-0", "is not on this node");
}

#[test]
fn unusable_gpus_are_refused() {
    let mut missing = node(HOPPER, MigMode::Off);
    missing.gpu.presence = Presence::Missing;
    check_refused(&missing, "gpu-0", "is missing");
    check_refused(&missing, "admin:gpu-0", "is missing");
    for state in [HealthState::Lost, HealthState::Stuck, HealthState::NeedsReset] {
        let condition = Condition::Health(Finding::of_gpu(state, "nvmlX"));
        let mut failed = node(HOPPER, MigMode::Off);
        failed.gpu.conditions.push(condition.clone());
        check_refused(&failed, "gpu-0", &condition.to_string());
        check_refused(&failed, "gpu-0-mig-1g10gb-19-0", &condition.to_string());
    }
}

#[test]
fn admin_access_needs_no_hardware_step() {
    let busy = node(HOPPER, MigMode::On).held("other", Part::Instance(key(19, 0, 1))).instance(
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
    assert_eq!(plan.devices[0].share_id, Some("s".into()), "admin access is an allocation with a share ID");
    check(&busy, "admin:gpu-0-observer", &["write CDI file"], &["remove CDI file"]);
    check_refused(&busy, "gpu-0-observer", "is for monitoring only");
    // One claim may observe the whole GPU and hold a part of it.
    assert!(planned(&node(HOPPER, MigMode::Off), "admin:gpu-0 gpu-0-mig-1g10gb-19-0").is_ok());
}

proptest::proptest! {
    /// After any sequence of claims, held parts have no memory slice in common, and the shares of a
    /// part have at most the part's memory.
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
        let mut now = node(HOPPER, MigMode::Off);
        for (claim, one, two, leaves) in asks {
            let claim = format!("c{claim}");
            now.held.retain(|holding| !(leaves && holding.claim.name == claim));
            if let Ok(plan) = planned(&now, &format!("{} {}", names[one], names[two])) {
                now.held.retain(|holding| holding.claim.name != claim);
                for device in plan.devices {
                    now = now.held_as(&claim, device.part, device.access, true);
                }
            }
            let modes: BTreeSet<Mode> =
                now.held.iter().map(|holding| holding.part.mode(holding.access)).collect();
            proptest::prop_assert!(modes.len() <= 1, "{:?}", now.held);
            // Claims that share a part count once.
            let mut parts: Vec<(&Part, Access)> = Vec::new();
            for holding in &now.held {
                let counted = |(part, access): &(&Part, Access)| {
                    **part == holding.part && access.can_share_with(holding.access)
                };
                if !parts.iter().any(counted) {
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
                let limits = of_part.filter_map(|holding| holding.access.limits());
                let taken: u64 = limits.map(|limits| limits.memory).sum();
                let there = if matches!(part, Part::Whole { .. }) { 80 << 30 } else { 9856 << 20 };
                proptest::prop_assert!(taken <= there, "{:?}", now.held);
            }
            proptest::prop_assert!(slices.iter().all(|holders| *holders <= 1), "{:?}", now.held);
        }
    }
}

#[test]
fn claim_on_a_removed_device_keeps_others_off_the_gpu() {
    let mut node = node(HOPPER, MigMode::Off);
    node.gpu.policy.modes = [Mode::Whole, Mode::Mig].into();
    let entry = |claim: &str| {
        let claim = ClaimRef { namespace: "ns".into(), name: claim.into(), uid: claim.into() };
        Removals { allocated: vec![Allocated { device: "gpu-0-mps".into(), claim }], ..Removals::default() }
    };
    node.removals = entry("other");
    let why = "claim ns/me: device gpu-0 overlaps device gpu-0-mps on GPU-a, which is not published and \
               which claim ns/other is allocated; delete the pods of one of the two claims";
    check_refused(&node, "gpu-0", why);
    check_refused(&node, "gpu-0-mig-1g10gb-19-0", "overlaps device gpu-0-mps on GPU-a");
    // Admin access reserves nothing.
    assert!(planned(&node, "admin:gpu-0").is_ok());
    // The claim itself is prepared, and a mode that is on again is charged by the scheduler.
    node.removals = entry("me");
    assert!(planned(&node, "gpu-0").is_ok());
    node.removals = entry("other");
    node.gpu.policy.modes.insert(Mode::Mps);
    assert!(planned(&node, "gpu-0").is_ok());
}
