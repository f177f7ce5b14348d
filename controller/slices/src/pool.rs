//! Inventory to pool: every device that could be made of a GPU, with what it
//! takes of the GPU's counters, whether or not it exists at this moment.
//!
//! A pool depends on the hardware, not on who uses it: preparing and releasing
//! a claim changes nothing here, so nothing is written for it. What does change
//! a pool is a GPU that comes, goes or fails, and an instance somebody else makes.
//!
//! Names of attributes, capacities and counters are those of NVIDIA's driver
//! under our domain. NVLink is told of whole GPUs only: with MIG on the links
//! are down.

use crate::amounts::{self, Amounts, DIMENSIONS, MEMORY, Totals};
use crate::order;
use crate::taints::{self, Cause};
use divvy_api::Quantity;
use divvy_model::inventory::{Gpu, GpuInstance, Inventory, Mig, MigMode, MigProfile, MigToggle, Origin};
use divvy_model::{DeviceId, GpuNumber, Placement};
use k8s_openapi::api::resource::v1::{
    Counter, CounterSet, Device, DeviceAttribute, DeviceCapacity, DeviceCounterConsumption, DeviceTaint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as WireQuantity;
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
    /// Devices that take the whole GPU.
    pub whole: Vec<Device>,
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
    /// `taints`. Without them a device that must not be handed out is left out.
    pub taints: bool,
}

impl Default for Support {
    fn default() -> Self {
        Self { counters: true, taints: true }
    }
}

impl Pool {
    /// All counter sets.
    pub fn counter_sets(&self) -> impl Iterator<Item = &CounterSet> {
        self.gpus.iter().filter_map(|gpu| gpu.counters.as_ref())
    }

    /// All devices.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.gpus.iter().flat_map(|gpu| gpu.instances.iter().chain(&gpu.whole))
    }
}

/// The pool of a node.
pub fn pool(inventory: &Inventory, options: &PoolOptions) -> Pool {
    let mut gpus: Vec<GpuPool> =
        inventory.gpus.iter().map(|gpu| Maker::new(inventory, gpu).gpu_pool(options.support)).collect();
    gpus.sort_by_key(|gpu| gpu.number);
    Pool { gpus }
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

/// How a device is handed out, in one place for whole GPUs and instances alike:
/// to one claim at a time. Without multiple allocation no capacity may carry a
/// request policy, so none is set anywhere else.
fn hand_out(mut device: Device) -> Device {
    device.allow_multiple_allocations = None;
    device.attributes.get_or_insert_default().insert("mode".to_owned(), string("exclusive"));
    device
}

/// Makes the devices of one GPU; holds what they have in common.
struct Maker<'a> {
    gpu: &'a Gpu,
    totals: Totals,
    set: String,
    /// Attributes of every device of the GPU.
    common: BTreeMap<String, DeviceAttribute>,
    /// Taints of every device of the GPU.
    taints: Vec<DeviceTaint>,
    /// Per memory slice, its name as a counter and as a capacity.
    slices: Vec<(String, String)>,
    /// One of something, in the words of the API: written once, not per slice and device.
    one: WireQuantity,
}

impl<'a> Maker<'a> {
    fn new(node: &Inventory, gpu: &'a Gpu) -> Self {
        let profiles: &[MigProfile] = match &gpu.mig {
            Mig::Unsupported => &[],
            Mig::Supported { profiles, .. } => profiles,
        };
        let totals = Totals::of(profiles);
        Self {
            gpu,
            set: format!("gpu-{}-counter-set", gpu.number),
            common: common(node, gpu),
            taints: taints::of_gpu(gpu),
            slices: (0..totals.grid)
                .map(|n| (format!("memory-slice-{n}"), format!("{MEMORY_SLICE}{n}")))
                .collect(),
            one: Quantity::count(1).into(),
            totals,
        }
    }

