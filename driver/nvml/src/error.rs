//! Errors. Each message names the GPU, the call, the cause and, where there is one, the remedy.

use crate::code::Code;
use divvy_api::GpuUuid;
use divvy_model::inventory::MigMode;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Why a call on a GPU has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvmlError {
    /// NVML returned an error. [`Code::is_refusal`] tells whether the call can have had an effect.
    #[error("{call} on {gpu}: {code}")]
    Call { call: &'static str, gpu: GpuUuid, code: Code },
    /// The call is still running and may take effect later.
    #[error(
        "{call} on {gpu} has not returned after {} s; no other call is made on the GPU until it returns",
        .after.as_secs_f32()
    )]
    Deadline { call: &'static str, gpu: GpuUuid, after: Duration },
    /// An earlier call is still running. This call was not made.
    #[error(
        "{gpu} is stuck: {call} has not returned for {} s; \
         check the kernel log, then reset the GPU or reboot the node",
        .since.elapsed().as_secs()
    )]
    Stuck { call: &'static str, gpu: GpuUuid, since: Instant },
    /// The call waited for earlier calls until its deadline. It was not made.
    #[error("{call} on {gpu} did not start within {} s because the GPU is busy; retry", .after.as_secs_f32())]
    Busy { call: &'static str, gpu: GpuUuid, after: Duration },
    #[error("{gpu} is lost ({call}); reset the GPU or reboot the node")]
    Lost { call: &'static str, gpu: GpuUuid },
    /// `pids` are the processes that NVML lists. It does not list other processes that have the
    /// device node open.
    #[error("{call} on {gpu}: in use by {}", holders(.pids))]
    InUse { call: &'static str, gpu: GpuUuid, pids: Vec<u32> },
    /// SetMigMode returned success, but its activation status is an error.
    #[error("MIG mode {mode:?} of {gpu} was not activated: {code}")]
    NotActivated { gpu: GpuUuid, mode: MigMode, code: Code },
    #[error(
        "{gpu} has no compute instance profile that fills GPU instance {gpu_instance} (profile {profile_id})"
    )]
    NoFullSize { gpu: GpuUuid, gpu_instance: u32, profile_id: u32 },
    #[error(
        "NVML is closed for {gpu}: the GPU driver is missing or being upgraded; retry when it is installed"
    )]
    Closed { gpu: GpuUuid },
    /// The code around the call panicked. The call may have been made.
    #[error("{call} on {gpu}: Divvy panicked in this call; report the log as a bug of Divvy, and retry")]
    Panicked { call: &'static str, gpu: GpuUuid },
    #[error("cannot start a thread for {gpu}: {cause}")]
    Thread { gpu: GpuUuid, cause: std::io::ErrorKind },
}

fn holders(pids: &[u32]) -> String {
    if pids.is_empty() {
        return "a client without GPU memory (a monitoring agent, nvidia-persistenced or Xorg); \
                stop it and retry"
            .to_owned();
    }
    let list: Vec<String> = pids.iter().map(u32::to_string).collect();
    format!("process {}; stop it and retry", list.join(", "))
}

impl NvmlError {
    /// NVML's return code, if NVML returned one.
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Call { code, .. } | Self::NotActivated { code, .. } => Some(*code),
            Self::Lost { .. } => Some(Code::GpuIsLost),
            Self::InUse { .. } => Some(Code::InUse),
            _ => None,
        }
    }

    /// Whether the failed call may have changed the hardware, or may still change it.
    pub fn may_take_effect(&self) -> bool {
        match self {
            Self::Deadline { .. } | Self::Lost { .. } | Self::Closed { .. } | Self::Panicked { .. } => true,
            Self::Call { code, .. } => !code.is_refusal(),
            _ => false,
        }
    }
}

/// Why NVML cannot be opened.
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
