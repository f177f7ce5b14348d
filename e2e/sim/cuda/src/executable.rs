//! Executable graphs, and their launches.
//!
//! A launch takes as long as the longest chain of kernels. A device keeps the memory of its graphs
//! in a separate pool until it is trimmed. An update pairs the nodes of two graphs by the order in
//! which they were created: they must have the same types, and memory nodes take the new sizes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::argument::Out;
use crate::code::{Code, Outcome};
use crate::frame::entry;
use crate::graph_objects::{Graph, Node, Step, Task};
use crate::handle::{Handle, Object};
use crate::node::task;
use crate::objects::{Context, Payer, Process, Stream, current_context};
use crate::rules::rules;

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

/// The work of a launch.
pub(crate) struct Plan {
    pub(crate) steps: Vec<Step>,
    time: u64,
    allocations: Vec<(u64, u64)>,
    frees: Vec<u64>,
}

impl Plan {
    pub(crate) fn of(steps: Vec<Step>) -> Outcome<Self> {
        let (mut allocations, mut frees) = (Vec::new(), Vec::new());
        each(&steps, &mut |task| match task {
            Task::Allocate { address, size, .. } => allocations.push((address, size)),
            Task::Free(address) => frees.push(address),
            Task::Kernel(_) | Task::Moment(_) | Task::Child(_) => {}
        });
        Ok(Self { time: length(&steps)?, steps, allocations, frees })
    }

    fn addresses(&self) -> impl Iterator<Item = u64> {
        self.allocations.iter().map(|(address, _)| *address)
    }

    /// Claims its addresses, except those that the executable graph has by the plan `before`.
    /// Returns false, and claims none, if another executable graph has one of them.
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

    /// Releases its addresses, except those that the plan `after` has.
    pub(crate) fn unclaim(&self, process: &Process, after: Option<&Self>) {
        let has: Vec<u64> = after.into_iter().flat_map(Self::addresses).collect();
        self.addresses()
            .filter(|address| !has.contains(address))
            .for_each(|address| process.memory.unclaim(address));
    }

    /// Allocates its memory: all of it, or none if it does not fit.
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

    /// Makes the device's pool keep the memory of the first launch.
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
            stream.submit(rules().map_or(self.time, |rules| rules.vary(self.time)), true, None);
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

/// A graph with memory nodes can have one executable graph at a time.
fn instantiate(process: &Process, graph: Handle<Graph>, flags: u64) -> Outcome<Handle<Executable>> {
    let context = current_context()?;
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
        process; executable: Out<Handle<Executable>>, graph: Handle<Graph>, _failed: Out<Handle<Node>>,
        _log: Out<u8>,
        _length: u64,
    ) {
        executable.check()?;
        executable.set(instantiate(process, graph, 0)?)
    }

    fn cuGraphInstantiate_v2(
        process; executable: Out<Handle<Executable>>, graph: Handle<Graph>, _failed: Out<Handle<Node>>,
        _log: Out<u8>,
        _length: u64,
    ) {
        executable.check()?;
        executable.set(instantiate(process, graph, 0)?)
    }

    fn cuGraphInstantiateWithFlags(
        process; executable: Out<Handle<Executable>>, graph: Handle<Graph>, flags: u64,
    ) {
        executable.check()?;
        executable.set(instantiate(process, graph, flags)?)
    }

    fn cuGraphInstantiateWithParams | cuGraphInstantiateWithParams_ptsz(
        process, own; executable: Out<Handle<Executable>>, graph: Handle<Graph>, parameters:
        Out<Instantiation>,
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

    fn cuGraphUpload | cuGraphUpload_ptsz(
        process, own; executable: Handle<Executable>, stream: Handle<Stream>,
    ) {
        let executable = executable.get()?;
        Stream::of(stream, own)?;
        executable.plan().upload(process)
    }

    fn cuGraphLaunch | cuGraphLaunch_ptsz(
        process, own; executable: Handle<Executable>, stream: Handle<Stream>,
    ) {
        let (executable, stream) = (executable.get()?, Stream::of(stream, own)?);
        if !std::ptr::eq(executable.context.device, stream.context.device) {
            return Err(Code::InvalidValue);
        }
        executable.plan().launch(process, stream, executable.flags)
    }
}

/// `CUgraphExecUpdateResult`: the reason for a refused update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Difference {
    Topology = 2,
    Kind = 3,
    NotSupported = 6,
}

