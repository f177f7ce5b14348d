//! Health of a GPU: recovery action, remapped rows, ECC errors, energy.

use super::{Answer, Device, Library, Plain, check};
use crate::code::Code;
use nvml_wrapper_sys::bindings as sys;

impl Library {
    /// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`. The id is 230 in every driver: drivers from 580.82 on
    /// renumbered only the fields 251 to 273.
    pub(crate) fn recovery_action(&self, device: Device) -> Answer<u32> {
        let mut field = sys::nvmlFieldValue_t::zeroed();
        field.fieldId = sys::field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION;
        nvml!(self, nvmlDeviceGetFieldValues(device.0, 1, &mut field))?;
        check(field.nvmlReturn)?;
        if field.valueType != sys::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT {
            return Err(Code::NotSupported);
        }
        // SAFETY: every member of the union is valid for any bytes, and NVML wrote this one.
        Ok(unsafe { field.value.uiVal })
    }

    /// Whether a remap of a memory row is pending, and whether one has failed.
    pub(crate) fn remapped_rows(&self, device: Device) -> Answer<(bool, bool)> {
        let (mut corrected, mut uncorrected, mut pending, mut failed) = (0, 0, 0, 0);
        nvml!(
            self,
            nvmlDeviceGetRemappedRows(device.0, &mut corrected, &mut uncorrected, &mut pending, &mut failed)
        )?;
        Ok((pending != 0, failed != 0))
    }

    /// Uncorrected ECC errors since the last reset.
    pub(crate) fn uncorrected_ecc(&self, device: Device) -> Answer<u64> {
        let mut count = 0;
        let kind = sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED;
        let counter = sys::nvmlEccCounterType_enum_NVML_VOLATILE_ECC;
        nvml!(self, nvmlDeviceGetTotalEccErrors(device.0, kind, counter, &mut count))?;
        Ok(count)
    }

    /// Energy since the last reset or load of the GPU driver, in mJ.
    pub(crate) fn energy_mj(&self, device: Device) -> Answer<u64> {
        let mut energy = 0;
        nvml!(self, nvmlDeviceGetTotalEnergyConsumption(device.0, &mut energy))?;
        Ok(energy)
    }
}
