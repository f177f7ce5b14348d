//! Memory and utilisation of the device, as the share has them.

use super::processes::{Sample, busy};
use super::{Handle, SUCCESS, hook, shown};
use crate::genuine;
use crate::table::index;
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

/// NVML_STRUCT_VERSION: the size, and the version in the highest byte.
const fn version(size: usize, number: c_uint) -> c_uint {
    size as c_uint | number << 24
}

hook! {
    /// Of the first version, without what the driver reserves.
    nvmlDeviceGetMemoryInfo(device: Handle, memory: *mut Memory) |real| {
        let answer = real(device, memory);
        if let Some(share) = shown(answer, device).filter(|_| !memory.is_null()) {
            // SAFETY: written by the library.
            unsafe {
                let Memory { total, free, used } = *memory;
                let seen = share.figures().memory(MemoryInfo { total, free, used, reserved: 0 });
                *memory = Memory { total: seen.total, free: seen.free, used: seen.used };
            }
        }
        answer
    }
}

hook! {
    /// With what the driver reserves.
    nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: *mut MemoryV2) |real| {
        let answer = real(device, memory);
        if let Some(share) = shown(answer, device).filter(|_| !memory.is_null()) {
            // SAFETY: written by the library.
            unsafe {
                if (*memory).version == version(size_of::<MemoryV2>(), 2) {
                    let MemoryV2 { total, free, used, reserved, .. } = *memory;
                    let seen = share.figures().memory(MemoryInfo { total, free, used, reserved });
                    (*memory).total = seen.total;
                    (*memory).free = seen.free;
                    (*memory).used = seen.used;
                    (*memory).reserved = seen.reserved;
                }
            }
        }
        answer
    }
}

hook! {
    /// How busy the share's own processes had it, where the library tells that by process (not on MIG).
    nvmlDeviceGetUtilizationRates(device: Handle, rates: *mut Utilization) |real| {
        let answer = real(device, rates);
        if let Some(share) = shown(answer, device).filter(|_| !rates.is_null()) {
            let mut samples = [Sample::default(); 64];
            let mut count = samples.len() as c_uint;
            type Ask = unsafe extern "C" fn(Handle, *mut Sample, *mut c_uint, c_ulonglong) -> super::Answer;
            if let Some(address) = genuine::function(index::nvmlDeviceGetProcessUtilization) {
                // SAFETY: the library's own function of that name, with room of ours for its answers; `rates` was
                // written by the library.
                unsafe {
                    let ask = core::mem::transmute::<usize, Ask>(address);
                    if ask(device, samples.as_mut_ptr(), &raw mut count, 0) == SUCCESS {
                        let own = samples.get(..count as usize).unwrap_or_default();
                        (*rates).gpu = busy(&share, own);
                    }
                }
            }
        }
        answer
    }
}
