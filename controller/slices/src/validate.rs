//! Validates a pool before it is sent.
//!
//! The rules have three sources: the API, which would answer 422; the scheduler, which silently
//! ignores every device of the node if its pool is inconsistent; and Divvy. Divvy's rules: every
//! device consumes counters if the pool has any. No device consumes more than exists, because a
//! negative remainder invalidates the whole pool. Shareable capacities have a default request.

use crate::wire::{Consumption, Content, Device};
use divvy_api::Quantity;
use divvy_api::names::OBSERVER_TAINT;
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, Counter, CounterSet, DeviceAttribute, DeviceCapacity, DeviceTaint,
};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// Limit of devices in a slice.
pub const DEVICES_MAX: usize = 128;
/// Limit of devices in a slice that has counters, taints or a list attribute.
pub const DEVICES_WITH_COUNTERS_MAX: usize = 64;
/// Limit of counter sets in a slice.
pub const COUNTER_SETS_MAX: usize = 8;
/// Limit of counters in a set, and in a consumption.
pub const COUNTERS_MAX: usize = 32;
/// Limit of counter sets that one device consumes.
pub const CONSUMED_SETS_MAX: usize = 2;
/// Limit of a device's attributes and capacities together.
pub const ATTRIBUTES_AND_CAPACITIES_MAX: usize = 32;
/// Limit of attribute values of a device; each list item counts.
pub const ATTRIBUTE_VALUES_MAX: usize = 48;
/// Limit of a string or version attribute, in bytes.
pub const ATTRIBUTE_MAX_BYTES: usize = 64;
/// Limit of taints of a device.
pub const TAINTS_MAX: usize = 16;
/// Limit of binding conditions in a list.
pub const BINDING_CONDITIONS_MAX: usize = 4;
/// Limit of values in a request policy.
pub const VALID_VALUES_MAX: usize = 10;

