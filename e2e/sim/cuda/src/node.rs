//! Adds nodes to graphs, by a function for each kind or by `cuGraphAddNode`.

use std::sync::PoisonError;

use crate::argument::{In, Out};
use crate::code::{Code, Outcome};
use crate::copy::Copy3;
use crate::event::Event;
use crate::frame::entry;
use crate::graph::{needs, plan_memory};
use crate::graph_objects::{COPY, EMPTY, FILL, Graph, HOST, Node, RECORD, Task, WAIT, add};
use crate::handle::Handle;
use crate::launch::Shape;
use crate::location::PoolProperties;
use crate::module::Function;
use crate::objects::{Context, ContextHandle, Process, current_context};

/// `CUDA_KERNEL_NODE_PARAMS`; both versions begin with the fields of the first one.
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
    context: ContextHandle,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocationNode {
    pool: PoolProperties,
    access: usize,
    count: u64,
    size: u64,
    address: u64,
}

const _: () = assert!(size_of::<KernelNode>() == 56 && size_of::<KernelNode2>() == 72);
const _: () = assert!(size_of::<AllocationNode>() == 120);

/// The context for memory on a device: the current one if it is on that device, or else the
/// device's primary context.
fn context_on(process: &Process, device: Option<i32>) -> Outcome<&'static Context> {
    let context = current_context()?;
    let device = process.device(device.ok_or(Code::NotSupported)?)?;
    if std::ptr::eq(context.device, device) {
        return Ok(context);
    }
    device.primary.lock().unwrap_or_else(PoisonError::into_inner).context().ok_or(Code::InvalidValue)
}

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

/// Reads `CUgraphNodeParams`: the type, and from byte 16 the parameters of the type. Not enough for
/// memory nodes.
pub(crate) fn task(parameters: Out<u8>) -> Outcome<Task> {
    let inside = parameters.skip(16)?;
    let kind = parameters.cast::<u32>().get()?;
    match kind {
        0 => {
            let KernelNode2 { first, kernel, .. } = inside.cast::<KernelNode2>().get()?;
            first.task(kernel)
        }
        4 => Ok(Task::Child(inside.cast::<Handle<Graph>>().get()?)),
        COPY..=HOST | EMPTY..=RECORD => Ok(Task::Moment(kind)),
        _ => Err(Code::NotSupported),
    }
}

fn add_any(
    process: &'static Process,
    graph: Handle<Graph>,
    needs: &[Handle<Node>],
    parameters: Out<u8>,
) -> Outcome<Handle<Node>> {
    let inside = parameters.skip(16)?;
    match parameters.cast::<u32>().get()? {
        10 => add_allocation(process, graph, needs, inside.cast()),
        11 => add(graph, needs, Task::Free(inside.cast::<u64>().get()?)),
        _ => add(graph, needs, task(parameters)?),
    }
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
    cuGraphAddMemcpyNode: COPY (parameters: In<Copy3>, context: ContextHandle);
    cuGraphAddMemsetNode: FILL (parameters: In<u64>, context: ContextHandle);
    cuGraphAddHostNode: HOST (parameters: In<u64>);
    cuGraphAddEmptyNode: EMPTY ();
    cuGraphAddEventRecordNode: RECORD (event: Handle<Event>);
    cuGraphAddEventWaitNode: WAIT (event: Handle<Event>);
}

entry! {
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

    fn cuGraphChildGraphNodeGetGraph(_process; node: Handle<Node>, graph: Out<Handle<Graph>>) {
        let Task::Child(child) = node.get()?.task else { return Err(Code::InvalidValue) };
        graph.set(child)
    }

    fn cuGraphAddMemAllocNode(
        process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: u64,
        parameters: Out<AllocationNode>,
    ) {
        node.check()?;
        node.set(add_allocation(process, graph, &needs(after, count)?, parameters)?)
    }

    fn cuGraphAddMemFreeNode(
        process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: u64,
        address: u64,
    ) {
        node.check()?;
        process.memory.with(address, |_| ()).ok_or(Code::InvalidValue)?;
        node.set(add(graph, &needs(after, count)?, Task::Free(address))?)
    }

    fn cuGraphMemAllocNodeGetParams(_process; node: Handle<Node>, parameters: Out<AllocationNode>) {
        let Task::Allocate { address, size, device } = node.get()?.task else {
            return Err(Code::InvalidValue);
        };
        let pool = PoolProperties::of_device(device);
        parameters.set(AllocationNode { pool, access: 0, count: 0, size, address })
    }

    fn cuGraphMemFreeNodeGetParams(_process; node: Handle<Node>, address: Out<u64>) {
        let Task::Free(freed) = node.get()?.task else { return Err(Code::InvalidValue) };
        address.set(freed)
    }

    fn cuGraphAddNode(
        process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, count: u64,
        parameters: Out<u8>,
    ) {
        node.check()?;
        node.set(add_any(process, graph, &needs(after, count)?, parameters)?)
    }

    fn cuGraphAddNode_v2(
        process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, _edges: In<u64>,
        count: u64,
        parameters: Out<u8>,
    ) {
        node.check()?;
        node.set(add_any(process, graph, &needs(after, count)?, parameters)?)
    }

    fn cuGraphAddNode_v3(
        process; node: Out<Handle<Node>>, graph: Handle<Graph>, after: In<Handle<Node>>, _edges: In<u64>,
        count: u64,
        parameters: Out<u8>,
    ) {
        node.check()?;
        node.set(add_any(process, graph, &needs(after, count)?, parameters)?)
    }
}
