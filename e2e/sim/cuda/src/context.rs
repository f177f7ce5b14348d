//! Contexts: each takes memory of its device, owns what is made in it, and is current in threads.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use divvy_sim::Guest;

use crate::argument::{In, Out};
use crate::code::Code;
use crate::device::Device;
use crate::frame::{Outcome, entry};
use crate::process::Process;
use crate::rules::rules;
use crate::stream::{Queue, Stream};
use crate::{array, linear, module};

/// What a context takes of its device: page tables, local memory, the runtime's kernels. Real drivers take between 100
/// and 600 MiB, by GPU and driver; this much is what 580 takes of an L4, roughly.
const CONTEXT_BYTES: u64 = 300 << 20;
/// `cuCtxGetApiVersion` of contexts that say no other.
const API_VERSION: u32 = 3020;

/// First word of a context that lives.
const MAGIC: u64 = 0x6374_785f_6c69_7665;

/// A context. Handles are its address; it is never freed, so that a stale handle is told from a good one.
#[repr(C)]
pub(crate) struct Context {
    magic: AtomicU64,
    pub(crate) id: u64,
    pub(crate) device: &'static Device,
    pub(crate) guest: Arc<Guest>,
    /// What it takes of the device.
    bytes: u64,
    primary: bool,
    /// As of `cuCtxAttach` and `cuCtxDetach`.
    pub(crate) uses: AtomicU32,
    flags: AtomicU32,
    limits: [AtomicU64; 16],
    /// Nobody may use it while it is being destroyed.
    closing: AtomicBool,
    /// Its default stream, once it was used.
    pub(crate) legacy: OnceLock<&'static Stream>,
    queue: Mutex<Queue>,
    modules: Mutex<Vec<module::Handle>>,
    arrays: Mutex<Vec<array::Handle>>,
}

/// A device's primary context.
#[derive(Default)]
pub(crate) struct Primary {
    users: u32,
    context: Option<&'static Context>,
    flags: u32,
}

impl Primary {
    pub(crate) const fn context(&self) -> Option<&'static Context> {
        self.context
    }
}

thread_local! {
    /// The last is the current one; NULL can be current.
    static STACK: RefCell<Vec<Option<&'static Context>>> = const { RefCell::new(Vec::new()) };
}

/// `CUcontext`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Handle(*const Context);

impl Handle {
    const NULL: Self = Self(std::ptr::null());

    pub(crate) fn of(context: Option<&'static Context>) -> Self {
        context.map_or(Self::NULL, |context| Self(context))
    }

    /// The context, or none for NULL.
    pub(crate) fn get(self) -> Outcome<Option<&'static Context>> {
        if self.0.is_null() {
            return Ok(None);
        }
        if !self.0.is_aligned() {
            return Err(Code::InvalidContext);
        }
        // SAFETY: a caller gives NULL or what it got from this library, and contexts are never freed.
        let context = unsafe { &*self.0 };
        if context.lives() { Ok(Some(context)) } else { Err(Code::InvalidContext) }
    }

    /// The context; NULL is refused.
    pub(crate) fn some(self) -> Outcome<&'static Context> {
        self.get()?.ok_or(Code::InvalidContext)
    }
}

