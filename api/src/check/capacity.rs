//! Capacities that a request may ask for. The scheduler never finds a device for an impossible
//! amount and does not report it: the pod just stays pending.

use super::types::{Finding, KnownGpus};
use super::units;
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

/// Names of other tools for the capacities of a share.
const OTHER_NAMES: [(&str, &[&str]); 2] = [
    (MEMORY, &["gpumem", "gpu-memory", "gpu-mem", "vgpu-memory", "vram", "mem", "memoryMiB", "gpuMemory"]),
    (CORES, &["gpucores", "gpu-cores", "vgpu-cores", "core", "compute", "gpuCores", "percent", "sm"]),
];

/// The capacity of a share that another tool's name means.
fn renamed(name: &str) -> Option<&'static str> {
    let name = name.rsplit('/').next().unwrap_or(name);
    OTHER_NAMES.iter().find(|(_, names)| names.contains(&name)).map(|(ours, _)| *ours)
}

/// Whether the amounts request part of a GPU or MIG instance, where these are offered in shares. A
/// name or an amount that is reported as wrong counts as what it means.
pub(super) fn requests_share(amounts: &BTreeMap<String, WireQuantity>) -> bool {
    let positive = |amount| Quantity::try_from(amount).map_or(true, |amount| amount > Quantity::ZERO);
    let share = |name: &str| [MEMORY, CORES].contains(&name) || renamed(name).is_some();
    amounts.iter().any(|(name, amount)| share(name) && positive(amount))
}

/// The percent of compute time that the amounts request, if it is valid.
pub(super) fn cores(amounts: &BTreeMap<String, WireQuantity>) -> Option<i64> {
    let amount = Quantity::try_from(amounts.get(CORES)?).ok().filter(|amount| amount.is_whole())?;
    amount.value().filter(|percent| (1..=100).contains(percent))
}

/// Checks the amounts that a request for devices of these modes asks for.
pub(super) fn check(
    amounts: &BTreeMap<String, WireQuantity>,
    modes: &BTreeSet<Mode>,
    gpus: &KnownGpus,
    path: &str,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let share = modes.contains(&Mode::Share);
    let asks = |capacity| amounts.keys().any(|name| name == capacity || renamed(name) == Some(capacity));
    if *modes == [Mode::Share].into() && asks(CORES) && !asks(MEMORY) && cores(amounts).is_some() {
        let message = "cores without memory takes all memory of the GPU, so no other share fits; request \
             memory too, such as memory: 10Gi";
        findings.push(Finding::warning(format!("{path}.capacity.requests"), message));
    }
    for (name, wire) in amounts {
        let path = format!("{path}.capacity.requests[{name}]");
        if let Some(misspelt) = units::misspelt(name, &wire.0) {
            findings.push(Finding::error(path, misspelt.message));
            continue;
        }
        let Ok(amount) = Quantity::try_from(wire) else { continue };
        let refusals: Vec<_> =
            modes.iter().filter_map(|mode| refusal(name, amount, &wire.0, *mode).err()).collect();
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
        } else if name == MEMORY
            && let Some(message) = larger_than_gpus(amount, gpus)
        {
            findings.push(Finding::warning(path, message));
        }
    }
    findings
}

/// Why few or no GPUs have that memory.
fn larger_than_gpus(amount: Quantity, gpus: &KnownGpus) -> Option<String> {
    let largest = gpus.models.iter().max_by_key(|gpu| gpu.bytes)?;
    let wanted = amount.as_bytes()?;
    let fitting: Vec<_> =
        gpus.models.iter().filter(|gpu| gpu.bytes >= wanted).map(|gpu| gpu.model.as_str()).collect();
    let size = format!("{}Mi", largest.bytes >> 20);
    let largest = &largest.model;
    if fitting.is_empty() {
        return Some(format!(
            "memory is {amount}, more than any GPU that is published; request at most {size}, as {largest} \
             has"
        ));
    }
    // A list of all models is no cluster, so only unusual amounts are worth a warning.
    let unusual = !gpus.complete && fitting.len() * 2 < gpus.models.len();
    unusual.then(|| {
        format!(
            "memory is {amount}, and only {} have that much; the largest is {largest} with {size}, so check \
             the GPUs of your cluster, or name them with --gpus",
            fitting.join(", ")
        )
    })
}

/// Why no device of the mode has that amount, which is written as `text`.
fn refusal(name: &str, amount: Quantity, text: &str, mode: Mode) -> Result<(), String> {
    let rule = || CONSUMABLE_CAPACITIES.iter().filter(|rule| rule.mode == mode);
    if let Some(rule) = rule().find(|rule| rule.name == name) {
        let units = u64::try_from(amount.as_nano() / rule.unit).unwrap_or(0);
        // The scheduler rounds memory up to the step.
        let whole = name == "memory" || amount.is_whole();
        let fits = (1..=rule.max).contains(&units) && whole;
        if fits {
            return Ok(());
        }
        let remedy = match name == MEMORY && amount >= Quantity::ZERO {
            true => format!("; {}", units::too_small(amount, text)),
            false => String::new(),
        };
        return Err(format!("{name} is {amount}, expected {}{remedy}", rule.expected));
    }
    if name == CORES && mode.has_shares() {
        // 0 is also the default.
        let fits = amount.is_whole() && (0..=100).contains(&(amount.as_nano() / ONE));
        let expected = "per cent of the compute time, a whole number from 0 to 100";
        if fits {
            return Ok(());
        }
        let part = (1..ONE).contains(&amount.as_nano()).then(|| (amount.as_nano() * 100 + ONE - 1) / ONE);
        let remedy = part.map(|percent| format!("; write {percent}")).unwrap_or_default();
        return Err(format!("cores is {amount}, expected {expected}{remedy}"));
    }
    if let Some((DRIVER, name)) = name.split_once('/') {
        // The scheduler compares capacity names literally.
        return Err(format!("capacities are published without a domain; write {name}"));
    }
    if let Some(ours) = renamed(name)
        && (mode.has_shares() || (ours == MEMORY && mode != Mode::Timeslice))
    {
        let amount = match ours == MEMORY && amount < Quantity::bytes(1 << 20) {
            true => format!("{text}Mi"),
            false => text.to_owned(),
        };
        let device = if mode == Mode::Share { "a share" } else { "the device" };
        return Err(format!(
            "{device} has no capacity {name}: memory is HAMi's gpumem, with a unit, and cores is gpucores; \
             write {ours}: {amount}"
        ));
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
