//! Pools as the scheduler gathers them for one node.
//!
//! A pool consists of its slices for this node with the highest generation, and is usable if it is
//! complete and consistent. The order is the preference: pools by driver and name, those with
//! binding conditions last; then slices by name; then devices as published.

use crate::allocations::{Allocations, DeviceKey};
use crate::capacity::{self, Capacities};
use crate::node::targets;
use crate::release::Release;
use crate::view::ClusterView;
use divvy_api::Quantity;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use std::collections::{BTreeMap, BTreeSet};

/// All pools and devices that the node can use.
#[derive(Debug)]
pub(crate) struct Pools<'a> {
    pub(crate) pools: Vec<Pool<'a>>,
    /// Devices of slices for this node in usable pools, in order of preference.
    pub(crate) devices: Vec<Candidate<'a>>,
}

#[derive(Debug)]
pub(crate) struct Pool<'a> {
    pub(crate) driver: &'a str,
    pub(crate) name: &'a str,
    pub(crate) state: State,
    /// The remainder of each counter, in nano-units. Negative if more is allocated than exists.
    pub(crate) available: Vec<i128>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Usable,
    /// Slices are missing, because the pool is being updated.
    Incomplete {
        have: usize,
        want: i64,
    },
    Invalid {
        reason: String,
    },
}

/// A device that the search may pick.
#[derive(Debug)]
pub(crate) struct Candidate<'a> {
    pub(crate) pool: usize,
    pub(crate) key: DeviceKey<'a>,
    pub(crate) wire: &'a Device,
    pub(crate) slice: &'a ResourceSlice,
    /// Whether the device is available to this node, where its slice leaves that to each device.
    pub(crate) here: bool,
    /// `allowMultipleAllocations`.
    pub(crate) multiple: bool,
    pub(crate) capacity: Capacities<'a>,
    /// The amount of each capacity that shares of other claims hold, in nano-units.
    pub(crate) held: Vec<i128>,
    /// Index of a counter in its pool, and the amount in nano-units.
    pub(crate) counters: Vec<(usize, i128)>,
}

impl<'a> Pools<'a> {
    pub(crate) fn gather(cluster: &ClusterView<'a>, allocations: &Allocations<'a>) -> Self {
        let mut by_id: BTreeMap<(&str, &str), Vec<&ResourceSlice>> = BTreeMap::new();
        for slice in cluster.slices {
            by_id.entry((&slice.spec.driver, &slice.spec.pool.name)).or_default().push(slice);
        }
        let mut gathered: Vec<_> = by_id
            .into_iter()
            .filter_map(|((driver, name), slices)| gather_pool(cluster, allocations, driver, name, slices))
            .collect();
        // The sort is stable, so driver and name order pools within each group.
        gathered.sort_by_key(|(_, devices)| {
            devices.iter().any(|device| device.wire.binding_conditions.is_some())
        });
        let mut found = Self { pools: Vec::new(), devices: Vec::new() };
        for (index, (pool, devices)) in gathered.into_iter().enumerate() {
            found.pools.push(pool);
            found.devices.extend(devices.into_iter().map(|device| Candidate { pool: index, ..device }));
        }
        found
    }
}

/// A pool and its devices, or `None` if the pool has no slice for this node or is being replaced.
fn gather_pool<'a>(
    cluster: &ClusterView<'_>,
    allocations: &Allocations<'a>,
    driver: &'a str,
    name: &'a str,
    mut slices: Vec<&'a ResourceSlice>,
) -> Option<(Pool<'a>, Vec<Candidate<'a>>)> {
    let (node, release) = (cluster.node, cluster.release);
    let latest = slices.iter().map(|slice| slice.spec.pool.generation).max()?;
    // A skipped slice still counts as a newer generation, but not as a part of its pool.
    if release.skips_compatibility_groups() {
        slices.retain(|slice| !has_compatibility_groups(slice));
    }
    let mut relevant: Vec<_> = slices.iter().copied().filter(|slice| is_relevant(node, slice)).collect();
    let generation = relevant.iter().map(|slice| slice.spec.pool.generation).max()?;
    relevant.retain(|slice| slice.spec.pool.generation == generation);
    let want = relevant.first()?.spec.pool.resource_slice_count;
    slices.retain(|slice| slice.spec.pool.generation == generation);
    if relevant.len() as i64 == want {
        // The scheduler does not look for slices of other nodes then, even newer ones.
        slices.clone_from(&relevant);
    } else if latest > generation {
        return None;
    }
    let mut pool = Pool { driver, name, state: State::Usable, available: Vec::new() };
    if slices.len() as i64 != want {
        pool.state = State::Incomplete { have: slices.len(), want };
        return Some((pool, Vec::new()));
    }
    slices.sort_by_key(|slice| slice.metadata.name.as_deref());
    match read_pool(cluster, allocations, driver, name, &slices) {
        Ok((available, devices)) => Some((Pool { available, ..pool }, devices)),
        Err(reason) => {
            pool.state = State::Invalid { reason };
            Some((pool, Vec::new()))
        }
    }
}

