//! Copies and fills. The content is copied at once by the calling thread, because work on a stream
//! cannot change it here. Only calls that wait for a stream really wait.

use crate::argument::In;
use crate::code::{Code, Outcome};
use crate::frame::entry;
use crate::handle::Handle;
use crate::objects::{ContextHandle, Process, Stream, current_context};
use crate::{argument::Out, array};

/// `CU_MEMORYTYPE_*`.
const HOST: u32 = 1;
const DEVICE: u32 = 2;
const ARRAY: u32 = 3;
const UNIFIED: u32 = 4;

/// One side of `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Side2 {
    x: u64,
    y: u64,
    kind: u32,
    host: u64,
    device: u64,
    array: array::Handle,
    pitch: u64,
}

/// `CUDA_MEMCPY2D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Copy2 {
    from: Side2,
    to: Side2,
    width: u64,
    height: u64,
}

/// One side of `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Side3 {
    x: u64,
    y: u64,
    z: u64,
    level: u64,
    kind: u32,
    host: u64,
    device: u64,
    array: array::Handle,
    reserved: u64,
    pitch: u64,
    height: u64,
}

/// `CUDA_MEMCPY3D`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Copy3 {
    from: Side3,
    to: Side3,
    width: u64,
    height: u64,
    depth: u64,
}

const _: () = assert!(size_of::<Copy2>() == 128 && size_of::<Copy3>() == 200);

impl From<Copy2> for Copy3 {
    fn from(copy: Copy2) -> Self {
        let side = |side: Side2| {
            let Side2 { x, y, kind, host, device, array, pitch } = side;
            Side3 { x, y, z: 0, level: 0, kind, host, device, array, reserved: 0, pitch, height: 0 }
        };
        Self { from: side(copy.from), to: side(copy.to), width: copy.width, height: copy.height, depth: 1 }
    }
}

/// The location of a box of bytes: its first byte, and the pitches of rows and slices.
struct Box3 {
    first: *mut u8,
    row: u64,
    slice: u64,
}

impl Side3 {
    fn place(&self, process: &Process, (width, height, depth): (u64, u64, u64)) -> Outcome<Box3> {
        let sum = |row: u64, slice: u64| {
            let whole = [(self.z, slice), (self.y, row)];
            let offset = whole
                .iter()
                .try_fold(self.x, |sum, (count, step)| sum.checked_add(count.checked_mul(*step)?));
            let reach = [(depth - 1, slice), (height - 1, row)];
            let length =
                reach.iter().try_fold(width, |sum, (count, step)| sum.checked_add(count.checked_mul(*step)?));
            offset.zip(length).ok_or(Code::InvalidValue)
        };
        if self.kind == ARRAY {
            let array = self.array.get()?;
            let row = array.shape.row()?;
            let slice = row * array.shape.rows();
            let (offset, length) = sum(row, slice)?;
            if offset.checked_add(length).is_none_or(|end| end > array.size()) {
                return Err(Code::InvalidValue);
            }
            let first = array.place()?.wrapping_add(offset as usize);
            return Ok(Box3 { first, row, slice });
        }
        let row = if self.pitch == 0 { width } else { self.pitch };
        if row < width {
            return Err(Code::InvalidValue);
        }
        let slice = row.checked_mul(self.height.max(height)).ok_or(Code::InvalidValue)?;
        let (offset, length) = sum(row, slice)?;
        let address = match self.kind {
            HOST => return Ok(Box3 { first: (self.host.wrapping_add(offset)) as *mut u8, row, slice }),
            DEVICE | UNIFIED => self.device.checked_add(offset).ok_or(Code::InvalidValue)?,
            _ => return Err(Code::InvalidValue),
        };
        Ok(Box3 { first: place(process, address, length)?, row, slice })
    }
}

/// The host memory for `length` bytes at an address.
fn place(process: &Process, address: u64, length: u64) -> Outcome<*mut u8> {
    match process.physical.place(address, length) {
        Some(place) => place,
        None => process.memory.place(address, length),
    }
}

fn copy(process: &Process, to: u64, from: u64, length: u64) -> Outcome {
    current_context()?;
    if length == 0 {
        return Ok(());
    }
    let (to, from) = (place(process, to, length)?, place(process, from, length)?);
    // SAFETY: memory of allocations that are long enough, or the program's own memory, as it says.
    unsafe { std::ptr::copy(from, to, length as usize) };
    Ok(())
}

