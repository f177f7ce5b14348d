//! Entry points for streams: their creation, order and waiting.

use std::ffi::c_void;

use crate::argument::Out;
use crate::code::{Code, Outcome};
use crate::frame::entry;
use crate::handle::Handle;
use crate::objects::{Context, ContextHandle, PER_THREAD_STREAM, SPIN_TIME, Sort, Stream, current_context};

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

fn create(stream: Out<Handle<Stream>>, flags: u32, priority: i32) -> Outcome {
    stream.check()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::InvalidValue);
    }
    let context = current_context()?;
    let sort = if flags & NON_BLOCKING == 0 { Sort::Blocking } else { Sort::Free };
    stream.set(Handle::new(Stream::new(context, sort, flags, priority.clamp(-5, 0))))
}

fn destroy(stream: Handle<Stream>) -> Outcome {
    if stream.number() <= PER_THREAD_STREAM {
        return Err(Code::InvalidHandle);
    }
    stream.end().map(drop)
}

/// A function of the program that a stream calls.
type Callback = extern "C" fn(*mut c_void);
type StreamCallback = extern "C" fn(Handle<Stream>, u32, *mut c_void);

/// The submitting thread calls the program's function, once all earlier work is done.
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
        if stream.gpu_process().progress() >= stream.end() { Ok(()) } else { Err(Code::NotReady) }
    }

    fn cuStreamGetPriority | cuStreamGetPriority_ptsz(
        _process, own; stream: Handle<Stream>, priority: Out<i32>,
    ) {
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

    fn cuStreamGetCtx | cuStreamGetCtx_ptsz(
        _process, own; stream: Handle<Stream>, context: Out<ContextHandle>,
    ) {
        context.set(ContextHandle::of(Some(Stream::of(stream, own)?.context)))
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
        synchronize_all(current_context()?)
    }

    fn cuCtxSynchronize_v2(_process; context: ContextHandle) {
        synchronize_all(context.some()?)
    }
}

fn synchronize_all(context: &'static Context) -> Outcome {
    let all = context.queue().all;
    context.gpu_process.wait_for(all, SPIN_TIME);
    context.device.settle_pools();
    Ok(())
}
