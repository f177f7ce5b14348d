//! The objects of the CUDA driver, which refer to each other: a process owns its devices and its
//! memory, a device its pools and its primary context, a context its streams, and each allocation
//! refers to its context and to its payer.
//!
//! This module has no entry points. Those of contexts, devices, streams, pools and memory are in the
//! modules above it, which this one does not import.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use divvy_sim::catalogue::GpuModel;
use divvy_sim::mig;
use divvy_sim::state::{Ci, Gi, Gpu, State};
use divvy_sim::usage::{AttachError, Kernel, Mark, Meeting, Place};
use divvy_sim::visible_devices::VisibleDevices;
use divvy_sim::{GpuProcess, Sim};

use crate::addresses;
use crate::code::{Code, Outcome};
use crate::content::Content;
use crate::graph_objects::Capture;
use crate::handle::{Handle, Object};
use crate::location::PoolProperties;
use crate::physical_store::Physical;
use crate::pool_figures::Figures;
use crate::rules::rules;

/// The CUDA state of this process.
pub(crate) struct Process {
    pub(crate) sim: &'static Sim,
    /// By ordinal.
    pub(crate) devices: Vec<Device>,
    pub(crate) memory: Memory,
    pub(crate) physical: Physical,
}

impl Process {
    pub(crate) fn device(&self, ordinal: i32) -> Outcome<&Device> {
        usize::try_from(ordinal).ok().and_then(|at| self.devices.get(at)).ok_or(Code::InvalidDevice)
    }
}

/// A GPU or a compute instance as this process uses it.
pub(crate) struct Device {
    pub(crate) ordinal: i32,
    pub(crate) place: Place,
    pub(crate) model: &'static GpuModel,
    /// `GPU-...` or `MIG-...`.
    pub(crate) uuid: String,
    pub(crate) gpu_uuid: String,
    /// PCI address in sysfs spelling.
    pub(crate) bdf: String,
    pub(crate) name: String,
    pub(crate) multiprocessors: u32,
    /// Bytes.
    pub(crate) memory: u64,
    /// Created with the first context or memory.
    gpu_process: Mutex<Option<Arc<GpuProcess>>>,
    pub(crate) primary: Mutex<Primary>,
    pools: Mutex<Pools>,
}

/// The pools of a device, created at the first request.
#[derive(Default)]
struct Pools {
    default: Option<Handle<Pool>>,
    /// The pool of `cuMemAllocAsync`, if it is not the default one.
    current: Option<Handle<Pool>>,
    graph: Option<Handle<Pool>>,
}

impl Device {
    /// The node's GPUs that this process sees.
    ///
    /// As with the real driver, a process that sees a MIG device sees only that one: the first, or
    /// the one that `CUDA_VISIBLE_DEVICES` names. A GPU in MIG mode is not visible as a whole.
    pub(crate) fn all(state: &State, visible: &VisibleDevices, wanted: Option<&str>) -> Vec<Self> {
        let mut gpus = Vec::new();
        let mut instances = Vec::new();
        for (slot, gpu) in
            visible.slots(state).into_iter().filter_map(|slot| Some((slot, state.gpus.get(slot)?)))
        {
            if gpu.lost {
                continue;
            }
            if !gpu.mig.current {
                gpus.push(Self::new(slot, gpu, None));
            }
            let seen = gpu.mig_devices().filter(|(gi, ci)| visible.has_ci(gpu, gi.id, ci.id));
            instances.extend(seen.map(|instance| Self::new(slot, gpu, Some(instance))));
        }
        let mut devices = match wanted {
            None if instances.is_empty() => gpus,
            None => instances,
            Some(list) => pick(gpus, instances, list),
        };
        if devices.first().is_some_and(|device| device.place.instance.is_some()) {
            devices.truncate(1);
        }
        for (device, ordinal) in devices.iter_mut().zip(0..) {
            device.ordinal = ordinal;
        }
        devices
    }

    fn new(slot: usize, gpu: &Gpu, instance: Option<(&Gi, &Ci)>) -> Self {
        let model = gpu.model();
        let (uuid, name, multiprocessors) = match instance {
            None => (gpu.uuid.clone(), model.product.clone(), model.multiprocessors),
            Some((gi, ci)) => {
                let profile = model.profile(gi.profile).map_or("", |profile| &profile.name);
                let part = mig::ci_profile(gpu, gi, ci.profile).map_or(0, |part| part.sm);
                (ci.uuid.clone(), format!("{} MIG {profile}", model.product), part)
            }
        };
        Self {
            ordinal: 0,
            place: Place { slot, instance: instance.map(|(gi, ci)| (gi.id, ci.id)) },
            model,
            uuid,
            gpu_uuid: gpu.uuid.clone(),
            bdf: gpu.bdf.clone(),
            name,
            multiprocessors,
            memory: mig::memory_mib(gpu, instance.map(|(gi, _)| gi.id)) << 20,
            gpu_process: Mutex::new(None),
            primary: Mutex::default(),
            pools: Mutex::default(),
        }
    }

