//! Questions to the driver that hooks ask: functions that are not hooked, as `cuda.h` declares them.

use super::{Answer, MISSING, SUCCESS};
use crate::genuine;
use crate::table::index;
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
            /// What `cuda.h` asks of the function of this name.
            unsafe fn $name($($argument: $kind),*) -> Answer {
                let Some(address) = genuine::function(index::$name) else { return MISSING };
                // SAFETY: the driver's function of that very name, whose signature this is.
                let function: unsafe extern "C" fn($($kind),*) -> Answer = unsafe { core::mem::transmute(address) };
                // SAFETY: as the caller says.
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
    /// The device whose memory it is; `None` for the host's.
    pub(crate) fn device(self) -> Option<Ordinal> {
        const DEVICE: c_int = 1;
        const LOCALITY_DOMAIN: c_int = 6;
        match self.kind {
            DEVICE => Some(self.id),
            // The device is the first byte of the two numbers there.
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

/// `CUDA_MEM_ALLOC_NODE_PARAMS`; its pool's properties have room to grow.
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

/// `CUmemPoolProps`, as far as every version has it.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PoolProperties {
    kind: c_int,
    handle_types: c_int,
    pub(crate) location: Location,
}

impl PoolProperties {
    /// The device whose memory such a pool has, `Some(None)` for the host's; `None` where it is managed memory of no device,
    /// which goes to the device that uses it.
    pub(crate) fn owner(self) -> Option<Option<Ordinal>> {
        const PINNED: c_int = 1;
        let device = self.location.device();
        (device.is_some() || self.kind == PINNED).then_some(device)
    }
}

fn asked<T>(mut out: T, ask: impl FnOnce(*mut T) -> Answer) -> Option<T> {
    (ask(&raw mut out) == SUCCESS).then_some(out)
}

/// What a call of this thread is about: its context, and the device that this is on.
#[derive(Clone, Copy)]
pub(crate) struct Current {
    pub(crate) device: Ordinal,
    pub(crate) context: Handle,
}

/// `None` where the thread has no context. To be asked before the call: whatever is done after it keeps the processor from
/// what the program does next, which as a rule waits for memory.
pub(crate) fn current() -> Option<Current> {
    let context = current_context();
    if context.is_null() {
        return None;
    }
    Some(Current { device: only_device().or_else(current_device)?, context })
}

/// The device of the process that sees one only, which as a rule it does: the driver need not be asked.
#[inline]
pub(crate) fn only_device() -> Option<Ordinal> {
    /// How many there are, which never changes; 0: not asked yet, or none.
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
    asked(0, |out| unsafe { cuCtxGetDevice(out) })
}

/// The calling thread's context; null where it has none.
pub(crate) fn current_context() -> Handle {
    // SAFETY: writes a handle.
    asked(ptr::null_mut(), |out| unsafe { cuCtxGetCurrent(out) }).unwrap_or(ptr::null_mut())
}

/// Whether a context still exists.
pub(crate) fn is_context(context: Handle) -> bool {
    // SAFETY: writes a number; the driver knows handles that are none.
    asked(0, |out| unsafe { cuCtxGetApiVersion(context, out) }).is_some()
}

/// Whether the device's primary context exists.
pub(crate) fn has_primary(device: Ordinal) -> bool {
    let mut active = 0;
    // SAFETY: writes two numbers.
    asked(0, |flags| unsafe { cuDevicePrimaryCtxGetState(device, flags, &raw mut active) }).is_some()
        && active != 0
}

/// The number of devices that the process sees.
pub(crate) fn devices() -> Ordinal {
    // SAFETY: writes a number.
    asked(0, |out| unsafe { cuDeviceGetCount(out) }).unwrap_or(0)
}

/// The UUIDs of a device: of the MIG instance where it is one, which only the second version tells, and of the GPU.
pub(crate) fn uuids(device: Ordinal) -> Option<[[u8; 16]; 2]> {
    // SAFETY: writes sixteen bytes.
    let gpu = asked([0; 16], |out| unsafe { cuDeviceGetUuid(out, device) });
    // SAFETY: as above.
    let own = asked([0; 16], |out| unsafe { cuDeviceGetUuid_v2(out, device) });
    Some([own.or(gpu)?, gpu.or(own)?])
}

/// The device that a stream's work runs on. The three default streams are the calling thread's context's.
pub(crate) fn stream_device(stream: Handle) -> Option<Ordinal> {
    const PER_THREAD: usize = 2;
    if stream as usize <= PER_THREAD {
        return current_device();
    }
    // SAFETY: writes a handle.
    device_of_context(asked(ptr::null_mut(), |out| unsafe { cuStreamGetCtx(stream, out) })?)
}

/// The device of a context.
pub(crate) fn device_of_context(context: Handle) -> Option<Ordinal> {
    if context == current_context() {
        return current_device();
    }
    // SAFETY: the driver refuses what is no context of its own; it is taken off again.
    if unsafe { cuCtxPushCurrent_v2(context) } != SUCCESS {
        return None;
    }
    let device = current_device();
    let mut popped = ptr::null_mut();
    // SAFETY: writes a handle.
    unsafe { cuCtxPopCurrent_v2(&raw mut popped) };
    device
}

/// Whether calls on the stream are being recorded into a graph in place of being done; `None` where the driver does not
/// say, as of the legacy stream while another one is captured.
pub(crate) fn capture(stream: Handle) -> Option<bool> {
    // SAFETY: writes a number.
    asked(0, |out| unsafe { cuStreamIsCapturing(stream, out) }).map(|status| status != 0)
}

/// [`capture`], where it is known.
pub(crate) fn is_capturing(stream: Handle) -> bool {
    capture(stream) == Some(true)
}

/// Sets how the calling thread stands to captures: the mode before.
pub(crate) fn exchange_capture_mode(mode: c_int) -> Option<c_int> {
    let mut mode = mode;
    // SAFETY: reads and writes a number.
    (unsafe { cuThreadExchangeStreamCaptureMode(&raw mut mode) } == SUCCESS).then_some(mode)
}

/// An event with a time, of the current context; null where there is none to be had.
pub(crate) fn create_event() -> Handle {
    // SAFETY: writes a handle.
    asked(ptr::null_mut(), |out| unsafe { cuEventCreate(out, 0) }).unwrap_or(ptr::null_mut())
}

pub(crate) fn destroy_event(event: Handle) {
    // SAFETY: an event of ours, or one that ended with its context, which the driver knows.
    unsafe { cuEventDestroy_v2(event) };
}

pub(crate) fn record(event: Handle, stream: Handle) -> bool {
    // SAFETY: an event of ours; the stream is the program's, which launches on it.
    unsafe { cuEventRecord(event, stream) == SUCCESS }
}

/// Whether the work before an event is done; `None` where the driver does not know the event any more.
pub(crate) fn is_done(event: Handle) -> Option<bool> {
    const NOT_READY: Answer = 600;
    // SAFETY: as of `destroy_event`.
    match unsafe { cuEventQuery(event) } {
        SUCCESS => Some(true),
        NOT_READY => Some(false),
        _ => None,
    }
}

/// Nanoseconds from one event to another.
pub(crate) fn elapsed(from: Handle, to: Handle) -> Option<i64> {
    // SAFETY: writes a number; the events are as of `destroy_event`.
    asked(0f32, |out| unsafe { cuEventElapsedTime(out, from, to) })
        .map(|milliseconds| (milliseconds * 1e6) as i64)
}

/// The pool that `cuMemAllocAsync` takes from on a device.
pub(crate) fn pool_of(device: Ordinal) -> Option<Handle> {
    // SAFETY: writes a handle.
    asked(ptr::null_mut(), |out| unsafe { cuDeviceGetMemPool(out, device) })
}

/// The device whose memory a pool has, `Some(None)` for the host's, as CUDA 13 tells it; before that, only the default
/// pools tell by themselves.
pub(crate) fn owner_of_pool(pool: Handle) -> Option<Option<Ordinal>> {
    const ALLOCATION_TYPE: c_int = 9;
    const LOCATION_ID: c_int = 11;
    const LOCATION_TYPE: c_int = 12;
    let attribute = |attribute| {
        // SAFETY: writes a number.
        asked(0 as c_int, |out| unsafe { cuMemPoolGetAttribute(pool, attribute, out.cast()) })
    };
    if let (Some(id), Some(kind)) = (attribute(LOCATION_ID), attribute(LOCATION_TYPE)) {
        let location = Location { kind, id };
        return PoolProperties { kind: attribute(ALLOCATION_TYPE)?, handle_types: 0, location }.owner();
    }
    let default = (0..devices()).find(|device| {
        // SAFETY: writes a handle.
        asked(ptr::null_mut(), |out| unsafe { cuDeviceGetDefaultMemPool(out, *device) }) == Some(pool)
            || pool_of(*device) == Some(pool)
    });
    default.map(Some)
}

/// What a pool has of the device's memory, and how much of that is allocated, in bytes.
pub(crate) fn pool_memory(pool: Handle) -> Option<(u64, u64)> {
    const RESERVED: c_int = 5;
    const USED: c_int = 7;
    // SAFETY: writes a 64-bit number.
    let attribute = |at| asked(0u64, |out| unsafe { cuMemPoolGetAttribute(pool, at, out.cast()) });
    Some((attribute(RESERVED)?, attribute(USED)?))
}

/// What the graphs of a device have of its memory, and how much of that is allocated, in bytes.
pub(crate) fn graph_memory(device: Ordinal) -> Option<(u64, u64)> {
    const USED: c_int = 0;
    const RESERVED: c_int = 2;
    // SAFETY: writes a 64-bit number.
    let attribute = |at| asked(0u64, |out| unsafe { cuDeviceGetGraphMemAttribute(device, at, out.cast()) });
    Some((attribute(RESERVED)?, attribute(USED)?))
}

/// What an array takes, as the driver tells it (of some kinds of arrays only).
pub(crate) fn array_memory(array: Handle, device: Ordinal) -> Option<u64> {
    // SAFETY: writes the structure.
    let found =
        asked(Requirements::default(), |out| unsafe { cuArrayGetMemoryRequirements(out, array, device) });
    found.map(|requirements| requirements.size as u64).filter(|size| *size > 0)
}

/// As [`array_memory`], of a mipmapped array.
pub(crate) fn mipmap_memory(array: Handle, device: Ordinal) -> Option<u64> {
    // SAFETY: writes the structure.
    let found = asked(Requirements::default(), |out| unsafe {
        cuMipmappedArrayGetMemoryRequirements(out, array, device)
    });
    found.map(|requirements| requirements.size as u64).filter(|size| *size > 0)
}

/// Has managed memory stay on a device as long as there is room.
pub(crate) fn keep_on(address: u64, bytes: u64, device: Ordinal) {
    const SET_PREFERRED_LOCATION: c_int = 3;
    const SET_ACCESSED_BY: c_int = 5;
    for advice in [SET_PREFERRED_LOCATION, SET_ACCESSED_BY] {
        // SAFETY: memory that the driver has just allocated. It is advice: without it, it is slower.
        unsafe { cuMemAdvise(address, bytes as usize, advice, device) };
    }
}

/// Where the allocation begins that an address is in.
pub(crate) fn begin_of(address: u64) -> Option<u64> {
    // SAFETY: writes an address; the size is not asked for.
    asked(0, |out| unsafe { cuMemGetAddressRange_v2(out, ptr::null_mut(), address) })
}

/// What the functions of the per-thread default stream mean by no stream: CU_STREAM_PER_THREAD.
pub(crate) fn per_thread(stream: Handle) -> Handle {
    if stream.is_null() { ptr::without_provenance_mut(2) } else { stream }
}

/// A node of a graph, as far as memory goes.
pub(crate) enum Node {
    Allocates {
        device: Ordinal,
        address: u64,
        bytes: u64,
    },
    Graph {
        graph: Handle,
    },
    /// One of which the driver tells too little.
    Unknown,
    Other,
}

pub(crate) fn node_count(graph: Handle) -> Option<usize> {
    // SAFETY: without a place for nodes only their number is written.
    asked(0, |count| unsafe { cuGraphGetNodes(graph, ptr::null_mut(), count) })
}

/// The nodes of a graph in the order in which they were made, and their number.
pub(crate) fn nodes(graph: Handle, into: &mut [u64]) -> Option<usize> {
    let room = into.len();
    // SAFETY: at most so many handles are written.
    asked(room, |count| unsafe { cuGraphGetNodes(graph, into.as_mut_ptr(), count) })
        .map(|count| count.min(room))
}

/// The type of a node that is a graph.
pub(crate) const GRAPH: c_int = 4;

pub(crate) fn node(node: Handle) -> Node {
    const ALLOCATES: c_int = 10;
    // SAFETY: writes a number.
    let kind = asked(0, |out| unsafe { cuGraphNodeGetType(node, out) });
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
            let made = asked(empty, |out| unsafe { cuGraphMemAllocNodeGetParams(node, out) });
            made.and_then(|made| {
                // Always a device's memory; what does not say which is the current one's.
                let device = made.pool.location.device().or_else(current_device)?;
                Some(Node::Allocates { device, address: made.address, bytes: made.bytes as u64 })
            })
        }
        // SAFETY: writes a handle.
        Some(GRAPH) => asked(ptr::null_mut(), |out| unsafe { cuGraphChildGraphNodeGetGraph(node, out) })
            .map(|graph| Node::Graph { graph }),
        Some(_) => Some(Node::Other),
        None => None,
    };
    found.unwrap_or(Node::Unknown)
}
