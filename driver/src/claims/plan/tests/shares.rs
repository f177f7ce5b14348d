//! Shares of the memory of a GPU or instance.

use super::*;

const WHOLE: &str = "share:gpu-0-share=80Gi,0";
const TEN: &str = "share:gpu-0-share=10Gi,0";
const SLICE: &str = "share:gpu-0-mig-1g10gb-19-0=4Gi,0";

fn gpu() -> Part {
    Part::Whole { gpu: uuid() }
}

fn slice() -> Part {
    Part::Instance(key(19, 0, 1))
}

#[test]
fn share_writes_pages_and_full_share_counts_as_whole_gpu() {
    let (steps, undo) =
        (["write pages of shares", "write CDI file"], ["remove CDI file", "remove pages of shares"]);
    check(&node(HOPPER, MigMode::Off), TEN, &steps, &undo);
    for whole in [WHOLE, "share:gpu-0-share", "share:gpu-0-share=81Gi"] {
        check(&node(HOPPER, MigMode::Off), whole, &["write CDI file"], &["remove CDI file"]);
        let plan = planned(&node(HOPPER, MigMode::Off), whole).unwrap();
        assert_eq!(plan.devices[0].access, Access::Exclusive(None), "{whole}");
        assert_eq!(plan.devices[0].share_id, Some("s".into()), "the answer names it");
    }
    let steps = ["disable MIG", "write pages of shares", "write CDI file"];
    check(&node(HOPPER, MigMode::On), TEN, &steps, &undo);
    check_refused(&node(AMPERE, MigMode::On), TEN, "needs MIG mode off");
}

#[test]
fn first_share_creates_instance_and_last_destroys_it() {
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
    check(&node(HOPPER, MigMode::Off), SLICE, &first, &undo);
    check(&node(HOPPER, MigMode::Off), &format!("{SLICE} {SLICE}"), &first, &undo);
    let later = [
        "share: create 19 at 0:1",
        "share: create compute instance in 19 at 0:1",
        "write pages of shares",
        "write CDI file",
    ];
    let sharers = node(HOPPER, MigMode::On).share(slice(), 4, true);
    check(&sharers, SLICE, &later, &undo);
    let undo = planned(&sharers, SLICE).unwrap().undo();
    let left = |node: &NodeFixture| {
        undo.iter().filter(|undo| !node.held.iter().any(|held| held.depends_on(undo))).count()
    };
    assert_eq!(left(&sharers), 2, "pages and CDI file belong to the claim alone");
    assert_eq!(left(&sharers.clone().share(slice(), 4, false)), 2);
    assert_eq!(left(&node(HOPPER, MigMode::On).share(Part::Instance(key(19, 1, 1)), 4, true)), 4);
}

/// Earlier versions allocated shares on the device of the whole GPU.
#[test]
fn share_of_an_earlier_version_is_planned_like_a_new_one() {
    let free = node(HOPPER, MigMode::Off);
    for sharers in [free.clone(), free.clone().share(gpu(), 50, true)] {
        let [old, new] = ["share:gpu-0=10Gi,0", TEN].map(|devices| planned(&sharers, devices).unwrap());
        assert_eq!(old.devices[0].access, new.devices[0].access);
        assert_eq!(old.devices[0].part, new.devices[0].part);
    }
    let full = "has 10Gi of memory left";
    check_refused(&free.share(gpu(), 70, true), "share:gpu-0=11Gi,0", full);
}

