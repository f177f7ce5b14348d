//! Memory that graphs allocate while they run.
//!
//! It is the driver's, one stock per device, and grows when a graph is instantiated, uploaded or launched. Charged is
//! what the driver says it has reserved. What a graph will need is known before: its nodes have their addresses from the
//! day they are made, and nodes that never live at once may have the same. So it is the length of all addresses together.
//!
//! A graph without memory nodes, which is nearly every graph, is launched as if this were not here.

use super::driver::{self, Handle, Ordinal};
use super::{Answer, Call, OUT_OF_MEMORY, SUCCESS, hook, launch, pool};
use crate::share::{self, Device, Standing};
use crate::sys;
use core::ffi::{c_char, c_ulonglong, c_void};
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use divvy_interposer_core::{Grown, Work};

/// Some graph of this process has memory nodes.
static USED: AtomicBool = AtomicBool::new(false);
/// One of them may not be among the known.
static UNKNOWN: AtomicBool = AtomicBool::new(false);

/// An executable graph with memory nodes: its handle, its device, and what it needs. One that finds no room here is
/// charged after its launch only.
struct Known {
    handle: AtomicUsize,
    device: AtomicUsize,
    bytes: AtomicU64,
}

static KNOWN: [Known; 256] =
    [const { Known { handle: AtomicUsize::new(0), device: AtomicUsize::new(0), bytes: AtomicU64::new(0) } };
        256];

/// What the memory nodes of a graph need.
#[derive(Clone, Copy)]
struct Need {
    device: Ordinal,
    bytes: u64,
}

/// Some graph is not known in full: from now on the launch of one that is not known is charged afterwards.
#[cold]
fn not_known() {
    USED.store(true, Ordering::Relaxed);
    UNKNOWN.store(true, Ordering::Relaxed);
}

/// Graphs within graphs, as deep as they are looked into.
const DEPTH: usize = 8;

/// `None`: no memory nodes.
fn need(graph: Handle, depth: usize) -> Option<Need> {
    let count = driver::node_count(graph).filter(|count| *count > 0)?;
    // Nodes, and behind them the address and the size of what each allocates.
    let bytes = count.checked_mul(3 * size_of::<u64>())?;
    let room = sys::memory(bytes, sys::InChild::Nothing).cast::<u64>();
    if room.is_null() {
        not_known();
        return None;
    }
    // SAFETY: zeroed memory of that size which only this call knows.
    let words = unsafe { core::slice::from_raw_parts_mut(room, count * 3) };
    let found = walk(graph, words, count, depth);
    // SAFETY: mapped above; `words` is not used any more.
    unsafe { sys::forget(room.cast(), bytes) };
    found
}

fn walk(graph: Handle, words: &mut [u64], count: usize, depth: usize) -> Option<Need> {
    let (nodes, ranges) = words.split_at_mut_checked(count)?;
    let (ranges, _) = ranges.as_chunks_mut::<2>();
    let count = driver::nodes(graph, nodes)?;
    let mut found = None::<Need>;
    let mut allocated = 0;
    for node in nodes.iter().take(count) {
        match driver::node(*node as usize as Handle) {
            driver::Node::Allocates { device, address, bytes } => {
                found.get_or_insert(Need { device, bytes: 0 }).device = device;
                if let Some(room) = ranges.get_mut(allocated) {
                    *room = [address, bytes];
                    allocated += 1;
                }
            }
            driver::Node::Graph { graph } if depth > 0 => {
                if let Some(inner) = self::need(graph, depth - 1) {
                    let need = found.get_or_insert(Need { device: inner.device, bytes: 0 });
                    need.bytes = need.bytes.saturating_add(inner.bytes);
                }
            }
            driver::Node::Graph { .. } | driver::Node::Unknown => not_known(),
            driver::Node::Other => {}
        }
    }
    let own = ranges.get_mut(..allocated).map_or(0, together);
    found.map(|need| Need { bytes: need.bytes.saturating_add(own), ..need })
}

/// The length of ranges of (address, length) that may cover each other.
fn together(ranges: &mut [[u64; 2]]) -> u64 {
    // Nodes come by rising addresses as a rule, which an insertion sort likes.
    for at in 1..ranges.len() {
        let mut place = at;
        while place > 0 && ranges[place - 1][0] > ranges[place][0] {
            ranges.swap(place - 1, place);
            place -= 1;
        }
    }
    let (mut sum, mut end) = (0u64, 0u64);
    for [address, bytes] in ranges.iter() {
        let to = address.saturating_add(*bytes);
        sum = sum.saturating_add(to.saturating_sub(end.max(*address)));
        end = end.max(to);
    }
    sum
}

