//! The published devices of every GPU model, and their validation.
#![allow(clippy::unwrap_used, reason = "test helpers")]

mod common;

use common::{gpu, in_mode, inventory_of, is_observer, node, with_instance};
use divvy_api::Quantity;
use divvy_catalogue as catalogue;
use divvy_catalogue::{GpuModel, Model};
use divvy_model::inventory::{Condition, Gpu, Inventory, Mig, MigMode, MigToggle, Origin, Presence};
use divvy_model::{DeviceId, Finding, HealthState, Placement, TaintEffect};
use divvy_slices::{
    Content, Device, Pool, PoolOptions, Support, pool, pool_without_counters, same_pool, slices, validate,
};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const H100: &str = "H100-SXM5-80GB";

fn models() -> impl Iterator<Item = &'static GpuModel> {
    catalogue::all().map(Model::row)
}

fn row(model: &str) -> &'static GpuModel {
    catalogue::find(model).unwrap().row()
}

fn published(inventory: &Inventory) -> Vec<Content> {
    slices(whole(inventory))
}

fn device<'a>(pool: &'a Pool, name: &str) -> &'a Device {
    pool.devices().find(|device| device.name == name).unwrap_or_else(|| panic!("no device {name}"))
}

/// Keys of a device's taints, without the domain.
fn taints(pool: &Pool, name: &str) -> Vec<String> {
    let taints = device(pool, name).taints.iter().flatten();
    taints.map(|taint| taint.key.trim_start_matches("gpu.divvy.dev/").to_owned()).collect()
}

/// Names of the devices without taints.
fn free(pool: &Pool) -> BTreeSet<String> {
    pool.devices().filter(|device| device.taints.is_none()).map(|device| device.name.clone()).collect()
}

/// The devices that take the whole first GPU.
const WHOLE: &[&str] = &["gpu-0", "gpu-0-share", "gpu-0-timeslice", "gpu-0-mps"];

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn whole(inventory: &Inventory) -> Pool {
    ordinary(pool(inventory, &PoolOptions::default()))
}

/// The pool without observers.
fn ordinary(mut pool: Pool) -> Pool {
    pool.gpus.iter_mut().for_each(|gpu| gpu.observer.clear());
    pool
}

#[test]
fn each_present_gpu_has_a_free_observer() {
    let check = |edit: fn(&mut Gpu), support: Support, expected: &[&[&str]]| {
        let mut inventory = inventory_of(H100, 2);
        edit(&mut inventory.gpus[1]);
        let pool = pool(&inventory, &PoolOptions { support, ..PoolOptions::default() });
        assert_eq!(validate(&slices(pool.clone())), Ok(()));
        let observers: Vec<&Device> = pool.devices().filter(|device| is_observer(&device.name)).collect();
        assert!(observers.iter().all(|device| device.consumes_counters.is_none()), "it is free");
        let keys: Vec<_> = observers.iter().map(|device| taints(&pool, &device.name)).collect();
        assert_eq!(keys, expected);
    };
    let all = Support::default();
    check(|_| {}, all, &[&["observer"], &["observer"]]);
    check(|gpu| gpu.conditions = vec![finding(HealthState::Lost)], all, &[&["observer"], &["observer"]]);
    check(|gpu| gpu.presence = Presence::Unread, all, &[&["observer"], &["observer", "no-gpu-driver"]]);
    check(|gpu| gpu.presence = Presence::Missing, all, &[&["observer"]]);
    check(|_| {}, Support { counters: false, ..all }, &[&["observer"], &["observer"]]);
    // Without its taint, an ordinary claim could get it.
    check(|_| {}, Support { taints: false, ..all }, &[]);
}

