//! Kernel launches: a kernel takes time on a stream.

use std::ffi::c_void;

use crate::argument::In;
use crate::code::{Code, Outcome};
use crate::frame::entry;
use crate::handle::Handle;
use crate::module::Function;
use crate::objects::Stream;
use crate::rules::rules;

/// Three sides each of grid and block.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
}

impl Shape {
    pub(crate) fn check(self) -> Outcome {
        let threads: u64 = self.block.iter().map(|side| u64::from(*side)).product();
        let some = self.grid.iter().chain(&self.block).all(|side| *side > 0);
        if some && threads <= 1024 { Ok(()) } else { Err(Code::InvalidValue) }
    }

    /// Whether it has a block for each multiprocessor, so that no other kernel fits beside it.
    pub(crate) fn fills(self, multiprocessors: u32) -> bool {
        let blocks = self.grid.iter().fold(1_u64, |blocks, side| blocks.saturating_mul((*side).into()));
        blocks >= u64::from(multiprocessors)
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Configuration {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle<Stream>,
    attributes: *const c_void,
    count: u32,
}

const _: () = assert!(size_of::<Configuration>() == 56);

#[inline]
fn launch(
    function: Handle<Function>,
    shape: Shape,
    stream: Handle<Stream>,
    own: bool,
    parameters: In<In<u64>>,
) -> Outcome {
    let function = function.get()?;
    shape.check()?;
    let stream = Stream::of(stream, own)?;
    let time = function.time(parameters)?;
    let time = rules().map_or(time, |rules| rules.vary(time));
    if !stream.capture_work(time) {
        let large = shape.fills(stream.context.device.multiprocessors);
        stream.submit(time, large, function.meeting(parameters)?);
    }
    Ok(())
}

entry! {
    fn cuLaunchKernel | cuLaunchKernel_ptsz(
        _process, own; function: Handle<Function>, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32,
        block_y: u32,
        block_z: u32, _shared: u32, stream: Handle<Stream>, parameters: In<In<u64>>, _extra: *const c_void,
    ) {
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z] };
        launch(function, shape, stream, own, parameters)
    }

    fn cuLaunchKernelEx | cuLaunchKernelEx_ptsz(
        _process, own; configuration: In<Configuration>, function: Handle<Function>, parameters: In<In<u64>>,
        _extra: *const c_void,
    ) {
        let Configuration { grid, block, stream, .. } = configuration.get()?;
        launch(function, Shape { grid, block }, stream, own, parameters)
    }

    fn cuLaunchCooperativeKernel | cuLaunchCooperativeKernel_ptsz(
        _process, own; function: Handle<Function>, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32,
        block_y: u32,
        block_z: u32, _shared: u32, stream: Handle<Stream>, parameters: In<In<u64>>,
    ) {
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z] };
        launch(function, shape, stream, own, parameters)
    }

    fn cuLaunch(_process; function: Handle<Function>) {
        launch(function, Shape { grid: [1; 3], block: [1; 3] }, Handle::NULL, false, In::NULL)
    }

    fn cuLaunchGrid(_process; function: Handle<Function>, width: u32, height: u32) {
        launch(function, Shape { grid: [width, height, 1], block: [1; 3] }, Handle::NULL, false, In::NULL)
    }

    fn cuLaunchGridAsync(
        _process; function: Handle<Function>, width: u32, height: u32, stream: Handle<Stream>,
    ) {
        launch(function, Shape { grid: [width, height, 1], block: [1; 3] }, stream, false, In::NULL)
    }
}
