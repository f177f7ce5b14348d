//! Builds the pool of a node from its inventory: every device that its GPUs can provide, with the
//! counters that it consumes, whether or not it exists now.
//!
//! A pool depends on the hardware and not on claims, so preparing and releasing a claim does not
//! change it. Failing, added or removed GPUs and unmanaged MIG instances do. A mode that the
//! administrator disabled is published with a taint while it closes, and not at all afterwards.

use crate::amounts::MEMORY;
use crate::attributes::{capacities, common, int, non_empty, quantities, string};
use crate::mig::{self, Model, Siblings};
use crate::modes;
use crate::taints::{self, Cause};
use crate::wire::{Consumption, Device};
use divvy_api::DeviceName;
use divvy_api::sharing::Mode;
use divvy_model::inventory::{
    Gpu, GpuInstance, Inventory, Mig, MigMode, MigProfile, MigToggle, Origin, Presence,
};
use divvy_model::{ClosingId, Closings, DeviceId, GpuNumber, Placement, share};
use k8s_openapi::api::resource::v1::{Counter, CounterSet, DeviceAttribute, DeviceTaint};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// All devices of a node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pool {
    /// Sorted by number.
    pub gpus: Vec<GpuPool>,
}

/// The devices of one GPU. A list may be empty if the server drops fields.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuPool {
    pub number: GpuNumber,
    /// `None` only if the server does not support counters.
    pub counters: Option<CounterSet>,
    /// The whole GPU for one claim.
    pub whole: Vec<Device>,
    /// The whole GPU for shares.
    pub share: Vec<Device>,
    /// MIG instances in allocation order.
    pub instances: Vec<Device>,
    /// The whole GPU for time-slices.
    pub timeslice: Vec<Device>,
    /// The whole GPU for MPS clients.
    pub mps: Vec<Device>,
    /// The whole GPU for claims with adminAccess.
    pub observer: Vec<Device>,
}

/// Inputs of a pool in addition to the inventory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolOptions {
    pub support: Support,
    /// Modes that are off and still published.
    pub closings: Closings,
}

/// ResourceSlice features that the API server supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Support {
    /// `sharedCounters` and `consumesCounters`. Without them nothing excludes two devices of one
    /// GPU, so only existing devices are published: the MIG instances, or else the whole GPU.
    pub counters: bool,
    /// `allowMultipleAllocations` and request policies. Without them or without counters, each GPU
    /// or instance goes to one claim, and devices of shared modes are not published.
    pub shares: bool,
    /// `taints`. Without them a device that needs a taint is not published.
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
        self.gpus.iter().flat_map(|gpu| gpu.lists().into_iter().flatten())
    }
}

impl GpuPool {
    fn lists(&self) -> [&Vec<Device>; 6] {
        [&self.whole, &self.share, &self.instances, &self.timeslice, &self.mps, &self.observer]
    }

    fn lists_mut(&mut self) -> [&mut Vec<Device>; 6] {
        [
            &mut self.whole,
            &mut self.share,
            &mut self.instances,
            &mut self.timeslice,
            &mut self.mps,
            &mut self.observer,
        ]
    }
}

/// Builds the pool of a node.
pub fn pool(inventory: &Inventory, options: &PoolOptions) -> Pool {
    let mut gpus = gpu_pools(inventory, options);
    gpus.sort_by_key(|gpu| gpu.number);
    Pool { gpus }
}

/// Builds the pool of a node without counters. Devices in `held` stay as they are on a server with
/// counters. Beside them only existing MIG instances of their GPU are published, because nothing
/// excludes other devices.
pub fn pool_without_counters(inventory: &Inventory, options: &PoolOptions, held: &BTreeSet<String>) -> Pool {
    let support = options.support;
    let with_counters = |counters| {
        let support = Support { counters, ..support };
        pool(inventory, &PoolOptions { support, closings: options.closings.clone() })
    };
    let mut reduced = with_counters(false);
    if held.is_empty() {
        return reduced;
    }
    let full = with_counters(true);
    for (gpu, mut all) in reduced.gpus.iter_mut().zip(full.gpus) {
        for devices in all.lists_mut() {
            devices.retain(|device| held.contains(&device.name));
            let unguarded = devices.drain(..).map(|device| Device { consumes_counters: None, ..device });
            *devices =
                if support.shares { unguarded.map(modes::guarded).collect() } else { unguarded.collect() };
        }
        if all.lists().iter().all(|devices| devices.is_empty()) {
            continue;
        }
        gpu.instances.retain(|device| !held.contains(&device.name));
        gpu.instances.append(&mut all.instances);
        *gpu = GpuPool {
            counters: gpu.counters.take(),
            instances: std::mem::take(&mut gpu.instances),
            observer: std::mem::take(&mut gpu.observer),
            ..all
        };
    }
    reduced
}

