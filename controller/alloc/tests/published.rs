//! Allocation of published devices: concurrent allocations never overlap on the hardware, and
//! every combination that fits is found.

mod common;
#[path = "../../slices/tests/common/mod.rs"]
mod gpus;
#[path = "common/nodes.rs"]
mod nodes;

use common::{Cluster, claim, one, picked, select};
use divvy_api::sharing::Mode;
use divvy_api::{DeviceName, Quantity};
use divvy_model::inventory::MigMode;
use divvy_model::{DeviceId, Inventory, Placement, share};
use gpus::inventory_of;
use nodes::{MPS, SHARE, TIMESLICE, gpus_wanted, mig_wanted, named, of, published, share_wanted, wanting};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;

const LARGE: &str = "device.capacity['gpu.divvy.dev'].memory.isGreaterThan(quantity('30Gi'))";

/// Allocates until nothing fits, at most `most` times, and returns the devices.
fn fill(cluster: &mut Cluster, claim: &Value, most: usize) -> Vec<String> {
    let taken = (0..most).map_while(|n| cluster.take(&format!("fill-{n}"), claim).ok());
    taken.flat_map(|result| picked(&result)).collect()
}

#[test]
fn profiles_fit_up_to_the_hardware_limit() {
    for model in divvy_catalogue::all() {
        // On Ampere, instances require that MIG mode is already on.
        let node = gpus::node(vec![gpus::in_mode(gpus::gpu(model.row(), 0), MigMode::On)]);
        for profile in model.row().mig.iter().flat_map(|mig| &mig.profiles) {
            let mut cluster = published(&node);
            let taken = fill(&mut cluster, &wanting(mig_wanted(&profile.name)), 9);
            assert_eq!(
                taken.len(),
                profile.instances as usize,
                "{} on {}: {taken:?}",
                profile.name,
                model.row().key
            );
        }
    }
}

