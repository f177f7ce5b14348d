use super::*;
use divvy_api::config::{AppliedConfig, DeviceConfig, ShareConfig, Source};
use divvy_api::sharing::{Injection, Interval, MpsSettings, Sharing};
use divvy_model::inventory::{ComputeInstance, MigProfile};
use divvy_model::{GpuNumber, Placement};

/// A node with one GPU, as text: what the GPU is, what is on it, who holds what.
#[derive(Clone)]
struct World {
    gpu: Gpu,
    held: Vec<Holding>,
    mig_enabled: BTreeSet<GpuUuid>,
}

const HOPPER: MigToggle = MigToggle::Live;
const AMPERE: MigToggle = MigToggle::NeedsReset;

fn uuid() -> GpuUuid {
    "GPU-a".into()
}

fn profile(id: u32, name: &str, size: u32, starts: &[u32]) -> MigProfile {
    MigProfile {
        id,
        index: id,
        name: name.into(),
        memory_mib: 9856,
        multiprocessors: 16,
        copy_engines: 1,
        decoders: 1,
        encoders: 0,
        jpeg_engines: 1,
        ofa_engines: 0,
        max_instances: starts.len() as u32,
        placements: starts.iter().map(|start| Placement { start: *start, size }).collect(),
    }
}

fn world(toggle: MigToggle, mode: MigMode) -> World {
    let profiles = vec![
        profile(19, "1g.10gb", 1, &[0, 1, 2, 3, 4, 5, 6]),
        profile(20, "1g.10gb+me", 1, &[0, 1, 2, 3, 4, 5, 6]),
        profile(9, "3g.40gb", 4, &[0, 4]),
    ];
    let gpu = Gpu {
        number: GpuNumber(0),
        uuid: uuid(),
        minor: 0,
        product: "GPU".into(),
        brand: "Nvidia".into(),
        architecture: "Hopper".into(),
        compute_capability: (9, 0),
        memory_bytes: 80 << 30,
        addressing_mode: None,
        pci_bus_id: "0000:1a:00.0".into(),
        pcie_root: None,
        numa_node: None,
        nvlink_group: None,
        nvlink_peers: 0,
        mig: Mig::Supported { mode, toggle, profiles, instances: Vec::new() },
        presence: Presence::Present,
        conditions: Vec::new(),
        policy: Default::default(),
    };
    World { gpu, held: Vec::new(), mig_enabled: BTreeSet::new() }
}

fn key(profile_id: u32, start: u32, size: u32) -> InstanceKey {
    InstanceKey { gpu: uuid(), profile_id, placement: Placement { start, size } }
}

impl World {
    fn held(self, claim: &str, part: Part) -> Self {
        self.held_as(claim, part, Access::Exclusive(None), true)
    }

    fn held_as(self, claim: &str, part: Part, access: Access, ready: bool) -> Self {
        let made = match &part {
            Part::Whole { .. } => Vec::new(),
            Part::Instance(key) => {
                vec![Undo::DestroyGpuInstance(key.clone()), Undo::DestroyComputeInstances(key.clone())]
            }
        };
        self.made(claim, part, access, ready, made)
    }

    fn made(mut self, claim: &str, part: Part, access: Access, ready: bool, made: Vec<Undo>) -> Self {
        let claim = ClaimRef { namespace: "ns".into(), name: claim.into(), uid: claim.into() };
        self.held.push(Holding { claim, part, access, ready, made });
        self
    }

    /// Another claim with so many GiB of the part.
    fn share(self, part: Part, gib: u64, ready: bool) -> Self {
        let limits = ShareLimits { memory: gib << 30, cores: 0, settings: Default::default() };
        self.held_as("other", part, Access::Share(limits), ready)
    }

    /// Another claim that is prepared and shares the whole GPU so.
    fn shared(self, setup: Setup) -> Self {
        self.held_as("other", Part::Whole { gpu: uuid() }, Access::Shared(setup), true)
    }

    fn instance(mut self, origin: Origin, profile_id: u32, start: u32, size: u32, computes: u32) -> Self {
        if let Mig::Supported { instances, .. } = &mut self.gpu.mig {
            let compute_instances = (0..computes)
                .map(|id| ComputeInstance { id, profile_id: 0, uuid: format!("MIG-{id}") })
                .collect();
            let placement = Placement { start, size };
            instances.push(GpuInstance { id: 7, profile_id, placement, compute_instances, origin });
        }
        self
    }
}

/// Plans a claim for these devices; `admin:` and `share:` before a name say how it is held,
/// and `=10Gi` or `=10Gi,30` behind it how much memory and cores were consumed.
fn planned(world: &World, devices: &str) -> Result<Plan, PlanError> {
    configured(world, devices, &[])
}

