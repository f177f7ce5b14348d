//! Inventory to pool: every device that could be made of a GPU, with what it
//! takes of the GPU's counters, whether or not it exists at this moment.
//!
//! A pool depends on the hardware, not on who uses it: preparing and releasing
//! a claim changes nothing here, so nothing is written for it. What does change
//! a pool is a GPU that comes, goes or fails, and an instance somebody else makes.
//!
//! Nor does what an administrator lets be made of a GPU take a device away: what
//! is off is tainted.

use crate::gpu;
use crate::wire::Device;
use divvy_api::DeviceName;
use divvy_model::GpuNumber;
use divvy_model::inventory::{Inventory, Mig, MigMode, MigToggle, Origin};
use k8s_openapi::api::resource::v1::{CounterSet, DeviceAttribute};
use std::collections::BTreeMap;

/// All devices of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pool {
    /// By number.
    pub gpus: Vec<GpuPool>,
}

/// The devices of one GPU. Each list may be empty on a server that drops fields.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuPool {
    pub number: GpuNumber,
    /// Absent only where the server has no counters.
    pub counters: Option<CounterSet>,
    /// The GPU as a whole, for one claim or for shares of its memory.
    pub whole: Vec<Device>,
    /// The GPU as a whole, for several claims at once.
    pub shared: Vec<Device>,
    /// Instances, in the order in which they are to be taken.
    pub instances: Vec<Device>,
}

/// What shapes a pool beside the hardware.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolOptions {
    pub support: Support,
}

/// What the API server keeps of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Support {
    /// `sharedCounters` and `consumesCounters`. Without them nothing keeps two
    /// devices of one GPU apart, so only what exists is published: the
    /// instances of a GPU that has some, else the whole GPU.
    pub counters: bool,
    /// `allowMultipleAllocations` and request policies. Without them, as without
    /// counters, GPUs and instances go to one claim at a time, and no device that is
    /// there to be shared is published.
    pub shares: bool,
    /// `taints`. Without them a device that must not be handed out is left out.
    pub taints: bool,
}

impl Default for Support {
    fn default() -> Self {
        Self { counters: true, shares: true, taints: true }
    }
}

impl Pool {
    /// All counter sets.
    pub fn counter_sets(&self) -> impl Iterator<Item = &CounterSet> {
        self.gpus.iter().filter_map(|gpu| gpu.counters.as_ref())
    }

    /// All devices.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.gpus.iter().flat_map(|gpu| gpu.instances.iter().chain(&gpu.whole).chain(&gpu.shared))
    }
}

/// The pool of a node.
pub fn pool(inventory: &Inventory, options: &PoolOptions) -> Pool {
    let mut gpus = gpu::gpu_pools(inventory, options.support);
    gpus.sort_by_key(|gpu| gpu.number);
    Pool { gpus }
}

/// The attributes under which a device of the node is published; none where the
/// node has no such device.
pub fn attributes(inventory: &Inventory, device: &DeviceName) -> Option<BTreeMap<String, DeviceAttribute>> {
    gpu::attributes(inventory, device)
}

/// Whether two inventories make the same pool on a server that has counters:
/// they differ at most in our own instances, and in a MIG mode that comes and
/// goes with them.
pub fn same_pool(one: &Inventory, other: &Inventory) -> bool {
    let unused = |inventory: &Inventory| {
        let mut inventory = inventory.clone();
        for gpu in &mut inventory.gpus {
            if let Mig::Supported { mode, toggle, instances, .. } = &mut gpu.mig {
                instances.retain(|instance| instance.origin == Origin::Foreign);
                if *toggle == MigToggle::Live {
                    *mode = MigMode::Off;
                }
            }
        }
        inventory
    };
    unused(one) == unused(other)
}
