//! The sharing modes of a GPU, and which claims may hold a device together.
//!
//! - `gpu-N`: one claim. Takes all counters of the GPU.
//! - `gpu-N-share`: shares of memory and compute time. Takes all counters.
//! - a MIG instance: one claim, or shares where they are turned on. Takes the instance's counters.
//! - `gpu-N-timeslice`: one claim per slot. Takes all counters of the GPU.
//! - `gpu-N-mps`: as many claims as memory, threads and clients permit. Takes all counters too.
//!
//! The first claim decides the mode of a GPU and the last release resets it; see [`shared`].

use crate::attributes::{int, string};
use crate::wire::Device;
use divvy_api::Quantity;
use divvy_api::sharing::Mode;
use divvy_model::DeviceId;
use divvy_model::inventory::Gpu;
use k8s_openapi::api::resource::v1::{CapacityRequestPolicy, CapacityRequestPolicyRange, DeviceCapacity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as WireQuantity;
use std::sync::Arc;

/// Enforcement of share limits by a library in the container, which a malicious process can
/// bypass. Conditions and documentation use the same word.
const ENFORCED_BY_HOOKS: &str = "hooks";

/// Publishes an instance for one claim, or for shares of its memory if `shares` is set.
///
/// A claim without a memory request takes all memory, so a single device serves both exclusive
/// claims and shares. Memory is the excluding resource: if it is unknown, or if the server or the
/// policy has no shares, the device is exclusive, with the same name and counters. Allocations
/// from before such a change stay valid. A device held without a share ID refuses shares, and a
/// device held by shares has no counters left for an exclusive claim (checked by `e2e/oracle`).
pub(crate) fn instance(device: Device, shares: bool) -> Device {
    match mebibytes(&device) {
        Some(mebibytes) if shares => divided(device, mebibytes),
        _ => exclusive(device),
    }
}

/// The whole GPU for shares, derived from the device of the whole GPU. `None` if its memory is unknown.
pub(crate) fn share(whole: Device, gpu: &Gpu) -> Option<Device> {
    let mebibytes = mebibytes(&whole)?;
    Some(divided(shared(whole, DeviceId::Share(gpu.number)), mebibytes))
}

/// The memory capacity in MiB, if it is known.
fn mebibytes(device: &Device) -> Option<u64> {
    let memory = device.capacity.as_ref()?.get("memory")?;
    let bytes = Quantity::try_from(&memory.value).ok()?.as_bytes()?;
    Some(bytes >> 20).filter(|mebibytes| *mebibytes > 0)
}

/// Divides a device into shares of memory and compute time.
fn divided(mut device: Device, mebibytes: u64) -> Device {
    device.allow_multiple_allocations = Some(true);
    facts_to_attributes(&mut device);
    let attributes = device.attributes_mut();
    attributes.insert("mode".to_owned(), string(Mode::Share.as_str()));
    attributes.insert("enforcement".to_owned(), string(ENFORCED_BY_HOOKS));
    let memory = divisible(mebibytes, mebibytes, |mebibytes| Quantity::bytes(mebibytes << 20));
    device.capacity = Some(Arc::new([("memory".to_owned(), memory), ("cores".to_owned(), cores())].into()));
    device
}

/// Turns the capacities of a device into attributes. Every allocation of a device with several
/// allocations copies its capacities, so only those that are divided stay capacities.
fn facts_to_attributes(device: &mut Device) {
    let facts = device.capacity.take().unwrap_or_default();
    let attributes = device.attributes_mut();
    for (name, fact) in facts.iter() {
        let amount = Quantity::try_from(&fact.value).ok().and_then(|amount| amount.value());
        let Some(amount) = amount else { continue };
        match name.as_str() {
            "memory" => attributes.insert("memoryMiB".to_owned(), int(amount >> 20)),
            name => attributes.insert(name.to_owned(), int(amount)),
        };
    }
}

/// Compute time in per cent. A claim without a request reserves none.
fn cores() -> DeviceCapacity {
    let count = |percent| WireQuantity::from(Quantity::count(percent));
    let range = CapacityRequestPolicyRange { min: zero(), max: None, step: Some(count(1)) };
    let policy =
        CapacityRequestPolicy { default: Some(zero()), valid_values: None, valid_range: Some(range) };
    DeviceCapacity { value: count(100), request_policy: Some(policy) }
}

fn zero() -> WireQuantity {
    WireQuantity("0".to_owned())
}

/// Publishes a device for one claim at a time. The API forbids request policies on the capacities
/// of such a device.
pub(crate) fn exclusive(mut device: Device) -> Device {
    device.allow_multiple_allocations = None;
    device.attributes_mut().insert("mode".to_owned(), string("exclusive"));
    device
}

/// Publishes a held device without counters. With counters, an exclusive device that has shares from before
/// has no counters left. Here its memory takes their place, because every new claim takes all of it.
pub(crate) fn guarded(mut device: Device) -> Device {
    let Some(mebibytes) = mebibytes(&device).filter(|_| device.allow_multiple_allocations.is_none()) else {
        return device;
    };
    facts_to_attributes(&mut device);
    let all = || WireQuantity::from(Quantity::bytes(mebibytes << 20));
    let policy =
        CapacityRequestPolicy { default: Some(all()), valid_values: Some(vec![all()]), valid_range: None };
    let memory = DeviceCapacity { value: all(), request_policy: Some(policy) };
    device.capacity = Some(Arc::new([("memory".to_owned(), memory)].into()));
    device.allow_multiple_allocations = Some(true);
    device
}

/// The whole GPU with time-slicing, derived from the device of the whole GPU.
pub(crate) fn timeslice(whole: Device, gpu: &Gpu) -> Device {
    let mut device = shared(whole, DeviceId::Timeslice(gpu.number));
    let interval = string(gpu.policy.interval.as_str());
    device.attributes_mut().insert("interval".to_owned(), interval);
    let slots = divisible(gpu.policy.slots.into(), 1, Quantity::count);
    device.capacities_mut().insert("slots".to_owned(), slots);
    device
}

/// Volta. Earlier GPUs share an address space among MPS clients and enforce no limits.
pub(crate) const MPS_COMPUTE_CAPABILITY_MIN: (u32, u32) = (7, 0);

/// The whole GPU for clients of one MPS control daemon, derived from the device of the whole GPU.
/// `None` before Volta, where clients share an address space and limits are not enforced.
///
/// If the GPU's memory is unknown, only threads and clients are divided.
pub(crate) fn mps(whole: Device, gpu: &Gpu, cuda: (u32, u32)) -> Option<Device> {
    if gpu.compute_capability < MPS_COMPUTE_CAPABILITY_MIN {
        return None;
    }
    let is_memory_known = mebibytes(&whole).is_some();
    let mut device = shared(whole, DeviceId::Mps(gpu.number));
    // The CUDA library of the client enforces its limits.
    device.attributes_mut().insert("enforcement".to_owned(), string("cooperative"));
    let parts = u64::from(gpu.policy.mps_clients.max(1));
    let capacity = device.capacities_mut();
    if is_memory_known {
        let mebibytes = gpu.memory_bytes >> 20;
        let memory = divisible(mebibytes, mebibytes / parts, |mebibytes| Quantity::bytes(mebibytes << 20));
        capacity.insert("memory".to_owned(), memory);
    }
    capacity.insert("threads".to_owned(), divisible(100, 100 / parts, Quantity::count));
    capacity.insert("clients".to_owned(), divisible(mps_clients(cuda), 1, Quantity::count));
    Some(device)
}

/// Limit of client processes of an MPS server, by the CUDA version of the GPU driver. Source:
/// NVIDIA's MPS guide, 48 since Volta and "60 (up from 48 in CUDA 13.0)" in the guide of the next
/// driver. The lower value is the safe one: an excess client fails inside a running container.
fn mps_clients(cuda: (u32, u32)) -> u64 {
    if cuda >= (13, 1) { 60 } else { 48 }
}

/// Makes a device shareable by several claims and the GPU's other devices unavailable meanwhile.
///
/// Each device consumes counters of its GPU. The allocator charges a device with multiple
/// allocations once, with its first share; the allocators of 1.36 and 1.37 skip the counter check
/// for a device that is already in use. So the first time-slice takes all counters and the next
/// ones take nothing, and until the last one is released every other device lacks counters.
///
/// This follows from the allocator's source and is checked by `e2e/oracle`. The API's own feature
/// for this, compatibility groups (KEP-5963), is off by default.
fn shared(mut device: Device, id: DeviceId) -> Device {
    device.name = id.to_string();
    device.allow_multiple_allocations = Some(true);
    let attributes = device.attributes_mut();
    for name in ["type", "mode"] {
        attributes.insert(name.to_owned(), string(id.mode().as_str()));
    }
    facts_to_attributes(&mut device);
    device
}

/// A capacity that claims request in units, at least one each. `default` is the amount for a claim
/// without a request: without any policy, such a claim would take all. The range has no maximum,
/// because it would equal the capacity.
fn divisible(count: u64, default: u64, amount: impl Fn(u64) -> Quantity) -> DeviceCapacity {
    let (count, wire) = (count.max(1), |portions| WireQuantity::from(amount(portions)));
    let mut policy =
        CapacityRequestPolicy { default: Some(wire(default.clamp(1, count))), ..Default::default() };
    // The API rejects a range that is smaller than one step.
    if count == 1 {
        policy.valid_values = Some(vec![wire(1)]);
    } else {
        policy.valid_range =
            Some(CapacityRequestPolicyRange { min: wire(1), max: None, step: Some(wire(1)) });
    }
    DeviceCapacity { value: wire(count), request_policy: Some(policy) }
}
