//! Graph memory: allocations of graph nodes while a graph runs.
//!
//! The driver keeps one reserve per device, which grows when a graph is instantiated, uploaded or
//! launched. The charge is the driver's reserved size. A graph's need is known in advance: memory
//! nodes get addresses when they are created, and nodes with disjoint lifetimes may share them. So
//! the need is the union of all address ranges per device, kept while the executable graph exists.
//! Graphs of unknown need are refused. Graphs without memory nodes, nearly all, skip this.

use super::call::{Call, CuResult, OUT_OF_MEMORY, SUCCESS, by, hook, twins};
use super::driver::{self, Handle, Ordinal};
use super::{launch, trim};
use crate::share::{self, Device, DeviceAccess, PROCESS};
use crate::sys;
use core::ffi::{c_char, c_int, c_ulonglong};
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering};
use divvy_interposer_core::handle_metadata::SUBTRACT;
use divvy_interposer_core::{PoolKind, Refused, Work};

/// True once any graph of this process has memory nodes.
static HAS_MEMORY_NODES: AtomicBool = AtomicBool::new(false);

/// Maximum depth of child graphs. Each level takes a few hundred bytes of the program's stack.
/// Deeper graphs are refused.
const DEPTH_MAX: usize = 32;

/// Records the need of a graph's memory nodes, including child graphs, for the executable graph
/// `runnable`. `Err` if the need cannot be determined.
fn record_need(graph: Handle, runnable: u64, depth: usize) -> Result<(), Refused> {
    let count = driver::node_count(graph).ok_or(Refused)?;
    if count == 0 {
        return Ok(());
    }
    // The nodes, followed by address, size and device of each allocation.
    let bytes = count.checked_mul(4 * size_of::<u64>()).ok_or(Refused)?;
    let buffer = sys::map_private(bytes, sys::InChild::Nothing).cast::<u64>();
    if buffer.is_null() {
        return Err(Refused);
    }
    // SAFETY: zeroed memory of that size, used only by this call.
    let words = unsafe { core::slice::from_raw_parts_mut(buffer, count * 4) };
    let found = record_nodes(graph, words.split_at_mut_checked(count), runnable, depth);
    // SAFETY: mapped above; `words` is no longer used.
    unsafe { sys::unmap(buffer.cast(), bytes) };
    found
}

fn record_nodes(
    graph: Handle,
    words: Option<(&mut [u64], &mut [u64])>,
    runnable: u64,
    depth: usize,
) -> Result<(), Refused> {
    let (nodes, ranges) = words.ok_or(Refused)?;
    let (ranges, _) = ranges.as_chunks_mut::<3>();
    let count = driver::nodes(graph, nodes).ok_or(Refused)?;
    let mut free_ranges = ranges.iter_mut();
    for node in nodes.iter().take(count) {
        match driver::node(*node as usize as Handle) {
            driver::Node::Allocates { device, address, bytes } => {
                *free_ranges.next().ok_or(Refused)? = [address, bytes, device as u64];
            }
            driver::Node::Graph { graph } => {
                record_need(graph, runnable, depth.checked_sub(1).ok_or(Refused)?)?
            }
            driver::Node::Unknown => return Err(Refused),
            driver::Node::Other => {}
        }
    }
    let left = free_ranges.len();
    let allocated = ranges.len() - left;
    ranges.get_mut(..allocated).map_or(Ok(()), |ranges| record_ranges(ranges, runnable))
}

/// Records the total length of possibly overlapping ranges of (address, length, device).
fn record_ranges(ranges: &mut [[u64; 3]], runnable: u64) -> Result<(), Refused> {
    // Nodes usually have rising addresses, which suits an insertion sort.
    for at in 1..ranges.len() {
        let mut place = at;
        while place > 0 && ranges[place - 1][0] > ranges[place][0] {
            ranges.swap(place - 1, place);
            place -= 1;
        }
    }
    // Devices have disjoint addresses.
    let mut end = 0u64;
    for [address, bytes, device] in ranges.iter() {
        let to = address.saturating_add(*bytes);
        PROCESS.add_graph_need(runnable, *device as Ordinal, to.saturating_sub(end.max(*address)))?;
        end = end.max(to);
        HAS_MEMORY_NODES.store(true, Ordering::Relaxed);
    }
    Ok(())
}

