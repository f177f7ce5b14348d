//! Graphs: nodes in order, memory that belongs to them, and launches of the whole.
//!
//! An executable graph runs as long as its longest chain of kernels. Memory of allocation nodes has its address from the
//! day the node is made, and is there from a launch until it is freed, by a node or by the program; a device keeps what
//! its graphs have had in a pool of their own until it is trimmed.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::argument::{In, Out};
use crate::code::Code;
use crate::content::Content;
use crate::context::{self, Context};
use crate::copy::Copy3;
use crate::device::read_all;
use crate::frame::{Outcome, entry};
use crate::handle::{Handle, Object};
use crate::launch::Shape;
use crate::memory::Payer;
use crate::module::Function;
use crate::process::Process;
use crate::rules::rules;
use crate::stream::{Event, Stream};

/// `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH`.
const AUTO_FREE: u64 = 1;

/// A graph.
#[derive(Default)]
pub(crate) struct Graph {
    nodes: Mutex<Vec<Handle<Node>>>,
}

impl Object for Graph {
    const MAGIC: u64 = 0x6772_6170_5f6c_6976;
}

/// A node of a graph.
pub(crate) struct Node {
    graph: Handle<Graph>,
    task: Task,
    needs: Mutex<Vec<Handle<Node>>>,
}

impl Object for Node {
    const MAGIC: u64 = 0x6e6f_6465_5f6c_6976;
}

/// What a node does, with its `CUgraphNodeType`.
#[derive(Clone, Copy)]
enum Task {
    /// For so many nanoseconds.
    Kernel(u64),
    /// Of a type that takes no time here.
    Moment(u32),
    Allocate {
        address: u64,
        size: u64,
    },
    Free(u64),
    Child(Handle<Graph>),
}

impl Task {
    const fn kind(self) -> u32 {
        match self {
            Self::Kernel(_) => 0,
            Self::Moment(kind) => kind,
            Self::Allocate { .. } => 10,
            Self::Free(_) => 11,
            Self::Child(_) => 4,
        }
    }
}

const COPY: u32 = 1;
const FILL: u32 = 2;
const HOST: u32 = 3;
const EMPTY: u32 = 5;
const WAIT: u32 = 6;
const RECORD: u32 = 7;

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

impl Graph {
    fn nodes(&self) -> MutexGuard<'_, Vec<Handle<Node>>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nanoseconds of its longest chain, and its tasks with those of its children.
    fn plan(&self, tasks: &mut Vec<Task>) -> Outcome<u64> {
        let nodes = self.nodes().clone();
        let mut ends: HashMap<usize, u64> = HashMap::new();
        // Nodes may need nodes that were made later: as often as there are nodes is enough.
        let mut left = nodes;
        while !left.is_empty() {
            let before = left.len();
            let mut later = Vec::new();
            for handle in left {
                let node = handle.get()?;
                let needs = node.needs.lock().unwrap_or_else(PoisonError::into_inner);
                let ready: Option<u64> = needs
                    .iter()
                    .try_fold(0, |last, need| Some(ends.get(&need.number())?.max(&last).to_owned()));
                let Some(ready) = ready else {
                    later.push(handle);
                    continue;
                };
                let time = match node.task {
                    Task::Kernel(time) => time,
                    Task::Child(graph) => graph.get()?.plan(tasks)?,
                    Task::Moment(_) | Task::Allocate { .. } | Task::Free(_) => 0,
                };
                tasks.push(node.task);
                ends.insert(handle.number(), ready + time);
            }
            if later.len() == before {
                // A circle.
                return Err(Code::InvalidValue);
            }
            left = later;
        }
        Ok(ends.values().copied().max().unwrap_or(0))
    }
}

fn add(graph: Handle<Graph>, needs: &[Handle<Node>], task: Task) -> Outcome<Handle<Node>> {
    let mut nodes = graph.get()?.nodes();
    if needs.iter().any(|need| !need.get().is_ok_and(|node| node.graph == graph)) {
        return Err(Code::InvalidValue);
    }
    let node = Handle::new(Node { graph, task, needs: Mutex::new(needs.to_vec()) });
    nodes.push(node);
    Ok(node)
}