    fn pools(&self) -> MutexGuard<'_, Pools> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn default_pool(&'static self, process: &'static Process) -> Handle<Pool> {
        *self.pools().default.get_or_insert_with(|| Pool::of_device(process, self))
    }

    pub(crate) fn graph_pool(&'static self, process: &'static Process) -> Handle<Pool> {
        *self.pools().graph.get_or_insert_with(|| Pool::of_device(process, self))
    }

    /// The pool of stream-ordered allocations.
    pub(crate) fn pool(&'static self, process: &'static Process) -> Handle<Pool> {
        let current = self.pools().current;
        current.unwrap_or_else(|| self.default_pool(process))
    }

    pub(crate) fn set_pool(&self, pool: Handle<Pool>) {
        self.pools().current = Some(pool);
    }

    /// Called when the pool is destroyed: the default pool takes its place.
    pub(crate) fn forget_pool(&self, pool: Handle<Pool>) {
        self.pools().current.take_if(|current| *current == pool);
    }

    /// The effect of a synchronisation on the pools.
    pub(crate) fn settle_pools(&self) {
        let (default, current) = {
            let pools = self.pools();
            (pools.default, pools.current)
        };
        for pool in default.into_iter().chain(current) {
            pool.get().into_iter().for_each(Pool::settle);
        }
    }

    /// The device is reset: its pools release everything.
    pub(crate) fn empty_pools(&self) {
        let pools = self.pools();
        for pool in [pools.default, pools.current, pools.graph].into_iter().flatten() {
            pool.get().into_iter().for_each(|pool| pool.trim(0));
        }
    }

    /// Registers this process as a user of the device.
    pub(crate) fn gpu_process(&self, sim: &Sim) -> Outcome<Arc<GpuProcess>> {
        let mut gpu_process = self.gpu_process.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu_process) = &*gpu_process {
            return if gpu_process.is_valid() {
                Ok(Arc::clone(gpu_process))
            } else {
                Err(Code::DeviceUnavailable)
            };
        }
        if !self.admits(sim)? {
            return Err(Code::DeviceUnavailable);
        }
        let usage = sim.usage().ok_or(Code::OperatingSystem)?;
        let entered = GpuProcess::attach(usage, self.place).map(Arc::new).map_err(|error| match error {
            AttachError::Absent | AttachError::Full => Code::DeviceUnavailable,
            AttachError::Denied => Code::NotPermitted,
            AttachError::Io(_) => Code::OperatingSystem,
        })?;
        if rules().is_some_and(|rules| rules.order) {
            entered.run_in_order();
        }
        *gpu_process = Some(Arc::clone(&entered));
        Ok(entered)
    }

    /// Whether the compute mode admits this process.
    fn admits(&self, sim: &Sim) -> Outcome<bool> {
        let state = sim.read().map_err(|_| Code::OperatingSystem)?;
        let gpu = state.gpu(self.place.slot).map_err(|_| Code::DeviceUnavailable)?;
        let process = divvy_sim::state::Process {
            pid: std::process::id(),
            name: String::new(),
            kind: divvy_sim::state::ProcessKind::Compute,
            instance: self.place.instance,
            memory_mib: 0,
        };
        Ok(mig::allows_process(gpu, &process))
    }

    /// Removes this process from the users of the device, once it has no memory there.
    pub(crate) fn leave(&self) {
        let mut gpu_process = self.gpu_process.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(last) = gpu_process.take_if(|gpu_process| gpu_process.used() == 0) {
            last.detach();
        }
    }
}

/// The devices of a list such as `1,GPU-8f`, in its order, up to the first entry that is no device.
fn pick(gpus: Vec<Device>, instances: Vec<Device>, list: &str) -> Vec<Device> {
    let mut left: Vec<Option<Device>> = gpus.into_iter().map(Some).collect();
    let whole = left.len();
    left.extend(instances.into_iter().map(Some));
    let mut picked = Vec::new();
    for word in list.split(',').map(str::trim) {
        let at = match word.parse::<usize>() {
            Ok(index) => (index < whole).then_some(index),
            Err(_) if word.is_empty() => None,
            Err(_) => left
                .iter()
                .position(|device| device.as_ref().is_some_and(|device| device.uuid.starts_with(word))),
        };
        match at.and_then(|at| left.get_mut(at)?.take()) {
            Some(device) => picked.push(device),
            None => break,
        }
    }
    picked
}

