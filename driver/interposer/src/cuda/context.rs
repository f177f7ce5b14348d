//! Contexts: each takes memory by itself, and its end is the end of all that was allocated in it.
//!
//! What one takes is the policy's figure, charged before it is made; the node measures the process and corrects that.

use super::driver::{self, Handle, Ordinal};
use super::{Answer, OUT_OF_MEMORY, SUCCESS, hook, pool, real};
use crate::share::{self, LEDGER, Standing};
use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicUsize, Ordering};

/// The primary context of each device, by its ordinal, as it was last retained: those who end it name the device only.
static PRIMARY: [AtomicUsize; 64] = [const { AtomicUsize::new(0) }; 64];

fn primary(device: Ordinal) -> Option<&'static AtomicUsize> {
    PRIMARY.get(usize::try_from(device).ok()?)
}

/// Makes a context by `call`, which writes to a place of ours; `destroy` takes it back.
///
/// # Safety
/// `out` is null, which the driver refuses, or can be written.
unsafe fn made(
    out: *mut Handle,
    device: Ordinal,
    call: &dyn Fn(*mut Handle) -> Answer,
    destroy: &dyn Fn(Handle),
) -> Answer {
    if out.is_null() {
        return call(out);
    }
    let share = match share::of_cuda(device) {
        Standing::Free => return call(out),
        Standing::Closed => return OUT_OF_MEMORY,
        Standing::Share(share) => share,
    };
    let reservation = share.reserve_context().or_else(|_| {
        pool::shrink(&share);
        share.reserve_context()
    });
    let Ok(reservation) = reservation else { return OUT_OF_MEMORY };
    let mut context = core::ptr::null_mut();
    let answer = call(&raw mut context);
    if answer != SUCCESS {
        return answer;
    }
    if reservation.keep_context(context as u64).is_err() {
        destroy(context);
        return OUT_OF_MEMORY;
    }
    // SAFETY: as the caller says.
    unsafe { *out = context };
    SUCCESS
}

fn destroy(context: Handle) {
    if let Some(destroy) = real!(cuCtxDestroy_v2(Handle)) {
        // SAFETY: what the driver has just made, and nobody else knows.
        unsafe { destroy(context) };
    }
}

hook! {
    /// Since CUDA 3.2.
    cuCtxCreate_v2(out: *mut Handle, flags: c_uint, device: Ordinal) |real| {
        // SAFETY: the program's place for the handle, or null.
        unsafe { made(out, device, &|out| real(out, flags, device), &destroy) }
    }
}

hook! {
    /// Of CUDA 2.0.
    cuCtxCreate(out: *mut Handle, flags: c_uint, device: Ordinal) |real| {
        // SAFETY: the program's place for the handle, or null.
        unsafe { made(out, device, &|out| real(out, flags, device), &destroy) }
    }
}

hook! {
    /// Since CUDA 11.4, with a part of the processors.
    cuCtxCreate_v3(out: *mut Handle, affinity: *mut c_void, count: c_int, flags: c_uint, device: Ordinal) |real| {
        // SAFETY: the program's place for the handle, or null.
        unsafe { made(out, device, &|out| real(out, affinity, count, flags, device), &destroy) }
    }
}

hook! {
    /// Since CUDA 12.5.
    cuCtxCreate_v4(out: *mut Handle, parameters: *mut c_void, flags: c_uint, device: Ordinal) |real| {
        // SAFETY: the program's place for the handle, or null.
        unsafe { made(out, device, &|out| real(out, parameters, flags, device), &destroy) }
    }
}

/// A call that ends `context`, if it succeeds and `is_gone` says so.
fn ending(context: Handle, call: impl FnOnce() -> Answer, is_gone: impl FnOnce() -> bool) -> Answer {
    let leaving = LEDGER.context_leaves(context as u64);
    let answer = call();
    if let Some(leaving) = leaving.filter(|_| answer == SUCCESS && is_gone()) {
        leaving.gone();
    }
    answer
}

hook! {
    /// Since CUDA 4.0.
    cuCtxDestroy_v2(context: Handle) |real| {
        ending(context, || real(context), || true)
    }
}

hook! {
    /// Of CUDA 2.0.
    cuCtxDestroy(context: Handle) |real| {
        ending(context, || real(context), || true)
    }
}

hook! {
    /// Drops one use, and the context with the last.
    cuCtxDetach(context: Handle) |real| {
        ending(context, || real(context), || !driver::is_context(context))
    }
}

hook! {
    /// Made by the first who retains it; the others get the same.
    cuDevicePrimaryCtxRetain(out: *mut Handle, device: Ordinal) |real| {
        if out.is_null() {
            return real(out, device);
        }
        let answer = if driver::has_primary(device) {
            real(out, device)
        } else {
            // SAFETY: the program's place for the handle.
            unsafe { made(out, device, &|out| real(out, device), &|_| release(device)) }
        };
        if answer == SUCCESS && let Some(primary) = primary(device) {
            // SAFETY: written by the driver, or by us.
            primary.store(unsafe { *out } as usize, Ordering::Relaxed);
        }
        answer
    }
}

fn release(device: Ordinal) {
    if let Some(release) = real!(cuDevicePrimaryCtxRelease_v2(Ordinal)) {
        // SAFETY: the use that was just retained.
        unsafe { release(device) };
    }
}

/// The device's primary context, as it was last retained.
fn primary_of(device: Ordinal) -> Handle {
    primary(device).map_or(0, |primary| primary.load(Ordering::Relaxed)) as Handle
}

hook! {
    /// Since CUDA 11.0.
    cuDevicePrimaryCtxRelease_v2(device: Ordinal) |real| {
        ending(primary_of(device), || real(device), || !driver::has_primary(device))
    }
}

hook! {
    /// Of CUDA 7.0.
    cuDevicePrimaryCtxRelease(device: Ordinal) |real| {
        ending(primary_of(device), || real(device), || !driver::has_primary(device))
    }
}

/// Destroys everything in the primary context by `call`. Where it goes on to exist, it is charged again.
fn reset(device: Ordinal, call: impl FnOnce() -> Answer) -> Answer {
    let context = primary_of(device);
    let answer = ending(context, call, || true);
    if answer == SUCCESS
        && !context.is_null()
        && driver::has_primary(device)
        && let Standing::Share(share) = share::of_cuda(device)
        && let Ok(reservation) = share.reserve_context()
    {
        // Where there is no room any more, the node's measure has it.
        let _ = reservation.keep_context(context as u64);
    }
    answer
}

hook! {
    /// Since CUDA 11.0.
    cuDevicePrimaryCtxReset_v2(device: Ordinal) |real| {
        reset(device, || real(device))
    }
}

hook! {
    /// Of CUDA 7.0.
    cuDevicePrimaryCtxReset(device: Ordinal) |real| {
        reset(device, || real(device))
    }
}
