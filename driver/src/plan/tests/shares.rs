//! Shares of a device's memory.

use super::*;

const WHOLE: &str = "share:gpu-0=80Gi,0";
const TEN: &str = "share:gpu-0=10Gi,0";
const SLICE: &str = "share:gpu-0-mig-1g10gb-19-0=4Gi,0";

fn gpu() -> Part {
    Part::Whole { gpu: uuid() }
}

fn slice() -> Part {
    Part::Instance(key(19, 0, 1))
}

#[test]
fn a_share_takes_its_pages_and_a_share_of_everything_is_the_whole() {
    let (steps, undo) =
        (["write pages of shares", "write CDI file"], ["remove CDI file", "remove pages of shares"]);
    check(&world(HOPPER, MigMode::Off), TEN, &steps, &undo);
    for whole in [WHOLE, "share:gpu-0", "share:gpu-0=81Gi"] {
        check(&world(HOPPER, MigMode::Off), whole, &["write CDI file"], &["remove CDI file"]);
        let plan = planned(&world(HOPPER, MigMode::Off), whole).unwrap();
        assert_eq!(plan.devices[0].access, Access::Exclusive(None), "{whole}");
        assert_eq!(plan.devices[0].share_id, Some("s".into()), "the answer names it");
    }
    let steps = ["disable MIG", "write pages of shares", "write CDI file"];
    check(&world(HOPPER, MigMode::On), TEN, &steps, &undo);
    check_refused(&world(AMPERE, MigMode::On), TEN, "needs MIG mode off");
}

#[test]
fn the_first_share_of_an_instance_makes_it_and_the_last_destroys_it() {
    let undo = [
        "remove CDI file",
        "remove pages of shares",
        "destroy compute instances in 19 at 0:1",
        "destroy 19 at 0:1",
    ];
    let first = [
        "enable MIG",
        "create 19 at 0:1",
        "create compute instance in 19 at 0:1",
        "write pages of shares",
        "write CDI file",
    ];
    check(&world(HOPPER, MigMode::Off), SLICE, &first, &undo);
    check(&world(HOPPER, MigMode::Off), &format!("{SLICE} {SLICE}"), &first, &undo);
    let later = [
        "share: create 19 at 0:1",
        "share: create compute instance in 19 at 0:1",
        "write pages of shares",
        "write CDI file",
    ];
    let beside = world(HOPPER, MigMode::On).share(slice(), 4, true);
    check(&beside, SLICE, &later, &undo);
    let undo = planned(&beside, SLICE).unwrap().undo();
    let left = |world: &World| undo.iter().filter(|undo| !undo.is_others_too(&world.held)).count();
    assert_eq!(left(&beside), 2, "pages and CDI file are its own");
    assert_eq!(left(&beside.clone().share(slice(), 4, false)), 2);
    assert_eq!(left(&world(HOPPER, MigMode::On).share(Part::Instance(key(19, 1, 1)), 4, true)), 4);
}

/// Of somebody else's instance the first share makes no more than what is missing, and
/// the last takes no more away: whatever the inventory has seen meanwhile.
#[test]
fn shares_of_a_foreign_instance_leave_it_as_it_was() {
    let there = world(HOPPER, MigMode::On).instance(Origin::Foreign, 19, 0, 1, 1);
    let (steps, undo) =
        (["write pages of shares", "write CDI file"], ["remove CDI file", "remove pages of shares"]);
    check(&there, SLICE, &steps, &undo);
    let limits = ShareLimits { memory: 1 << 30, cores: 0, settings: Default::default() };
    let with = |made| there.clone().made("other", slice(), Access::Share(limits), true, made);
    check(&with(Vec::new()), SLICE, &steps, &undo);
    check(
        &with(vec![Undo::DestroyComputeInstances(key(19, 0, 1))]),
        SLICE,
        &["share: create compute instance in 19 at 0:1", "write pages of shares", "write CDI file"],
        &["remove CDI file", "remove pages of shares", "destroy compute instances in 19 at 0:1"],
    );
}

#[test]
fn shares_never_have_more_memory_than_there_is() {
    let check = |world: &World, devices: &str, fits: Result<(), &str>| match fits {
        Ok(()) => assert!(planned(world, devices).is_ok(), "{devices}"),
        Err(why) => check_refused(world, devices, why),
    };
    let free = world(HOPPER, MigMode::Off);
    let beside = free.clone().share(gpu(), 50, true).share(gpu(), 20, false);
    check(&beside, TEN, Ok(()));
    let full = "has 10Gi of memory left beside other shares on GPU-a, and the claim takes 10241Mi";
    check(&beside, "share:gpu-0=10241Mi,0", Err(full));
    check(&beside, "share:gpu-0=5Gi,0 share:gpu-0=5Gi,0", Ok(()));
    check(&beside, "share:gpu-0=5Gi,0 share:gpu-0=6Gi,0", Err("has 5Gi of memory left"));
    check(&free.clone().share(slice(), 9, true), SLICE, Err("has 640Mi of memory left"));
    check(&free.share(Part::Instance(key(19, 1, 1)), 9, true), SLICE, Ok(()));
}

