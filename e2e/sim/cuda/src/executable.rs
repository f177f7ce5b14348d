//! Executable graphs: launches of the whole.
//!
//! One runs as long as its longest chain of kernels. A device keeps what its graphs have had in a pool of their own
//! until it is trimmed.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::argument::Out;
use crate::code::Code;
use crate::context::{self, Context};
use crate::frame::{Outcome, entry};
use crate::graph::{Graph, Node, Task};
use crate::handle::{Handle, Object};
use crate::memory::Payer;
use crate::process::Process;
use crate::rules::rules;
use crate::steps::{self, Step};
use crate::stream::Stream;

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`.
const AUTO_FREE: u64 = 1;
/// `CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD`.
const UPLOAD: u64 = 2;

/// An executable graph.
pub(crate) struct Executable {
    context: &'static Context,
    flags: u64,
    plan: Mutex<Plan>,
}

impl Object for Executable {
    const MAGIC: u64 = 0x6578_6563_5f6c_6976;
}

/// What a launch does.
pub(crate) struct Plan {
    pub(crate) steps: Vec<Step>,
    time: u64,
    allocations: Vec<(u64, u64)>,
    frees: Vec<u64>,
}

impl Plan {
    pub(crate) fn of(steps: Vec<Step>) -> Outcome<Self> {
        let (mut allocations, mut frees) = (Vec::new(), Vec::new());
        steps::each(&steps, &mut |task| match task {
            Task::Allocate { address, size, .. } => allocations.push((address, size)),
            Task::Free(address) => frees.push(address),
            Task::Kernel(_) | Task::Moment(_) | Task::Child(_) => {}
        });
        Ok(Self { time: steps::length(&steps)?, steps, allocations, frees })
    }

    fn addresses(&self) -> impl Iterator<Item = u64> {
        self.allocations.iter().map(|(address, _)| *address)
    }

    /// Takes its addresses but for those that the executable graph has by the plan `before`. False: another one has
    /// one of them, and none is taken.
    pub(crate) fn claim(&self, process: &Process, before: Option<&Self>) -> bool {
        let had: Vec<u64> = before.into_iter().flat_map(Self::addresses).collect();
        let mut claimed = Vec::new();
        for address in self.addresses().filter(|address| !had.contains(address)) {
            if !process.memory.claim(address) {
                claimed.into_iter().for_each(|address| process.memory.unclaim(address));
                return false;
            }
            claimed.push(address);
        }
        true
    }

    /// Leaves them but for those that the plan `after` has.
    pub(crate) fn unclaim(&self, process: &Process, after: Option<&Self>) {
        let has: Vec<u64> = after.into_iter().flat_map(Self::addresses).collect();
        self.addresses()
            .filter(|address| !has.contains(address))
            .for_each(|address| process.memory.unclaim(address));
    }

    /// Makes its memory be there; all of it or, if it does not fit, none.
    fn allocate(&self, process: &Process) -> Outcome {
        let mut made: Vec<u64> = Vec::new();
        for (address, size) in &self.allocations {
            let live = process.memory.with(*address, |block| match &mut block.payer {
                Payer::Graph { pool, live, .. } if !*live => {
                    *live = true;
                    Ok(*pool)
                }
                _ => Err(Code::InvalidValue),
            });
            let taken = live.unwrap_or(Err(Code::InvalidValue)).and_then(|pool| {
                pool.get()?.take(*size).inspect_err(|_| {
                    let _ = process.memory.with(*address, |block| {
                        if let Payer::Graph { live, .. } = &mut block.payer {
                            *live = false;
                        }
                    });
                })
            });
            if let Err(code) = taken {
                made.into_iter().for_each(|address| free(process, address));
                return Err(code);
            }
            made.push(*address);
        }
        Ok(())
    }

    /// Has the device's pool keep what the first launch will take.
    fn upload(&self, process: &Process) -> Outcome {
        self.allocate(process)?;
        self.addresses().for_each(|address| free(process, address));
        Ok(())
    }

    fn launch(&self, process: &'static Process, stream: &'static Stream, flags: u64) -> Outcome {
        if flags & AUTO_FREE != 0 {
            self.addresses().for_each(|address| free(process, address));
        }
        self.allocate(process)?;
        self.frees.iter().for_each(|address| free(process, *address));
        if !stream.capture_work(self.time) {
            stream.submit(rules().map_or(self.time, |rules| rules.vary(self.time)), true);
        }
        Ok(())
    }
}

fn free(process: &Process, address: u64) {
    // The program may have freed it already.
    let sort = |payer: &Payer| matches!(payer, Payer::Graph { .. } | Payer::Pool(_));
    let _ = process.memory.free(address, |block| sort(&block.payer));
}

impl Executable {
    pub(crate) fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A graph with memory nodes can be launched by one executable graph at a time.
fn instantiate(process: &Process, graph: Handle<Graph>, flags: u64) -> Outcome<Handle<Executable>> {
    let context = context::current()?;
    let plan = Plan::of(graph.get()?.steps()?)?;
    if !plan.claim(process, None) {
        return Err(Code::NotSupported);
    }
    Ok(Handle::new(Executable { context, flags, plan: Mutex::new(plan) }))
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
        process; executable: Out<Handle<Executable>>, graph: Handle<Graph>, _failed: Out<Handle<Node>>, _log: Out<u8>,
        _length: u64,
    ) {
        executable.check()?;
        executable.set(instantiate(process, graph, 0)?)
    }

    fn cuGraphInstantiate_v2(
        process; executable: Out<Handle<Executable>>, graph: Handle<Graph>, _failed: Out<Handle<Node>>, _log: Out<u8>,
        _length: u64,
    ) {
        executable.check()?;
        executable.set(instantiate(process, graph, 0)?)
    }

    fn cuGraphInstantiateWithFlags(process; executable: Out<Handle<Executable>>, graph: Handle<Graph>, flags: u64) {
        executable.check()?;
        executable.set(instantiate(process, graph, flags)?)
    }

    fn cuGraphInstantiateWithParams | cuGraphInstantiateWithParams_ptsz(
        process, own; executable: Out<Handle<Executable>>, graph: Handle<Graph>, parameters: Out<Instantiation>,
    ) {
        executable.check()?;
        let given = parameters.get()?;
        let made = instantiate(process, graph, given.flags & !UPLOAD)?;
        if given.flags & UPLOAD != 0 {
            Stream::of(given.stream, own)?;
            made.get()?.plan().upload(process)?;
        }
        executable.set(made)?;
        parameters.set(Instantiation { failed: Handle::NULL, result: 0, ..given })
    }

    fn cuGraphExecGetFlags(_process; executable: Handle<Executable>, flags: Out<u64>) {
        flags.set(executable.get()?.flags)
    }

    fn cuGraphExecDestroy(process; executable: Handle<Executable>) {
        executable.end()?.plan().unclaim(process, None);
        Ok(())
    }

    fn cuGraphUpload | cuGraphUpload_ptsz(process, own; executable: Handle<Executable>, stream: Handle<Stream>) {
        let executable = executable.get()?;
        Stream::of(stream, own)?;
        executable.plan().upload(process)
    }

    fn cuGraphLaunch | cuGraphLaunch_ptsz(process, own; executable: Handle<Executable>, stream: Handle<Stream>) {
        let (executable, stream) = (executable.get()?, Stream::of(stream, own)?);
        if !std::ptr::eq(executable.context.device, stream.context.device) {
            return Err(Code::InvalidValue);
        }
        executable.plan().launch(process, stream, executable.flags)
    }
}
