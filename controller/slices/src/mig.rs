//! The possible MIG instances of a GPU model: their order, attributes, capacities and counters.
//! GPUs of the same model share them, so they are built once per node.

use crate::amounts::{self, Totals};
use crate::attributes::{capacities, quantities, string};
use crate::modes;
use crate::needed::{Limit, needed};
use crate::order;
use crate::wire::{Consumption, Device};
use divvy_api::Quantity;
use divvy_model::Placement;
use divvy_model::inventory::{Gpu, Mig, MigProfile};
use k8s_openapi::api::resource::v1::{Counter, DeviceAttribute};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as WireQuantity;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The data that GPUs with equal MIG profiles and policy have in common.
pub(crate) struct Model<'a> {
    profiles: &'a [MigProfile],
    /// Whether instances are published in shares.
    shares: bool,
    pub(crate) totals: Totals,
    /// The counter of each memory slice.
    slices: Vec<String>,
    /// The counters beside those of memory slices.
    limits: Vec<Limit>,
    /// The quantity 1, formatted once.
    one: WireQuantity,
}

/// The instances of one profile.
pub(crate) struct Siblings<'a> {
    pub(crate) profile: &'a MigProfile,
    /// Attributes of every instance, in addition to those of its GPU.
    pub(crate) attributes: Arc<BTreeMap<String, DeviceAttribute>>,
    /// The instances in allocation order. Names, attributes and the counter set's name are added
    /// later, per GPU.
    pub(crate) devices: Vec<(Placement, Device)>,
}

fn has_shares(gpu: &Gpu) -> bool {
    gpu.policy.shares && gpu.policy.mig_shares
}

fn profiles(gpu: &Gpu) -> &[MigProfile] {
    match &gpu.mig {
        Mig::Unsupported => &[],
        Mig::Supported { profiles, .. } => profiles,
    }
}

/// The counter set of a GPU without MIG instances: all devices take all of one counter. It is at least 1
/// if the memory is unknown. When instances are published or removed, the other devices still take
/// all of the GPU, so claims that hold them stay charged.
pub(crate) fn counter_of_whole(gpu: &Gpu) -> BTreeMap<String, Counter> {
    let memory = (gpu.memory_bytes >> 20 << 20).max(1);
    BTreeMap::from([("memory".to_owned(), Counter { value: Quantity::bytes(memory).into() })])
}

impl<'a> Model<'a> {
    /// The model of a GPU. `several` is whether the server supports multiple allocations.
    pub(crate) fn of(gpu: &'a Gpu, several: bool) -> Self {
        let profiles = profiles(gpu);
        let totals = Totals::of(profiles);
        Self {
            profiles,
            shares: several && has_shares(gpu),
            slices: (0..totals.grid).map(|n| format!("memory-slice-{n}")).collect(),
            limits: needed(profiles, totals.limits(profiles)),
            one: Quantity::count(1).into(),
            totals,
        }
    }

    /// Whether this is also the model of another GPU.
    pub(crate) fn matches(&self, gpu: &Gpu, several: bool) -> bool {
        self.shares == (several && has_shares(gpu)) && self.profiles == profiles(gpu)
    }

    /// All possible instances by profile, in allocation order.
    pub(crate) fn instances(&self) -> Vec<Siblings<'a>> {
        let placed = |profile| self.siblings(profile, order::placements(profile, self.profiles));
        order::profiles(self.profiles).into_iter().map(placed).collect()
    }

    /// The instances of a profile at these placements.
    pub(crate) fn siblings(&self, profile: &'a MigProfile, places: Vec<Placement>) -> Siblings<'a> {
        let mut first = self.unplaced(profile);
        let attributes = first.attributes.take().unwrap_or_default();
        let devices = places.into_iter().map(|at| (at, self.placed(first.clone(), at))).collect();
        Siblings { profile, attributes, devices }
    }

    /// An instance of a profile, without the parts that depend on its placement.
    fn unplaced(&self, profile: &MigProfile) -> Device {
        let attributes = [("type", "mig"), ("profile", &profile.name)];
        let index = self.profiles.iter().position(|one| one.id == profile.id);
        let amount = |limit: &Limit| index.and_then(|index| limit.takes.get(index)).copied().unwrap_or(0);
        // Counters of which it takes nothing are left out.
        let taken = self.limits.iter().filter(|limit| amount(limit) > 0);
        let counters = taken.map(|limit| limit.counter(amount(limit))).collect();
        let device = Device {
            attributes: Some(Arc::new(
                attributes.map(|(name, value)| (name.to_owned(), string(value))).into(),
            )),
            capacity: Some(Arc::new(capacities(&quantities(&amounts::of(profile))))),
            consumes_counters: Some(vec![Consumption { counters: Arc::new(counters), ..Default::default() }]),
            ..Device::default()
        };
        modes::instance(device, self.shares)
    }

    /// Adds the memory slices of a placement.
    fn placed(&self, mut device: Device, at: Placement) -> Device {
        for counter in &self.slices[at.start as usize..at.slices().end as usize] {
            for consumption in device.consumes_counters.iter_mut().flatten() {
                let one = Counter { value: self.one.clone() };
                Arc::make_mut(&mut consumption.counters).insert(counter.clone(), one);
            }
        }
        device
    }

    /// The counter set of a GPU of this model.
    pub(crate) fn counters(&self, gpu: &Gpu) -> BTreeMap<String, Counter> {
        if self.totals.grid == 0 {
            return counter_of_whole(gpu);
        }
        let slices = self.slices.iter().map(|name| (name.clone(), Counter { value: self.one.clone() }));
        self.limits.iter().map(|limit| limit.counter(limit.total)).chain(slices).collect()
    }
}
