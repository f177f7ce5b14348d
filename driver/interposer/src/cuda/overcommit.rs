//! Overcommit: managed memory instead of device memory.
//!
//! An overcommitting share has a physical quota on the device and a larger total limit. Allocations
//! within the quota are ordinary. If one exceeds the quota, or the device is full, managed memory
//! is allocated instead, which the driver migrates on demand and is advised to keep on the device.
//! It is hidden from the program, because many programs treat managed memory differently. Pools,
//! arrays, physical memory by handle and contexts cannot be replaced and are refused beyond the
//! quota.

use super::allocate;
use super::call::{Call, CuResult, OUT_OF_MEMORY, SUCCESS, by, hook, real};
use super::driver::{self, Handle};
use crate::share::{self, DeviceAccess, PROCESS};
use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicBool, Ordering};
use divvy_interposer_core::AllocationKind;
use divvy_interposer_core::table::Class;

/// True once managed memory was substituted. Before that, no address is checked.
static SUBSTITUTED: AtomicBool = AtomicBool::new(false);

const INVALID_VALUE: CuResult = 1;
/// Alignment of rows in pitched memory; valid on all devices.
const ROW_ALIGNMENT: usize = 512;

/// Calls `make` if an allocation has failed with out of memory.
#[inline]
pub(super) fn or_substitute<T>(answer: CuResult, make: impl FnOnce() -> Option<T>) -> Option<T> {
    if answer == OUT_OF_MEMORY { make() } else { None }
}

/// Allocates managed memory for the calling thread's device, if its share overcommits and the limit
/// allows it.
#[cold]
pub(super) fn substitute(bytes: u64) -> Option<u64> {
    let current = driver::current()?;
    let DeviceAccess::Share(device) = share::for_ordinal(current.device) else { return None };
    if bytes == 0 || !device.overcommits() {
        return None;
    }
    let reservation = device.reserve_managed(bytes).inspect_err(|_| device.report_refusal(bytes)).ok()?;
    let allocate = real!(cuMemAllocManaged(*mut u64, usize, c_uint))?;
    let mut pointer = 0;
    // SAFETY: the driver writes an address; CU_MEM_ATTACH_GLOBAL.
    if unsafe { allocate(&raw mut pointer, usize::try_from(bytes).ok()?, 1) } != SUCCESS {
        return None;
    }
    driver::prefer_device(pointer, bytes, current.device);
    SUBSTITUTED.store(true, Ordering::Release);
    let context = current.context as u64;
    if reservation.commit_all(AllocationKind::Substitute { pointer, context }).is_err() {
        allocate::free_linear(pointer);
        return None;
    }
    Some(pointer)
}

/// Like [`substitute`], for rows; also returns the pitch.
#[cold]
pub(super) fn substitute_rows(width: usize, height: usize) -> Option<(u64, usize)> {
    let pitch = width.checked_next_multiple_of(ROW_ALIGNMENT)?;
    Some((substitute((pitch as u64).checked_mul(height as u64)?)?, pitch))
}

/// Returns true if an address is in substituted memory.
fn is_substituted(address: u64) -> bool {
    let begins = || driver::allocation_start(address).unwrap_or(address);
    SUBSTITUTED.load(Ordering::Acquire) && (PROCESS.is_substitute(address) || PROCESS.is_substitute(begins()))
}

/// Frees the memory at `pointer` with `call`, and removes its substitute mark.
pub(super) fn free(pointer: u64, call: Call<'_>) -> CuResult {
    if !SUBSTITUTED.load(Ordering::Acquire) {
        return allocate::free(Class::Pointer, pointer, call);
    }
    // The driver may give the address to another thread before the call returns.
    let mark = PROCESS.take(Class::Substitute, pointer);
    let answer = allocate::free(Class::Pointer, pointer, call);
    if let Some(mark) = mark.filter(|_| answer == SUCCESS) {
        mark.commit();
    }
    answer
}

/// Like [`free`], for stream-ordered frees. The driver does not accept managed memory there, so it
/// is freed with `cuMemFree`, which waits for the device.
pub(super) fn free_on(pointer: u64, stream: Handle, call: Call<'_>) -> CuResult {
    if SUBSTITUTED.load(Ordering::Acquire)
        && PROCESS.is_substitute(pointer)
        && !driver::is_capturing(stream)
        && let Some(real) = real!(cuMemFree_v2(u64))
    {
        // SAFETY: the program's own free.
        return free(pointer, by(&|| unsafe { real(pointer) }));
    }
    free(pointer, call)
}

/// Replacement for an attribute of managed memory.
enum AttributeOverride {
    /// CU_MEMORYTYPE_DEVICE.
    Device,
    /// Not managed, or without a host address.
    Zero,
}

fn attribute_override(attribute: c_int) -> Option<AttributeOverride> {
    match attribute {
        2 => Some(AttributeOverride::Device),
        4 | 8 => Some(AttributeOverride::Zero),
        _ => None,
    }
}

/// # Safety
/// The driver has written the value of that attribute to `out`.
unsafe fn override_attribute(attribute: c_int, out: *mut c_void) {
    // SAFETY: guaranteed by the caller. Only the lowest byte of a boolean is nonzero.
    unsafe {
        match (attribute_override(attribute), attribute) {
            (Some(AttributeOverride::Device), _) => *out.cast::<c_uint>() = 2,
            (Some(AttributeOverride::Zero), 4) => *out.cast::<u64>() = 0,
            (Some(AttributeOverride::Zero), _) => *out.cast::<u8>() = 0,
            (None, _) => {}
        }
    }
}

hook! {
    /// For device memory the driver refuses the host pointer attribute, so this does too.
    cuPointerGetAttribute(out: *mut c_void, attribute: c_int, address: u64) |real| {
        let is_overridden = !out.is_null() && attribute_override(attribute).is_some();
        let is_substitute = is_overridden && is_substituted(address);
        if is_substitute && attribute == 4 {
            return INVALID_VALUE;
        }
        let answer = real(out, attribute, address);
        if is_substitute && answer == SUCCESS {
            // SAFETY: just written by the driver.
            unsafe { override_attribute(attribute, out) };
        }
        answer
    }
}

hook! {
    /// Several at once.
    cuPointerGetAttributes(
        count: c_uint, attributes: *const c_int, out: *mut *mut c_void, address: u64,
    ) |real| {
        let answer = real(count, attributes, out, address);
        if answer == SUCCESS && is_substituted(address) {
            for at in 0..count as usize {
                // SAFETY: the driver has read `count` elements of both arrays, and has written each
                // value.
                unsafe {
                    let (attribute, out) = (*attributes.add(at), *out.add(at));
                    if !out.is_null() {
                        override_attribute(attribute, out);
                    }
                }
            }
        }
        answer
    }
}
