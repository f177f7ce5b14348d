//! What a request may ask of a device's capacities. The scheduler never finds a
//! device for an amount that none has, and never says so: the pod just waits.

use super::Finding;
use crate::names::DRIVER;
use crate::quantity::Quantity;
use crate::sharing::{CONTEXT, Mode};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as WireQuantity;
use std::collections::{BTreeMap, BTreeSet};

/// What a share is a part of.
const MEMORY: &str = "memory";
/// The other thing that a share is a part of.
const CORES: &str = "cores";
/// What devices say of themselves, whatever their mode.
const FACTS: [&str; 7] =
    [MEMORY, "multiprocessors", "copyEngines", "decoders", "encoders", "jpegEngines", "ofaEngines"];

/// A capacity that a shared device deals out.
struct Dealt {
    mode: Mode,
    name: &'static str,
    /// In nano, as quantities count.
    unit: i128,
    /// In units; what a node offers may be less.
    most: u64,
    expected: &'static str,
}

const ONE: i128 = 1_000_000_000;

/// The most clients are those of the newest MPS servers.
const DEALT: [Dealt; 6] = [
    Dealt { mode: Mode::Whole, name: MEMORY, unit: ONE << 20, most: u64::MAX, expected: "at least 1Mi" },
    Dealt { mode: Mode::Mig, name: MEMORY, unit: ONE << 20, most: u64::MAX, expected: "at least 1Mi" },
    Dealt {
        mode: Mode::Timeslice,
        name: "slots",
        unit: ONE,
        most: u64::MAX,
        expected: "a whole number from 1",
    },
    Dealt {
        mode: Mode::Mps,
        name: "threads",
        unit: ONE,
        most: 100,
        expected: "per cent of the multiprocessors, a whole number from 1 to 100",
    },
    Dealt { mode: Mode::Mps, name: "clients", unit: ONE, most: 60, expected: "a whole number from 1 to 60" },
    Dealt { mode: Mode::Mps, name: MEMORY, unit: ONE << 20, most: u64::MAX, expected: "at least 1Mi" },
];

/// Whether amounts name a part of a GPU or MIG instance, so that they are for a share.
pub(super) fn names_share(amounts: &BTreeMap<String, WireQuantity>) -> bool {
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
    let share = modes.iter().any(|mode| mode.has_shares()) && names_share(amounts);
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
        // One kind of device that can give it is enough.
        if let (true, Some(refusal)) = (refusals.len() == modes.len(), refusals.into_iter().next()) {
            findings.push(Finding::error(path, refusal));
        } else if share && FACTS.contains(&name.as_str()) && name != MEMORY && amount > Quantity::ZERO {
            let message = format!(
                "a share promises no {name}, the amount only keeps other shares out; select on it instead"
            );
            findings.push(Finding::warning(path, message));
        } else if share && name == MEMORY && amount.as_nano() < i128::from(CONTEXT) * ONE {
            let message = format!(
                "a CUDA context alone takes about {}Mi, each process has one, and none will start in {amount}; ask for more",
                CONTEXT >> 20
            );
            findings.push(Finding::warning(path, message));
        }
    }
    findings
}

/// Why no device of the mode has so much of it.
fn refusal(name: &str, amount: Quantity, mode: Mode) -> Result<(), String> {
    let dealt = || DEALT.iter().filter(|dealt| dealt.mode == mode);
    if let Some(dealt) = dealt().find(|dealt| dealt.name == name) {
        let units = u64::try_from(amount.as_nano() / dealt.unit).unwrap_or(0);
        // Memory is rounded up to the step by the scheduler.
        let whole = name == "memory" || amount.is_whole();
        let fits = (1..=dealt.most).contains(&units) && whole;
        return if fits { Ok(()) } else { Err(format!("{name} is {amount}, expected {}", dealt.expected)) };
    }
    if name == CORES && mode.has_shares() {
        // None is what a claim gets that asks for none.
        let fits = amount.is_whole() && (0..=100).contains(&(amount.as_nano() / ONE));
        let expected = "per cent of the compute time, a whole number from 0 to 100";
        return if fits { Ok(()) } else { Err(format!("cores is {amount}, expected {expected}")) };
    }
    if let Some((DRIVER, name)) = name.split_once('/') {
        // The scheduler compares names as they are written.
        return Err(format!("capacities are published without a domain; write {name}"));
    }
    let device = match mode {
        Mode::Whole => "whole GPU",
        Mode::Mig => "MIG instance",
        Mode::Timeslice => "time-slice",
        Mode::Mps => "share of MPS",
    };
    match (FACTS.contains(&name), mode) {
        (true, Mode::Whole | Mode::Mig) => Ok(()),
        (true, _) if amount <= Quantity::ZERO => Ok(()),
        (true, _) => {
            Err(format!("a {device} promises no {name}; select on it instead, or ask for a MIG instance"))
        }
        (false, _) => {
            let has: Vec<_> = match mode {
                Mode::Whole | Mode::Mig => FACTS.to_vec(),
                _ => dealt().map(|dealt| dealt.name).collect(),
            };
            Err(format!("a {device} has no capacity {name}; ask for {}", has.join(", ")))
        }
    }
}