/// After `graph` was made executable.
///
/// # Safety
/// Where `answer` is success, `out` is null or was written.
unsafe fn instantiated(answer: Answer, out: *mut Handle, graph: Handle) -> Answer {
    if answer != SUCCESS || out.is_null() || !share::is_any() {
        return answer;
    }
    if let Some(need) = need(graph, DEPTH) {
        // SAFETY: as the caller says.
        let handle = unsafe { *out } as usize;
        USED.store(true, Ordering::Relaxed);
        // A handle that is used again is of a graph that was destroyed.
        let same = KNOWN.iter().find(|known| known.handle.load(Ordering::Acquire) == handle);
        let room = same.or_else(|| {
            KNOWN.iter().find(|known| {
                known.handle.compare_exchange(0, handle, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            })
        });
        if let Some(known) = room {
            known.device.store(need.device as usize, Ordering::Release);
            known.bytes.store(need.bytes, Ordering::Release);
        } else {
            not_known();
        }
        if let Standing::Share(share) = share::of_cuda(need.device) {
            charge(&share, need.device, || SUCCESS);
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

/// A call that lets an executable graph have its memory.
#[inline]
fn run(handle: Handle, call: impl Fn() -> Answer) -> Answer {
    if USED.load(Ordering::Relaxed) { run_with_memory(handle, &call) } else { call() }
}

#[cold]
fn run_with_memory(handle: Handle, call: &dyn Call) -> Answer {
    let known = KNOWN.iter().find(|known| known.handle.load(Ordering::Acquire) == handle as usize);
    let Some(known) = known else { return run_unknown(call) };
    let device = known.device.load(Ordering::Acquire) as Ordinal;
    let share = match share::of_cuda(device) {
        Standing::Free => return call.call(),
        Standing::Closed => return OUT_OF_MEMORY,
        Standing::Share(share) => share,
    };
    let bytes = known.bytes.load(Ordering::Acquire);
    for last in [false, true] {
        let mut growing = share.grow(Grown::Graph);
        let Some((reserved, used)) = driver::graph_memory(device) else { return call.call() };
        if growing.ask(bytes, reserved, used).is_ok() {
            let answer = call.call();
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

/// A graph that is not among the known has no memory, unless they are too many or too deep. Of which device it would be
/// is not known either.
fn run_unknown(call: &dyn Call) -> Answer {
    let answer = call.call();
    if UNKNOWN.load(Ordering::Relaxed) {
        for device in 0..driver::devices() {
            if let Standing::Share(share) = share::of_cuda(device) {
                charge(&share, device, || SUCCESS);
            }
        }
    }
    answer
}

hook! {
    /// Of CUDA 10.0.
    cuGraphInstantiate(out: *mut Handle, graph: Handle, error: *mut Handle, log: *mut c_char, bytes: usize) |real| {
        // SAFETY: the driver has written it.
        unsafe { instantiated(real(out, graph, error, log, bytes), out, graph) }
    }
}

hook! {
    /// Of CUDA 11.0.
    cuGraphInstantiate_v2(out: *mut Handle, graph: Handle, error: *mut Handle, log: *mut c_char, bytes: usize) |real| {
        // SAFETY: the driver has written it.
        unsafe { instantiated(real(out, graph, error, log, bytes), out, graph) }
    }
}

hook! {
    /// Since CUDA 11.4; since 12.0 under the name of the two before, too.
    cuGraphInstantiateWithFlags(out: *mut Handle, graph: Handle, flags: c_ulonglong) |real| {
        // SAFETY: the driver has written it.
        unsafe { instantiated(real(out, graph, flags), out, graph) }
    }
}

hook! {
    /// Since CUDA 12.0.
    cuGraphInstantiateWithParams(out: *mut Handle, graph: Handle, parameters: *mut c_void) |real| {
        // SAFETY: the driver has written it.
        unsafe { instantiated(real(out, graph, parameters), out, graph) }
    }
}

hook! {
    /// With an upload on the per-thread default stream.
    cuGraphInstantiateWithParams_ptsz(out: *mut Handle, graph: Handle, parameters: *mut c_void) |real| {
        // SAFETY: the driver has written it.
        unsafe { instantiated(real(out, graph, parameters), out, graph) }
    }
}

hook! {
    /// Leaves its place among the known to another.
    cuGraphExecDestroy(handle: Handle) |real| {
        // Before the driver may give the handle to another graph: a value that none has, and that nobody takes for free.
        const LEAVING: usize = usize::MAX;
        let is_it = |known: &&Known| {
            let (handle, order) = (handle as usize, Ordering::AcqRel);
            handle != 0 && known.handle.compare_exchange(handle, LEAVING, order, Ordering::Relaxed).is_ok()
        };
        let known = if USED.load(Ordering::Relaxed) { KNOWN.iter().find(is_it) } else { None };
        let answer = real(handle);
        if let Some(known) = known {
            known.handle.store(if answer == SUCCESS { 0 } else { handle as usize }, Ordering::Release);
        }
        answer
    }
}

/// A graph is one kernel to those who measure.
fn work(handle: Handle) -> Work {
    Work { function: handle as u64, blocks: 0 }
}

hook! {
    /// A few loads more than without, for a graph without memory in a share without limits of compute time.
    cuGraphLaunch(handle: Handle, stream: Handle) |real| {
        run(handle, || launch::paced(work(handle), stream, &|| real(handle, stream)))
    }
}

hook! {
    /// On the per-thread default stream.
    cuGraphLaunch_ptsz(handle: Handle, stream: Handle) |real| {
        run(handle, || launch::paced(work(handle), driver::per_thread(stream), &|| real(handle, stream)))
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
