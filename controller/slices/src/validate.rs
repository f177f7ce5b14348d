//! Says no before the server does, and where the server would not.
//!
//! Three kinds of rules: those of the API, which the server answers with 422;
//! those of a pool, which the server does not check and for which the scheduler
//! silently ignores every device of the node; and our own: every device
//! of a pool with counters is guarded by some, none takes more than there is
//! (a negative rest refuses the whole pool), and a capacity that can be shared
//! says what a claim that names none gets.

mod device;
mod syntax;

use crate::wire::Content;
use divvy_api::Quantity;
use k8s_openapi::api::resource::v1::{Counter, CounterSet};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Devices per slice.
pub const DEVICES: usize = 128;
/// Devices per slice as soon as one has counters, taints or a list attribute.
pub const DEVICES_WITH_COUNTERS: usize = 64;
/// Counter sets per slice.
pub const COUNTER_SETS: usize = 8;
/// Counters per set, and per consumption.
pub const COUNTERS: usize = 32;
/// Counter sets that a device draws from.
pub const CONSUMED_SETS: usize = 2;
/// Attributes and capacities per device, together.
pub const ATTRIBUTES_AND_CAPACITIES: usize = 32;
/// Values of attributes per device, items of lists counted.
pub const ATTRIBUTE_VALUES: usize = 48;
/// Bytes of a text or version attribute.
pub const ATTRIBUTE_TEXT: usize = 64;
/// Taints per device.
pub const TAINTS: usize = 16;
/// Binding conditions per list.
pub const BINDING_CONDITIONS: usize = 4;
/// Values a request policy may list.
pub const VALID_VALUES: usize = 10;

/// What is invalid, and where.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("slice {index}: {rule}")]
    Slice { index: usize, rule: Broken },
    #[error("counter set {set}: {rule}")]
    CounterSet { set: String, rule: Broken },
    #[error("device {device}: {rule}")]
    Device { device: String, rule: Broken },
}

/// A rule that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    #[error("devices and counter sets cannot share a slice")]
    DevicesAndCounters,
    #[error("{have} {what}, at most {most} are allowed")]
    TooMany { what: &'static str, have: usize, most: usize },
    #[error("{what} must not be empty")]
    Empty { what: &'static str },
    #[error("{what} {name:?} is there twice")]
    Duplicate { what: &'static str, name: String },
    #[error("{what} {text:?} is not {wanted}")]
    Syntax { what: &'static str, text: String, wanted: &'static str },
    #[error("attribute {name} must have exactly one value")]
    OneValue { name: String },
    #[error("{what} {name}: {text:?} is not a quantity that can be counted")]
    Quantity { what: &'static str, name: String, text: String },
    #[error("capacity {name} has a request policy, but the device cannot be allocated several times")]
    PolicyForbidden { name: String },
    #[error("capacity {name} has no request policy, so that a claim which names none would take all of it")]
    PolicyMissing { name: String },
    #[error("request policy of capacity {name}: {why}")]
    Policy { name: String, why: &'static str },
    #[error("counter set {set} does not exist in the pool")]
    UnknownSet { set: String },
    #[error("counter set {set} has no counter {counter}")]
    UnknownCounter { set: String, counter: String },
    #[error("takes more of counter {counter} of {set} than there is")]
    TakesTooMuch { set: String, counter: String },
    #[error("draws from no counter set, so nothing keeps it from the devices of its GPU")]
    Unguarded,
    #[error(
        "binding conditions and binding failure conditions must both be there or both be absent, without a common entry"
    )]
    BindingConditions,
    #[error("selects its own node, although the slice does")]
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
                return Err(failed(Broken::Duplicate { what: "counter set", name: set.name.clone() }));
            }
        }
    }
    let mut names = HashSet::new();
    let mut before = None;
    for device in contents.iter().flat_map(|content| &content.devices) {
        let failed = |rule| Invalid::Device { device: device.name.clone(), rule };
        device::check(device, before.replace(device), &sets).map_err(failed)?;
        if !names.insert(&device.name) {
            return Err(failed(Broken::Duplicate { what: "device", name: device.name.clone() }));
        }
    }
    Ok(())
}

fn slice(content: &Content) -> Result<(), Broken> {
    if !content.devices.is_empty() && !content.counters.is_empty() {
        return Err(Broken::DevicesAndCounters);
    }
    let advanced = content.devices.iter().any(device::is_advanced);
    let most = if advanced { DEVICES_WITH_COUNTERS } else { DEVICES };
    at_most("devices", content.devices.len(), most)?;
    at_most("counter sets", content.counters.len(), COUNTER_SETS)
}

fn counter_set(set: &CounterSet) -> Result<(), Broken> {
    syntax::label("name", &set.name)?;
    counters(&set.counters)
}

/// Names and amounts of counters, in a set or drawn from one.
fn counters(counters: &BTreeMap<String, Counter>) -> Result<(), Broken> {
    if counters.is_empty() {
        return Err(Broken::Empty { what: "counters" });
    }
    at_most("counters", counters.len(), COUNTERS)?;
    for (name, counter) in counters {
        syntax::label("counter", name)?;
        amount("counter", name, &counter.value.0)?;
    }
    Ok(())
}

/// A quantity that the scheduler can count with: a whole number that is not
/// negative and fits 64 bits.
fn amount(what: &'static str, name: &str, text: &str) -> Result<i64, Broken> {
    // Most are small plain numbers, and there are thousands of them.
    if (1..=18).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit()) {
        return Ok(text.bytes().fold(0, |value, digit| value * 10 + i64::from(digit - b'0')));
    }
    let parsed = text.parse::<Quantity>().ok().filter(|quantity| quantity.is_whole());
    parsed.and_then(Quantity::value).filter(|value| *value >= 0).ok_or_else(|| Broken::Quantity {
        what,
        name: name.to_owned(),
        text: text.to_owned(),
    })
}

fn at_most(what: &'static str, have: usize, most: usize) -> Result<(), Broken> {
    if have > most { Err(Broken::TooMany { what, have, most }) } else { Ok(()) }
}
