//! What a device takes of its GPU, as numbers.
//!
//! A GPU's counters are the largest amount that any of its profiles takes, per
//! dimension: the profile that spans the GPU takes all engines there are, and a
//! figure of the bare GPU (132 multiprocessors, 81559 MiB) would count what MIG
//! keeps for itself. Memory slices are counted one by one, so that placements
//! exclude each other exactly as on the hardware.
//!
//! Some profiles may exist fewer times than their placements and engines tell
//! (`max_instances`). A refusal that only the hardware knows would hold a pod
//! for ever, so such a profile gets a counter of its own.

use divvy_model::inventory::{Gpu, GpuInstance, MigProfile};
use divvy_model::placement::{self, Placement};
use divvy_model::share;

/// The engines of a GPU and its memory, in the order of [`DIMENSIONS`].
pub(crate) type Amounts = [u64; DIMENSIONS.len()];

/// Name as a capacity and as a counter.
pub(crate) const DIMENSIONS: [(&str, &str); 7] = [
    ("multiprocessors", "multiprocessors"),
    ("copyEngines", "copy-engines"),
    ("decoders", "decoders"),
    ("encoders", "encoders"),
    ("jpegEngines", "jpeg-engines"),
    ("ofaEngines", "ofa-engines"),
    ("memory", "memory"),
];

/// Index of `memory`, in bytes; everything else is a count.
pub(crate) const MEMORY: usize = DIMENSIONS.len() - 1;

/// What can be had of one GPU.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) amounts: Amounts,
    /// Memory slices; the end of the last placement.
    pub(crate) grid: u32,
    /// Profiles that are counted: id and how many there may be.
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

    /// How many instances of a profile fit by engines, memory and placement alone.
    fn admit(&self, profile: &MigProfile) -> u64 {
        let by_engines =
            self.amounts.iter().zip(of(profile)).filter_map(|(total, amount)| total.checked_div(amount));
        let by_placement = disjoint(&profile.placements);
        by_engines.fold(by_placement, u64::min)
    }

    /// Whether an instance of a profile at a place can exist beside another that exists.
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

/// The most placements that share no slice: by earliest end, which is optimal.
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