fn copy_box(process: &Process, copy: Copy3) -> Outcome {
    current_context()?;
    let sides = (copy.width, copy.height, copy.depth);
    if copy.width == 0 || copy.height == 0 || copy.depth == 0 {
        return Ok(());
    }
    let (from, to) = (copy.from.place(process, sides)?, copy.to.place(process, sides)?);
    for slice in 0..copy.depth {
        for row in 0..copy.height {
            let at = |side: &Box3| side.first.wrapping_add((slice * side.slice + row * side.row) as usize);
            // SAFETY: rows of the two boxes; `place` has checked that they are within their memory,
            // or it is the program's own.
            unsafe { std::ptr::copy(at(&from), at(&to), copy.width as usize) };
        }
    }
    Ok(())
}

/// Fills rows of elements.
fn fill<T: Copy>(process: &Process, address: u64, pitch: u64, value: T, width: u64, height: u64) -> Outcome {
    current_context()?;
    let element = size_of::<T>() as u64;
    let row = width.checked_mul(element).ok_or(Code::InvalidValue)?;
    let pitch = if height <= 1 { row } else { pitch };
    if pitch < row || !address.is_multiple_of(element) {
        return Err(Code::InvalidValue);
    }
    if width == 0 || height == 0 {
        return Ok(());
    }
    let length =
        pitch.checked_mul(height - 1).and_then(|above| above.checked_add(row)).ok_or(Code::InvalidValue)?;
    let first: *mut u8 = place(process, address, length)?;
    for at in 0..height {
        let begin: *mut T = first.wrapping_add((at * pitch) as usize).cast();
        for column in 0..width as usize {
            // SAFETY: within the length that `place` has checked, or the program's own memory. Any
            // alignment is allowed.
            unsafe { begin.add(column).write_unaligned(value) };
        }
    }
    Ok(())
}

/// Waits for the default stream, for a call that has completed when it returns.
fn wait(own: bool) -> Outcome {
    Stream::of(Handle::NULL, own)?.synchronize()
}

/// Whether work on a stream must be executed, and not captured as a node of a graph.
fn starts(stream: Handle<Stream>, own: bool) -> Outcome<bool> {
    Ok(!Stream::of(stream, own)?.capture_work(0))
}

/// Copies between addresses. The first function of each pair has completed when it returns, the
/// second goes to a stream.
macro_rules! copies {
    ($($now:ident $now_twin:ident $later:ident $later_twin:ident;)*) => {$(
        entry! {
            fn $now | $now_twin(process, own; to: u64, from: u64, length: u64) {
                wait(own)?;
                copy(process, to, from, length)
            }

            fn $later | $later_twin(process, own; to: u64, from: u64, length: u64, stream: Handle<Stream>) {
                if starts(stream, own)? { copy(process, to, from, length) } else { Ok(()) }
            }
        }
    )*};
}

/// Fills of elements of a type and of rows of them, synchronously and on a stream.
macro_rules! fills {
    ($($kind:ty: $now:ident $now_twin:ident $rows:ident $rows_twin:ident $later:ident $later_twin:ident
       $rows_later:ident $rows_later_twin:ident;)*) => {$(
        entry! {
            fn $now | $now_twin(process, own; address: u64, value: $kind, count: u64) {
                wait(own)?;
                fill(process, address, 0, value, count, 1)
            }

            fn $rows | $rows_twin(
                process, own; address: u64, pitch: u64, value: $kind, width: u64, height: u64,
            ) {
                wait(own)?;
                fill(process, address, pitch, value, width, height)
            }

            fn $later | $later_twin(
                process, own; address: u64, value: $kind, count: u64, stream: Handle<Stream>,
            ) {
                if starts(stream, own)? { fill(process, address, 0, value, count, 1) } else { Ok(()) }
            }

            fn $rows_later | $rows_later_twin(
                process, own; address: u64, pitch: u64, value: $kind, width: u64, height: u64, stream:
                Handle<Stream>,
            ) {
                match starts(stream, own)? {
                    true => fill(process, address, pitch, value, width, height),
                    false => Ok(()),
                }
            }
        }
    )*};
}

