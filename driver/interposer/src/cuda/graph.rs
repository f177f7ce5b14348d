//! Memory that graphs allocate while they run.
//!
//! It is the driver's, one stock per device, and grows when a graph is instantiated, uploaded or launched. Charged is
//! what the driver says it has reserved. What a graph will need is known before: its nodes have their addresses from the
//! day they are made, and nodes that never live at once may have the same. So it is the length of all addresses together,
//! on each device, and is kept in mind while the executable graph lives. A graph of which it cannot be known is not made.
//!
//! A graph without memory nodes, which is nearly every graph, is launched as if this were not here.

use super::driver::{self, Handle, Ordinal};
use super::{Answer, Call, OUT_OF_MEMORY, SUCCESS, by, hook, launch, pool, twins};
use crate::share::{self, Device, LEDGER, Standing};
use crate::sys;
use core::ffi::{c_char, c_ulonglong};
use core::ptr;
use core::sync::atomic::{AtomicBool, Ordering};
use divvy_interposer_core::{Full, Grown, Work};

/// Some graph of this process has memory nodes.
static USED: AtomicBool = AtomicBool::new(false);

/// Graphs within graphs, as deep as they are looked into: each is a few hundred bytes of the program's stack. A deeper
/// graph is refused.
pub(super) const DEPTH: usize = 32;

/// Writes down what the memory nodes of a graph, and of the graphs within it, need for the executable graph `runnable`.
/// `Err`: that is not known in full.
pub(super) fn look(graph: Handle, runnable: u64, depth: usize) -> Result<(), Full> {
    let count = driver::node_count(graph).ok_or(Full)?;
    if count == 0 {
        return Ok(());
    }
    // Nodes, and behind them the address, the size and the device of what each allocates.
    let bytes = count.checked_mul(4 * size_of::<u64>()).ok_or(Full)?;
    let room = sys::memory(bytes, sys::InChild::Nothing).cast::<u64>();
    if room.is_null() {
        return Err(Full);
    }
    // SAFETY: zeroed memory of that size which only this call knows.
    let words = unsafe { core::slice::from_raw_parts_mut(room, count * 4) };
    let found = walk(graph, words.split_at_mut_checked(count), runnable, depth);
    // SAFETY: mapped above; `words` is not used any more.
    unsafe { sys::forget(room.cast(), bytes) };
    found
}

fn walk(
    graph: Handle,
    words: Option<(&mut [u64], &mut [u64])>,
    runnable: u64,
    depth: usize,
) -> Result<(), Full> {
    let (nodes, ranges) = words.ok_or(Full)?;
    let (ranges, _) = ranges.as_chunks_mut::<3>();
    let count = driver::nodes(graph, nodes).ok_or(Full)?;
    let mut rooms = ranges.iter_mut();
    for node in nodes.iter().take(count) {
        match driver::node(*node as usize as Handle) {
            driver::Node::Allocates { device, address, bytes } => {
                *rooms.next().ok_or(Full)? = [address, bytes, device as u64];
            }
            driver::Node::Graph { graph } => look(graph, runnable, depth.checked_sub(1).ok_or(Full)?)?,
            driver::Node::Unknown => return Err(Full),
            driver::Node::Other => {}
        }
    }
    let left = rooms.len();
    let allocated = ranges.len() - left;
    ranges.get_mut(..allocated).map_or(Ok(()), |ranges| together(ranges, runnable))
}

/// Writes down the length of ranges of (address, length, device) that may cover each other.
fn together(ranges: &mut [[u64; 3]], runnable: u64) -> Result<(), Full> {
    // Nodes come by rising addresses as a rule, which an insertion sort likes.
    for at in 1..ranges.len() {
        let mut place = at;
        while place > 0 && ranges[place - 1][0] > ranges[place][0] {
            ranges.swap(place - 1, place);
            place -= 1;
        }
    }
    // Two devices have no address in common.
    let mut end = 0u64;
    for [address, bytes, device] in ranges.iter() {
        let to = address.saturating_add(*bytes);
        LEDGER.graph_needs(runnable, *device as Ordinal, to.saturating_sub(end.max(*address)))?;
        end = end.max(to);
        USED.store(true, Ordering::Relaxed);
    }
    Ok(())
}

/// What the program's place for a handle holds before the call.
///
/// # Safety
/// `out` is null, which the driver refuses, or can be read.
unsafe fn before(out: *mut Handle) -> Handle {
    // SAFETY: as the caller says.
    unsafe { out.as_ref() }.copied().unwrap_or(ptr::null_mut())
}

/// After `graph` was made executable.
///
/// # Safety
/// Where `answer` is success, `out` is null or was written.
unsafe fn instantiated(answer: Answer, out: *mut Handle, before: Handle, graph: Handle) -> Answer {
    if answer != SUCCESS || out.is_null() || !share::is_any() {
        return answer;
    }
    // SAFETY: as the caller says.
    let handle = unsafe { *out };
    // A handle that is used again is of a graph that was destroyed.
    if USED.load(Ordering::Relaxed) {
        end(handle, 0, by(&|| SUCCESS));
    }
    if look(graph, handle as u64, DEPTH).is_err() {
        // SAFETY: as the caller says; and what the driver has just made, and nobody else knows.
        unsafe {
            *out = before;
            cuGraphExecDestroy(handle);
        }
        return OUT_OF_MEMORY;
    }
    for device in 0..driver::devices() {
        if LEDGER.need_of(handle as u64, device).is_some()
            && let Standing::Share(share) = share::of_cuda(device)
        {
            charge(&share, device, || SUCCESS);
        }
    }
    answer
}

