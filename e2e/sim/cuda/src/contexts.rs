//! Contexts by other calls than `cuCtxCreate`: those for OpenGL and VDPAU, which are like any other here; green ones,
//! each of which uses the primary context; and uses that are counted.

use std::sync::atomic::Ordering;

use crate::argument::Out;
use crate::code::Code;
use crate::context::{self, create, destroy, release_primary, retain_primary};
use crate::frame::entry;
use crate::handle::{Handle, Object};

/// A green context: a part of the device's processors, which nobody counts here.
pub(crate) struct Green {
    device: i32,
}

impl Object for Green {
    const MAGIC: u64 = 0x6772_6565_6c69_7665;
}

entry! {
    fn cuGLCtxCreate(process; context: Out<context::Handle>, flags: u32, device: i32) {
        create(process, context, flags, device)
    }

    fn cuGLCtxCreate_v2(process; context: Out<context::Handle>, flags: u32, device: i32) {
        create(process, context, flags, device)
    }

    fn cuVDPAUCtxCreate(
        process; context: Out<context::Handle>, flags: u32, device: i32, _vdpau: u32, _function: usize,
    ) {
        create(process, context, flags, device)
    }

    fn cuVDPAUCtxCreate_v2(
        process; context: Out<context::Handle>, flags: u32, device: i32, _vdpau: u32, _function: usize,
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

    fn cuCtxAttach(_process; context: Out<context::Handle>, flags: u32) {
        context.check()?;
        if flags != 0 {
            return Err(Code::InvalidValue);
        }
        let current = context::current()?;
        current.uses.fetch_add(1, Ordering::Relaxed);
        context.set(context::Handle::of(Some(current)))
    }

    fn cuCtxDetach(process; context: context::Handle) {
        let current = context::current()?;
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
