//! What can go wrong, with the GPU, the call, the cause and the remedy.

use crate::code::Code;
use divvy_api::GpuUuid;
use divvy_model::inventory::MigMode;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Why a call on a GPU has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvmlError {
    /// NVML answered with an error: a refusal, or one after which nobody knows.
    #[error("{call} on {gpu}: {code}")]
    Call { call: &'static str, gpu: GpuUuid, code: Code },
    /// The call is still running and may yet take effect.
    #[error("{call} on {gpu} has not returned after {} s; the GPU is left alone until it does", .after.as_secs_f32())]
    Deadline { call: &'static str, gpu: GpuUuid, after: Duration },
    /// An earlier call is still running; nothing was tried.
    #[error("{gpu} is stuck: {call} has not returned for {} s; see the kernel log, a GPU reset or a reboot frees it", .since.elapsed().as_secs())]
    Stuck { call: &'static str, gpu: GpuUuid, since: Instant },
    /// The call waited behind others until its deadline; nothing was tried.
    #[error("{call} on {gpu} was not begun within {} s because {gpu} is busy; try again", .after.as_secs_f32())]
    Busy { call: &'static str, gpu: GpuUuid, after: Duration },
    #[error("{gpu} is lost ({call}); reset the GPU or reboot the node")]
    Lost { call: &'static str, gpu: GpuUuid },
    /// `pids` are the processes that NVML shows; other holders of the device node are not among them.
    #[error("{call} on {gpu}: in use by {}", holders(.pids))]
    InUse { call: &'static str, gpu: GpuUuid, pids: Vec<u32> },
    /// SetMigMode answered success with an activation status that is none.
    #[error("MIG mode {mode:?} of {gpu} was not activated: {code}")]
    NotActivated { gpu: GpuUuid, mode: MigMode, code: Code },
    #[error(
        "{gpu} offers no compute instance as large as GPU instance {gpu_instance} of profile {profile_id}"
    )]
    NoFullSize { gpu: GpuUuid, gpu_instance: u32, profile_id: u32 },
    #[error(
        "NVML is closed for {gpu}: the GPU driver is missing or being replaced; try again when it is back"
    )]
    Closed { gpu: GpuUuid },
    #[error("no thread for {gpu}: {cause}")]
    Thread { gpu: GpuUuid, cause: std::io::ErrorKind },
}

fn holders(pids: &[u32]) -> String {
    if pids.is_empty() {
        return "another client that is no GPU process (a monitoring agent, nvidia-persistenced or Xorg); stop it and try again".to_owned();
    }
    let list: Vec<String> = pids.iter().map(u32::to_string).collect();
    format!("process {}; stop it and try again", list.join(", "))
}

impl NvmlError {
    /// NVML's code, where NVML answered at all.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Call { code, .. } | Self::NotActivated { code, .. } => Some(*code),
            Self::Lost { .. } => Some(Code::GpuIsLost),
            Self::InUse { .. } => Some(Code::InUse),
            _ => None,
        }
    }

    /// Whether the hardware may have changed by the call that failed, or may yet.
    pub fn may_take_effect(&self) -> bool {
        match self {
            Self::Deadline { .. } | Self::Lost { .. } | Self::Closed { .. } => true,
            Self::Call { code, .. } => !code.is_refusal(),
            _ => false,
        }
    }
}

/// Why NVML could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("cannot read NVML library {path}")]
    Library {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
    #[error("cannot load and initialise NVML library {path}")]
    Initialise {
        path: PathBuf,
        #[source]
        cause: nvml_wrapper::error::NvmlError,
    },
    #[error("{call} after loading {path}: {code}")]
    Call { path: PathBuf, call: &'static str, code: Code },
}