/// The invalid object and the rule that it breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("slice {index}: {rule}")]
    Slice { index: usize, rule: Violation },
    #[error("counter set {set}: {rule}")]
    CounterSet { set: String, rule: Violation },
    #[error("device {device}: {rule}")]
    Device { device: String, rule: Violation },
}

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    #[error("devices and counter sets cannot share a slice")]
    DevicesAndCounters,
    #[error("{have} {what}; at most {most} are allowed")]
    TooMany { what: &'static str, have: usize, most: usize },
    #[error("{what} must not be empty")]
    Empty { what: &'static str },
    #[error("{what} {name:?} is duplicated")]
    Duplicate { what: &'static str, name: String },
    #[error("{what} {text:?} is not {wanted}")]
    Syntax { what: &'static str, text: String, wanted: &'static str },
    #[error("attribute {name} must have exactly one value")]
    OneValue { name: String },
    #[error("{what} {name}: {text:?} is not a whole, non-negative quantity")]
    Quantity { what: &'static str, name: String, text: String },
    #[error("capacity {name} has a request policy, but the device does not allow multiple allocations")]
    PolicyForbidden { name: String },
    #[error("capacity {name} has no request policy, so a claim without a request would take all of it")]
    PolicyMissing { name: String },
    #[error("request policy of capacity {name}: {why}")]
    Policy { name: String, why: &'static str },
    #[error("counter set {set} does not exist in the pool")]
    UnknownSet { set: String },
    #[error("counter set {set} has no counter {counter}")]
    UnknownCounter { set: String, counter: String },
    #[error("consumes more of counter {counter} than counter set {set} has")]
    TakesTooMuch { set: String, counter: String },
    #[error("consumes no counters, so it does not exclude the other devices of its GPU")]
    Unguarded,
    #[error(
        "binding conditions and binding failure conditions must both be set or both be absent, \
         without a common entry"
    )]
    BindingConditions,
    #[error("has a node selection of its own, but the slice selects the node")]
    OwnNode,
}

/// The counter sets of a pool, by name.
type Sets<'a> = HashMap<&'a str, &'a BTreeMap<String, Counter>>;

/// Checks all slices of a pool.
pub fn validate(contents: &[Content]) -> Result<(), Invalid> {
    let mut sets: Sets<'_> = HashMap::new();
    for (index, content) in contents.iter().enumerate() {
        slice(content).map_err(|rule| Invalid::Slice { index, rule })?;
        for set in &content.counters {
            let failed = |rule| Invalid::CounterSet { set: set.name.clone(), rule };
            counter_set(set).map_err(failed)?;
            if sets.insert(&set.name, &set.counters).is_some() {
                return Err(failed(Violation::Duplicate { what: "counter set", name: set.name.clone() }));
            }
        }
    }
    let mut names = HashSet::new();
    let mut before = None;
    for device in contents.iter().flat_map(|content| &content.devices) {
        let failed = |rule| Invalid::Device { device: device.name.clone(), rule };
        check_device(device, before.replace(device), &sets).map_err(failed)?;
        if !names.insert(&device.name) {
            return Err(failed(Violation::Duplicate { what: "device", name: device.name.clone() }));
        }
    }
    Ok(())
}

fn slice(content: &Content) -> Result<(), Violation> {
    if !content.devices.is_empty() && !content.counters.is_empty() {
        return Err(Violation::DevicesAndCounters);
    }
    let advanced = content.devices.iter().any(is_advanced);
    let most = if advanced { DEVICES_WITH_COUNTERS_MAX } else { DEVICES_MAX };
    at_most("devices", content.devices.len(), most)?;
    at_most("counter sets", content.counters.len(), COUNTER_SETS_MAX)
}

fn counter_set(set: &CounterSet) -> Result<(), Violation> {
    dns_label("name", &set.name)?;
    counters(&set.counters)
}

/// Checks the names and values of counters, in a set or in a consumption.
fn counters(counters: &BTreeMap<String, Counter>) -> Result<(), Violation> {
    if counters.is_empty() {
        return Err(Violation::Empty { what: "counters" });
    }
    at_most("counters", counters.len(), COUNTERS_MAX)?;
    for (name, counter) in counters {
        dns_label("counter", name)?;
        amount("counter", name, &counter.value.0)?;
    }
    Ok(())
}

/// Parses a quantity that the scheduler can count: whole, non-negative, at most `i64::MAX`.
fn amount(what: &'static str, name: &str, text: &str) -> Result<i64, Violation> {
    // Fast path: a pool has thousands of small plain numbers.
    if (1..=18).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(text.bytes().fold(0, |value, digit| value * 10 + i64::from(digit - b'0')));
    }
    let parsed = text.parse::<Quantity>().ok().filter(|quantity| quantity.is_whole());
    parsed.and_then(Quantity::value).filter(|value| *value >= 0).ok_or_else(|| Violation::Quantity {
        what,
        name: name.to_owned(),
        text: text.to_owned(),
    })
}

fn at_most(what: &'static str, have: usize, most: usize) -> Result<(), Violation> {
    if have > most { Err(Violation::TooMany { what, have, most }) } else { Ok(()) }
}

/// Whether the device lowers the limit of its slice from 128 to 64 devices.
fn is_advanced(device: &Device) -> bool {
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

/// Checks one device. `before` is the previous device, which was valid. The devices of a GPU are
/// similar, so parts that equal those of `before` are skipped, and shared maps are not compared.
fn check_device<'a>(
    device: &'a Device,
    before: Option<&'a Device>,
    sets: &Sets<'_>,
) -> Result<(), Violation> {
    dns_label("name", &device.name)?;
    let keys = device.attributes.as_ref().map_or(0, |map| map.len())
        + device.capacity.as_ref().map_or(0, |map| map.len());
    at_most("attributes and capacities", keys, ATTRIBUTES_AND_CAPACITIES_MAX)?;
    attributes(device.attributes.as_ref(), before.and_then(|before| before.attributes.as_ref()))?;
    let shared = device.allow_multiple_allocations == Some(true);
    // Capacities have other rules if the device cannot be shared.
    let alike = before.filter(|before| shared == (before.allow_multiple_allocations == Some(true)));
    for (name, value) in beside(device.capacity.as_ref(), alike.and_then(|alike| alike.capacity.as_ref())) {
        capacity(name, value, shared)?;
    }
    let before = before.and_then(|before| before.consumes_counters.as_deref());
    let taken = device.consumes_counters.as_deref().unwrap_or_default();
    if taken.is_empty() && !sets.is_empty() && !is_observer(device) {
        return Err(Violation::Unguarded);
    }
    consumptions(taken, before.unwrap_or_default(), sets)?;
    taints(device.taints.as_deref().unwrap_or_default())?;
    binding_conditions(device)?;
    if device.node_name.is_some() || device.node_selector.is_some() || device.all_nodes.is_some() {
        return Err(Violation::OwnNode);
    }
    Ok(())
}

/// A shared map of a device.
type Part<V> = Arc<BTreeMap<String, V>>;

/// The entries of a map that differ from the entry of the other map at the same position.
fn beside<'a, V: PartialEq>(
    map: Option<&'a Part<V>>,
    before: Option<&'a Part<V>>,
) -> impl Iterator<Item = (&'a String, &'a V)> {
    let map = map.filter(|map| !before.is_some_and(|before| Arc::ptr_eq(map, before)));
    let mut before = before.into_iter().flat_map(|before| before.iter());
    map.into_iter().flat_map(|map| map.iter()).filter(move |entry| before.next() != Some(*entry))
}

