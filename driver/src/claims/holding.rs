//! Parts of GPUs that claims hold, how they hold them, and which combinations are possible.

use crate::claims::step::{Step, Undo};
use crate::gpu::part::Part;
use crate::gpu::sharing::{Setup, ShareLimits};
use divvy_api::ClaimRef;
use divvy_api::sharing::Mode;

/// A part of a GPU that a claim holds, alone or with other claims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    pub claim: ClaimRef,
    pub part: Part,
    pub access: Access,
    /// Whether the claim is Prepared, so that the setup of the part is in force.
    pub ready: bool,
    /// The undo steps for its GPU instance; empty if Divvy did not create the instance.
    pub made: Vec<Undo>,
}

/// How a claim holds a part of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Alone; the claim's own pods may share it in this way.
    Exclusive(Option<Setup>),
    /// Together with other claims in the same mode.
    Shared(Setup),
    /// A part of its memory, beside other shares.
    Share(ShareLimits),
    /// For observation only; nothing is reserved.
    Admin,
}

impl Part {
    /// Whether the two parts cannot be held at the same time with these kinds of access.
    pub(crate) fn excludes(&self, access: Access, (other, others): (&Self, Access)) -> bool {
        self.gpu() == other.gpu()
            && match (self, other) {
                (Self::Instance(one), Self::Instance(two)) if one == two => !access.can_share_with(others),
                (Self::Instance(one), Self::Instance(two)) => one.placement.overlaps(two.placement),
                (Self::Whole { .. }, Self::Whole { .. }) => !access.can_share_with(others),
                _ => true,
            }
    }

    /// The mode in which the GPU is when this part is held.
    pub(crate) fn mode(&self, access: Access) -> Mode {
        match (self, access) {
            (Self::Whole { .. }, Access::Shared(setup)) => setup.mode(),
            (Self::Whole { .. }, Access::Share(_)) => Mode::Share,
            (Self::Whole { .. }, _) => Mode::Whole,
            (Self::Instance(_), _) => Mode::Mig,
        }
    }
}

impl Holding {
    /// The steps that created its instance, for another claim that joins.
    pub(crate) fn creation_steps(&self) -> Vec<Step> {
        let made = |undo: &Undo| match undo {
            Undo::DestroyGpuInstance(key) => Some(Step::CreateGpuInstance(key.clone())),
            Undo::DestroyComputeInstances(key) => Some(Step::CreateComputeInstance(key.clone())),
            _ => None,
        };
        self.made.iter().filter_map(made).map(|step| Step::Join(Box::new(step))).collect()
    }

    /// Whether the claim still needs state that `undo` would remove. Then the undo of that claim is
    /// responsible for it.
    pub fn depends_on(&self, undo: &Undo) -> bool {
        match (undo, self.access.setup()) {
            (Undo::RemovePages | Undo::RemoveCdi, _) => false,
            (Undo::DestroyGpuInstance(key) | Undo::DestroyComputeInstances(key), _) => {
                matches!(&self.part, Part::Instance(own) if own == key)
            }
            (Undo::ResetInterval { gpu }, Some(Setup::Timeslice(_))) => self.part.gpu() == gpu,
            (Undo::ResetComputeMode { gpu }, Some(Setup::Mps(_))) => {
                matches!(&self.part, Part::Whole { gpu: own } if own == gpu)
            }
            (Undo::StopMps { part }, Some(Setup::Mps(_))) => self.part == *part,
            (Undo::ResetInterval { .. } | Undo::ResetComputeMode { .. } | Undo::StopMps { .. }, _) => false,
        }
    }
}

impl Access {
    /// Whether the part is reserved for the claim. Admin access reserves nothing.
    pub fn holds(self) -> bool {
        self != Self::Admin
    }

    /// The sharing setup of the device, if it has one.
    pub fn setup(self) -> Option<Setup> {
        match self {
            Self::Exclusive(setup) => setup,
            Self::Shared(setup) => Some(setup),
            Self::Share(_) | Self::Admin => None,
        }
    }

    /// The limits of a share; `None` for a claim that has the whole device.
    pub fn limits(self) -> Option<ShareLimits> {
        match self {
            Self::Share(limits) => Some(limits),
            Self::Exclusive(_) | Self::Shared(_) | Self::Admin => None,
        }
    }

    /// Whether two claims with these kinds of access can hold the same part.
    pub(crate) fn can_share_with(self, other: Self) -> bool {
        match (self, other) {
            (Self::Shared(one), Self::Shared(two)) => one.mode() == two.mode(),
            (Self::Share(_), Self::Share(_)) => true,
            _ => false,
        }
    }
}
