//! Launches: the share's compute time.
//!
//! One word on the policy page says whether launches must be intercepted. If it is 0, as in a share
//! with only a memory limit, a hook is a load, a comparison and a jump to the driver with the
//! program's registers and stack. Otherwise [`divvy_interposer_core::throttle`] delays the launch
//! and measures some launches with events. Launches on a captured stream do not run and are let
//! through unmeasured; a graph is charged when it is launched. Copies and host functions are not
//! charged.

use super::call::{Call, CuResult, SUCCESS, by, hook, twins};
use super::driver::{self, Handle};
use crate::process::Kernel;
use crate::share::{self, DeviceAccess, PROCESS};
use core::ffi::{c_int, c_uint, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use divvy_interposer_core::{Device, Timer, Work};

/// The word that is 0 while launches go straight to the driver. Null if unknown, or if no single
/// word covers all pages.
static LAUNCH_WORD: AtomicPtr<u64> = AtomicPtr::new(ptr::null_mut());
/// The word of a process without a share.
static NO_SHARE_WORD: u64 = 0;
/// Number of streams under capture, as begun by hooked functions.
static CAPTURES: AtomicUsize = AtomicUsize::new(0);

/// Returns true if this launch may go straight to the driver.
#[inline]
fn is_unthrottled() -> bool {
    // SAFETY: a word of a page that is never unmapped, or `NEVER`.
    unsafe { LAUNCH_WORD.load(Ordering::Relaxed).as_ref() }.is_some_and(|word| {
        // SAFETY: aligned; the node writes it.
        unsafe { ptr::from_ref(word).read_volatile() == 0 }
    })
}

#[cold]
fn find_word() {
    if let Some(word) = PROCESS.launch_word() {
        LAUNCH_WORD.store(word.unwrap_or(&raw const NO_SHARE_WORD).cast_mut(), Ordering::Relaxed);
    }
}

/// Runs a launch on a stream when the share has compute time. One function serves all hooks: a copy
/// in each would be a tenth of this library. Hooks move their arguments into `call`: capture by
/// reference would store and reload each, a third of the whole cost.
#[inline(never)]
pub(super) fn throttled(work: Work, stream: Handle, call: Call<'_>) -> CuResult {
    if LAUNCH_WORD.load(Ordering::Relaxed).is_null() {
        find_word();
    }
    if is_unthrottled() || CAPTURES.load(Ordering::Relaxed) > 0 && driver::capture(stream) != Some(false) {
        return call.call();
    }
    let only = driver::only_device();
    let ordinal = only.or_else(driver::current_device);
    let device = match ordinal.and_then(|ordinal| PROCESS.known_device(ordinal)) {
        Some(device) => device,
        None => match ordinal.map_or(DeviceAccess::Unmanaged, share::for_ordinal) {
            DeviceAccess::Share(device) => device,
            // Without memory there is nothing to launch; the driver returns an error.
            DeviceAccess::Unmanaged | DeviceAccess::Denied => return call.call(),
        },
    };
    device.launch(work, &Events(stream), only.is_some(), || call.call())
}

/// Runs a call that waits for the device. Work that was launched is marked before it, so that it is
/// known after it what completed.
#[inline]
pub(super) fn waiting(wait: impl FnOnce() -> CuResult) -> CuResult {
    before_wait();
    after_wait(wait())
}

#[inline(never)]
fn before_wait() {
    if is_measured() {
        with_device(|device| device.mark_before_wait(&Events(ptr::null_mut())));
    }
}

/// Collects measurements after the program has synchronised or polled successfully.
#[inline(never)]
pub(super) fn after_wait(answer: CuResult) -> CuResult {
    if answer == SUCCESS && is_measured() {
        with_device(|device| device.collect_measurements(&Events(ptr::null_mut())));
    }
    answer
}

/// Whether launches are throttled and measured, and no stream is captured.
fn is_measured() -> bool {
    let is_throttled = !LAUNCH_WORD.load(Ordering::Relaxed).is_null() && !is_unthrottled();
    is_throttled && CAPTURES.load(Ordering::Relaxed) == 0
}

/// Calls `act` with the current device, if it has a share.
#[cold]
fn with_device(act: impl FnOnce(Device<'static, Kernel>)) {
    let ordinal = driver::only_device().or_else(driver::current_device);
    if let Some(device) = ordinal.and_then(|ordinal| PROCESS.known_device(ordinal)) {
        act(device);
    }
}

/// Charges a throttled launch and returns true if it may go straight to the driver.
#[inline]
fn try_fast(work: Work) -> bool {
    CAPTURES.load(Ordering::Relaxed) == 0 && PROCESS.try_fast_launch(work)
}

/// [`try_fast`] for launches that pass their grid.
extern "C" fn kernel_fast(function: Handle, x: c_uint, y: c_uint, z: c_uint) -> bool {
    try_fast(kernel(function, [x, y, z]))
}

/// [`try_fast`] for launches that pass a configuration.
///
/// # Safety
/// `configuration` is null or points to a configuration.
unsafe extern "C" fn configured_fast(configuration: *const c_void, function: Handle) -> bool {
    // SAFETY: guaranteed by the caller.
    try_fast(unsafe { configured(function, configuration) }.0)
}

/// For functions that are called too rarely for a fast path.
#[unsafe(naked)]
extern "C" fn never_fast() -> bool {
    constant_body!(0)
}

/// Events on one stream.
struct Events(Handle);

/// Runs `call` in relaxed capture mode. While a stream is captured, some calls of any thread would
/// otherwise invalidate the capture.
fn in_relaxed_mode<T>(call: impl FnOnce() -> T) -> T {
    if CAPTURES.load(Ordering::Relaxed) == 0 {
        return call();
    }
    const RELAXED: c_int = 2;
    let mode = driver::exchange_capture_mode(RELAXED);
    let answer = call();
    mode.map(driver::exchange_capture_mode);
    answer
}

impl Timer for Events {
    fn context(&self) -> u64 {
        driver::current_context() as u64
    }

    fn create(&self) -> u64 {
        in_relaxed_mode(driver::create_event) as u64
    }

    fn destroy(&self, event: u64) {
        in_relaxed_mode(|| driver::destroy_event(event as usize as Handle));
    }

    fn record(&self, event: u64) -> bool {
        in_relaxed_mode(|| {
            driver::capture(self.0) == Some(false) && driver::record(event as usize as Handle, self.0)
        })
    }

    fn is_done(&self, event: u64) -> Option<bool> {
        in_relaxed_mode(|| driver::is_done(event as usize as Handle))
    }

    fn elapsed(&self, from: u64, to: u64) -> Option<i64> {
        in_relaxed_mode(|| driver::elapsed(from as usize as Handle, to as usize as Handle))
    }
}

/// Defines the hook of a launch: like [`hook`], but it first tests the word, in a few instructions
/// that preserve all state. If the word is nonzero, `$goes` is called with the same arguments. If
/// that returns true, the driver is still called by a jump: passing on eleven arguments costs more
/// than charging.
macro_rules! launch {
    (
        $(#[$meta:meta])* $goes:ident $name:ident($($argument:ident: $kind:ty),* $(,)?)
        |$real:ident| $body:block
    ) => {
        mod $name {
            use crate::cuda::launch::*;

            /// The slow path.
            pub(super) unsafe extern "C" fn slow($($argument: $kind),*) -> CuResult {
                let Some(address) = crate::real_symbols::function(crate::symbol_table::index::$name) else {
                    return crate::cuda::call::MISSING;
                };
                // SAFETY: the driver's function of that name, with this signature.
                let function = unsafe {
                    core::mem::transmute::<usize, unsafe extern "C" fn($($kind),*) -> CuResult>(address)
                };
                // SAFETY: called with the caller's arguments.
                let $real = |$($argument: $kind),*| unsafe { function($($argument),*) };
                $body
            }
        }

        $(#[$meta])*
        ///
        /// # Safety
        /// As required by `cuda.h` for this function.
        #[cfg_attr(panic = "abort", unsafe(no_mangle))]
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            core::arch::naked_asm!(
                "mov rax, qword ptr [rip + {word}]",
                "test rax, rax",
                "je {slow}",
                "cmp qword ptr [rax], 0",
                "jne 3f",
                "2: mov rax, qword ptr [rip + {functions} + {at}]",
                "test rax, rax",
                "je {slow}",
                "jmp rax",
                // Save the argument registers. With the return address and one more the stack is
                // aligned.
                "3: push rdi",
                "push rsi",
                "push rdx",
                "push rcx",
                "push r8",
                "push r9",
                "push rax",
                "call {goes}",
                "test al, al",
                "pop rax",
                "pop r9",
                "pop r8",
                "pop rcx",
                "pop rdx",
                "pop rsi",
                "pop rdi",
                "jne 2b",
                "jmp {slow}",
                word = sym LAUNCH_WORD, functions = sym crate::real_symbols::FUNCTIONS,
                at = const crate::symbol_table::index::$name * 8, slow = sym $name::slow, goes = sym $goes,
            );
            #[cfg(target_arch = "aarch64")]
            core::arch::naked_asm!(
                "adrp x16, {word}",
                "ldr x16, [x16, :lo12:{word}]",
                "cbz x16, 1f",
                "ldr x16, [x16]",
                "cbnz x16, 3f",
                "2: adrp x16, {functions} + {at}",
                "ldr x16, [x16, :lo12:{functions} + {at}]",
                "cbz x16, 1f",
                "br x16",
                // Save the argument registers and the return address.
                "3: stp x0, x1, [sp, #-80]!",
                "stp x2, x3, [sp, #16]",
                "stp x4, x5, [sp, #32]",
                "stp x6, x7, [sp, #48]",
                "str x30, [sp, #64]",
                "bl {goes}",
                "mov w16, w0",
                "ldr x30, [sp, #64]",
                "ldp x6, x7, [sp, #48]",
                "ldp x4, x5, [sp, #32]",
                "ldp x2, x3, [sp, #16]",
                "ldp x0, x1, [sp], #80",
                "tbnz w16, #0, 2b",
                "1: b {slow}",
                word = sym LAUNCH_WORD, functions = sym crate::real_symbols::FUNCTIONS,
                at = const crate::symbol_table::index::$name * 8, slow = sym $name::slow, goes = sym $goes,
            );
        }
    };
}

fn kernel(function: Handle, grid: [c_uint; 3]) -> Work {
    let [x, y, z] = grid.map(u64::from);
    let blocks = (x * y).saturating_mul(z);
    Work { function: function as u64, blocks }
}

/// The first fields of `CUlaunchConfig`.
#[repr(C)]
struct Configuration {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: Handle,
}

const _: () = assert!(core::mem::offset_of!(Configuration, stream) == 32);

/// # Safety
/// `configuration` is null or points to a configuration.
unsafe fn configured(function: Handle, configuration: *const c_void) -> (Work, Handle) {
    // SAFETY: guaranteed by the caller. The driver refuses null.
    match unsafe { configuration.cast::<Configuration>().as_ref() } {
        Some(configuration) => (kernel(function, configuration.grid), configuration.stream),
        None => (kernel(function, [0; 3]), ptr::null_mut()),
    }
}

launch! {
    /// Since CUDA 4.0.
    kernel_fast cuLaunchKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        throttled(kernel(function, [grid_x, grid_y, grid_z]), stream, by(&move || {
            real(
                function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters,
                extra,
            )
        }))
    }
}

launch! {
    /// On the per-thread default stream.
    kernel_fast cuLaunchKernel_ptsz(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        throttled(kernel(function, [grid_x, grid_y, grid_z]), driver::per_thread(stream), by(&move || {
            real(
                function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters,
                extra,
            )
        }))
    }
}

launch! {
    /// Since CUDA 11.6.
    configured_fast cuLaunchKernelEx(
        configuration: *const c_void, function: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        // SAFETY: required by `cuda.h`.
        let (work, stream) = unsafe { configured(function, configuration) };
        throttled(work, stream, by(&move || real(configuration, function, parameters, extra)))
    }
}

launch! {
    /// On the per-thread default stream.
    configured_fast cuLaunchKernelEx_ptsz(
        configuration: *const c_void, function: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        // SAFETY: required by `cuda.h`.
        let (work, stream) = unsafe { configured(function, configuration) };
        let on = driver::per_thread(stream);
        throttled(work, on, by(&move || real(configuration, function, parameters, extra)))
    }
}

launch! {
    /// Since CUDA 9.0.
    kernel_fast cuLaunchCooperativeKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: Handle, parameters: *mut *mut c_void,
    ) |real| {
        throttled(kernel(function, [grid_x, grid_y, grid_z]), stream, by(&move || {
            real(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters)
        }))
    }
}

launch! {
    /// On the per-thread default stream.
    kernel_fast cuLaunchCooperativeKernel_ptsz(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: Handle, parameters: *mut *mut c_void,
    ) |real| {
        throttled(kernel(function, [grid_x, grid_y, grid_z]), driver::per_thread(stream), by(&move || {
            real(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters)
        }))
    }
}

launch! {
    /// CUDA 9.0, several devices at once: charged to the current device, and never measured.
    never_fast cuLaunchCooperativeKernelMultiDevice(list: *mut Handle, count: c_uint, flags: c_uint) |real| {
        // SAFETY: the first word of each entry is its function; the driver refuses an empty list.
        let first = if list.is_null() || count == 0 { ptr::null_mut() } else { unsafe { *list } };
        throttled(kernel(first, [count, 1, 1]), ptr::null_mut(), by(&move || real(list, count, flags)))
    }
}

launch! {
    /// Before CUDA 4.0.
    never_fast cuLaunch(function: Handle) |real| {
        throttled(kernel(function, [1; 3]), ptr::null_mut(), by(&move || real(function)))
    }
}

launch! {
    /// Before CUDA 4.0.
    never_fast cuLaunchGrid(function: Handle, width: c_int, height: c_int) |real| {
        let work = kernel(function, [width.unsigned_abs(), height.unsigned_abs(), 1]);
        throttled(work, ptr::null_mut(), by(&move || real(function, width, height)))
    }
}

launch! {
    /// Before CUDA 4.0.
    never_fast cuLaunchGridAsync(function: Handle, width: c_int, height: c_int, stream: Handle) |real| {
        throttled(kernel(function, [width.unsigned_abs(), height.unsigned_abs(), 1]), stream, by(&move || {
            real(function, width, height, stream)
        }))
    }
}

/// Counts a capture if it has begun.
fn capture_begun(answer: CuResult) -> CuResult {
    if answer == SUCCESS {
        CAPTURES.fetch_add(1, Ordering::Relaxed);
    }
    answer
}

/// Counts the end of a capture, successful or not. If a stream is destroyed during a capture, the
/// count stays one too high, which costs one driver call per launch.
fn capture_ended(answer: CuResult) -> CuResult {
    let _ = CAPTURES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
    answer
}

twins! {
    begin(stream: Handle) of 1 |real| {
        capture_begun(real(stream))
    }

    /// CUDA 10.0.
    cuStreamBeginCapture;
    /// On the per-thread default stream.
    cuStreamBeginCapture_ptsz;
}

twins! {
    begin_as(stream: Handle, mode: c_int) of 2 |real| {
        capture_begun(real(stream, mode))
    }

    /// Since CUDA 10.1.
    cuStreamBeginCapture_v2;
    /// On the per-thread default stream.
    cuStreamBeginCapture_v2_ptsz;
}

hook! {
    /// Since CUDA 12.3.
    cuStreamBeginCaptureToGraph(
        stream: Handle, graph: Handle, after: *const Handle, data: *const c_void, count: usize, mode: c_int,
    ) |real| {
        capture_begun(real(stream, graph, after, data, count, mode))
    }
}

hook! {
    /// On the per-thread default stream.
    cuStreamBeginCaptureToGraph_ptsz(
        stream: Handle, graph: Handle, after: *const Handle, data: *const c_void, count: usize, mode: c_int,
    ) |real| {
        capture_begun(real(stream, graph, after, data, count, mode))
    }
}

twins! {
    end(stream: Handle, graph: *mut Handle) of 2 |real| {
        capture_ended(real(stream, graph))
    }

    /// Since CUDA 10.0.
    cuStreamEndCapture;
    /// On the per-thread default stream.
    cuStreamEndCapture_ptsz;
}
