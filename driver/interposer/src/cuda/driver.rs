//! Driver functions that hooks call but do not replace, as `cuda.h` declares them.

use super::call::{CuResult, MISSING, SUCCESS};
use crate::real_symbols;
use crate::symbol_table::index;
use core::ffi::{c_int, c_uint, c_void};
use core::ptr;
use core::sync::atomic::{AtomicI32, Ordering};

/// `CUcontext`, `CUstream`, `CUmemoryPool`.
pub(crate) type Handle = *mut c_void;
/// `CUdevice`: an ordinal.
pub(crate) type Ordinal = c_int;

macro_rules! driver {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {
        $(
            /// # Safety
            /// As required by `cuda.h` for this function.
            unsafe fn $name($($argument: $kind),*) -> CuResult {
                let Some(address) = real_symbols::function(index::$name) else { return MISSING };
                type Function = unsafe extern "C" fn($($kind),*) -> CuResult;
                // SAFETY: the driver's function of that name, with this signature.
                let function: Function = unsafe { core::mem::transmute(address) };
                // SAFETY: guaranteed by the caller.
                unsafe { function($($argument),*) }
            }
        )*
    };
}

driver! {
    cuArrayGetMemoryRequirements(out: *mut Requirements, array: Handle, device: Ordinal);
    cuCtxGetApiVersion(context: Handle, out: *mut c_uint);
    cuCtxGetCurrent(out: *mut Handle);
    cuCtxGetDevice(out: *mut Ordinal);
    cuCtxPopCurrent_v2(out: *mut Handle);
    cuCtxPushCurrent_v2(context: Handle);
    cuDeviceGetCount(out: *mut c_int);
    cuDeviceGetDefaultMemPool(out: *mut Handle, device: Ordinal);
    cuDeviceGetGraphMemAttribute(device: Ordinal, attribute: c_int, out: *mut c_void);
    cuDeviceGetMemPool(out: *mut Handle, device: Ordinal);
    cuDeviceGetUuid(out: *mut [u8; 16], device: Ordinal);
    cuDeviceGetUuid_v2(out: *mut [u8; 16], device: Ordinal);
    cuEventCreate(out: *mut Handle, flags: c_uint);
    cuEventDestroy_v2(event: Handle);
    cuEventElapsedTime(out: *mut f32, from: Handle, to: Handle);
    cuEventQuery(event: Handle);
    cuEventRecord(event: Handle, stream: Handle);
    cuMemAdvise(address: u64, bytes: usize, advice: c_int, device: Ordinal);
    cuMemGetAddressRange_v2(out: *mut u64, bytes: *mut usize, address: u64);
    cuGraphChildGraphNodeGetGraph(node: Handle, out: *mut Handle);
    cuGraphGetNodes(graph: Handle, out: *mut u64, count: *mut usize);
    cuGraphMemAllocNodeGetParams(node: Handle, out: *mut AllocationNode);
    cuGraphNodeGetType(node: Handle, out: *mut c_int);
    cuDevicePrimaryCtxGetState(device: Ordinal, flags: *mut c_uint, active: *mut c_int);
    cuMemPoolGetAttribute(pool: Handle, attribute: c_int, out: *mut c_void);
    cuMipmappedArrayGetMemoryRequirements(out: *mut Requirements, array: Handle, device: Ordinal);
    cuStreamGetCtx(stream: Handle, out: *mut Handle);
    cuStreamIsCapturing(stream: Handle, out: *mut c_int);
    cuThreadExchangeStreamCaptureMode(mode: *mut c_int);
}

/// `CUmemLocation`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Location {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

