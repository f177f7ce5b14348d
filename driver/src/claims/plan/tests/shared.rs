//! Time-slices and MPS clients, shared by claims or by the pods of one claim.

use super::*;

const DEFAULT: Setup = Setup::Timeslice(Interval::Default);
const LONG: Setup = Setup::Timeslice(Interval::Long);

fn mps(threads: u32, memory_mib: u64) -> Setup {
    Setup::Mps(MpsLimits { threads: Some(threads), memory_mib: Some(memory_mib), multi_user: None })
}

/// A node with the long time slice configured.
fn long() -> NodeFixture {
    let mut node = node(HOPPER, MigMode::Off);
    node.gpu.policy.interval = Interval::Long;
    node
}

#[test]
fn first_time_slice_sets_interval_and_last_resets_it() {
    let steps = ["set time slice Long", "write CDI file"];
    check(&long(), "share:gpu-0-timeslice", &steps, &["remove CDI file", "reset time slice"]);
    // Without consumable capacity the API server allocates the device to one claim at a time.
    check(&long(), "gpu-0-timeslice", &steps, &["remove CDI file", "reset time slice"]);
}

#[test]
fn h9_default_interval_needs_no_step() {
    let on = node(HOPPER, MigMode::On);
    check(&on, "share:gpu-0-timeslice", &["disable MIG", "write CDI file"], &["remove CDI file"]);
    let joined = node(HOPPER, MigMode::Off).shared(DEFAULT);
    check(&joined, "share:gpu-0-timeslice", &["write CDI file"], &["remove CDI file"]);
}

#[test]
fn later_time_slices_join_despite_policy_changes() {
    let undo = ["remove CDI file", "reset time slice"];
    let steps = ["share: set time slice Long", "write CDI file"];
    let joined = planned(&node(HOPPER, MigMode::Off).shared(LONG), "share:gpu-0-timeslice").unwrap();
    check_plan(&joined, &steps, &undo);
    assert_eq!(joined.devices[0].access, Access::Shared(LONG));
    // An unfinished claim may not have set the interval.
    let half = long().held_as("other", Part::Whole { gpu: uuid() }, Access::Shared(DEFAULT), false);
    check(&half, "share:gpu-0-timeslice", &["set time slice Long", "write CDI file"], &undo);
}

#[test]
fn shared_undo_is_left_to_the_last_claim() {
    let undo = planned(&long(), "share:gpu-0-timeslice").unwrap().undo();
    let left = |node: &NodeFixture| {
        undo.iter().filter(|undo| !node.held.iter().any(|held| held.depends_on(undo))).count()
    };
    assert_eq!(left(&long()), 2);
    assert_eq!(left(&long().shared(LONG)), 1, "only the CDI file belongs to the claim alone");
    assert_eq!(left(&long().shared(mps(10, 10))), 2);
    let undo = planned(&long(), "share:gpu-0-mps").unwrap().undo();
    let left = |node: &NodeFixture| {
        undo.iter().filter(|undo| !node.held.iter().any(|held| held.depends_on(undo))).count()
    };
    assert_eq!(left(&long()), 3);
    assert_eq!(left(&long().shared(mps(10, 10))), 1);
    let in_instance = Access::Exclusive(Some(mps(10, 10)));
    assert_eq!(left(&long().held_as("other", Part::Instance(key(19, 0, 1)), in_instance, true)), 3);
}

#[test]
fn first_mps_client_starts_daemon_and_later_ones_raise_limits() {
    let undo = ["remove CDI file", "stop MPS control daemon for GPU-a", "reset compute mode"];
    let start = "start MPS control daemon for GPU-a";
    let mode = "set compute mode EXCLUSIVE_PROCESS";
    check(&long(), "share:gpu-0-mps", &[mode, start, "write CDI file"], &undo);
    let joined = long().shared(mps(90, 90));
    check(
        &joined,
        "share:gpu-0-mps",
        &["share: set compute mode EXCLUSIVE_PROCESS", start, "write CDI file"],
        &undo,
    );
    // Two shares of one claim use one daemon.
    check(&long(), "share:gpu-0-mps share:gpu-0-mps", &[mode, start, "write CDI file"], &undo);
    let plan = planned(&long(), "share:gpu-0-mps").unwrap();
    let limits = MpsLimits { threads: Some(25), memory_mib: Some(20 << 10), multi_user: None };
    assert!(plan.steps.contains(&Step::StartMps { part: Part::Whole { gpu: uuid() }, limits }));
    assert_eq!(plan.devices[0].access, Access::Shared(Setup::Mps(limits)));
}