/// The nanoseconds of the longest chain.
pub(crate) fn length(steps: &[Step]) -> Outcome<u64> {
    let mut ends: Vec<Option<u64>> = vec![None; steps.len()];
    loop {
        let before = ends.iter().flatten().count();
        for (at, step) in steps.iter().enumerate() {
            let ready = |last: u64, need: &usize| ends.get(*need).copied().flatten().map(|end| end.max(last));
            if let Some(ready) = step.needs.iter().try_fold(0, ready) {
                let time = match step.task {
                    Task::Kernel(time) => time,
                    Task::Child(_) => length(&step.within)?,
                    Task::Moment(_) | Task::Allocate { .. } | Task::Free(_) => 0,
                };
                ends[at] = Some(ready + time);
            }
        }
        // Nodes may depend on nodes that were created later.
        match ends.iter().flatten().count() {
            all if all == steps.len() => return Ok(ends.into_iter().flatten().max().unwrap_or(0)),
            // A cycle.
            same if same == before => return Err(Code::InvalidValue),
            _ => {}
        }
    }
}

/// Calls `visit` with each task, also those of child graphs.
pub(crate) fn each(steps: &[Step], visit: &mut impl FnMut(Task)) {
    for step in steps {
        visit(step.task);
        each(&step.within, visit);
    }
}

/// The reason why an executable graph with the steps `old` cannot change to `new`, and the node at
/// which they differ.
pub(crate) fn differ(old: &[Step], new: &[Step]) -> Option<(Difference, Handle<Node>)> {
    if old.len() != new.len() {
        return Some((Difference::Topology, Handle::NULL));
    }
    old.iter().zip(new).find_map(|(old, new)| match () {
        () if old.task.kind() != new.task.kind() => Some((Difference::Kind, new.node)),
        () if old.needs != new.needs => Some((Difference::Topology, new.node)),
        () => differ(&old.within, &new.within),
    })
}

/// `CUgraphExecUpdateResultInfo`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Report {
    result: u32,
    node: Handle<Node>,
    from: Handle<Node>,
}

/// The result and the report of an update.
fn report(refused: Option<(Difference, Handle<Node>)>) -> (Outcome, Report) {
    let (result, node) = refused.map_or((0, Handle::NULL), |(why, node)| (why as u32, node));
    let outcome = if refused.is_none() { Ok(()) } else { Err(Code::GraphExecUpdateFailure) };
    (outcome, Report { result, node, from: Handle::NULL })
}

/// Replaces the steps of an executable graph, or returns the reason why that is not possible.
fn update(
    process: &Process,
    executable: Handle<Executable>,
    steps: Vec<Step>,
) -> Outcome<Option<(Difference, Handle<Node>)>> {
    let mut plan = executable.get()?.plan();
    if let Some(refused) = differ(&plan.steps, &steps) {
        return Ok(Some(refused));
    }
    let new = Plan::of(steps)?;
    if !new.claim(process, Some(&plan)) {
        return Ok(Some((Difference::NotSupported, Handle::NULL)));
    }
    plan.unclaim(process, Some(&new));
    *plan = new;
    Ok(None)
}

/// The same for a single changed node.
fn change(process: &Process, executable: Handle<Executable>, node: Handle<Node>, task: Task) -> Outcome {
    let mut steps = executable.get()?.plan().steps.clone();
    let step = steps.iter_mut().find(|step| step.node == node).ok_or(Code::InvalidValue)?;
    if step.task.kind() != task.kind() {
        return Err(Code::InvalidValue);
    }
    if let Task::Child(graph) = task {
        let within = graph.get()?.steps()?;
        if differ(&step.within, &within).is_some() {
            return Err(Code::InvalidValue);
        }
        step.within = within;
    }
    step.task = task;
    match update(process, executable, steps)? {
        None => Ok(()),
        Some(_) => Err(Code::InvalidValue),
    }
}

entry! {
    fn cuGraphExecUpdate(
        process; executable: Handle<Executable>, graph: Handle<Graph>, node: Out<Handle<Node>>, result:
        Out<u32>,
    ) {
        let (outcome, report) = report(update(process, executable, graph.get()?.steps()?)?);
        node.offer(report.node);
        result.offer(report.result);
        outcome
    }

    fn cuGraphExecUpdate_v2(
        process; executable: Handle<Executable>, graph: Handle<Graph>, result: Out<Report>,
    ) {
        let (outcome, report) = report(update(process, executable, graph.get()?.steps()?)?);
        result.offer(report);
        outcome
    }

    fn cuGraphExecChildGraphNodeSetParams(
        process; executable: Handle<Executable>, node: Handle<Node>, child: Handle<Graph>,
    ) {
        change(process, executable, node, Task::Child(child))
    }

    fn cuGraphExecNodeSetParams(
        process; executable: Handle<Executable>, node: Handle<Node>, parameters: Out<u8>,
    ) {
        change(process, executable, node, task(parameters)?)
    }
}