impl Location {
    /// The device that has the memory; `None` for the host.
    pub(crate) fn device(self) -> Option<Ordinal> {
        const DEVICE: c_int = 1;
        const LOCALITY_DOMAIN: c_int = 6;
        match self.kind {
            DEVICE => Some(self.id),
            // The device is the first byte of the two packed numbers.
            LOCALITY_DOMAIN => Some(self.id & 0xff),
            _ => None,
        }
    }
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    pub(crate) location: Location,
    windows: *mut c_void,
    flags: [u8; 8],
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS`; its pool properties have reserved space.
#[derive(Clone, Copy)]
#[repr(C)]
struct AllocationNode {
    pool: PoolProperties,
    rest_of_pool: [u64; 9],
    access: *const c_void,
    access_count: usize,
    bytes: usize,
    address: u64,
}

const _: () = assert!(core::mem::offset_of!(AllocationNode, bytes) == 104);

/// `CUDA_ARRAY_MEMORY_REQUIREMENTS`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Requirements {
    size: usize,
    alignment: usize,
    reserved: [c_uint; 4],
}

/// The fields of `CUmemPoolProps` that exist in every version.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PoolProperties {
    kind: c_int,
    handle_types: c_int,
    pub(crate) location: Location,
}

impl PoolProperties {
    /// The device whose memory such a pool has, `Some(None)` for host memory. `None` for managed
    /// memory without a device, which migrates to the device that uses it.
    pub(crate) fn owner(self) -> Option<Option<Ordinal>> {
        const PINNED: c_int = 1;
        let device = self.location.device();
        (device.is_some() || self.kind == PINNED).then_some(device)
    }
}

fn query<T>(mut out: T, ask: impl FnOnce(*mut T) -> CuResult) -> Option<T> {
    (ask(&raw mut out) == SUCCESS).then_some(out)
}

/// The calling thread's context and its device.
#[derive(Clone, Copy)]
pub(crate) struct Current {
    pub(crate) device: Ordinal,
    pub(crate) context: Handle,
}

/// Returns `None` if the thread has no context. Called before the driver's call: work after it
/// would delay the program's next step, which usually waits for memory.
pub(crate) fn current() -> Option<Current> {
    let context = current_context();
    if context.is_null() {
        return None;
    }
    Some(Current { device: only_device().or_else(current_device)?, context })
}

/// The device, if the process sees only one, as is usual. The driver need not be asked.
#[inline]
pub(crate) fn only_device() -> Option<Ordinal> {
    /// Number of devices, which never changes; 0 if not asked yet or none.
    static COUNT: AtomicI32 = AtomicI32::new(0);
    match COUNT.load(Ordering::Relaxed) {
        1 => return Some(0),
        0 => COUNT.store(devices(), Ordering::Relaxed),
        _ => {}
    }
    None
}

/// The device of the calling thread's context.
pub(crate) fn current_device() -> Option<Ordinal> {
    // SAFETY: writes an ordinal.
    query(0, |out| unsafe { cuCtxGetDevice(out) })
}

/// The calling thread's context; null if it has none.
pub(crate) fn current_context() -> Handle {
    // SAFETY: writes a handle.
    query(ptr::null_mut(), |out| unsafe { cuCtxGetCurrent(out) }).unwrap_or(ptr::null_mut())
}

/// Returns true if a context still exists.
pub(crate) fn is_context(context: Handle) -> bool {
    // SAFETY: writes a number; the driver rejects invalid handles.
    query(0, |out| unsafe { cuCtxGetApiVersion(context, out) }).is_some()
}

/// Returns true if the device's primary context exists.
pub(crate) fn has_primary(device: Ordinal) -> bool {
    let mut active = 0;
    // SAFETY: writes two numbers.
    query(0, |flags| unsafe { cuDevicePrimaryCtxGetState(device, flags, &raw mut active) }).is_some()
        && active != 0
}

/// The number of devices that the process sees.
pub(crate) fn devices() -> Ordinal {
    // SAFETY: writes a number.
    query(0, |out| unsafe { cuDeviceGetCount(out) }).unwrap_or(0)
}

/// The UUIDs of a device: its own, which on MIG is the instance's and only returned by the second
/// version, and the GPU's.
pub(crate) fn uuids(device: Ordinal) -> Option<[[u8; 16]; 2]> {
    // SAFETY: writes sixteen bytes.
    let gpu = query([0; 16], |out| unsafe { cuDeviceGetUuid(out, device) });
    // SAFETY: as above.
    let own = query([0; 16], |out| unsafe { cuDeviceGetUuid_v2(out, device) });
    Some([own.or(gpu)?, gpu.or(own)?])
}

/// The device that a stream's work runs on. The three default streams belong to the calling
/// thread's context.
pub(crate) fn stream_device(stream: Handle) -> Option<Ordinal> {
    const PER_THREAD: usize = 2;
    if stream as usize <= PER_THREAD {
        return current_device();
    }
    // SAFETY: writes a handle.
    device_of_context(query(ptr::null_mut(), |out| unsafe { cuStreamGetCtx(stream, out) })?)
}

/// The device of a context.
pub(crate) fn device_of_context(context: Handle) -> Option<Ordinal> {
    if context == current_context() {
        return current_device();
    }
    // SAFETY: the driver refuses invalid contexts; the context is popped again below.
    if unsafe { cuCtxPushCurrent_v2(context) } != SUCCESS {
        return None;
    }
    let device = current_device();
    let mut popped = ptr::null_mut();
    // SAFETY: writes a handle.
    unsafe { cuCtxPopCurrent_v2(&raw mut popped) };
    device
}

/// Returns true if the stream is being captured into a graph. `None` if the driver does not report
/// it, as for the legacy stream while another stream is captured.
pub(crate) fn capture(stream: Handle) -> Option<bool> {
    // SAFETY: writes a number.
    query(0, |out| unsafe { cuStreamIsCapturing(stream, out) }).map(|status| status != 0)
}

/// [`capture`], with `None` as false.
pub(crate) fn is_capturing(stream: Handle) -> bool {
    capture(stream) == Some(true)
}

/// Sets the calling thread's capture mode and returns the previous one.
pub(crate) fn exchange_capture_mode(mode: c_int) -> Option<c_int> {
    let mut mode = mode;
    // SAFETY: reads and writes a number.
    (unsafe { cuThreadExchangeStreamCaptureMode(&raw mut mode) } == SUCCESS).then_some(mode)
}

/// Creates an event with timing in the current context; null on failure.
pub(crate) fn create_event() -> Handle {
    // SAFETY: writes a handle.
    query(ptr::null_mut(), |out| unsafe { cuEventCreate(out, 0) }).unwrap_or(ptr::null_mut())
}

pub(crate) fn destroy_event(event: Handle) {
    // SAFETY: an event of this library. If its context was destroyed, the driver rejects it.
    unsafe { cuEventDestroy_v2(event) };
}

pub(crate) fn record(event: Handle, stream: Handle) -> bool {
    // SAFETY: an event of this library; the stream is the one that the program launches on.
    unsafe { cuEventRecord(event, stream) == SUCCESS }
}

/// Returns true if the work before an event has completed. `None` if the driver no longer knows the
/// event.
pub(crate) fn is_done(event: Handle) -> Option<bool> {
    const NOT_READY: CuResult = 600;
    // SAFETY: as in `destroy_event`.
    match unsafe { cuEventQuery(event) } {
        SUCCESS => Some(true),
        NOT_READY => Some(false),
        _ => None,
    }
}

/// Nanoseconds from one event to another.
pub(crate) fn elapsed(from: Handle, to: Handle) -> Option<i64> {
    // SAFETY: writes a number; the events are as in `destroy_event`.
    query(0f32, |out| unsafe { cuEventElapsedTime(out, from, to) })
        .map(|milliseconds| (milliseconds * 1e6) as i64)
}

/// The pool that `cuMemAllocAsync` uses on a device.
pub(crate) fn pool_of(device: Ordinal) -> Option<Handle> {
    // SAFETY: writes a handle.
    query(ptr::null_mut(), |out| unsafe { cuDeviceGetMemPool(out, device) })
}

/// The device whose memory a pool has, `Some(None)` for host memory, as CUDA 13 reports it. On
/// older drivers only default and current pools can be attributed.
pub(crate) fn owner_of_pool(pool: Handle) -> Option<Option<Ordinal>> {
    const ALLOCATION_TYPE: c_int = 9;
    const LOCATION_ID: c_int = 11;
    const LOCATION_TYPE: c_int = 12;
    let attribute = |attribute| {
        // SAFETY: writes a number.
        query(0 as c_int, |out| unsafe { cuMemPoolGetAttribute(pool, attribute, out.cast()) })
    };
    if let (Some(id), Some(kind)) = (attribute(LOCATION_ID), attribute(LOCATION_TYPE)) {
        let location = Location { kind, id };
        return PoolProperties { kind: attribute(ALLOCATION_TYPE)?, handle_types: 0, location }.owner();
    }
    let default = (0..devices()).find(|device| {
        // SAFETY: writes a handle.
        query(ptr::null_mut(), |out| unsafe { cuDeviceGetDefaultMemPool(out, *device) }) == Some(pool)
            || pool_of(*device) == Some(pool)
    });
    default.map(Some)
}

/// The pool's reserved and used memory on the device, in bytes.
pub(crate) fn pool_memory(pool: Handle) -> Option<(u64, u64)> {
    const RESERVED: c_int = 5;
    const USED: c_int = 7;
    // SAFETY: writes a 64-bit number.
    let attribute = |at| query(0u64, |out| unsafe { cuMemPoolGetAttribute(pool, at, out.cast()) });
    Some((attribute(RESERVED)?, attribute(USED)?))
}

/// The reserved and used graph memory of a device, in bytes.
pub(crate) fn graph_memory(device: Ordinal) -> Option<(u64, u64)> {
    const USED: c_int = 0;
    const RESERVED: c_int = 2;
    // SAFETY: writes a 64-bit number.
    let attribute = |at| query(0u64, |out| unsafe { cuDeviceGetGraphMemAttribute(device, at, out.cast()) });
    Some((attribute(RESERVED)?, attribute(USED)?))
}

/// The size of an array. The driver reports it only for some kinds of arrays.
pub(crate) fn array_memory(array: Handle, device: Ordinal) -> Option<u64> {
    // SAFETY: writes the structure.
    let found =
        query(Requirements::default(), |out| unsafe { cuArrayGetMemoryRequirements(out, array, device) });
    found.map(|requirements| requirements.size as u64).filter(|size| *size > 0)
}

/// Like [`array_memory`], for a mipmapped array.
pub(crate) fn mipmap_memory(array: Handle, device: Ordinal) -> Option<u64> {
    // SAFETY: writes the structure.
    let found = query(Requirements::default(), |out| unsafe {
        cuMipmappedArrayGetMemoryRequirements(out, array, device)
    });
    found.map(|requirements| requirements.size as u64).filter(|size| *size > 0)
}

/// Advises the driver to keep managed memory on a device as long as it fits.
pub(crate) fn prefer_device(address: u64, bytes: u64, device: Ordinal) {
    const SET_PREFERRED_LOCATION: c_int = 3;
    const SET_ACCESSED_BY: c_int = 5;
    for advice in [SET_PREFERRED_LOCATION, SET_ACCESSED_BY] {
        // SAFETY: memory that the driver has just allocated. The advice only affects speed.
        unsafe { cuMemAdvise(address, bytes as usize, advice, device) };
    }
}

/// The start of the allocation that contains an address.
pub(crate) fn allocation_start(address: u64) -> Option<u64> {
    // SAFETY: writes an address; the size output may be null.
    query(0, |out| unsafe { cuMemGetAddressRange_v2(out, ptr::null_mut(), address) })
}

/// Maps the null stream of per-thread functions to CU_STREAM_PER_THREAD.
pub(crate) fn per_thread(stream: Handle) -> Handle {
    if stream.is_null() { ptr::without_provenance_mut(2) } else { stream }
}

/// A graph node, by its effect on memory.
pub(crate) enum Node {
    Allocates {
        device: Ordinal,
        address: u64,
        bytes: u64,
    },
    Graph {
        graph: Handle,
    },
    /// The driver does not report enough.
    Unknown,
    Other,
}

pub(crate) fn node_count(graph: Handle) -> Option<usize> {
    // SAFETY: without a node buffer only their number is written.
    query(0, |count| unsafe { cuGraphGetNodes(graph, ptr::null_mut(), count) })
}

/// Reads the nodes of a graph in the order of creation, and returns their number.
pub(crate) fn nodes(graph: Handle, into: &mut [u64]) -> Option<usize> {
    let buffer = into.len();
    // SAFETY: at most `into.len()` handles are written.
    query(buffer, |count| unsafe { cuGraphGetNodes(graph, into.as_mut_ptr(), count) })
        .map(|count| count.min(buffer))
}

/// The type of a child graph node.
pub(crate) const GRAPH: c_int = 4;

pub(crate) fn node(node: Handle) -> Node {
    const ALLOCATES: c_int = 10;
    // SAFETY: writes a number.
    let kind = query(0, |out| unsafe { cuGraphNodeGetType(node, out) });
    let found = match kind {
        Some(ALLOCATES) => {
            let empty = AllocationNode {
                pool: PoolProperties { kind: 0, handle_types: 0, location: Location::default() },
                rest_of_pool: [0; 9],
                access: ptr::null(),
                access_count: 0,
                bytes: 0,
                address: 0,
            };
            // SAFETY: writes the structure.
            let made = query(empty, |out| unsafe { cuGraphMemAllocNodeGetParams(node, out) });
            made.and_then(|made| {
                // Always device memory; without a device it is the current one's.
                let device = made.pool.location.device().or_else(current_device)?;
                Some(Node::Allocates { device, address: made.address, bytes: made.bytes as u64 })
            })
        }
        // SAFETY: writes a handle.
        Some(GRAPH) => query(ptr::null_mut(), |out| unsafe { cuGraphChildGraphNodeGetGraph(node, out) })
            .map(|graph| Node::Graph { graph }),
        Some(_) => Some(Node::Other),
        None => None,
    };
    found.unwrap_or(Node::Unknown)
}