/// Whether two inventories result in the same pool on a server with counters. They do if they
/// differ only in managed instances and in a MIG mode that is switched with them.
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

/// The pools of all GPUs, for a server with these features.
pub(crate) fn gpu_pools(node: &Inventory, options: &PoolOptions) -> Vec<GpuPool> {
    let several = options.support.counters && options.support.shares;
    let mut models: Vec<(Model<'_>, Vec<Siblings<'_>>)> = Vec::new();
    let pools = node.gpus.iter().map(|gpu| {
        let known = models.iter().position(|(model, _)| model.matches(gpu, several)).unwrap_or_else(|| {
            let model = Model::of(gpu, several);
            let instances = model.instances();
            models.push((model, instances));
            models.len() - 1
        });
        let (model, instances) = &models[known];
        GpuPoolBuilder::new(node, gpu, model).gpu_pool(instances, node.cuda_version, options)
    });
    pools.collect()
}

/// Builds the devices of one GPU.
struct GpuPoolBuilder<'a> {
    gpu: &'a Gpu,
    model: &'a Model<'a>,
    set: String,
    /// Attributes of every device of the GPU.
    common: BTreeMap<String, DeviceAttribute>,
    /// Taints of every device of the GPU.
    taints: Vec<DeviceTaint>,
}

/// The published attributes of a device, on a server that supports all features. `None` if the
/// node has no such device.
pub fn attributes(node: &Inventory, name: &DeviceName) -> Option<BTreeMap<String, DeviceAttribute>> {
    let id = DeviceId::try_from(name).ok()?;
    let (gpu, part) = id.resolve(node).ok()?;
    let model = Model::of(gpu, true);
    let builder = GpuPoolBuilder::new(node, gpu, &model);
    let whole = || builder.whole(Arc::default());
    let mut device = match (id.mode(), part) {
        _ if matches!(id, DeviceId::Observer(_)) => builder.observer()?,
        (Mode::Mig, Some((profile, at))) => {
            builder.instances(&model.siblings(profile, vec![at]), None, |_| true).pop()?
        }
        (Mode::Mig, None) => return None,
        (Mode::Whole, _) => modes::exclusive(whole()),
        (Mode::Share, _) => modes::share(whole(), gpu)?,
        (Mode::Timeslice, _) => modes::timeslice(whole(), gpu),
        (Mode::Mps, _) => modes::mps(whole(), gpu, node.cuda_version)?,
    };
    fit_key_limit(&mut device);
    device.attributes.map(Arc::unwrap_or_clone)
}

impl<'a> GpuPoolBuilder<'a> {
    fn new(node: &Inventory, gpu: &'a Gpu, model: &'a Model<'a>) -> Self {
        Self {
            gpu,
            model,
            set: format!("gpu-{}-counter-set", gpu.number),
            common: common(node, gpu),
            taints: taints::of_gpu(node, gpu),
        }
    }

