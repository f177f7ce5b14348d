//! Physical memory by handle, which exists while a handle reference or a mapping does.

use super::allocate::allocate;
use super::call::{CuResult, SUCCESS, hook, real, twins};
use super::driver::{AllocationProperties, Current, Handle, Ordinal};
use crate::share::PROCESS;
use core::ffi::{c_int, c_uint, c_void};
use core::ptr;

type PendingReference = divvy_interposer_core::vmm::PendingReference<'static, crate::process::Kernel>;

hook! {
    /// Charged to the device in the properties; host memory is not charged.
    cuMemCreate(out: *mut u64, bytes: usize, properties: *const AllocationProperties, flags: u64) |real| {
        if out.is_null() || properties.is_null() {
            return real(out, bytes, properties, flags);
        }
        let mut handle = 0;
        // SAFETY: not null, and the program's structure.
        let device = unsafe { (*properties).location.device() };
        // Physical memory belongs to no context.
        let current = device.map(|device| Current { device, context: ptr::null_mut() });
        allocate(
            current,
            bytes as u64,
            || match real(&raw mut handle, bytes, properties, flags) {
                SUCCESS => Ok(handle),
                error => Err(error),
            },
            |reservation, handle, _| reservation.commit_handle(handle),
            // SAFETY: the program's output for the handle.
            |handle| unsafe { *out = handle },
            |handle| {
                if let Some(release) = real!(cuMemRelease(u64)) {
                    // SAFETY: just created by the driver and not yet passed to the program.
                    unsafe { release(handle) };
                }
            },
        )
    }
}

/// The owner of a reference after a call.
enum Holder {
    /// A holder of unknown lifetime.
    Unknown,
    /// A mapping: its address and length in bytes.
    Mapping(u64, u64),
    /// The program, by the handle that the driver has written.
    Handle(*const u64),
}

/// Assigns or drops a reference that was counted before a call.
#[inline(never)]
fn finish_reference(held: Option<PendingReference>, answer: CuResult, holder: Holder) -> CuResult {
    match (held, holder) {
        (Some(held), _) if answer != SUCCESS => held.cancel(),
        (None, _) | (Some(_), Holder::Unknown) => {}
        (Some(held), Holder::Mapping(address, bytes)) => held.mapped(address, bytes),
        // SAFETY: written by the driver, which refuses null.
        (Some(held), Holder::Handle(out)) => held.retained(unsafe { *out }),
    }
    answer
}

hook! {
    /// Drops one reference.
    cuMemRelease(handle: u64) |real| {
        let Some(reference) = PROCESS.begin_release(handle) else { return real(handle) };
        let answer = real(handle);
        if answer == SUCCESS {
            reference.commit();
        }
        answer
    }
}

hook! {
    /// Adds a reference to the memory that is mapped at an address.
    cuMemRetainAllocationHandle(out: *mut u64, address: *mut c_void) |real| {
        finish_reference(PROCESS.add_reference_at(address as u64), real(out, address), Holder::Handle(out))
    }
}

hook! {
    /// After an export, an unknown handle or descriptor may keep the memory alive.
    cuMemExportToShareableHandle(out: *mut c_void, handle: u64, kind: c_int, flags: u64) |real| {
        finish_reference(PROCESS.add_reference(handle), real(out, handle, kind, flags), Holder::Unknown)
    }
}

hook! {
    /// Memory of another process is charged there. For memory of this process, a known handle gets
    /// another reference. Under an unknown handle it stays charged, because it was exported.
    cuMemImportFromShareableHandle(out: *mut u64, shared: *mut c_void, kind: c_int) |real| {
        let answer = real(out, shared, kind);
        if answer == SUCCESS && !out.is_null() {
            // SAFETY: written by the driver.
            finish_reference(PROCESS.add_reference(unsafe { *out }), answer, Holder::Handle(out));
        }
        answer
    }
}

hook! {
    /// Keeps the memory alive after its handle is released.
    cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) |real| {
        let mapping = Holder::Mapping(address, bytes as u64);
        finish_reference(PROCESS.add_reference(handle), real(address, bytes, offset, handle, flags), mapping)
    }
}

hook! {
    /// May free the memory.
    cuMemUnmap(address: u64, bytes: usize) |real| {
        let answer = real(address, bytes);
        if answer == SUCCESS {
            PROCESS.remove_mappings(address, bytes as u64);
        }
        answer
    }
}

/// `CUarrayMapInfo`: the position in an array, the operation, the handle type and the handle.
#[repr(C)]
pub(crate) struct Tile {
    place: [u64; 7],
    operation: c_int,
    kind: c_int,
    handle: u64,
    rest: [u64; 3],
}

const _: () = assert!(size_of::<Tile>() == 96);

/// Adds references before memory is mapped into arrays. They are never dropped, even if the driver
/// refuses, because an unmapping of tiles does not name the memory.
///
/// # Safety
/// `list` is null or has `count` elements.
unsafe fn add_tile_references(list: *const Tile, count: c_uint) {
    const MAP: c_int = 1;
    if list.is_null() {
        return;
    }
    // SAFETY: guaranteed by the caller.
    for tile in unsafe { core::slice::from_raw_parts(list, count as usize) } {
        if tile.operation == MAP {
            PROCESS.add_reference(tile.handle);
        }
    }
}

twins! {
    map_tiles(list: *mut Tile, count: c_uint, stream: Handle) of 3 |real| {
        // SAFETY: the program's own list.
        unsafe { add_tile_references(list, count) };
        real(list, count, stream)
    }

    /// Keeps the memory alive after its handle is released.
    cuMemMapArrayAsync;
    /// On the per-thread default stream.
    cuMemMapArrayAsync_ptsz;
}

hook! {
    /// A multicast object uses no memory itself, but keeps what is bound to it. The reference is
    /// never dropped, because unbinding does not name the memory.
    cuMulticastBindMem(team: u64, at: usize, handle: u64, offset: usize, bytes: usize, flags: u64) |real| {
        let reference = PROCESS.add_reference(handle);
        finish_reference(reference, real(team, at, handle, offset, bytes, flags), Holder::Unknown)
    }
}

hook! {
    /// Since CUDA 13.1.
    cuMulticastBindMem_v2(
        team: u64, device: Ordinal, at: usize, handle: u64, offset: usize, bytes: usize, flags: u64,
    ) |real| {
        let reference = PROCESS.add_reference(handle);
        finish_reference(reference, real(team, device, at, handle, offset, bytes, flags), Holder::Unknown)
    }
}

hook! {
    /// By an address.
    cuMulticastBindAddr(team: u64, at: usize, address: u64, bytes: usize, flags: u64) |real| {
        let reference = PROCESS.add_reference_at(address);
        finish_reference(reference, real(team, at, address, bytes, flags), Holder::Unknown)
    }
}

hook! {
    /// Since CUDA 13.1.
    cuMulticastBindAddr_v2(
        team: u64, device: Ordinal, at: usize, address: u64, bytes: usize, flags: u64,
    ) |real| {
        let reference = PROCESS.add_reference_at(address);
        finish_reference(reference, real(team, device, at, address, bytes, flags), Holder::Unknown)
    }
}
