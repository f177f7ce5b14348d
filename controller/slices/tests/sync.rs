//! Plans of writes. The cases are those of the Go helper's `TestControllerSyncPool` for node-local
//! pools, under their names (one is shortened). Left out:
//! - `add-one-network-device-*`, `update-node-selector`, `reconcile-with-pool-name-*`: pools that
//!   do not belong to one node;
//! - `drop-*`, `create-device-with-binding-condition`: dropped fields are tested with the
//!   publisher, and Divvy has no binding conditions;
//! - `detect-*`: invalid pools are rejected earlier, by the validator.
#![allow(clippy::unwrap_used, reason = "test helpers")]

use divvy_slices::kinds::{ANNOTATION, annotation};
use divvy_slices::sync::{Action, Desired, Owner, plan};
use divvy_slices::{Consumption, Content, Device, Slice};
use k8s_openapi::api::resource::v1::{Counter, CounterSet, DeviceCapacity, DeviceTaint, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use proptest::prelude::*;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counter for the names that the simulated server generates.
static NAMES: AtomicUsize = AtomicUsize::new(0);

fn owner() -> Owner {
    Owner { driver: "gpu.divvy.dev".into(), node: "worker".into(), node_uid: "node-uid".into() }
}

/// A device by name; `gpu-0!a` has the taint `a`.
fn device(text: &str) -> Device {
    let (name, key) = text.split_once('!').map_or((text, None), |(name, key)| (name, Some(key)));
    let taint =
        |key: &str| DeviceTaint { key: key.into(), effect: "NoSchedule".into(), ..Default::default() };
    Device { name: name.into(), taints: key.map(|key| vec![taint(key)]), ..Default::default() }
}

/// Contents of slices, with devices separated by spaces.
fn contents(slices: &[&str]) -> Vec<Content> {
    let content = |text: &&str| Content {
        devices: text.split_whitespace().map(device).collect(),
        ..Content::default()
    };
    slices.iter().map(content).collect()
}

/// The slice as the server parses it.
fn read(slice: &Slice) -> ResourceSlice {
    serde_json::from_value(json!(slice)).unwrap()
}

/// Simulates the server: applies the calls, assigns names, UIDs and versions.
fn apply(there: &mut Vec<ResourceSlice>, actions: Vec<Action>) -> String {
    let mut log = Vec::new();
    for action in actions {
        match action {
            Action::Delete(slice) => {
                log.push(format!("delete {}", slice.metadata.name.as_deref().unwrap()));
                there.retain(|have| have.metadata.name != slice.metadata.name);
            }
            Action::Update { index, slice } => {
                log.push(format!("update {index}"));
                let place = there.iter_mut().find(|have| have.metadata.name == slice.metadata.name).unwrap();
                *place = read(&slice);
            }
            Action::Create { index, slice } => {
                log.push(format!("create {index}"));
                let number = NAMES.fetch_add(1, Ordering::Relaxed);
                let mut slice = read(&slice);
                let name = format!("{}{number}", slice.metadata.generate_name.clone().unwrap());
                slice.metadata.name = Some(name);
                there.push(slice);
            }
        }
    }
    log.join(", ")
}

fn sync(there: &mut Vec<ResourceSlice>, desired: &[Content]) -> String {
    let owner = owner();
    let actions = plan(
        Desired {
            owner: &owner,
            contents: desired.to_vec(),
            modes_off: None,
            used_generation: 0,
            annotate: true,
        },
        there.iter(),
    );
    apply(there, actions)
}

/// Checks that the pool is complete, in order and of one generation.
fn assert_published(there: &[ResourceSlice], desired: &[Content]) {
    assert_eq!(there.len(), desired.len());
    let mut sorted: Vec<&ResourceSlice> = there.iter().collect();
    sorted.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    for (slice, content) in sorted.iter().zip(desired) {
        assert_eq!(slice.spec.pool.resource_slice_count, desired.len() as i64);
        assert_eq!(slice.spec.pool.generation, there[0].spec.pool.generation);
        let devices = slice.spec.devices.iter().flatten().cloned();
        assert_eq!(devices.map(Device::from).collect::<Vec<_>>(), content.devices);
        assert_eq!(slice.spec.shared_counters.clone().unwrap_or_default(), content.counters);
    }
}

/// Checks the calls from one pool to the next, and the resulting generation.
fn check(before: &[&str], after: &[&str], calls: &str, generation: i64) {
    let mut there = Vec::new();
    sync(&mut there, &contents(before));
    let desired = contents(after);
    assert_eq!(sync(&mut there, &desired), calls, "{before:?} to {after:?}");
    assert_published(&there, &desired);
    assert_eq!(there[0].spec.pool.generation, generation, "{before:?} to {after:?}");
    assert_eq!(sync(&mut there, &desired), "", "the second plan must be empty");
}

#[test]
fn create_slice() {
    let mut there = Vec::new();
    assert_eq!(sync(&mut there, &contents(&["gpu-0"])), "create 0");
    let slice = &there[0];
    assert_eq!(slice.metadata.generate_name.as_deref(), Some("00000-gpu.divvy.dev-worker-"));
    assert_eq!(slice.spec.pool.generation, 1);
    assert_eq!(slice.spec.node_name.as_deref(), Some("worker"));
    let owner = &slice.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.kind.as_str(), owner.uid.as_str(), owner.controller), ("Node", "node-uid", Some(true)));
}

