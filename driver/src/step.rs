//! Steps as data: what a plan is made of, and what takes each step back.
//!
//! | step | recognised on the hardware by | undo |
//! |---|---|---|
//! | `EnableMig` | MIG mode is on | none in the record: the mode serves every claim on the GPU, so the GPU's file says that it is ours, and it is turned off with the last instance |
//! | `DisableMig` | MIG mode is off | none: off is where a GPU without instances rests |
//! | `CreateGpuInstance` | a GPU instance of that profile at that start | `DestroyGpuInstance` |
//! | `CreateComputeInstance` | a compute instance inside it | `DestroyComputeInstances` |
//! | `SetInterval` | nothing: there is no call that reads it | `ResetInterval`, by the last claim; none for the default interval |
//! | `SetComputeMode` | compute mode EXCLUSIVE_PROCESS | `ResetComputeMode`, by the last claim |
//! | `StartMps` | the keeper's `actual.json` says Ready with these limits or larger | `StopMps`, by the last claim |
//! | `Join` | a Prepared record of another claim | that of the step it stands for |
//! | `WritePages` | the policy and account page of each share of the claim | `RemovePages` |
//! | `WriteCdi` | the claim's CDI file | `RemoveCdi` |
//!
//! Every undo is idempotent: what is gone already counts as undone. Failed
//! prepare, unprepare and recovery all run the same list in reverse, so a new
//! way to share a GPU is one more variant of each enum and one more row here.
//!
//! Claims that share a GPU all announce the same undo, since nobody knows which
//! will be the last; [`Undo::is_others_too`] says whether it is another's still.

use crate::plan::{Holding, Part};
use crate::sharing::{MpsLimits, Setup};
use divvy_api::GpuUuid;
use divvy_api::sharing::Interval;
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
    EnableMig {
        gpu: GpuUuid,
    },
    DisableMig {
        gpu: GpuUuid,
    },
    CreateGpuInstance(InstanceKey),
    CreateComputeInstance(InstanceKey),
    /// How long a process runs before the next has its turn.
    SetInterval {
        gpu: GpuUuid,
        interval: Interval,
    },
    /// EXCLUSIVE_PROCESS: the GPU's one process is the MPS server, and none that
    /// does not know of it comes beside it.
    SetComputeMode {
        gpu: GpuUuid,
    },
    /// The MPS control daemon of the part, with these defaults or larger ones.
    StartMps {
        part: Part,
        limits: MpsLimits,
    },
    /// Done by another claim that is Prepared; this one shares taking it back.
    Join(Box<Step>),
    /// The limits of the claim's shares and the accounts that are kept of them.
    WritePages,
    WriteCdi,
}

/// What takes a step back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Undo {
    /// The compute instances in it, then the instance.
    DestroyGpuInstance(InstanceKey),
    /// The compute instances only: the GPU instance is somebody else's.
    DestroyComputeInstances(InstanceKey),
    /// Back to the GPU driver's default.
    ResetInterval {
        gpu: GpuUuid,
    },
    /// Back to DEFAULT.
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
    /// What takes it back, if anything has to.
    pub fn undo(&self) -> Option<Undo> {
        match self {
            Self::EnableMig { .. } | Self::DisableMig { .. } => None,
            Self::CreateGpuInstance(key) => Some(Undo::DestroyGpuInstance(key.clone())),
            Self::CreateComputeInstance(key) => Some(Undo::DestroyComputeInstances(key.clone())),
            Self::SetInterval { interval: Interval::Default, .. } => None,
            Self::SetInterval { gpu, .. } => Some(Undo::ResetInterval { gpu: gpu.clone() }),
            Self::SetComputeMode { gpu } => Some(Undo::ResetComputeMode { gpu: gpu.clone() }),
            Self::StartMps { part, .. } => Some(Undo::StopMps { part: part.clone() }),
            Self::Join(step) => step.undo(),
            Self::WritePages => Some(Undo::RemovePages),
            Self::WriteCdi => Some(Undo::RemoveCdi),
        }
    }

    /// Whether the inventory shows what it changes.
    pub fn shows(&self) -> bool {
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
    /// The GPU it touches; none for what concerns files only.
    pub fn gpu(&self) -> Option<&GpuUuid> {
        match self {
            Self::DestroyGpuInstance(key) | Self::DestroyComputeInstances(key) => Some(&key.gpu),
            Self::ResetInterval { gpu } | Self::ResetComputeMode { gpu } => Some(gpu),
            Self::StopMps { part } => Some(part.gpu()),
            Self::RemovePages | Self::RemoveCdi => None,
        }
    }

    /// Whether another claim still stands on what it would take back; that
    /// claim's own undo sees to it then.
    pub fn is_others_too(&self, others: &[Holding]) -> bool {
        let any = |wanted: &dyn Fn(&Part, Setup) -> bool| {
            others.iter().any(|held| held.access.setup().is_some_and(|setup| wanted(&held.part, setup)))
        };
        match self {
            Self::RemovePages | Self::RemoveCdi => false,
            Self::DestroyGpuInstance(key) | Self::DestroyComputeInstances(key) => {
                others.iter().any(|held| matches!(&held.part, Part::Instance(theirs) if theirs == key))
            }
            Self::ResetInterval { gpu } => {
                any(&|part, setup| part.gpu() == gpu && matches!(setup, Setup::Timeslice(_)))
            }
            Self::ResetComputeMode { gpu } => any(
                &|part, setup| matches!((part, setup), (Part::Whole { gpu: held }, Setup::Mps(_)) if held == gpu),
            ),
            Self::StopMps { part } => any(&|held, setup| held == part && matches!(setup, Setup::Mps(_))),
        }
    }

    /// Whether it takes back a part that was made.
    pub fn gives_back(&self, part: &Part) -> bool {
        match (self, part) {
            (Self::DestroyGpuInstance(key) | Self::DestroyComputeInstances(key), Part::Instance(own)) => {
                key == own
            }
            _ => false,
        }
    }

    /// Whether the inventory shows what it changes.
    pub fn shows(&self) -> bool {
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
