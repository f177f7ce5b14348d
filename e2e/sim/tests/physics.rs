//! MIG rules: the listings of real cards, and properties that hold after any sequence of
//! operations.

use divvy_sim::catalogue::{self, GiProfile};
use divvy_sim::code::Code;
use divvy_sim::mig::{self, InstanceSeed};
use divvy_sim::state::{Energy, Gpu, Health, Holder, Host, Loss, MigMode, Placement, Process, ProcessKind};
use proptest::prelude::*;
use std::collections::BTreeMap;

const SEED: InstanceSeed = InstanceSeed { generation: 1, salt: 0 };

fn gpu(model: &str, on: bool) -> Gpu {
    Gpu {
        model: catalogue::find(model).expect("in the catalogue"),
        uuid: "GPU-test".to_owned(),
        serial: String::new(),
        pdi: 42,
        minor: 0,
        node: true,
        node_due_ms: None,
        bdf: "0000:0a:00.0".to_owned(),
        pcie_root: "pci0000:07".to_owned(),
        bridges: Vec::new(),
        numa: None,
        module: 1,
        lost: false,
        loss: Loss::default(),
        missing: false,
        dead: false,
        epoch: 1,
        mig: MigMode { current: on, pending: on },
        compute_mode: 0,
        persistence: false,
        timeslice: 0,
        instances: Vec::new(),
        processes: Vec::new(),
        holders: Vec::new(),
        health: Health::default(),
        limits: Vec::new(),
        energy: Energy::default(),
    }
}

fn process(instance: Option<(u32, u32)>) -> Process {
    Process { pid: 7, name: "train".to_owned(), kind: ProcessKind::Compute, instance, memory_mib: 1 }
}

fn holder(gi: Option<u32>) -> Holder {
    Holder { pid: 8, name: "nv-hostengine".to_owned(), gi }
}

#[test]
fn instances_at_different_placements_have_distinct_ids() {
    for model in catalogue::all().map(catalogue::Model::row) {
        let Some(geometry) = &model.mig else { continue };
        let mut ids: BTreeMap<u32, Placement> = BTreeMap::new();
        for place in geometry.profiles.iter().flat_map(GiProfile::placements) {
            let id = mig::gi_id(geometry.grid, place);
            assert!(id < 15, "{} {place} has id {id}", model.key);
            assert_eq!(*ids.entry(id).or_insert(place), place, "{}", model.key);
        }
    }
}

/// Creates instances of the profiles without placements. Returns their ids, or the error that ended
/// it.
fn created(model: &str, profiles: &[u32]) -> Vec<Result<u32, Code>> {
    let mut gpu = gpu(model, true);
    let one = |id: &u32| mig::create_gi(&mut gpu, *id, None, SEED).map(|gi| gi.id);
    profiles.iter().map(one).collect()
}

#[test]
fn default_placements_match_real_drivers() {
    let check = |model: &str, profiles: &[u32], ids: &[u32]| {
        let got: Result<Vec<u32>, Code> = created(model, profiles).into_iter().collect();
        assert_eq!(got.as_deref(), Ok(ids), "{model} {profiles:?}");
    };
    for model in ["H100-SXM5-80GB", "A100-SXM4-40GB", "GH200-96GB", "B200-180GB"] {
        check(model, &[19; 7], &[13, 11, 12, 7, 8, 9, 10]);
        check(model, &[9, 19, 14, 19], &[2, 7, 4, 8]);
        check(model, &[14, 19, 19, 19, 19, 19], &[5, 13, 7, 8, 9, 10]);
        check(model, &[9, 9], &[2, 1]);
        check(model, &[0], &[0]);
    }
    check("A30-24GB", &[14; 4], &[3, 4, 5, 6]);
    check("A30-24GB", &[5, 5], &[1, 2]);
    check("RTX-PRO-6000", &[14; 4], &[3, 4, 5, 6]);
    check("RTX-PRO-6000", &[5, 5], &[1, 2]);
    check("RTX-PRO-6000", &[65, 67, 67, 67], &[3, 4, 5, 6]);
}