/// Lengths of the attribute's lists.
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
) -> Result<(), Violation> {
    for (name, value) in beside(map, before) {
        attribute(name, value)?;
    }
    let items = |value| lists(value).into_iter().flatten().sum::<usize>().max(1);
    let values = map.into_iter().flat_map(|map| map.values()).map(items).sum();
    at_most("attribute values", values, ATTRIBUTE_VALUES_MAX)
}

fn attribute(name: &str, attribute: &DeviceAttribute) -> Result<(), Violation> {
    qualified_name("attribute", name)?;
    let DeviceAttribute { bool, int, string, strings, version, versions, .. } = attribute;
    let scalars = [bool.is_some(), int.is_some(), string.is_some(), version.is_some()];
    let set = scalars.into_iter().filter(|set| *set).count() + lists(attribute).iter().flatten().count();
    if set != 1 {
        return Err(Violation::OneValue { name: name.to_owned() });
    }
    if lists(attribute).contains(&Some(0)) {
        return Err(Violation::Empty { what: "list attribute" });
    }
    string.iter().chain(strings.iter().flatten()).try_for_each(|text| attribute_text(text))?;
    version.iter().chain(versions.iter().flatten()).try_for_each(|text| semantic_version(text))
}

fn capacity(name: &str, capacity: &DeviceCapacity, shared: bool) -> Result<(), Violation> {
    qualified_name("capacity", name)?;
    let value = amount("capacity", name, &capacity.value.0)?;
    match (&capacity.request_policy, shared) {
        (Some(_), false) => Err(Violation::PolicyForbidden { name: name.to_owned() }),
        (None, true) => Err(Violation::PolicyMissing { name: name.to_owned() }),
        (None, false) => Ok(()),
        (Some(policy), true) => request_policy(name, policy, value),
    }
}

fn request_policy(name: &str, policy: &CapacityRequestPolicy, value: i64) -> Result<(), Violation> {
    let broken = |why| Violation::Policy { name: name.to_owned(), why };
    let of =
        |text: &k8s_openapi::apimachinery::pkg::api::resource::Quantity| amount("capacity", name, &text.0);
    let default =
        policy.default.as_ref().map(of).transpose()?.ok_or_else(|| broken("it must have a default"))?;
    let rule = |holds: bool, why| if holds { Ok(()) } else { Err(broken(why)) };
    rule(default <= value, "the default exceeds the capacity")?;
    match (&policy.valid_values, &policy.valid_range) {
        (Some(_), Some(_)) => Err(broken("it must not have both values and a range")),
        (None, None) => Ok(()),
        (Some(values), None) => {
            at_most("valid values", values.len(), VALID_VALUES_MAX)?;
            let values = values.iter().map(of).collect::<Result<Vec<_>, _>>()?;
            rule(values.is_sorted_by(|a, b| a < b), "the values must be ascending and unique")?;
            rule(values.iter().all(|v| *v <= value), "a value exceeds the capacity")?;
            rule(values.contains(&default), "the default must be one of the values")
        }
        (None, Some(range)) => {
            let min = of(&range.min)?;
            let max = range.max.as_ref().map(of).transpose()?.unwrap_or(value);
            rule(min <= default && default <= max, "the default must be within the range")?;
            rule(max <= value, "the maximum exceeds the capacity")?;
            let Some(step) = range.step.as_ref().map(of).transpose()? else { return Ok(()) };
            rule(step > 0, "the step must be positive")?;
            rule(
                min.checked_add(step).is_some_and(|first| first <= value),
                "the first step exceeds the capacity",
            )?;
            rule((default - min) % step == 0, "the default must be a multiple of the step")?;
            rule(range.max.is_none() || (max - min) % step == 0, "the maximum must be a multiple of the step")
        }
    }
}