/// An address for a graph's memory, which is not there yet.
fn plan_memory(process: &'static Process, context: &'static Context, size: u64) -> Outcome<Task> {
    if size == 0 {
        return Err(Code::InvalidValue);
    }
    let payer = Payer::Graph { pool: context.device.graph_pool(process), live: false };
    let address = process.memory.add(context, size, payer, 0, Content::NONE)?;
    Ok(Task::Allocate { address, size })
}

/// The context that memory on a device is made for: the current one, if it is of that device.
fn context_on(process: &Process, device: Option<i32>) -> Outcome<&'static Context> {
    let context = context::current()?;
    let device = process.device(device.ok_or(Code::NotSupported)?)?;
    if std::ptr::eq(context.device, device) { Ok(context) } else { Err(Code::InvalidValue) }
}

fn destroy(process: &Process, graph: Handle<Graph>) -> Outcome {
    let graph = graph.end()?;
    for node in graph.nodes().drain(..) {
        if let Ok(Node { task: Task::Allocate { address, .. }, .. }) = node.end() {
            process.memory.forget(*address);
        }
    }
    Ok(())
}

fn instantiate(graph: Handle<Graph>, flags: u64) -> Outcome<Handle<Executable>> {
    let context = context::current()?;
    let mut tasks = Vec::new();
    let time = graph.get()?.plan(&mut tasks)?;
    let allocation = |task: &Task| match task {
        Task::Allocate { address, size } => Some((*address, *size)),
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

/// What a stream notes instead of doing it: a chain of nodes.
pub(crate) struct Capture {
    id: u64,
    graph: Handle<Graph>,
    last: Option<Handle<Node>>,
}

impl Capture {
    pub(crate) fn new(id: u64) -> Self {
        Self { id, graph: Handle::new(Graph::default()), last: None }
    }

    pub(crate) const fn id(&self) -> u64 {
        self.id
    }

    pub(crate) const fn graph(&self) -> Handle<Graph> {
        self.graph
    }

    fn append(&mut self, task: Task) {
        let needs: Vec<Handle<Node>> = self.last.into_iter().collect();
        // The graph lives as long as the capture, unless the program destroys it.
        self.last = add(self.graph, &needs, task).ok().or(self.last);
    }

    pub(crate) fn work(&mut self, time: u64) {
        self.append(if time == 0 { Task::Moment(EMPTY) } else { Task::Kernel(time) });
    }

    pub(crate) fn free(&mut self, address: u64) {
        self.append(Task::Free(address));
    }

    pub(crate) fn allocation(
        &mut self,
        process: &'static Process,
        context: &'static Context,
        size: u64,
    ) -> Outcome<u64> {
        let task = plan_memory(process, context, size)?;
        self.append(task);
        if let Task::Allocate { address, .. } = task { Ok(address) } else { Err(Code::Unknown) }
    }
}

/// `CUDA_KERNEL_NODE_PARAMS`, both versions up to what the first has.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct KernelNode {
    function: Handle<Function>,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    parameters: In<In<u64>>,
    extra: usize,
}

impl KernelNode {
    fn task(self, kernel: Handle<Function>) -> Outcome<Task> {
        let function = if self.function.is_null() { kernel } else { self.function };
        Shape { grid: self.grid, block: self.block }.check()?;
        Ok(Task::Kernel(function.get()?.time(self.parameters)?))
    }
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct KernelNode2 {
    first: KernelNode,
    kernel: Handle<Function>,
    context: context::Handle,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocationNode {
    pool: crate::pool::Properties,
    access: usize,
    count: u64,
    size: u64,
    address: u64,
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

const _: () = assert!(size_of::<KernelNode>() == 56 && size_of::<KernelNode2>() == 72);
const _: () = assert!(size_of::<AllocationNode>() == 120);

fn add_allocation(
    process: &'static Process,
    graph: Handle<Graph>,
    needs: &[Handle<Node>],
    parameters: Out<AllocationNode>,
) -> Outcome<Handle<Node>> {
    let given = parameters.get()?;
    let task = plan_memory(process, context_on(process, given.pool.device())?, given.size)?;
    let Task::Allocate { address, .. } = task else { return Err(Code::Unknown) };
    let node = add(graph, needs, task).inspect_err(|_| process.memory.forget(address))?;
    parameters.set(AllocationNode { address, ..given })?;
    Ok(node)
}

/// `CUgraphNodeParams`: the type, and at 16 bytes what the type needs.
fn add_any(
    process: &'static Process,
    graph: Handle<Graph>,
    needs: &[Handle<Node>],
    parameters: Out<u8>,
) -> Outcome<Handle<Node>> {
    let inside = parameters.skip(16)?;
    let kind = parameters.cast::<u32>().get()?;
    let task = match kind {
        0 => {
            let KernelNode2 { first, kernel, .. } = inside.cast::<KernelNode2>().get()?;
            first.task(kernel)?
        }
        4 => Task::Child(inside.cast::<Handle<Graph>>().get()?),
        10 => return add_allocation(process, graph, needs, inside.cast()),
        11 => Task::Free(inside.cast::<u64>().get()?),
        COPY..=HOST | EMPTY..=RECORD => Task::Moment(kind),
        _ => return Err(Code::NotSupported),
    };
    add(graph, needs, task)
}

fn needs(list: In<Handle<Node>>, count: u64) -> Outcome<Vec<Handle<Node>>> {
    read_all(list, count as usize)
}

/// Nodes as the caller asks for them: how many, and as many as fit.
fn list(found: &[Handle<Node>], nodes: Out<Handle<Node>>, count: Out<u64>) -> Outcome {
    if !nodes.is_null() {
        let room = count.get()? as usize;
        nodes.fill(room, found.iter().copied().chain(std::iter::repeat(Handle::NULL)))?;
        return count.set(found.len().min(room) as u64);
    }
    count.set(found.len() as u64)
}

fn edges(graph: Handle<Graph>, from: Out<Handle<Node>>, to: Out<Handle<Node>>, count: Out<u64>) -> Outcome {
    let mut found = Vec::new();
    for node in graph.get()?.nodes().iter() {
        let needs = node.get()?.needs.lock().unwrap_or_else(PoisonError::into_inner);
        found.extend(needs.iter().map(|need| (*need, *node)));
    }
    if from.is_null() || to.is_null() {
        return count.set(found.len() as u64);
    }
    let room = count.get()? as usize;
    from.fill(room, found.iter().map(|(from, _)| *from))?;
    to.fill(room, found.iter().map(|(_, to)| *to))?;
    count.set(found.len().min(room) as u64)
}

fn connect(from: In<Handle<Node>>, to: In<Handle<Node>>, count: u64, keep: bool) -> Outcome {
    for (from, to) in needs(from, count)?.into_iter().zip(needs(to, count)?) {
        let mut known = to.get()?.needs.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|need| *need != from);
        if keep {
            from.get()?;
            known.push(from);
        }
    }
    Ok(())
}

fn dependencies(node: Handle<Node>, nodes: Out<Handle<Node>>, count: Out<u64>) -> Outcome {
    let found = node.get()?.needs.lock().unwrap_or_else(PoisonError::into_inner).clone();
    list(&found, nodes, count)
}

fn dependents(node: Handle<Node>, nodes: Out<Handle<Node>>, count: Out<u64>) -> Outcome {
    let graph = node.get()?.graph.get()?.nodes().clone();
    let needs_it = |other: &&Handle<Node>| {
        let needs = other
            .get()
            .map(|other| other.needs.lock().unwrap_or_else(PoisonError::into_inner).contains(&node));
        needs.unwrap_or(false)
    };
    let found: Vec<Handle<Node>> = graph.iter().filter(needs_it).copied().collect();
    list(&found, nodes, count)
}

/// Nodes that take no time here.
macro_rules! moments {
    ($($name:ident: $kind:ident ($($argument:ident: $type:ty),*);)*) => {$(
        entry! {
            fn $name(
                _process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: u64,
                $($argument: $type),*
            ) {
                node.check()?;
                $(let _ = $argument;)*
                node.set(add(graph, &needs(after, count)?, Task::Moment($kind))?)
            }
        }
    )*};
}

moments! {
    cuGraphAddMemcpyNode: COPY (parameters: In<Copy3>, context: context::Handle);
    cuGraphAddMemsetNode: FILL (parameters: In<u64>, context: context::Handle);
    cuGraphAddHostNode: HOST (parameters: In<u64>);
    cuGraphAddEmptyNode: EMPTY ();
    cuGraphAddEventRecordNode: RECORD (event: Handle<Event>);
    cuGraphAddEventWaitNode: WAIT (event: Handle<Event>);
}

entry! {
    fn cuGraphCreate(_process; graph: Out<Handle<Graph>>, flags: u32) {
        graph.check()?;
        if flags != 0 { Err(Code::InvalidValue) } else { graph.set(Handle::new(Graph::default())) }
    }

    fn cuGraphDestroy(process; graph: Handle<Graph>) {
        destroy(process, graph)
    }

    fn cuGraphAddKernelNode(
        _process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: u64,
        parameters: In<KernelNode>,
    ) {
        node.check()?;
        node.set(add(graph, &needs(after, count)?, parameters.get()?.task(Handle::NULL)?)?)
    }

    fn cuGraphAddKernelNode_v2(
        _process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: u64,
        parameters: In<KernelNode2>,
    ) {
        node.check()?;
        let KernelNode2 { first, kernel, .. } = parameters.get()?;
        node.set(add(graph, &needs(after, count)?, first.task(kernel)?)?)
    }

    fn cuGraphAddChildGraphNode(
        _process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: u64,
        child: Handle<Graph>,
    ) {
        node.check()?;
        child.get()?;
        node.set(add(graph, &needs(after, count)?, Task::Child(child))?)
    }

    fn cuGraphAddMemAllocNode(
        process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: u64,
        parameters: Out<AllocationNode>,
    ) {
        node.check()?;
        node.set(add_allocation(process, graph, &needs(after, count)?, parameters)?)
    }

    fn cuGraphAddMemFreeNode(
        process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: u64, address: u64,
    ) {
        node.check()?;
        process.memory.with(address, |_| ()).ok_or(Code::InvalidValue)?;
        node.set(add(graph, &needs(after, count)?, Task::Free(address))?)
    }

    fn cuGraphMemAllocNodeGetParams(_process; node: Handle<Node>, parameters: Out<AllocationNode>) {
        let Task::Allocate { address, size } = node.get()?.task else { return Err(Code::InvalidValue) };
        parameters.set(AllocationNode { size, address, ..parameters.get()? })
    }

    fn cuGraphMemFreeNodeGetParams(_process; node: Handle<Node>, address: Out<u64>) {
        let Task::Free(freed) = node.get()?.task else { return Err(Code::InvalidValue) };
        address.set(freed)
    }

    fn cuGraphAddNode(
        process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: u64, parameters: Out<u8>,
    ) {
        node.check()?;
        node.set(add_any(process, graph, &needs(after, count)?, parameters)?)
    }

    fn cuGraphAddNode_v2(
        process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, _edges: In<u64>, count: u64,
        parameters: Out<u8>,
    ) {
        node.check()?;
        node.set(add_any(process, graph, &needs(after, count)?, parameters)?)
    }

    fn cuGraphAddNode_v3(
        process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, _edges: In<u64>, count: u64,
        parameters: Out<u8>,
    ) {
        node.check()?;
        node.set(add_any(process, graph, &needs(after, count)?, parameters)?)
    }

    fn cuGraphDestroyNode(_process; node: Handle<Node>) {
        let gone = node.get()?;
        if matches!(gone.task, Task::Allocate { .. } | Task::Free(_)) {
            return Err(Code::NotSupported);
        }
        node.end()?;
        let mut nodes = gone.graph.get()?.nodes();
        nodes.retain(|known| *known != node);
        for other in nodes.iter().filter_map(|other| other.get().ok()) {
            other.needs.lock().unwrap_or_else(PoisonError::into_inner).retain(|need| *need != node);
        }
        Ok(())
    }

    fn cuGraphNodeGetType(_process; node: Handle<Node>, kind: Out<u32>) {
        kind.set(node.get()?.task.kind())
    }

    fn cuGraphGetNodes(_process; graph: Handle<Graph>, nodes: Out<Handle<Node>>, count: Out<u64>) {
        let found = graph.get()?.nodes().clone();
        list(&found, nodes, count)
    }

    fn cuGraphGetRootNodes(_process; graph: Handle<Graph>, nodes: Out<Handle<Node>>, count: Out<u64>) {
        let root = |node: &&Handle<Node>| {
            node.get().is_ok_and(|node| node.needs.lock().unwrap_or_else(PoisonError::into_inner).is_empty())
        };
        let found: Vec<Handle<Node>> = graph.get()?.nodes().iter().filter(root).copied().collect();
        list(&found, nodes, count)
    }

    fn cuGraphGetEdges(
        _process; graph: Handle<Graph>, from: Out<Handle<Node>>, to: Out<Handle<Node>>, count: Out<u64>,
    ) {
        edges(graph, from, to, count)
    }

    fn cuGraphGetEdges_v2(
        _process; graph: Handle<Graph>, from: Out<Handle<Node>>, to: Out<Handle<Node>>, _data: Out<u64>, count: Out<u64>,
    ) {
        edges(graph, from, to, count)
    }

    fn cuGraphNodeGetDependencies(_process; node: Handle<Node>, nodes: Out<Handle<Node>>, count: Out<u64>) {
        dependencies(node, nodes, count)
    }

    fn cuGraphNodeGetDependencies_v2(
        _process; node: Handle<Node>, nodes: Out<Handle<Node>>, _data: Out<u64>, count: Out<u64>,
    ) {
        dependencies(node, nodes, count)
    }

    fn cuGraphNodeGetDependentNodes(_process; node: Handle<Node>, nodes: Out<Handle<Node>>, count: Out<u64>) {
        dependents(node, nodes, count)
    }

    fn cuGraphNodeGetDependentNodes_v2(
        _process; node: Handle<Node>, nodes: Out<Handle<Node>>, _data: Out<u64>, count: Out<u64>,
    ) {
        dependents(node, nodes, count)
    }

    fn cuGraphAddDependencies(
        _process; graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, count: u64,
    ) {
        graph.get()?;
        connect(from, to, count, true)
    }

    fn cuGraphAddDependencies_v2(
        _process; graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, _data: In<u64>, count: u64,
    ) {
        graph.get()?;
        connect(from, to, count, true)
    }

    fn cuGraphRemoveDependencies(
        _process; graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, count: u64,
    ) {
        graph.get()?;
        connect(from, to, count, false)
    }

    fn cuGraphRemoveDependencies_v2(
        _process; graph: Handle<Graph>, from: In<Handle<Node>>, to: In<Handle<Node>>, _data: In<u64>, count: u64,
    ) {
        graph.get()?;
        connect(from, to, count, false)
    }

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
        _process, _own; executable: Out<Handle<Executable>>, graph: Handle<Graph>, parameters: Out<Instantiation>,
    ) {
        executable.check()?;
        let given = parameters.get()?;
        executable.set(instantiate(graph, given.flags)?)?;
        parameters.set(Instantiation { failed: Handle::NULL, result: 0, ..given })
    }

    fn cuGraphExecGetFlags(_process; executable: Handle<Executable>, flags: Out<u64>) {
        flags.set(executable.get()?.flags)
    }

    fn cuGraphExecDestroy(_process; executable: Handle<Executable>) {
        executable.end().map(drop)
    }

    fn cuGraphUpload | cuGraphUpload_ptsz(_process, own; executable: Handle<Executable>, stream: Handle<Stream>) {
        executable.get()?;
        Stream::of(stream, own).map(drop)
    }

    fn cuGraphLaunch | cuGraphLaunch_ptsz(process, own; executable: Handle<Executable>, stream: Handle<Stream>) {
        let (executable, stream) = (executable.get()?, Stream::of(stream, own)?);
        if !std::ptr::eq(executable.context.device, stream.context.device) {
            return Err(Code::InvalidValue);
        }
        executable.launch(process, stream)
    }
}