#[test]
fn instances_that_do_not_fit_are_refused() {
    let check = |model: &str, profiles: &[u32]| {
        let got = created(model, profiles);
        let (last, before) = got.split_last().expect("at least one");
        assert!(before.iter().all(Result::is_ok), "{model} {profiles:?}: {got:?}");
        assert_eq!(*last, Err(Code::InsufficientResources), "{model} {profiles:?}");
    };
    check("H100-SXM5-80GB", &[19, 19, 14, 9]);
    check("H100-SXM5-80GB", &[20, 20]);
    check("H100-SXM5-80GB", &[0, 19]);
    // All media engines are in one instance, so only profiles without them remain.
    check("RTX-PRO-6000", &[65, 14]);
    check("RTX-PRO-6000", &[64, 21]);
}

/// All refusals of the instance calls, on an H100 with MIG on or off.
#[test]
fn refusals_have_nvml_codes() {
    type Act = fn(&mut Gpu) -> Result<(), Code>;
    let made = |profile| move |gpu: &mut Gpu| mig::create_gi(gpu, profile, None, SEED).map(drop);
    let check = |on: bool, before: &[&dyn Fn(&mut Gpu)], act: &dyn Fn(&mut Gpu) -> Result<(), Code>, code| {
        let mut gpu = gpu("H100-SXM5-80GB", on);
        before.iter().for_each(|step| step(&mut gpu));
        let untouched = gpu.clone();
        assert_eq!(act(&mut gpu), Err(code));
        assert_eq!(gpu, untouched, "a refusal changes nothing");
    };
    let at = |start, size| {
        move |gpu: &mut Gpu| mig::create_gi(gpu, 19, Some(Placement { start, size }), SEED).map(drop)
    };
    let one = |gpu: &mut Gpu| {
        mig::create_gi(gpu, 19, Some(Placement { start: 0, size: 1 }), SEED).expect("free slices");
    };
    let ci = |gpu: &mut Gpu| {
        mig::create_ci(gpu, 7, 0, None, SEED).expect("free slices");
    };
    let destroy_gi: Act = |gpu| mig::destroy_gi(gpu, 7);
    let destroy_ci: Act = |gpu| mig::destroy_ci(gpu, 7, 0);
    check(false, &[], &made(19), Code::NotSupported);
    check(true, &[], &made(18), Code::NotSupported);
    check(true, &[], &at(7, 1), Code::InvalidArgument);
    check(true, &[], &at(0, 2), Code::InvalidArgument);
    check(true, &[&one], &at(0, 1), Code::InsufficientResources);
    check(true, &[&|gpu| gpu.processes.push(process(None))], &made(19), Code::InUse);
    check(true, &[&|gpu| gpu.lost = true], &made(19), Code::GpuIsLost);
    check(true, &[], &destroy_gi, Code::NotFound);
    check(false, &[], &destroy_gi, Code::NotSupported);
    check(true, &[&one, &ci], &destroy_gi, Code::InUse);
    check(true, &[&one, &|gpu| gpu.holders.push(holder(Some(7)))], &destroy_gi, Code::InUse);
    check(true, &[&one, &ci, &|gpu| gpu.processes.push(process(Some((7, 0))))], &destroy_ci, Code::InUse);
    check(true, &[&one], &destroy_ci, Code::NotFound);
    check(true, &[&one], &|gpu| mig::create_ci(gpu, 7, 1, None, SEED).map(drop), Code::NotSupported);
    check(true, &[&one], &|gpu| mig::create_ci(gpu, 8, 0, None, SEED).map(drop), Code::NotFound);
    check(
        true,
        &[&one, &ci],
        &|gpu| mig::create_ci(gpu, 7, 0, None, SEED).map(drop),
        Code::InsufficientResources,
    );
}