#[test]
fn empty_pool_is_one_slice_without_lists() {
    let mut there = Vec::new();
    assert_eq!(sync(&mut there, &contents(&[""])), "create 0");
    assert_eq!((&there[0].spec.devices, &there[0].spec.shared_counters), (&None, &None));
}

#[test]
fn keep_slice_unchanged() {
    check(&["gpu-0"], &["gpu-0"], "", 1);
}

#[test]
fn remove_pool() {
    // A pool with another name is from an earlier installation.
    let mut there = Vec::new();
    sync(&mut there, &contents(&["gpu-0"]));
    there[0].spec.pool.name = "other".into();
    let old = there[0].metadata.name.clone().unwrap();
    assert_eq!(sync(&mut there, &contents(&["gpu-0"])), format!("delete {old}, create 0"));
}

#[test]
fn update_slice() {
    check(&["gpu-0"], &["gpu-1"], "update 0", 1);
}

#[test]
fn update_slice_many_devices() {
    check(&["gpu-0 gpu-1 gpu-2"], &["gpu-0 gpu-1 gpu-2 gpu-3 gpu-4"], "update 0", 1);
}

#[test]
fn reordering_devices_is_a_change() {
    check(&["gpu-0 gpu-1"], &["gpu-1 gpu-0"], "update 0", 1);
}

#[test]
fn delete_redundant_slice() {
    let mut there = Vec::new();
    sync(&mut there, &contents(&["gpu-0"]));
    let mut twin = there[0].clone();
    twin.metadata.name = Some("00000-gpu.divvy.dev-worker-zzzzz".into());
    there.push(twin);
    assert_eq!(sync(&mut there, &contents(&["gpu-0"])), "delete 00000-gpu.divvy.dev-worker-zzzzz");
}

#[test]
fn one_existing_and_one_desired_slice_should_be_updated_inplace() {
    check(&["gpu-0"], &["gpu-0 gpu-1"], "update 0", 1);
}

#[test]
fn update_slice_when_more_than_one_existing_or_desired_slice() {
    check(&["gpu-0"], &["gpu-0", "gpu-1"], "update 0, create 1", 2);
}

#[test]
fn multiple_resourceslices_existing_no_changes() {
    check(&["gpu-0", "gpu-1", "gpu-2"], &["gpu-0", "gpu-1", "gpu-2"], "", 1);
}