    fn gpu_pool(&self, support: Support) -> GpuPool {
        let mut made = GpuPool {
            number: self.gpu.number,
            counters: support
                .counters
                .then(|| CounterSet { name: self.set.clone(), counters: self.all_counters() }),
            whole: vec![self.whole()],
            instances: Vec::new(),
        };
        if let Mig::Supported { mode, toggle, profiles, instances } = &self.gpu.mig {
            let exists =
                |id: u32, at: Placement| instances.iter().any(|i| i.profile_id == id && i.placement == at);
            let instances_only = !support.counters && !instances.is_empty();
            if instances_only {
                made.whole.clear();
            }
            for profile in order::profiles(profiles) {
                let mut places = order::placements(profile, profiles);
                places.retain(|at| support.counters || exists(profile.id, *at));
                let bases = std::iter::repeat_n(self.instance_base(profile), places.len());
                let devices = places.into_iter().zip(bases);
                made.instances.extend(
                    devices.map(|(at, base)| self.instance(base, profile, at, (*mode, *toggle), instances)),
                );
            }
        }
        for device in made.whole.iter_mut().chain(&mut made.instances) {
            fit_budget(device);
            if !support.counters {
                device.consumes_counters = None;
            }
        }
        if !support.taints {
            made.whole.retain(|device| device.taints.is_none());
            made.instances.retain(|device| device.taints.is_none());
        }
        made
    }

    fn whole(&self) -> Device {
        let gpu = self.gpu;
        let mut attributes = self.common.clone();
        attributes.insert("type".to_owned(), string("gpu"));
        attributes.insert("uuid".to_owned(), string(gpu.uuid.as_str()));
        if let Some(group) = &gpu.nvlink_group {
            attributes.insert("nvlinkGroup".to_owned(), string(group));
        }
        attributes.insert("nvlinkPeers".to_owned(), int(gpu.nvlink_peers.into()));
        // All of the memory, of which MIG keeps a part for itself.
        let mut amounts = self.totals.amounts;
        amounts[MEMORY] = gpu.memory_bytes >> 20 << 20;
        let mut capacity = capacities(&written(&amounts));
        // Nothing is known of engines without profiles, nor of memory where NVML does not tell.
        capacity.retain(|name, _| if name == "memory" { amounts[MEMORY] > 0 } else { self.totals.grid > 0 });
        let mut taints = self.taints.clone();
        if let Mig::Supported { mode, toggle, instances, .. } = &gpu.mig {
            if (*mode, *toggle) == (MigMode::On, MigToggle::NeedsReset) {
                taints::add(&mut taints, &Cause::MigMode(*mode));
            }
            if let Some(foreign) = foreign(instances).next() {
                taints::add(&mut taints, &Cause::Foreign(foreign));
            }
        }
        hand_out(Device {
            name: DeviceId::Gpu(gpu.number).to_string(),
            attributes: Some(attributes),
            capacity: some(capacity),
            consumes_counters: Some(vec![self.consumption(self.all_counters())]),
            taints: some(taints),
            ..Device::default()
        })
    }

    /// What the instances of a profile have in common.
    fn instance_base(&self, profile: &MigProfile) -> Device {
        let mut attributes = self.common.clone();
        attributes.insert("type".to_owned(), string("mig"));
        attributes.insert("parentUUID".to_owned(), string(self.gpu.uuid.as_str()));
        attributes.insert("profile".to_owned(), string(&profile.name));
        let amounts = amounts::of(profile);
        let written = written(&amounts);
        // What it takes nothing of need not be counted.
        let mut counters: BTreeMap<String, Counter> = counters(&written)
            .enumerate()
            .filter(|(dimension, _)| amounts[*dimension] > 0)
            .map(|(_, counter)| counter)
            .collect();
        if self.totals.counted.iter().any(|(id, _)| *id == profile.id) {
            counters.insert(profile_counter(profile.id), Counter { value: self.one.clone() });
        }
        hand_out(Device {
            attributes: Some(attributes),
            capacity: Some(capacities(&written)),
            consumes_counters: Some(vec![self.consumption(counters)]),
            ..Device::default()
        })
    }

