//! Compute mode: whether several processes may use a GPU. It belongs to the whole GPU; MIG
//! instances have none.

use crate::error::NvmlError;
use crate::job::Worker;
use nvml_wrapper_sys::bindings as sys;

/// Which processes may use a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// One process at a time. With MPS, this is the MPS server.
    ExclusiveProcess,
}

impl ComputeMode {
    fn number(self) -> u32 {
        match self {
            Self::Default => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_DEFAULT,
            Self::ExclusiveProcess => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
        }
    }
}

impl Worker {
    /// Switches between the two modes. The third mode, PROHIBITED, can only be set by an
    /// administrator, so a switch to the default keeps it.
    pub(crate) fn set_compute_mode(&mut self, mode: ComputeMode) -> Result<(), NvmlError> {
        let device = self.device()?;
        let now = self.call("nvmlDeviceGetComputeMode", |nvml| nvml.compute_mode(device))?;
        let is_ours = now == ComputeMode::ExclusiveProcess.number();
        if now == mode.number() || (mode == ComputeMode::Default && !is_ours) {
            return Ok(());
        }
        self.call("nvmlDeviceSetComputeMode", |nvml| nvml.set_compute_mode(device, mode.number()))
    }
}
