//! Arrays and mipmapped arrays: memory in a layout of the driver's, for textures.
//!
//! The driver tells what an array takes only of some kinds. For the others it is computed from the shape; what rows and
//! tiles are rounded up to then shows in what the node measures of the process.

use super::driver::{self, Current, Handle, Ordinal};
use super::{Answer, Call, SUCCESS, allocate, by, free, hook, real, to};
use core::ffi::{c_int, c_uint};
use divvy_interposer_core::Kind;
use divvy_interposer_core::table::Class;

/// `CUDA_ARRAY_DESCRIPTOR`; with 32 bits for a size in its first version.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Flat<T> {
    width: T,
    height: T,
    format: c_int,
    channels: c_uint,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`; with 32 bits for a size in its first version.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Deep<T> {
    width: T,
    height: T,
    depth: T,
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

/// What counts of any of them.
#[derive(Clone, Copy)]
struct Shape {
    width: u64,
    height: u64,
    depth: u64,
    format: c_int,
    channels: c_uint,
    flags: c_uint,
}

/// Memory is mapped to such an array later, and charged as physical memory: CUDA_ARRAY3D_SPARSE and
/// CUDA_ARRAY3D_DEFERRED_MAPPING.
const WITHOUT_MEMORY: c_uint = 0x40 | 0x80;
/// CUDA_ARRAY3D_LAYERED, CUDA_ARRAY3D_CUBEMAP: the depth is a number of layers.
const LAYERS: c_uint = 0x01 | 0x04;

impl Shape {
    /// Bytes without any rounding.
    fn bytes(&self) -> u64 {
        if self.flags & WITHOUT_MEMORY != 0 {
            return 0;
        }
        let elements = self.width.max(1).saturating_mul(self.height.max(1)).saturating_mul(self.depth.max(1));
        elements.saturating_mul(self.element_bits()).div_ceil(8)
    }

    /// `CUarray_format`, with the number of channels where the format does not say it.
    fn element_bits(&self) -> u64 {
        let channels = u64::from(self.channels.clamp(1, 4));
        match self.format {
            0x01 | 0x08 => 8 * channels,
            0x02 | 0x09 | 0x10 => 16 * channels,
            0x03 | 0x0a | 0x20 => 32 * channels,
            // Normalised integers that say their channels: 8 bits of 1, 2, 4; 16 bits of 1, 2, 4.
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
            // The other picture formats have at most four channels of 16 bits.
            _ => 64,
        }
    }

    /// All levels, each half of the one before in every direction but that of layers.
    fn with_levels(&self, levels: c_uint) -> u64 {
        let half = |size: u64, level: c_uint| if size == 0 { 0 } else { (size >> level).max(1) };
        (0..levels.min(32)).fold(0u64, |sum, level| {
            let depth = if self.flags & LAYERS != 0 { self.depth } else { half(self.depth, level) };
            let level =
                Shape { width: half(self.width, level), height: half(self.height, level), depth, ..*self };
            sum.saturating_add(level.bytes())
        })
    }
}

impl<T: Copy + TryInto<u64>> Flat<T> {
    fn shape(&self) -> Shape {
        let size = |size: T| size.try_into().unwrap_or(u64::MAX);
        let Flat { width, height, format, channels } = *self;
        Shape { width: size(width), height: size(height), depth: 0, format, channels, flags: 0 }
    }
}

impl<T: Copy + TryInto<u64>> Deep<T> {
    fn shape(&self) -> Shape {
        let size = |size: T| size.try_into().unwrap_or(u64::MAX);
        let Deep { width, height, depth, format, channels, flags } = *self;
        Shape { width: size(width), height: size(height), depth: size(depth), format, channels, flags }
    }
}

fn free_array(handle: Handle) {
    if let Some(free) = real!(cuArrayDestroy(Handle)) {
        // SAFETY: what the driver has just made, and nobody else knows.
        unsafe { free(handle) };
    }
}

/// # Safety
/// `out` is null, which the driver refuses, or can be written.
unsafe fn array(out: *mut Handle, shape: Option<Shape>, call: Call<'_, *mut Handle>) -> Answer {
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
            reservation.keep(Kind::Array { handle: handle as u64, context }, granted)
        },
        // SAFETY: as the caller says.
        |handle| unsafe { *out = handle },
        free_array,
    )
}

fn granted(ask: fn(Handle, Ordinal) -> Option<u64>, handle: Handle, current: Option<Current>) -> Option<u64> {
    ask(handle, current?.device)
}

hook! {
    /// Since CUDA 3.2.
    cuArrayCreate_v2(out: *mut Handle, shape: *const Flat<usize>) |real| {
        // SAFETY: both are the program's, or null.
        unsafe { array(out, shape.as_ref().map(Flat::shape), to(&|out| real(out, shape))) }
    }
}

hook! {
    /// With 32 bits for a size.
    cuArrayCreate(out: *mut Handle, shape: *const Flat<c_uint>) |real| {
        // SAFETY: both are the program's, or null.
        unsafe { array(out, shape.as_ref().map(Flat::shape), to(&|out| real(out, shape))) }
    }
}

hook! {
    /// Since CUDA 3.2.
    cuArray3DCreate_v2(out: *mut Handle, shape: *const Deep<usize>) |real| {
        // SAFETY: both are the program's, or null.
        unsafe { array(out, shape.as_ref().map(Deep::shape), to(&|out| real(out, shape))) }
    }
}

hook! {
    /// With 32 bits for a size.
    cuArray3DCreate(out: *mut Handle, shape: *const Deep<c_uint>) |real| {
        // SAFETY: both are the program's, or null.
        unsafe { array(out, shape.as_ref().map(Deep::shape), to(&|out| real(out, shape))) }
    }
}

hook! {
    /// Charges are by array: a level of a mipmapped array is no array of its own.
    cuArrayDestroy(handle: Handle) |real| {
        free(Class::Array, handle as u64, by(&|| real(handle)))
    }
}

hook! {
    /// All levels at once.
    cuMipmappedArrayCreate(out: *mut Handle, shape: *const Deep<usize>, levels: c_uint) |real| {
        if out.is_null() || shape.is_null() {
            return real(out, shape, levels);
        }
        // SAFETY: not null, and the program's to read.
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
                reservation.keep(Kind::Mipmap { handle: handle as u64, context }, granted)
            },
            // SAFETY: the program's place for the handle.
            |handle| unsafe { *out = handle },
            |handle| {
                if let Some(free) = real!(cuMipmappedArrayDestroy(Handle)) {
                    // SAFETY: what the driver has just made, and nobody else knows.
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