    /// One of them, at its place.
    fn instance(
        &self,
        mut device: Device,
        profile: &MigProfile,
        at: Placement,
        mig: (MigMode, MigToggle),
        instances: &[GpuInstance],
    ) -> Device {
        device.name = DeviceId::mig(self.gpu.number, &profile.name, profile.id, at.start).to_string();
        for (counter, capacity) in &self.slices[at.start as usize..at.slices().end as usize] {
            let value = || self.one.clone();
            let capacities = device.capacity.get_or_insert_default();
            capacities.insert(capacity.clone(), DeviceCapacity { value: value(), request_policy: None });
            for consumption in device.consumes_counters.iter_mut().flatten() {
                consumption.counters.insert(counter.clone(), Counter { value: value() });
            }
        }
        let mut taints = self.taints.clone();
        if mig == (MigMode::Off, MigToggle::NeedsReset) {
            taints::add(&mut taints, &Cause::MigMode(MigMode::Off));
        }
        for other in foreign(instances) {
            let same = other.profile_id == profile.id && other.placement == at;
            match other.compute_instances.as_slice() {
                [only] if same => {
                    device.attributes.get_or_insert_default().insert("uuid".to_owned(), string(&only.uuid));
                }
                // Nothing in it yet: a compute instance is made with the claim.
                [] if same => {}
                // In pieces, or in the way.
                _ if same || !self.totals.fit(profile, at, self.gpu, other) => {
                    taints::add(&mut taints, &Cause::Foreign(other));
                }
                _ => {}
            }
        }
        device.taints = some(taints);
        device
    }

    fn consumption(&self, counters: BTreeMap<String, Counter>) -> DeviceCounterConsumption {
        DeviceCounterConsumption { counter_set: self.set.clone(), counters, ..Default::default() }
    }

    /// Everything there is of the GPU.
    fn all_counters(&self) -> BTreeMap<String, Counter> {
        if self.totals.grid == 0 {
            // One counter that excludes: at least 1 where the memory is not told.
            let memory = (self.gpu.memory_bytes >> 20 << 20).max(1);
            let value = Quantity::bytes(memory).into();
            return BTreeMap::from([("memory".to_owned(), Counter { value })]);
        }
        let written = written(&self.totals.amounts);
        let slices = self.slices.iter().map(|(name, _)| (name.clone(), Counter { value: self.one.clone() }));
        let counted = self.totals.counted.iter().map(|(id, most)| {
            let value = Quantity::count(*most).into();
            (profile_counter(*id), Counter { value })
        });
        counters(&written).chain(slices).chain(counted).collect()
    }
}

/// Prefix of the capacities that name the memory slices of an instance.
const MEMORY_SLICE: &str = "memorySlice";
/// Attributes and capacities that a device may have together.
const BUDGET: usize = crate::validate::ATTRIBUTES_AND_CAPACITIES;

/// Drops what is least missed until the device fits: the memory slices (the
/// counters say the same), then brand and addressing mode.
fn fit_budget(device: &mut Device) {
    let used = |device: &Device| {
        device.attributes.as_ref().map_or(0, BTreeMap::len)
            + device.capacity.as_ref().map_or(0, BTreeMap::len)
    };
    if used(device) > BUDGET {
        device.capacity.get_or_insert_default().retain(|name, _| !name.starts_with(MEMORY_SLICE));
    }
    for attribute in ["brand", "addressingMode"] {
        if used(device) > BUDGET {
            device.attributes.get_or_insert_default().remove(attribute);
        }
    }
}

fn foreign(instances: &[GpuInstance]) -> impl Iterator<Item = &GpuInstance> {
    instances.iter().filter(|instance| instance.origin == Origin::Foreign)
}