/// Charges what the driver has reserved for graphs after `call`.
fn charge(share: &Device, device: Ordinal, call: impl FnOnce() -> Answer) -> Answer {
    let growing = share.grow(Grown::Graph);
    let answer = call();
    if let Some((reserved, _)) = driver::graph_memory(device) {
        growing.settle_anyway(reserved);
    }
    answer
}

/// Whether an executable graph has memory nodes.
pub(super) fn has_memory(handle: Handle) -> bool {
    let needs = |device| LEDGER.need_of(handle as u64, device).is_some();
    USED.load(Ordering::Relaxed) && (0..driver::devices()).any(needs)
}

/// A call that lets an executable graph have its memory.
#[inline]
fn run(handle: Handle, call: impl Fn() -> Answer) -> Answer {
    if USED.load(Ordering::Relaxed) { run_on(handle, 0, by(&call)) } else { call() }
}

/// [`run`] as far as this device and those after it go.
#[cold]
fn run_on(handle: Handle, device: Ordinal, call: Call<'_>) -> Answer {
    if device >= driver::devices() {
        return call.call();
    }
    let Some(bytes) = LEDGER.need_of(handle as u64, device) else { return run_on(handle, device + 1, call) };
    let share = match share::of_cuda(device) {
        Standing::Free => return run_on(handle, device + 1, call),
        Standing::Closed => return OUT_OF_MEMORY,
        Standing::Share(share) => share,
    };
    for last in [false, true] {
        let mut growing = share.grow(Grown::Graph);
        let Some((reserved, used)) = driver::graph_memory(device) else { return OUT_OF_MEMORY };
        if growing.ask(bytes, reserved, used).is_ok() {
            let answer = run_on(handle, device + 1, call);
            if let Some((reserved, _)) = driver::graph_memory(device) {
                growing.settle_anyway(reserved);
            }
            return answer;
        }
        drop(growing);
        if !last {
            pool::shrink(&share);
        }
    }
    OUT_OF_MEMORY
}

/// A call that ends an executable graph, or has it be another: what it needs of this device and those after it is forgotten
/// before, as the driver may give the handle to another graph, and known again where the call fails.
pub(super) fn end(handle: Handle, device: Ordinal, call: Call<'_>) -> Answer {
    if device >= driver::devices() {
        return call.call();
    }
    let known = LEDGER.graph_ends(handle as u64, device);
    let answer = end(handle, device + 1, call);
    // Where it failed, what it would have needed.
    let gone = if answer == SUCCESS { known } else { LEDGER.graph_ends(handle as u64, device) };
    if let Some(gone) = gone {
        gone.forgotten();
    }
    answer
}

twins! {
    instantiate(out: *mut Handle, graph: Handle, error: *mut Handle, log: *mut c_char, bytes: usize) of 5 |real| {
        // SAFETY: the program's place for the handle, or null; the driver has written it.
        unsafe { let before = before(out); instantiated(real(out, graph, error, log, bytes), out, before, graph) }
    }

    /// Of CUDA 10.0.
    cuGraphInstantiate;
    /// Of CUDA 11.0.
    cuGraphInstantiate_v2;
}

hook! {
    /// Since CUDA 11.4; since 12.0 under the name of the two before, too.
    cuGraphInstantiateWithFlags(out: *mut Handle, graph: Handle, flags: c_ulonglong) |real| {
        // SAFETY: the program's place for the handle, or null; the driver has written it.
        unsafe { let before = before(out); instantiated(real(out, graph, flags), out, before, graph) }
    }
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS`, as far as it is looked at.
#[repr(C)]
pub(crate) struct Instantiation {
    flags: u64,
    stream: Handle,
}

/// Makes `graph` executable by `call`. What is to be uploaded at once, which takes its memory, is uploaded afterwards, when
/// it is known what it needs.
///
/// # Safety
/// `out` and `how` are null, which the driver refuses, or the program's to read and to write.
unsafe fn instantiate_as(
    (out, graph, how): (*mut Handle, Handle, *mut Instantiation),
    call: Call<'_>,
    upload: unsafe extern "C" fn(Handle, Handle) -> Answer,
) -> Answer {
    const UPLOAD: u64 = 2;
    // SAFETY: as the caller says.
    unsafe {
        let before = before(out);
        let flags = how.as_ref().map_or(0, |how| how.flags);
        let apart = flags & UPLOAD != 0 && share::is_any();
        if apart {
            (*how).flags = flags & !UPLOAD;
        }
        let mut answer = instantiated(call.call(), out, before, graph);
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
    /// What it needed is forgotten.
    cuGraphExecDestroy(handle: Handle) |real| {
        if USED.load(Ordering::Relaxed) { end(handle, 0, by(&|| real(handle))) } else { real(handle) }
    }
}

/// A graph is one kernel to those who measure.
fn work(handle: Handle) -> Work {
    Work { function: handle as u64, blocks: 0 }
}

hook! {
    /// A few loads more than without, for a graph without memory in a share without limits of compute time.
    cuGraphLaunch(handle: Handle, stream: Handle) |real| {
        run(handle, || launch::paced(work(handle), stream, by(&|| real(handle, stream))))
    }
}

hook! {
    /// On the per-thread default stream.
    cuGraphLaunch_ptsz(handle: Handle, stream: Handle) |real| {
        run(handle, || launch::paced(work(handle), driver::per_thread(stream), by(&|| real(handle, stream))))
    }
}

hook! {
    /// Takes the memory before the first launch.
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
    /// Gives back what no graph uses at the moment.
    cuDeviceGraphMemTrim(device: Ordinal) |real| {
        match share::of_cuda(device) {
            Standing::Share(share) => charge(&share, device, || real(device)),
            Standing::Free | Standing::Closed => real(device),
        }
    }
}
