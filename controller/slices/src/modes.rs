//! In which ways a GPU is handed out, and what keeps them apart: the one place
//! that knows which devices there are beside the MIG instances, and who may
//! hold a device with whom.
//!
//! | device | held by | takes of the GPU |
//! |---|---|---|
//! | `gpu-N` | one claim, or as many shares as its memory allows | everything |
//! | an instance | the same, by its own memory | its slices and engines |
//! | `gpu-N-timeslice` | as many claims as there are slots | everything |
//! | `gpu-N-mps` | as many claims as memory, threads and clients allow | everything |
//!
//! **A share of everything is the whole.** A claim that names no memory takes all
//! of it, so nobody else fits: one device serves those who want it for themselves
//! and those who want a part. Memory is what excludes, so a GPU that does not tell
//! its memory goes to one claim at a time. Shares can be turned off, and a server
//! may not know them; then a device is exclusive, under the same name and at the
//! same cost. Either way what was allocated before stays counted: a device held
//! without a share id refuses every share, and one held by shares has no counters
//! left for a claim of its own (`e2e/oracle`).
//!
//! **The first claim decides the mode, the last release ends it**, and it is the
//! scheduler that sees to it, before a pod is on the node. Each device draws on
//! the counters of its GPU, and the allocator charges a device that allows
//! multiple allocations its counters once, with its first share (the allocator
//! of 1.36 and 1.37 skips the check for a device that is in use already). So the
//! first time-slice takes all counters and the next ones nothing; as long as one
//! is left, every other device of the GPU finds its counters taken.
//!
//! Counters were made for partitions; that they also keep modes apart follows
//! from the allocator's source and is held by its answers (`e2e/oracle`). The
//! API has a word of its own for this, the compatibility groups of KEP-5963, but
//! a cluster has them off. When they are on by default this module is what changes.
//!
//! **A capacity without a request policy is taken whole by a claim that names
//! none**, so each capacity of a shared device has one. What a claim can ask for
//! goes in steps. What only describes the GPU can be had for nothing, serves
//! selectors and promises no part. Of a time-slice or MPS device nobody can ask
//! for it; of a GPU or an instance one can, as one always could, and gets a device
//! that has so much.