#[test]
fn only_hardware_and_policy_change_the_pool() {
    for model in models().filter(|model| model.mig.is_some()) {
        let at_rest = node(vec![gpu(model, 0)]);
        let profile = at_rest.gpus[0].mig.clone();
        let Mig::Supported { profiles, toggle, .. } = profile else { panic!("{} has MIG", model.key) };
        let (id, start) = (profiles[0].id, profiles[0].placements[0].start);
        let check = |changed: Gpu, news: bool| {
            let changed = node(vec![changed]);
            assert_eq!(!same_pool(&at_rest, &changed), news, "{}: {changed:?}", model.key);
            assert_eq!(whole(&at_rest) != whole(&changed), news, "{}: {changed:?}", model.key);
        };
        let live = toggle == MigToggle::Live;
        check(in_mode(gpu(model, 0), MigMode::On), !live);
        check(with_instance(gpu(model, 0), id, start, Origin::Ours), !live);
        check(with_instance(gpu(model, 0), id, start, Origin::Foreign), true);
        check(Gpu { presence: Presence::Missing, ..gpu(model, 0) }, true);
        check(Gpu { conditions: vec![finding(HealthState::Lost)], ..gpu(model, 0) }, true);
    }
}

#[test]
fn sixteen_gpus_of_any_model_are_valid() {
    for model in models() {
        let contents = published(&inventory_of(&model.key, 16));
        assert_eq!(validate(&contents), Ok(()), "{}", model.key);
        let bytes = |content: &Content| {
            serde_json::to_vec(&content.devices).unwrap().len()
                + serde_json::to_vec(&content.counters).unwrap().len()
        };
        let devices: usize = contents.iter().map(|content| content.devices.len()).sum();
        println!(
            "16x{}: {devices} devices, {} slices, {} bytes per node, largest slice {}",
            model.key,
            contents.len(),
            contents.iter().map(bytes).sum::<usize>(),
            contents.iter().map(bytes).max().unwrap(),
        );
        // Far below etcd's limit for one object.
        assert!(contents.iter().all(|content| bytes(content) < 1 << 20));
    }
}

#[test]
fn devices_stay_below_the_attribute_limit() {
    for model in models() {
        for device in whole(&inventory_of(&model.key, 1)).devices() {
            let used = device.attributes.as_ref().unwrap().len() + device.capacity.as_ref().unwrap().len();
            assert!(used <= 32, "{} {}: {used}", model.key, device.name);
        }
    }
}

#[test]
fn published_names_parse_back() {
    for model in models() {
        for device in whole(&inventory_of(&model.key, 1)).devices() {
            let name = divvy_api::DeviceName::from(device.name.as_str());
            assert_eq!(DeviceId::try_from(&name).unwrap().to_string(), device.name);
        }
    }
}

#[test]
fn h100_matches_its_snapshot() {
    let pool = whole(&inventory_of(H100, 1));
    let shown = ["gpu-0", "gpu-0-mig-1g10gb-me-20-6", "gpu-0-mig-3g40gb-9-4"].map(|name| device(&pool, name));
    insta::assert_json_snapshot!("h100", (pool.counter_sets().collect::<Vec<_>>(), shown));
}

#[test]
fn gpu_without_mig_has_one_counter_and_no_instances() {
    let pool = whole(&inventory_of("L4", 1));
    assert_eq!(free(&pool), names(WHOLE));
    let set = pool.counter_sets().next().unwrap();
    assert_eq!(set.counters.keys().collect::<Vec<_>>(), ["memory"]);
    assert_eq!(*device(&pool, "gpu-0").consumes_counters.as_ref().unwrap()[0].counters, set.counters);
}

#[test]
fn gpu_with_unknown_memory_still_has_a_counter() {
    let mut gpu = gpu(row("L4"), 0);
    gpu.memory_bytes = 0;
    let contents = published(&node(vec![gpu]));
    assert_eq!(validate(&contents), Ok(()));
    assert_eq!(contents[0].counters[0].counters["memory"].value.0, "1");
    assert_eq!(contents[1].devices[0].capacity, None);
}

#[test]
fn managed_instances_do_not_change_the_pool() {
    let idle = in_mode(gpu(row(H100), 0), MigMode::On);
    let busy = with_instance(gpu(row(H100), 0), 19, 6, Origin::Ours);
    assert_eq!(whole(&node(vec![idle.clone()])), whole(&node(vec![busy])));
    assert_eq!(whole(&node(vec![idle])), whole(&inventory_of(H100, 1)));
}