/// Device memory of a context: page tables, local memory, the runtime's kernels. Real drivers take
/// between 100 and 600 MiB, depending on GPU and driver; this is roughly what driver 580 takes of
/// an L4.
const CONTEXT_BYTES: u64 = 300 << 20;

/// The first word of a living context.
const CONTEXT_MAGIC: u64 = 0x6374_785f_6c69_7665;

/// A context. It takes memory of its device, owns the objects that are created in it, and can be
/// current in threads.
///
/// Its handle is its address. It is never freed, so that a stale handle can be
/// recognised.
#[repr(C)]
pub(crate) struct Context {
    magic: AtomicU64,
    pub(crate) id: u64,
    pub(crate) device: &'static Device,
    pub(crate) gpu_process: Arc<GpuProcess>,
    /// Device memory of the context.
    bytes: u64,
    pub(crate) primary: bool,
    /// Reference count of `cuCtxAttach` and `cuCtxDetach`.
    pub(crate) uses: AtomicU32,
    pub(crate) flags: AtomicU32,
    pub(crate) limits: [AtomicU64; 16],
    /// Set while it is being destroyed; it must not be used then.
    closing: AtomicBool,
    /// The default stream, once it was used.
    pub(crate) legacy: OnceLock<&'static Stream>,
    queue: Mutex<Queue>,
    modules: Mutex<Vec<Child>>,
    arrays: Mutex<Vec<Child>>,
}

/// An object that is destroyed with its context: a module or an array.
pub(crate) struct Child {
    /// The number of its handle.
    number: usize,
    destroy: Box<dyn FnOnce(&Process) + Send>,
}

impl Child {
    /// A child that `destroy` destroys. The program may have destroyed it already by then.
    pub(crate) fn new<T: Sync + 'static>(handle: Handle<T>, destroy: fn(&Process, Handle<T>)) -> Self {
        Self { number: handle.number(), destroy: Box::new(move |process| destroy(process, handle)) }
    }

    /// Whether it is the object of that handle.
    pub(crate) fn is<T>(&self, handle: Handle<T>) -> bool {
        self.number == handle.number()
    }

    fn destroy(self, process: &Process) {
        (self.destroy)(process);
    }
}

/// A device's primary context.
#[derive(Default)]
pub(crate) struct Primary {
    pub(crate) users: u32,
    pub(crate) context: Option<&'static Context>,
    pub(crate) flags: u32,
}

impl Primary {
    pub(crate) const fn context(&self) -> Option<&'static Context> {
        self.context
    }
}

thread_local! {
    /// The thread's stack of contexts. The last one is current, and may be NULL.
    static CONTEXT_STACK: RefCell<Vec<Option<&'static Context>>> = const { RefCell::new(Vec::new()) };
}

/// `CUcontext`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct ContextHandle(*const Context);

impl ContextHandle {
    const NULL: Self = Self(std::ptr::null());

    pub(crate) fn of(context: Option<&'static Context>) -> Self {
        context.map_or(Self::NULL, |context| Self(context))
    }

    /// The context; `None` for NULL.
    pub(crate) fn get(self) -> Outcome<Option<&'static Context>> {
        if self.0.is_null() {
            return Ok(None);
        }
        if !self.0.is_aligned() {
            return Err(Code::InvalidContext);
        }
        // SAFETY: the caller passes NULL or a handle from this library, and contexts are never
        // freed.
        let context = unsafe { &*self.0 };
        if context.lives() { Ok(Some(context)) } else { Err(Code::InvalidContext) }
    }

    /// The context. NULL is refused.
    pub(crate) fn some(self) -> Outcome<&'static Context> {
        self.get()?.ok_or(Code::InvalidContext)
    }
}

