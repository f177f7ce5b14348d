//! Arrays and mipmapped arrays: memory with a shape, referred to by handle.

use std::sync::{Arc, Mutex, PoisonError};

use divvy_sim::GpuProcess;

use crate::argument::{In, Out};
use crate::code::{Code, Outcome};
use crate::content::Content;
use crate::frame::entry;
use crate::handle::Object;
use crate::objects::{Child, current_context};

/// `CUarray` and `CUmipmappedArray`.
pub(crate) type Handle = crate::handle::Handle<Array>;

/// `CUDA_ARRAY3D_LAYERED`: the depth counts layers; all mipmap levels have the same layers.
const LAYERED: u32 = 1;
/// `CUDA_ARRAY3D_SPARSE` and `CUDA_ARRAY3D_DEFERRED_MAPPING`: memory is mapped later.
const WITHOUT_MEMORY: u32 = 0x40 | 0x80;
/// `CUDA_ARRAY3D_DEFERRED_MAPPING`.
const DEFERRED: u32 = 0x80;
/// Alignment of memory that is mapped later.
const ALIGNMENT: u64 = 64 << 10;

/// `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Flat {
    width: u64,
    height: u64,
    format: u32,
    channels: u32,
}

/// `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    width: u64,
    height: u64,
    depth: u64,
    format: u32,
    channels: u32,
    flags: u32,
}

/// `CUDA_ARRAY_MEMORY_REQUIREMENTS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Requirements {
    size: u64,
    alignment: u64,
    reserved: [u32; 4],
}

/// An array. A mipmapped array has several levels.
pub(crate) struct Array {
    pub(crate) shape: Shape,
    levels: Vec<Handle>,
    size: u64,
    /// The process that pays for the memory; a level of a mipmapped array has no memory of its own.
    gpu_process: Option<Arc<GpuProcess>>,
    content: Mutex<Content>,
}

impl Object for Array {
    const MAGIC: u64 = 0x6172_7279_5f6c_6976;
}

impl Shape {
    /// Bytes of an element.
    fn element(self) -> Outcome<u64> {
        let channel = match self.format {
            0x01 | 0x08 => 1,
            0x02 | 0x09 | 0x10 => 2,
            0x03 | 0x0a | 0x20 => 4,
            // Formats with named channels; four bytes are close enough.
            0xb0.. => return Ok(4),
            _ => return Err(Code::InvalidValue),
        };
        if matches!(self.channels, 1 | 2 | 4) {
            Ok(channel * u64::from(self.channels))
        } else {
            Err(Code::InvalidValue)
        }
    }

    /// Bytes of a row.
    pub(crate) fn row(self) -> Outcome<u64> {
        self.element()?.checked_mul(self.width).filter(|row| *row > 0).ok_or(Code::InvalidValue)
    }

    pub(crate) fn rows(self) -> u64 {
        self.height.max(1)
    }

    /// Bytes of the whole array.
    fn size(self) -> Outcome<u64> {
        let slices = self.depth.max(1);
        self.row()?
            .checked_mul(self.rows())
            .and_then(|slice| slice.checked_mul(slices))
            .ok_or(Code::InvalidValue)
    }

    /// The next mipmap level: half the size in each direction.
    fn next_level(self) -> Self {
        let half = |side: u64| if side == 0 { 0 } else { (side / 2).max(1) };
        let depth = if self.flags & LAYERED != 0 { self.depth } else { half(self.depth) };
        Self { width: half(self.width), height: half(self.height), depth, ..self }
    }
}

impl From<Flat> for Shape {
    fn from(flat: Flat) -> Self {
        let Flat { width, height, format, channels } = flat;
        Self { width, height, depth: 0, format, channels, flags: 0 }
    }
}

impl Array {
    /// The host memory with its content, for a copy.
    pub(crate) fn place(&self) -> Outcome<*mut u8> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner).place(self.size)
    }

    pub(crate) const fn size(&self) -> u64 {
        self.size
    }
}

fn create(shape: Shape, levels: u32) -> Outcome<Handle> {
    let context = current_context()?;
    let shapes: Vec<Shape> =
        std::iter::successors(Some(shape), |shape| Some(shape.next_level())).take(levels as usize).collect();
    let sizes = shapes.iter().map(|shape| shape.size()).collect::<Outcome<Vec<u64>>>()?;
    let size = sizes.iter().try_fold(0_u64, |sum, size| sum.checked_add(*size)).ok_or(Code::InvalidValue)?;
    let gpu_process = (shape.flags & WITHOUT_MEMORY == 0).then(|| Arc::clone(&context.gpu_process));
    if let Some(gpu_process) = &gpu_process
        && !gpu_process.charge(size)
    {
        return Err(Code::OutOfMemory);
    }
    let content = || Mutex::new(Content::NONE);
    let level = |(shape, size): (Shape, u64)| {
        Handle::new(Array { shape, levels: Vec::new(), size, gpu_process: None, content: content() })
    };
    let parts = if levels > 1 { shapes.into_iter().zip(sizes).map(level).collect() } else { Vec::new() };
    let array = Handle::new(Array { shape, levels: parts, size, gpu_process, content: content() });
    context.arrays().push(Child::new(array, |_, array| {
        let _ = destroy(array);
    }));
    Ok(array)
}

