//! Capacities that a request may ask for. The scheduler never finds a device for an impossible
//! amount and does not report it: the pod just stays pending.

use super::types::Finding;
use crate::names::DRIVER;
use crate::quantity::Quantity;
use crate::sharing::{CUDA_CONTEXT_BYTES, Mode};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as WireQuantity;
use std::collections::{BTreeMap, BTreeSet};

/// The capacity that makes a request a share.
const MEMORY: &str = "memory";
/// The other capacity that makes a request a share.
const CORES: &str = "cores";
/// Capacities that whole GPUs and MIG instances publish as facts.
const PUBLISHED_CAPACITIES: [&str; 7] =
    [MEMORY, "multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines"];

/// A capacity that allocations of a device consume.
struct ConsumableCapacity {
    mode: Mode,
    name: &'static str,
    /// In nano-units, as quantities count.
    unit: i128,
    /// In units. A node may offer less.
    max: u64,
    expected: &'static str,
}

const ONE: i128 = 1_000_000_000;

/// The maximum of `clients` is that of the newest MPS servers.
const CONSUMABLE_CAPACITIES: [ConsumableCapacity; 5] = [
    ConsumableCapacity {
        mode: Mode::Share,
        name: MEMORY,
        unit: ONE << 20,
        max: u64::MAX,
        expected: "at least 1Mi",
    },
    ConsumableCapacity {
        mode: Mode::Timeslice,
        name: "slots",
        unit: ONE,
        max: u64::MAX,
        expected: "a whole number from 1",
    },
    ConsumableCapacity {
        mode: Mode::Mps,
        name: "threads",
        unit: ONE,
        max: 100,
        expected: "per cent of the multiprocessors, a whole number from 1 to 100",
    },
    ConsumableCapacity {
        mode: Mode::Mps,
        name: "clients",
        unit: ONE,
        max: 60,
        expected: "a whole number from 1 to 60",
    },
    ConsumableCapacity {
        mode: Mode::Mps,
        name: MEMORY,
        unit: ONE << 20,
        max: u64::MAX,
        expected: "at least 1Mi",
    },
];

/// Whether the amounts request part of a GPU or MIG instance, where these are offered in shares.
pub(super) fn requests_share(amounts: &BTreeMap<String, WireQuantity>) -> bool {
    let positive = |amount| Quantity::try_from(amount).is_ok_and(|amount| amount > Quantity::ZERO);
    amounts.iter().any(|(name, amount)| [MEMORY, CORES].contains(&name.as_str()) && positive(amount))
}

/// Checks the amounts that a request for devices of these modes asks for.
pub(super) fn check(
    amounts: &BTreeMap<String, WireQuantity>,
    modes: &BTreeSet<Mode>,
    path: &str,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let share = modes.contains(&Mode::Share);
    for (name, amount) in amounts {
        let path = format!("{path}.capacity.requests[{name}]");
        let amount = match Quantity::try_from(amount) {
            Ok(amount) => amount,
            Err(cause) => {
                findings.push(Finding::error(path, cause));
                continue;
            }
        };
        let refusals: Vec<_> = modes.iter().filter_map(|mode| refusal(name, amount, *mode).err()).collect();
        // One kind of device that fits is enough.
        if let (true, Some(refusal)) = (refusals.len() == modes.len(), refusals.into_iter().next()) {
            findings.push(Finding::error(path, refusal));
        } else if name == CORES && *modes == [Mode::Mig].into() {
            let message = "only nodes whose configuration sets migShares offer shares of MIG instances; \
                 remove cores, or set migShares";
            findings.push(Finding::warning(path, message));
        } else if share && name == MEMORY && amount.as_nano() < i128::from(CUDA_CONTEXT_BYTES) * ONE {
            let message = format!(
                "a CUDA context takes about {}Mi per process, so no process can start with {amount}; \
                 request more",
                CUDA_CONTEXT_BYTES >> 20
            );
            findings.push(Finding::warning(path, message));
        }
    }
    findings
}

/// Why no device of the mode has that amount.
fn refusal(name: &str, amount: Quantity, mode: Mode) -> Result<(), String> {
    let rule = || CONSUMABLE_CAPACITIES.iter().filter(|rule| rule.mode == mode);
    if let Some(rule) = rule().find(|rule| rule.name == name) {
        let units = u64::try_from(amount.as_nano() / rule.unit).unwrap_or(0);
        // The scheduler rounds memory up to the step.
        let whole = name == "memory" || amount.is_whole();
        let fits = (1..=rule.max).contains(&units) && whole;
        return if fits { Ok(()) } else { Err(format!("{name} is {amount}, expected {}", rule.expected)) };
    }
    if name == CORES && mode.has_shares() {
        // 0 is also the default.
        let fits = amount.is_whole() && (0..=100).contains(&(amount.as_nano() / ONE));
        let expected = "per cent of the compute time, a whole number from 0 to 100";
        return if fits { Ok(()) } else { Err(format!("cores is {amount}, expected {expected}")) };
    }
    if let Some((DRIVER, name)) = name.split_once('/') {
        // The scheduler compares capacity names literally.
        return Err(format!("capacities are published without a domain; write {name}"));
    }
    let device = match mode {
        Mode::Whole => "a whole GPU",
        Mode::Share => "a share",
        Mode::Mig => "a MIG instance",
        Mode::Timeslice => "a time-slice",
        Mode::Mps => "an MPS share",
    };
    match (PUBLISHED_CAPACITIES.contains(&name), mode) {
        (true, Mode::Whole | Mode::Mig) => Ok(()),
        (true, _) => Err(format!(
            "{device} does not guarantee {name}; use a selector instead, or request a MIG instance"
        )),
        (false, Mode::Whole) if name == CORES => {
            Err("a whole GPU has no capacity cores; use share.divvy.dev for part of a GPU".to_owned())
        }
        (false, _) => {
            let has: Vec<_> = match mode {
                Mode::Whole | Mode::Mig => PUBLISHED_CAPACITIES.to_vec(),
                Mode::Share => vec![MEMORY, CORES],
                _ => rule().map(|rule| rule.name).collect(),
            };
            Err(format!("{device} has no capacity {name}; use one of {}", has.join(", ")))
        }
    }
}
