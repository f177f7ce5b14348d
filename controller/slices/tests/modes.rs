//! The devices of every sharing mode, for every GPU model.
#![allow(clippy::unwrap_used, reason = "test helpers")]

mod common;

use common::{gpu, inventory_of, is_observer, node};
use divvy_api::sharing::{Interval, Mode};
use divvy_api::{Hold, Quantity};
use divvy_catalogue as catalogue;
use divvy_catalogue::{GpuModel, Model};
use divvy_model::inventory::{Condition, Gpu, Inventory};
use divvy_model::{ClosingId, DeviceId, GpuNumber, share};
use divvy_slices::{Device, PoolOptions, Support, pool, slices, validate};
use k8s_openapi::api::resource::v1::DeviceCapacity;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const H100: &str = "H100-SXM5-80GB";

fn models() -> impl Iterator<Item = &'static GpuModel> {
    catalogue::all().map(Model::row)
}

fn h100(edit: impl FnOnce(&mut Gpu)) -> Inventory {
    let mut gpu = gpu(catalogue::find(H100).unwrap().row(), 0);
    edit(&mut gpu);
    node(vec![gpu])
}

/// The devices of a node by name, without observers. Also checks that the pool is valid.
fn devices(inventory: &Inventory) -> BTreeMap<String, Device> {
    devices_with(inventory, &PoolOptions::default())
}

fn devices_with(inventory: &Inventory, options: &PoolOptions) -> BTreeMap<String, Device> {
    let contents = slices(pool(inventory, options));
    assert_eq!(validate(&contents), Ok(()));
    let devices = contents.into_iter().flat_map(|content| content.devices);
    devices.filter(|d| !is_observer(&d.name)).map(|d| (d.name.clone(), d)).collect()
}

/// Taints of all devices, as `device: key=value`.
fn taints(inventory: &Inventory) -> Vec<String> {
    taints_with(inventory, &PoolOptions::default())
}

fn taints_with(inventory: &Inventory, options: &PoolOptions) -> Vec<String> {
    let of = |device: Device| {
        let name = device.name;
        device.taints.into_iter().flatten().map(move |taint| {
            let key = taint.key.trim_start_matches("gpu.divvy.dev/").to_owned();
            format!("{name}: {key}={}", taint.value.unwrap_or_default())
        })
    };
    devices_with(inventory, options).into_values().flat_map(of).collect()
}

/// Checks the value and the request policy of a capacity.
fn check_capacity(inventory: &Inventory, device: &str, name: &str, value: &str, policy: Value) {
    let device = &devices(inventory)[device];
    let found = json!(device.capacity.as_ref().unwrap()[name]);
    assert_eq!(found, json!({"value": value, "requestPolicy": policy}), "{name} of {}", device.name);
}

fn range(default: &str, min: &str) -> Value {
    json!({"default": default, "validRange": {"min": min, "step": min}})
}

#[test]
fn h100_shared_devices_match_their_snapshot() {
    let devices = devices(&inventory_of(H100, 1));
    insta::assert_json_snapshot!(
        "shared",
        ["gpu-0-share", "gpu-0-timeslice", "gpu-0-mps"].map(|name| &devices[name])
    );
}

#[test]
fn every_model_offers_every_mode() {
    for model in models() {
        let all = devices(&inventory_of(&model.key, 1));
        let whole = &all["gpu-0"];
        for device in all.values() {
            let mode = DeviceId::try_from(&device.name.as_str().into()).unwrap().mode();
            let many = !matches!(mode, Mode::Whole | Mode::Mig);
            assert_eq!(device.allow_multiple_allocations, many.then_some(true), "{}", device.name);
            let attribute = |name: &str| device.attributes.as_ref().unwrap()[name].string.clone().unwrap();
            let (kind, said) = match mode {
                Mode::Whole => ("gpu", "exclusive"),
                Mode::Mig => ("mig", "exclusive"),
                Mode::Share | Mode::Timeslice | Mode::Mps => (mode.as_str(), mode.as_str()),
            };
            assert_eq!((attribute("type"), attribute("mode")), (kind.to_owned(), said.to_owned()));
            if mode != Mode::Mig {
                assert_eq!(device.consumes_counters, whole.consumes_counters, "{}", device.name);
            }
        }
        assert!(
            ["gpu-0-share", "gpu-0-timeslice", "gpu-0-mps"].iter().all(|name| all.contains_key(*name)),
            "{}",
            model.key
        );
        let has_mig = all.values().any(|device| device.name.contains("-mig-"));
        assert_eq!(has_mig, model.mig.is_some(), "{}", model.key);
    }
}

