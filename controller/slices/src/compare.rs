//! Comparison of slices by their meaning in the API: absent and empty lists are equal, and
//! quantities compare by value. A taint without a time equals the same taint with a time.

use crate::wire::{Content, Device};
use divvy_api::Quantity;
use k8s_openapi::api::resource::v1::{CounterSet, DeviceCapacity, DeviceTaint, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as WireQuantity;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The content of a slice from the server.
pub(crate) fn content(spec: &ResourceSliceSpec) -> Content {
    Content {
        counters: spec.shared_counters.clone().unwrap_or_default(),
        devices: spec.devices.iter().flatten().cloned().map(Device::from).collect(),
    }
}

/// Whether two contents have the same meaning.
pub(crate) fn same(a: &Content, b: &Content) -> bool {
    // Fast path: most compared contents are identical.
    a == b || normal(a.clone()) == normal(b.clone())
}

/// The parts in which two contents differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) counters: bool,
    pub(crate) shares: bool,
    pub(crate) taints: bool,
    pub(crate) rest: bool,
}

/// The parts that the server did not store as sent, or `None`.
pub(crate) fn dropped(sent: &Content, kept: &Content) -> Option<Difference> {
    if same(sent, kept) {
        return None;
    }
    let (mut sent, mut kept) = (normal(sent.clone()), normal(kept.clone()));
    let mut difference = Difference::default();
    let consumptions =
        |content: &Content| content.devices.iter().filter(|d| d.consumes_counters.is_some()).count();
    let taints = |content: &Content| content.devices.iter().flat_map(|d| &d.taints).flatten().count();
    let shares = |content: &Content| {
        let policies = |device: &Device| {
            let capacities = device.capacity.iter().flat_map(|map| map.values());
            capacities.filter(|capacity| capacity.request_policy.is_some()).count()
        };
        let all = content.devices.iter().filter(|d| d.allow_multiple_allocations.is_some());
        all.map(|device| 1 + policies(device)).sum::<usize>()
    };
    difference.counters =
        consumptions(&kept) < consumptions(&sent) || kept.counters.len() < sent.counters.len();
    difference.shares = shares(&kept) < shares(&sent);
    difference.taints = taints(&kept) < taints(&sent);
    for content in [&mut sent, &mut kept] {
        content.counters.clear();
        for device in &mut content.devices {
            device.consumes_counters = None;
            device.taints = None;
            device.allow_multiple_allocations = None;
            if let Some(capacities) = &mut device.capacity {
                Arc::make_mut(capacities).values_mut().for_each(|capacity| capacity.request_policy = None);
            }
        }
    }
    difference.rest = sent != kept || !(difference.counters || difference.shares || difference.taints);
    Some(difference)
}

/// Copies the times of existing taints into the desired contents: a taint that stays keeps the
/// time at which it was added.
pub(crate) fn keep_times<'a>(
    desired: &mut [Content],
    published: impl IntoIterator<Item = &'a ResourceSliceSpec>,
) {
    let mut known: BTreeMap<(&str, &str), Vec<&DeviceTaint>> = BTreeMap::new();
    for device in published.into_iter().flat_map(|spec| spec.devices.iter().flatten()) {
        for taint in device.taints.iter().flatten() {
            known.entry((&device.name, &taint.key)).or_default().push(taint);
        }
    }
    if known.is_empty() {
        return;
    }
    for device in desired.iter_mut().flat_map(|content| &mut content.devices) {
        for taint in device.taints.iter_mut().flatten().filter(|taint| taint.time_added.is_none()) {
            let candidates = known.get(&(device.name.as_str(), taint.key.as_str())).into_iter().flatten();
            let same = |other: &&&DeviceTaint| other.value == taint.value && other.effect == taint.effect;
            taint.time_added = candidates.copied().find(|t| same(&t)).and_then(|t| t.time_added.clone());
        }
    }
}

fn normal(mut content: Content) -> Content {
    content.counters.iter_mut().for_each(normal_set);
    content.devices.iter_mut().for_each(normal_device);
    content
}

fn normal_set(set: &mut CounterSet) {
    set.counters.values_mut().for_each(|counter| canonical(&mut counter.value));
}

fn normal_device(device: &mut Device) {
    if let Some(capacities) = &mut device.capacity {
        Arc::make_mut(capacities).values_mut().for_each(normal_capacity);
    }
    for consumption in device.consumes_counters.iter_mut().flatten() {
        let counters = Arc::make_mut(&mut consumption.counters).values_mut();
        counters.for_each(|counter| canonical(&mut counter.value));
        empty_is_none(&mut consumption.compatibility_groups);
    }
    for taint in device.taints.iter_mut().flatten() {
        taint.time_added = None;
        taint.value = taint.value.take().filter(|value| !value.is_empty());
    }
    empty_is_none(&mut device.taints);
    empty_is_none(&mut device.consumes_counters);
    empty_is_none(&mut device.binding_conditions);
    empty_is_none(&mut device.binding_failure_conditions);
    device.attributes = device.attributes.take().filter(|map| !map.is_empty());
    device.capacity = device.capacity.take().filter(|map| !map.is_empty());
    device.allow_multiple_allocations = device.allow_multiple_allocations.filter(|allowed| *allowed);
}

fn normal_capacity(capacity: &mut DeviceCapacity) {
    canonical(&mut capacity.value);
    let Some(policy) = &mut capacity.request_policy else { return };
    policy.default.iter_mut().for_each(canonical);
    policy.valid_values.iter_mut().flatten().for_each(canonical);
    if let Some(range) = &mut policy.valid_range {
        canonical(&mut range.min);
        range.max.iter_mut().chain(&mut range.step).for_each(canonical);
    }
}

fn canonical(quantity: &mut WireQuantity) {
    if let Ok(parsed) = quantity.0.parse::<Quantity>() {
        // Compare by value: `1e3` and `1k` are the same amount.
        quantity.0 = parsed.as_nano().to_string();
    }
}

fn empty_is_none<T>(list: &mut Option<Vec<T>>) {
    *list = list.take().filter(|list| !list.is_empty());
}
