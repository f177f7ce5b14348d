//! The rules of one device.
//!
//! The devices of a GPU say nearly the same, so only what a device says otherwise
//! than the one before it is looked at: what was good there is good here. What the
//! two share is not even compared.

use super::{
    ATTRIBUTE_VALUES, ATTRIBUTES_AND_CAPACITIES, BINDING_CONDITIONS, Broken, CONSUMED_SETS, COUNTERS, Sets,
    TAINTS, VALID_VALUES, amount, at_most, syntax,
};
use crate::wire::{Consumption, Device};
use k8s_openapi::api::resource::v1::{CapacityRequestPolicy, DeviceAttribute, DeviceCapacity, DeviceTaint};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// Whether the device makes its slice one of at most 64.
pub(super) fn is_advanced(device: &Device) -> bool {
    let list = |attribute: &DeviceAttribute| {
        attribute.bools.is_some()
            || attribute.ints.is_some()
            || attribute.strings.is_some()
            || attribute.versions.is_some()
    };
    device.taints.is_some()
        || device.consumes_counters.is_some()
        || device.attributes.iter().flat_map(|map| map.values()).any(list)
}

/// `before` is a device that was found good.
pub(super) fn check<'a>(
    device: &'a Device,
    before: Option<&'a Device>,
    sets: &Sets<'_>,
) -> Result<(), Broken> {
    syntax::label("name", &device.name)?;
    let keys = device.attributes.as_ref().map_or(0, |map| map.len())
        + device.capacity.as_ref().map_or(0, |map| map.len());
    at_most("attributes and capacities", keys, ATTRIBUTES_AND_CAPACITIES)?;
    attributes(device.attributes.as_ref(), before.and_then(|before| before.attributes.as_ref()))?;
    let shared = device.allow_multiple_allocations == Some(true);
    // The rules of a capacity are others where the device cannot be shared.
    let alike = before.filter(|before| shared == (before.allow_multiple_allocations == Some(true)));
    for (name, value) in beside(device.capacity.as_ref(), alike.and_then(|alike| alike.capacity.as_ref())) {
        capacity(name, value, shared)?;
    }
    let before = before.and_then(|before| before.consumes_counters.as_deref());
    consumptions(device.consumes_counters.as_deref().unwrap_or_default(), before.unwrap_or_default(), sets)?;
    taints(device.taints.as_deref().unwrap_or_default())?;
    binding_conditions(device)?;
    if device.node_name.is_some() || device.node_selector.is_some() || device.all_nodes.is_some() {
        return Err(Broken::OwnNode);
    }
    Ok(())
}

/// A map of a device.
type Part<V> = Arc<BTreeMap<String, V>>;

/// The entries of a map that another does not have at the same place.
fn beside<'a, V: PartialEq>(
    map: Option<&'a Part<V>>,
    before: Option<&'a Part<V>>,
) -> impl Iterator<Item = (&'a String, &'a V)> {
    let map = map.filter(|map| !before.is_some_and(|before| Arc::ptr_eq(map, before)));
    let mut before = before.into_iter().flat_map(|before| before.iter());
    map.into_iter().flat_map(|map| map.iter()).filter(move |entry| before.next() != Some(*entry))
}

/// Lengths of the lists that the attribute has.
fn lists(attribute: &DeviceAttribute) -> [Option<usize>; 4] {
    [
        attribute.bools.as_ref().map(Vec::len),
        attribute.ints.as_ref().map(Vec::len),
        attribute.strings.as_ref().map(Vec::len),
        attribute.versions.as_ref().map(Vec::len),
    ]
}

fn attributes(
    map: Option<&Part<DeviceAttribute>>,
    before: Option<&Part<DeviceAttribute>>,
) -> Result<(), Broken> {
    for (name, value) in beside(map, before) {
        attribute(name, value)?;
    }
    let items = |value| lists(value).into_iter().flatten().sum::<usize>().max(1);
    let values = map.into_iter().flat_map(|map| map.values()).map(items).sum();
    at_most("attribute values", values, ATTRIBUTE_VALUES)
}

fn attribute(name: &str, attribute: &DeviceAttribute) -> Result<(), Broken> {
    syntax::qualified("attribute", name)?;
    let DeviceAttribute { bool, int, string, strings, version, versions, .. } = attribute;
    let scalars = [bool.is_some(), int.is_some(), string.is_some(), version.is_some()];
    let set = scalars.into_iter().filter(|set| *set).count() + lists(attribute).iter().flatten().count();
    if set != 1 {
        return Err(Broken::OneValue { name: name.to_owned() });
    }
    if lists(attribute).contains(&Some(0)) {
        return Err(Broken::Empty { what: "list attribute" });
    }
    string.iter().chain(strings.iter().flatten()).try_for_each(|text| syntax::attribute_text(text))?;
    version.iter().chain(versions.iter().flatten()).try_for_each(|text| syntax::version(text))
}

