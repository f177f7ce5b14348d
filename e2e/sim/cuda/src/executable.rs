//! Executable graphs: launches of the whole.
//!
//! One runs as long as its longest chain of kernels. A device keeps what its graphs have had in a pool of their own
//! until it is trimmed.

use crate::argument::Out;
use crate::code::Code;
use crate::context::{self, Context};
use crate::frame::{Outcome, entry};
use crate::graph::{Graph, Node, Task};
use crate::handle::{Handle, Object};
use crate::memory::Payer;
use crate::process::Process;
use crate::rules::rules;
use crate::stream::Stream;

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`.
const AUTO_FREE: u64 = 1;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`.
const UPLOAD: u64 = 2;

/// An executable graph: what a launch of it does.
pub(crate) struct Executable {
    context: &'static Context,
    flags: u64,
    time: u64,
    allocations: Vec<(u64, u64)>,
    frees: Vec<u64>,
}

impl Object for Executable {
    const MAGIC: u64 = 0x6578_6563_5f6c_6976;
}

fn instantiate(graph: Handle<Graph>, flags: u64) -> Outcome<Handle<Executable>> {
    let context = context::current()?;
    let mut tasks = Vec::new();
    let time = graph.get()?.plan(&mut tasks)?;
    let allocation = |task: &Task| match task {
        Task::Allocate { address, size, .. } => Some((*address, *size)),
        _ => None,
    };
    let freed = |task: &Task| if let Task::Free(address) = task { Some(*address) } else { None };
    let allocations = tasks.iter().filter_map(allocation).collect();
    let frees = tasks.iter().filter_map(freed).collect();
    Ok(Handle::new(Executable { context, flags, time, allocations, frees }))
}

impl Executable {
    /// Makes its memory be there; all of it or, if it does not fit, none.
    fn allocate(&self, process: &Process) -> Outcome {
        let mut made: Vec<u64> = Vec::new();
        for (address, size) in &self.allocations {
            let live = process.memory.with(*address, |block| match &mut block.payer {
                Payer::Graph { pool, live } if !*live => {
                    *live = true;
                    Ok(*pool)
                }
                _ => Err(Code::InvalidValue),
            });
            let taken = live.unwrap_or(Err(Code::InvalidValue)).and_then(|pool| {
                pool.get()?.take(*size).inspect_err(|_| {
                    let _ = process.memory.with(*address, |block| {
                        block.payer = Payer::Graph { pool, live: false };
                    });
                })
            });
            if let Err(code) = taken {
                made.into_iter().for_each(|address| self.free(process, address));
                return Err(code);
            }
            made.push(*address);
        }
        Ok(())
    }

    /// Has the device's pool keep what the first launch will take.
    fn upload(&self, process: &Process) -> Outcome {
        self.allocate(process)?;
        self.allocations.iter().for_each(|(address, _)| self.free(process, *address));
        Ok(())
    }

    fn free(&self, process: &Process, address: u64) {
        // The program may have freed it already.
        let sort = |payer: &Payer| matches!(payer, Payer::Graph { .. } | Payer::Pool(_));
        let _ = process.memory.free(address, |block| sort(&block.payer));
    }

    fn launch(&self, process: &'static Process, stream: &'static Stream) -> Outcome {
        if self.flags & AUTO_FREE != 0 {
            self.allocations.iter().for_each(|(address, _)| self.free(process, *address));
        }
        self.allocate(process)?;
        self.frees.iter().for_each(|address| self.free(process, *address));
        if !stream.capture_work(self.time) {
            stream.submit(rules().map_or(self.time, |rules| rules.vary(self.time)), true);
        }
        Ok(())
    }
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Instantiation {
    flags: u64,
    stream: Handle<Stream>,
    failed: Handle<Node>,
    result: u32,
}

entry! {
    fn cuGraphInstantiate(
        _process; executable: Out<Handle<Executable>>, graph: Handle<Graph>, _failed: Out<Handle<Node>>, _log: Out<u8>,
        _length: u64,
    ) {
        executable.check()?;
        executable.set(instantiate(graph, 0)?)
    }

    fn cuGraphInstantiate_v2(
        _process; executable: Out<Handle<Executable>>, graph: Handle<Graph>, _failed: Out<Handle<Node>>, _log: Out<u8>,
        _length: u64,
    ) {
        executable.check()?;
        executable.set(instantiate(graph, 0)?)
    }

    fn cuGraphInstantiateWithFlags(_process; executable: Out<Handle<Executable>>, graph: Handle<Graph>, flags: u64) {
        executable.check()?;
        executable.set(instantiate(graph, flags)?)
    }

    fn cuGraphInstantiateWithParams | cuGraphInstantiateWithParams_ptsz(
        process, own; executable: Out<Handle<Executable>>, graph: Handle<Graph>, parameters: Out<Instantiation>,
    ) {
        executable.check()?;
        let given = parameters.get()?;
        let made = instantiate(graph, given.flags & !UPLOAD)?;
        if given.flags & UPLOAD != 0 {
            Stream::of(given.stream, own)?;
            made.get()?.upload(process)?;
        }
        executable.set(made)?;
        parameters.set(Instantiation { failed: Handle::NULL, result: 0, ..given })
    }

    fn cuGraphExecGetFlags(_process; executable: Handle<Executable>, flags: Out<u64>) {
        flags.set(executable.get()?.flags)
    }

    fn cuGraphExecDestroy(_process; executable: Handle<Executable>) {
        executable.end().map(drop)
    }

    fn cuGraphUpload | cuGraphUpload_ptsz(process, own; executable: Handle<Executable>, stream: Handle<Stream>) {
        let executable = executable.get()?;
        Stream::of(stream, own)?;
        executable.upload(process)
    }

    fn cuGraphLaunch | cuGraphLaunch_ptsz(process, own; executable: Handle<Executable>, stream: Handle<Stream>) {
        let (executable, stream) = (executable.get()?, Stream::of(stream, own)?);
        if !std::ptr::eq(executable.context.device, stream.context.device) {
            return Err(Code::InvalidValue);
        }
        executable.launch(process, stream)
    }
}
