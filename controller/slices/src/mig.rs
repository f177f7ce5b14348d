//! The instances of a GPU model: which there can be, in which order they are to
//! be taken, what each of them has and what it takes of its GPU.
//!
//! GPUs of one model differ in who they are and in what is wrong with them, so
//! all this is made once and not for each of a node's sixteen.

use crate::amounts::{self, Totals};
use crate::modes;
use crate::order;
use crate::wire::{Consumption, Device};
use crate::words::{capacities, counters, profile_counter, string, written};
use divvy_api::Quantity;
use divvy_model::Placement;
use divvy_model::inventory::{Gpu, Mig, MigProfile};
use k8s_openapi::api::resource::v1::{Counter, DeviceAttribute, DeviceCapacity};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as WireQuantity;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Prefix of the capacities that name the memory slices of an instance.
pub(crate) const MEMORY_SLICE: &str = "memorySlice";

/// What GPUs have in common that are cut alike.
pub(crate) struct Model<'a> {
    profiles: &'a [MigProfile],
    /// Whether devices are dealt out in shares too.
    pub(crate) shares: bool,
    pub(crate) totals: Totals,
    /// Per memory slice, its name as a counter and as a capacity.
    slices: Vec<(String, String)>,
    /// One of something, in the words of the API: written once, not per slice and device.
    one: WireQuantity,
}

/// The instances of a profile.
pub(crate) struct Siblings<'a> {
    pub(crate) profile: &'a MigProfile,
    /// What each says of itself beside what its GPU does.
    pub(crate) attributes: Arc<BTreeMap<String, DeviceAttribute>>,
    /// In the order in which they are to be taken: without a name and without attributes, and
    /// drawing on a counter set that has no name yet.
    pub(crate) devices: Vec<(Placement, Device)>,
}

fn profiles(gpu: &Gpu) -> &[MigProfile] {
    match &gpu.mig {
        Mig::Unsupported => &[],
        Mig::Supported { profiles, .. } => profiles,
    }
}

impl<'a> Model<'a> {
    /// The model of a GPU; `several` is whether the server lets several claims hold a device.
    pub(crate) fn of(gpu: &'a Gpu, several: bool) -> Self {
        let profiles = profiles(gpu);
        let totals = Totals::of(profiles);
        Self {
            profiles,
            shares: several && gpu.policy.shares,
            slices: (0..totals.grid)
                .map(|n| (format!("memory-slice-{n}"), format!("{MEMORY_SLICE}{n}")))
                .collect(),
            one: Quantity::count(1).into(),
            totals,
        }
    }

    /// Whether it is that of a GPU, too.
    pub(crate) fn is_of(&self, gpu: &Gpu, several: bool) -> bool {
        self.shares == (several && gpu.policy.shares) && self.profiles == profiles(gpu)
    }

    /// Every instance there can be, by profile, in the order in which they are to be taken.
    pub(crate) fn instances(&self) -> Vec<Siblings<'a>> {
        let placed = |profile| self.siblings(profile, order::placements(profile, self.profiles));
        order::profiles(self.profiles).into_iter().map(placed).collect()
    }

    /// The instances of a profile at these places.
    pub(crate) fn siblings(&self, profile: &'a MigProfile, places: Vec<Placement>) -> Siblings<'a> {
        let mut first = self.anywhere(profile);
        let attributes = first.attributes.take().unwrap_or_default();
        let devices = places.into_iter().map(|at| (at, self.at(first.clone(), at))).collect();
        Siblings { profile, attributes, devices }
    }

    /// An instance of a profile, wherever it lies.
    fn anywhere(&self, profile: &MigProfile) -> Device {
        let attributes = [("type", "mig"), ("profile", &profile.name)];
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
            attributes: Some(Arc::new(
                attributes.map(|(name, value)| (name.to_owned(), string(value))).into(),
            )),
            capacity: Some(Arc::new(capacities(&written))),
            consumes_counters: Some(vec![Consumption { counters: Arc::new(counters), ..Default::default() }]),
            ..Device::default()
        };
        modes::whole(device, self.shares)
    }

    /// With the memory slices of its place.
    fn at(&self, mut device: Device, at: Placement) -> Device {
        for (counter, capacity) in &self.slices[at.start as usize..at.slices().end as usize] {
            let value = || self.one.clone();
            let request_policy = modes::fact(self.shares);
            let one = DeviceCapacity { value: value(), request_policy };
            device.capacities_mut().insert(capacity.clone(), one);
            for consumption in device.consumes_counters.iter_mut().flatten() {
                Arc::make_mut(&mut consumption.counters).insert(counter.clone(), Counter { value: value() });
            }
        }
        device
    }

    /// Everything there is of a GPU of the model.
    pub(crate) fn counters(&self, gpu: &Gpu) -> BTreeMap<String, Counter> {
        if self.totals.grid == 0 {
            // One counter that excludes: at least 1 where the memory is not told.
            let memory = (gpu.memory_bytes >> 20 << 20).max(1);
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
