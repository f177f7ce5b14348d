//! The part of a GPU that a claim holds: the whole GPU or one GPU instance.

use divvy_api::GpuUuid;
use divvy_model::Placement;
use std::fmt;

/// Identifies a GPU instance by what never changes. GPU minor, instance id and MIG UUID may denote
/// another instance after a reboot or another order of creation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InstanceKey {
    pub gpu: GpuUuid,
    pub profile_id: u32,
    pub placement: Placement,
}

impl fmt::Display for InstanceKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "GPU instance of profile {} at {} on {}", self.profile_id, self.placement, self.gpu)
    }
}

/// A whole GPU or one GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    Whole { gpu: GpuUuid },
    Instance(InstanceKey),
}

impl Part {
    /// Whether both use a common part of one GPU.
    pub fn overlaps(&self, other: &Self) -> bool {
        self.gpu() == other.gpu()
            && match (self, other) {
                (Self::Instance(one), Self::Instance(two)) => one.placement.overlaps(two.placement),
                _ => true,
            }
    }

    /// The placement of an instance; `None` for the whole GPU.
    pub fn placement(&self) -> Option<Placement> {
        match self {
            Self::Whole { .. } => None,
            Self::Instance(key) => Some(key.placement),
        }
    }

    /// The GPU that it is a part of.
    pub fn gpu(&self) -> &GpuUuid {
        match self {
            Self::Whole { gpu } => gpu,
            Self::Instance(key) => &key.gpu,
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