#[test]
fn multiple_resourceslices_existing_with_different_generation() {
    let mut there = Vec::new();
    sync(&mut there, &contents(&["gpu-0", "gpu-1", "gpu-2"]));
    there[0].spec.pool.generation = 0;
    let old = there[0].metadata.name.clone().unwrap();
    let calls = format!("delete {old}, update 1, update 2, create 0");
    assert_eq!(sync(&mut there, &contents(&["gpu-0", "gpu-1", "gpu-2"])), calls);
    assert!(there.iter().all(|slice| slice.spec.pool.generation == 2));
}

#[test]
fn multiple_resourceslices_existing_one_changed() {
    check(&["gpu-0", "gpu-1", "gpu-2"], &["gpu-0", "gpu-9", "gpu-2"], "update 1", 1);
}

#[test]
fn multiple_resourceslices_existing_two_changed() {
    check(&["gpu-0", "gpu-1", "gpu-2"], &["gpu-8", "gpu-9", "gpu-2"], "update 0, update 1, update 2", 2);
}

#[test]
fn multiple_resourceslices_existing_one_removed() {
    let mut there = Vec::new();
    sync(&mut there, &contents(&["gpu-0", "gpu-1", "gpu-2"]));
    let last = there[2].metadata.name.clone().unwrap();
    let desired = contents(&["gpu-0", "gpu-1"]);
    assert_eq!(sync(&mut there, &desired), format!("delete {last}, update 0, update 1"));
    assert_published(&there, &desired);
}

#[test]
fn multiple_resourceslices_existing_one_added() {
    check(&["gpu-0", "gpu-1"], &["gpu-0", "gpu-1", "gpu-2"], "update 0, update 1, create 2", 2);
}

#[test]
fn keep_taint_unchanged() {
    let mut there = Vec::new();
    sync(&mut there, &contents(&["gpu-0!a"]));
    // The server sets the time.
    let taint = &mut there[0].spec.devices.as_mut().unwrap()[0].taints.as_mut().unwrap()[0];
    taint.time_added = Some(serde_json::from_str("\"2026-01-01T00:00:00Z\"").unwrap());
    assert_eq!(sync(&mut there, &contents(&["gpu-0!a"])), "");
}

#[test]
fn add_taints() {
    check(&["gpu-0 gpu-1"], &["gpu-0!a gpu-1!a"], "update 0", 1);
}

#[test]
fn drop_taints() {
    check(&["gpu-0!a"], &["gpu-0"], "update 0", 1);
}

#[test]
fn create_partitionable_devices() {
    let counters = |amount: &str| {
        BTreeMap::from([("memory".to_owned(), Counter { value: Quantity(amount.to_owned()) })])
    };
    let mut part = device("gpu-0");
    part.consumes_counters = Some(vec![Consumption {
        counter_set: "set".into(),
        counters: Arc::new(counters("1024Mi")),
        ..Default::default()
    }]);
    let desired = [
        Content {
            counters: vec![CounterSet { name: "set".into(), counters: counters("2Gi") }],
            ..Content::default()
        },
        Content { devices: vec![part], ..Content::default() },
    ];
    let mut there = Vec::new();
    assert_eq!(sync(&mut there, &desired), "create 0, create 1");
    assert_published(&there, &desired);
    // The server's canonical form of `1024Mi`.
    there[1].spec.devices.as_mut().unwrap()[0].consumes_counters.as_mut().unwrap()[0].counters =
        counters("1Gi");
    assert_eq!(sync(&mut there, &desired), "");
}

#[test]
fn quantities_are_compared_by_value() {
    let with = |amount: &str| {
        let mut gpu = device("gpu-0");
        let value = Quantity(amount.to_owned());
        let memory = DeviceCapacity { value, request_policy: None };
        gpu.capacity = Some(Arc::new(BTreeMap::from([("memory".into(), memory)])));
        [Content { devices: vec![gpu], ..Content::default() }]
    };
    let mut there = Vec::new();
    sync(&mut there, &with("1024Mi"));
    assert_eq!(sync(&mut there, &with("1Gi")), "");
    assert_eq!(sync(&mut there, &with("1000Mi")), "update 0");
}