use crate::wire::Device;
use crate::words::string;
use divvy_api::Quantity;
use divvy_model::DeviceId;
use divvy_model::inventory::Gpu;
use k8s_openapi::api::resource::v1::{CapacityRequestPolicy, CapacityRequestPolicyRange, DeviceCapacity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as WireQuantity;

/// What keeps a share to its limits: a library in the container, which a process
/// that means to can get around. The same word in conditions and docs.
const HOOKS: &str = "hooks";

/// A GPU or an instance: for one claim, or for shares of its memory. `shares` says
/// whether the node and the server have them.
pub(crate) fn whole(device: Device, shares: bool) -> Device {
    let memory = device.capacity.as_ref().and_then(|capacity| capacity.get("memory"));
    let bytes = memory.and_then(|memory| Quantity::try_from(&memory.value).ok()?.as_bytes());
    match bytes {
        Some(bytes @ 1..) if shares => shareable(device, bytes >> 20),
        _ => exclusive(device),
    }
}

fn shareable(mut device: Device, mebibytes: u64) -> Device {
    device.allow_multiple_allocations = Some(true);
    let attributes = device.attributes_mut();
    attributes.insert("mode".to_owned(), string("share"));
    attributes.insert("enforcement".to_owned(), string(HOOKS));
    let capacities = device.capacities_mut();
    for capacity in capacities.values_mut() {
        capacity.request_policy = fact(true);
    }
    let memory = portions(mebibytes, mebibytes, |mebibytes| Quantity::bytes(mebibytes << 20));
    capacities.insert("memory".to_owned(), memory);
    capacities.insert("cores".to_owned(), cores());
    device
}

/// The policy of a capacity that only describes a GPU or an instance: none where
/// the device is exclusive, which may carry none.
pub(crate) fn fact(shares: bool) -> Option<CapacityRequestPolicy> {
    shares.then(|| CapacityRequestPolicy { default: Some(nothing()), ..Default::default() })
}

/// Per cent of the compute time, none for who asks for none.
fn cores() -> DeviceCapacity {
    let count = |percent| WireQuantity::from(Quantity::count(percent));
    let range = CapacityRequestPolicyRange { min: nothing(), max: None, step: Some(count(1)) };
    let policy =
        CapacityRequestPolicy { default: Some(nothing()), valid_values: None, valid_range: Some(range) };
    DeviceCapacity { value: count(100), request_policy: Some(policy) }
}

fn only_nothing() -> CapacityRequestPolicy {
    CapacityRequestPolicy { default: Some(nothing()), valid_values: Some(vec![nothing()]), valid_range: None }
}

fn nothing() -> WireQuantity {
    WireQuantity("0".to_owned())
}

/// A device for one claim at a time. Without multiple allocation no capacity may
/// carry a request policy, so none is set anywhere else.
fn exclusive(mut device: Device) -> Device {
    device.allow_multiple_allocations = None;
    device.attributes_mut().insert("mode".to_owned(), string("exclusive"));
    device
}

/// The whole GPU in turns, made of what is published of the whole GPU.
pub(crate) fn timeslice(whole: Device, gpu: &Gpu) -> Device {
    let mut device = shared(whole, DeviceId::Timeslice(gpu.number));
    let interval = string(gpu.policy.interval.as_str());
    device.attributes_mut().insert("interval".to_owned(), interval);
    let slots = portions(gpu.policy.slots.into(), 1, Quantity::count);
    device.capacities_mut().insert("slots".to_owned(), slots);
    device
}

/// The whole GPU for clients of one MPS control daemon, made of what is published
/// of the whole GPU; none before Volta, where clients share one address space and
/// no limit holds.
///
/// A GPU that does not tell its memory is shared by threads and clients alone.
pub(crate) fn mps(whole: Device, gpu: &Gpu, cuda: (u32, u32)) -> Option<Device> {
    if gpu.compute_capability < (7, 0) {
        return None;
    }
    let mut device = shared(whole, DeviceId::Mps(gpu.number));
    // What keeps a client to its part is its own CUDA library.
    device.attributes_mut().insert("enforcement".to_owned(), string("cooperative"));
    let parts = u64::from(gpu.policy.mps_clients.max(1));
    let capacity = device.capacities_mut();
    if let Some(memory) = capacity.get_mut("memory") {
        let mebibytes = gpu.memory_bytes >> 20;
        *memory = portions(mebibytes, mebibytes / parts, |mebibytes| Quantity::bytes(mebibytes << 20));
    }
    capacity.insert("threads".to_owned(), portions(100, 100 / parts, Quantity::count));
    capacity.insert("clients".to_owned(), portions(mps_clients(cuda), 1, Quantity::count));
    Some(device)
}

/// How many client processes an MPS server takes, by the CUDA version of the GPU
/// driver (NVIDIA's MPS guide: 48 since Volta, and in the guide of the driver after
/// CUDA 13.0 "60 (up from 48 in CUDA 13.0)"). Where in doubt the smaller: a client
/// too many is refused inside a running container.
fn mps_clients(cuda: (u32, u32)) -> u64 {
    if cuda >= (13, 1) { 60 } else { 48 }
}

/// A device that several claims hold at once.
fn shared(mut device: Device, id: DeviceId) -> Device {
    device.name = id.to_string();
    device.allow_multiple_allocations = Some(true);
    let attributes = device.attributes_mut();
    for name in ["type", "mode"] {
        attributes.insert(name.to_owned(), string(id.mode().as_str()));
    }
    for capacity in device.capacities_mut().values_mut() {
        capacity.request_policy = Some(only_nothing());
    }
    device
}

/// A capacity that goes in portions, at least one of them to each claim;
/// `default` is what a claim gets that names none. The maximum of a range is
/// left to the value: it says the same.
fn portions(count: u64, default: u64, amount: impl Fn(u64) -> Quantity) -> DeviceCapacity {
    let (count, wire) = (count.max(1), |portions| WireQuantity::from(amount(portions)));
    let mut policy =
        CapacityRequestPolicy { default: Some(wire(default.clamp(1, count))), ..Default::default() };
    // The server refuses a range without room for a step.
    if count == 1 {
        policy.valid_values = Some(vec![wire(1)]);
    } else {
        policy.valid_range =
            Some(CapacityRequestPolicyRange { min: wire(1), max: None, step: Some(wire(1)) });
    }
    DeviceCapacity { value: wire(count), request_policy: Some(policy) }
}