#[test]
fn shares_are_never_guaranteed_more_compute_time_than_there_is() {
    let free = world(HOPPER, MigMode::Off);
    let taken = |cores| {
        let limits = ShareLimits { memory: 1 << 30, cores, settings: Default::default() };
        free.clone().held_as("other", gpu(), Access::Share(limits), true)
    };
    let cores = |world: &World, devices: &str| {
        let plan = planned(world, devices).unwrap();
        let all: Vec<u32> = plan.devices.iter().map(|device| device.access.limits().unwrap().cores).collect();
        all
    };
    assert_eq!(cores(&free, "share:gpu-0=10Gi,30"), [30]);
    assert_eq!(cores(&free, "share:gpu-0=80Gi,100"), [100], "all memory and a limit");
    assert_eq!(cores(&taken(70), "share:gpu-0=10Gi,30"), [30]);
    assert_eq!(cores(&taken(100), TEN), [0]);
    let busy = "has 29 per cent of the cores left beside other shares on GPU-a, and the claim takes 30";
    check_refused(&taken(71), "share:gpu-0=10Gi,30", busy);
    check_refused(&free, "share:gpu-0=1Gi,60 share:gpu-0=1Gi,50", "has 40 per cent of the cores left");
}

#[test]
fn a_share_and_the_whole_exclude_each_other() {
    let free = world(HOPPER, MigMode::Off);
    for (part, devices) in [
        (gpu(), [WHOLE, "gpu-0", "gpu-0-mig-1g10gb-19-0", "share:gpu-0-timeslice", SLICE]),
        (slice(), ["gpu-0-mig-1g10gb-19-0", "share:gpu-0-mig-1g10gb-19-0", "gpu-0", TEN, "share:gpu-0-mps"]),
    ] {
        for ready in [true, false] {
            for device in devices {
                check_refused(&free.clone().share(part.clone(), 1, ready), device, "ns/other");
            }
        }
    }
    check_refused(&free.clone().held("other", gpu()), TEN, "overlaps what claim ns/other holds");
    check_refused(&free.clone().held("other", slice()), SLICE, "overlaps what claim ns/other holds");
    let overlapping = "share:gpu-0-mig-3g40gb-9-0=4Gi,0";
    check_refused(&free.clone().share(slice(), 1, true), overlapping, "overlaps what claim ns/other holds");
    for both in [format!("{TEN} gpu-0"), format!("{TEN} {SLICE}"), format!("{SLICE} gpu-0-mig-1g10gb-19-0")] {
        check_refused(&free, &both, "same claim");
    }
    assert!(planned(&free.share(gpu(), 1, true), "admin:gpu-0").is_ok());
}

#[test]
fn an_instance_that_may_be_there_or_not_is_waited_for() {
    let half = world(HOPPER, MigMode::On).share(slice(), 1, false);
    check_refused(&half, SLICE, "is shared with claim ns/other, which is half done");
    assert!(planned(&half.share(slice(), 1, true), SLICE).is_ok(), "one that is done shows that it is there");
    assert!(planned(&world(HOPPER, MigMode::Off).share(gpu(), 1, false), TEN).is_ok());
}

#[test]
fn a_share_says_how_its_limits_are_kept() {
    let free = world(HOPPER, MigMode::Off);
    let config = |config, source| [AppliedConfig { config, source }];
    let shim = ShareConfig { injection: Some(Injection::Shim), ..ShareConfig::default() };
    let shim = DeviceConfig::ShareConfig(shim);
    let plan = configured(&free, TEN, &config(shim.clone(), Source::Class)).unwrap();
    let limits = plan.devices[0].access.limits().unwrap();
    assert_eq!((limits.memory, limits.settings.injection), (10 << 30, Injection::Shim));
    let error = configured(&free, TEN, &config(shim, Source::Request)).unwrap_err().to_string();
    assert!(error.contains("injection"), "{error}");
    let turns = DeviceConfig::GpuConfig { sharing: Some(Sharing::TimeSlicing(Interval::Short)) };
    let plan = configured(&free, TEN, &config(turns.clone(), Source::Class)).unwrap();
    assert_eq!(plan.devices[0].access.setup(), None, "meant for whole GPUs");
    assert!(configured(&free, TEN, &config(turns, Source::Request)).is_err());
}

#[test]
fn what_was_never_published_is_refused() {
    let free = world(HOPPER, MigMode::Off);
    check_refused(&free, "share:gpu-0=10Gi,101", "takes 101 per cent of the cores");
    check_refused(&free, "share:gpu-0=1Ki,0", "takes 1Ki of memory, expected at least 1Mi");
}

#[test]
fn a_mode_that_is_off_is_for_the_scheduler_to_refuse() {
    let mut off = world(HOPPER, MigMode::Off);
    off.gpu.policy.modes.clear();
    off.gpu.policy.shares = false;
    for device in ["gpu-0", "gpu-0-mig-1g10gb-19-0", "share:gpu-0-timeslice", "share:gpu-0-mps", TEN, SLICE] {
        assert!(planned(&off, device).is_ok(), "{device}");
    }
}
