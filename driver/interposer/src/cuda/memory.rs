//! Linear memory: `cuMemAlloc` and its like, and what frees it.

use super::driver::{self, Handle};
use super::{Answer, SUCCESS, allocate, allocate_in, by, hook, managed_room, overcommit, real};
use core::ffi::c_uint;
use divvy_interposer_core::Kind;

pub(super) fn free_again(pointer: u64) {
    if let Some(free) = real!(cuMemFree_v2(u64)) {
        // SAFETY: what the driver has just allocated, and nobody else knows.
        unsafe { free(pointer) };
    }
}

/// `call` in terms of its answer and what it wrote.
fn made<T>(answer: Answer, made: T) -> Result<T, Answer> {
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
            |reservation, pointer, context| reservation.keep_all(Kind::Linear { pointer, context }),
            // SAFETY: the program's place for the pointer.
            |pointer| unsafe { *out = pointer },
            free_again,
        );
        match overcommit::instead_of(answer, || overcommit::instead(bytes as u64)) {
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
    /// With 32 bits for a pointer.
    cuMemAlloc(out: *mut c_uint, bytes: c_uint) |real| {
        if out.is_null() {
            return real(out, bytes);
        }
        let mut pointer = 0;
        allocate(
            driver::current(),
            bytes.into(),
            || made(real(&raw mut pointer, bytes), ()).map(|()| pointer),
            |reservation, pointer, context| reservation.keep_all(Kind::Linear { pointer: pointer.into(), context }),
            // SAFETY: the program's place for the pointer.
            |pointer| unsafe { *out = pointer },
            |pointer| free_again(pointer.into()),
        )
    }
}

hook! {
    /// Since CUDA 3.2. The driver decides the pitch, so what is asked for first is the least that it can be.
    cuMemAllocPitch_v2(out: *mut u64, pitch: *mut usize, width: usize, height: usize, element: c_uint) |real| {
        if out.is_null() || pitch.is_null() {
            return real(out, pitch, width, height, element);
        }
        let (mut pointer, mut row) = (0, 0);
        let answer = allocate(
            driver::current(),
            (width as u64).saturating_mul(height as u64),
            || made(real(&raw mut pointer, &raw mut row, width, height, element), ()).map(|()| (pointer, row)),
            |reservation, (pointer, row), context| {
                reservation.keep(Kind::Linear { pointer, context }, (row as u64).saturating_mul(height as u64))
            },
            // SAFETY: the program's places for both.
            |made| unsafe { (*out, *pitch) = made },
            |(pointer, _)| free_again(pointer),
        );
        match overcommit::instead_of(answer, || overcommit::rows_instead(width, height)) {
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
    /// With 32 bits for a pointer.
    cuMemAllocPitch(out: *mut c_uint, pitch: *mut c_uint, width: c_uint, height: c_uint, element: c_uint) |real| {
        if out.is_null() || pitch.is_null() {
            return real(out, pitch, width, height, element);
        }
        let (mut pointer, mut row) = (0, 0);
        allocate(
            driver::current(),
            u64::from(width).saturating_mul(height.into()),
            || made(real(&raw mut pointer, &raw mut row, width, height, element), ()).map(|()| (pointer, row)),
            |reservation, (pointer, row), context| {
                let kind = Kind::Linear { pointer: pointer.into(), context };
                reservation.keep(kind, u64::from(row).saturating_mul(height.into()))
            },
            // SAFETY: the program's places for both.
            |made| unsafe { (*out, *pitch) = made },
            |(pointer, _)| free_again(pointer.into()),
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
        allocate_in(
            current,
            managed_room(current, bytes as u64),
            || made(real(&raw mut pointer, bytes, flags), ()).map(|()| pointer),
            |reservation, pointer, context| reservation.keep_all(Kind::Managed { pointer, context }),
            // SAFETY: the program's place for the pointer.
            |pointer| unsafe { *out = pointer },
            free_again,
        )
    }
}

hook! {
    /// Since CUDA 3.2. Frees memory of pools too, for which the table has no entry.
    cuMemFree_v2(pointer: u64) |real| {
        overcommit::free(pointer, by(&|| real(pointer)))
    }
}

hook! {
    /// With 32 bits for a pointer.
    cuMemFree(pointer: c_uint) |real| {
        overcommit::free(pointer.into(), by(&|| real(pointer)))
    }
}

hook! {
    /// Frees what `cuMemAlloc` made too.
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