#[test]
fn migration_from_random_naming_to_index_based_naming() {
    let mut there = Vec::new();
    sync(&mut there, &contents(&["gpu-0", "gpu-1"]));
    for (slice, name) in there.iter_mut().zip(["worker-gpu.divvy.dev-abcde", "worker-gpu.divvy.dev-fghij"]) {
        slice.metadata.name = Some(name.into());
    }
    let calls = "delete worker-gpu.divvy.dev-abcde, delete worker-gpu.divvy.dev-fghij, create 0, create 1";
    assert_eq!(sync(&mut there, &contents(&["gpu-0", "gpu-1"])), calls);
    assert_eq!(there[0].spec.pool.generation, 2);
}

#[test]
fn migration_mixed_naming() {
    let mut there = Vec::new();
    sync(&mut there, &contents(&["gpu-0", "gpu-1"]));
    there[1].metadata.name = Some("worker-gpu.divvy.dev-abcde".into());
    let calls = "delete worker-gpu.divvy.dev-abcde, update 0, create 1";
    assert_eq!(sync(&mut there, &contents(&["gpu-0", "gpu-1"])), calls);
}

#[test]
fn generation_is_not_reused_after_all_slices_are_gone() {
    let (owner, desired) = (owner(), contents(&["gpu-0"]));
    let none: [ResourceSlice; 0] = [];
    let actions = plan(
        Desired {
            owner: &owner,
            contents: desired.clone(),
            modes_off: None,
            used_generation: 7,
            annotate: true,
        },
        none.iter(),
    );
    let Action::Create { slice, .. } = &actions[0] else { panic!("{actions:?}") };
    assert_eq!(slice.pool.generation, 8);
}

#[test]
fn recreated_node_adopts_its_slices_in_place() {
    let desired = contents(&["gpu-0", "gpu-1"]);
    let mut there = Vec::new();
    sync(&mut there, &desired);
    let owner = Owner { node_uid: "new-uid".into(), ..owner() };
    let actions = plan(
        Desired {
            owner: &owner,
            contents: desired.clone(),
            modes_off: None,
            used_generation: 1,
            annotate: true,
        },
        there.iter(),
    );
    assert_eq!(apply(&mut there, actions), "update 0, update 1");
    assert!(there.iter().all(|slice| slice.spec.pool.generation == 1));
    assert!(there.iter().all(|slice| slice.metadata.owner_references.as_ref().unwrap()[0].uid == "new-uid"));
}

#[test]
fn annotation_is_repaired_in_place_and_keeps_others() {
    let desired = contents(&["gpu-0", "gpu-1", "gpu-2"]);
    let mut there = Vec::new();
    sync(&mut there, &desired);
    // As an older publisher left it, and as another client changed it.
    there[0].metadata.annotations = None;
    let others = there[2].metadata.annotations.as_mut().unwrap();
    let right = others.insert(ANNOTATION.to_owned(), "wrong".to_owned());
    others.insert("a".to_owned(), "b".to_owned());
    assert_eq!(sync(&mut there, &desired), "update 0, update 2");
    assert_published(&there, &desired);
    assert_eq!(there[0].spec.pool.generation, 1);
    assert!(there.iter().all(|slice| annotation(&slice.metadata) == right.as_deref()));
    assert_eq!(there[2].metadata.annotations.as_ref().unwrap()["a"], "b");
    assert_eq!(sync(&mut there, &desired), "");
}