#[test]
fn shared_device_has_the_attributes_of_the_whole_gpu() {
    for model in models() {
        let all = devices(&inventory_of(&model.key, 1));
        let whole = all["gpu-0"].attributes.as_ref().unwrap();
        let own = ["type", "mode", "enforcement"];
        for name in ["gpu-0-share", "gpu-0-timeslice", "gpu-0-mps"] {
            let shared = all[name].attributes.as_ref().unwrap();
            for (key, value) in whole.iter().filter(|(key, _)| !own.contains(&key.as_str())) {
                assert_eq!(shared.get(key), Some(value), "{key} of {name} on {}", model.key);
            }
        }
    }
}

/// The amount that a claim without a request takes.
fn silent(capacity: &DeviceCapacity) -> i64 {
    let default = capacity.request_policy.as_ref().unwrap().default.as_ref().unwrap();
    Quantity::try_from(default).unwrap().value().unwrap()
}

#[test]
fn default_requests_take_only_enforced_capacities() {
    for model in models() {
        let all = devices(&inventory_of(&model.key, 1));
        for (name, divided, free) in [
            ("gpu-0-share", &["cores", "memory"][..], "cores"),
            ("gpu-0-timeslice", &["slots"], ""),
            ("gpu-0-mps", &["clients", "memory", "threads"], ""),
        ] {
            let capacity = all[name].capacity.as_ref().unwrap();
            assert_eq!(capacity.keys().collect::<Vec<_>>(), divided, "{name}");
            for (key, capacity) in capacity.iter() {
                assert_eq!(silent(capacity) > 0, key != free, "{key} of {name}");
            }
        }
    }
}

#[test]
fn claim_without_request_takes_all_memory() {
    for model in models() {
        let all = devices(&inventory_of(&model.key, 1));
        let shareable = all
            .values()
            .filter(|device| device.attributes.as_ref().unwrap()["mode"].string.as_deref() == Some("share"));
        for device in shareable {
            for (key, capacity) in device.capacity.as_ref().unwrap().iter() {
                let value = Quantity::try_from(&capacity.value).unwrap().value().unwrap();
                let expected = if key == "memory" { value } else { 0 };
                assert_eq!(silent(capacity), expected, "{key} of {} on {}", device.name, model.key);
            }
        }
    }
}

#[test]
fn memory_is_shared_by_mebibyte_and_compute_by_percent() {
    let inventory = h100(|gpu| gpu.policy.mig_shares = true);
    check_capacity(&inventory, "gpu-0-share", "memory", "81559Mi", range("81559Mi", "1Mi"));
    check_capacity(&inventory, "gpu-0-mig-1g10gb-19-0", "memory", "9984Mi", range("9984Mi", "1Mi"));
    for device in ["gpu-0-share", "gpu-0-mig-1g10gb-19-0"] {
        let percent = json!({"default": "0", "validRange": {"min": "0", "step": "1"}});
        check_capacity(&inventory, device, "cores", "100", percent);
    }
}

#[test]
fn facts_of_divided_devices_are_attributes() {
    let all = devices(&h100(|gpu| gpu.policy.mig_shares = true));
    for (name, multiprocessors, memory) in [
        ("gpu-0-share", 132, 81559),
        ("gpu-0-timeslice", 132, 81559),
        ("gpu-0-mps", 132, 81559),
        ("gpu-0-mig-1g10gb-19-0", 16, 9984),
    ] {
        let attribute = |key: &str| all[name].attributes.as_ref().unwrap()[key].int;
        let found = (attribute("multiprocessors"), attribute("memoryMiB"));
        assert_eq!(found, (Some(multiprocessors), Some(memory)), "{name}");
    }
}

#[test]
fn full_share_takes_all_of_an_odd_memory_size() {
    for (bytes, memory) in [((10 << 30) + 4096, "10Gi"), ((1 << 30) - 1, "1023Mi")] {
        let all = devices(&h100(|gpu| gpu.memory_bytes = bytes));
        let found = &all["gpu-0-share"].capacity.as_ref().unwrap()["memory"];
        assert_eq!(found.value.0, memory);
        let taken = u64::try_from(silent(found)).unwrap();
        let hold =
            Hold::Share { id: "s".into(), consumed: [("memory".to_owned(), Quantity::bytes(taken))].into() };
        let gpu = h100(|gpu| gpu.memory_bytes = bytes).gpus.remove(0);
        assert_eq!(share::share(&hold, share::memory(&gpu, None)), Ok(None));
    }
}

