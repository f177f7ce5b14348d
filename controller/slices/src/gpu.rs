//! The devices of one GPU: what it has, turned into every device that could be
//! made of it, with counters that let together be held what can exist together.
//!
//! NVLink is told of whole GPUs only: with MIG on the links are down.

use crate::amounts::{self, MEMORY, Totals};
use crate::modes;
use crate::order;
use crate::pool::{GpuPool, Support};
use crate::taints::{self, Cause};
use crate::words::{capacities, common, counters, int, profile_counter, some, string, written};
use divvy_api::sharing::Mode;
use divvy_api::{DeviceName, Quantity};
use divvy_model::inventory::{Gpu, GpuInstance, Inventory, Mig, MigMode, MigProfile, MigToggle, Origin};
use divvy_model::{DeviceId, Placement, share};
use k8s_openapi::api::resource::v1::{
    Counter, CounterSet, Device, DeviceAttribute, DeviceCapacity, DeviceCounterConsumption, DeviceTaint,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as WireQuantity;
use std::collections::BTreeMap;

/// Everything published of a GPU, on a server that keeps so much.
pub(crate) fn gpu_pool(node: &Inventory, gpu: &Gpu, support: Support) -> GpuPool {
    Maker::new(node, gpu, support.counters && support.shares).gpu_pool(node.cuda_version, support)
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
    /// Taints of every instance.
    instance_taints: Vec<DeviceTaint>,
    /// Per memory slice, its name as a counter and as a capacity.
    slices: Vec<(String, String)>,
    /// Whether devices are dealt out in shares too.
    shares: bool,
    /// One of something, in the words of the API: written once, not per slice and device.
    one: WireQuantity,
}

/// The attributes under which a device is published on a server that keeps all.
pub(crate) fn attributes(node: &Inventory, name: &DeviceName) -> Option<BTreeMap<String, DeviceAttribute>> {
    let id = DeviceId::try_from(name).ok()?;
    let (gpu, part) = id.resolve(node).ok()?;
    let maker = Maker::new(node, gpu, true);
    let whole = || maker.whole(BTreeMap::new());
    let mut device = match (id.mode(), part, &gpu.mig) {
        (Mode::Mig, Some((profile, at)), Mig::Supported { mode, toggle, instances, .. }) => {
            maker.instance(maker.instance_base(profile), profile, at, (*mode, *toggle), instances)
        }
        (Mode::Mig, ..) => return None,
        (Mode::Whole, ..) => modes::whole(whole(), maker.shares),
        (Mode::Timeslice, ..) => modes::timeslice(whole(), gpu),
        (Mode::Mps, ..) => modes::mps(whole(), gpu, node.cuda_version)?,
    };
    fit_budget(&mut device);
    device.attributes
}

impl<'a> Maker<'a> {
    /// `several` is whether the server lets several claims hold a device.
    fn new(node: &Inventory, gpu: &'a Gpu, several: bool) -> Self {
        let profiles: &[MigProfile] = match &gpu.mig {
            Mig::Unsupported => &[],
            Mig::Supported { profiles, .. } => profiles,
        };
        let totals = Totals::of(profiles);
        Self {
            gpu,
            set: format!("gpu-{}-counter-set", gpu.number),
            common: common(node, gpu),
            taints: taints::of_gpu(node, gpu),
            instance_taints: {
                let mut taints = taints::of_gpu(node, gpu);
                taints::of_mode(&mut taints, gpu, Mode::Mig);
                taints
            },
            slices: (0..totals.grid)
                .map(|n| (format!("memory-slice-{n}"), format!("{MEMORY_SLICE}{n}")))
                .collect(),
            shares: several && gpu.policy.shares,
            one: Quantity::count(1).into(),
            totals,
        }
    }

    fn gpu_pool(&self, cuda: (u32, u32), support: Support) -> GpuPool {
        let all = self.all_counters();
        let mut made = GpuPool {
            number: self.gpu.number,
            counters: None,
            whole: Vec::new(),
            shared: Vec::new(),
            instances: Vec::new(),
        };
        let whole = self.whole(all.clone());
        if support.counters && support.shares {
            let modes = [
                (Mode::Timeslice, Some(modes::timeslice(whole.clone(), self.gpu))),
                (Mode::Mps, modes::mps(whole.clone(), self.gpu, cuda)),
            ];
            for (mode, device) in modes {
                made.shared.extend(device.map(|device| self.in_mode(device, mode)));
            }
        }
        made.whole.push(self.in_mode(modes::whole(whole, self.shares), Mode::Whole));
        made.counters = support.counters.then(|| CounterSet { name: self.set.clone(), counters: all });
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
        for devices in [&mut made.whole, &mut made.shared, &mut made.instances] {
            for device in devices.iter_mut() {
                fit_budget(device);
                if !support.counters {
                    device.consumes_counters = None;
                }
            }
            if !support.taints {
                devices.retain(|device| device.taints.is_none());
            }
        }
        made
    }

    /// With the taints that a device of that mode has beside those of its GPU.
    fn in_mode(&self, mut device: Device, mode: Mode) -> Device {
        let mut taints = device.taints.take().unwrap_or_default();
        taints::of_mode(&mut taints, self.gpu, mode);
        device.taints = some(taints);
        device
    }

    /// What all devices that take the whole GPU have in common.
    fn whole(&self, all: BTreeMap<String, Counter>) -> Device {
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
        amounts[MEMORY] = share::memory(gpu, None);
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
        Device {
            name: DeviceId::Gpu(gpu.number).to_string(),
            attributes: Some(attributes),
            capacity: some(capacity),
            consumes_counters: Some(vec![self.consumption(all)]),
            taints: some(taints),
            ..Device::default()
        }
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
        let device = Device {
            attributes: Some(attributes),
            capacity: Some(capacities(&written)),
            consumes_counters: Some(vec![self.consumption(counters)]),
            ..Device::default()
        };
        modes::whole(device, self.shares)
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
            let request_policy = modes::fact(self.shares);
            capacities.insert(capacity.clone(), DeviceCapacity { value: value(), request_policy });
            for consumption in device.consumes_counters.iter_mut().flatten() {
                consumption.counters.insert(counter.clone(), Counter { value: value() });
            }
        }
        let mut taints = self.instance_taints.clone();
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
