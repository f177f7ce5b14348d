//! Memory and utilisation of the device, as the share sees them.

use super::call::{Handle, MISSING, NvmlReturn, SUCCESS, hook, visible_share};
use super::processes::{Sample, share_utilisation};
use crate::real_symbols;
use crate::share::Device;
use crate::symbol_table::index;
use crate::sys;
use core::ffi::{c_uint, c_ulonglong};
use divvy_interposer_core::nvml::MemoryInfo;

/// `nvmlMemory_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Memory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlMemory_v2_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemoryV2 {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// `nvmlUtilization_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

/// NVML_ERROR_NOT_FOUND, returned if there are no samples.
const NOT_FOUND: NvmlReturn = 6;
const NO_MEMORY: NvmlReturn = 20;

/// NVML_STRUCT_VERSION: the size, and the version in the highest byte.
const fn version(size: usize, number: c_uint) -> c_uint {
    size as c_uint | number << 24
}

hook! {
    /// First version, without the driver's reserved memory.
    nvmlDeviceGetMemoryInfo(device: Handle, memory: *mut Memory) |real| {
        let answer = real(device, memory);
        if let Some(share) = visible_share(answer, device).filter(|_| !memory.is_null()) {
            // SAFETY: written by the library.
            unsafe {
                let Memory { total, free, used } = *memory;
                let shown = share.memory_usage().memory(MemoryInfo { total, free, used, reserved: 0 });
                *memory = Memory { total: shown.total, free: shown.free, used: shown.used };
            }
        }
        answer
    }
}

hook! {
    /// With the driver's reserved memory.
    nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: *mut MemoryV2) |real| {
        let answer = real(device, memory);
        if let Some(share) = visible_share(answer, device).filter(|_| !memory.is_null()) {
            // SAFETY: written by the library.
            unsafe {
                if (*memory).version == version(size_of::<MemoryV2>(), 2) {
                    let MemoryV2 { total, free, used, reserved, .. } = *memory;
                    let shown = share.memory_usage().memory(MemoryInfo { total, free, used, reserved });
                    (*memory).total = shown.total;
                    (*memory).free = shown.free;
                    (*memory).used = shown.used;
                    (*memory).reserved = shown.reserved;
                }
            }
        }
        answer
    }
}

/// Maximum number of samples that are read.
const SAMPLES_MAX: usize = 1024;
/// Age in microseconds above which samples are ignored: a process that has gone idle is not busy.
const SAMPLE_AGE_MAX_US: c_ulonglong = 1_000_000;

hook! {
    /// Utilisation by the share's own processes, if the library reports it per process. Otherwise
    /// the error is returned: the device's total would show the work of other shares.
    nvmlDeviceGetUtilizationRates(device: Handle, rates: *mut Utilization) |real| {
        let answer = real(device, rates);
        match visible_share(answer, device) {
            // SAFETY: written by the library.
            Some(share) if !rates.is_null() => unsafe { share_rates(&share, device, &mut *rates) },
            _ => answer,
        }
    }
}

#[cold]
fn share_rates(share: &Device, device: Handle, rates: &mut Utilization) -> NvmlReturn {
    type Ask = unsafe extern "C" fn(Handle, *mut Sample, *mut c_uint, c_ulonglong) -> NvmlReturn;
    *rates = Utilization { gpu: 0, memory: 0 };
    let Some(address) = real_symbols::function(index::nvmlDeviceGetProcessUtilization) else {
        return MISSING;
    };
    let bytes = SAMPLES_MAX * size_of::<Sample>();
    let buffer = sys::map_private(bytes, sys::InChild::Nothing);
    if buffer.is_null() {
        return NO_MEMORY;
    }
    let samples = buffer.cast::<Sample>();
    let mut count = SAMPLES_MAX as c_uint;
    let since = (sys::realtime() / 1000).saturating_sub(SAMPLE_AGE_MAX_US);
    // SAFETY: the library's own function of that name, with a buffer that only this call uses.
    unsafe {
        let answer = core::mem::transmute::<usize, Ask>(address)(device, samples, &raw mut count, since);
        if answer == SUCCESS {
            let read = core::slice::from_raw_parts(samples, SAMPLES_MAX.min(count as usize));
            let [gpu, memory] = share_utilisation(share, read);
            *rates = Utilization { gpu, memory };
        }
        sys::unmap(buffer, bytes);
        if answer == NOT_FOUND { SUCCESS } else { answer }
    }
}
