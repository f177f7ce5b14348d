//! Every mode on every GPU: what the devices that several claims hold say, and
//! when they are there.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use common::{gpu, inventory_of, node};
use divvy_api::sharing::{Interval, Mode};
use divvy_api::{Hold, Quantity};
use divvy_model::inventory::{Condition, Gpu, Inventory};
use divvy_model::{DeviceId, share};
use divvy_sim::catalogue::{self, GpuModel, Model};
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

/// The devices of a node by name; the pool is valid.
fn devices(inventory: &Inventory) -> BTreeMap<String, Device> {
    let contents = slices(pool(inventory, &PoolOptions::default()));
    assert_eq!(validate(&contents), Ok(()));
    contents.into_iter().flat_map(|content| content.devices).map(|d| (d.name.clone(), d)).collect()
}

/// Taints of the devices that have some, as `device: key=value`.
fn taints(inventory: &Inventory) -> Vec<String> {
    let of = |device: Device| {
        let name = device.name;
        device.taints.into_iter().flatten().map(move |taint| {
            let key = taint.key.trim_start_matches("gpu.divvy.dev/").to_owned();
            format!("{name}: {key}={}", taint.value.unwrap_or_default())
        })
    };
    devices(inventory).into_values().flat_map(of).collect()
}

/// Value and policy of a capacity.
fn check_capacity(inventory: &Inventory, device: &str, name: &str, value: &str, policy: Value) {
    let device = &devices(inventory)[device];
    let found = json!(device.capacity.as_ref().unwrap()[name]);
    assert_eq!(found, json!({"value": value, "requestPolicy": policy}), "{name} of {}", device.name);
}

fn range(default: &str, min: &str) -> Value {
    json!({"default": default, "validRange": {"min": min, "step": min}})
}

#[test]
fn the_shared_devices_of_an_h100_are_published_as_committed() {
    let devices = devices(&inventory_of(H100, 1));
    insta::assert_json_snapshot!("shared", ["gpu-0-timeslice", "gpu-0-mps"].map(|name| &devices[name]));
}

#[test]
fn every_gpu_offers_every_mode_and_each_takes_all_of_it_but_an_instance() {
    for model in models() {
        let all = devices(&inventory_of(&model.key, 1));
        let whole = &all["gpu-0"];
        for device in all.values() {
            let mode = DeviceId::try_from(&device.name.as_str().into()).unwrap().mode();
            assert_eq!(device.allow_multiple_allocations, Some(true), "{}", device.name);
            let attribute = |name: &str| device.attributes.as_ref().unwrap()[name].string.clone().unwrap();
            let (kind, said) = match mode {
                Mode::Whole => ("gpu", "share"),
                Mode::Mig => ("mig", "share"),
                Mode::Timeslice | Mode::Mps => (mode.as_str(), mode.as_str()),
            };
            assert_eq!((attribute("type"), attribute("mode")), (kind.to_owned(), said.to_owned()));
            if mode != Mode::Mig {
                assert_eq!(device.consumes_counters, whole.consumes_counters, "{}", device.name);
            }
        }
        assert!(all.contains_key("gpu-0-timeslice") && all.contains_key("gpu-0-mps"), "{}", model.key);
        let has_mig = all.values().any(|device| device.name.contains("-mig-"));
        assert_eq!(has_mig, model.mig.is_some(), "{}", model.key);
    }
}

#[test]
fn a_shared_device_describes_its_gpu_as_the_whole_does() {
    for model in models() {
        let all = devices(&inventory_of(&model.key, 1));
        let whole = all["gpu-0"].attributes.as_ref().unwrap();
        let own = ["type", "mode", "enforcement"];
        for name in ["gpu-0-timeslice", "gpu-0-mps"] {
            let shared = all[name].attributes.as_ref().unwrap();
            for (key, value) in whole.iter().filter(|(key, _)| !own.contains(&key.as_str())) {
                assert_eq!(shared.get(key), Some(value), "{key} of {name} on {}", model.key);
            }
        }
    }
}

/// What a claim that names nothing takes, where it can take some.
fn silent(capacity: &DeviceCapacity) -> i64 {
    let default = capacity.request_policy.as_ref().unwrap().default.as_ref().unwrap();
    Quantity::try_from(default).unwrap().value().unwrap()
}

#[test]
fn nobody_is_promised_what_nothing_holds_back() {
    for model in models() {
        let all = devices(&inventory_of(&model.key, 1));
        for (name, given) in
            [("gpu-0-timeslice", &["slots"][..]), ("gpu-0-mps", &["memory", "threads", "clients"])]
        {
            for (key, capacity) in all[name].capacity.as_ref().unwrap().iter() {
                assert_eq!(silent(capacity) > 0, given.contains(&key.as_str()), "{key} of {name}");
                let nothing_else = capacity.request_policy.as_ref().unwrap().valid_values.clone();
                let zero = nothing_else.is_some_and(|values| values.len() == 1 && values[0].0 == "0");
                assert_eq!(zero, !given.contains(&key.as_str()), "{key} of {name}");
            }
        }
    }
}

