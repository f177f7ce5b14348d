//! Steps as data: what a plan is made of, and what takes each step back.
//!
//! | step | recognised on the hardware by | undo |
//! |---|---|---|
//! | `EnableMig` | MIG mode is on | none in the record: the mode serves every claim on the GPU, so the GPU's file says that it is ours, and it is turned off with the last instance |
//! | `DisableMig` | MIG mode is off | none: off is where a GPU without instances rests |
//! | `CreateGpuInstance` | a GPU instance of that profile at that start | `DestroyGpuInstance` |
//! | `CreateComputeInstance` | a compute instance inside it | `DestroyComputeInstances` |
//! | `WriteCdi` | the claim's CDI file | `RemoveCdi` |
//!
//! Every undo is idempotent: what is gone already counts as undone. Failed
//! prepare, unprepare and recovery all run the same list in reverse, so a new
//! way to share a GPU is one more variant of each enum and one more row here.

use divvy_api::GpuUuid;
use divvy_model::Placement;
use std::fmt;

/// A GPU instance by what never changes: not by GPU minor, instance id or MIG
/// UUID, which a reboot or another order of creation may give to somebody else.
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

/// One change, done by [`crate::execute`] alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    EnableMig { gpu: GpuUuid },
    DisableMig { gpu: GpuUuid },
    CreateGpuInstance(InstanceKey),
    CreateComputeInstance(InstanceKey),
    WriteCdi,
}

/// What takes a step back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Undo {
    /// The compute instances in it, then the instance.
    DestroyGpuInstance(InstanceKey),
    /// The compute instances only: the GPU instance is somebody else's.
    DestroyComputeInstances(InstanceKey),
    RemoveCdi,
}

impl Step {
    /// What takes it back, if anything has to.
    pub fn undo(&self) -> Option<Undo> {
        match self {
            Self::EnableMig { .. } | Self::DisableMig { .. } => None,
            Self::CreateGpuInstance(key) => Some(Undo::DestroyGpuInstance(key.clone())),
            Self::CreateComputeInstance(key) => Some(Undo::DestroyComputeInstances(key.clone())),
            Self::WriteCdi => Some(Undo::RemoveCdi),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::EnableMig { gpu } => write!(out, "enable MIG on {gpu}"),
            Self::DisableMig { gpu } => write!(out, "disable MIG on {gpu}"),
            Self::CreateGpuInstance(key) => write!(out, "create {key}"),
            Self::CreateComputeInstance(key) => write!(out, "create compute instance in {key}"),
            Self::WriteCdi => out.write_str("write CDI file"),
        }
    }
}

impl Undo {
    /// The GPU it touches; none for what concerns files only.
    pub fn gpu(&self) -> Option<&GpuUuid> {
        match self {
            Self::DestroyGpuInstance(key) | Self::DestroyComputeInstances(key) => Some(&key.gpu),
            Self::RemoveCdi => None,
        }
    }
}

impl fmt::Display for Undo {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DestroyGpuInstance(key) => write!(out, "destroy {key}"),
            Self::DestroyComputeInstances(key) => write!(out, "destroy compute instances in {key}"),
            Self::RemoveCdi => out.write_str("remove CDI file"),
        }
    }
}
