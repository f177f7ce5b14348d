//! Written slices serialize to the same bytes as the types of `k8s-openapi`.
#![allow(clippy::unwrap_used, reason = "test helpers")]

mod common;

use common::{gpu, inventory_of, node, with_instance};
use divvy_catalogue as catalogue;
use divvy_catalogue::Model;
use divvy_model::Inventory;
use divvy_model::inventory::{Origin, Presence};
use divvy_slices::sync::{Action, Desired, Owner, plan};
use divvy_slices::{Device, PoolOptions, Slice, Support, pool, slices};
use k8s_openapi::api::resource::v1::{self as api, ResourceSlice};
use serde_json::json;
use std::ptr;

/// The slices of a node as they are first created.
fn written(inventory: &Inventory, support: Support) -> Vec<Slice> {
    let owner = Owner { driver: "gpu.divvy.dev".into(), node: "worker".into(), node_uid: "uid".into() };
    let contents = slices(pool(inventory, &PoolOptions { support, ..PoolOptions::default() }));
    let none: [ResourceSlice; 0] = [];
    let actions = plan(
        Desired { owner: &owner, contents, modes_off: None, used_generation: 0, annotate: true },
        none.iter(),
    );
    let slice = |action| match action {
        Action::Create { slice, .. } => *slice,
        other => panic!("{other:?}"),
    };
    actions.into_iter().map(slice).collect()
}

fn check(inventory: &Inventory, support: Support) {
    for slice in written(inventory, support) {
        let ours = serde_json::to_string(&slice).unwrap();
        let read: ResourceSlice = serde_json::from_str(&ours).unwrap();
        assert_eq!(ours, serde_json::to_string(&read).unwrap());
        assert_eq!(slice.metadata, read.metadata);
        assert_eq!((&slice.driver, Some(&slice.node)), (&read.spec.driver, read.spec.node_name.as_ref()));
        let devices = read.spec.devices.into_iter().flatten().map(Device::from);
        assert_eq!(devices.collect::<Vec<_>>(), slice.content.devices);
        assert_eq!(read.spec.shared_counters.unwrap_or_default(), slice.content.counters);
    }
}

#[test]
fn slices_serialize_like_the_api_types() {
    check(&Inventory::default(), Support::default());
    for model in catalogue::all().map(Model::row) {
        let missing = common::gpu(model, 1);
        let mut gpus =
            vec![gpu(model, 0), divvy_model::inventory::Gpu { presence: Presence::Missing, ..missing }];
        if let Some(profile) = model.mig.as_ref().map(|mig| &mig.profiles[0]) {
            gpus.push(with_instance(gpu(model, 2), profile.id, profile.starts[0], Origin::Foreign));
        }
        let node = node(gpus);
        check(&node, Support::default());
        check(&node, Support { shares: false, ..Support::default() });
        check(&node, Support { counters: false, ..Support::default() });
    }
}

/// A device with every field of the API.
fn full() -> serde_json::Value {
    json!({
        "allNodes": true,
        "allowMultipleAllocations": true,
        "attributes": {
            "a": {"bool": true}, "b": {"bools": [true]}, "c": {"int": 1}, "d": {"ints": [1]},
            "e": {"string": "x"}, "f": {"strings": ["x"]}, "g": {"version": "1.0.0"},
            "h": {"versions": ["1.0.0"]},
        },
        "bindingConditions": ["bound"],
        "bindingFailureConditions": ["failed"],
        "bindsToNode": true,
        "capacity": {"memory": {
            "requestPolicy": {
                "default": "1", "validRange": {"max": "3", "min": "1", "step": "1"}, "validValues": ["1"],
            },
            "value": "4",
        }},
        "consumesCounters": [
            {"compatibilityGroups": ["group"], "counterSet": "set", "counters": {"memory": {"value": "4"}}},
        ],
        "name": "gpu-0",
        "nodeAllocatableResources": {"cpu": {}},
        "nodeName": "worker",
        "nodeSelector": {"nodeSelectorTerms": [{}]},
        "taints": [
            {"effect": "NoSchedule", "key": "a", "timeAdded": "2026-01-01T00:00:00Z", "value": "b"},
        ],
    })
}

#[test]
fn device_from_the_server_keeps_all_fields() {
    let theirs: api::Device = serde_json::from_value(full()).unwrap();
    let text = serde_json::to_string(&theirs).unwrap();
    assert_eq!(
        serde_json::from_str::<serde_json::Value>(&text).unwrap(),
        full(),
        "the API has such a device"
    );
    assert_eq!(serde_json::to_string(&Device::from(theirs)).unwrap(), text);
}

/// The memory and the time to build a large pool depend on this.
#[test]
fn similar_instances_share_their_maps() {
    let pool = pool(&inventory_of("H100-SXM5-80GB", 2), &PoolOptions::default());
    let device = |name: &str| pool.devices().find(|device| device.name == name).unwrap();
    let check = |one: &str, other: &str, attributes: bool, counted: bool| {
        let (one, other) = (device(one), device(other));
        let counters =
            |device: &Device| ptr::from_ref(&*device.consumes_counters.as_ref().unwrap()[0].counters);
        let said = |device: &Device| ptr::from_ref(&**device.attributes.as_ref().unwrap());
        let has = |device: &Device| ptr::from_ref(&**device.capacity.as_ref().unwrap());
        let names = (&one.name, &other.name);
        assert_eq!(ptr::eq(said(one), said(other)), attributes, "attributes of {names:?}");
        assert!(ptr::eq(has(one), has(other)), "capacity of {names:?}");
        assert_eq!(ptr::eq(counters(one), counters(other)), counted, "counters of {names:?}");
    };
    check("gpu-0-mig-1g10gb-19-0", "gpu-0-mig-1g10gb-19-1", true, false);
    check("gpu-0-mig-1g10gb-19-0", "gpu-1-mig-1g10gb-19-0", false, true);
}
