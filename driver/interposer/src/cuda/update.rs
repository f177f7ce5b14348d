//! Updates of executable graphs: what each needs when it does what another graph says.
//!
//! The driver updates nodes by nodes of the same type, so a graph without memory nodes gets none, and its updates are the
//! driver's alone.

use super::driver::{self, Handle};
use super::graph::{DEPTH, end, has_memory, look};
use super::{Answer, Call, OUT_OF_MEMORY, SUCCESS, by, hook};
use crate::share::LEDGER;
use core::ffi::c_int;
use divvy_interposer_core::known::LESS;

/// Has an executable graph do what `graph` says, by `call`. Nodes that allocate may be of any size then, and
/// what they need is known before the next launch.
///
/// # Safety
/// `result` is null, or the program's place for a `CUgraphExecUpdateResult`.
unsafe fn update(handle: Handle, graph: Handle, result: *mut c_int, call: Call<'_>) -> Answer {
    /// The reason is what is answered.
    const ERROR: c_int = 1;
    if !has_memory(handle) {
        return call.call();
    }
    let known = || {
        if look(graph, handle as u64, DEPTH).is_ok() {
            return call.call();
        }
        // SAFETY: as the caller says.
        if let Some(result) = unsafe { result.as_mut() } {
            *result = ERROR;
        }
        OUT_OF_MEMORY
    };
    end(handle, 0, by(&known))
}

hook! {
    /// Of CUDA 10.2.
    cuGraphExecUpdate(handle: Handle, graph: Handle, node: *mut Handle, result: *mut c_int) |real| {
        // SAFETY: the program's own arguments.
        unsafe { update(handle, graph, result, by(&|| real(handle, graph, node, result))) }
    }
}

hook! {
    /// Since CUDA 12.0. The result is the first of what is reported.
    cuGraphExecUpdate_v2(handle: Handle, graph: Handle, report: *mut c_int) |real| {
        // SAFETY: the program's own arguments.
        unsafe { update(handle, graph, report, by(&|| real(handle, graph, report))) }
    }
}

/// Has a graph within an executable one do what `graph` says, by `call`. What each graph within it needs is not kept,
/// so one that needs more than that of the node as it was made is refused.
fn update_within(handle: Handle, node: Handle, graph: Handle, call: Call<'_>) -> Answer {
    if !has_memory(handle) {
        return call.call();
    }
    let driver::Node::Graph { graph: made } = driver::node(node) else { return call.call() };
    let more = node as u64;
    let known = look(graph, more, DEPTH).and_then(|()| look(made, more | LESS, DEPTH));
    let needs = |device| LEDGER.need_of(more, device).is_some_and(|bytes| bytes > 0);
    let is_more = known.is_err() || (0..driver::devices()).any(needs);
    end(node, 0, by(&|| SUCCESS));
    if is_more { OUT_OF_MEMORY } else { call.call() }
}

hook! {
    /// Since CUDA 11.1.
    cuGraphExecChildGraphNodeSetParams(handle: Handle, node: Handle, graph: Handle) |real| {
        update_within(handle, node, graph, by(&|| real(handle, node, graph)))
    }
}

/// `CUgraphNodeParams`, as far as it is looked at.
#[repr(C)]
pub(crate) struct NodeParameters {
    kind: c_int,
    reserved: [c_int; 3],
    graph: Handle,
}

hook! {
    /// Since CUDA 12.2, of a node of any type. Those that allocate the driver leaves as they are.
    cuGraphExecNodeSetParams(handle: Handle, node: Handle, how: *mut NodeParameters) |real| {
        // SAFETY: the program's own arguments.
        match unsafe { how.as_ref() } {
            Some(NodeParameters { kind: driver::GRAPH, graph, .. }) => {
                update_within(handle, node, *graph, by(&|| real(handle, node, how)))
            }
            _ => real(handle, node, how),
        }
    }
}