impl Context {
    pub(crate) fn make(
        process: &'static Process,
        device: &'static Device,
        primary: bool,
        flags: u32,
    ) -> Outcome<&'static Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let gpu_process = device.gpu_process(process.sim)?;
        let bytes = rules().and_then(|rules| rules.context).unwrap_or(CONTEXT_BYTES);
        if !gpu_process.charge(bytes) {
            device.leave();
            return Err(Code::OutOfMemory);
        }
        Ok(Box::leak(Box::new(Self {
            magic: AtomicU64::new(CONTEXT_MAGIC),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            gpu_process,
            bytes,
            primary,
            uses: AtomicU32::new(1),
            flags: AtomicU32::new(flags),
            limits: [const { AtomicU64::new(0) }; 16],
            closing: AtomicBool::new(false),
            legacy: OnceLock::new(),
            queue: Mutex::default(),
            modules: Mutex::default(),
            arrays: Mutex::default(),
        })))
    }

    /// The work of its streams that is in flight.
    pub(crate) fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Modules that are destroyed with it.
    pub(crate) fn modules(&self) -> MutexGuard<'_, Vec<Child>> {
        self.modules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Arrays that are destroyed with it.
    pub(crate) fn arrays(&self) -> MutexGuard<'_, Vec<Child>> {
        self.arrays.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it lives and its device works.
    #[inline]
    pub(crate) fn usable(&self) -> bool {
        self.lives() && self.gpu_process.is_valid()
    }

    fn lives(&self) -> bool {
        self.magic.load(Ordering::Relaxed) == CONTEXT_MAGIC
    }

    /// Frees its remaining memory when it ends. For a primary context, also the memory from the
    /// device's pools.
    fn free_memory(&self, process: &Process) {
        process.memory.free_all(|block| match &block.payer {
            Payer::Pool(_) | Payer::Graph { .. } => {
                self.primary && std::ptr::eq(block.context.device, self.device)
            }
            _ => block.context.id == self.id,
        });
    }

    /// Destroys it, and everything that was created in it.
    pub(crate) fn destroy(&'static self, process: &'static Process) {
        if self.closing.swap(true, Ordering::AcqRel) {
            return;
        }
        self.magic.store(0, Ordering::Release);
        for module in std::mem::take(&mut *self.modules()) {
            module.destroy(process);
        }
        for array in std::mem::take(&mut *self.arrays()) {
            array.destroy(process);
        }
        self.free_memory(process);
        if self.primary {
            self.device.empty_pools();
        }
        self.gpu_process.refund(self.bytes);
        self.device.leave();
    }
}

/// The thread's current context.
#[inline]
pub(crate) fn current_context() -> Outcome<&'static Context> {
    let context = peek_context().ok_or(Code::InvalidContext)?;
    if !context.lives() {
        return Err(Code::ContextIsDestroyed);
    }
    if context.gpu_process.is_valid() { Ok(context) } else { Err(Code::DeviceUnavailable) }
}

/// The thread's current context, which may be destroyed.
pub(crate) fn peek_context() -> Option<&'static Context> {
    // A thread that is ending has no stack any more.
    CONTEXT_STACK.try_with(|stack| stack.borrow().last().copied().flatten()).ok().flatten()
}

