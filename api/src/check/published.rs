//! The attributes and capacities that Divvy publishes, for the check of selectors. A test of
//! `divvy-alloc` compares them with the slices of every GPU model.

use super::types::Severity;
use crate::names::DRIVER;
use crate::sharing::Mode;
use std::collections::BTreeSet;

/// The domain of attributes that Kubernetes defines.
pub const STANDARD_DOMAIN: &str = "resource.kubernetes.io";

/// The type of a published value in CEL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueType {
    Text,
    Number,
    Version,
    /// The type of every capacity.
    Quantity,
}

/// An attribute or a capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Published {
    pub name: &'static str,
    pub type_: ValueType,
    /// The modes of the devices that have it.
    pub modes: &'static [Mode],
    /// All values, if there are few; empty otherwise.
    pub values: &'static [&'static str],
}

/// A problem of a CEL selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelectorProblem {
    pub severity: Severity,
    /// The cause and, after a semicolon, the remedy.
    pub message: String,
}

const ALL: &[Mode] = &Mode::ALL;
const DIVIDED: &[Mode] = &[Mode::Share, Mode::Timeslice, Mode::Mps, Mode::Mig];
const UNDIVIDED: &[Mode] = &[Mode::Whole, Mode::Mig];

const fn of(name: &'static str, type_: ValueType, modes: &'static [Mode]) -> Published {
    Published { name, type_, modes, values: &[] }
}

const fn one_of(name: &'static str, modes: &'static [Mode], values: &'static [&'static str]) -> Published {
    Published { name, type_: ValueType::Text, modes, values }
}

/// The attributes in our domain.
pub const ATTRIBUTES: &[Published] = &[
    one_of("type", ALL, &["gpu", "share", "mig", "timeslice", "mps", "observer"]),
    one_of("mode", ALL, &["exclusive", "share", "timeslice", "mps", "observer"]),
    of("uuid", ValueType::Text, ALL),
    of("productName", ValueType::Text, ALL),
    of("brand", ValueType::Text, ALL),
    of("architecture", ValueType::Text, ALL),
    of("cudaComputeCapability", ValueType::Version, ALL),
    of("driverVersion", ValueType::Version, ALL),
    of("cudaDriverVersion", ValueType::Version, ALL),
    of("addressingMode", ValueType::Text, ALL),
    of("profile", ValueType::Text, &[Mode::Mig]),
    of("parentUUID", ValueType::Text, &[Mode::Mig]),
    of("nvlinkGroup", ValueType::Text, &[Mode::Whole, Mode::Share, Mode::Timeslice, Mode::Mps]),
    of("nvlinkPeers", ValueType::Number, &[Mode::Whole, Mode::Share, Mode::Timeslice, Mode::Mps]),
    of("enforcement", ValueType::Text, &[Mode::Share, Mode::Mps, Mode::Mig]),
    one_of("interval", &[Mode::Timeslice], crate::sharing::Interval::NAMES),
    of("memoryMiB", ValueType::Number, DIVIDED),
    of("multiprocessors", ValueType::Number, DIVIDED),
    of("copyEngines", ValueType::Number, DIVIDED),
    of("decoders", ValueType::Number, DIVIDED),
    of("encoders", ValueType::Number, DIVIDED),
    of("jpegEngines", ValueType::Number, DIVIDED),
    of("ofaEngines", ValueType::Number, DIVIDED),
];

/// The attributes in the domain of Kubernetes.
pub const STANDARD_ATTRIBUTES: &[Published] = &[
    of("pciBusID", ValueType::Text, ALL),
    of("pcieRoot", ValueType::Text, ALL),
    of("numaNode", ValueType::Number, ALL),
];

/// The capacities, all in our domain.
pub const CAPACITIES: &[Published] = &[
    of("memory", ValueType::Quantity, &[Mode::Whole, Mode::Mig, Mode::Share, Mode::Mps]),
    of("cores", ValueType::Quantity, &[Mode::Share, Mode::Mig]),
    of("multiprocessors", ValueType::Quantity, UNDIVIDED),
    of("copyEngines", ValueType::Quantity, UNDIVIDED),
    of("decoders", ValueType::Quantity, UNDIVIDED),
    of("encoders", ValueType::Quantity, UNDIVIDED),
    of("jpegEngines", ValueType::Quantity, UNDIVIDED),
    of("ofaEngines", ValueType::Quantity, UNDIVIDED),
    of("slots", ValueType::Quantity, &[Mode::Timeslice]),
    of("threads", ValueType::Quantity, &[Mode::Mps]),
    of("clients", ValueType::Quantity, &[Mode::Mps]),
];

/// The table of a domain; `None` for domains that Divvy does not publish.
pub fn attributes_of(domain: &str) -> Option<&'static [Published]> {
    match domain {
        DRIVER => Some(ATTRIBUTES),
        STANDARD_DOMAIN => Some(STANDARD_ATTRIBUTES),
        _ => None,
    }
}

/// Finds a published value that a device of these modes may have.
///
/// # Errors
/// No such value; the message has no position.
pub fn find(
    table: &'static [Published],
    name: &str,
    modes: &BTreeSet<Mode>,
) -> Result<&'static Published, String> {
    let is_capacity = std::ptr::eq(table, CAPACITIES);
    let kind = if is_capacity { "capacity" } else { "attribute" };
    let Some(found) = table.iter().find(|one| one.name == name) else {
        let other = if is_capacity { ATTRIBUTES } else { CAPACITIES };
        if other.iter().any(|one| one.name == name) {
            let (article, is) = if is_capacity { ("an", "attribute") } else { ("a", "capacity") };
            let field = if is_capacity { "attributes" } else { "capacity" };
            return Err(format!("{name} is {article} {is}; write device.{field}[\"{DRIVER}\"].{name}"));
        }
        let remedy = match nearest(name, table.iter().map(|one| one.name)) {
            Some(near) => format!("did you mean {near}?"),
            None => format!("use one of {}", table.iter().map(|one| one.name).collect::<Vec<_>>().join(", ")),
        };
        return Err(format!("no device has the {kind} {name}; {remedy}"));
    };
    let has = |mode: &Mode| found.modes.contains(mode);
    if modes.is_empty() || modes.iter().any(has) {
        return Ok(found);
    }
    let device = modes.first().map_or("the device", |mode| mode.device());
    let remedy = match name {
        "memoryMiB" => format!("use device.capacity[\"{DRIVER}\"].memory"),
        "memory" | "multiprocessors" | "copyEngines" | "decoders" | "encoders" | "jpegEngines"
        | "ofaEngines" => {
            let name = if name == "memory" { "memoryMiB" } else { name };
            match is_capacity {
                true => format!("use device.attributes[\"{DRIVER}\"].{name}"),
                false => format!("use device.capacity[\"{DRIVER}\"].{name}"),
            }
        }
        _ => {
            let modes: Vec<_> = found.modes.iter().map(|mode| mode.device()).collect();
            format!("only {} has it", modes.join(" or "))
        }
    };
    Err(format!("{device} has no {kind} {name}; {remedy}"))
}

/// The name that was probably meant.
pub fn nearest<'a>(name: &str, among: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let lower = name.to_ascii_lowercase();
    let alike = |other: &str| strsim::jaro_winkler(&lower, &other.to_ascii_lowercase());
    let best = among.into_iter().max_by(|a, b| alike(a).total_cmp(&alike(b)))?;
    (alike(best) > 0.8).then_some(best)
}