copies! {
    cuMemcpy cuMemcpy_ptds cuMemcpyAsync cuMemcpyAsync_ptsz;
    cuMemcpyHtoD_v2 cuMemcpyHtoD_v2_ptds cuMemcpyHtoDAsync_v2 cuMemcpyHtoDAsync_v2_ptsz;
    cuMemcpyDtoH_v2 cuMemcpyDtoH_v2_ptds cuMemcpyDtoHAsync_v2 cuMemcpyDtoHAsync_v2_ptsz;
    cuMemcpyDtoD_v2 cuMemcpyDtoD_v2_ptds cuMemcpyDtoDAsync_v2 cuMemcpyDtoDAsync_v2_ptsz;
}

fills! {
    u8: cuMemsetD8_v2 cuMemsetD8_v2_ptds cuMemsetD2D8_v2 cuMemsetD2D8_v2_ptds
        cuMemsetD8Async cuMemsetD8Async_ptsz cuMemsetD2D8Async cuMemsetD2D8Async_ptsz;
    u16: cuMemsetD16_v2 cuMemsetD16_v2_ptds cuMemsetD2D16_v2 cuMemsetD2D16_v2_ptds
        cuMemsetD16Async cuMemsetD16Async_ptsz cuMemsetD2D16Async cuMemsetD2D16Async_ptsz;
    u32: cuMemsetD32_v2 cuMemsetD32_v2_ptds cuMemsetD2D32_v2 cuMemsetD2D32_v2_ptds
        cuMemsetD32Async cuMemsetD32Async_ptsz cuMemsetD2D32Async cuMemsetD2D32Async_ptsz;
}

entry! {
    fn cuMemcpyPeer | cuMemcpyPeer_ptds(
        process, own; to: u64, _to_context: ContextHandle, from: u64, _from_context: ContextHandle,
        length: u64,
    ) {
        wait(own)?;
        copy(process, to, from, length)
    }

    fn cuMemcpyPeerAsync | cuMemcpyPeerAsync_ptsz(
        process, own; to: u64, _to_context: ContextHandle, from: u64, _from_context: ContextHandle,
        length: u64,
        stream: Handle<Stream>,
    ) {
        if starts(stream, own)? { copy(process, to, from, length) } else { Ok(()) }
    }

    fn cuMemcpy2D_v2 | cuMemcpy2D_v2_ptds(process, own; copy: In<Copy2>) {
        wait(own)?;
        copy_box(process, copy.get()?.into())
    }

    fn cuMemcpy2DUnaligned_v2 | cuMemcpy2DUnaligned_v2_ptds(process, own; copy: In<Copy2>) {
        wait(own)?;
        copy_box(process, copy.get()?.into())
    }

    fn cuMemcpy2DAsync_v2 | cuMemcpy2DAsync_v2_ptsz(process, own; copy: In<Copy2>, stream: Handle<Stream>) {
        let copy = copy.get()?;
        if starts(stream, own)? { copy_box(process, copy.into()) } else { Ok(()) }
    }

    fn cuMemcpy3D_v2 | cuMemcpy3D_v2_ptds(process, own; copy: In<Copy3>) {
        wait(own)?;
        copy_box(process, copy.get()?)
    }

    fn cuMemcpy3DAsync_v2 | cuMemcpy3DAsync_v2_ptsz(process, own; copy: In<Copy3>, stream: Handle<Stream>) {
        let copy = copy.get()?;
        if starts(stream, own)? { copy_box(process, copy) } else { Ok(()) }
    }

    fn cuMemcpyBatchAsync_v2 | cuMemcpyBatchAsync_v2_ptsz(
        process, own; to: In<u64>, from: In<u64>, lengths: In<u64>, count: u64, _attributes: In<u64>,
        _indices: In<u64>,
        _kinds: u64, stream: Handle<Stream>,
    ) {
        if starts(stream, own)? {
            for at in 0..count as usize {
                copy(process, to.at(at)?, from.at(at)?, lengths.at(at)?)?;
            }
        }
        Ok(())
    }

    fn cuMemcpyBatchAsync | cuMemcpyBatchAsync_ptsz(
        process, own; to: In<u64>, from: In<u64>, lengths: In<u64>, count: u64, _attributes: In<u64>,
        _indices: In<u64>,
        _kinds: u64, failed: Out<u64>, stream: Handle<Stream>,
    ) {
        if starts(stream, own)? {
            for at in 0..count as usize {
                copy(process, to.at(at)?, from.at(at)?, lengths.at(at)?)
                    .inspect_err(|_| failed.offer(at as u64))?;
            }
        }
        Ok(())
    }
}
