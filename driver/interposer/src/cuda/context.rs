//! Contexts: each takes memory by itself, and its end is the end of all that was allocated in it.
//!
//! What one takes is the policy's figure, charged before it is made; the node measures the process and corrects that.

use super::driver::{self, Handle, Ordinal};
use super::{Answer, Call, OUT_OF_MEMORY, SUCCESS, by, hook, pool, real, twins};
use crate::share::{self, LEDGER, Standing};
use crate::table::index;
use core::ffi::{c_int, c_uint, c_void};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};
use divvy_interposer_core::Full;

type Reservation = divvy_interposer_core::Reservation<'static, crate::process::Kernel>;
type Leaving = divvy_interposer_core::Leaving<'static, crate::process::Kernel>;

/// The primary context of each device, by its ordinal, as it was last retained: those who end it name the device only.
static PRIMARY: [AtomicUsize; 64] = [const { AtomicUsize::new(0) }; 64];

fn primary(device: Ordinal) -> Option<&'static AtomicUsize> {
    PRIMARY.get(usize::try_from(device).ok()?)
}

/// What a context is charged before it is made, and what the program's place for its handle holds.
struct Room {
    reservation: Option<Reservation>,
    before: Handle,
}

/// Before a context is made on a device.
///
/// # Safety
/// `out` is null, which the driver refuses, or can be read.
#[inline(never)]
unsafe fn room(out: *mut Handle, device: Ordinal) -> Result<Room, Full> {
    // SAFETY: as the caller says.
    let Some(before) = (unsafe { out.as_ref() }).copied() else {
        return Ok(Room { reservation: None, before: ptr::null_mut() });
    };
    let reservation = match share::of_cuda(device) {
        Standing::Free => None,
        Standing::Closed => return Err(Full),
        Standing::Share(share) => Some(share.reserve_context().or_else(|_| {
            pool::shrink(&share);
            share.reserve_context()
        })?),
    };
    Ok(Room { reservation, before })
}

/// After the driver was asked to make one; `destroy` takes it back.
///
/// # Safety
/// `out` is that of the call.
#[inline(never)]
unsafe fn made(room: Room, answer: Answer, out: *mut Handle, destroy: Call<'_>) -> Answer {
    if answer == SUCCESS
        && let Some(reservation) = room.reservation
        // SAFETY: the driver has written it.
        && reservation.keep_context(unsafe { *out } as u64).is_err()
    {
        destroy.call();
        // SAFETY: as above.
        unsafe { *out = room.before };
        return OUT_OF_MEMORY;
    }
    answer
}

/// A call that makes a context on a device.
///
/// # Safety
/// `out` is null, which the driver refuses, or can be read and written.
#[inline(never)]
unsafe fn make(out: *mut Handle, device: Ordinal, call: Call<'_>) -> Answer {
    // SAFETY: as the caller says.
    unsafe {
        match room(out, device) {
            Ok(room) => made(room, call.call(), out, by(&|| destroy(*out))),
            Err(Full) => OUT_OF_MEMORY,
        }
    }
}

fn destroy(context: Handle) -> Answer {
    // SAFETY: what the driver has just made, and nobody else knows.
    real!(cuCtxDestroy_v2(Handle)).map_or(SUCCESS, |destroy| unsafe { destroy(context) })
}

twins! {
    create(out: *mut Handle, flags: c_uint, device: Ordinal) of 3 |real| {
        // SAFETY: the program's place for the handle, or null.
        unsafe { make(out, device, by(&|| real(out, flags, device))) }
    }

    /// Since CUDA 3.2.
    cuCtxCreate_v2;
    /// Of CUDA 2.0.
    cuCtxCreate;
    /// For OpenGL, since CUDA 3.2.
    cuGLCtxCreate_v2;
    /// For OpenGL, of CUDA 2.0.
    cuGLCtxCreate;
}

twins! {
    create_for_vdpau(out: *mut Handle, flags: c_uint, device: Ordinal, vdpau: u32, function: *mut c_void) of 5 |real| {
        // SAFETY: the program's place for the handle, or null.
        unsafe { make(out, device, by(&|| real(out, flags, device, vdpau, function))) }
    }

    /// Since CUDA 3.2.
    cuVDPAUCtxCreate_v2;
    /// Of CUDA 3.1.
    cuVDPAUCtxCreate;
}

hook! {
    /// Since CUDA 11.4, with a part of the processors.
    cuCtxCreate_v3(out: *mut Handle, affinity: *mut c_void, count: c_int, flags: c_uint, device: Ordinal) |real| {
        // SAFETY: the program's place for the handle, or null.
        unsafe { make(out, device, by(&|| real(out, affinity, count, flags, device))) }
    }
}

hook! {
    /// Since CUDA 12.5.
    cuCtxCreate_v4(out: *mut Handle, parameters: *mut c_void, flags: c_uint, device: Ordinal) |real| {
        // SAFETY: the program's place for the handle, or null.
        unsafe { make(out, device, by(&|| real(out, parameters, flags, device))) }
    }
}