/// What every device of a GPU says of it.
fn common(node: &Inventory, gpu: &Gpu) -> BTreeMap<String, DeviceAttribute> {
    let (major, minor) = gpu.compute_capability;
    let (cuda_major, cuda_minor) = node.cuda_version;
    let cuda = (cuda_major > 0).then(|| version(&format!("{cuda_major}.{cuda_minor}.0")));
    [
        ("productName", text(&gpu.product)),
        ("brand", text(&gpu.brand)),
        ("architecture", text(&gpu.architecture)),
        ("cudaComputeCapability", Some(version(&format!("{major}.{minor}.0")))),
        ("driverVersion", semantic(&node.driver_version).map(|text| version(&text))),
        ("cudaDriverVersion", cuda),
        ("addressingMode", gpu.addressing_mode.as_deref().and_then(text)),
        ("resource.kubernetes.io/pciBusID", text(&gpu.pci_bus_id)),
        ("resource.kubernetes.io/pcieRoot", gpu.pcie_root.as_deref().and_then(text)),
        ("resource.kubernetes.io/numaNode", gpu.numa_node.map(|node| int(node.into()))),
    ]
    .into_iter()
    .filter_map(|(name, value)| Some((name.to_owned(), value?)))
    .collect()
}

/// `580.95.05` as a semantic version: three numbers without leading zeros.
fn semantic(text: &str) -> Option<String> {
    let mut numbers = text.split('.').map(|part| part.parse::<u32>().ok());
    let major = numbers.next()??;
    let mut next = || numbers.next().map_or(Some(0), |number| number);
    Some(format!("{major}.{}.{}", next()?, next()?))
}

/// Amounts in the words of the API.
fn written(amounts: &Amounts) -> [WireQuantity; DIMENSIONS.len()] {
    std::array::from_fn(|dimension| match (dimension, amounts[dimension]) {
        (MEMORY, bytes) => Quantity::bytes(bytes).into(),
        // Already canonical, and cheaper: most amounts are small counts.
        (_, count @ 0..1000) => WireQuantity(count.to_string()),
        (_, count) => Quantity::count(count).into(),
    })
}

fn capacities(written: &[WireQuantity; DIMENSIONS.len()]) -> BTreeMap<String, DeviceCapacity> {
    let capacity = |value: &WireQuantity| DeviceCapacity { value: value.clone(), request_policy: None };
    DIMENSIONS.iter().zip(written).map(|((name, _), value)| ((*name).to_owned(), capacity(value))).collect()
}

fn counters(written: &[WireQuantity; DIMENSIONS.len()]) -> impl Iterator<Item = (String, Counter)> + '_ {
    let counter = |value: &WireQuantity| Counter { value: value.clone() };
    DIMENSIONS.iter().zip(written).map(move |((_, name), value)| ((*name).to_owned(), counter(value)))
}

fn profile_counter(id: u32) -> String {
    format!("instances-of-profile-{id}")
}

/// A text attribute; the API takes 64 bytes, and an empty one says nothing.
fn text(text: &str) -> Option<DeviceAttribute> {
    (!text.is_empty()).then(|| string(text))
}

fn string(text: &str) -> DeviceAttribute {
    let end = text.floor_char_boundary(crate::validate::ATTRIBUTE_TEXT);
    DeviceAttribute { string: Some(text[..end].to_owned()), ..Default::default() }
}

fn version(text: &str) -> DeviceAttribute {
    DeviceAttribute { version: Some(text.to_owned()), ..Default::default() }
}

fn int(value: i64) -> DeviceAttribute {
    DeviceAttribute { int: Some(value), ..Default::default() }
}

/// Lists and maps on the wire are absent rather than empty.
fn some<T>(list: T) -> Option<T>
where
    T: PartialEq + Default,
{
    (list != T::default()).then_some(list)
}
