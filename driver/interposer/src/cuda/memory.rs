//! Linear memory: the `cuMemAlloc` family and its free functions.

use super::allocate::{allocate, allocate_charged, free_linear, reserve_managed};
use super::call::{CuResult, SUCCESS, by, hook};
use super::driver::{self, Handle};
use super::overcommit;
use core::ffi::c_uint;
use divvy_interposer_core::AllocationKind;

/// Combines a result code and an output.
fn made<T>(answer: CuResult, made: T) -> Result<T, CuResult> {
    if answer == SUCCESS { Ok(made) } else { Err(answer) }
}

hook! {
    /// Since CUDA 3.2.
    cuMemAlloc_v2(out: *mut u64, bytes: usize) |real| {
        if out.is_null() {
            return real(out, bytes);
        }
        let mut pointer = 0;
        let answer = allocate(
            driver::current(),
            bytes as u64,
            || made(real(&raw mut pointer, bytes), ()).map(|()| pointer),
            |reservation, pointer, context| {
                reservation.commit_all(AllocationKind::Linear { pointer, context })
            },
            // SAFETY: the program's output for the pointer.
            |pointer| unsafe { *out = pointer },
            free_linear,
        );
        match overcommit::or_substitute(answer, || overcommit::substitute(bytes as u64)) {
            Some(pointer) => {
                // SAFETY: as above.
                unsafe { *out = pointer };
                SUCCESS
            }
            None => answer,
        }
    }
}

hook! {
    /// With 32-bit pointers.
    cuMemAlloc(out: *mut c_uint, bytes: c_uint) |real| {
        if out.is_null() {
            return real(out, bytes);
        }
        let mut pointer = 0;
        allocate(
            driver::current(),
            bytes.into(),
            || made(real(&raw mut pointer, bytes), ()).map(|()| pointer),
            |reservation, pointer, context| {
                reservation.commit_all(AllocationKind::Linear { pointer: pointer.into(), context })
            },
            // SAFETY: the program's output for the pointer.
            |pointer| unsafe { *out = pointer },
            |pointer| free_linear(pointer.into()),
        )
    }
}

hook! {
    /// Since CUDA 3.2. The driver chooses the pitch, so the minimum size is charged first.
    cuMemAllocPitch_v2(
        out: *mut u64, pitch: *mut usize, width: usize, height: usize, element: c_uint,
    ) |real| {
        if out.is_null() || pitch.is_null() {
            return real(out, pitch, width, height, element);
        }
        let (mut pointer, mut row) = (0, 0);
        let answer = allocate(
            driver::current(),
            (width as u64).saturating_mul(height as u64),
            || {
                let answer = real(&raw mut pointer, &raw mut row, width, height, element);
                made(answer, ()).map(|()| (pointer, row))
            },
            |reservation, (pointer, row), context| {
                let kind = AllocationKind::Linear { pointer, context };
                reservation.commit(kind, (row as u64).saturating_mul(height as u64))
            },
            // SAFETY: the program's outputs for both.
            |made| unsafe { (*out, *pitch) = made },
            |(pointer, _)| free_linear(pointer),
        );
        match overcommit::or_substitute(answer, || overcommit::substitute_rows(width, height)) {
            Some(made) => {
                // SAFETY: as above.
                unsafe { (*out, *pitch) = made };
                SUCCESS
            }
            None => answer,
        }
    }
}

hook! {
    /// With 32-bit pointers.
    cuMemAllocPitch(
        out: *mut c_uint, pitch: *mut c_uint, width: c_uint, height: c_uint, element: c_uint,
    ) |real| {
        if out.is_null() || pitch.is_null() {
            return real(out, pitch, width, height, element);
        }
        let (mut pointer, mut row) = (0, 0);
        allocate(
            driver::current(),
            u64::from(width).saturating_mul(height.into()),
            || {
                let answer = real(&raw mut pointer, &raw mut row, width, height, element);
                made(answer, ()).map(|()| (pointer, row))
            },
            |reservation, (pointer, row), context| {
                let kind = AllocationKind::Linear { pointer: pointer.into(), context };
                reservation.commit(kind, u64::from(row).saturating_mul(height.into()))
            },
            // SAFETY: the program's outputs for both.
            |made| unsafe { (*out, *pitch) = made },
            |(pointer, _)| free_linear(pointer.into()),
        )
    }
}

hook! {
    /// Charged in full, wherever its pages are at the moment.
    cuMemAllocManaged(out: *mut u64, bytes: usize, flags: c_uint) |real| {
        if out.is_null() {
            return real(out, bytes, flags);
        }
        let mut pointer = 0;
        let current = driver::current();
        allocate_charged(
            current,
            reserve_managed(current, bytes as u64),
            || made(real(&raw mut pointer, bytes, flags), ()).map(|()| pointer),
            |reservation, pointer, context| {
                reservation.commit_all(AllocationKind::Managed { pointer, context })
            },
            // SAFETY: the program's output for the pointer.
            |pointer| unsafe { *out = pointer },
            free_linear,
        )
    }
}

hook! {
    /// Since CUDA 3.2. Also frees pool memory, for which the table has no entry.
    cuMemFree_v2(pointer: u64) |real| {
        overcommit::free(pointer, by(&|| real(pointer)))
    }
}

hook! {
    /// With 32-bit pointers.
    cuMemFree(pointer: c_uint) |real| {
        overcommit::free(pointer.into(), by(&|| real(pointer)))
    }
}

hook! {
    /// Also frees memory of `cuMemAlloc`.
    cuMemFreeAsync(pointer: u64, stream: Handle) |real| {
        overcommit::free_on(pointer, stream, by(&|| real(pointer, stream)))
    }
}

hook! {
    /// On the per-thread default stream.
    cuMemFreeAsync_ptsz(pointer: u64, stream: Handle) |real| {
        overcommit::free_on(pointer, driver::per_thread(stream), by(&|| real(pointer, stream)))
    }
}