/// Changes the thread's stack of contexts.
pub(crate) fn with_context_stack<T>(
    change: impl FnOnce(&mut Vec<Option<&'static Context>>) -> T,
) -> Outcome<T> {
    CONTEXT_STACK.try_with(|stack| change(&mut stack.borrow_mut())).map_err(|_| Code::Deinitialized)
}

/// The maximum number of launches in flight per context; one more waits for the oldest.
const MAX_LAUNCHES_IN_FLIGHT: usize = 1024;
/// A waiting thread spins for this long before the expected end. The real driver spins all the
/// time, which would leave no processor time for the other processes here.
pub(crate) const SPIN_TIME: Duration = Duration::from_micros(250);
/// The same where precision matters less: in the queue, or where the program requested a blocking
/// wait.
pub(crate) const SHORT_SPIN_TIME: Duration = Duration::from_micros(60);
/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, the handles of the default streams.
pub(crate) const LEGACY_STREAM: usize = 1;
pub(crate) const PER_THREAD_STREAM: usize = 2;

/// A stream: the end of its last work on the timeline of the process
/// ([`divvy_sim::usage::Mark`]).
///
/// The legacy default stream and the blocking streams of its context wait for each other; a
/// per-thread default stream is a blocking stream.
pub(crate) struct Stream {
    pub(crate) context: &'static Context,
    pub(crate) sort: Sort,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    pub(crate) id: u64,
    /// The end of its last work.
    tail: AtomicU64,
    /// Whether submitted work is captured instead of executed.
    pub(crate) captures: AtomicBool,
    pub(crate) capture: Mutex<Option<Capture>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    Legacy,
    /// Waits for the legacy stream, and the legacy stream waits for it.
    Blocking,
    Free,
}

impl Object for Stream {
    const MAGIC: u64 = 0x7374_726d_5f6c_6976;
}

/// The work of a context's streams that is in flight.
pub(crate) struct Queue {
    /// The ends of the last launches; the next one to be replaced is the oldest.
    ends: [Mark; MAX_LAUNCHES_IN_FLIGHT],
    at: usize,
    /// The end of the last work of blocking streams, of the legacy stream, and of all streams.
    blocking: Mark,
    legacy: Mark,
    pub(crate) all: Mark,
    /// The end of the last kernel that fills the device.
    large: Mark,
    /// When managed memory that is being moved arrives.
    arrived: Mark,
}

impl Default for Queue {
    fn default() -> Self {
        Self {
            ends: [0; MAX_LAUNCHES_IN_FLIGHT],
            at: 0,
            blocking: 0,
            legacy: 0,
            all: 0,
            large: 0,
            arrived: 0,
        }
    }
}

thread_local! {
    /// This thread's default streams, by context.
    static OWN_STREAMS: RefCell<Vec<(u64, &'static Stream)>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Stream {
    pub(crate) fn new(context: &'static Context, sort: Sort, flags: u32, priority: i32) -> Self {
        let (tail, captures, capture) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::new(None));
        Self { context, sort, flags, priority, id: next_id(), tail, captures, capture }
    }

    /// The stream of a handle: one that was created, or a default stream of the current context.
    #[inline]
    pub(crate) fn of(handle: Handle<Self>, own: bool) -> Outcome<&'static Self> {
        match handle.number() {
            0 if own => Self::of_thread(),
            PER_THREAD_STREAM => Self::of_thread(),
            0 | LEGACY_STREAM => Ok(Self::legacy(current_context()?)),
            _ => {
                let stream = handle.get()?;
                if stream.context.usable() { Ok(stream) } else { Err(Code::ContextIsDestroyed) }
            }
        }
    }

    fn legacy(context: &'static Context) -> &'static Self {
        context.legacy.get_or_init(|| Box::leak(Box::new(Self::new(context, Sort::Legacy, 0, 0))))
    }

    fn of_thread() -> Outcome<&'static Self> {
        let context = current_context()?;
        let found = OWN_STREAMS.try_with(|streams| {
            let mut streams = streams.borrow_mut();
            if let Some((_, stream)) = streams.iter().find(|(id, _)| *id == context.id) {
                return *stream;
            }
            let stream: &'static Self = Box::leak(Box::new(Self::new(context, Sort::Blocking, 0, 0)));
            streams.push((context.id, stream));
            stream
        });
        found.map_err(|_| Code::Deinitialized)
    }

    pub(crate) fn gpu_process(&self) -> &GpuProcess {
        &self.context.gpu_process
    }

    /// Submits a kernel; waits while too many launches are in flight. Returns the kernel's begin
    /// and end.
    pub(crate) fn submit(&self, length: u64, large: bool, meeting: Option<Meeting>) -> (Mark, Mark) {
        self.work(Kernel { after: 0, length, touches: true, meeting }, large)
    }

    /// Submits a transfer of managed memory. Kernels of any stream that touch memory on its way to
    /// the device wait for it. (The simulated GPU has one engine, so a transfer takes time from
    /// kernels.)
    pub(crate) fn copy(&self, length: u64, comes: bool) {
        let (_, end) = self.work(Kernel { after: 0, length, touches: false, meeting: None }, false);
        if comes {
            let mut queue = self.context.queue();
            queue.arrived = queue.arrived.max(end);
        }
    }

    fn work(&self, kernel: Kernel, large: bool) -> (Mark, Mark) {
        let mut queue = self.context.queue();
        let oldest = queue.ends[queue.at];
        if oldest != 0 && oldest > self.gpu_process().last_progress() {
            self.gpu_process().wait_for(oldest, SHORT_SPIN_TIME);
        }
        let mut after = self.tail.load(Ordering::Relaxed);
        match self.sort {
            Sort::Legacy => after = after.max(queue.blocking),
            Sort::Blocking => after = after.max(queue.legacy),
            Sort::Free => {}
        }
        if large {
            after = after.max(queue.large);
        }
        if kernel.touches {
            after = after.max(queue.arrived);
        }
        let (begin, end) = self.gpu_process().submit(Kernel { after, ..kernel });
        self.tail.store(end, Ordering::Relaxed);
        let at = queue.at;
        queue.ends[at] = end;
        queue.at = (at + 1) % MAX_LAUNCHES_IN_FLIGHT;
        match self.sort {
            Sort::Legacy => queue.legacy = queue.legacy.max(end),
            Sort::Blocking => queue.blocking = queue.blocking.max(end),
            Sort::Free => {}
        }
        queue.all = queue.all.max(end);
        if large {
            queue.large = queue.large.max(end);
        }
        (begin, end)
    }

    /// The end of all work that was submitted to it or that it waits for.
    pub(crate) fn end(&self) -> Mark {
        let queue = self.context.queue();
        let tail = self.tail.load(Ordering::Relaxed);
        match self.sort {
            Sort::Legacy => tail.max(queue.blocking),
            Sort::Blocking => tail.max(queue.legacy),
            Sort::Free => tail,
        }
    }

    /// Makes later work begin no earlier than that mark.
    pub(crate) fn wait_behind(&self, mark: Mark) {
        self.tail.fetch_max(mark, Ordering::Relaxed);
    }

    /// Waits until all submitted work is done.
    pub(crate) fn synchronize(&self) -> Outcome {
        if self.captures.load(Ordering::Acquire) {
            return Err(Code::StreamCaptureUnsupported);
        }
        let end = self.end();
        self.gpu_process().wait_for(end, SPIN_TIME);
        self.context.device.settle_pools();
        Ok(())
    }
}