/// Destroys an array and returns its memory.
pub(crate) fn destroy(array: Handle) -> Outcome {
    let array = array.end()?;
    for level in &array.levels {
        let _ = destroy(*level);
    }
    if let Some(gpu_process) = &array.gpu_process {
        gpu_process.refund(array.size);
    }
    std::mem::replace(&mut *array.content.lock().unwrap_or_else(PoisonError::into_inner), Content::NONE)
        .unmap();
    Ok(())
}

/// Destroys an array for the program, so that its context does not have to.
fn destroy_and_forget(array: Handle) -> Outcome {
    destroy(array)?;
    if let Ok(context) = current_context() {
        context.arrays().retain(|known| !known.is(array));
    }
    Ok(())
}

/// Only for arrays whose memory is mapped later.
fn requirements(answer: Out<Requirements>, array: Handle) -> Outcome {
    answer.check()?;
    let array = array.get()?;
    if array.shape.flags & DEFERRED == 0 {
        return Err(Code::InvalidValue);
    }
    let size = array.size.next_multiple_of(ALIGNMENT);
    answer.set(Requirements { size, alignment: ALIGNMENT, reserved: [0; 4] })
}

entry! {
    fn cuArrayCreate_v2(_process; array: Out<Handle>, shape: In<Flat>) {
        array.check()?;
        array.set(create(shape.get()?.into(), 1)?)
    }

    fn cuArray3DCreate_v2(_process; array: Out<Handle>, shape: In<Shape>) {
        array.check()?;
        array.set(create(shape.get()?, 1)?)
    }

    fn cuArrayDestroy(_process; array: Handle) {
        destroy_and_forget(array)
    }

    fn cuArrayGetDescriptor_v2(_process; shape: Out<Flat>, array: Handle) {
        let Shape { width, height, format, channels, .. } = array.get()?.shape;
        shape.set(Flat { width, height, format, channels })
    }

    fn cuArray3DGetDescriptor_v2(_process; shape: Out<Shape>, array: Handle) {
        shape.set(array.get()?.shape)
    }

    fn cuArrayGetMemoryRequirements(process; answer: Out<Requirements>, array: Handle, device: i32) {
        process.device(device)?;
        requirements(answer, array)
    }

    fn cuMipmappedArrayCreate(_process; array: Out<Handle>, shape: In<Shape>, levels: u32) {
        array.check()?;
        let shape = shape.get()?;
        let depth = if shape.flags & LAYERED == 0 { shape.depth } else { 0 };
        let longest = shape.width.max(shape.height).max(depth);
        // At most one level per halving, however many are requested.
        let max_levels = u64::BITS - longest.leading_zeros();
        if levels == 0 {
            return Err(Code::InvalidValue);
        }
        array.set(create(shape, levels.min(max_levels.max(1)))?)
    }

    fn cuMipmappedArrayDestroy(_process; array: Handle) {
        destroy_and_forget(array)
    }

    fn cuMipmappedArrayGetLevel(_process; level: Out<Handle>, array: Handle, which: u32) {
        let array_levels = &array.get()?.levels;
        let is_single = array_levels.is_empty() && which == 0;
        let found = if is_single { Some(array) } else { array_levels.get(which as usize).copied() };
        level.set(found.ok_or(Code::InvalidValue)?)
    }

    fn cuMipmappedArrayGetMemoryRequirements(process; answer: Out<Requirements>, array: Handle, device: i32) {
        process.device(device)?;
        requirements(answer, array)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_size_is_computed() {
        let shape = Shape { width: 64, height: 32, depth: 0, format: 0x20, channels: 4, flags: 0 };
        assert_eq!(shape.size(), Ok(64 * 32 * 16));
        assert_eq!(Shape { depth: 3, format: 1, channels: 1, ..shape }.size(), Ok(64 * 32 * 3));
        assert_eq!(Shape { height: 0, ..shape }.size(), Ok(64 * 16));
        assert_eq!(Shape { channels: 3, ..shape }.size(), Err(Code::InvalidValue));
        assert_eq!(Shape { width: 0, ..shape }.size(), Err(Code::InvalidValue));
        assert_eq!(Shape { width: u64::MAX, ..shape }.size(), Err(Code::InvalidValue));
        assert_eq!(shape.next_level().size(), Ok(32 * 16 * 16));
    }
}