/// The content of the program's output before the call.
///
/// # Safety
/// `out` is null, which the driver refuses, or readable.
unsafe fn previous(out: *mut Handle) -> Handle {
    // SAFETY: guaranteed by the caller.
    unsafe { out.as_ref() }.copied().unwrap_or(ptr::null_mut())
}

/// Records and charges `graph` after it was instantiated.
///
/// # Safety
/// If `answer` is success, `out` is null or was written.
unsafe fn finish_instantiate(answer: CuResult, out: *mut Handle, before: Handle, graph: Handle) -> CuResult {
    if answer != SUCCESS || out.is_null() || !share::has_shares() {
        return answer;
    }
    // SAFETY: guaranteed by the caller.
    let handle = unsafe { *out };
    // A reused handle belonged to a destroyed graph.
    if HAS_MEMORY_NODES.load(Ordering::Relaxed) {
        remove_need_during(handle, 0, by(&|| SUCCESS));
    }
    if record_need(graph, handle as u64, DEPTH_MAX).is_err() {
        // SAFETY: guaranteed by the caller; the graph was just created and not yet passed to the
        // program.
        unsafe {
            *out = before;
            cuGraphExecDestroy(handle);
        }
        return OUT_OF_MEMORY;
    }
    for device in 0..driver::devices() {
        if PROCESS.graph_need(handle as u64, device).is_some()
            && let DeviceAccess::Share(share) = share::for_ordinal(device)
        {
            charge_reserved(&share, device, || SUCCESS);
        }
    }
    answer
}

/// Charges the driver's reserved graph memory after `call`.
fn charge_reserved(share: &Device, device: Ordinal, call: impl FnOnce() -> CuResult) -> CuResult {
    let pool_call = share.open_pool(PoolKind::Graph);
    let answer = call();
    if let Some((reserved, _)) = driver::graph_memory(device) {
        pool_call.force_settle(reserved);
    }
    answer
}

/// Returns true if an executable graph has memory nodes.
fn has_memory(handle: Handle) -> bool {
    let needs = |device| PROCESS.graph_need(handle as u64, device).is_some();
    HAS_MEMORY_NODES.load(Ordering::Relaxed) && (0..driver::devices()).any(needs)
}

/// Runs a call that allocates an executable graph's memory.
#[inline]
fn run(handle: Handle, call: impl Fn() -> CuResult) -> CuResult {
    if HAS_MEMORY_NODES.load(Ordering::Relaxed) { run_on(handle, 0, by(&call)) } else { call() }
}

/// [`run`] for this device and the following ones.
#[cold]
fn run_on(handle: Handle, device: Ordinal, call: Call<'_>) -> CuResult {
    if device >= driver::devices() {
        return call.call();
    }
    let Some(bytes) = PROCESS.graph_need(handle as u64, device) else {
        return run_on(handle, device + 1, call);
    };
    let share = match share::for_ordinal(device) {
        DeviceAccess::Unmanaged => return run_on(handle, device + 1, call),
        DeviceAccess::Denied => return OUT_OF_MEMORY,
        DeviceAccess::Share(share) => share,
    };
    for last in [false, true] {
        let mut pool_call = share.open_pool(PoolKind::Graph);
        let Some((reserved, used)) = driver::graph_memory(device) else { return OUT_OF_MEMORY };
        if pool_call.reserve_growth(bytes, reserved, used).is_ok() {
            let answer = run_on(handle, device + 1, call);
            if let Some((reserved, _)) = driver::graph_memory(device) {
                pool_call.force_settle(reserved);
            }
            return answer;
        }
        drop(pool_call);
        if last {
            share.report_refusal(bytes);
        } else {
            trim::trim_before_refusal(&share);
        }
    }
    OUT_OF_MEMORY
}