#[test]
fn unmanaged_instance_taints_overlapping_devices() {
    let pool = whole(&node(vec![with_instance(gpu(row(H100), 0), 9, 4, Origin::Foreign)]));
    let uuid = &device(&pool, "gpu-0-mig-3g40gb-9-4").attributes.as_ref().unwrap()["uuid"];
    assert_eq!(uuid.string.as_deref(), Some("MIG-0-9-4"));
    let free = free(&pool);
    assert!(free.contains("gpu-0-mig-3g40gb-9-4") && free.contains("gpu-0-mig-4g40gb-5-0"));
    let parts = ["gpu-0-mig-7g80gb-0-0", "gpu-0-mig-1g10gb-19-4", "gpu-0-mig-1g20gb-15-6"];
    for name in WHOLE.iter().copied().chain(parts) {
        assert_eq!(taints(&pool, name), ["foreign-instance"], "{name}");
    }
}

#[test]
fn unmanaged_instance_with_all_media_engines_taints_others() {
    let pool = whole(&node(vec![with_instance(gpu(row(H100), 0), 20, 6, Origin::Foreign)]));
    assert_eq!(taints(&pool, "gpu-0-mig-1g10gb-me-20-0"), ["foreign-instance"]);
    assert!(free(&pool).contains("gpu-0-mig-1g10gb-19-0"));
}

#[test]
fn unmanaged_instance_with_two_compute_instances_is_tainted() {
    let mut gpu = with_instance(gpu(row(H100), 0), 9, 4, Origin::Foreign);
    let Mig::Supported { instances, .. } = &mut gpu.mig else { unreachable!() };
    let second = instances[0].compute_instances[0].clone();
    instances[0].compute_instances.push(second);
    assert_eq!(taints(&whole(&node(vec![gpu])), "gpu-0-mig-3g40gb-9-4"), ["foreign-instance"]);
}

#[test]
fn ampere_devices_follow_the_mig_mode() {
    let a100 = |mode| whole(&node(vec![in_mode(gpu(row("A100-SXM4-80GB"), 0), mode)]));
    assert_eq!(free(&a100(MigMode::Off)), names(WHOLE));
    for name in WHOLE {
        assert_eq!(taints(&a100(MigMode::On), name), ["mig-mode"], "{name}");
    }
    assert_eq!(free(&a100(MigMode::On)).len(), a100(MigMode::On).devices().count() - WHOLE.len());
    let costs = |pool: &Pool| {
        pool.devices().map(|d| (d.name.clone(), d.consumes_counters.clone())).collect::<Vec<_>>()
    };
    assert_eq!(costs(&a100(MigMode::On)), costs(&a100(MigMode::Off)));
}

fn check_withdrawn(edit: impl Fn(&mut Gpu), key: &str) {
    let before = whole(&inventory_of(H100, 2));
    let mut inventory = inventory_of(H100, 2);
    edit(&mut inventory.gpus[1]);
    let after = whole(&inventory);
    assert_eq!(validate(&slices(after.clone())), Ok(()));
    let shape = |pool: &Pool| {
        let cost = |d: &Device| (d.name.clone(), d.consumes_counters.clone(), d.capacity.clone());
        (pool.counter_sets().cloned().collect::<Vec<_>>(), pool.devices().map(cost).collect::<Vec<_>>())
    };
    assert_eq!(shape(&before), shape(&after), "names and counters must stay");
    for device in after.devices() {
        let expected: &[&str] = if device.name.starts_with("gpu-1") { &[key] } else { &[] };
        assert_eq!(taints(&after, &device.name), expected, "{}", device.name);
    }
}

