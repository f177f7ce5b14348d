//! The trim thread: releases unused pool memory when the node requests it.
//!
//! An idle program makes no calls, so no hook would see the request. So a process of an
//! overcommitting share starts one thread at its first pool allocation; other processes have none.
//! The thread sleeps on a futex of the policy page with all signals blocked. It is created by
//! libc's `pthread_create`, because the driver needs a complete thread. If that fails, the next
//! pool call serves the request. A forked child has no thread until it allocates from a pool
//! itself.

use super::call::real;
use super::driver::{self, Handle};
use crate::elf;
use crate::share::{Device, PROCESS};
use crate::sys;
use core::ffi::{c_int, c_void};
use core::ptr;
use divvy_interposer_core::PoolKind;

type Run = extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(*mut usize, *const c_void, Run, *mut c_void) -> c_int;
type Detach = unsafe extern "C" fn(usize) -> c_int;

/// Since glibc 2.34, libc contains the thread functions.
const LIBRARIES: [&[u8]; 2] = [b"libc.so.6", b"libpthread.so.0"];

/// Serves a pending trim request before a pool allocation, and starts the thread for later
/// requests.
#[inline]
pub(super) fn serve_requests(device: &Device) {
    if device.take_trim_request() {
        trim_pools(device);
    }
    if device.overcommits() && PROCESS.claim_trim_thread() {
        start_thread();
    }
}

/// Trims the pools of a device before an allocation is refused.
#[cold]
pub(super) fn trim_before_refusal(device: &Device) {
    trim_pools(device);
}

/// Trims the pools of a device, and reports to the node how much they still hold unused.
fn trim_pools(device: &Device) {
    let mut unused = 0;
    device.pools(|pool| {
        let pool_call = device.open_pool(PoolKind::Pool(pool));
        // The pool was destroyed meanwhile.
        if pool_call.charged() == 0 {
            return;
        }
        trim_pool(pool as Handle);
        if let Some((reserved, used)) = driver::pool_memory(pool as Handle) {
            unused += reserved.saturating_sub(used);
            pool_call.force_settle(reserved);
        }
    });
    device.set_idle_pool_bytes(unused);
}

pub(super) fn trim_pool(pool: Handle) {
    if let Some(trim) = real!(cuMemPoolTrimTo(Handle, usize)) {
        // SAFETY: the driver rejects a pool that no longer exists.
        unsafe { trim(pool, 0) };
    }
}

#[cold]
fn start_thread() {
    let found = |name: &[u8]| {
        let mut function = None;
        elf::each_object(&mut |object, _| {
            if LIBRARIES.iter().any(|library| object.is_named(library)) {
                function = function.or(object.function(name));
            }
            function.is_some()
        });
        function
    };
    let (Some(create), Some(detach)) = (found(b"pthread_create"), found(b"pthread_detach")) else { return };
    // SAFETY: libc's functions of those names, with these signatures.
    let (create, detach) = unsafe {
        (core::mem::transmute::<usize, Create>(create), core::mem::transmute::<usize, Detach>(detach))
    };
    let mut thread = 0;
    let mask = sys::block_signals();
    // SAFETY: writes the thread's handle; `run` uses only statics.
    let made = unsafe { create(&raw mut thread, ptr::null(), run, ptr::null_mut()) } == 0;
    sys::set_signals(mask);
    if made {
        // SAFETY: the thread was just created and is not used elsewhere.
        unsafe { detach(thread) };
    }
}

extern "C" fn run(_: *mut c_void) -> *mut c_void {
    loop {
        PROCESS.for_each_overcommitted(|device| {
            if device.take_trim_request() {
                trim_pools(&device);
            }
        });
        PROCESS.wait_for_trim_request();
    }
}