/// Runs a call that destroys or replaces an executable graph. Its need on this device and the
/// following ones is removed before the call, because the driver may reuse the handle, and restored
/// if the call fails.
fn remove_need_during(handle: Handle, device: Ordinal, call: Call<'_>) -> CuResult {
    if device >= driver::devices() {
        return call.call();
    }
    let known = PROCESS.take_graph_need(handle as u64, device);
    let answer = remove_need_during(handle, device + 1, call);
    // After a failure, remove what the call has recorded.
    let gone = if answer == SUCCESS { known } else { PROCESS.take_graph_need(handle as u64, device) };
    if let Some(gone) = gone {
        gone.discard();
    }
    answer
}

twins! {
    instantiate(
        out: *mut Handle, graph: Handle, error: *mut Handle, log: *mut c_char, bytes: usize,
    ) of 5 |real| {
        // SAFETY: the program's output for the handle, or null; written by the driver.
        unsafe {
            let before = previous(out);
            finish_instantiate(real(out, graph, error, log, bytes), out, before, graph)
        }
    }

    /// CUDA 10.0.
    cuGraphInstantiate;
    /// CUDA 11.0.
    cuGraphInstantiate_v2;
}

hook! {
    /// Since CUDA 11.4; since 12.0 also exported under the name of the two older functions.
    cuGraphInstantiateWithFlags(out: *mut Handle, graph: Handle, flags: c_ulonglong) |real| {
        // SAFETY: the program's output for the handle, or null; written by the driver.
        unsafe { let before = previous(out); finish_instantiate(real(out, graph, flags), out, before, graph) }
    }
}

/// The first fields of `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[repr(C)]
pub(crate) struct Instantiation {
    flags: u64,
    stream: Handle,
}

/// Instantiates `graph` with `call`. A requested upload, which allocates the memory, is done
/// afterwards, when the need is known.
///
/// # Safety
/// `out` and `how` are null, which the driver refuses, or readable and writable.
unsafe fn instantiate_as(
    (out, graph, how): (*mut Handle, Handle, *mut Instantiation),
    call: Call<'_>,
    upload: unsafe extern "C" fn(Handle, Handle) -> CuResult,
) -> CuResult {
    const UPLOAD: u64 = 2;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let before = previous(out);
        let flags = how.as_ref().map_or(0, |how| how.flags);
        let apart = flags & UPLOAD != 0 && share::has_shares();
        if apart {
            (*how).flags = flags & !UPLOAD;
        }
        let mut answer = finish_instantiate(call.call(), out, before, graph);
        if apart {
            (*how).flags = flags;
            if answer == SUCCESS {
                answer = upload(*out, (*how).stream);
                if answer != SUCCESS {
                    cuGraphExecDestroy(*out);
                    *out = before;
                }
            }
        }
        answer
    }
}

hook! {
    /// Since CUDA 12.0.
    cuGraphInstantiateWithParams(out: *mut Handle, graph: Handle, how: *mut Instantiation) |real| {
        // SAFETY: the program's own arguments.
        unsafe { instantiate_as((out, graph, how), by(&|| real(out, graph, how)), cuGraphUpload) }
    }
}

hook! {
    /// With an upload on the per-thread default stream.
    cuGraphInstantiateWithParams_ptsz(out: *mut Handle, graph: Handle, how: *mut Instantiation) |real| {
        // SAFETY: the program's own arguments.
        unsafe { instantiate_as((out, graph, how), by(&|| real(out, graph, how)), cuGraphUpload_ptsz) }
    }
}

hook! {
    /// Removes the graph's recorded need.
    cuGraphExecDestroy(handle: Handle) |real| {
        if HAS_MEMORY_NODES.load(Ordering::Relaxed) {
            remove_need_during(handle, 0, by(&|| real(handle)))
        } else {
            real(handle)
        }
    }
}

/// For compute time, a graph counts as one kernel.
fn work(handle: Handle) -> Work {
    Work { function: handle as u64, blocks: 0 }
}

hook! {
    /// Costs a few loads for a graph without memory nodes in a share without a compute limit.
    cuGraphLaunch(handle: Handle, stream: Handle) |real| {
        run(handle, || launch::throttled(work(handle), stream, by(&|| real(handle, stream))))
    }
}

hook! {
    /// On the per-thread default stream.
    cuGraphLaunch_ptsz(handle: Handle, stream: Handle) |real| {
        run(handle, || {
            launch::throttled(work(handle), driver::per_thread(stream), by(&|| real(handle, stream)))
        })
    }
}

