//! The devices of one GPU: what it has, turned into every device that could be
//! made of it, with counters that let together be held what can exist together.
//!
//! What its instances have and take is that of the model; here they get a name
//! and whose they are.
//!
//! NVLink is told of whole GPUs only: with MIG on the links are down.

use crate::amounts::MEMORY;
use crate::mig::{MEMORY_SLICE, Model, Siblings};
use crate::modes;
use crate::pool::{GpuPool, Support};
use crate::taints::{self, Cause};
use crate::wire::{Consumption, Device};
use crate::words::{capacities, common, int, some, string, written};
use divvy_api::DeviceName;
use divvy_api::sharing::Mode;
use divvy_model::inventory::{Gpu, GpuInstance, Inventory, Mig, MigMode, MigProfile, MigToggle, Origin};
use divvy_model::{DeviceId, Placement, share};
use k8s_openapi::api::resource::v1::{Counter, CounterSet, DeviceAttribute, DeviceTaint};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Everything published of the node's GPUs, on a server that keeps so much.
pub(crate) fn gpu_pools(node: &Inventory, support: Support) -> Vec<GpuPool> {
    let several = support.counters && support.shares;
    let mut models: Vec<(Model<'_>, Vec<Siblings<'_>>)> = Vec::new();
    let pools = node.gpus.iter().map(|gpu| {
        let known = models.iter().position(|(model, _)| model.is_of(gpu, several)).unwrap_or_else(|| {
            let model = Model::of(gpu, several);
            let instances = model.instances();
            models.push((model, instances));
            models.len() - 1
        });
        let (model, instances) = &models[known];
        Maker::new(node, gpu, model).gpu_pool(instances, node.cuda_version, support)
    });
    pools.collect()
}

/// Makes the devices of one GPU; holds what they have in common.
struct Maker<'a> {
    gpu: &'a Gpu,
    model: &'a Model<'a>,
    set: String,
    /// Attributes of every device of the GPU.
    common: BTreeMap<String, DeviceAttribute>,
    /// Taints of every device of the GPU.
    taints: Vec<DeviceTaint>,
}

/// The attributes under which a device is published on a server that keeps all.
pub(crate) fn attributes(node: &Inventory, name: &DeviceName) -> Option<BTreeMap<String, DeviceAttribute>> {
    let id = DeviceId::try_from(name).ok()?;
    let (gpu, part) = id.resolve(node).ok()?;
    let model = Model::of(gpu, true);
    let maker = Maker::new(node, gpu, &model);
    let whole = || maker.whole(Arc::default());
    let mut device = match (id.mode(), part) {
        (Mode::Mig, Some((profile, at))) => {
            maker.instances(&model.siblings(profile, vec![at]), |_| true).pop()?
        }
        (Mode::Mig, None) => return None,
        (Mode::Whole, _) => modes::whole(whole(), model.shares),
        (Mode::Timeslice, _) => modes::timeslice(whole(), gpu),
        (Mode::Mps, _) => modes::mps(whole(), gpu, node.cuda_version)?,
    };
    fit_budget(&mut device);
    device.attributes.map(Arc::unwrap_or_clone)
}

impl<'a> Maker<'a> {
    fn new(node: &Inventory, gpu: &'a Gpu, model: &'a Model<'a>) -> Self {
        Self {
            gpu,
            model,
            set: format!("gpu-{}-counter-set", gpu.number),
            common: common(node, gpu),
            taints: taints::of_gpu(node, gpu),
        }
    }

