//! The one thread that this library may have: it gives back what pools keep, when the node asks for it.
//!
//! A program that has gone quiet calls nothing, so no hook would hear of the wish; and memory that its pools keep for nothing
//! is what a neighbour is missing. So a process of a share that over-commits has one thread from its first allocation
//! from a pool on, and no other process has any. It sleeps on a word of the policy page; all signals are blocked in it, so
//! that the program's handlers run in the program's threads, as before. A child of fork has none until it
//! allocates from a pool itself.
//!
//! The thread is libc's, made by the function that libc has under that name: a bare one would lack what the driver
//! needs of a thread. Where there is none to be had, the next call on a pool does what the node wishes.

use crate::cuda::pool;
use crate::elf;
use crate::share::{Device, LEDGER};
use crate::sys;
use core::ffi::{c_int, c_void};
use core::ptr;

type Run = extern "C" fn(*mut c_void) -> *mut c_void;
type Create = unsafe extern "C" fn(*mut usize, *const c_void, Run, *mut c_void) -> c_int;
type Detach = unsafe extern "C" fn(usize) -> c_int;

/// libc since 2.34 has threads itself.
const LIBRARIES: [&[u8]; 2] = [b"libc.so.6", b"libpthread.so.0"];

/// Before an allocation from a pool: does what the node wishes, and has a thread see to later wishes.
#[inline]
pub(crate) fn heed(device: &Device) {
    if device.take_wish() {
        pool::give_back(device);
    }
    if device.over_commits() && LEDGER.serve() {
        begin();
    }
}

#[cold]
fn begin() {
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
    // SAFETY: libc's functions of those names, whose signatures these are.
    let (create, detach) = unsafe {
        (core::mem::transmute::<usize, Create>(create), core::mem::transmute::<usize, Detach>(detach))
    };
    let mut thread = 0;
    let mask = sys::block_signals();
    // SAFETY: writes the thread's handle; what it runs needs nothing that could end.
    let made = unsafe { create(&raw mut thread, ptr::null(), run, ptr::null_mut()) } == 0;
    sys::set_signals(mask);
    if made {
        // SAFETY: made just now, and nobody else's.
        unsafe { detach(thread) };
    }
}

extern "C" fn run(_: *mut c_void) -> *mut c_void {
    loop {
        LEDGER.over_committed(|device| {
            if device.take_wish() {
                pool::give_back(&device);
            }
        });
        LEDGER.wait_for_wish();
    }
}