hook! {
    /// Allocates the memory before the first launch.
    cuGraphUpload(handle: Handle, stream: Handle) |real| {
        run(handle, || real(handle, stream))
    }
}

hook! {
    /// On the per-thread default stream.
    cuGraphUpload_ptsz(handle: Handle, stream: Handle) |real| {
        run(handle, || real(handle, stream))
    }
}

hook! {
    /// Releases graph memory that is not in use.
    cuDeviceGraphMemTrim(device: Ordinal) |real| {
        match share::for_ordinal(device) {
            DeviceAccess::Share(share) => charge_reserved(&share, device, || real(device)),
            DeviceAccess::Unmanaged | DeviceAccess::Denied => real(device),
        }
    }
}

/// Updates an executable graph to `graph` with `call`. Its allocating nodes may change size, and
/// the new need is known before the next launch. Graphs without memory nodes go straight to the
/// driver, because an update cannot change node types.
///
/// # Safety
/// `result` is null, or the program's output for a `CUgraphExecUpdateResult`.
unsafe fn update(handle: Handle, graph: Handle, result: *mut c_int, call: Call<'_>) -> CuResult {
    /// The reason is in the result code.
    const ERROR: c_int = 1;
    if !has_memory(handle) {
        return call.call();
    }
    let known = || {
        if record_need(graph, handle as u64, DEPTH_MAX).is_ok() {
            return call.call();
        }
        // SAFETY: guaranteed by the caller.
        if let Some(result) = unsafe { result.as_mut() } {
            *result = ERROR;
        }
        OUT_OF_MEMORY
    };
    remove_need_during(handle, 0, by(&known))
}

hook! {
    /// CUDA 10.2.
    cuGraphExecUpdate(handle: Handle, graph: Handle, node: *mut Handle, result: *mut c_int) |real| {
        // SAFETY: the program's own arguments.
        unsafe { update(handle, graph, result, by(&|| real(handle, graph, node, result))) }
    }
}

hook! {
    /// Since CUDA 12.0. The result is the first field of the report.
    cuGraphExecUpdate_v2(handle: Handle, graph: Handle, report: *mut c_int) |real| {
        // SAFETY: the program's own arguments.
        unsafe { update(handle, graph, report, by(&|| real(handle, graph, report))) }
    }
}

/// Updates a child graph of an executable graph to `graph` with `call`. The need of each child
/// graph is not stored, so a child that needs more than the node's original graph is refused.
fn update_child(handle: Handle, node: Handle, graph: Handle, call: Call<'_>) -> CuResult {
    if !has_memory(handle) {
        return call.call();
    }
    let driver::Node::Graph { graph: made } = driver::node(node) else { return call.call() };
    let more = node as u64;
    let known =
        record_need(graph, more, DEPTH_MAX).and_then(|()| record_need(made, more | SUBTRACT, DEPTH_MAX));
    let needs = |device| PROCESS.graph_need(more, device).is_some_and(|bytes| bytes > 0);
    let is_more = known.is_err() || (0..driver::devices()).any(needs);
    remove_need_during(node, 0, by(&|| SUCCESS));
    if is_more { OUT_OF_MEMORY } else { call.call() }
}

hook! {
    /// Since CUDA 11.1.
    cuGraphExecChildGraphNodeSetParams(handle: Handle, node: Handle, graph: Handle) |real| {
        update_child(handle, node, graph, by(&|| real(handle, node, graph)))
    }
}

/// The first fields of `CUgraphNodeParams`.
#[repr(C)]
pub(crate) struct NodeParameters {
    kind: c_int,
    reserved: [c_int; 3],
    graph: Handle,
}

hook! {
    /// Since CUDA 12.2, for a node of any type. The driver does not change nodes that allocate.
    cuGraphExecNodeSetParams(handle: Handle, node: Handle, how: *mut NodeParameters) |real| {
        // SAFETY: the program's own arguments.
        match unsafe { how.as_ref() } {
            Some(NodeParameters { kind: driver::GRAPH, graph, .. }) => {
                update_child(handle, node, *graph, by(&|| real(handle, node, how)))
            }
            _ => real(handle, node, how),
        }
    }
}