    fn gpu_pool(&self, instances: &[Siblings<'_>], cuda: (u32, u32), support: Support) -> GpuPool {
        let all = Arc::new(self.model.counters(self.gpu));
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
        made.whole.push(self.in_mode(modes::whole(whole, self.model.shares), Mode::Whole));
        made.counters =
            support.counters.then(|| CounterSet { name: self.set.clone(), counters: BTreeMap::clone(&all) });
        let existing = self.existing();
        if !support.counters && !existing.is_empty() {
            made.whole.clear();
        }
        for siblings in instances {
            let exists =
                |at| existing.iter().any(|i| (i.profile_id, i.placement) == (siblings.profile.id, at));
            made.instances.extend(self.instances(siblings, |at| support.counters || exists(at)));
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
    fn whole(&self, all: Arc<BTreeMap<String, Counter>>) -> Device {
        let gpu = self.gpu;
        let mut attributes = self.common.clone();
        attributes.insert("type".to_owned(), string("gpu"));
        attributes.insert("uuid".to_owned(), string(gpu.uuid.as_str()));
        if let Some(group) = &gpu.nvlink_group {
            attributes.insert("nvlinkGroup".to_owned(), string(group));
        }
        attributes.insert("nvlinkPeers".to_owned(), int(gpu.nvlink_peers.into()));
        // All of the memory, of which MIG keeps a part for itself.
        let mut amounts = self.model.totals.amounts;
        amounts[MEMORY] = share::memory(gpu, None);
        let mut capacity = capacities(&written(&amounts));
        // Nothing is known of engines without profiles, nor of memory where NVML does not tell.
        capacity.retain(
            |name, _| if name == "memory" { amounts[MEMORY] > 0 } else { self.model.totals.grid > 0 },
        );
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
            attributes: Some(Arc::new(attributes)),
            capacity: some(capacity).map(Arc::new),
            consumes_counters: Some(vec![Consumption {
                counter_set: self.set.clone(),
                counters: all,
                ..Default::default()
            }]),
            taints: some(taints),
            ..Device::default()
        }
    }

    /// What exists of the instances, whoever made it.
    fn existing(&self) -> &'a [GpuInstance] {
        match &self.gpu.mig {
            Mig::Unsupported => &[],
            Mig::Supported { instances, .. } => instances,
        }
    }

    /// The instances of a profile that are wanted.
    fn instances(&self, siblings: &Siblings<'_>, wanted: impl Fn(Placement) -> bool) -> Vec<Device> {
        let mut attributes = self.common.clone();
        attributes.extend(BTreeMap::clone(&siblings.attributes));
        attributes.insert("parentUUID".to_owned(), string(self.gpu.uuid.as_str()));
        let attributes = Arc::new(attributes);
        let mut taints = self.taints.clone();
        taints::of_mode(&mut taints, self.gpu, Mode::Mig);
        if let Mig::Supported { mode: MigMode::Off, toggle: MigToggle::NeedsReset, .. } = self.gpu.mig {
            taints::add(&mut taints, &Cause::MigMode(MigMode::Off));
        }
        let placed = siblings.devices.iter().filter(|(at, _)| wanted(*at));
        let devices = placed.map(|(at, device)| {
            let attributes = Some(attributes.clone());
            let device = Device { attributes, taints: some(taints.clone()), ..device.clone() };
            self.instance(device, siblings.profile, *at)
        });
        devices.collect()
    }

    /// One of them: what is published only of this one.
    fn instance(&self, mut device: Device, profile: &MigProfile, at: Placement) -> Device {
        device.name = DeviceId::mig(self.gpu.number, &profile.name, profile.id, at.start).to_string();
        for consumption in device.consumes_counters.iter_mut().flatten() {
            consumption.counter_set.clone_from(&self.set);
        }
        for other in foreign(self.existing()) {
            let same = other.profile_id == profile.id && other.placement == at;
            match other.compute_instances.as_slice() {
                [only] if same => {
                    device.attributes_mut().insert("uuid".to_owned(), string(&only.uuid));
                }
                // Nothing in it yet: a compute instance is made with the claim.
                [] if same => {}
                // In pieces, or in the way.
                _ if same || !self.model.totals.fit(profile, at, self.gpu, other) => {
                    taints::add(device.taints.get_or_insert_default(), &Cause::Foreign(other));
                }
                _ => {}
            }
        }
        device
    }
}

/// Attributes and capacities that a device may have together.
const BUDGET: usize = crate::validate::ATTRIBUTES_AND_CAPACITIES;

/// Drops what is least missed until the device fits: the memory slices (the
/// counters say the same), then brand and addressing mode.
fn fit_budget(device: &mut Device) {
    let used = |device: &Device| {
        device.attributes.as_ref().map_or(0, |map| map.len())
            + device.capacity.as_ref().map_or(0, |map| map.len())
    };
    if used(device) > BUDGET {
        device.capacities_mut().retain(|name, _| !name.starts_with(MEMORY_SLICE));
    }
    for attribute in ["brand", "addressingMode"] {
        if used(device) > BUDGET {
            device.attributes_mut().remove(attribute);
        }
    }
}

fn foreign(instances: &[GpuInstance]) -> impl Iterator<Item = &GpuInstance> {
    instances.iter().filter(|instance| instance.origin == Origin::Foreign)
}