#[test]
fn mig_mode_change_depends_on_the_architecture() {
    struct Case {
        model: &'static str,
        vm: bool,
        busy: bool,
        activation: Result<Code, Code>,
        /// Current and pending mode after MIG was enabled.
        mode: (bool, bool),
        /// Current mode after a reset, and after a reboot.
        after: (bool, bool),
    }
    let (h100, a100) = ("H100-SXM5-80GB", "A100-SXM4-40GB");
    let (ok, in_use, reset) = (Ok(Code::Success), Ok(Code::InUse), Ok(Code::ResetRequired));
    let cases = [
        Case {
            model: h100,
            vm: false,
            busy: false,
            activation: ok,
            mode: (true, true),
            after: (true, false),
        },
        Case { model: h100, vm: true, busy: false, activation: ok, mode: (true, true), after: (true, false) },
        Case {
            model: h100,
            vm: false,
            busy: true,
            activation: in_use,
            mode: (false, false),
            after: (false, false),
        },
        Case { model: a100, vm: false, busy: false, activation: ok, mode: (true, true), after: (true, true) },
        Case {
            model: a100,
            vm: true,
            busy: false,
            activation: reset,
            mode: (false, true),
            after: (true, true),
        },
        Case {
            model: a100,
            vm: false,
            busy: true,
            activation: in_use,
            mode: (false, true),
            after: (true, true),
        },
        Case {
            model: "L40S",
            vm: false,
            busy: false,
            activation: Err(Code::NotSupported),
            mode: (false, false),
            after: (false, false),
        },
    ];
    for case in cases {
        let name = format!("{} vm {} busy {}", case.model, case.vm, case.busy);
        let host = Host { vm: case.vm, ..Host::default() };
        for index in [
            |gpu: &mut Gpu| gpu.processes.push(process(None)),
            |gpu: &mut Gpu| {
                gpu.holders.push(holder(None));
            },
        ] {
            let mut gpu = gpu(case.model, false);
            if case.busy {
                index(&mut gpu);
            }
            assert_eq!(mig::set_mode(&mut gpu, true, &host), case.activation, "{name}");
            assert_eq!((gpu.mig.current, gpu.mig.pending), case.mode, "{name}");
            let (mut reset, mut boot) = (gpu.clone(), gpu);
            mig::reset(&mut reset);
            mig::boot(&mut boot);
            assert_eq!((reset.mig.current, boot.mig.current), case.after, "{name}");
        }
    }
}

#[test]
fn mig_cannot_be_disabled_with_instances() {
    for model in ["H100-SXM5-80GB", "A100-SXM4-40GB"] {
        let mut gpu = gpu(model, true);
        let gi = mig::create_gi(&mut gpu, 9, None, SEED).expect("free slices");
        assert_eq!(mig::set_mode(&mut gpu, false, &Host::default()), Ok(Code::InUse), "{model}");
        assert!(gpu.mig.current && gpu.gi(gi.id).is_some(), "{model}");
    }
}

#[test]
fn uuid_depends_on_the_placement_and_salt() {
    let uuid = |salt, start| {
        let mut gpu = gpu("H100-SXM5-80GB", true);
        let place = Placement { start, size: 1 };
        let gi = mig::create_gi(&mut gpu, 19, Some(place), SEED).expect("free slices");
        mig::create_ci(&mut gpu, gi.id, 0, None, InstanceSeed { generation: 1, salt })
            .expect("free slices")
            .uuid
    };
    assert_eq!(uuid(0, 0), uuid(0, 0));
    assert_ne!(uuid(0, 0), uuid(0, 1));
    assert_ne!(uuid(1, 0), uuid(2, 0));
    let text = uuid(0, 0);
    assert_eq!((text.len(), &text[..4], &text[18..19]), (40, "MIG-", "5"));
    assert!("89ab".contains(&text[23..24]), "{text}");
}

/// Maximum number of instances of the profile that fit, found by trying all sets of placements from
/// `first` on.
fn most(gpu: &Gpu, profile: &GiProfile, first: u32) -> u32 {
    let tries = profile.placements().filter(|place| place.start >= first).filter_map(|place| {
        let mut next = gpu.clone();
        let made = mig::create_gi(&mut next, profile.id, Some(place), SEED);
        made.ok().map(|_| 1 + most(&next, profile, place.slices().end))
    });
    tries.max().unwrap_or(0)
}

#[derive(Clone, Debug)]
enum Step {
    Create { profile: usize, place: Option<usize> },
    Destroy { instance: usize },
    CreateCi { instance: usize, profile: u32 },
    DestroyCi { instance: usize, ci: usize },
    Mode { on: bool },
    Reset,
    Boot,
}

