//! What claims have of a GPU, how they have it, and what cannot be had at once.

use crate::sharing::{Setup, ShareLimits};
use crate::step::{InstanceKey, Step, Undo};
use divvy_api::sharing::Mode;
use divvy_api::{ClaimRef, GpuUuid};
use std::fmt;

/// A part of a GPU that a claim has, for itself or with others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    pub claim: ClaimRef,
    pub part: Part,
    pub access: Access,
    /// Whether the claim is Prepared: what it was set up with is in force.
    pub ready: bool,
    /// What gives its GPU instance back; empty where somebody else made it.
    pub made: Vec<Undo>,
}

/// What of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    Whole { gpu: GpuUuid },
    Instance(InstanceKey),
}

/// Whether the claim has it for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It has; its own pods may share it so.
    Exclusive(Option<Setup>),
    /// Together with other claims of the same mode.
    Shared(Setup),
    /// A part of its memory, beside other shares.
    Share(ShareLimits),
    /// It looks on.
    Admin,
}

impl Part {
    /// The GPU it lies on.
    pub fn gpu(&self) -> &GpuUuid {
        match self {
            Self::Whole { gpu } => gpu,
            Self::Instance(key) => &key.gpu,
        }
    }

    /// Whether nobody can have this and that at once.
    pub(super) fn excludes(&self, access: Access, (other, others): (&Self, Access)) -> bool {
        self.gpu() == other.gpu()
            && match (self, other) {
                (Self::Instance(one), Self::Instance(two)) if one == two => !access.joins(others),
                (Self::Instance(one), Self::Instance(two)) => one.placement.overlaps(two.placement),
                (Self::Whole { .. }, Self::Whole { .. }) => !access.joins(others),
                _ => true,
            }
    }

    /// The mode that it gives the GPU.
    pub(super) fn mode(&self, access: Access) -> Mode {
        match (self, access) {
            (Self::Whole { .. }, Access::Shared(setup)) => setup.mode(),
            (Self::Whole { .. }, _) => Mode::Whole,
            (Self::Instance(_), _) => Mode::Mig,
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole { gpu } => gpu.fmt(out),
            Self::Instance(key) => key.fmt(out),
        }
    }
}

impl Holding {
    /// The steps by which its instance was made, for a claim that shares it.
    pub(super) fn made_by_first(&self) -> Vec<Step> {
        let made = |undo: &Undo| match undo {
            Undo::DestroyGpuInstance(key) => Some(Step::CreateGpuInstance(key.clone())),
            Undo::DestroyComputeInstances(key) => Some(Step::CreateComputeInstance(key.clone())),
            _ => None,
        };
        self.made.iter().filter_map(made).map(|step| Step::Join(Box::new(step))).collect()
    }
}

impl Access {
    /// Whether it keeps anything from others.
    pub fn holds(self) -> bool {
        self != Self::Admin
    }

    /// What the device is set up with.
    pub fn setup(self) -> Option<Setup> {
        match self {
            Self::Exclusive(setup) => setup,
            Self::Shared(setup) => Some(setup),
            Self::Share(_) | Self::Admin => None,
        }
    }

    /// What it may have of the device, if that is not all.
    pub fn limits(self) -> Option<ShareLimits> {
        match self {
            Self::Share(limits) => Some(limits),
            Self::Exclusive(_) | Self::Shared(_) | Self::Admin => None,
        }
    }

    /// Whether the two can have one part together.
    pub(super) fn joins(self, other: Self) -> bool {
        match (self, other) {
            (Self::Shared(one), Self::Shared(two)) => one.mode() == two.mode(),
            (Self::Share(_), Self::Share(_)) => true,
            _ => false,
        }
    }
}