#[test]
fn claims_of_different_modes_exclude_each_other() {
    let whole = Part::Whole { gpu: uuid() };
    let holders = [
        ("whole", whole.clone(), Access::Exclusive(None)),
        ("whole", whole.clone(), Access::Exclusive(Some(LONG))),
        ("mig", Part::Instance(key(19, 0, 1)), Access::Exclusive(None)),
        ("timeslice", whole.clone(), Access::Shared(LONG)),
        ("mps", whole, Access::Shared(mps(10, 10))),
    ];
    let devices = [
        ("whole", "gpu-0"),
        ("mig", "gpu-0-mig-1g10gb-19-4"),
        ("timeslice", "share:gpu-0-timeslice"),
        ("mps", "share:gpu-0-mps"),
    ];
    for (held, part, access) in holders {
        for ready in [true, false] {
            let node = node(HOPPER, MigMode::Off).held_as("other", part.clone(), access, ready);
            for (wanted, device) in devices {
                if wanted != held {
                    let why = format!("in mode {wanted}, and claim ns/other holds it in mode {held}");
                    check_refused(&node, device, &why);
                } else if wanted == "whole" {
                    check_refused(&node, device, "overlaps what claim ns/other holds");
                } else {
                    assert!(planned(&node, device).is_ok(), "{device} beside {held}");
                }
            }
        }
    }
    for (one, device) in devices {
        for (two, other) in devices {
            let both = planned(&node(HOPPER, MigMode::Off), &format!("{device} {other}"));
            assert_eq!(both.is_ok(), one == two && !["whole", "mig"].contains(&one), "{one} and {two}");
        }
    }
}

#[test]
fn failed_daemon_blocks_only_the_mps_device() {
    let mut failed = node(HOPPER, MigMode::Off);
    failed.gpu.conditions.push(Condition::Mps { cause: "down".into() });
    check_refused(&failed, "share:gpu-0-mps", "MPS control daemon is down");
    for device in ["gpu-0", "gpu-0-mig-1g10gb-19-0", "share:gpu-0-timeslice", "admin:gpu-0-mps"] {
        assert!(planned(&failed, device).is_ok(), "{device}");
    }
}

#[test]
fn pods_of_one_claim_share_its_device_as_configured() {
    let config = |sharing| {
        [AppliedConfig { config: DeviceConfig::GpuConfig { sharing: Some(sharing) }, source: Source::Class }]
    };
    let claim_mutexes = config(Sharing::TimeSlicing(Interval::Short));
    let plan = configured(&long(), "gpu-0", &claim_mutexes).unwrap();
    let undo = ["remove CDI file", "reset time slice"];
    check_plan(&plan, &["set time slice Short", "write CDI file"], &undo);
    assert_eq!(plan.devices[0].access, Access::Exclusive(Some(Setup::Timeslice(Interval::Short))));
    let clients = config(Sharing::Mps(MpsSettings::default()));
    check_plan(
        &configured(&long(), "gpu-0", &clients).unwrap(),
        &["set compute mode EXCLUSIVE_PROCESS", "start MPS control daemon for GPU-a", "write CDI file"],
        &["remove CDI file", "stop MPS control daemon for GPU-a", "reset compute mode"],
    );
    // Configuration of a class is ignored for devices that it does not fit.
    check_plan(
        &configured(&long(), "share:gpu-0-timeslice", &clients).unwrap(),
        &["set time slice Long", "write CDI file"],
        &undo,
    );
    check_plan(
        &configured(&long(), "admin:gpu-0", &clients).unwrap(),
        &["write CDI file"],
        &["remove CDI file"],
    );
    // The daemon of a MIG instance starts after the instance exists; MIG has no compute mode.
    let settings = MpsSettings { active_thread_percentage: Some(50), ..MpsSettings::default() };
    let config = DeviceConfig::MigDeviceConfig { sharing: Some(settings) };
    let slices = [AppliedConfig { config, source: Source::Request }];
    check_plan(
        &configured(&long(), "gpu-0-mig-1g10gb-19-2", &slices).unwrap(),
        &[
            "enable MIG",
            "create 19 at 2:1",
            "create compute instance in 19 at 2:1",
            "start MPS control daemon for 19 at 2:1",
            "write CDI file",
        ],
        &[
            "remove CDI file",
            "stop MPS control daemon for 19 at 2:1",
            "destroy compute instances in 19 at 2:1",
            "destroy 19 at 2:1",
        ],
    );
    let refused = |devices: &str, configs: &[AppliedConfig], why: &str| {
        let error = configured(&long(), devices, configs).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused("share:gpu-0-timeslice", &slices, "MigDeviceConfig");
    refused("gpu-0", &slices, "MigDeviceConfig");
    // All devices here belong to one request, and its container can use one daemon only.
    refused(
        "gpu-0-mig-1g10gb-19-0 gpu-0-mig-1g10gb-19-2",
        &slices,
        "but a container can use only one; request one device",
    );
}
