//! The memory sizes that a program sees, and `cuInit`, which reads the pages.

use super::call::{CuResult, SUCCESS, hook};
use super::driver::{self, Ordinal};
use crate::share::{self, Device, DeviceAccess, PROCESS};
use core::ffi::c_uint;

hook! {
    /// Reads the policy pages. A slot is registered later, with the first context, because many
    /// programs only query devices.
    #[cold]
    cuInit(flags: c_uint) |real| {
        let answer = real(flags);
        if answer == SUCCESS {
            PROCESS.has_no_policies();
        }
        answer
    }
}

/// The share of the calling thread's device, after a successful call.
fn current_share(answer: CuResult) -> Option<Device> {
    if answer != SUCCESS {
        return None;
    }
    match share::for_ordinal(driver::only_device().or_else(driver::current_device)?) {
        DeviceAccess::Share(device) => Some(device),
        DeviceAccess::Unmanaged | DeviceAccess::Denied => None,
    }
}

fn saturate_u32(bytes: u64) -> c_uint {
    c_uint::try_from(bytes).unwrap_or(c_uint::MAX)
}

hook! {
    /// Since CUDA 3.2.
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |real| {
        let answer = real(free, total);
        if let Some(device) = current_share(answer).filter(|_| !free.is_null() && !total.is_null()) {
            // SAFETY: written by the driver.
            unsafe {
                let (left, all) = device.mem_info(*free as u64, *total as u64);
                (*free, *total) = (left as usize, all as usize);
            }
        }
        answer
    }
}

hook! {
    /// With 32-bit sizes.
    cuMemGetInfo(free: *mut c_uint, total: *mut c_uint) |real| {
        let answer = real(free, total);
        if let Some(device) = current_share(answer).filter(|_| !free.is_null() && !total.is_null()) {
            // SAFETY: written by the driver.
            unsafe {
                let (left, all) = device.mem_info((*free).into(), (*total).into());
                (*free, *total) = (saturate_u32(left), saturate_u32(all));
            }
        }
        answer
    }
}

hook! {
    /// Since CUDA 3.2.
    #[cold]
    cuDeviceTotalMem_v2(total: *mut usize, device: Ordinal) |real| {
        let answer = real(total, device);
        if answer == SUCCESS && !total.is_null() {
            // SAFETY: written by the driver.
            unsafe { *total = share::total_mem(device, *total as u64) as usize };
        }
        answer
    }
}

hook! {
    /// With 32-bit sizes.
    #[cold]
    cuDeviceTotalMem(total: *mut c_uint, device: Ordinal) |real| {
        let answer = real(total, device);
        if answer == SUCCESS && !total.is_null() {
            // SAFETY: written by the driver.
            unsafe { *total = saturate_u32(share::total_mem(device, (*total).into())) };
        }
        answer
    }
}