#[test]
fn failed_gpu_keeps_its_devices_with_taints() {
    check_withdrawn(|gpu| gpu.presence = Presence::Missing, "gpu-missing");
    check_withdrawn(|gpu| gpu.presence = Presence::Unread, "no-gpu-driver");
    check_withdrawn(|gpu| gpu.conditions = vec![Condition::HandedOver], "handed-over");
    check_withdrawn(|gpu| gpu.conditions = vec![finding(HealthState::NeedsReset)], "gpu-needs-reset");
    check_withdrawn(|gpu| gpu.conditions = vec![finding(HealthState::Lost)], "gpu-lost");
    check_withdrawn(|gpu| gpu.conditions = vec![finding(HealthState::Stuck)], "gpu-stuck");
}

fn finding(state: HealthState) -> Condition {
    Condition::Health(Finding::of_gpu(state, "nvmlX (y)"))
}

/// The taints, as `key:effect`, of the devices of a GPU with a condition.
fn check_tainted(change: impl Fn(&mut Gpu), expected: &[(&str, &str)]) {
    let mut inventory = inventory_of(H100, 1);
    change(&mut inventory.gpus[0]);
    let pool = pool(&inventory, &PoolOptions::default());
    for (name, taint) in expected {
        let device = pool.devices().find(|device| device.name == *name).expect(name);
        let taints: Vec<String> =
            device.taints.iter().flatten().map(|it| format!("{}:{}", it.key, it.effect)).collect();
        let wanted = if taint.is_empty() { vec![] } else { vec![format!("gpu.divvy.dev/{taint}")] };
        assert_eq!(taints, wanted, "{name}");
    }
}

#[test]
fn condition_of_an_instance_taints_what_overlaps_it() {
    let at = Placement { start: 0, size: 1 };
    let debt = Condition::Debt { placement: Some(at), undo: "destroy".to_owned() };
    let all = [
        ("gpu-0", "not-undone:NoSchedule"),
        ("gpu-0-timeslice", "not-undone:NoSchedule"),
        ("gpu-0-mig-1g10gb-19-0", "not-undone:NoSchedule"),
        ("gpu-0-mig-1g10gb-19-1", ""),
    ];
    check_tainted(|gpu| gpu.conditions = vec![debt.clone()], &all);
    let of_instance = Finding { instance: Some(at), ..Finding::of_gpu(HealthState::NeedsReset, "XID 95") };
    let all =
        all.map(|(name, taint)| (name, if taint.is_empty() { "" } else { "gpu-needs-reset:NoSchedule" }));
    check_tainted(|gpu| gpu.conditions = vec![Condition::Health(of_instance.clone())], &all);
}

#[test]
fn administrator_chooses_the_effect_of_a_state() {
    check_tainted(|gpu| gpu.conditions = vec![finding(HealthState::Degraded)], &[("gpu-0", "")]);
    let evict = |gpu: &mut Gpu| {
        gpu.conditions = vec![finding(HealthState::Degraded), finding(HealthState::Lost)];
        gpu.policy.health.degraded = TaintEffect::None;
        gpu.policy.health.lost = TaintEffect::NoExecute;
    };
    check_tainted(evict, &[("gpu-0", "gpu-lost:NoExecute"), ("gpu-0-mig-1g10gb-19-0", "gpu-lost:NoExecute")]);
}

#[test]
fn gpu_without_readable_mig_is_published_whole() {
    let unreadable = Condition::MigUnreadable { cause: "unknown error".to_owned() };
    check_tainted(|gpu| gpu.conditions = vec![unreadable.clone()], &[("gpu-0", "mig-unreadable:NoSchedule")]);
    let never_read = |gpu: &mut Gpu| (gpu.mig, gpu.conditions) = (Mig::Unsupported, vec![unreadable.clone()]);
    check_tainted(never_read, &[("gpu-0", "")]);
}

#[test]
fn empty_node_has_one_empty_slice() {
    assert_eq!(published(&Inventory::default()), [Content::default()]);
}

