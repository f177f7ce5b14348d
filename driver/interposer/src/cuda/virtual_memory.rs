//! Physical memory by handle, which lives as long as a reference to the handle or a mapping does.

use super::driver::{AllocationProperties, Current};
use super::{Answer, SUCCESS, allocate, hook, real};
use crate::share::LEDGER;
use core::ffi::{c_int, c_void};
use core::ptr;

type Held = divvy_interposer_core::vmm::Held<'static, crate::process::Kernel>;

hook! {
    /// Charged to the device that the properties name; memory of the host is not.
    cuMemCreate(out: *mut u64, bytes: usize, properties: *const AllocationProperties, flags: u64) |real| {
        if out.is_null() || properties.is_null() {
            return real(out, bytes, properties, flags);
        }
        let mut handle = 0;
        // SAFETY: not null, and the program's to read.
        let device = unsafe { (*properties).location.device() };
        // It belongs to no context.
        let current = device.map(|device| Current { device, context: ptr::null_mut() });
        allocate(
            current,
            bytes as u64,
            || match real(&raw mut handle, bytes, properties, flags) {
                SUCCESS => Ok(handle),
                error => Err(error),
            },
            |reservation, handle, _| reservation.keep_handle(handle),
            // SAFETY: the program's place for the handle.
            |handle| unsafe { *out = handle },
            |handle| {
                if let Some(release) = real!(cuMemRelease(u64)) {
                    // SAFETY: what the driver has just made, and nobody else knows.
                    unsafe { release(handle) };
                }
            },
        )
    }
}

/// A call by which something may hold memory, which is counted before it; `kept` says what does.
fn counted(held: Option<Held>, call: impl FnOnce() -> Answer, kept: impl FnOnce(Held)) -> Answer {
    let answer = call();
    if let Some(held) = held {
        if answer == SUCCESS { kept(held) } else { held.refused() }
    }
    answer
}

hook! {
    /// Drops one reference.
    cuMemRelease(handle: u64) |real| {
        let Some(reference) = LEDGER.release(handle) else { return real(handle) };
        let answer = real(handle);
        if answer == SUCCESS {
            reference.released();
        }
        answer
    }
}

hook! {
    /// One reference more, to the memory that is mapped at an address.
    cuMemRetainAllocationHandle(out: *mut u64, address: *mut c_void) |real| {
        counted(
            LEDGER.hold_at(address as u64),
            || real(out, address),
            // SAFETY: the driver has written it, which refuses null.
            |held| held.retained(unsafe { *out }),
        )
    }
}

hook! {
    /// From then on the memory may live by a handle or a descriptor that nobody here knows.
    cuMemExportToShareableHandle(out: *mut c_void, handle: u64, kind: c_int, flags: u64) |real| {
        counted(LEDGER.hold(handle), || real(out, handle, kind, flags), drop)
    }
}

hook! {
    /// Another process's memory, which is charged to that one; or our own, which has one reference more if it
    /// comes under the handle that we know, and is charged for good if it comes under another: it was exported.
    cuMemImportFromShareableHandle(out: *mut u64, shared: *mut c_void, kind: c_int) |real| {
        let answer = real(out, shared, kind);
        if answer == SUCCESS && !out.is_null() {
            // SAFETY: the driver has written it.
            let handle = unsafe { *out };
            if let Some(held) = LEDGER.hold(handle) {
                held.retained(handle);
            }
        }
        answer
    }
}

hook! {
    /// Keeps the memory alive after its handle is released.
    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) |real| {
        counted(
            LEDGER.hold(handle),
            || real(address, bytes, offset, handle, flags),
            |held| held.mapped(address, bytes as u64),
        )
    }
}

hook! {
    /// May be the end of the memory.
    cuMemUnmap(address: u64, bytes: usize) |real| {
        let answer = real(address, bytes);
        if answer == SUCCESS {
            LEDGER.unmapped(address, bytes as u64);
        }
        answer
    }
}