#[test]
fn shares_of_instances_cost_what_instances_cost() {
    let with = devices(&inventory_of(H100, 1));
    assert!(!devices(&h100(|gpu| gpu.memory_bytes = 0)).contains_key("gpu-0-share"));
    for (name, device) in devices(&h100(|gpu| gpu.policy.mig_shares = true)) {
        assert_eq!(device.consumes_counters, with[&name].consumes_counters, "{name}");
        let attribute = |name: &str| device.attributes.as_ref().unwrap()[name].string.clone().unwrap();
        if name.contains("-mig-") {
            assert_eq!(
                (device.allow_multiple_allocations, attribute("mode")),
                (Some(true), "share".to_owned())
            );
        }
    }
    let off = devices(&h100(|gpu| (gpu.policy.shares, gpu.policy.mig_shares) = (false, true)));
    for (name, device) in off.iter().filter(|(name, _)| name.contains("-mig-")) {
        assert_eq!(device, &with[name], "MIG shares need shares");
    }
}

#[test]
fn slots_follow_the_policy() {
    let with = |slots| h100(|gpu| gpu.policy.slots = slots);
    check_capacity(&with(4), "gpu-0-timeslice", "slots", "4", range("1", "1"));
    // A range of one cannot contain a step.
    let one = json!({"default": "1", "validValues": ["1"]});
    check_capacity(&with(1), "gpu-0-timeslice", "slots", "1", one);
}

#[test]
fn interval_is_an_attribute() {
    for interval in [Interval::Default, Interval::Short, Interval::Medium, Interval::Long] {
        let all = devices(&h100(|gpu| gpu.policy.interval = interval));
        let said = |name: &str| all[name].attributes.as_ref().unwrap().get("interval").cloned();
        assert_eq!(said("gpu-0-timeslice").unwrap().string.as_deref(), Some(interval.as_str()));
        assert_eq!(said("gpu-0-mps"), None);
    }
}

#[test]
fn mps_claim_without_request_gets_one_part() {
    let with = |clients| h100(|gpu| gpu.policy.mps_clients = clients);
    // Parts of 81559 MiB, rounded down to whole MiB.
    for (clients, memory, threads) in
        [(1, "81559Mi", "100"), (3, "27186Mi", "33"), (4, "20389Mi", "25"), (101, "807Mi", "1")]
    {
        check_capacity(&with(clients), "gpu-0-mps", "memory", "81559Mi", range(memory, "1Mi"));
        check_capacity(&with(clients), "gpu-0-mps", "threads", "100", range(threads, "1"));
    }
}

#[test]
fn mps_client_limit_follows_the_cuda_version() {
    for (cuda, clients) in
        [((0, 0), "48"), ((12, 9), "48"), ((13, 0), "48"), ((13, 1), "60"), ((14, 0), "60")]
    {
        let inventory = Inventory { cuda_version: cuda, ..inventory_of(H100, 1) };
        check_capacity(&inventory, "gpu-0-mps", "clients", clients, range("1", "1"));
    }
}

#[test]
fn gpu_before_volta_has_no_mps_device() {
    for (capability, has) in [((0, 0), false), ((6, 1), false), ((7, 0), true), ((7, 5), true)] {
        let all = devices(&h100(|gpu| gpu.compute_capability = capability));
        assert_eq!(all.contains_key("gpu-0-mps"), has, "{capability:?}");
        assert!(all.contains_key("gpu-0-timeslice"));
    }
}

#[test]
fn unknown_memory_leaves_threads_and_clients_to_mps() {
    let all = devices(&h100(|gpu| gpu.memory_bytes = 0));
    let capacity = all["gpu-0-mps"].capacity.as_ref().unwrap();
    assert!(!capacity.contains_key("memory") && capacity.contains_key("threads"));
}

