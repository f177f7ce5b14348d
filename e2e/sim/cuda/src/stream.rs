//! Streams: order, time, and waiting.
//!
//! A stream is where its last work ends on the axis of the process ([`divvy_sim::ledger::Mark`]). The legacy default
//! stream waits for the blocking streams of its context and they for it; the default stream of a thread is one of these.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use divvy_sim::Guest;
use divvy_sim::ledger::{Kernel, Mark};

use crate::argument::{In, Out};
use crate::capture::Capture;
use crate::code::Code;
use crate::context::{self, Context};
use crate::frame::{Outcome, entry};
use crate::handle::{Handle, Object};
use crate::pool::Location;

/// As many launches a context has under way; one more waits for the oldest.
const DEPTH: usize = 1024;
/// Who waits spins from so much before the end; the real driver does all the while, which would leave nothing of the
/// processors to the others.
pub(crate) const SPINS: Duration = Duration::from_micros(250);
/// And so much where it may be late: others wait in the queue meanwhile, or the program asked to be put to sleep.
pub(crate) const SLEEPS: Duration = Duration::from_micros(60);
/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;
/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`, the handles of the default streams.
pub(crate) const LEGACY: usize = 1;
const OWN: usize = 2;

/// A stream.
pub(crate) struct Stream {
    pub(crate) context: &'static Context,
    sort: Sort,
    flags: u32,
    priority: i32,
    id: u64,
    /// Its last work ends here.
    tail: AtomicU64,
    /// What is submitted is not done but noted.
    pub(crate) captures: AtomicBool,
    pub(crate) capture: Mutex<Option<Capture>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sort {
    Legacy,
    /// Waits for the legacy stream and is waited for.
    Blocking,
    Free,
}

impl Object for Stream {
    const MAGIC: u64 = 0x7374_726d_5f6c_6976;
}

/// What the streams of a context have under way.
pub(crate) struct Queue {
    /// Ends of the last launches, the next to be replaced is the oldest.
    ends: [Mark; DEPTH],
    at: usize,
    /// The last work of blocking streams, of the legacy stream, and of all.
    blocking: Mark,
    legacy: Mark,
    all: Mark,
    /// The last kernel that leaves no room for others.
    large: Mark,
    /// Managed memory that was sent for has arrived.
    arrived: Mark,
}

impl Default for Queue {
    fn default() -> Self {
        Self { ends: [0; DEPTH], at: 0, blocking: 0, legacy: 0, all: 0, large: 0, arrived: 0 }
    }
}

thread_local! {
    /// This thread's own default streams, by context.
    static OWN_STREAMS: RefCell<Vec<(u64, &'static Stream)>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Stream {
    fn new(context: &'static Context, sort: Sort, flags: u32, priority: i32) -> Self {
        let (tail, captures, capture) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::new(None));
        Self { context, sort, flags, priority, id: next_id(), tail, captures, capture }
    }

    /// The stream of a handle: one that was made, or a default stream of the current context.
    #[inline]
    pub(crate) fn of(handle: Handle<Self>, own: bool) -> Outcome<&'static Self> {
        match handle.number() {
            0 if own => Self::of_thread(),
            OWN => Self::of_thread(),
            0 | LEGACY => Ok(Self::legacy(context::current()?)),
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
        let context = context::current()?;
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

    fn guest(&self) -> &Guest {
        &self.context.guest
    }

    /// A kernel: waits while too much is under way. Where it begins and ends.
    pub(crate) fn submit(&self, length: u64, large: bool) -> (Mark, Mark) {
        self.work(length, large, true)
    }

    /// Memory on its way. (There is one engine, so that takes the time of others' kernels.) Kernels of any stream that
    /// touch memory which comes so wait for it.
    pub(crate) fn copy(&self, length: u64, comes: bool) {
        let (_, end) = self.work(length, false, false);
        if comes {
            let mut queue = self.context.queue();
            queue.arrived = queue.arrived.max(end);
        }
    }

    fn work(&self, length: u64, large: bool, touches: bool) -> (Mark, Mark) {
        let mut queue = self.context.queue();
        let oldest = queue.ends[queue.at];
        if oldest != 0 && oldest > self.guest().reached_before() {
            self.guest().wait_for(oldest, SLEEPS);
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
        if touches {
            after = after.max(queue.arrived);
        }
        let (begin, end) = self.guest().submit(Kernel { after, length, touches });
        self.tail.store(end, Ordering::Relaxed);
        let at = queue.at;
        queue.ends[at] = end;
        queue.at = (at + 1) % DEPTH;
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

    /// Where all that was submitted to it ends, and what it waits for.
    pub(crate) fn end(&self) -> Mark {
        let queue = self.context.queue();
        let tail = self.tail.load(Ordering::Relaxed);
        match self.sort {
            Sort::Legacy => tail.max(queue.blocking),
            Sort::Blocking => tail.max(queue.legacy),
            Sort::Free => tail,
        }
    }

    /// Later work begins no earlier.
    pub(crate) fn wait_behind(&self, mark: Mark) {
        self.tail.fetch_max(mark, Ordering::Relaxed);
    }

    /// Until all that was submitted is done.
    pub(crate) fn synchronize(&self) -> Outcome {
        if self.captures.load(Ordering::Acquire) {
            return Err(Code::StreamCaptureUnsupported);
        }
        let end = self.end();
        self.guest().wait_for(end, SPINS);
        self.context.device.settle_pools();
        Ok(())
    }
}

fn create(stream: Out<Handle<Stream>>, flags: u32, priority: i32) -> Outcome {
    stream.check()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::InvalidValue);
    }
    let context = context::current()?;
    let sort = if flags & NON_BLOCKING == 0 { Sort::Blocking } else { Sort::Free };
    stream.set(Handle::new(Stream::new(context, sort, flags, priority.clamp(-5, 0))))
}

fn destroy(stream: Handle<Stream>) -> Outcome {
    if stream.number() <= OWN {
        return Err(Code::InvalidHandle);
    }
    stream.end().map(drop)
}

/// A function of the program that a stream calls.
type Callback = extern "C" fn(*mut c_void);
type StreamCallback = extern "C" fn(Handle<Stream>, u32, *mut c_void);

/// The program's functions are called by the thread that submits them, once all before them is done.
fn call_host(stream: &'static Stream, call: impl FnOnce()) -> Outcome {
    if !stream.capture_work(0) {
        stream.synchronize()?;
        call();
    }
    Ok(())
}

entry! {
    fn cuStreamCreate(_process; stream: Out<Handle<Stream>>, flags: u32) {
        create(stream, flags, 0)
    }

    fn cuStreamCreateWithPriority(_process; stream: Out<Handle<Stream>>, flags: u32, priority: i32) {
        create(stream, flags, priority)
    }

    fn cuStreamDestroy(_process; stream: Handle<Stream>) {
        destroy(stream)
    }

    fn cuStreamDestroy_v2(_process; stream: Handle<Stream>) {
        destroy(stream)
    }

    fn cuStreamSynchronize | cuStreamSynchronize_ptsz(_process, own; stream: Handle<Stream>) {
        Stream::of(stream, own)?.synchronize()
    }

    fn cuStreamQuery | cuStreamQuery_ptsz(_process, own; stream: Handle<Stream>) {
        let stream = Stream::of(stream, own)?;
        if stream.guest().reached() >= stream.end() { Ok(()) } else { Err(Code::NotReady) }
    }

    fn cuStreamGetPriority | cuStreamGetPriority_ptsz(_process, own; stream: Handle<Stream>, priority: Out<i32>) {
        priority.set(Stream::of(stream, own)?.priority)
    }

    fn cuStreamGetFlags | cuStreamGetFlags_ptsz(_process, own; stream: Handle<Stream>, flags: Out<u32>) {
        flags.set(Stream::of(stream, own)?.flags)
    }

    fn cuStreamGetId | cuStreamGetId_ptsz(_process, own; stream: Handle<Stream>, id: Out<u64>) {
        id.set(Stream::of(stream, own)?.id)
    }

    fn cuStreamGetDevice | cuStreamGetDevice_ptsz(_process, own; stream: Handle<Stream>, device: Out<i32>) {
        device.set(Stream::of(stream, own)?.context.device.ordinal)
    }

    fn cuStreamGetCtx | cuStreamGetCtx_ptsz(_process, own; stream: Handle<Stream>, context: Out<context::Handle>) {
        context.set(context::Handle::of(Some(Stream::of(stream, own)?.context)))
    }

    fn cuStreamAddCallback | cuStreamAddCallback_ptsz(
        _process, own; handle: Handle<Stream>, callback: StreamCallback, data: *mut c_void, _flags: u32,
    ) {
        let stream = Stream::of(handle, own)?;
        call_host(stream, || callback(handle, 0, data))
    }

    fn cuLaunchHostFunc | cuLaunchHostFunc_ptsz(
        _process, own; stream: Handle<Stream>, function: Callback, data: *mut c_void,
    ) {
        call_host(Stream::of(stream, own)?, || function(data))
    }

    fn cuStreamAttachMemAsync | cuStreamAttachMemAsync_ptsz(
        process, own; stream: Handle<Stream>, address: u64, _length: u64, _flags: u32,
    ) {
        Stream::of(stream, own)?;
        process.memory.with(address, |_| ()).ok_or(Code::InvalidValue)
    }

    fn cuCtxSynchronize(_process) {
        synchronize_all(context::current()?)
    }

    fn cuCtxSynchronize_v2(_process; context: context::Handle) {
        synchronize_all(context.some()?)
    }

    fn cuMemPrefetchBatchAsync | cuMemPrefetchBatchAsync_ptsz(
        process, own; addresses: In<u64>, sizes: In<u64>, count: u64, locations: In<Location>, indices: In<u64>,
        kinds: u64, _flags: u64, stream: Handle<Stream>,
    ) {
        let stream = Stream::of(stream, own)?;
        for at in 0..count as usize {
            // Each location holds from its index on.
            let mut location = locations.get()?;
            for kind in 0..kinds as usize {
                if indices.at(kind)? <= at as u64 {
                    location = locations.at(kind)?;
                }
            }
            crate::linear::prefetch(process, (addresses.at(at)?, sizes.at(at)?), location.device(), stream)?;
        }
        Ok(())
    }
}

fn synchronize_all(context: &'static Context) -> Outcome {
    let all = context.queue().all;
    context.guest.wait_for(all, SPINS);
    context.device.settle_pools();
    Ok(())
}