/// Whether its taint keeps claims away that would hold it.
fn is_observer(device: &Device) -> bool {
    device.taints.iter().flatten().any(|taint| taint.key == OBSERVER_TAINT)
}

fn consumptions(
    consumptions: &[Consumption],
    before: &[Consumption],
    sets: &Sets<'_>,
) -> Result<(), Violation> {
    at_most("consumed counter sets", consumptions.len(), CONSUMED_SETS_MAX)?;
    for (index, consumption) in consumptions.iter().enumerate() {
        let set = &consumption.counter_set;
        if consumptions[..index].iter().any(|before| before.counter_set == *set) {
            return Err(Violation::Duplicate { what: "consumption of counter set", name: set.clone() });
        }
        let totals = sets.get(set.as_str()).ok_or_else(|| Violation::UnknownSet { set: set.clone() })?;
        at_most("counters", consumption.counters.len(), COUNTERS_MAX)?;
        if consumption.counters.is_empty() {
            return Err(Violation::Empty { what: "counters" });
        }
        let before = before.iter().find(|before| before.counter_set == *set).map(|before| &before.counters);
        for (counter, taken) in beside(Some(&consumption.counters), before) {
            let about = |broken: fn(String, String) -> Violation| broken(set.clone(), counter.clone());
            // The names and values of the set's counters were already checked.
            let total = totals
                .get(counter)
                .ok_or_else(|| about(|set, counter| Violation::UnknownCounter { set, counter }))?;
            let fits = taken.value == total.value
                || amount("counter", counter, &taken.value.0)? <= amount("counter", counter, &total.value.0)?;
            if !fits {
                return Err(about(|set, counter| Violation::TakesTooMuch { set, counter }));
            }
        }
    }
    Ok(())
}

fn taints(taints: &[DeviceTaint]) -> Result<(), Violation> {
    at_most("taints", taints.len(), TAINTS_MAX)?;
    for taint in taints {
        label_key("taint", &taint.key)?;
        label_value("taint value", taint.value.as_deref().unwrap_or_default())?;
        if !matches!(taint.effect.as_str(), "None" | "NoSchedule" | "NoExecute") {
            let wanted = "None, NoSchedule or NoExecute";
            return Err(Violation::Syntax { what: "taint effect", text: taint.effect.clone(), wanted });
        }
    }
    Ok(())
}

fn binding_conditions(device: &Device) -> Result<(), Violation> {
    let binding = device.binding_conditions.as_deref().unwrap_or_default();
    let failure = device.binding_failure_conditions.as_deref().unwrap_or_default();
    let all: Vec<&String> = binding.iter().chain(failure).collect();
    for list in [binding, failure] {
        at_most("binding conditions", list.len(), BINDING_CONDITIONS_MAX)?;
    }
    let unique = all.iter().collect::<HashSet<_>>().len() == all.len();
    if binding.is_empty() != failure.is_empty() || !unique {
        return Err(Violation::BindingConditions);
    }
    all.into_iter().try_for_each(|condition| label_key("binding condition", condition))
}

fn check_syntax(holds: bool, what: &'static str, text: &str, wanted: &'static str) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(Violation::Syntax { what, text: text.to_owned(), wanted }) }
}

/// A DNS label, such as `gpu-0`.
fn dns_label(what: &'static str, text: &str) -> Result<(), Violation> {
    check_syntax(is_label(text), what, text, "a DNS label of at most 63 lower-case letters, digits and '-'")
}

