//! Contexts: each uses memory itself, and destroying it frees everything allocated in it.
//!
//! A context is charged the policy's figure before it is created. The node measures the process and
//! corrects that.

use super::call::{Call, CuResult, OUT_OF_MEMORY, SUCCESS, by, hook, real, twins};
use super::driver::{self, Handle, Ordinal};
use super::trim;
use crate::share::{self, DeviceAccess, PROCESS};
use crate::symbol_table::index;
use core::ffi::{c_int, c_uint, c_void};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};
use divvy_interposer_core::Refused;

type Reservation = divvy_interposer_core::Reservation<'static, crate::process::Kernel>;
type PendingTeardown = divvy_interposer_core::PendingTeardown<'static, crate::process::Kernel>;

/// The primary context of each device, by ordinal, as last retained. Calls that release it name
/// only the device.
static PRIMARY: [AtomicUsize; 64] = [const { AtomicUsize::new(0) }; 64];

fn primary(device: Ordinal) -> Option<&'static AtomicUsize> {
    PRIMARY.get(usize::try_from(device).ok()?)
}

/// The charge of a context before it is created, and the previous content of the program's output.
struct ContextCharge {
    reservation: Option<Reservation>,
    before: Handle,
}

/// Charges a context before it is created on a device.
///
/// # Safety
/// `out` is null, which the driver refuses, or readable.
#[inline(never)]
unsafe fn charge_context(out: *mut Handle, device: Ordinal) -> Result<ContextCharge, Refused> {
    // SAFETY: guaranteed by the caller.
    let Some(before) = (unsafe { out.as_ref() }).copied() else {
        return Ok(ContextCharge { reservation: None, before: ptr::null_mut() });
    };
    let reservation = match share::for_ordinal(device) {
        DeviceAccess::Unmanaged => None,
        DeviceAccess::Denied => return Err(Refused),
        DeviceAccess::Share(share) => Some(share.reserve_context().or_else(|_| {
            trim::trim_before_refusal(&share);
            share.reserve_context()
        })?),
    };
    Ok(ContextCharge { reservation, before })
}

/// Records the context after the driver's call; `destroy` undoes the call.
///
/// # Safety
/// `out` is the output of that call.
#[inline(never)]
unsafe fn record_context(
    charge: ContextCharge,
    answer: CuResult,
    out: *mut Handle,
    destroy: Call<'_>,
) -> CuResult {
    if answer == SUCCESS
        && let Some(reservation) = charge.reservation
        // SAFETY: written by the driver.
        && reservation.commit_context(unsafe { *out } as u64).is_err()
    {
        destroy.call();
        // SAFETY: as above.
        unsafe { *out = charge.before };
        return OUT_OF_MEMORY;
    }
    answer
}

/// Makes a call that creates a context on a device.
///
/// # Safety
/// `out` is null, which the driver refuses, or readable and writable.
#[inline(never)]
unsafe fn create_on(out: *mut Handle, device: Ordinal, call: Call<'_>) -> CuResult {
    // SAFETY: guaranteed by the caller.
    unsafe {
        match charge_context(out, device) {
            Ok(charge) => record_context(charge, call.call(), out, by(&|| destroy(*out))),
            Err(Refused) => OUT_OF_MEMORY,
        }
    }
}

fn destroy(context: Handle) -> CuResult {
    // SAFETY: just created by the driver and not yet passed to the program.
    real!(cuCtxDestroy_v2(Handle)).map_or(SUCCESS, |destroy| unsafe { destroy(context) })
}

twins! {
    create(out: *mut Handle, flags: c_uint, device: Ordinal) of 3 |real| {
        // SAFETY: the program's output for the handle, or null.
        unsafe { create_on(out, device, by(&|| real(out, flags, device))) }
    }

    /// Since CUDA 3.2.
    cuCtxCreate_v2;
    /// CUDA 2.0.
    cuCtxCreate;
    /// For OpenGL, since CUDA 3.2.
    cuGLCtxCreate_v2;
    /// For OpenGL, CUDA 2.0.
    cuGLCtxCreate;
}

twins! {
    create_for_vdpau(
        out: *mut Handle, flags: c_uint, device: Ordinal, vdpau: u32, function: *mut c_void,
    ) of 5 |real| {
        // SAFETY: the program's output for the handle, or null.
        unsafe { create_on(out, device, by(&|| real(out, flags, device, vdpau, function))) }
    }

    /// Since CUDA 3.2.
    cuVDPAUCtxCreate_v2;
    /// CUDA 3.1.
    cuVDPAUCtxCreate;
}

hook! {
    /// Since CUDA 11.4, with some of the multiprocessors.
    cuCtxCreate_v3(
        out: *mut Handle, affinity: *mut c_void, count: c_int, flags: c_uint, device: Ordinal,
    ) |real| {
        // SAFETY: the program's output for the handle, or null.
        unsafe { create_on(out, device, by(&|| real(out, affinity, count, flags, device))) }
    }
}

hook! {
    /// Since CUDA 12.5.
    cuCtxCreate_v4(out: *mut Handle, parameters: *mut c_void, flags: c_uint, device: Ordinal) |real| {
        // SAFETY: the program's output for the handle, or null.
        unsafe { create_on(out, device, by(&|| real(out, parameters, flags, device))) }
    }
}

/// How to tell whether a successful call has destroyed a context.
#[derive(Clone, Copy)]
enum EndCheck {
    Certain,
    /// Destroyed if the driver no longer knows the handle.
    IfUnknown(Handle),
    /// Destroyed if the device no longer has a primary context.
    IfNoPrimary(Ordinal),
}