#[test]
fn divided_and_whole_gpus_fill_from_opposite_ends() {
    let contents = published(&inventory_of(H100, 3));
    let of_type = |wanted: &str| -> Vec<String> {
        let devices = contents.iter().flat_map(|content| &content.devices);
        let is = |d: &&Device| d.attributes.as_ref().unwrap()["type"].string.as_deref() == Some(wanted);
        devices.filter(is).map(|d| d.name.clone()).collect()
    };
    assert_eq!(of_type("gpu"), ["gpu-2", "gpu-1", "gpu-0"]);
    assert_eq!(of_type("share"), ["gpu-0-share", "gpu-1-share", "gpu-2-share"]);
    assert_eq!(of_type("timeslice"), ["gpu-0-timeslice", "gpu-1-timeslice", "gpu-2-timeslice"]);
    let kinds = contents.iter().flat_map(|content| &content.devices);
    let mut kinds: Vec<String> =
        kinds.map(|d| d.attributes.as_ref().unwrap()["type"].string.clone().unwrap()).collect();
    kinds.dedup();
    // A whole GPU and a share are found early, whichever the claim wants.
    assert_eq!(kinds, ["gpu", "share", "gpu", "share", "gpu", "share", "mig", "timeslice", "mps"]);
    let small: Vec<String> = of_type("mig")
        .into_iter()
        .filter(|n| n.contains("1g10gb-19"))
        .take(8)
        .map(|n| n.replace("-mig-1g10gb-19", ""))
        .collect();
    assert_eq!(
        small,
        ["gpu-0-6", "gpu-0-5", "gpu-0-4", "gpu-0-3", "gpu-0-2", "gpu-0-1", "gpu-0-0", "gpu-1-6"]
    );
}

#[test]
fn without_counters_only_existing_devices_are_published() {
    let support = Support { counters: false, ..Support::default() };
    let cut = with_instance(with_instance(gpu(row(H100), 1), 9, 4, Origin::Ours), 19, 0, Origin::Foreign);
    let options = PoolOptions { support, ..PoolOptions::default() };
    let pool = ordinary(pool(&node(vec![gpu(row(H100), 0), cut]), &options));
    let names: Vec<&str> = pool.devices().map(|device| device.name.as_str()).collect();
    assert_eq!(names, ["gpu-0", "gpu-1-mig-1g10gb-19-0", "gpu-1-mig-3g40gb-9-4"]);
    assert!(pool.devices().all(|device| device.consumes_counters.is_none()));
    assert_eq!(validate(&slices(pool)), Ok(()));
}

#[test]
fn held_devices_stay_without_counters() {
    let cut = with_instance(with_instance(gpu(row(H100), 2), 9, 4, Origin::Ours), 19, 0, Origin::Ours);
    let inventory = node(vec![gpu(row(H100), 0), gpu(row(H100), 1), cut]);
    let check = |held: &[&str], published: &[&str], shared: &[&str]| {
        let held = held.iter().map(|name| (*name).to_owned()).collect();
        let pool = ordinary(pool_without_counters(&inventory, &PoolOptions::default(), &held));
        let names: Vec<&str> = pool.devices().map(|device| device.name.as_str()).collect();
        assert_eq!(names, published, "{held:?}");
        let several = pool.devices().filter(|device| device.allow_multiple_allocations == Some(true));
        assert_eq!(several.map(|device| device.name.as_str()).collect::<Vec<_>>(), shared, "{held:?}");
        assert!(pool.devices().all(|device| device.consumes_counters.is_none()), "{held:?}");
        assert_eq!(pool.counter_sets().count(), 0, "{held:?}");
        assert_eq!(validate(&slices(pool)), Ok(()), "{held:?}");
    };
    let (one, three) = ("gpu-2-mig-1g10gb-19-0", "gpu-2-mig-3g40gb-9-4");
    check(&[], &["gpu-0", "gpu-1", one, three], &[]);
    check(&["gpu-0-mps"], &["gpu-0-mps", "gpu-1", one, three], &["gpu-0-mps"]);
    check(&["gpu-0"], &["gpu-0", "gpu-1", one, three], &["gpu-0"]);
    // An instance that is not created yet stays.
    let new = "gpu-1-mig-1g10gb-19-3";
    check(&[three, new], &["gpu-0", new, one, three], &[new, three]);
    check(&["gpu-7"], &["gpu-0", "gpu-1", one, three], &[]);

    // Shares of earlier versions keep other claims off these devices, because every claim takes all memory.
    let held = names(&["gpu-0", new]);
    let pool = ordinary(pool_without_counters(&inventory, &PoolOptions::default(), &held));
    for name in held {
        let memory = &device(&pool, &name).capacity.as_ref().unwrap()["memory"];
        let policy = memory.request_policy.as_ref().unwrap();
        assert_eq!(policy.default, Some(memory.value.clone()));
        assert_eq!(policy.valid_values, Some(vec![memory.value.clone()]));
    }
}