impl Context {
    fn make(
        process: &'static Process,
        device: &'static Device,
        primary: bool,
        flags: u32,
    ) -> Outcome<&'static Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let guest = device.guest(process.sim)?;
        let bytes = rules().and_then(|rules| rules.context).unwrap_or(CONTEXT_BYTES);
        if !guest.charge(bytes) {
            device.leave();
            return Err(Code::OutOfMemory);
        }
        Ok(Box::leak(Box::new(Self {
            magic: AtomicU64::new(MAGIC),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            device,
            guest,
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

    /// What its streams have under way.
    pub(crate) fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Modules that end with it.
    pub(crate) fn modules(&self) -> MutexGuard<'_, Vec<module::Handle>> {
        self.modules.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Arrays that end with it.
    pub(crate) fn arrays(&self) -> MutexGuard<'_, Vec<array::Handle>> {
        self.arrays.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It lives, and its device works.
    #[inline]
    pub(crate) fn usable(&self) -> bool {
        self.lives() && self.guest.works()
    }

    fn lives(&self) -> bool {
        self.magic.load(Ordering::Relaxed) == MAGIC
    }

    /// Ends it, with all that was made in it.
    fn destroy(&'static self, process: &'static Process) {
        if self.closing.swap(true, Ordering::AcqRel) {
            return;
        }
        self.magic.store(0, Ordering::Release);
        for module in std::mem::take(&mut *self.modules()) {
            // The program may have unloaded it.
            let _ = module::unload(process, module);
        }
        for array in std::mem::take(&mut *self.arrays()) {
            let _ = array::destroy(array);
        }
        linear::end(process, self, self.primary);
        if self.primary {
            self.device.empty_pools();
        }
        self.guest.refund(self.bytes);
        self.device.leave();
    }
}

/// The thread's current context.
#[inline]
pub(crate) fn current() -> Outcome<&'static Context> {
    let context = peek().ok_or(Code::InvalidContext)?;
    if !context.lives() {
        return Err(Code::ContextIsDestroyed);
    }
    if context.guest.works() { Ok(context) } else { Err(Code::DeviceUnavailable) }
}

fn peek() -> Option<&'static Context> {
    // A thread that ends has no stack any more.
    STACK.try_with(|stack| stack.borrow().last().copied().flatten()).ok().flatten()
}

fn with_stack<T>(change: impl FnOnce(&mut Vec<Option<&'static Context>>) -> T) -> Outcome<T> {
    STACK.try_with(|stack| change(&mut stack.borrow_mut())).map_err(|_| Code::Deinitialized)
}

fn push(context: &'static Context) -> Outcome {
    with_stack(|stack| stack.push(Some(context)))
}

fn pop() -> Outcome<Option<&'static Context>> {
    with_stack(Vec::pop)?.ok_or(Code::InvalidContext)
}

pub(crate) fn create(process: &'static Process, out: Out<Handle>, flags: u32, device: i32) -> Outcome {
    out.check()?;
    let device = process.device(device)?;
    let context = Context::make(process, device, false, flags)?;
    push(context)?;
    out.set(Handle::of(Some(context)))
}

pub(crate) fn destroy(process: &'static Process, context: Handle) -> Outcome {
    let context = context.some()?;
    if context.primary {
        return Err(Code::InvalidContext);
    }
    context.destroy(process);
    with_stack(|stack| {
        if stack.last().copied().flatten().is_some_and(|top| std::ptr::eq(top, context)) {
            stack.pop();
        }
    })
}

pub(crate) fn retain_primary(process: &'static Process, device: i32) -> Outcome<&'static Context> {
    let device = process.device(device)?;
    let mut primary = device.primary.lock().unwrap_or_else(PoisonError::into_inner);
    let found = match primary.context {
        Some(found) => found,
        None => Context::make(process, device, true, primary.flags)?,
    };
    primary.context = Some(found);
    primary.users += 1;
    Ok(found)
}

pub(crate) fn release_primary(process: &'static Process, device: i32, all: bool) -> Outcome {
    let device = process.device(device)?;
    let mut primary = device.primary.lock().unwrap_or_else(PoisonError::into_inner);
    if !all && primary.users == 0 {
        return Err(Code::InvalidContext);
    }
    primary.users = if all { primary.users } else { primary.users - 1 };
    if (all || primary.users == 0)
        && let Some(context) = primary.context.take()
    {
        context.destroy(process);
        primary.flags = 0;
    }
    Ok(())
}

/// `CUctxCreateParams`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Parameters {
    affinity: *const (),
    affinities: i32,
    graphics: *const (),
}

entry! {
    fn cuDevicePrimaryCtxRetain(process; context: Out<Handle>, device: i32) {
        context.check()?;
        context.set(Handle::of(Some(retain_primary(process, device)?)))
    }

    fn cuDevicePrimaryCtxRelease(process; device: i32) {
        release_primary(process, device, false)
    }

    fn cuDevicePrimaryCtxRelease_v2(process; device: i32) {
        release_primary(process, device, false)
    }

    fn cuDevicePrimaryCtxReset(process; device: i32) {
        release_primary(process, device, true)
    }

    fn cuDevicePrimaryCtxReset_v2(process; device: i32) {
        release_primary(process, device, true)
    }

    fn cuDevicePrimaryCtxSetFlags(process; device: i32, flags: u32) {
        process.device(device)?.primary.lock().unwrap_or_else(PoisonError::into_inner).flags = flags;
        Ok(())
    }

    fn cuDevicePrimaryCtxSetFlags_v2(process; device: i32, flags: u32) {
        process.device(device)?.primary.lock().unwrap_or_else(PoisonError::into_inner).flags = flags;
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(process; device: i32, flags: Out<u32>, active: Out<i32>) {
        let primary = process.device(device)?.primary.lock().unwrap_or_else(PoisonError::into_inner);
        active.check()?;
        flags.set(primary.flags)?;
        active.set(i32::from(primary.context.is_some()))
    }

    fn cuCtxCreate(process; context: Out<Handle>, flags: u32, device: i32) {
        create(process, context, flags, device)
    }

    fn cuCtxCreate_v2(process; context: Out<Handle>, flags: u32, device: i32) {
        create(process, context, flags, device)
    }

    fn cuCtxCreate_v3(process; context: Out<Handle>, _affinity: In<u64>, affinities: i32, flags: u32, device: i32) {
        if affinities != 0 {
            return Err(Code::UnsupportedExecAffinity);
        }
        create(process, context, flags, device)
    }

    fn cuCtxCreate_v4(process; context: Out<Handle>, parameters: In<Parameters>, flags: u32, device: i32) {
        if !parameters.is_null() && parameters.get()?.affinities != 0 {
            return Err(Code::UnsupportedExecAffinity);
        }
        create(process, context, flags, device)
    }

    fn cuCtxDestroy(process; context: Handle) {
        destroy(process, context)
    }

    fn cuCtxDestroy_v2(process; context: Handle) {
        destroy(process, context)
    }

    fn cuCtxPushCurrent(_process; context: Handle) {
        push(context.some()?)
    }

    fn cuCtxPushCurrent_v2(_process; context: Handle) {
        push(context.some()?)
    }

    fn cuCtxPopCurrent(_process; context: Out<Handle>) {
        context.offer(Handle::of(pop()?));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(_process; context: Out<Handle>) {
        context.offer(Handle::of(pop()?));
        Ok(())
    }

    fn cuCtxSetCurrent(_process; context: Handle) {
        let context = context.get()?;
        with_stack(|stack| {
            stack.pop();
            if context.is_some() {
                stack.push(context);
            }
        })
    }

    fn cuCtxGetCurrent(_process; context: Out<Handle>) {
        context.set(Handle::of(peek()))
    }

    fn cuCtxGetDevice(_process; device: Out<i32>) {
        device.set(current()?.device.ordinal)
    }

    fn cuCtxGetDevice_v2(_process; device: Out<i32>, context: Handle) {
        let context = context.get()?.map_or_else(current, Ok)?;
        device.set(context.device.ordinal)
    }

    fn cuCtxGetFlags(_process; flags: Out<u32>) {
        flags.set(current()?.flags.load(Ordering::Relaxed))
    }

    fn cuCtxSetFlags(_process; flags: u32) {
        current()?.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }

    fn cuCtxGetId(_process; context: Handle, id: Out<u64>) {
        id.set(context.get()?.map_or_else(current, Ok)?.id)
    }

    fn cuCtxGetApiVersion(_process; context: Handle, version: Out<u32>) {
        context.get()?.map_or_else(current, Ok)?;
        version.set(API_VERSION)
    }

    fn cuCtxGetLimit(_process; value: Out<u64>, limit: u32) {
        let context = current()?;
        let limit = context.limits.get(limit as usize).ok_or(Code::UnsupportedLimit)?;
        value.set(limit.load(Ordering::Relaxed))
    }

    fn cuCtxSetLimit(_process; limit: u32, value: u64) {
        let context = current()?;
        context.limits.get(limit as usize).ok_or(Code::UnsupportedLimit)?.store(value, Ordering::Relaxed);
        Ok(())
    }

    fn cuCtxGetCacheConfig(_process; config: Out<u32>) {
        current()?;
        config.set(0)
    }

    fn cuCtxSetCacheConfig(_process; _config: u32) {
        current().map(drop)
    }

    fn cuCtxGetSharedMemConfig(_process; config: Out<u32>) {
        current()?;
        config.set(1)
    }

    fn cuCtxSetSharedMemConfig(_process; _config: u32) {
        current().map(drop)
    }

    fn cuCtxGetStreamPriorityRange(_process; least: Out<i32>, greatest: Out<i32>) {
        current()?;
        least.offer(0);
        greatest.offer(-5);
        Ok(())
    }

    fn cuCtxEnablePeerAccess(_process; peer: Handle, _flags: u32) {
        let (own, peer) = (current()?, peer.some()?);
        if std::ptr::eq(own.device, peer.device) { Err(Code::InvalidDevice) } else { Ok(()) }
    }

    fn cuCtxDisablePeerAccess(_process; peer: Handle) {
        current()?;
        peer.some().map(drop)
    }
}
