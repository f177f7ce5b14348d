//! Numeric resources of devices and GPUs: engines, multiprocessors and memory.
//!
//! The totals of a GPU are, per dimension, the largest amount of any MIG profile. Figures of the
//! bare GPU (132 multiprocessors, 81559 MiB) would include the part that MIG reserves. Memory
//! slices are counted one by one, so placements exclude each other as on the hardware.

use crate::needed::{Limit, Unit};
use divvy_model::inventory::{Gpu, GpuInstance, MigProfile};
use divvy_model::placement::{self, Placement};
use divvy_model::share;

/// Amounts in the order of [`DIMENSIONS`]: counts, and the memory in bytes.
pub(crate) type Amounts = [u64; DIMENSIONS.len()];

/// Name as a capacity and name as a counter.
pub(crate) const DIMENSIONS: [(&str, &str); 7] = [
    ("multiprocessors", "multiprocessors"),
    ("copyEngines", "copy-engines"),
    ("decoders", "decoders"),
    ("encoders", "encoders"),
    ("jpegEngines", "jpeg-engines"),
    ("ofaEngines", "ofa-engines"),
    ("memory", "memory"),
];

/// Index of `memory`, in bytes. All other dimensions are counts.
pub(crate) const MEMORY: usize = DIMENSIONS.len() - 1;

/// The total resources of one GPU.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) amounts: Amounts,
    /// Number of memory slices: the end of the last placement.
    pub(crate) grid: u32,
    /// Profiles with a counter of their own: ID and maximum number of instances. A profile is
    /// listed if `max_instances` is below the number that placements and engines permit. Without
    /// the counter, the hardware would refuse an instance that the scheduler has allocated.
    pub(crate) counted: Vec<(u32, u64)>,
}

pub(crate) fn of(profile: &MigProfile) -> Amounts {
    [
        profile.multiprocessors.into(),
        profile.copy_engines.into(),
        profile.decoders.into(),
        profile.encoders.into(),
        profile.jpeg_engines.into(),
        profile.ofa_engines.into(),
        share::memory_of_profile(profile),
    ]
}

impl Totals {
    pub(crate) fn of(profiles: &[MigProfile]) -> Self {
        let mut totals = Self::default();
        for profile in profiles {
            for (total, amount) in totals.amounts.iter_mut().zip(of(profile)) {
                *total = amount.max(*total);
            }
            let end = profile.placements.iter().map(|at| at.slices().end).max().unwrap_or(0);
            totals.grid = totals.grid.max(end);
        }
        totals.counted = profiles
            .iter()
            .filter(|profile| totals.admit(profile) > u64::from(profile.max_instances))
            .map(|profile| (profile.id, u64::from(profile.max_instances)))
            .collect();
        totals
    }

    /// The counters that a GPU could publish beside those of its memory slices. The first ones are those
    /// of which few profiles take any.
    pub(crate) fn limits(&self, profiles: &[MigProfile]) -> Vec<Limit> {
        let amounts = (0..DIMENSIONS.len()).rev().map(|dimension| {
            let takes = profiles.iter().map(|profile| of(profile)[dimension]);
            let takes: Vec<u64> = takes.collect();
            let unit = if dimension == MEMORY { Unit::Bytes } else { Unit::Count };
            Limit { name: DIMENSIONS[dimension].1.to_owned(), total: self.amounts[dimension], takes, unit }
        });
        let mut limits: Vec<Limit> = amounts.collect();
        // All profiles take memory.
        limits.rotate_left(1);
        limits.extend(self.counted.iter().map(|(id, most)| Limit {
            name: format!("instances-of-profile-{id}"),
            total: *most,
            takes: profiles.iter().map(|profile| u64::from(profile.id == *id)).collect(),
            unit: Unit::Count,
        }));
        limits
    }

    /// Number of instances of a profile that engines, memory and placements permit.
    fn admit(&self, profile: &MigProfile) -> u64 {
        let by_engines =
            self.amounts.iter().zip(of(profile)).filter_map(|(total, amount)| total.checked_div(amount));
        let by_placement = disjoint(&profile.placements);
        by_engines.fold(by_placement, u64::min)
    }

    /// Whether an instance of `profile` at `at` can coexist with the existing instance `other`.
    pub(crate) fn fit(&self, profile: &MigProfile, at: Placement, gpu: &Gpu, other: &GpuInstance) -> bool {
        if at.overlaps(other.placement) {
            return false;
        }
        let Some(theirs) = gpu.profile(other.profile_id) else { return true };
        let engines =
            self.amounts.iter().zip(of(profile)).zip(of(theirs)).all(|((total, a), b)| a + b <= *total);
        let counted = |(id, most): &(u32, u64)| *id == profile.id && *id == theirs.id && *most < 2;
        engines && !self.counted.iter().any(counted)
    }
}

/// The maximum number of disjoint placements. The greedy choice by earliest end is optimal.
fn disjoint(placements: &[Placement]) -> u64 {
    let mut sorted = placements.to_vec();
    sorted.sort_by_key(|at| at.slices().end);
    let mut taken: Vec<Placement> = Vec::new();
    for at in sorted {
        if placement::free(&[at], &taken).next().is_some() {
            taken.push(at);
        }
    }
    taken.len() as u64
}
