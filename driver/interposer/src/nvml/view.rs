//! Memory and utilisation of the device, as the share has them.

use super::processes::{Sample, busy};
use super::{Answer, Handle, MISSING, SUCCESS, hook, shown};
use crate::genuine;
use crate::share::Device;
use crate::sys;
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

/// NVML_ERROR_NOT_FOUND, by which the library says that nobody has done anything; NVML_ERROR_MEMORY.
const NOT_FOUND: Answer = 6;
const NO_MEMORY: Answer = 20;

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

/// Samples of so many processes are looked at, and of so many microseconds: one that has gone idle since is not busy.
const SAMPLES: usize = 1024;
const RECENT: c_ulonglong = 1_000_000;

hook! {
    /// How busy the share's own processes had it, where the library tells that by process. Where it does not, this does not tell
    /// either: what the device was is what others did.
    nvmlDeviceGetUtilizationRates(device: Handle, rates: *mut Utilization) |real| {
        let answer = real(device, rates);
        match shown(answer, device) {
            // SAFETY: written by the library.
            Some(share) if !rates.is_null() => unsafe { own_rates(&share, device, &mut *rates) },
            _ => answer,
        }
    }
}

#[cold]
fn own_rates(share: &Device, device: Handle, rates: &mut Utilization) -> Answer {
    type Ask = unsafe extern "C" fn(Handle, *mut Sample, *mut c_uint, c_ulonglong) -> Answer;
    *rates = Utilization { gpu: 0, memory: 0 };
    let Some(address) = genuine::function(index::nvmlDeviceGetProcessUtilization) else { return MISSING };
    let bytes = SAMPLES * size_of::<Sample>();
    let room = sys::memory(bytes, sys::InChild::Nothing);
    if room.is_null() {
        return NO_MEMORY;
    }
    let samples = room.cast::<Sample>();
    let mut count = SAMPLES as c_uint;
    let since = (sys::today() / 1000).saturating_sub(RECENT);
    // SAFETY: the library's own function of that name, with room of ours for its answers, which only this call knows.
    unsafe {
        let answer = core::mem::transmute::<usize, Ask>(address)(device, samples, &raw mut count, since);
        if answer == SUCCESS {
            let told = core::slice::from_raw_parts(samples, SAMPLES.min(count as usize));
            let [gpu, memory] = busy(share, told);
            *rates = Utilization { gpu, memory };
        }
        sys::forget(room, bytes);
        if answer == NOT_FOUND { SUCCESS } else { answer }
    }
}
