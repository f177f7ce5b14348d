//! Entry points for contexts: their creation, and which one is current in a thread.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use crate::argument::{In, Out};
use crate::code::{Code, Outcome};
use crate::frame::entry;
use crate::handle::{Handle, Object};
use crate::objects::{Context, ContextHandle, Process, current_context, peek_context, with_context_stack};

/// The result of `cuCtxGetApiVersion` for contexts that set no other version.
const API_VERSION: u32 = 3020;

fn push(context: &'static Context) -> Outcome {
    with_context_stack(|stack| stack.push(Some(context)))
}

fn pop() -> Outcome<Option<&'static Context>> {
    with_context_stack(Vec::pop)?.ok_or(Code::InvalidContext)
}

pub(crate) fn create(process: &'static Process, out: Out<ContextHandle>, flags: u32, device: i32) -> Outcome {
    out.check()?;
    let device = process.device(device)?;
    let context = Context::make(process, device, false, flags)?;
    push(context)?;
    out.set(ContextHandle::of(Some(context)))
}

pub(crate) fn destroy(process: &'static Process, context: ContextHandle) -> Outcome {
    let context = context.some()?;
    if context.primary {
        return Err(Code::InvalidContext);
    }
    context.destroy(process);
    with_context_stack(|stack| {
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
    fn cuDevicePrimaryCtxRetain(process; context: Out<ContextHandle>, device: i32) {
        context.check()?;
        context.set(ContextHandle::of(Some(retain_primary(process, device)?)))
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

    fn cuCtxCreate(process; context: Out<ContextHandle>, flags: u32, device: i32) {
        create(process, context, flags, device)
    }

    fn cuCtxCreate_v2(process; context: Out<ContextHandle>, flags: u32, device: i32) {
        create(process, context, flags, device)
    }

    fn cuCtxCreate_v3(
        process; context: Out<ContextHandle>, _affinity: In<u64>, affinities: i32, flags: u32, device: i32,
    ) {
        if affinities != 0 {
            return Err(Code::UnsupportedExecAffinity);
        }
        create(process, context, flags, device)
    }

    fn cuCtxCreate_v4(
        process; context: Out<ContextHandle>, parameters: In<Parameters>, flags: u32, device: i32,
    ) {
        if !parameters.is_null() && parameters.get()?.affinities != 0 {
            return Err(Code::UnsupportedExecAffinity);
        }
        create(process, context, flags, device)
    }

    fn cuCtxDestroy(process; context: ContextHandle) {
        destroy(process, context)
    }

    fn cuCtxDestroy_v2(process; context: ContextHandle) {
        destroy(process, context)
    }

    fn cuCtxPushCurrent(_process; context: ContextHandle) {
        push(context.some()?)
    }

    fn cuCtxPushCurrent_v2(_process; context: ContextHandle) {
        push(context.some()?)
    }

    fn cuCtxPopCurrent(_process; context: Out<ContextHandle>) {
        context.offer(ContextHandle::of(pop()?));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(_process; context: Out<ContextHandle>) {
        context.offer(ContextHandle::of(pop()?));
        Ok(())
    }

    fn cuCtxSetCurrent(_process; context: ContextHandle) {
        let context = context.get()?;
        with_context_stack(|stack| {
            stack.pop();
            if context.is_some() {
                stack.push(context);
            }
        })
    }

    fn cuCtxGetCurrent(_process; context: Out<ContextHandle>) {
        context.set(ContextHandle::of(peek_context()))
    }

    fn cuCtxGetDevice(_process; device: Out<i32>) {
        device.set(current_context()?.device.ordinal)
    }

    fn cuCtxGetDevice_v2(_process; device: Out<i32>, context: ContextHandle) {
        let context = context.get()?.map_or_else(current_context, Ok)?;
        device.set(context.device.ordinal)
    }

    fn cuCtxGetFlags(_process; flags: Out<u32>) {
        flags.set(current_context()?.flags.load(Ordering::Relaxed))
    }

    fn cuCtxSetFlags(_process; flags: u32) {
        current_context()?.flags.store(flags, Ordering::Relaxed);
        Ok(())
    }

    fn cuCtxGetId(_process; context: ContextHandle, id: Out<u64>) {
        id.set(context.get()?.map_or_else(current_context, Ok)?.id)
    }

    fn cuCtxGetApiVersion(_process; context: ContextHandle, version: Out<u32>) {
        context.get()?.map_or_else(current_context, Ok)?;
        version.set(API_VERSION)
    }

    fn cuCtxGetLimit(_process; value: Out<u64>, limit: u32) {
        let context = current_context()?;
        let limit = context.limits.get(limit as usize).ok_or(Code::UnsupportedLimit)?;
        value.set(limit.load(Ordering::Relaxed))
    }

    fn cuCtxSetLimit(_process; limit: u32, value: u64) {
        let context = current_context()?;
        context.limits.get(limit as usize).ok_or(Code::UnsupportedLimit)?.store(value, Ordering::Relaxed);
        Ok(())
    }

    fn cuCtxGetCacheConfig(_process; config: Out<u32>) {
        current_context()?;
        config.set(0)
    }

    fn cuCtxSetCacheConfig(_process; _config: u32) {
        current_context().map(drop)
    }

    fn cuCtxGetSharedMemConfig(_process; config: Out<u32>) {
        current_context()?;
        config.set(1)
    }

    fn cuCtxSetSharedMemConfig(_process; _config: u32) {
        current_context().map(drop)
    }

    fn cuCtxGetStreamPriorityRange(_process; least: Out<i32>, greatest: Out<i32>) {
        current_context()?;
        least.offer(0);
        greatest.offer(-5);
        Ok(())
    }

    fn cuCtxEnablePeerAccess(_process; peer: ContextHandle, _flags: u32) {
        let (own, peer) = (current_context()?, peer.some()?);
        if std::ptr::eq(own.device, peer.device) { Err(Code::InvalidDevice) } else { Ok(()) }
    }

    fn cuCtxDisablePeerAccess(_process; peer: ContextHandle) {
        current_context()?;
        peer.some().map(drop)
    }
}

/// A green context: a part of the device's processors. The part has no effect here.
pub(crate) struct Green {
    device: i32,
}

impl Object for Green {
    const MAGIC: u64 = 0x6772_6565_6c69_7665;
}

entry! {
    fn cuGLCtxCreate(process; context: Out<ContextHandle>, flags: u32, device: i32) {
        create(process, context, flags, device)
    }

    fn cuGLCtxCreate_v2(process; context: Out<ContextHandle>, flags: u32, device: i32) {
        create(process, context, flags, device)
    }

    fn cuVDPAUCtxCreate(
        process; context: Out<ContextHandle>, flags: u32, device: i32, _vdpau: u32, _function: usize,
    ) {
        create(process, context, flags, device)
    }

    fn cuVDPAUCtxCreate_v2(
        process; context: Out<ContextHandle>, flags: u32, device: i32, _vdpau: u32, _function: usize,
    ) {
        create(process, context, flags, device)
    }

    fn cuGreenCtxCreate(process; green: Out<Handle<Green>>, _resources: usize, device: i32, _flags: u32) {
        green.check()?;
        retain_primary(process, device)?;
        green.set(Handle::new(Green { device }))
    }

    fn cuGreenCtxDestroy(process; green: Handle<Green>) {
        release_primary(process, green.end()?.device, false)
    }

    fn cuCtxAttach(_process; context: Out<ContextHandle>, flags: u32) {
        context.check()?;
        if flags != 0 {
            return Err(Code::InvalidValue);
        }
        let current = current_context()?;
        current.uses.fetch_add(1, Ordering::Relaxed);
        context.set(ContextHandle::of(Some(current)))
    }

    fn cuCtxDetach(process; context: ContextHandle) {
        let current = current_context()?;
        if !std::ptr::eq(context.some()?, current) {
            return Err(Code::InvalidContext);
        }
        if current.uses.load(Ordering::Relaxed) > 1 {
            current.uses.fetch_sub(1, Ordering::Relaxed);
            return Ok(());
        }
        destroy(process, context)
    }
}
