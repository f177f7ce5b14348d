//! Compute mode: whether more than one process may use a GPU. It is a property
//! of the whole GPU; MIG instances have none.

use crate::error::NvmlError;
use crate::job::Worker;
use nvml_wrapper_sys::bindings as sys;

/// Which processes may use a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeMode {
    /// Any number.
    Default,
    /// One at a time; the mode in which an MPS server is that one.
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
    /// From one of the two modes to the other. A third, PROHIBITED, is an
    /// administrator's and stays when the default is asked for.
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