/// In an instance of another owner, the first share creates only what is missing, and the last share
/// destroys no more than that, even if the inventory changed meanwhile.
#[test]
fn shares_of_a_foreign_instance_leave_it_as_it_was() {
    let there = node(HOPPER, MigMode::On).instance(Origin::Foreign, 19, 0, 1, 1);
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
fn shares_never_exceed_the_memory_of_a_part() {
    let check = |node: &NodeFixture, devices: &str, fits: Result<(), &str>| match fits {
        Ok(()) => assert!(planned(node, devices).is_ok(), "{devices}"),
        Err(why) => check_refused(node, devices, why),
    };
    let free = node(HOPPER, MigMode::Off);
    let sharers = free.clone().share(gpu(), 50, true).share(gpu(), 20, false);
    check(&sharers, TEN, Ok(()));
    let full = "has 10Gi of memory left beside other shares on GPU-a, and the claim requests 10241Mi";
    check(&sharers, "share:gpu-0-share=10241Mi,0", Err(full));
    check(&sharers, "share:gpu-0-share=5Gi,0 share:gpu-0-share=5Gi,0", Ok(()));
    check(&sharers, "share:gpu-0-share=5Gi,0 share:gpu-0-share=6Gi,0", Err("has 5Gi of memory left"));
    check(&free.clone().share(slice(), 9, true), SLICE, Err("has 640Mi of memory left"));
    check(&free.share(Part::Instance(key(19, 1, 1)), 9, true), SLICE, Ok(()));
}

#[test]
fn shares_never_exceed_the_compute_time_of_a_part() {
    let free = node(HOPPER, MigMode::Off);
    let taken = |cores| {
        let limits = ShareLimits { memory: 1 << 30, cores, settings: Default::default() };
        free.clone().held_as("other", gpu(), Access::Share(limits), true)
    };
    let cores = |node: &NodeFixture, devices: &str| {
        let plan = planned(node, devices).unwrap();
        let all: Vec<u32> = plan.devices.iter().map(|device| device.access.limits().unwrap().cores).collect();
        all
    };
    assert_eq!(cores(&free, "share:gpu-0-share=10Gi,30"), [30]);
    assert_eq!(
        cores(&free, "share:gpu-0-share=80Gi,100"),
        [100],
        "all memory with a compute limit is a share"
    );
    assert_eq!(cores(&taken(70), "share:gpu-0-share=10Gi,30"), [30]);
    assert_eq!(cores(&taken(100), TEN), [0]);
    let busy = "has 29 percent of the cores left beside other shares on GPU-a, and the claim requests 30";
    check_refused(&taken(71), "share:gpu-0-share=10Gi,30", busy);
    check_refused(
        &free,
        "share:gpu-0-share=1Gi,60 share:gpu-0-share=1Gi,50",
        "has 40 percent of the cores left",
    );
}

#[test]
fn shares_and_whole_devices_exclude_each_other() {
    let free = node(HOPPER, MigMode::Off);
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
    let otherwise = "in mode share, and claim ns/other holds it in mode whole";
    check_refused(&free.clone().held("other", gpu()), TEN, otherwise);
    check_refused(&free.clone().held("other", slice()), SLICE, "overlaps what claim ns/other holds");
    let overlapping = "share:gpu-0-mig-3g40gb-9-0=4Gi,0";
    check_refused(&free.clone().share(slice(), 1, true), overlapping, "overlaps what claim ns/other holds");
    for both in [format!("{TEN} gpu-0"), format!("{TEN} {SLICE}"), format!("{SLICE} gpu-0-mig-1g10gb-19-0")] {
        check_refused(&free, &both, "same claim");
    }
    assert!(planned(&free.share(gpu(), 1, true), "admin:gpu-0").is_ok());
}

#[test]
fn share_of_unfinished_instance_is_refused_for_now() {
    let half = node(HOPPER, MigMode::On).share(slice(), 1, false);
    check_refused(&half, SLICE, "is shared with claim ns/other, which is not prepared yet");
    assert!(planned(&half.share(slice(), 1, true), SLICE).is_ok(), "a prepared claim proves that it exists");
    assert!(planned(&node(HOPPER, MigMode::Off).share(gpu(), 1, false), TEN).is_ok());
}

#[test]
fn share_settings_come_from_the_class() {
    let free = node(HOPPER, MigMode::Off);
    let config = |config, source| [AppliedConfig { config, source }];
    let shim = ShareConfig { injection: Some(Injection::Shim), ..ShareConfig::default() };
    let shim = DeviceConfig::ShareConfig(shim);
    let plan = configured(&free, TEN, &config(shim.clone(), Source::Class)).unwrap();
    let limits = plan.devices[0].access.limits().unwrap();
    assert_eq!((limits.memory, limits.settings.injection), (10 << 30, Injection::Shim));
    let error = configured(&free, TEN, &config(shim, Source::Request)).unwrap_err().to_string();
    assert!(error.contains("injection"), "{error}");
    let claim_mutexes = DeviceConfig::GpuConfig { sharing: Some(Sharing::TimeSlicing(Interval::Short)) };
    let plan = configured(&free, TEN, &config(claim_mutexes.clone(), Source::Class)).unwrap();
    assert_eq!(plan.devices[0].access.setup(), None, "applies to whole GPUs only");
    assert!(configured(&free, TEN, &config(claim_mutexes, Source::Request)).is_err());
}

#[test]
fn capacities_outside_the_published_range_are_refused() {
    let free = node(HOPPER, MigMode::Off);
    check_refused(&free, "share:gpu-0-share=10Gi,101", "consumes 101 percent of the cores");
    check_refused(&free, "share:gpu-0-share=1Ki,0", "consumes 1Ki of memory, expected at least 1Mi");
}

#[test]
fn disabled_modes_are_left_to_the_scheduler() {
    let mut off = node(HOPPER, MigMode::Off);
    off.gpu.policy.modes.clear();
    off.gpu.policy.shares = false;
    for device in ["gpu-0", "gpu-0-mig-1g10gb-19-0", "share:gpu-0-timeslice", "share:gpu-0-mps", TEN, SLICE] {
        assert!(planned(&off, device).is_ok(), "{device}");
    }
}