#[test]
fn a_claim_of_a_gpu_or_an_instance_that_names_nothing_takes_all_memory_and_so_all_of_it() {
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
fn memory_is_dealt_out_by_the_mebibyte_and_compute_time_by_the_per_cent() {
    let inventory = inventory_of(H100, 1);
    check_capacity(&inventory, "gpu-0", "memory", "81559Mi", range("81559Mi", "1Mi"));
    check_capacity(&inventory, "gpu-0-mig-1g10gb-19-0", "memory", "9984Mi", range("9984Mi", "1Mi"));
    for device in ["gpu-0", "gpu-0-mig-1g10gb-19-0"] {
        let percent = json!({"default": "0", "validRange": {"min": "0", "step": "1"}});
        check_capacity(&inventory, device, "cores", "100", percent);
    }
    // Whoever asks for a device with so many gets one, as ever.
    check_capacity(&inventory, "gpu-0", "multiprocessors", "132", json!({"default": "0"}));
}

#[test]
fn where_memory_is_odd_a_share_of_everything_is_still_the_whole() {
    for (bytes, memory) in [((10 << 30) + 4096, "10Gi"), ((1 << 30) - 1, "1023Mi")] {
        let all = devices(&h100(|gpu| gpu.memory_bytes = bytes));
        let found = &all["gpu-0"].capacity.as_ref().unwrap()["memory"];
        assert_eq!(found.value.0, memory);
        let taken = u64::try_from(silent(found)).unwrap();
        let hold =
            Hold::Share { id: "s".into(), consumed: [("memory".to_owned(), Quantity::bytes(taken))].into() };
        let gpu = h100(|gpu| gpu.memory_bytes = bytes).gpus.remove(0);
        assert_eq!(share::share(&hold, share::memory(&gpu, None)), Ok(None));
    }
}

#[test]
fn without_shares_gpus_and_instances_are_for_one_claim_at_a_time_at_the_same_cost() {
    let with = devices(&inventory_of(H100, 1));
    for off in [h100(|gpu| gpu.policy.shares = false), h100(|gpu| gpu.memory_bytes = 0)] {
        let gpu = &devices(&off)["gpu-0"];
        assert_eq!(gpu.allow_multiple_allocations, None);
        assert_eq!(gpu.attributes.as_ref().unwrap()["mode"].string.as_deref(), Some("exclusive"));
    }
    for (name, device) in devices(&h100(|gpu| gpu.policy.shares = false)) {
        assert_eq!(device.consumes_counters, with[&name].consumes_counters, "{name}");
        let has = |capacity: &str| device.capacity.as_ref().unwrap().contains_key(capacity);
        let own_mode = name.ends_with("timeslice") || name.ends_with("mps");
        assert!(own_mode || (device.allow_multiple_allocations.is_none() && !has("cores")), "{name}");
    }
}

#[test]
fn slots_are_what_the_policy_says() {
    let with = |slots| h100(|gpu| gpu.policy.slots = slots);
    check_capacity(&with(4), "gpu-0-timeslice", "slots", "4", range("1", "1"));
    // A range of one has no room for a step.
    let one = json!({"default": "1", "validValues": ["1"]});
    check_capacity(&with(1), "gpu-0-timeslice", "slots", "1", one);
}

#[test]
fn the_interval_of_time_slices_can_be_selected() {
    for interval in [Interval::Default, Interval::Short, Interval::Medium, Interval::Long] {
        let all = devices(&h100(|gpu| gpu.policy.interval = interval));
        let said = |name: &str| all[name].attributes.as_ref().unwrap().get("interval").cloned();
        assert_eq!(said("gpu-0-timeslice").unwrap().string.as_deref(), Some(interval.as_str()));
        assert_eq!(said("gpu-0-mps"), None);
    }
}

#[test]
fn an_mps_claim_that_names_nothing_gets_one_part_of_as_many_as_the_policy_says() {
    let with = |clients| h100(|gpu| gpu.policy.mps_clients = clients);
    // Of 81559 MiB, in whole MiB.
    for (clients, memory, threads) in
        [(1, "81559Mi", "100"), (3, "27186Mi", "33"), (4, "20389Mi", "25"), (101, "807Mi", "1")]
    {
        check_capacity(&with(clients), "gpu-0-mps", "memory", "81559Mi", range(memory, "1Mi"));
        check_capacity(&with(clients), "gpu-0-mps", "threads", "100", range(threads, "1"));
    }
}

#[test]
fn mps_takes_as_many_clients_as_the_gpu_driver_does() {
    for (cuda, clients) in
        [((0, 0), "48"), ((12, 9), "48"), ((13, 0), "48"), ((13, 1), "60"), ((14, 0), "60")]
    {
        let inventory = Inventory { cuda_version: cuda, ..inventory_of(H100, 1) };
        check_capacity(&inventory, "gpu-0-mps", "clients", clients, range("1", "1"));
    }
}

#[test]
fn a_gpu_before_volta_has_no_mps() {
    for (capability, has) in [((0, 0), false), ((6, 1), false), ((7, 0), true), ((7, 5), true)] {
        let all = devices(&h100(|gpu| gpu.compute_capability = capability));
        assert_eq!(all.contains_key("gpu-0-mps"), has, "{capability:?}");
        assert!(all.contains_key("gpu-0-timeslice"));
    }
}

#[test]
fn a_gpu_that_does_not_tell_its_memory_is_shared_by_threads_and_clients() {
    let all = devices(&h100(|gpu| gpu.memory_bytes = 0));
    let capacity = all["gpu-0-mps"].capacity.as_ref().unwrap();
    assert!(!capacity.contains_key("memory") && capacity.contains_key("threads"));
}

#[test]
fn a_mode_that_is_off_is_published_and_not_handed_out() {
    let instances = devices(&inventory_of(H100, 1)).len() - 3;
    for (mode, devices) in [
        (Mode::Whole, vec!["gpu-0: mode-off=whole".to_owned()]),
        (Mode::Timeslice, vec!["gpu-0-timeslice: mode-off=timeslice".to_owned()]),
        (Mode::Mps, vec!["gpu-0-mps: mode-off=mps".to_owned()]),
    ] {
        assert_eq!(taints(&h100(|gpu| _ = gpu.policy.modes.remove(&mode))), devices);
    }
    let no_mig = taints(&h100(|gpu| _ = gpu.policy.modes.remove(&Mode::Mig)));
    assert_eq!(no_mig.len(), instances);
    assert!(no_mig.iter().all(|taint| taint.contains("-mig-") && taint.ends_with(": mode-off=mig")));
    let dedicated = h100(|gpu| gpu.policy.modes = [Mode::Whole].into());
    assert_eq!(taints(&dedicated).len(), instances + 2);
}

#[test]
fn where_the_server_has_no_taints_a_mode_that_is_off_is_left_out() {
    let support = Support { taints: false, ..Support::default() };
    let inventory = h100(|gpu| gpu.policy.modes = [Mode::Timeslice].into());
    let pool = pool(&inventory, &PoolOptions { support });
    assert_eq!(pool.devices().map(|device| device.name.as_str()).collect::<Vec<_>>(), ["gpu-0-timeslice"]);
}

#[test]
fn an_mps_daemon_that_is_not_well_keeps_claims_from_its_device_alone() {
    let ill = h100(|gpu| gpu.conditions = vec![Condition::Mps { cause: "not answering".to_owned() }]);
    assert_eq!(taints(&ill), ["gpu-0-mps: mps-unhealthy=not_answering"]);
}

#[test]
fn a_server_that_lacks_counters_or_shares_gets_no_shared_device() {
    for support in
        [Support { counters: false, ..Support::default() }, Support { shares: false, ..Support::default() }]
    {
        let pool = pool(&inventory_of(H100, 2), &PoolOptions { support });
        assert!(pool.devices().all(|device| device.allow_multiple_allocations.is_none()), "{support:?}");
        let capacities = pool.devices().flat_map(|device| device.capacity.as_ref().unwrap().values());
        assert!(capacities.into_iter().all(|capacity| capacity.request_policy.is_none()));
        assert_eq!(validate(&slices(pool)), Ok(()), "{support:?}");
    }
}

/// Bytes of a node's slices as the API server gets them: contents alone.
fn bytes(inventory: &Inventory, support: Support) -> usize {
    let contents = slices(pool(inventory, &PoolOptions { support }));
    contents.iter().map(|c| json!([c.counters, c.devices]).to_string().len()).sum()
}

/// Thousands of nodes share one etcd: a figure to watch, with room for little.
#[test]
fn eight_gpus_keep_to_their_kibibytes() {
    let inventory = inventory_of(H100, 8);
    let exclusive = bytes(&inventory, Support { shares: false, ..Support::default() });
    let mut without = inventory.clone();
    without.gpus.iter_mut().for_each(|gpu| gpu.policy.shares = false);
    let modes = bytes(&without, Support::default());
    let all = bytes(&inventory, Support::default());
    println!(
        "slice_kib_per_node\t{}\t(without shares: {}, exclusive devices alone: {})",
        all >> 10,
        modes >> 10,
        exclusive >> 10
    );
    assert!(all < 376 << 10, "{all}");
    assert!((modes - exclusive) * 7 < exclusive, "the shared devices are {} of {modes}", modes - exclusive);
}