/// Whether a call that succeeded was the end of a context.
#[derive(Clone, Copy)]
enum End {
    Sure,
    /// If the driver does not know it any more.
    Of(Handle),
    /// If the device has no primary context any more.
    Primary(Ordinal),
}

/// Before a call that may end a context.
fn leaving(context: Handle) -> Option<Leaving> {
    LEDGER.context_leaves(context as u64)
}

/// After it.
#[inline(never)]
fn ended(leaving: Option<Leaving>, answer: Answer, end: End) -> Answer {
    if answer == SUCCESS
        && let Some(leaving) = leaving
        && match end {
            End::Sure => true,
            End::Of(context) => !driver::is_context(context),
            End::Primary(device) => !driver::has_primary(device),
        }
    {
        leaving.gone();
    }
    answer
}

twins! {
    end(context: Handle) of 1 |real| {
        ended(leaving(context), real(context), End::Sure)
    }

    /// Since CUDA 4.0.
    cuCtxDestroy_v2;
    /// Of CUDA 2.0.
    cuCtxDestroy;
}

hook! {
    /// Drops one use, and the context with the last.
    cuCtxDetach(context: Handle) |real| {
        ended(leaving(context), real(context), End::Of(context))
    }
}

hook! {
    /// Made by the first who retains it; the others get the same.
    cuDevicePrimaryCtxRetain(out: *mut Handle, device: Ordinal) |real| {
        if out.is_null() || driver::has_primary(device) {
            return known_primary(real(out, device), out, device);
        }
        // SAFETY: the program's place for the handle.
        let answer = unsafe {
            match room(out, device) {
                Ok(room) => made(room, real(out, device), out, by(&|| release(device))),
                Err(Full) => OUT_OF_MEMORY,
            }
        };
        known_primary(answer, out, device)
    }
}

/// After it was retained.
fn known_primary(answer: Answer, out: *const Handle, device: Ordinal) -> Answer {
    if answer == SUCCESS
        && let Some(primary) = primary(device)
    {
        // SAFETY: written by the driver, which refuses null.
        primary.store(unsafe { *out } as usize, Ordering::Relaxed);
    }
    answer
}

fn release(device: Ordinal) -> Answer {
    // SAFETY: the use that was just retained.
    real!(cuDevicePrimaryCtxRelease_v2(Ordinal)).map_or(SUCCESS, |release| unsafe { release(device) })
}

/// The device's primary context, as it was last retained.
fn primary_of(device: Ordinal) -> Handle {
    primary(device).map_or(0, |primary| primary.load(Ordering::Relaxed)) as Handle
}

twins! {
    release_primary(device: Ordinal) of 1 |real| {
        ended(leaving(primary_of(device)), real(device), End::Primary(device))
    }

    /// Since CUDA 11.0.
    cuDevicePrimaryCtxRelease_v2;
    /// Of CUDA 7.0.
    cuDevicePrimaryCtxRelease;
}

hook! {
    /// A part of the device's processors for the primary context, of which it is one use more. Where there is none it
    /// makes it: so that is made before, as if the program had asked for it.
    cuGreenCtxCreate(out: *mut Handle, resources: *mut c_void, device: Ordinal, flags: c_uint) |real| {
        if driver::has_primary(device) {
            return real(out, resources, device, flags);
        }
        let mut primary = ptr::null_mut();
        // SAFETY: a place of ours.
        let answer = unsafe { cuDevicePrimaryCtxRetain(&raw mut primary, device) };
        if answer != SUCCESS {
            return answer;
        }
        let answer = real(out, resources, device, flags);
        // SAFETY: the use that was just retained.
        unsafe { release_primary(device, index::cuDevicePrimaryCtxRelease_v2 as u32) };
        answer
    }
}

hook! {
    /// Drops that use, of which device's the driver does not say.
    cuGreenCtxDestroy(green: Handle) |real| {
        ending_primaries(0, by(&|| real(green)))
    }
}

/// A call that ends the primary contexts of this device and those after it, as far as it is their last use.
fn ending_primaries(device: Ordinal, call: Call<'_>) -> Answer {
    if device >= driver::devices() {
        return call.call();
    }
    let leaving = leaving(primary_of(device));
    ended(leaving, ending_primaries(device + 1, call), End::Primary(device))
}

twins! {
    reset_primary(device: Ordinal) of 1 |real| {
        reset(leaving(primary_of(device)), real(device), device)
    }

    /// Since CUDA 11.0.
    cuDevicePrimaryCtxReset_v2;
    /// Of CUDA 7.0.
    cuDevicePrimaryCtxReset;
}

/// After a call that destroys everything in the primary context. Where it goes on to exist, it is charged again.
fn reset(left: Option<Leaving>, answer: Answer, device: Ordinal) -> Answer {
    let context = primary_of(device);
    if ended(left, answer, End::Sure) == SUCCESS
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
