use super::*;
use divvy_api::ShareId;
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
    fn held(mut self, claim: &str, part: Part) -> Self {
        let claim = ClaimRef { namespace: "ns".into(), name: claim.into(), uid: claim.into() };
        self.held.push(Holding { claim, part });
        self
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

/// Plans a claim for these devices; `admin:` and `share:` before a name say how it is held.
fn planned(world: &World, devices: &str) -> Result<Plan, PlanError> {
    let device = |text: &str| {
        let (hold, name) = match text.split_once(':') {
            Some(("admin", name)) => (Hold::Admin, name),
            Some((_, name)) => (Hold::Share { id: ShareId::from("s"), consumed: Default::default() }, name),
            None => (Hold::Exclusive, text),
        };
        let (pool, name) = name.split_once('/').unwrap_or(("node", name));
        AllocatedDevice {
            request: "r".into(),
            pool: pool.into(),
            device: name.into(),
            hold,
            configs: Vec::new(),
        }
    };
    let claim = AllocatedClaim {
        claim: ClaimRef { namespace: "ns".into(), name: "me".into(), uid: "me".into() },
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
    let plan = planned(world, devices).unwrap();
    let short = |text: String| text.replace("GPU instance of profile ", "").replace(" on GPU-a", "");
    let have: Vec<String> = plan.steps.iter().map(|step| short(step.to_string())).collect();
    let back: Vec<String> = plan.undo().iter().rev().map(|undo| short(undo.to_string())).collect();
    assert_eq!((have.as_slice(), back.as_slice()), (&owned(steps)[..], &owned(undo)[..]));
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
fn unknown_devices_pools_and_shares_are_refused() {
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
    check_refused(&world, "share:gpu-0", "cannot be shared");
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

proptest::proptest! {
    /// Whatever claims come and go, the parts that are held share no memory slice.
    #[test]
    fn held_parts_never_share_a_slice(
        asks in proptest::collection::vec((0..6usize, 0..8usize, 0..8usize, proptest::bool::ANY), 1..30),
    ) {
        let names = [
            "gpu-0", "gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-4", "gpu-0-mig-1g10gb-me-20-0",
            "gpu-0-mig-1g10gb-me-20-6", "gpu-0-mig-3g40gb-9-0", "gpu-0-mig-3g40gb-9-4", "gpu-1",
        ];
        let mut now = world(HOPPER, MigMode::Off);
        for (claim, one, two, leaves) in asks {
            let claim = format!("c{claim}");
            now.held.retain(|holding| !(leaves && holding.claim.name == claim));
            if let Ok(plan) = planned(&now, &format!("{} {}", names[one], names[two])) {
                now.held.retain(|holding| holding.claim.name != claim);
                for device in plan.devices {
                    now = now.held(&claim, device.part);
                }
            }
            let mut slices = [0u32; 8];
            for holding in &now.held {
                let covered = match &holding.part {
                    Part::Whole { .. } => 0..8,
                    Part::Instance(key) => key.placement.slices(),
                };
                covered.for_each(|slice| slices[slice as usize] += 1);
            }
            proptest::prop_assert!(slices.iter().all(|holders| *holders <= 1), "{:?}", now.held);
        }
    }
}