    fn gpu_pool(
        &self,
        instances: &[Siblings<'_>],
        cuda: (u32, u32),
        PoolOptions { support, closings }: &PoolOptions,
    ) -> GpuPool {
        let closing = |mode| match self.gpu.policy.offers(mode) {
            true => None,
            false => closings.get(&(self.gpu.number, mode)).copied(),
        };
        let is_published = |mode| self.gpu.policy.offers(mode) || closing(mode).is_some();
        let all = Arc::new(match is_published(Mode::Mig) {
            true => self.model.counters(self.gpu),
            false => mig::counter_of_whole(self.gpu),
        });
        let mut made = GpuPool {
            number: self.gpu.number,
            counters: None,
            whole: Vec::new(),
            share: Vec::new(),
            instances: Vec::new(),
            timeslice: Vec::new(),
            mps: Vec::new(),
            observer: self.observer().into_iter().collect(),
        };
        let whole = self.whole(all.clone());
        let in_mode = |device: Device, mode| self.in_mode(device, mode, closing(mode));
        if support.counters && support.shares {
            if is_published(Mode::Share) {
                let share = modes::share(whole.clone(), self.gpu);
                made.share.extend(share.map(|device| in_mode(device, Mode::Share)));
            }
            if is_published(Mode::Timeslice) {
                made.timeslice.push(in_mode(modes::timeslice(whole.clone(), self.gpu), Mode::Timeslice));
            }
            if is_published(Mode::Mps) {
                let mps = modes::mps(whole.clone(), self.gpu, cuda);
                made.mps.extend(mps.map(|device| in_mode(device, Mode::Mps)));
            }
        }
        if is_published(Mode::Whole) {
            made.whole.push(in_mode(modes::exclusive(whole), Mode::Whole));
        }
        let existing = self.existing();
        if !support.counters && !existing.is_empty() {
            made.whole.clear();
        }
        for siblings in instances.iter().filter(|_| is_published(Mode::Mig)) {
            let exists =
                |at| existing.iter().any(|i| (i.profile_id, i.placement) == (siblings.profile.id, at));
            let wanted = |at| support.counters || exists(at);
            made.instances.extend(self.instances(siblings, closing(Mode::Mig), wanted));
        }
        let takes_none = |device: &Device| device.consumes_counters.is_none();
        let is_empty = made.lists().into_iter().flatten().all(takes_none);
        made.counters = (support.counters && !is_empty)
            .then(|| CounterSet { name: self.set.clone(), counters: BTreeMap::clone(&all) });
        for devices in made.lists_mut() {
            for device in devices.iter_mut() {
                fit_key_limit(device);
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

    /// Adds the taints that are specific to a mode.
    fn in_mode(&self, mut device: Device, mode: Mode, closing: Option<ClosingId>) -> Device {
        let mut taints = device.taints.take().unwrap_or_default();
        taints::of_mode(&mut taints, self.gpu, mode, closing);
        device.taints = non_empty(taints);
        device
    }

    /// The base of all devices that take the whole GPU. Only these have NVLink attributes, because
    /// the links are down in MIG mode.
    fn whole(&self, all: Arc<BTreeMap<String, Counter>>) -> Device {
        let gpu = self.gpu;
        let mut attributes = self.common.clone();
        attributes.insert("type".to_owned(), string("gpu"));
        attributes.insert("uuid".to_owned(), string(gpu.uuid.as_str()));
        if let Some(group) = &gpu.nvlink_group {
            attributes.insert("nvlinkGroup".to_owned(), string(group));
        }
        attributes.insert("nvlinkPeers".to_owned(), int(gpu.nvlink_peers.into()));
        // The full memory. The totals of the profiles exclude the part that MIG reserves.
        let mut amounts = self.model.totals.amounts;
        amounts[MEMORY] = share::memory(gpu, None);
        let mut capacity = capacities(&quantities(&amounts));
        // Without MIG profiles the engines are unknown, and NVML does not report every GPU's memory.
        capacity.retain(
            |name, _| if name == "memory" { amounts[MEMORY] > 0 } else { self.model.totals.grid > 0 },
        );
        let mut taints = self.taints.clone();
        taints::of_conditions(&mut taints, gpu, None);
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
            capacity: non_empty(capacity).map(Arc::new),
            consumes_counters: Some(vec![Consumption {
                counter_set: self.set.clone(),
                counters: all,
                ..Default::default()
            }]),
            taints: non_empty(taints),
            ..Device::default()
        }
    }

    /// The GPU for claims with adminAccess, if it is present. The scheduler charges counters for
    /// adminAccess too, so a device without counters is the only one that is available whatever other
    /// claims hold. Its taint keeps ordinary claims away, which would hold nothing. A sick GPU is the one
    /// that monitoring must see, so taints of its health are left out.
    fn observer(&self) -> Option<Device> {
        let gpu = self.gpu;
        if gpu.presence == Presence::Missing {
            return None;
        }
        let mut attributes = self.common.clone();
        for name in ["type", "mode"] {
            attributes.insert(name.to_owned(), string("observer"));
        }
        attributes.insert("uuid".to_owned(), string(gpu.uuid.as_str()));
        let mut taints = vec![Cause::Observer.taint()];
        if gpu.presence == Presence::Unread {
            taints::add(&mut taints, &Cause::NoDriver);
        }
        Some(Device {
            name: DeviceId::Observer(gpu.number).to_string(),
            attributes: Some(Arc::new(attributes)),
            taints: Some(taints),
            ..Device::default()
        })
    }

    /// The existing MIG instances, from any creator.
    fn existing(&self) -> &'a [GpuInstance] {
        match &self.gpu.mig {
            Mig::Unsupported => &[],
            Mig::Supported { instances, .. } => instances,
        }
    }

    /// The instances of a profile at the accepted placements.
    fn instances(
        &self,
        siblings: &Siblings<'_>,
        closing: Option<ClosingId>,
        wanted: impl Fn(Placement) -> bool,
    ) -> Vec<Device> {
        let mut attributes = self.common.clone();
        attributes.extend(BTreeMap::clone(&siblings.attributes));
        attributes.insert("parentUUID".to_owned(), string(self.gpu.uuid.as_str()));
        let attributes = Arc::new(attributes);
        let mut taints = self.taints.clone();
        taints::of_mode(&mut taints, self.gpu, Mode::Mig, closing);
        if let Mig::Supported { mode: MigMode::Off, toggle: MigToggle::NeedsReset, .. } = self.gpu.mig {
            taints::add(&mut taints, &Cause::MigMode(MigMode::Off));
        }
        let placed = siblings.devices.iter().filter(|(at, _)| wanted(*at));
        let devices = placed.map(|(at, device)| {
            let attributes = Some(attributes.clone());
            let device = Device { attributes, taints: non_empty(taints.clone()), ..device.clone() };
            self.instance(device, siblings.profile, *at)
        });
        devices.collect()
    }

    /// Completes one instance with its name, UUID and taints.
    fn instance(&self, mut device: Device, profile: &MigProfile, at: Placement) -> Device {
        device.name = DeviceId::mig(self.gpu.number, &profile.name, profile.id, at.start).to_string();
        for consumption in device.consumes_counters.iter_mut().flatten() {
            consumption.counter_set.clone_from(&self.set);
        }
        if !self.gpu.conditions.is_empty() {
            let mut taints = device.taints.take().unwrap_or_default();
            taints::of_conditions(&mut taints, self.gpu, Some(at));
            device.taints = non_empty(taints);
        }
        for other in foreign(self.existing()) {
            let same = other.profile_id == profile.id && other.placement == at;
            match other.compute_instances.as_slice() {
                [only] if same => {
                    device.attributes_mut().insert("uuid".to_owned(), string(&only.uuid));
                }
                // Empty GPU instance: preparing a claim creates the compute instance.
                [] if same => {}
                // It has several compute instances, or it occupies resources of this device.
                _ if same || !self.model.totals.fit(profile, at, self.gpu, other) => {
                    taints::add(device.taints.get_or_insert_default(), &Cause::Foreign(other));
                }
                _ => {}
            }
        }
        device
    }
}

/// Limit of a device's attributes and capacities together.
const KEYS_MAX: usize = crate::validate::ATTRIBUTES_AND_CAPACITIES_MAX;

/// Drops the least important entries until the device fits: the brand, then the addressing mode.
fn fit_key_limit(device: &mut Device) {
    let used = |device: &Device| {
        device.attributes.as_ref().map_or(0, |map| map.len())
            + device.capacity.as_ref().map_or(0, |map| map.len())
    };
    for attribute in ["brand", "addressingMode"] {
        if used(device) > KEYS_MAX {
            device.attributes_mut().remove(attribute);
        }
    }
}

fn foreign(instances: &[GpuInstance]) -> impl Iterator<Item = &GpuInstance> {
    instances.iter().filter(|instance| instance.origin == Origin::Foreign)
}
