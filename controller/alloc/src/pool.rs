//! Pools as the scheduler gathers them for one node.
//!
//! Only the highest generation of a pool counts, and only if it is complete and consistent. The
//! order is the preference: pools by driver and name, those with binding conditions last; then
//! slices by name; then devices as published.

use crate::allocations::{Allocations, DeviceKey};
use crate::capacity::Capacity;
use crate::node::targets;
use crate::view::ClusterView;
use divvy_api::Quantity;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use std::collections::{BTreeMap, BTreeSet};

/// Names of a counter set and of a counter in it.
pub(crate) type CounterKey<'a> = (&'a str, &'a str);

/// All pools and devices that the node can use.
#[derive(Debug)]
pub(crate) struct Pools<'a> {
    pub(crate) pools: Vec<Pool<'a>>,
    /// Devices of usable pools that are available to this node, in order of preference.
    pub(crate) devices: Vec<Candidate<'a>>,
}

#[derive(Debug)]
pub(crate) struct Pool<'a> {
    pub(crate) driver: &'a str,
    pub(crate) name: &'a str,
    pub(crate) state: State,
    /// The remainder of each counter, in nano-units. Negative if more is allocated than exists.
    pub(crate) available: BTreeMap<CounterKey<'a>, i128>,
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
    /// `allowMultipleAllocations`.
    pub(crate) multiple: bool,
    pub(crate) capacity: BTreeMap<&'a str, Capacity>,
    pub(crate) counters: BTreeMap<CounterKey<'a>, i128>,
}

impl<'a> Pools<'a> {
    pub(crate) fn gather(cluster: &ClusterView<'a>, allocations: &Allocations<'a>) -> Self {
        let mut by_id: BTreeMap<(&str, &str), Vec<&ResourceSlice>> = BTreeMap::new();
        for slice in cluster.slices {
            by_id.entry((&slice.spec.driver, &slice.spec.pool.name)).or_default().push(slice);
        }
        let mut gathered: Vec<_> = by_id
            .into_iter()
            .filter_map(|((driver, name), slices)| {
                gather_pool(cluster.node, allocations, driver, name, slices)
            })
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

fn gather_pool<'a>(
    node: &Node,
    allocations: &Allocations<'a>,
    driver: &'a str,
    name: &'a str,
    mut slices: Vec<&'a ResourceSlice>,
) -> Option<(Pool<'a>, Vec<Candidate<'a>>)> {
    let newest = slices.iter().map(|slice| slice.spec.pool.generation).max()?;
    // A pool whose newest generation does not include this node is being replaced.
    slices.retain(|slice| slice.spec.pool.generation == newest);
    slices.sort_by_key(|slice| slice.metadata.name.as_deref());
    let relevant: Vec<_> = slices.iter().copied().filter(|slice| is_relevant(node, slice)).collect();
    let want = relevant.first()?.spec.pool.resource_slice_count;
    if relevant.len() as i64 == want {
        slices = relevant;
    }
    let mut pool = Pool { driver, name, state: State::Usable, available: BTreeMap::new() };
    if slices.len() as i64 != want {
        pool.state = State::Incomplete { have: slices.len(), want };
        return Some((pool, Vec::new()));
    }
    match read_pool(node, allocations, driver, name, &slices) {
        Ok((available, devices)) => Some((Pool { available, ..pool }, devices)),
        Err(reason) => {
            pool.state = State::Invalid { reason };
            Some((pool, Vec::new()))
        }
    }
}

fn is_relevant(node: &Node, slice: &ResourceSlice) -> bool {
    let spec = &slice.spec;
    if spec.per_device_node_selection == Some(true) {
        return spec.devices.iter().flatten().any(|device| is_for(node, slice, device));
    }
    targets(node, spec.node_name.as_deref(), spec.all_nodes, spec.node_selector.as_ref())
}

fn is_for(node: &Node, slice: &ResourceSlice, device: &Device) -> bool {
    match slice.spec.per_device_node_selection {
        Some(true) => {
            targets(node, device.node_name.as_deref(), device.all_nodes, device.node_selector.as_ref())
        }
        _ => is_relevant(node, slice),
    }
}

type Read<'a> = (BTreeMap<CounterKey<'a>, i128>, Vec<Candidate<'a>>);

fn read_pool<'a>(
    node: &Node,
    allocations: &Allocations<'a>,
    driver: &'a str,
    name: &'a str,
    slices: &[&'a ResourceSlice],
) -> Result<Read<'a>, String> {
    let mut available = read_counters(slices)?;
    let mut devices = Vec::new();
    let mut names = BTreeSet::new();
    for slice in slices {
        for wire in slice.spec.devices.iter().flatten() {
            let device = read_device(DeviceKey { driver, pool: name, device: &wire.name }, slice, wire)?;
            for (counter, amount) in &device.counters {
                let (set, key) = counter;
                let left = available.get_mut(counter).ok_or_else(|| {
                    format!("device {} consumes counter {key} of unknown set {set}", wire.name)
                })?;
                if allocations.is_allocated(&device.key) {
                    *left = left.saturating_sub(*amount);
                }
            }
            if is_relevant(node, slice) && !names.insert(wire.name.as_str()) {
                return Err(format!("device {} is there twice", wire.name));
            }
            if is_for(node, slice, wire) {
                devices.push(device);
            }
        }
    }
    Ok((available, devices))
}

fn read_counters<'a>(slices: &[&'a ResourceSlice]) -> Result<BTreeMap<CounterKey<'a>, i128>, String> {
    let mut counters = BTreeMap::new();
    let mut sets = BTreeSet::new();
    for set in slices.iter().flat_map(|slice| slice.spec.shared_counters.iter().flatten()) {
        if !sets.insert(set.name.as_str()) {
            return Err(format!("counter set {} is there twice", set.name));
        }
        for (name, counter) in &set.counters {
            counters.insert((set.name.as_str(), name.as_str()), nano(&counter.value)?);
        }
    }
    Ok(counters)
}

fn read_device<'a>(
    key: DeviceKey<'a>,
    slice: &'a ResourceSlice,
    wire: &'a Device,
) -> Result<Candidate<'a>, String> {
    let mut capacity = BTreeMap::new();
    for (name, value) in wire.capacity.iter().flatten() {
        let value = Capacity::read(value)
            .map_err(|cause| format!("device {}, capacity {name}: {cause}", wire.name))?;
        capacity.insert(name.as_str(), value);
    }
    let mut counters = BTreeMap::new();
    for consumption in wire.consumes_counters.iter().flatten() {
        for (name, counter) in &consumption.counters {
            let sum: &mut i128 =
                counters.entry((consumption.counter_set.as_str(), name.as_str())).or_insert(0);
            *sum = sum.saturating_add(nano(&counter.value)?);
        }
    }
    let multiple = wire.allow_multiple_allocations == Some(true);
    Ok(Candidate { pool: 0, key, wire, slice, multiple, capacity, counters })
}

fn nano(wire: &k8s_openapi::apimachinery::pkg::api::resource::Quantity) -> Result<i128, String> {
    Quantity::try_from(wire).map(Quantity::as_nano).map_err(|cause| cause.to_string())
}