fn has_compatibility_groups(slice: &ResourceSlice) -> bool {
    let devices = slice.spec.devices.iter().flatten();
    let mut consumed = devices.flat_map(|device| device.consumes_counters.iter().flatten());
    consumed.any(|counters| counters.compatibility_groups.as_ref().is_some_and(|groups| !groups.is_empty()))
}

fn is_relevant(node: &Node, slice: &ResourceSlice) -> bool {
    let spec = &slice.spec;
    let by_slice = spec.node_name.is_some() || spec.all_nodes == Some(true) || spec.node_selector.is_some();
    if !by_slice && spec.per_device_node_selection == Some(true) {
        return spec.devices.iter().flatten().any(|device| is_for(node, device));
    }
    targets(node, spec.node_name.as_deref(), spec.all_nodes, spec.node_selector.as_ref())
}

fn is_for(node: &Node, device: &Device) -> bool {
    targets(node, device.node_name.as_deref(), device.all_nodes, device.node_selector.as_ref())
}

/// The counters of a pool, by the names of their set and their own.
struct Counters<'a> {
    sets: BTreeMap<&'a str, BTreeMap<&'a str, usize>>,
    available: Vec<i128>,
}

fn read_pool<'a>(
    cluster: &ClusterView<'_>,
    allocations: &Allocations<'a>,
    driver: &'a str,
    name: &'a str,
    slices: &[&'a ResourceSlice],
) -> Result<(Vec<i128>, Vec<Candidate<'a>>), String> {
    let mut counters = read_counters(slices)?;
    let mut devices = Vec::new();
    let mut names = BTreeSet::new();
    // The scheduler ignores devices beside counter sets. The API forbids them.
    let with_devices =
        slices.iter().filter(|slice| slice.spec.shared_counters.as_ref().is_none_or(Vec::is_empty));
    for slice in with_devices {
        let relevant = is_relevant(cluster.node, slice);
        for wire in slice.spec.devices.iter().flatten() {
            let key = DeviceKey { driver, pool: name, device: &wire.name };
            let consumed = read_consumed(&counters, wire)?;
            if allocations.is_allocated(&key) {
                for (counter, amount) in &consumed {
                    let left = &mut counters.available[*counter];
                    *left = left.saturating_sub(*amount);
                }
            }
            if !relevant {
                continue;
            }
            if !names.insert(wire.name.as_str()) {
                return Err(format!("device {} is there twice", wire.name));
            }
            let here = slice.spec.per_device_node_selection != Some(true) || is_for(cluster.node, wire);
            let device = read_device(cluster.release, key, slice, wire)?;
            let held = allocations.shared(&key);
            let amount = |name| held.and_then(|held| held.get(name)).copied().unwrap_or(0);
            let held = device.capacity.keys().map(|name| amount(*name)).collect();
            devices.push(Candidate { here, held, counters: consumed, ..device });
        }
    }
    Ok((counters.available, devices))
}

fn read_counters<'a>(slices: &[&'a ResourceSlice]) -> Result<Counters<'a>, String> {
    let mut found = Counters { sets: BTreeMap::new(), available: Vec::new() };
    for set in slices.iter().flat_map(|slice| slice.spec.shared_counters.iter().flatten()) {
        let mut names = BTreeMap::new();
        for (name, counter) in &set.counters {
            names.insert(name.as_str(), found.available.len());
            found.available.push(nano(&counter.value)?);
        }
        if found.sets.insert(&set.name, names).is_some() {
            return Err(format!("counter set {} is there twice", set.name));
        }
    }
    Ok(found)
}

/// Index and amount of each counter that a device consumes.
fn read_consumed(counters: &Counters<'_>, wire: &Device) -> Result<Vec<(usize, i128)>, String> {
    let mut consumed = Vec::new();
    for consumption in wire.consumes_counters.iter().flatten() {
        let set = consumption.counter_set.as_str();
        let names = counters
            .sets
            .get(set)
            .ok_or_else(|| format!("device {} consumes counters of unknown set {set}", wire.name))?;
        for (name, counter) in &consumption.counters {
            let index = names.get(name.as_str()).ok_or_else(|| {
                format!("device {} consumes unknown counter {name} of set {set}", wire.name)
            })?;
            consumed.push((*index, nano(&counter.value)?));
        }
    }
    Ok(consumed)
}

fn read_device<'a>(
    release: Release,
    key: DeviceKey<'a>,
    slice: &'a ResourceSlice,
    wire: &'a Device,
) -> Result<Candidate<'a>, String> {
    let capacity = match &wire.capacity {
        Some(capacity) => capacity::read(release, key.driver, capacity)
            .map_err(|cause| format!("device {}, {cause}", wire.name))?,
        None => Capacities::new(),
    };
    Ok(Candidate {
        pool: 0,
        key,
        wire,
        slice,
        here: true,
        multiple: wire.allow_multiple_allocations == Some(true),
        capacity,
        held: Vec::new(),
        counters: Vec::new(),
    })
}

fn nano(wire: &k8s_openapi::apimachinery::pkg::api::resource::Quantity) -> Result<i128, String> {
    Quantity::try_from(wire).map(Quantity::as_nano).map_err(|cause| cause.to_string())
}