/// The same with these configurations for all of them.
fn configured(world: &World, devices: &str, configs: &[AppliedConfig]) -> Result<Plan, PlanError> {
    let device = |text: &str| {
        let (hold, name) = match text.split_once(':') {
            Some(("admin", name)) => (Hold::Admin, name),
            Some((_, name)) => {
                let (name, amounts) = name.split_once('=').unwrap_or((name, ""));
                let amounts = amounts.split_terminator(',').map(|amount| amount.parse().unwrap());
                let consumed = ["memory", "cores"].map(str::to_owned).into_iter().zip(amounts).collect();
                (Hold::Share { id: ShareId::from("s"), consumed }, name)
            }
            None => (Hold::Exclusive, text),
        };
        let (pool, name) = name.split_once('/').unwrap_or(("node", name));
        AllocatedDevice {
            request: "r".into(),
            chosen: "r".into(),
            pool: pool.into(),
            device: name.into(),
            hold,
            configs: configs.to_vec(),
        }
    };
    let claim = AllocatedClaim {
        claim: ClaimRef { namespace: "ns".into(), name: "me".into(), uid: "me".into() },
        pod_claim: None,
        devices: devices.split_whitespace().map(device).collect(),
    };
    let inventory = Inventory { gpus: vec![world.gpu.clone()], ..Inventory::default() };
    let pool = PoolName::from("node");
    plan(
        &claim,
        View { pool: &pool, inventory: &inventory, held: &world.held, mig_enabled: &world.mig_enabled },
    )
}

/// The steps, and what undoes them, last first.
#[track_caller]
fn check(world: &World, devices: &str, steps: &[&str], undo: &[&str]) {
    check_plan(&planned(world, devices).unwrap(), steps, undo);
}

#[track_caller]
fn check_plan(plan: &Plan, steps: &[&str], undo: &[&str]) {
    let short = |text: String| text.replace("GPU instance of profile ", "").replace(" on GPU-a", "");
    let have: Vec<String> = plan.steps.iter().map(|step| short(step.to_string())).collect();
    let back: Vec<String> = plan.undo().iter().rev().map(|undo| short(undo.to_string())).collect();
    assert_eq!((have, back), (owned(steps), owned(undo)));
}

fn owned(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[track_caller]
fn check_refused(world: &World, devices: &str, because: &str) {
    let error = planned(world, devices).unwrap_err().to_string();
    assert!(error.contains(because), "{error}");
    assert!(error.contains("ns/me"), "the message names the claim: {error}");
}

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
    // The same claim may look at the whole GPU and own a part of it.
    assert!(planned(&world(HOPPER, MigMode::Off), "admin:gpu-0 gpu-0-mig-1g10gb-19-0").is_ok());
}

const DEFAULT: Setup = Setup::Timeslice(Interval::Default);
const LONG: Setup = Setup::Timeslice(Interval::Long);

fn mps(threads: u32, memory_mib: u64) -> Setup {
    Setup::Mps(MpsLimits { threads: Some(threads), memory_mib: Some(memory_mib), multi_user: None })
}

/// A node whose administrator chose long time slices.
fn long() -> World {
    let mut world = world(HOPPER, MigMode::Off);
    world.gpu.policy.interval = Interval::Long;
    world
}

#[test]
fn the_first_time_slice_sets_the_interval_and_the_last_resets_it() {
    let steps = ["set time slice Long", "write CDI file"];
    check(&long(), "share:gpu-0-timeslice", &steps, &["remove CDI file", "reset time slice"]);
    // A server that knows no shares gives it to one claim at a time.
    check(&long(), "gpu-0-timeslice", &steps, &["remove CDI file", "reset time slice"]);
    // The default needs no way back.
    let on = world(HOPPER, MigMode::On);
    let steps = ["disable MIG", "set time slice Default", "write CDI file"];
    check(&on, "share:gpu-0-timeslice", &steps, &["remove CDI file"]);
    let mut old = world(HOPPER, MigMode::Off);
    old.gpu.compute_capability = (6, 1);
    check(&old, "share:gpu-0-timeslice", &["write CDI file"], &["remove CDI file"]);
}

#[test]
fn later_time_slices_join_the_first_whatever_the_policy_says_by_now() {
    let undo = ["remove CDI file", "reset time slice"];
    let steps = ["share: set time slice Long", "write CDI file"];
    let joined = planned(&world(HOPPER, MigMode::Off).shared(LONG), "share:gpu-0-timeslice").unwrap();
    check_plan(&joined, &steps, &undo);
    assert_eq!(joined.devices[0].access, Access::Shared(LONG));
    // One that is half done may have set nothing.
    let half = long().held_as("other", Part::Whole { gpu: uuid() }, Access::Shared(DEFAULT), false);
    check(&half, "share:gpu-0-timeslice", &["set time slice Long", "write CDI file"], &undo);
}