fn is_label(text: &str) -> bool {
    is_label_of_bytes(text.as_bytes())
}

fn is_label_of_bytes(bytes: &[u8]) -> bool {
    let edge = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    bytes.len() <= 63
        && bytes.first().is_some_and(edge)
        && bytes.last().is_some_and(edge)
        && bytes.iter().all(|b| edge(b) || *b == b'-')
}

/// A DNS subdomain: labels joined by dots.
fn is_subdomain(text: &str, most: usize) -> bool {
    text.len() <= most && text.as_bytes().split(|b| *b == b'.').all(is_label_of_bytes)
}

/// The name of an attribute or a capacity: `[domain/]identifier`.
fn qualified_name(what: &'static str, text: &str) -> Result<(), Violation> {
    let (domain, id) = split_domain(text);
    let bytes = id.as_bytes();
    let identifier = id.len() <= 32
        && bytes.first().is_some_and(|b| b.is_ascii_alphabetic() || *b == b'_')
        && bytes.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'_');
    let holds = identifier && domain.is_none_or(|domain| is_subdomain(domain, 63));
    check_syntax(holds, what, text, "a C identifier of at most 32 characters, optionally with a domain")
}

/// Splits at the first slash. A byte loop, because there are many short strings.
fn split_domain(text: &str) -> (Option<&str>, &str) {
    match text.bytes().position(|b| b == b'/') {
        Some(at) => (Some(&text[..at]), &text[at + 1..]),
        None => (None, text),
    }
}

/// A label key, such as that of a taint: `[domain/]name`.
fn label_key(what: &'static str, text: &str) -> Result<(), Violation> {
    let (domain, name) = split_domain(text);
    let holds =
        !name.is_empty() && is_label_value(name) && domain.is_none_or(|domain| is_subdomain(domain, 253));
    check_syntax(holds, what, text, "a label key")
}

/// A label value, such as that of a taint.
fn label_value(what: &'static str, text: &str) -> Result<(), Violation> {
    check_syntax(is_label_value(text), what, text, "a label value")
}

fn is_label_value(text: &str) -> bool {
    let bytes = text.as_bytes();
    let edge = |b: &u8| b.is_ascii_alphanumeric();
    bytes.len() <= 63
        && bytes.first().is_none_or(edge)
        && bytes.last().is_none_or(edge)
        && bytes.iter().all(|b| edge(b) || matches!(b, b'-' | b'_' | b'.'))
}

/// A string attribute.
fn attribute_text(text: &str) -> Result<(), Violation> {
    check_syntax(text.len() <= ATTRIBUTE_MAX_BYTES, "attribute", text, "at most 64 bytes long")
}

/// A semantic version 2.0.0 in an attribute.
fn semantic_version(text: &str) -> Result<(), Violation> {
    check_syntax(
        text.len() <= ATTRIBUTE_MAX_BYTES && is_semver(text),
        "attribute",
        text,
        "a semantic version of at most 64 bytes",
    )
}

fn is_semver(text: &str) -> bool {
    let bytes = text.as_bytes();
    let (rest, build) = split_at(bytes, b'+');
    let (core, pre) = split_at(rest, b'-');
    let digits = |part: &[u8]| !part.is_empty() && part.iter().all(u8::is_ascii_digit);
    let number = |part: &[u8]| digits(part) && (part == b"0" || part[0] != b'0');
    let word = |part: &[u8]| !part.is_empty() && part.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-');
    let dots = |b: &u8| *b == b'.';
    core.split(dots).count() == 3
        && core.split(dots).all(number)
        && pre.is_none_or(|pre| pre.split(dots).all(|part| word(part) && (!digits(part) || number(part))))
        && build.is_none_or(|build| build.split(dots).all(word))
}

/// The bytes before and after the first separator.
fn split_at(bytes: &[u8], separator: u8) -> (&[u8], Option<&[u8]>) {
    match bytes.iter().position(|b| *b == separator) {
        Some(at) => (&bytes[..at], Some(&bytes[at + 1..])),
        None => (bytes, None),
    }
}
