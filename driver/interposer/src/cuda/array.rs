//! Arrays and mipmapped arrays: memory in the driver's own layout, for textures.
//!
//! The driver reports the size of only some kinds of arrays. Other sizes are computed from the
//! shape; padding of rows and tiles is then only covered by the node's measurement of the process.

use super::allocate::{allocate, free};
use super::call::{Call, CuResult, SUCCESS, by, hook, real, to};
use super::driver::{self, Current, Handle, Ordinal};
use core::ffi::{c_int, c_uint};
use divvy_interposer_core::AllocationKind;
use divvy_interposer_core::table::Class;

/// `CUDA_ARRAY_DESCRIPTOR`; its first version has 32-bit sizes.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Descriptor2D<T> {
    width: T,
    height: T,
    format: c_int,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`; its first version has 32-bit sizes.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Descriptor3D<T> {
    width: T,
    height: T,
    depth: T,
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

/// The fields of any descriptor.
#[derive(Clone, Copy)]
struct Shape {
    width: u64,
    height: u64,
    depth: u64,
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

/// Flags of arrays to which memory is mapped later, charged as physical memory: CUDA_ARRAY3D_SPARSE
/// and CUDA_ARRAY3D_DEFERRED_MAPPING.
const NO_MEMORY_FLAGS: c_uint = 0x40 | 0x80;
/// CUDA_ARRAY3D_LAYERED, CUDA_ARRAY3D_CUBEMAP: the depth is a number of layers.
const LAYER_FLAGS: c_uint = 0x01 | 0x04;

impl Shape {
    /// Size in bytes without padding.
    fn bytes(&self) -> u64 {
        if self.flags & NO_MEMORY_FLAGS != 0 {
            return 0;
        }
        let elements = self.width.max(1).saturating_mul(self.height.max(1)).saturating_mul(self.depth.max(1));
        elements.saturating_mul(self.element_bits()).div_ceil(8)
    }

    /// Bits per element, from `CUarray_format` and, if the format does not imply it, the channel
    /// count.
    fn element_bits(&self) -> u64 {
        let channels = u64::from(self.channels.clamp(1, 4));
        match self.format {
            0x01 | 0x08 => 8 * channels,
            0x02 | 0x09 | 0x10 => 16 * channels,
            0x03 | 0x0a | 0x20 => 32 * channels,
            // Normalised integers that imply their channels: 8 bits of 1, 2, 4; 16 bits of 1, 2, 4.
            0xc0 | 0xc6 => 8,
            0xc1 | 0xc3 | 0xc7 | 0xc9 => 16,
            0xc2 | 0xc4 | 0xc8 | 0xca => 32,
            0xc5 | 0xcb => 64,
            // Blocks of 4 x 4 in 8 bytes (BC1, BC4) or 16.
            0x91 | 0x92 | 0x97 | 0x98 => 4,
            0x93..=0x96 | 0x99..=0x9e => 8,
            0x50 => 32,
            // NV12, P010, P016.
            0xb0 => 12,
            0x9f | 0xa1 => 24,
            // Other formats have at most four channels of 16 bits.
            _ => 64,
        }
    }

    /// Size of all mipmap levels. Each level halves every dimension except the layer count.
    fn with_levels(&self, levels: c_uint) -> u64 {
        let half = |size: u64, level: c_uint| if size == 0 { 0 } else { (size >> level).max(1) };
        (0..levels.min(32)).fold(0u64, |sum, level| {
            let depth = if self.flags & LAYER_FLAGS != 0 { self.depth } else { half(self.depth, level) };
            let level =
                Shape { width: half(self.width, level), height: half(self.height, level), depth, ..*self };
            sum.saturating_add(level.bytes())
        })
    }
}

impl<T: Copy + TryInto<u64>> Descriptor2D<T> {
    fn shape(&self) -> Shape {
        let size = |size: T| size.try_into().unwrap_or(u64::MAX);
        let Descriptor2D { width, height, format, channels } = *self;
        Shape { width: size(width), height: size(height), depth: 0, format, channels, flags: 0 }
    }
}

impl<T: Copy + TryInto<u64>> Descriptor3D<T> {
    fn shape(&self) -> Shape {
        let size = |size: T| size.try_into().unwrap_or(u64::MAX);
        let Descriptor3D { width, height, depth, format, channels, flags } = *self;
        Shape { width: size(width), height: size(height), depth: size(depth), format, channels, flags }
    }
}

fn free_array(handle: Handle) {
    if let Some(free) = real!(cuArrayDestroy(Handle)) {
        // SAFETY: just created by the driver and not yet passed to the program.
        unsafe { free(handle) };
    }
}

/// # Safety
/// `out` is null, which the driver refuses, or writable.
unsafe fn create_array(out: *mut Handle, shape: Option<Shape>, call: Call<'_, *mut Handle>) -> CuResult {
    let current = driver::current();
    let computed = shape.map_or(0, |shape| shape.bytes());
    if out.is_null() || computed == 0 {
        return call.with(out);
    }
    let mut handle = core::ptr::null_mut();
    allocate(
        current,
        computed,
        || match call.with(&raw mut handle) {
            SUCCESS => Ok(handle),
            error => Err(error),
        },
        |reservation, handle, context| {
            let granted = granted(driver::array_memory, handle, current).unwrap_or(computed);
            reservation.commit(AllocationKind::Array { handle: handle as u64, context }, granted)
        },
        // SAFETY: guaranteed by the caller.
        |handle| unsafe { *out = handle },
        free_array,
    )
}

fn granted(ask: fn(Handle, Ordinal) -> Option<u64>, handle: Handle, current: Option<Current>) -> Option<u64> {
    ask(handle, current?.device)
}

hook! {
    /// Since CUDA 3.2.
    cuArrayCreate_v2(out: *mut Handle, shape: *const Descriptor2D<usize>) |real| {
        // SAFETY: both are the program's pointers, or null.
        unsafe { create_array(out, shape.as_ref().map(Descriptor2D::shape), to(&|out| real(out, shape))) }
    }
}

hook! {
    /// With 32-bit sizes.
    cuArrayCreate(out: *mut Handle, shape: *const Descriptor2D<c_uint>) |real| {
        // SAFETY: both are the program's pointers, or null.
        unsafe { create_array(out, shape.as_ref().map(Descriptor2D::shape), to(&|out| real(out, shape))) }
    }
}

hook! {
    /// Since CUDA 3.2.
    cuArray3DCreate_v2(out: *mut Handle, shape: *const Descriptor3D<usize>) |real| {
        // SAFETY: both are the program's pointers, or null.
        unsafe { create_array(out, shape.as_ref().map(Descriptor3D::shape), to(&|out| real(out, shape))) }
    }
}

hook! {
    /// With 32-bit sizes.
    cuArray3DCreate(out: *mut Handle, shape: *const Descriptor3D<c_uint>) |real| {
        // SAFETY: both are the program's pointers, or null.
        unsafe { create_array(out, shape.as_ref().map(Descriptor3D::shape), to(&|out| real(out, shape))) }
    }
}

hook! {
    /// Charges are per array: a level of a mipmapped array is not charged separately.
    cuArrayDestroy(handle: Handle) |real| {
        free(Class::Array, handle as u64, by(&|| real(handle)))
    }
}

hook! {
    /// All levels at once.
    cuMipmappedArrayCreate(out: *mut Handle, shape: *const Descriptor3D<usize>, levels: c_uint) |real| {
        if out.is_null() || shape.is_null() {
            return real(out, shape, levels);
        }
        // SAFETY: not null, and the program's structure.
        let computed = unsafe { (*shape).shape() }.with_levels(levels);
        if computed == 0 {
            return real(out, shape, levels);
        }
        let current = driver::current();
        let mut handle = core::ptr::null_mut();
        allocate(
            current,
            computed,
            || match real(&raw mut handle, shape, levels) {
                SUCCESS => Ok(handle),
                error => Err(error),
            },
            |reservation, handle, context| {
                let granted = granted(driver::mipmap_memory, handle, current).unwrap_or(computed);
                reservation.commit(AllocationKind::Mipmap { handle: handle as u64, context }, granted)
            },
            // SAFETY: the program's output for the handle.
            |handle| unsafe { *out = handle },
            |handle| {
                if let Some(free) = real!(cuMipmappedArrayDestroy(Handle)) {
                    // SAFETY: just created by the driver and not yet passed to the program.
                    unsafe { free(handle) };
                }
            },
        )
    }
}

hook! {
    /// All levels at once.
    cuMipmappedArrayDestroy(handle: Handle) |real| {
        free(Class::Mipmap, handle as u64, by(&|| real(handle)))
    }
}