/// Quarantines a context before a call that may destroy it.
fn begin_teardown(context: Handle) -> Option<PendingTeardown> {
    PROCESS.begin_teardown(context as u64)
}

/// Refunds or restores the context after that call.
#[inline(never)]
fn finish_teardown(teardown: Option<PendingTeardown>, answer: CuResult, end: EndCheck) -> CuResult {
    if answer == SUCCESS
        && let Some(teardown) = teardown
        && match end {
            EndCheck::Certain => true,
            EndCheck::IfUnknown(context) => !driver::is_context(context),
            EndCheck::IfNoPrimary(device) => !driver::has_primary(device),
        }
    {
        teardown.commit();
    }
    answer
}

twins! {
    end(context: Handle) of 1 |real| {
        finish_teardown(begin_teardown(context), real(context), EndCheck::Certain)
    }

    /// Since CUDA 4.0.
    cuCtxDestroy_v2;
    /// CUDA 2.0.
    cuCtxDestroy;
}

hook! {
    /// Drops one reference, and destroys the context with the last.
    cuCtxDetach(context: Handle) |real| {
        finish_teardown(begin_teardown(context), real(context), EndCheck::IfUnknown(context))
    }
}

hook! {
    /// The first retain creates the context; later ones return the same.
    cuDevicePrimaryCtxRetain(out: *mut Handle, device: Ordinal) |real| {
        if out.is_null() || driver::has_primary(device) {
            return remember_primary(real(out, device), out, device);
        }
        // SAFETY: the program's output for the handle.
        let answer = unsafe {
            match charge_context(out, device) {
                Ok(charge) => record_context(charge, real(out, device), out, by(&|| release(device))),
                Err(Refused) => OUT_OF_MEMORY,
            }
        };
        remember_primary(answer, out, device)
    }
}

/// Remembers the primary context after it was retained.
fn remember_primary(answer: CuResult, out: *const Handle, device: Ordinal) -> CuResult {
    if answer == SUCCESS
        && let Some(primary) = primary(device)
    {
        // SAFETY: written by the driver, which refuses null.
        primary.store(unsafe { *out } as usize, Ordering::Relaxed);
    }
    answer
}

fn release(device: Ordinal) -> CuResult {
    // SAFETY: releases the reference that was just retained.
    real!(cuDevicePrimaryCtxRelease_v2(Ordinal)).map_or(SUCCESS, |release| unsafe { release(device) })
}

/// The device's primary context, as last retained.
fn primary_of(device: Ordinal) -> Handle {
    primary(device).map_or(0, |primary| primary.load(Ordering::Relaxed)) as Handle
}

twins! {
    release_primary(device: Ordinal) of 1 |real| {
        finish_teardown(begin_teardown(primary_of(device)), real(device), EndCheck::IfNoPrimary(device))
    }

    /// Since CUDA 11.0.
    cuDevicePrimaryCtxRelease_v2;
    /// CUDA 7.0.
    cuDevicePrimaryCtxRelease;
}

hook! {
    /// A green context uses some of the device's multiprocessors and holds a reference to the
    /// primary context. If that does not exist, the driver creates it. So it is retained first, as
    /// if the program had done so.
    cuGreenCtxCreate(out: *mut Handle, resources: *mut c_void, device: Ordinal, flags: c_uint) |real| {
        if driver::has_primary(device) {
            return real(out, resources, device, flags);
        }
        let mut primary = ptr::null_mut();
        // SAFETY: a local output.
        let answer = unsafe { cuDevicePrimaryCtxRetain(&raw mut primary, device) };
        if answer != SUCCESS {
            return answer;
        }
        let answer = real(out, resources, device, flags);
        // SAFETY: releases the reference that was just retained.
        unsafe { release_primary(device, index::cuDevicePrimaryCtxRelease_v2 as u32) };
        answer
    }
}

hook! {
    /// Drops that reference. The driver does not report the device.
    cuGreenCtxDestroy(green: Handle) |real| {
        end_primaries(0, by(&|| real(green)))
    }
}

/// Runs a call that may destroy the primary contexts of this device and the following ones.
fn end_primaries(device: Ordinal, call: Call<'_>) -> CuResult {
    if device >= driver::devices() {
        return call.call();
    }
    let teardown = begin_teardown(primary_of(device));
    finish_teardown(teardown, end_primaries(device + 1, call), EndCheck::IfNoPrimary(device))
}

twins! {
    reset_primary(device: Ordinal) of 1 |real| {
        reset(begin_teardown(primary_of(device)), real(device), device)
    }

    /// Since CUDA 11.0.
    cuDevicePrimaryCtxReset_v2;
    /// CUDA 7.0.
    cuDevicePrimaryCtxReset;
}

/// Refunds everything in a primary context after a reset. If the context still exists, it is
/// charged again.
fn reset(teardown: Option<PendingTeardown>, answer: CuResult, device: Ordinal) -> CuResult {
    let context = primary_of(device);
    if finish_teardown(teardown, answer, EndCheck::Certain) == SUCCESS
        && !context.is_null()
        && driver::has_primary(device)
        && let DeviceAccess::Share(share) = share::for_ordinal(device)
        && let Ok(reservation) = share.reserve_context()
    {
        // If it no longer fits, the node's measurement covers it.
        let _ = reservation.commit_context(context as u64);
    }
    answer
}