/// A memory pool, which reserves device memory in chunks and lends it.
///
/// A pool keeps freed memory until a synchronisation, and afterwards as much as its release
/// threshold. The device lacks the reserved memory, not the used memory. Freeing takes effect at
/// once here: streams order the reuse of memory, and programs cannot tell the difference.
pub(crate) struct Pool {
    /// `None` for host memory.
    device: Option<&'static Device>,
    process: &'static Process,
    /// The device's default pool, which is never destroyed.
    pub(crate) default: bool,
    pub(crate) properties: PoolProperties,
    pub(crate) switches: Mutex<[u32; 3]>,
    state: Mutex<PoolState>,
}

impl Object for Pool {
    const MAGIC: u64 = 0x706f_6f6c_5f6c_6976;
}

#[derive(Default)]
struct PoolState {
    figures: Figures,
    /// The process that pays for the reserved memory, while there is some.
    payer: Option<Arc<GpuProcess>>,
    /// Destroyed: it ends when its last memory is returned.
    closed: bool,
}

impl Pool {
    pub(crate) fn new(
        process: &'static Process,
        device: Option<&'static Device>,
        default: bool,
        properties: PoolProperties,
    ) -> Self {
        let state = PoolState {
            figures: Figures { most: properties.max_size, ..Figures::default() },
            ..PoolState::default()
        };
        Self { device, process, default, properties, switches: Mutex::new([1; 3]), state: Mutex::new(state) }
    }

    /// A default pool of a device.
    pub(crate) fn of_device(process: &'static Process, device: &'static Device) -> Handle<Self> {
        Handle::new(Self::new(process, Some(device), true, PoolProperties::of_device(device.ordinal)))
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn figures(&self) -> Figures {
        self.state().figures
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Figures)) {
        change(&mut self.state().figures);
    }

    /// Reserves memory for an allocation.
    pub(crate) fn take(&self, size: u64) -> Outcome {
        let mut state = self.state();
        if state.closed {
            return Err(Code::InvalidValue);
        }
        if let Some((liked, least)) = state.figures.growth(size)? {
            let grown = match self.device {
                None => liked,
                Some(device) => {
                    let gpu_process = match &state.payer {
                        Some(gpu_process) => Arc::clone(gpu_process),
                        None => device.gpu_process(self.process.sim)?,
                    };
                    let fits = [liked, least].into_iter().find(|grown| gpu_process.charge(*grown));
                    let grown = fits.ok_or(Code::OutOfMemory)?;
                    state.payer = Some(gpu_process);
                    grown
                }
            };
            state.figures.grow(grown);
        }
        state.figures.take(size);
        Ok(())
    }

    /// Takes back the memory of an allocation.
    pub(crate) fn give(&self, size: u64) {
        let mut state = self.state();
        state.figures.give(size);
        if state.closed {
            Self::shrink(&mut state, 0);
        }
    }

    /// The effect of a synchronisation.
    pub(crate) fn settle(&self) {
        let mut state = self.state();
        let threshold = state.figures.threshold;
        Self::shrink(&mut state, threshold);
    }

    /// Releases unused memory except `keep` bytes.
    pub(crate) fn trim(&self, keep: u64) {
        Self::shrink(&mut self.state(), keep);
    }

    /// Destroys it. Its memory lives until it is freed, so the object stays.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        Self::shrink(&mut state, 0);
    }

    fn shrink(state: &mut PoolState, keep: u64) {
        let freed = state.figures.shrink(keep);
        if let Some(gpu_process) = &state.payer {
            gpu_process.refund(freed);
        }
        if state.figures.reserved == 0 {
            state.payer = None;
        }
    }
}

/// The payer of an allocation, which also gives its kind.
#[derive(Clone)]
pub(crate) enum Payer {
    /// This process, on one device.
    GpuProcess(Arc<GpuProcess>),
    /// A pool that has reserved it.
    Pool(Handle<Pool>),
    /// A device's pool for graphs, while the allocation of a graph's node is live. The address
    /// belongs to the node, and to the executable graph that may be launched with it.
    Graph { pool: Handle<Pool>, live: bool, node: bool, runnable: bool },
    /// Another process, which shares the memory.
    OtherProcess,
    /// Another library, such as a graphics API, which shares the memory.
    External,
    /// The host: pinned or managed memory.
    Host(Host),
}