fn step() -> impl Strategy<Value = Step> {
    let place = proptest::option::of(0..8_usize);
    prop_oneof![
        8 => (0..16_usize, place).prop_map(|(profile, place)| Step::Create { profile, place }),
        4 => (0..8_usize).prop_map(|instance| Step::Destroy { instance }),
        4 => (0..8_usize, 0..8_u32).prop_map(|(instance, profile)| Step::CreateCi { instance, profile }),
        3 => (0..8_usize, 0..8_usize).prop_map(|(instance, ci)| Step::DestroyCi { instance, ci }),
        1 => any::<bool>().prop_map(|on| Step::Mode { on }),
        1 => Just(Step::Reset),
        1 => Just(Step::Boot),
    ]
}

fn apply(gpu: &mut Gpu, step: &Step) {
    let profiles = &gpu.model().mig.as_ref().expect("a MIG GPU").profiles;
    let instance = |at: usize| gpu.instances.get(at).map(|gi| (gi.id, gi.cis.clone()));
    match *step {
        Step::Create { profile, place } => {
            let profile = &profiles[profile % profiles.len()];
            let place = place.and_then(|at| profile.placements().nth(at));
            drop(mig::create_gi(gpu, profile.id, place, SEED));
        }
        Step::Destroy { instance: at } => {
            if let Some((id, cis)) = instance(at) {
                let result = mig::destroy_gi(gpu, id);
                assert_eq!(result.is_ok(), cis.is_empty());
            }
        }
        Step::CreateCi { instance: at, profile } => {
            if let Some((id, _)) = instance(at) {
                let room = mig::remaining_ci(gpu, id, profile);
                let made = mig::create_ci(gpu, id, profile, None, SEED);
                assert_eq!(made.is_ok(), room.is_ok_and(|room| room > 0), "{room:?} {made:?}");
            }
        }
        Step::DestroyCi { instance: at, ci } => {
            if let Some((id, cis)) = instance(at)
                && let Some(ci) = cis.get(ci)
            {
                assert_eq!(mig::destroy_ci(gpu, id, ci.id), Ok(()));
            }
        }
        Step::Mode { on } => drop(mig::set_mode(gpu, on, &Host::default())),
        Step::Reset => mig::reset(gpu),
        Step::Boot => mig::boot(gpu),
    }
}

fn check(gpu: &Gpu) {
    let mig = gpu.model().mig.as_ref().expect("a MIG GPU");
    assert!(gpu.mig.current || gpu.instances.is_empty(), "instances without MIG");
    assert!(gpu.instances.is_sorted_by_key(|gi| gi.id));
    for (at, gi) in gpu.instances.iter().enumerate() {
        let profile = gpu.model().profile(gi.profile).expect("a profile of the GPU");
        assert!(profile.placements().any(|place| place == gi.placement));
        assert_eq!(gi.id, mig::gi_id(mig.grid, gi.placement));
        assert!(gpu.instances[..at].iter().all(|other| !other.placement.overlaps(gi.placement)));
        for (at, ci) in gi.cis.iter().enumerate() {
            assert!(ci.placement.slices().end <= profile.slices(), "{ci:?}");
            assert!(gi.cis[..at].iter().all(|other| !other.placement.overlaps(ci.placement)));
            assert!(gi.cis[..at].iter().all(|other| other.id != ci.id));
        }
    }
    let uuids: std::collections::BTreeSet<&str> = gpu.mig_devices().map(|(_, ci)| ci.uuid.as_str()).collect();
    assert_eq!(uuids.len(), gpu.mig_devices().count(), "UUIDs are unique");
    for profile in &mig.profiles {
        let remaining = mig::remaining_gi(gpu, profile.id);
        match gpu.mig.current {
            true => assert_eq!(remaining, Ok(most(gpu, profile, 0)), "{}", profile.name),
            false => assert_eq!(remaining, Err(Code::NotSupported)),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_keeps_the_gpu_consistent(
        model in proptest::sample::select(vec![
            "A30-24GB", "A100-SXM4-40GB", "H100-SXM5-80GB", "B200-180GB", "RTX-PRO-6000",
        ]),
        steps in proptest::collection::vec(step(), 1..40),
    ) {
        let mut gpu = gpu(model, true);
        for step in &steps {
            apply(&mut gpu, step);
            check(&gpu);
        }
    }
}
