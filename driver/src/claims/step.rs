//! Steps as data: the contents of a plan, and the undo of each step.
//!
//! Every undo is idempotent: state that is already gone counts as undone. A failed prepare,
//! unprepare and recovery all run the same undo list in reverse. Claims that share a GPU all have
//! the same undo, since any of them may be the last; `Holding::depends_on` tells whether another
//! claim still needs the state.

use crate::gpu::part::{InstanceKey, Part};
use crate::gpu::sharing::MpsLimits;
use divvy_api::GpuUuid;
use divvy_api::sharing::Interval;
use std::fmt;

/// One change, which only [`crate::claims::execute`] makes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Turns MIG mode on. It has no undo in the record, see `idle_mig`.
    EnableMig { gpu: GpuUuid },
    /// Turns MIG mode off, the normal mode of an idle GPU. It has no undo.
    DisableMig { gpu: GpuUuid },
    /// Creates a GPU instance of that profile at that start.
    CreateGpuInstance(InstanceKey),
    /// Creates a compute instance inside it.
    CreateComputeInstance(InstanceKey),
    /// Sets the time slice: how long a process runs before the next one. It cannot be read
    /// back. The default needs no step.
    SetInterval { gpu: GpuUuid, interval: Interval },
    /// Sets EXCLUSIVE_PROCESS: the MPS server becomes the GPU's only process, and processes that
    /// bypass it cannot use the GPU.
    SetComputeMode { gpu: GpuUuid },
    /// Starts the MPS control daemon of the part, with these default limits or larger ones.
    StartMps { part: Part, limits: MpsLimits },
    /// The step was done for another claim that is Prepared; this claim shares its undo.
    Join(Box<Step>),
    /// Writes the policy and account pages of the claim's shares.
    WritePages,
    /// Writes the claim's CDI file.
    WriteCdi,
}

/// The reverse of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Undo {
    /// Destroys the compute instances in it, then the instance.
    DestroyGpuInstance(InstanceKey),
    /// Destroys only the compute instances: the GPU instance has another owner.
    DestroyComputeInstances(InstanceKey),
    /// Back to the GPU driver's default.
    ResetInterval {
        gpu: GpuUuid,
    },
    /// Back to compute mode DEFAULT.
    ResetComputeMode {
        gpu: GpuUuid,
    },
    StopMps {
        part: Part,
    },
    RemovePages,
    RemoveCdi,
}

impl Step {
    /// The step's undo, if it needs one.
    pub fn undo(&self) -> Option<Undo> {
        match self {
            Self::EnableMig { .. } | Self::DisableMig { .. } => None,
            Self::CreateGpuInstance(key) => Some(Undo::DestroyGpuInstance(key.clone())),
            Self::CreateComputeInstance(key) => Some(Undo::DestroyComputeInstances(key.clone())),
            Self::SetInterval { gpu, .. } => Some(Undo::ResetInterval { gpu: gpu.clone() }),
            Self::SetComputeMode { gpu } => Some(Undo::ResetComputeMode { gpu: gpu.clone() }),
            Self::StartMps { part, .. } => Some(Undo::StopMps { part: part.clone() }),
            Self::Join(step) => step.undo(),
            Self::WritePages => Some(Undo::RemovePages),
            Self::WriteCdi => Some(Undo::RemoveCdi),
        }
    }

    /// Whether the inventory shows the change.
    pub fn changes_inventory(&self) -> bool {
        match self {
            Self::EnableMig { .. }
            | Self::DisableMig { .. }
            | Self::CreateGpuInstance(_)
            | Self::CreateComputeInstance(_) => true,
            Self::SetInterval { .. }
            | Self::SetComputeMode { .. }
            | Self::StartMps { .. }
            | Self::Join(_)
            | Self::WritePages
            | Self::WriteCdi => false,
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
            Self::SetInterval { gpu, interval } => write!(out, "set time slice {interval} on {gpu}"),
            Self::SetComputeMode { gpu } => write!(out, "set compute mode EXCLUSIVE_PROCESS on {gpu}"),
            Self::StartMps { part, .. } => write!(out, "start MPS control daemon for {part}"),
            Self::Join(step) => write!(out, "share: {step}"),
            Self::WritePages => out.write_str("write pages of shares"),
            Self::WriteCdi => out.write_str("write CDI file"),
        }
    }
}

impl Undo {
    /// The GPU that it concerns; `None` if it concerns only files.
    pub fn gpu(&self) -> Option<&GpuUuid> {
        match self {
            Self::DestroyGpuInstance(key) | Self::DestroyComputeInstances(key) => Some(&key.gpu),
            Self::ResetInterval { gpu } | Self::ResetComputeMode { gpu } => Some(gpu),
            Self::StopMps { part } => Some(part.gpu()),
            Self::RemovePages | Self::RemoveCdi => None,
        }
    }

    /// Whether a reset of the GPU certainly has the same effect. NVIDIA does not document that it resets
    /// interval and compute mode.
    pub fn is_done_by_reset(&self) -> bool {
        matches!(self, Self::DestroyGpuInstance(_) | Self::DestroyComputeInstances(_))
    }

    /// Whether a new epoch has the same effect. Files outlive it.
    pub fn is_done_by_epoch(&self) -> bool {
        self.is_done_by_reset() || matches!(self, Self::ResetInterval { .. } | Self::ResetComputeMode { .. })
    }

    /// Whether it destroys this part.
    pub fn destroys(&self, part: &Part) -> bool {
        match (self, part) {
            (Self::DestroyGpuInstance(key) | Self::DestroyComputeInstances(key), Part::Instance(own)) => {
                key == own
            }
            _ => false,
        }
    }

    /// Whether the inventory shows the change.
    pub fn changes_inventory(&self) -> bool {
        matches!(self, Self::DestroyGpuInstance(_) | Self::DestroyComputeInstances(_))
    }
}

impl fmt::Display for Undo {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DestroyGpuInstance(key) => write!(out, "destroy {key}"),
            Self::DestroyComputeInstances(key) => write!(out, "destroy compute instances in {key}"),
            Self::ResetInterval { gpu } => write!(out, "reset time slice on {gpu}"),
            Self::ResetComputeMode { gpu } => write!(out, "reset compute mode on {gpu}"),
            Self::StopMps { part } => write!(out, "stop MPS control daemon for {part}"),
            Self::RemovePages => out.write_str("remove pages of shares"),
            Self::RemoveCdi => out.write_str("remove CDI file"),
        }
    }
}