#[test]
fn the_undo_of_what_is_shared_is_left_to_the_last() {
    let undo = planned(&long(), "share:gpu-0-timeslice").unwrap().undo();
    let left = |world: &World| undo.iter().filter(|undo| !undo.is_others_too(&world.held)).count();
    assert_eq!(left(&long()), 2);
    assert_eq!(left(&long().shared(LONG)), 1, "the CDI file is its own");
    assert_eq!(left(&long().shared(mps(10, 10))), 2);
    let undo = planned(&long(), "share:gpu-0-mps").unwrap().undo();
    let left = |world: &World| undo.iter().filter(|undo| !undo.is_others_too(&world.held)).count();
    assert_eq!(left(&long()), 3);
    assert_eq!(left(&long().shared(mps(10, 10))), 1);
    let in_instance = Access::Exclusive(Some(mps(10, 10)));
    assert_eq!(left(&long().held_as("other", Part::Instance(key(19, 0, 1)), in_instance, true)), 3);
}

#[test]
fn the_first_mps_client_starts_the_daemon_and_later_ones_ask_for_more() {
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
    // Two shares of one claim are one daemon.
    check(&long(), "share:gpu-0-mps share:gpu-0-mps", &[mode, start, "write CDI file"], &undo);
    let plan = planned(&long(), "share:gpu-0-mps").unwrap();
    let limits = MpsLimits { threads: Some(25), memory_mib: Some(20 << 10), multi_user: None };
    assert!(plan.steps.contains(&Step::StartMps { part: Part::Whole { gpu: uuid() }, limits }));
    assert_eq!(plan.devices[0].access, Access::Shared(Setup::Mps(limits)));
}

#[test]
fn a_gpu_has_one_mode_at_a_time() {
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
            let world = world(HOPPER, MigMode::Off).held_as("other", part.clone(), access, ready);
            for (wanted, device) in devices {
                if wanted != held {
                    let why = format!("in mode {wanted}, and claim ns/other holds it in mode {held}");
                    check_refused(&world, device, &why);
                } else if wanted == "whole" {
                    check_refused(&world, device, "overlaps what claim ns/other holds");
                } else {
                    assert!(planned(&world, device).is_ok(), "{device} beside {held}");
                }
            }
        }
    }
    for (one, device) in devices {
        for (two, other) in devices {
            let both = planned(&world(HOPPER, MigMode::Off), &format!("{device} {other}"));
            assert_eq!(both.is_ok(), one == two && !["whole", "mig"].contains(&one), "{one} and {two}");
        }
    }
}

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
    check_refused(
        &free,
        "share:gpu-0=10Gi,30",
        "30 per cent of the cores, and compute time is not divided yet",
    );
    check_refused(&free, "share:gpu-0=1Ki,0", "takes 1Ki of memory, expected at least 1Mi");
}

#[test]
fn a_sick_daemon_stands_in_the_way_of_its_own_device_only() {
    let mut sick = world(HOPPER, MigMode::Off);
    sick.gpu.conditions.push(Condition::Mps { cause: "down".into() });
    check_refused(&sick, "share:gpu-0-mps", "MPS control daemon is down");
    for device in ["gpu-0", "gpu-0-mig-1g10gb-19-0", "share:gpu-0-timeslice", "admin:gpu-0-mps"] {
        assert!(planned(&sick, device).is_ok(), "{device}");
    }
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

#[test]
fn pods_of_one_claim_share_its_device_as_configured() {
    let config = |sharing| {
        [AppliedConfig { config: DeviceConfig::GpuConfig { sharing: Some(sharing) }, source: Source::Class }]
    };
    let turns = config(Sharing::TimeSlicing(Interval::Short));
    let plan = configured(&long(), "gpu-0", &turns).unwrap();
    let undo = ["remove CDI file", "reset time slice"];
    check_plan(&plan, &["set time slice Short", "write CDI file"], &undo);
    assert_eq!(plan.devices[0].access, Access::Exclusive(Some(Setup::Timeslice(Interval::Short))));
    let clients = config(Sharing::Mps(MpsSettings::default()));
    check_plan(
        &configured(&long(), "gpu-0", &clients).unwrap(),
        &["set compute mode EXCLUSIVE_PROCESS", "start MPS control daemon for GPU-a", "write CDI file"],
        &["remove CDI file", "stop MPS control daemon for GPU-a", "reset compute mode"],
    );
    // Not meant for what it does not fit.
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
    // The daemon of a MIG instance comes after it; there is no compute mode.
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
    // All devices here are of one request, and its container reaches one daemon.
    refused(
        "gpu-0-mig-1g10gb-19-0 gpu-0-mig-1g10gb-19-2",
        &slices,
        "a container reaches one only; ask for one device per request",
    );
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