#[test]
fn closing_mode_is_published_with_the_time_in_its_taint() {
    let all = devices(&inventory_of(H100, 1));
    let close = |mode| PoolOptions {
        closings: [((GpuNumber(0), mode), ClosingId(1_764_327_342))].into(),
        ..PoolOptions::default()
    };
    for (mode, device) in
        [(Mode::Share, "gpu-0-share"), (Mode::Timeslice, "gpu-0-timeslice"), (Mode::Mps, "gpu-0-mps")]
    {
        let off = h100(|gpu| match mode {
            Mode::Share => gpu.policy.shares = false,
            mode => _ = gpu.policy.modes.remove(&mode),
        });
        assert_eq!(taints_with(&off, &close(mode)), [format!("{device}: mode-off={mode}")]);
        let mut closing = devices_with(&off, &close(mode));
        let taint = closing.get_mut(device).unwrap().taints.take().unwrap().remove(0);
        assert_eq!(json!(taint)["timeAdded"], "2025-11-28T10:55:42Z");
        assert_eq!(closing, all, "names and costs stay");
        assert!(!devices(&off).contains_key(device));
    }
    let no_mig = h100(|gpu| _ = gpu.policy.modes.remove(&Mode::Mig));
    let tainted = taints_with(&no_mig, &close(Mode::Mig));
    assert_eq!(tainted.len(), all.len() - 4);
    assert!(tainted.iter().all(|taint| taint.contains("-mig-") && taint.ends_with(": mode-off=mig")));
    // A closing of a mode that is offered again has no effect.
    assert_eq!(devices_with(&inventory_of(H100, 1), &close(Mode::Mig)), all);
}

#[test]
fn mode_that_is_off_and_not_closing_is_absent() {
    let names = |modes: &[Mode], shares| {
        let inventory = h100(|gpu| {
            gpu.policy.modes = modes.iter().copied().collect();
            gpu.policy.shares = shares;
        });
        devices(&inventory).into_keys().collect::<Vec<_>>()
    };
    assert_eq!(names(&[Mode::Whole], false), ["gpu-0"]);
    assert_eq!(names(&[Mode::Whole, Mode::Mps], true), ["gpu-0", "gpu-0-mps", "gpu-0-share"]);
    assert_eq!(names(&[Mode::Mig], true).len(), devices(&inventory_of(H100, 1)).len() - 4);
    assert_eq!(names(&[], true), [""; 0]);
    let nothing = pool(&h100(|gpu| gpu.policy.modes.clear()), &PoolOptions::default());
    assert_eq!(nothing.counter_sets().count(), 0, "counters without a device");
}

#[test]
fn unhealthy_mps_daemon_taints_only_the_mps_device() {
    let ill = h100(|gpu| gpu.conditions = vec![Condition::Mps { cause: "not answering".to_owned() }]);
    assert_eq!(taints(&ill), ["gpu-0-mps: mps-unhealthy=not_answering"]);
}

#[test]
fn without_counters_or_shares_no_shared_device_exists() {
    for support in
        [Support { counters: false, ..Support::default() }, Support { shares: false, ..Support::default() }]
    {
        let pool = pool(&inventory_of(H100, 2), &PoolOptions { support, ..PoolOptions::default() });
        assert!(pool.devices().all(|device| device.allow_multiple_allocations.is_none()), "{support:?}");
        let capacities =
            pool.devices().flat_map(|device| device.capacity.iter().flat_map(|all| all.values()));
        assert!(capacities.into_iter().all(|capacity| capacity.request_policy.is_none()));
        assert_eq!(validate(&slices(pool)), Ok(()), "{support:?}");
    }
}

/// Serialized size of a node's slice contents, in bytes.
fn bytes(inventory: &Inventory, support: Support) -> usize {
    let contents = slices(pool(inventory, &PoolOptions { support, ..PoolOptions::default() }));
    contents.iter().map(|c| json!([c.counters, c.devices]).to_string().len()).sum()
}

/// Thousands of nodes share one etcd, so the size per node must not grow unnoticed.
#[test]
fn slice_size_of_eight_gpus_is_bounded() {
    let inventory = inventory_of(H100, 8);
    let exclusive = bytes(&inventory, Support { shares: false, ..Support::default() });
    let all = bytes(&inventory, Support::default());
    println!("slice_kib_per_node\t{}\t(exclusive devices alone: {})", all >> 10, exclusive >> 10);
    assert!(all < 280 << 10, "{all}");
    assert!((all - exclusive) * 6 < exclusive, "the shared devices are {} of {all}", all - exclusive);
}