/// Host memory that devices may use.
#[derive(Clone)]
pub(crate) struct Host {
    pub(crate) managed: bool,
    /// Memory of the program, not created here.
    pub(crate) registered: bool,
    pub(crate) flags: u32,
    /// For managed memory, the device whose kernels use it; `None` if they access it in host
    /// memory.
    pub(crate) home: Option<Arc<GpuProcess>>,
}

/// An allocation.
pub(crate) struct Block {
    pub(crate) address: u64,
    /// The requested size, in bytes.
    pub(crate) size: u64,
    pub(crate) payer: Payer,
    /// The context that it was created in.
    pub(crate) context: &'static Context,
    /// Distinguishes it from earlier allocations at the same address.
    pub(crate) id: u64,
    /// Its content, after the first write.
    pub(crate) content: Content,
    /// The file with its content, once other processes may open it. It is removed when the allocation
    /// is freed.
    pub(crate) exported: Option<PathBuf>,
}

/// All allocations of the process.
///
/// The cell that was freed last is used next, because real drivers reuse addresses at once. Memory
/// that the host may access too (managed and pinned) is mapped where the kernel likes.
#[derive(Default)]
pub(crate) struct Memory {
    space: Mutex<Space>,
}

struct Space {
    regions: [Region; addresses::REGIONS],
    /// Managed and pinned memory, by address.
    hosts: BTreeMap<u64, Block>,
    made: u64,
}

#[derive(Default)]
struct Region {
    cells: Vec<Option<Block>>,
    /// Numbers of empty cells; the last one is used first.
    empty: Vec<u32>,
}

impl Default for Space {
    fn default() -> Self {
        Self { regions: std::array::from_fn(|_| Region::default()), hosts: BTreeMap::new(), made: 0 }
    }
}

impl Space {
    fn insert(&mut self, mut block: Block) -> Outcome<u64> {
        self.made += 1;
        block.id = self.made;
        if matches!(block.payer, Payer::Host(_)) {
            let address = block.address;
            self.hosts.insert(address, block);
            return Ok(address);
        }
        let index = addresses::region_for(block.size).ok_or(Code::OutOfMemory)?;
        let region = &mut self.regions[index];
        let cell = match region.empty.pop() {
            Some(cell) => cell as usize,
            None if (region.cells.len() as u64)
                < 1 << (addresses::REGION_BITS - addresses::cell_bits(index)) =>
            {
                region.cells.push(None);
                region.cells.len() - 1
            }
            None => return Err(Code::OutOfMemory),
        };
        let address = addresses::BASE
            + ((index as u64) << addresses::REGION_BITS)
            + ((cell as u64) << addresses::cell_bits(index));
        block.address = address;
        region.cells[cell] = Some(block);
        Ok(address)
    }

    fn find(&mut self, address: u64) -> Option<&mut Block> {
        let block = match addresses::cell_of(address) {
            Some((region, cell)) => self.regions.get_mut(region)?.cells.get_mut(cell)?.as_mut()?,
            None => self.hosts.range_mut(..=address).next_back()?.1,
        };
        (address - block.address < block.size).then_some(block)
    }

    fn remove(&mut self, address: u64) -> Option<Block> {
        let Some((region, cell)) = addresses::cell_of(address) else { return self.hosts.remove(&address) };
        let region = self.regions.get_mut(region)?;
        let block = region.cells.get_mut(cell)?.take_if(|block| block.address == address)?;
        region.empty.push(cell as u32);
        Some(block)
    }

    fn blocks(&self) -> impl Iterator<Item = &Block> {
        self.regions.iter().flat_map(|region| region.cells.iter().flatten()).chain(self.hosts.values())
    }
}

impl Block {
    /// Returns the memory to the payer.
    fn refund(self) {
        match self.payer {
            Payer::GpuProcess(gpu_process) => {
                gpu_process.refund(self.size);
                if let Some(path) = self.exported {
                    // No other process removes it.
                    drop(std::fs::remove_file(path));
                }
            }
            Payer::Pool(pool) | Payer::Graph { pool, live: true, .. } => {
                pool.get().into_iter().for_each(|pool| pool.give(self.size))
            }
            Payer::Host(Host { home: Some(gpu_process), .. }) => gpu_process.remove_managed(self.size),
            Payer::OtherProcess | Payer::External | Payer::Host(_) | Payer::Graph { live: false, .. } => {}
        }
        self.content.unmap();
    }

    pub(crate) const fn host(&self) -> Option<&Host> {
        match &self.payer {
            Payer::Host(host) => Some(host),
            _ => None,
        }
    }
}

