//! Physical memory by handle, which lives as long as a reference to the handle or a mapping does.

use super::driver::{AllocationProperties, Current, Handle, Ordinal};
use super::{Answer, SUCCESS, allocate, hook, real, twins};
use crate::share::LEDGER;
use core::ffi::{c_int, c_uint, c_void};
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

/// What holds memory after a call.
enum Holder {
    /// Nobody knows for how long.
    Somebody,
    /// A mapping of so many bytes at an address.
    Mapping(u64, u64),
    /// The program, by the handle that the driver has written there.
    Handle(*const u64),
}

/// After a call by which something may hold memory, which was counted before it.
#[inline(never)]
fn counted(held: Option<Held>, answer: Answer, holder: Holder) -> Answer {
    match (held, holder) {
        (Some(held), _) if answer != SUCCESS => held.refused(),
        (None, _) | (Some(_), Holder::Somebody) => {}
        (Some(held), Holder::Mapping(address, bytes)) => held.mapped(address, bytes),
        // SAFETY: the driver has written it, which refuses null.
        (Some(held), Holder::Handle(out)) => held.retained(unsafe { *out }),
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
        counted(LEDGER.hold_at(address as u64), real(out, address), Holder::Handle(out))
    }
}

hook! {
    /// From then on the memory may live by a handle or a descriptor that nobody here knows.
    cuMemExportToShareableHandle(out: *mut c_void, handle: u64, kind: c_int, flags: u64) |real| {
        counted(LEDGER.hold(handle), real(out, handle, kind, flags), Holder::Somebody)
    }
}

hook! {
    /// Another process's memory, which is charged to that one; or our own, which has one reference more if it
    /// comes under the handle that we know, and is charged for good if it comes under another: it was exported.
    cuMemImportFromShareableHandle(out: *mut u64, shared: *mut c_void, kind: c_int) |real| {
        let answer = real(out, shared, kind);
        if answer == SUCCESS && !out.is_null() {
            // SAFETY: the driver has written it.
            counted(LEDGER.hold(unsafe { *out }), answer, Holder::Handle(out));
        }
        answer
    }
}

hook! {
    /// Keeps the memory alive after its handle is released.
    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) |real| {
        let mapping = Holder::Mapping(address, bytes as u64);
        counted(LEDGER.hold(handle), real(address, bytes, offset, handle, flags), mapping)
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

/// `CUarrayMapInfo`: where in an array, the operation and the kind of handle, and the handle.
#[repr(C)]
pub(crate) struct Tile {
    place: [u64; 7],
    operation: c_int,
    kind: c_int,
    handle: u64,
    rest: [u64; 3],
}

const _: () = assert!(size_of::<Tile>() == 96);

/// Before memory is mapped into arrays. It is charged for good, also where the driver refuses: who takes it out of an array
/// again does not name it.
///
/// # Safety
/// `list` is null or has so many.
unsafe fn tiles(list: *const Tile, count: c_uint) {
    const MAP: c_int = 1;
    if list.is_null() {
        return;
    }
    // SAFETY: as the caller says.
    for tile in unsafe { core::slice::from_raw_parts(list, count as usize) } {
        if tile.operation == MAP {
            LEDGER.hold(tile.handle);
        }
    }
}

twins! {
    map_tiles(list: *mut Tile, count: c_uint, stream: Handle) of 3 |real| {
        // SAFETY: the program's own list.
        unsafe { tiles(list, count) };
        real(list, count, stream)
    }

    /// Keeps the memory alive after its handle is released.
    cuMemMapArrayAsync;
    /// On the per-thread default stream.
    cuMemMapArrayAsync_ptsz;
}

hook! {
    /// A multicast object takes no memory of its own, but keeps what is bound to it. It is charged for good: who unbinds it does
    /// not name it.
    cuMulticastBindMem(team: u64, at: usize, handle: u64, offset: usize, bytes: usize, flags: u64) |real| {
        counted(LEDGER.hold(handle), real(team, at, handle, offset, bytes, flags), Holder::Somebody)
    }
}

hook! {
    /// Since CUDA 13.1.
    cuMulticastBindMem_v2(
        team: u64, device: Ordinal, at: usize, handle: u64, offset: usize, bytes: usize, flags: u64,
    ) |real| {
        counted(LEDGER.hold(handle), real(team, device, at, handle, offset, bytes, flags), Holder::Somebody)
    }
}

hook! {
    /// By an address.
    cuMulticastBindAddr(team: u64, at: usize, address: u64, bytes: usize, flags: u64) |real| {
        counted(LEDGER.hold_at(address), real(team, at, address, bytes, flags), Holder::Somebody)
    }
}

hook! {
    /// Since CUDA 13.1.
    cuMulticastBindAddr_v2(team: u64, device: Ordinal, at: usize, address: u64, bytes: usize, flags: u64) |real| {
        counted(LEDGER.hold_at(address), real(team, device, at, address, bytes, flags), Holder::Somebody)
    }
}
