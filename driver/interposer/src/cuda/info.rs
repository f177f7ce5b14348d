//! What a program is told of the device's memory, and `cuInit`, at which a process reads the pages.

use super::driver::{self, Ordinal};
use super::{Answer, SUCCESS, hook};
use crate::share::{self, Device, LEDGER, Standing};
use core::ffi::c_uint;

hook! {
    /// Reads the pages. A slot there is taken with the first context: many programs only ask what there is.
    #[cold]
    cuInit(flags: c_uint) |real| {
        let answer = real(flags);
        if answer == SUCCESS {
            LEDGER.idle();
        }
        answer
    }
}

/// The share of the calling thread's device, after a call that succeeded.
fn current(answer: Answer) -> Option<Device> {
    if answer != SUCCESS {
        return None;
    }
    match share::of_cuda(driver::only_device().or_else(driver::current_device)?) {
        Standing::Share(device) => Some(device),
        Standing::Free | Standing::Closed => None,
    }
}

fn short(bytes: u64) -> c_uint {
    c_uint::try_from(bytes).unwrap_or(c_uint::MAX)
}

hook! {
    /// Since CUDA 3.2.
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |real| {
        let answer = real(free, total);
        if let Some(device) = current(answer).filter(|_| !free.is_null() && !total.is_null()) {
            // SAFETY: the driver has written both.
            unsafe {
                let (left, all) = device.mem_info(*free as u64, *total as u64);
                (*free, *total) = (left as usize, all as usize);
            }
        }
        answer
    }
}

hook! {
    /// With 32 bits for a number.
    cuMemGetInfo(free: *mut c_uint, total: *mut c_uint) |real| {
        let answer = real(free, total);
        if let Some(device) = current(answer).filter(|_| !free.is_null() && !total.is_null()) {
            // SAFETY: the driver has written both.
            unsafe {
                let (left, all) = device.mem_info((*free).into(), (*total).into());
                (*free, *total) = (short(left), short(all));
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
            // SAFETY: the driver has written it.
            unsafe { *total = share::total_mem(device, *total as u64) as usize };
        }
        answer
    }
}

hook! {
    /// With 32 bits for a number.
    #[cold]
    cuDeviceTotalMem(total: *mut c_uint, device: Ordinal) |real| {
        let answer = real(total, device);
        if answer == SUCCESS && !total.is_null() {
            // SAFETY: the driver has written it.
            unsafe { *total = short(share::total_mem(device, (*total).into())) };
        }
        answer
    }
}