fn capacity(name: &str, capacity: &DeviceCapacity, shared: bool) -> Result<(), Broken> {
    syntax::qualified("capacity", name)?;
    let value = amount("capacity", name, &capacity.value.0)?;
    match (&capacity.request_policy, shared) {
        (Some(_), false) => Err(Broken::PolicyForbidden { name: name.to_owned() }),
        (None, true) => Err(Broken::PolicyMissing { name: name.to_owned() }),
        (None, false) => Ok(()),
        (Some(policy), true) => request_policy(name, policy, value),
    }
}

fn request_policy(name: &str, policy: &CapacityRequestPolicy, value: i64) -> Result<(), Broken> {
    let broken = |why| Broken::Policy { name: name.to_owned(), why };
    let of =
        |text: &k8s_openapi::apimachinery::pkg::api::resource::Quantity| amount("capacity", name, &text.0);
    let default =
        policy.default.as_ref().map(of).transpose()?.ok_or_else(|| broken("a default is required"))?;
    let rule = |holds: bool, why| if holds { Ok(()) } else { Err(broken(why)) };
    rule(default <= value, "the default is more than there is")?;
    match (&policy.valid_values, &policy.valid_range) {
        (Some(_), Some(_)) => Err(broken("values and a range exclude each other")),
        (None, None) => Ok(()),
        (Some(values), None) => {
            at_most("valid values", values.len(), VALID_VALUES)?;
            let values = values.iter().map(of).collect::<Result<Vec<_>, _>>()?;
            rule(values.is_sorted_by(|a, b| a < b), "the values must be ascending and unique")?;
            rule(values.iter().all(|v| *v <= value), "a value is more than there is")?;
            rule(values.contains(&default), "the default must be one of the values")
        }
        (None, Some(range)) => {
            let min = of(&range.min)?;
            let max = range.max.as_ref().map(of).transpose()?.unwrap_or(value);
            rule(min <= default && default <= max, "the default must lie in the range")?;
            rule(max <= value, "the maximum is more than there is")?;
            let Some(step) = range.step.as_ref().map(of).transpose()? else { return Ok(()) };
            rule(step > 0, "the step must be positive")?;
            rule(
                min.checked_add(step).is_some_and(|first| first <= value),
                "the first step is more than there is",
            )?;
            rule((default - min) % step == 0, "the default must be a multiple of the step")?;
            rule(range.max.is_none() || (max - min) % step == 0, "the maximum must be a multiple of the step")
        }
    }
}

fn consumptions(consumptions: &[Consumption], before: &[Consumption], sets: &Sets<'_>) -> Result<(), Broken> {
    at_most("consumed counter sets", consumptions.len(), CONSUMED_SETS)?;
    if consumptions.is_empty() && !sets.is_empty() {
        return Err(Broken::Unguarded);
    }
    for (index, consumption) in consumptions.iter().enumerate() {
        let set = &consumption.counter_set;
        if consumptions[..index].iter().any(|before| before.counter_set == *set) {
            return Err(Broken::Duplicate { what: "consumption of counter set", name: set.clone() });
        }
        let totals = sets.get(set.as_str()).ok_or_else(|| Broken::UnknownSet { set: set.clone() })?;
        at_most("counters", consumption.counters.len(), COUNTERS)?;
        if consumption.counters.is_empty() {
            return Err(Broken::Empty { what: "counters" });
        }
        let before = before.iter().find(|before| before.counter_set == *set).map(|before| &before.counters);
        for (counter, taken) in beside(Some(&consumption.counters), before) {
            let about = |broken: fn(String, String) -> Broken| broken(set.clone(), counter.clone());
            // A counter of the set has a good name and a good amount already.
            let total = totals
                .get(counter)
                .ok_or_else(|| about(|set, counter| Broken::UnknownCounter { set, counter }))?;
            let fits = taken.value == total.value
                || amount("counter", counter, &taken.value.0)? <= amount("counter", counter, &total.value.0)?;
            if !fits {
                return Err(about(|set, counter| Broken::TakesTooMuch { set, counter }));
            }
        }
    }
    Ok(())
}

fn taints(taints: &[DeviceTaint]) -> Result<(), Broken> {
    at_most("taints", taints.len(), TAINTS)?;
    for taint in taints {
        syntax::label_key("taint", &taint.key)?;
        syntax::label_value("taint value", taint.value.as_deref().unwrap_or_default())?;
        if !matches!(taint.effect.as_str(), "None" | "NoSchedule" | "NoExecute") {
            let wanted = "None, NoSchedule or NoExecute";
            return Err(Broken::Syntax { what: "taint effect", text: taint.effect.clone(), wanted });
        }
    }
    Ok(())
}

fn binding_conditions(device: &Device) -> Result<(), Broken> {
    let binding = device.binding_conditions.as_deref().unwrap_or_default();
    let failure = device.binding_failure_conditions.as_deref().unwrap_or_default();
    let all: Vec<&String> = binding.iter().chain(failure).collect();
    for list in [binding, failure] {
        at_most("binding conditions", list.len(), BINDING_CONDITIONS)?;
    }
    let unique = all.iter().collect::<HashSet<_>>().len() == all.len();
    if binding.is_empty() != failure.is_empty() || !unique {
        return Err(Broken::BindingConditions);
    }
    all.into_iter().try_for_each(|condition| syntax::label_key("binding condition", condition))
}
