//! What the claims are, as far as scheduler and kubelet can know.

use crate::operations::{MIG_OFF, MIG_ON};
use divvy_api::sharing::Mode;
use divvy_api::{DeviceName, Quantity};
use divvy_kubelet::dra::v1::{Claim, Device};
use divvy_model::DeviceId;
use divvy_sim::state::Gpu;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationConfiguration, DeviceRequestAllocationResult,
};
use std::ops::Range;

/// A claim that exists, or that the node still has.
#[derive(Clone, Debug)]
pub(crate) struct Modelled {
    pub(crate) claim: Claim,
    /// None for a device that is not on this node.
    pub(crate) parts: Vec<Option<Part>>,
    pub(crate) stage: Stage,
    /// Allocated by nobody's rules, so no scheduler knows of it.
    pub(crate) bogus: bool,
    /// Deleted: no scheduler knows of it any more.
    pub(crate) deleted: bool,
}

/// How far it is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Stage {
    /// The node has nothing of it.
    Allocated,
    /// Asked for, and something went wrong: the node may have something of it.
    Waiting,
    Prepared(Vec<Device>),
    /// To be released, not answered with success.
    Ending,
    /// Deleted, and the node may have found it out by itself.
    Forgotten,
}

/// What a device of a claim stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    pub(crate) name: String,
    /// Which share of the device, where it is shared.
    pub(crate) share: Option<String>,
    pub(crate) gpu: usize,
    /// Profile and memory slices; absent for the whole GPU.
    pub(crate) place: Option<(u32, Range<u32>)>,
    pub(crate) mode: Mode,
    /// How its processes share it, if they are told to.
    pub(crate) sharing: Option<Shared>,
    /// It looks on and holds nothing.
    pub(crate) admin: bool,
    /// MiB of a share, and of the whole device.
    pub(crate) memory: Option<(u64, u64)>,
}

/// How processes share a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shared {
    Turns,
    Mps,
}

impl Part {
    fn of(
        result: &DeviceRequestAllocationResult,
        configs: &[DeviceAllocationConfiguration],
        gpus: &[Gpu],
    ) -> Option<Self> {
        let id = DeviceId::try_from(&DeviceName::from(result.device.as_str())).ok()?;
        // They are numbered as they were first seen, in their order.
        let at = usize::try_from(id.gpu().0).ok().filter(|at| *at < gpus.len())?;
        let mut all = gpus[at].model().memory_total_mib;
        let place = match &id {
            DeviceId::Mig { profile_id, start, .. } => {
                let mig = gpus[at].model().mig.as_ref()?;
                let profile = mig.profiles.iter().find(|profile| profile.id == *profile_id)?;
                profile.starts.contains(start).then_some(())?;
                all = profile.memory_mib;
                Some((*profile_id, *start..start + profile.size))
            }
            _ => None,
        };
        let consumed = result.consumed_capacity.iter().flatten().find(|(name, _)| name.ends_with("memory"));
        let taken = consumed.and_then(|(_, amount)| amount.0.parse::<Quantity>().ok()?.as_bytes());
        let taken = taken.filter(|_| id.mode().has_shares()).map(|bytes| bytes >> 20);
        let memory = taken.filter(|taken| *taken < all).map(|taken| (taken, all));
        let admin = result.admin_access == Some(true);
        let mode = id.mode();
        let sharing = match mode {
            _ if admin => None,
            Mode::Timeslice => Some(Shared::Turns),
            Mode::Mps => Some(Shared::Mps),
            Mode::Whole | Mode::Mig => configs.iter().find_map(|config| configured(config, &result.request)),
        };
        let (name, share) = (result.device.clone(), result.share_id.clone());
        Some(Self { name, share, gpu: at, place, mode, sharing, admin, memory })
    }

    /// Whether nobody can have both: two modes, or one slice twice.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        let overlap = match (&self.place, &other.place) {
            _ if self.is_beside(other) => false,
            (Some((_, one)), Some((_, two))) => one.start < two.end && two.start < one.end,
            (None, None) => self.mode != other.mode || self.mode == Mode::Whole,
            _ => true,
        };
        !self.admin && !other.admin && self.gpu == other.gpu && overlap
    }

    /// Whether both are shares of one device.
    fn is_beside(&self, other: &Self) -> bool {
        self.name == other.name && self.memory.is_some() && other.memory.is_some()
    }

    /// Whether the GPU's MIG mode stands against it, which takes a reset.
    fn is_impossible(&self) -> bool {
        let cut = self.place.is_some();
        !self.admin && ((self.gpu == MIG_ON && !cut) || (MIG_OFF.contains(&self.gpu) && cut))
    }
}

fn configured(config: &DeviceAllocationConfiguration, request: &str) -> Option<Shared> {
    let named = |name: &String| name == request || request.split('/').next() == Some(name);
    if !config.requests.as_ref().is_none_or(|requests| requests.iter().any(named)) {
        return None;
    }
    match config.opaque.as_ref()?.parameters.0["sharing"]["strategy"].as_str()? {
        "MPS" => Some(Shared::Mps),
        _ => Some(Shared::Turns),
    }
}

impl Modelled {
    pub(crate) fn new(claim: Claim, allocation: &AllocationResult, gpus: &[Gpu], bogus: bool) -> Self {
        let devices = allocation.devices.clone().unwrap_or_default();
        let (results, configs) = (devices.results.unwrap_or_default(), devices.config.unwrap_or_default());
        let parts = results.iter().map(|result| Part::of(result, &configs, gpus)).collect();
        Self { claim, parts, stage: Stage::Allocated, bogus, deleted: false }
    }

    /// What it stands for on this node.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().flatten()
    }

    pub(crate) fn is_prepared(&self) -> bool {
        matches!(self.stage, Stage::Prepared(_))
    }

    /// Whether the node may have something of it.
    pub(crate) fn may_hold(&self) -> bool {
        self.stage != Stage::Allocated
    }

    /// Whether nobody could ever prepare it.
    pub(crate) fn is_absurd(&self) -> bool {
        let parts: Vec<&Part> = self.parts().collect();
        let later = |at: usize| &parts[at + 1..];
        self.parts.iter().any(Option::is_none)
            || self.has_no_room(&[])
            || parts.iter().any(|part| part.is_impossible())
            || parts.iter().enumerate().any(|(at, one)| later(at).iter().any(|two| one.excludes(two)))
    }

    /// Whether the two cannot be prepared at once.
    pub(crate) fn excludes(&self, other: &Self) -> bool {
        self.parts().any(|one| other.parts().any(|two| one.excludes(two)))
    }

    /// Whether what it and these take of a device is more than there is.
    pub(crate) fn has_no_room(&self, others: &[&Self]) -> bool {
        let shares = |part: &&Part| part.memory.is_some() && !part.admin;
        self.parts().filter(shares).any(|part| {
            let all = others.iter().copied().chain([self]).flat_map(Self::parts);
            let taken = all.filter(shares).filter(|other| part.is_beside(other));
            let taken: u64 = taken.filter_map(|other| other.memory).map(|(taken, _)| taken).sum();
            part.memory.is_some_and(|(_, all)| taken > all)
        })
    }

    /// Whether both have shares of one instance, which may be half made.
    pub(crate) fn is_beside_in_instance(&self, other: &Self) -> bool {
        let mut cut = self.parts().filter(|part| part.place.is_some());
        cut.any(|one| other.parts().any(|two| one.is_beside(two)))
    }

    pub(crate) fn is_on(&self, gpu: usize) -> bool {
        self.parts().any(|part| part.gpu == gpu)
    }
}
