//! Fingerprints of the kinds of devices: equal for equal nodes, and different where a class selector
//! could see a difference.
#![allow(clippy::unwrap_used, reason = "test helpers")]

mod common;

use common::{in_mode, inventory_of, with_instance};
use divvy_model::Inventory;
use divvy_model::inventory::{MigMode, Origin, Presence};
use divvy_slices::kinds::{Facts, fingerprint};
use divvy_slices::{Content, PoolOptions, pool, slices};
use k8s_openapi::api::resource::v1::Device;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeSet;

const H100: &str = "H100-SXM5-80GB";

/// The devices as the server stores them.
fn stored(content: &Content) -> Vec<Device> {
    serde_json::from_value(serde_json::to_value(&content.devices).unwrap()).unwrap()
}

fn fingerprint_of(devices: &[Device]) -> String {
    fingerprint(devices.iter().filter_map(Facts::of))
}

/// The different fingerprints of the slices of a node.
fn fingerprints(node: &Inventory) -> BTreeSet<String> {
    let contents = slices(pool(node, &PoolOptions::default()));
    contents.iter().map(|content| fingerprint_of(&stored(content))).collect()
}

/// An inventory of an equal node: the same model, and other identities.
fn elsewhere() -> Inventory {
    let mut node = inventory_of(H100, 8);
    for gpu in &mut node.gpus {
        gpu.uuid = format!("GPU-0000{}", gpu.number).into();
        gpu.pci_bus_id = format!("0000:{:02x}:00.0", 0x80 + gpu.number.0);
        gpu.pcie_root = Some(format!("pci0000:{:02x}", 0x70 + gpu.number.0));
        gpu.numa_node = None;
        gpu.nvlink_group = Some("another".to_owned());
    }
    node
}

#[test]
fn equal_nodes_have_equal_fingerprints() {
    let one = fingerprints(&inventory_of(H100, 8));
    // Counter sets, whole GPUs and shares, instances, and time-slices and MPS.
    assert_eq!(one.len(), 4, "{one:?}");
    assert_eq!(fingerprints(&elsewhere()), one);
    assert_eq!(fingerprints(&inventory_of(H100, 4)), one);
}

#[test]
fn state_of_a_gpu_does_not_change_fingerprints() {
    let one = fingerprints(&inventory_of(H100, 8));
    let mut node = inventory_of(H100, 8);
    node.gpus[0] = with_instance(in_mode(node.gpus[0].clone(), MigMode::On), 19, 0, Origin::Foreign);
    node.gpus[7] = with_instance(in_mode(node.gpus[7].clone(), MigMode::On), 9, 0, Origin::Ours);
    node.gpus[7].nvlink_peers = 0;
    node.gpus[3].presence = Presence::Missing;
    assert_eq!(fingerprints(&node), one);
}

#[test]
fn fingerprint_follows_what_selectors_can_see() {
    let one = fingerprints(&inventory_of(H100, 8));
    let changed = |change: fn(&mut Inventory)| {
        let mut node = inventory_of(H100, 8);
        change(&mut node);
        let same = fingerprints(&node).intersection(&one).count();
        // Slices of counter sets have no devices.
        assert_eq!(same, 1);
    };
    changed(|node| node.driver_version = "590.10".to_owned());
    changed(|node| node.cuda_version = (13, 2));
    changed(|node| node.gpus.iter_mut().for_each(|gpu| gpu.product.push('X')));
    changed(|node| node.gpus.iter_mut().for_each(|gpu| gpu.brand.push('X')));
}

#[test]
fn fingerprint_compares_capacities_by_value() {
    let contents = slices(pool(&inventory_of(H100, 1), &PoolOptions::default()));
    let devices = stored(contents.iter().find(|content| !content.devices.is_empty()).unwrap());
    let with = |memory: &str| {
        let mut devices = devices.clone();
        let capacity = devices[0].capacity.as_mut().unwrap();
        capacity.get_mut("memory").unwrap().value = Quantity(memory.to_owned());
        fingerprint_of(&devices)
    };
    assert_eq!(with("1Gi"), with("1024Mi"));
    assert_ne!(with("1Gi"), with("2Gi"));
    let mut several = devices.clone();
    several[0].allow_multiple_allocations = Some(true);
    assert_ne!(fingerprint_of(&several), fingerprint_of(&devices));
    assert_eq!(fingerprint_of(&[]), fingerprint_of(&[Device::default()]), "a device without a type");
}