impl Memory {
    fn lock(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates memory of the context's device.
    pub(crate) fn allocate(&self, context: &'static Context, size: u64) -> Outcome<u64> {
        if size == 0 {
            return Err(Code::InvalidValue);
        }
        if !context.gpu_process.charge(size) {
            return Err(Code::OutOfMemory);
        }
        self.add(context, size, Payer::GpuProcess(Arc::clone(&context.gpu_process)), 0, Content::NONE)
    }

    /// Adds an allocation that is paid for; host memory has its address already. If that fails, the
    /// memory is returned.
    pub(crate) fn add(
        &self,
        context: &'static Context,
        size: u64,
        payer: Payer,
        address: u64,
        content: Content,
    ) -> Outcome<u64> {
        let block = Block { address, size, payer: payer.clone(), context, id: 0, content, exported: None };
        let added = self.lock().insert(block);
        if added.is_err() {
            Block { address, size, payer, context, id: 0, content: Content::NONE, exported: None }.refund();
        }
        added
    }

    /// Frees the allocation that begins at that address if `sort` accepts it, and returns
    /// INVALID_VALUE otherwise.
    pub(crate) fn free(&self, address: u64, sort: impl FnOnce(&Block) -> bool) -> Outcome {
        let block = {
            let mut space = self.lock();
            let found = space.find(address).filter(|block| block.address == address && sort(block));
            match &mut found.ok_or(Code::InvalidValue)?.payer {
                Payer::Graph { pool, live, .. } if *live => {
                    *live = false;
                    let (pool, size) = (*pool, space.find(address).map_or(0, |block| block.size));
                    drop(space);
                    pool.get()?.give(size);
                    return Ok(());
                }
                Payer::Graph { .. } => return Err(Code::InvalidValue),
                _ => space.remove(address),
            }
        };
        block.ok_or(Code::InvalidValue)?.refund();
        Ok(())
    }

    /// Claims a graph's allocation for an executable graph. Returns whether no other one has it.
    pub(crate) fn claim(&self, address: u64) -> bool {
        let claimed = self.with(address, |block| match &mut block.payer {
            Payer::Graph { runnable, .. } => !std::mem::replace(runnable, true),
            _ => false,
        });
        claimed.unwrap_or(false)
    }

    /// Called when the executable graph no longer has the allocation, or was destroyed.
    pub(crate) fn unclaim(&self, address: u64) {
        self.leave(address, |_, runnable| *runnable = false);
    }

    /// Called when the node of a graph's allocation was destroyed.
    pub(crate) fn forget(&self, address: u64) {
        self.leave(address, |node, _| *node = false);
    }

    /// Removes a graph's allocation with its address, if it is not live and neither its node nor an
    /// executable graph refers to it.
    fn leave(&self, address: u64, who: impl FnOnce(&mut bool, &mut bool)) {
        let mut space = self.lock();
        let is_left = space.find(address).is_some_and(|block| match &mut block.payer {
            Payer::Graph { live, node, runnable, .. } => {
                who(node, runnable);
                !*live && !*node && !*runnable
            }
            _ => false,
        });
        if is_left {
            drop(space.remove(address));
        }
    }

    /// The host memory for `length` bytes at an address: the source or target of a copy.
    pub(crate) fn place(&self, address: u64, length: u64) -> Outcome<*mut u8> {
        let found = self.with(address, |block| {
            let offset = address - block.address;
            if length > block.size - offset {
                return Err(Code::InvalidValue);
            }
            if block.host().is_some() {
                return Ok(address as *mut u8);
            }
            let size = block.size;
            let place = block.content.place(size)?;
            Ok(place.wrapping_add(usize::try_from(offset).map_err(|_| Code::InvalidValue)?))
        });
        match found {
            Some(place) => place,
            None if (addresses::BASE..addresses::END).contains(&address) => Err(Code::InvalidValue),
            None => Ok(address as *mut u8),
        }
    }

    /// Calls a function with the allocation that contains an address.
    pub(crate) fn with<T>(&self, address: u64, look: impl FnOnce(&mut Block) -> T) -> Option<T> {
        self.lock().find(address).map(look)
    }

    /// Frees all allocations that `sort` accepts.
    pub(crate) fn free_all(&self, sort: impl Fn(&Block) -> bool) {
        let gone: Vec<Block> = {
            let mut space = self.lock();
            let addresses: Vec<u64> =
                space.blocks().filter(|block| sort(block)).map(|block| block.address).collect();
            addresses.into_iter().filter_map(|address| space.remove(address)).collect()
        };
        gone.into_iter().for_each(Block::refund);
    }
}