#[test]
fn without_taints_unavailable_devices_are_omitted() {
    let support = Support { taints: false, ..Support::default() };
    let mut inventory = inventory_of(H100, 2);
    inventory.gpus[0].presence = Presence::Missing;
    let pool = pool(&inventory, &PoolOptions { support, ..PoolOptions::default() });
    assert!(pool.devices().all(|device| device.name.starts_with("gpu-1")));
}

#[test]
fn unusual_descriptions_are_published_validly() {
    let mut inventory = inventory_of(H100, 1);
    inventory.driver_version = "R580-beta".to_owned();
    inventory.cuda_version = (0, 0);
    let gpu = &mut inventory.gpus[0];
    gpu.product = "ü".repeat(60);
    gpu.brand = String::new();
    (gpu.pcie_root, gpu.numa_node, gpu.addressing_mode) = (None, None, None);
    assert_eq!(validate(&published(&inventory)), Ok(()));
}

/// The counters that a device consumes.
fn cost(device: &Device) -> BTreeMap<String, i64> {
    let counters = device.consumes_counters.iter().flatten().flat_map(|c| c.counters.iter());
    counters.map(|(name, c)| (name.clone(), Quantity::try_from(&c.value).unwrap().value().unwrap())).collect()
}

proptest! {
    /// The hardware can create every combination that the counters admit, so preparing an
    /// allocated claim never fails for lack of resources.
    #[test]
    fn counters_admit_only_feasible_combinations(
        model in (0..models().count()).prop_map(|n| models().nth(n).unwrap()),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 1..40),
    ) {
        let pool = whole(&inventory_of(&model.key, 1));
        let mut rest: BTreeMap<String, i64> = pool.counter_sets().flat_map(|set| &set.counters)
            .map(|(name, c)| (name.clone(), Quantity::try_from(&c.value).unwrap().value().unwrap()))
            .collect();
        let devices: Vec<&Device> = pool.devices().collect();
        let mut taken = Vec::new();
        for pick in picks {
            let device = pick.get(&devices);
            let cost = cost(device);
            if cost.iter().all(|(name, amount)| rest[name] >= *amount) {
                for (name, amount) in cost {
                    *rest.get_mut(&name).unwrap() -= amount;
                }
                taken.push(DeviceId::try_from(&device.name.as_str().into()).unwrap());
            }
        }
        let gpu = &inventory_of(&model.key, 1).gpus[0];
        let mut places = Vec::new();
        for id in &taken {
            match id {
                DeviceId::Gpu(_) | DeviceId::Share(_) | DeviceId::Timeslice(_) | DeviceId::Mps(_) => {
                    prop_assert_eq!(taken.len(), 1)
                }
                DeviceId::Observer(_) => unreachable!("left out"),
                DeviceId::Mig { profile_id, start, .. } => {
                    let profile = gpu.profile(*profile_id).unwrap();
                    let at = *profile.placements.iter().find(|at| at.start == *start).unwrap();
                    prop_assert!(places.iter().all(|(_, other)| !at.overlaps(*other)));
                    places.push((*profile_id, at));
                    let same = places.iter().filter(|(id, _)| id == profile_id).count();
                    prop_assert!(same <= profile.max_instances as usize, "{} of {}", same, profile.name);
                }
            }
        }
    }
}