#[test]
fn missing_annotation_is_not_a_change_without_annotate() {
    let (owner, desired) = (owner(), contents(&["gpu-0", "gpu-1"]));
    let mut there = Vec::new();
    sync(&mut there, &desired);
    there[0].metadata.annotations = None;
    let bare = |contents: &[Content]| Desired {
        owner: &owner,
        contents: contents.to_vec(),
        modes_off: None,
        used_generation: 1,
        annotate: false,
    };
    assert_eq!(plan(bare(&desired), there.iter()), []);
    let actions = plan(bare(&contents(&["gpu-0", "gpu-9"])), there.iter());
    let [Action::Update { index: 1, slice }] = actions.as_slice() else { panic!("{actions:?}") };
    assert_eq!(annotation(&slice.metadata), None, "the old annotation names other devices");
}

#[test]
fn wider_index_renames_all_slices() {
    let mut there = Vec::new();
    sync(&mut there, &contents(&["gpu-0"]));
    there[0].metadata.name = Some("0000000-gpu.divvy.dev-worker-abcde".into());
    let calls = "delete 0000000-gpu.divvy.dev-worker-abcde, create 0";
    assert_eq!(sync(&mut there, &contents(&["gpu-0"])), calls);
}

proptest! {
    /// After any interruption, one more plan reaches the desired state.
    #[test]
    fn interrupted_sequences_converge(
        pools in prop::collection::vec(prop::collection::vec("(gpu-[0-3] ?){0,3}", 1..5), 1..5),
        cuts in prop::collection::vec(0usize..8, 5),
        deleted in prop::collection::vec(any::<prop::sample::Index>(), 0..3),
    ) {
        let owner = owner();
        let mut there: Vec<ResourceSlice> = Vec::new();
        let mut last = Vec::new();
        for (pool, cut) in pools.iter().zip(cuts) {
            last = contents(&pool.iter().map(String::as_str).collect::<Vec<_>>());
            let contents = last.clone();
            let annotate = true;
            let desired = Desired { owner: &owner, contents, modes_off: None, used_generation: 0, annotate };
            let mut actions = plan(desired, there.iter());
            actions.truncate(cut);
            apply(&mut there, actions);
        }
        for index in deleted {
            if !there.is_empty() {
                there.remove(index.index(there.len()));
            }
        }
        sync(&mut there, &last);
        assert_published(&there, &last);
        prop_assert_eq!(sync(&mut there, &last), "");
    }
}

#[test]
fn modes_that_are_off_are_named_by_the_first_slice() {
    let (owner, mut there) = (owner(), Vec::new());
    let mut publish = |desired: &[Content], modes_off: Option<&str>| {
        let modes_off = modes_off.map(str::to_owned);
        let desired = Desired {
            owner: &owner,
            contents: desired.to_vec(),
            modes_off,
            used_generation: 0,
            annotate: true,
        };
        let actions = plan(desired, there.iter());
        let log = apply(&mut there, actions);
        let shown = there.iter().map(|slice| slice.metadata.annotations.clone().unwrap_or_default());
        let shown: Vec<_> = shown.map(|mut all| all.remove("gpu.divvy.dev/modes-off")).collect();
        (log, shown[0].clone(), shown[1].clone())
    };
    let (plain, tainted) = (contents(&["a", "b"]), contents(&["a", "b!x"]));
    let text = |text: &str| Some(text.to_owned());
    assert_eq!(publish(&plain, None), ("create 0, create 1".to_owned(), None, None));
    // The taint and the name of the closing arrive in one generation.
    let closing = publish(&tainted, Some("mps@7:0"));
    assert_eq!(closing, ("update 0, update 1".to_owned(), text("mps@7:0"), None));
    assert_eq!(publish(&tainted, Some("mps@7:0")), (String::new(), text("mps@7:0"), None));
    assert_eq!(publish(&tainted, Some("mps@8:0")), ("update 0".to_owned(), text("mps@8:0"), None));
    assert_eq!(publish(&plain, None), ("update 0, update 1".to_owned(), None, None));
}