/// Claims with adminAccess get every GPU, whatever other claims hold, and ordinary claims get no observer.
#[test]
fn observer_devices_are_always_free_for_admin_access() {
    let observer = |more: Value| {
        let mut request = json!({"name": "r", "exactly": {"deviceClassName": "observer.divvy.dev",
            "allocationMode": "All"}});
        request["exactly"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        wanting(request)
    };
    let tolerations = json!([{"key": "gpu.divvy.dev/observer", "operator": "Exists"}]);
    let admin = observer(json!({"adminAccess": true, "tolerations": tolerations}));
    let mut cluster = published(&inventory_of("H100-SXM5-80GB", 3));
    cluster.take("part", &wanting(mig_wanted("3g.40gb"))).expect("fits");
    cluster.take("whole", &wanting(gpus_wanted(2))).expect("fits");
    for agent in ["first", "second"] {
        let taken = cluster.take(agent, &admin).expect("observers take nothing");
        assert_eq!(picked(&taken), ["r=gpu-0-observer", "r=gpu-1-observer", "r=gpu-2-observer"]);
    }
    cluster.take("other part", &wanting(mig_wanted("3g.40gb"))).expect("the GPU has half of its memory left");
    assert!(cluster.allocate(&observer(json!({"adminAccess": true}))).is_err(), "the taint is not tolerated");
    assert!(cluster.allocate(&observer(json!({}))).is_err(), "the taint is not tolerated");
}

#[test]
fn partitioned_gpu_is_unavailable_as_a_whole() {
    let mut cluster = published(&inventory_of("H100-SXM5-80GB", 2));
    cluster.take("part", &wanting(mig_wanted("3g.40gb"))).expect("fits");
    cluster.take("whole", &wanting(gpus_wanted(1))).expect("the other GPU is free");
    let why = cluster.allocate(&wanting(gpus_wanted(1))).expect_err("no GPU is left").to_string();
    assert!(why.contains("request r wants 1"), "{why}");
    assert!(why.contains("overlapping devices in use"), "{why}");
    cluster.release("part");
    cluster.take("again", &wanting(gpus_wanted(1))).expect("the GPU is free again");
}

#[test]
fn gpus_of_one_nvlink_group_are_selected_together() {
    let together = json!({"matchAttribute": "gpu.divvy.dev/nvlinkGroup"});
    let asked = claim(json!({"requests": [gpus_wanted(4)], "constraints": [together]}));
    let found = published(&inventory_of("H100-SXM5-80GB", 8)).allocate(&asked).expect("fits");
    assert_eq!(picked(&found).len(), 4);
    let why = published(&inventory_of("L4", 8)).allocate(&asked).expect_err("no NVLink").to_string();
    assert!(why.contains("8 excluded by a constraint"), "{why}");
}

#[test]
fn one_claim_may_mix_device_types() {
    let asked = claim(json!({"requests": [
        named("small", mig_wanted("1g.10gb")),
        named("big", mig_wanted("7g.80gb")),
        named("whole", gpus_wanted(1)),
        named("turns", share_wanted(TIMESLICE, &[])),
        named("client", share_wanted(MPS, &[("memory", "10Gi")])),
        named("any", one("any", select(LARGE))),
    ]}));
    let node = inventory_of("H100-SXM5-80GB", 6);
    let found = published(&node).allocate(&asked).expect("fits");
    assert_apart(&node, &picked(&found));
}

/// Checks that no two of the devices (`request=device`) use the same hardware, unless they are
/// shares of one device.
fn assert_apart(node: &Inventory, held: &[String]) {
    let parts: Vec<_> = held
        .iter()
        .map(|row| {
            let (_, name) = row.split_once('=').expect("request=device");
            let id = DeviceId::try_from(&DeviceName::from(name)).expect(name);
            let (_, part) = id.resolve(node).expect(name);
            let place = part.map(|(_, placement)| placement);
            (id, place)
        })
        .collect();
    let clash = |a: Option<Placement>, b: Option<Placement>| match (a, b) {
        (Some(a), Some(b)) => a.overlaps(b),
        _ => true,
    };
    for (index, (id, part)) in parts.iter().enumerate() {
        for (other, other_part) in &parts[index + 1..] {
            // Memory of whole devices is checked by [`assert_memory`].
            let shares = id == other;
            assert!(id.gpu() != other.gpu() || shares || !clash(*part, *other_part), "{held:?}");
        }
        let shares = parts.iter().filter(|(other, _)| other == id).count();
        let own_mode = matches!(id.mode(), Mode::Timeslice | Mode::Mps);
        assert!(!own_mode || shares <= 4, "four slots, and four parts by default: {held:?}");
    }
}

/// Checks that the claims of each GPU or instance do not exceed its memory.
fn assert_memory(node: &Inventory, cluster: &Cluster) {
    let mut taken: BTreeMap<DeviceId, u64> = BTreeMap::new();
    let allocations = cluster.claims.iter().filter_map(|claim| claim.status.as_ref()?.allocation.as_ref());
    for result in allocations.flat_map(|one| one.devices.iter().flat_map(|d| d.results.iter().flatten())) {
        let id = DeviceId::try_from(&DeviceName::from(result.device.as_str())).expect("a device");
        if let (true, Some(consumed)) = (id.mode().has_shares(), &result.consumed_capacity) {
            let memory = &consumed["memory"];
            let memory = Quantity::try_from(memory).expect("a quantity").as_bytes().expect("bytes");
            *taken.entry(id).or_default() += memory;
        }
    }
    for (id, taken) in taken {
        let (gpu, part) = id.resolve(node).expect("a device of the node");
        assert!(taken <= share::memory(gpu, part), "{taken} of {id}");
    }
}

#[derive(Clone, Debug)]
enum Step {
    Take(usize),
    Release(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![3 => (0usize..20).prop_map(Step::Take), 2 => (0usize..20).prop_map(Step::Release)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn concurrent_allocations_never_overlap(
        model in prop::sample::select(vec!["B200-180GB", "H100-SXM5-80GB", "RTX-PRO-6000"]),
        steps in prop::collection::vec(step(), 1..20),
    ) {
        let mut node = inventory_of(model, 2);
        node.gpus[0].policy.mig_shares = true;
        let mut cluster = published(&node);
        let row = divvy_catalogue::find(model).expect(model).row();
        let profiles: Vec<_> = divvy_catalogue::node::profiles(row);
        let mut held: Vec<(String, Vec<String>)> = Vec::new();
        for (number, step) in steps.into_iter().enumerate() {
            match step {
                Step::Take(what) => {
                    let request = match profiles.get(what) {
                        Some(profile) => mig_wanted(&profile.name),
                        None if what % 5 == 0 => gpus_wanted(1),
                        None if what % 5 == 1 => share_wanted(SHARE, &[("memory", "30Gi")]),
                        None if what % 5 == 2 => of(mig_wanted(&profiles[0].name), &[("memory", "4Gi")]),
                        None => share_wanted([TIMESLICE, MPS][what % 2], &[]),
                    };
                    let name = format!("claim-{number}");
                    if let Ok(result) = cluster.take(&name, &wanting(request)) {
                        held.push((name, picked(&result)));
                    }
                }
                Step::Release(which) if which < held.len() => cluster.release(&held.remove(which).0),
                Step::Release(_) => {}
            }
            let all: Vec<_> = held.iter().flat_map(|(_, devices)| devices.clone()).collect();
            assert_apart(&node, &all);
            assert_memory(&node, &cluster);
        }
        for (name, _) in held {
            cluster.release(&name);
        }
        prop_assert!(cluster.allocate(&wanting(gpus_wanted(2))).is_ok(), "all devices must be free again");
    }
}

/// The tables of `divvy_api::check::published`, by which selectors are checked.
#[test]
fn selector_tables_have_every_published_value() {
    use divvy_api::check::published::{ATTRIBUTES, CAPACITIES, Published, STANDARD_ATTRIBUTES, ValueType};
    let mode = |device: &Value| match device["attributes"]["type"]["string"].as_str() {
        Some("gpu") => Some(Mode::Whole),
        Some("share") => Some(Mode::Share),
        Some("mig") => Some(Mode::Mig),
        Some("timeslice") => Some(Mode::Timeslice),
        Some("mps") => Some(Mode::Mps),
        _ => None,
    };
    let mut seen = std::collections::BTreeSet::new();
    let mut compare =
        |table: &'static [Published], name: &str, type_: ValueType, mode: Option<Mode>, text: &str| {
            let found =
                table.iter().find(|one| one.name == name).unwrap_or_else(|| panic!("no {name} in the table"));
            assert_eq!(found.type_, type_, "{name}");
            assert!(mode.is_none_or(|mode| found.modes.contains(&mode)), "{name} of {mode:?}");
            assert!(found.values.is_empty() || found.values.contains(&text), "{name} is {text}");
            seen.insert(found.name);
        };
    for model in divvy_catalogue::all() {
        for mig_shares in [false, true] {
            let mut gpu = gpus::in_mode(gpus::gpu(model.row(), 0), MigMode::On);
            gpu.policy.mig_shares = mig_shares;
            let pool = divvy_slices::pool(&gpus::node(vec![gpu]), &divvy_slices::PoolOptions::default());
            for content in divvy_slices::slices(pool) {
                for device in json!(content.devices).as_array().into_iter().flatten() {
                    let mode = mode(device);
                    for (name, value) in device["attributes"].as_object().into_iter().flatten() {
                        let (field, value) =
                            value.as_object().and_then(|value| value.iter().next()).expect("a value");
                        let type_ = match field.as_str() {
                            "string" => ValueType::Text,
                            "int" => ValueType::Number,
                            "version" => ValueType::Version,
                            other => panic!("{name} is a {other}"),
                        };
                        let text = value.as_str().unwrap_or_default();
                        match name.strip_prefix("resource.kubernetes.io/") {
                            Some(name) => compare(STANDARD_ATTRIBUTES, name, type_, mode, text),
                            None => compare(ATTRIBUTES, name, type_, mode, text),
                        }
                    }
                    for name in device["capacity"].as_object().into_iter().flat_map(|all| all.keys()) {
                        compare(CAPACITIES, name, ValueType::Quantity, mode, "");
                    }
                }
            }
        }
    }
    // These depend on more than the model of a GPU.
    let optional = ["numaNode", "nvlinkGroup", "pcieRoot", "addressingMode"];
    let tables = ATTRIBUTES.iter().chain(STANDARD_ATTRIBUTES).chain(CAPACITIES);
    let unseen = tables.map(|one| one.name).filter(|name| !seen.contains(name) && !optional.contains(name));
    assert_eq!(unseen.collect::<Vec<_>>(), [""; 0]);
}
