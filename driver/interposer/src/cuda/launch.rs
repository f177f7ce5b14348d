//! Launches: the share's compute time.
//!
//! The most frequent of all calls. One word on the policy page says whether a launch has to be looked at: where it is
//! zero, as in a share that is limited in memory only, a hook is a load, a comparison and a jump, and the driver is called
//! with the registers and the stack of the program. Otherwise [`divvy_interposer_core::pace`] has the launch wait until
//! the share may, and events are recorded round some launches.
//!
//! What is launched while a stream is captured does not run: it is let through, and nothing of ours is recorded there. A
//! graph is charged when it is launched. Copies and the functions of the host are not charged.

use super::driver::{self, Handle};
use super::{Answer, Call, SUCCESS, by, hook, twins};
use crate::share::{self, LEDGER, Standing};
use core::ffi::{c_int, c_uint, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use divvy_interposer_core::{Timer, Work};

/// The word that is zero where a launch may go straight to the driver; null: not known, or there is none that says so.
static WORD: AtomicPtr<u64> = AtomicPtr::new(ptr::null_mut());
/// The word of a process without a share.
static NEVER: u64 = 0;
/// Streams that are being captured, as far as this process has begun that by a function that is hooked.
static CAPTURES: AtomicUsize = AtomicUsize::new(0);

/// Whether this launch may go straight to the driver.
#[inline]
fn is_free() -> bool {
    // SAFETY: the word of a page that is mapped for ever, or ours.
    unsafe { WORD.load(Ordering::Relaxed).as_ref() }.is_some_and(|word| {
        // SAFETY: aligned; the node writes it.
        unsafe { ptr::from_ref(word).read_volatile() == 0 }
    })
}

#[cold]
fn find_word() {
    if let Some(word) = LEDGER.at_launch() {
        WORD.store(word.unwrap_or(&raw const NEVER).cast_mut(), Ordering::Relaxed);
    }
}

/// Launches by `call` on a stream when the share's time has come. One function for all of them: a copy of it in each
/// hook would be a tenth of this library. Hooks move their arguments into `call`: by reference each would be stored
/// and looked for once more, a third of what all of this costs.
#[inline(never)]
pub(super) fn paced(work: Work, stream: Handle, call: Call<'_>) -> Answer {
    if WORD.load(Ordering::Relaxed).is_null() {
        find_word();
    }
    if is_free() || CAPTURES.load(Ordering::Relaxed) > 0 && driver::capture(stream) != Some(false) {
        return call.call();
    }
    let only = driver::only_device();
    let ordinal = only.or_else(driver::current_device);
    let device = match ordinal.and_then(|ordinal| LEDGER.known(ordinal)) {
        Some(device) => device,
        None => match ordinal.map_or(Standing::Free, share::of_cuda) {
            Standing::Share(device) => device,
            // Without memory there is nothing to launch; the driver says so.
            Standing::Free | Standing::Closed => return call.call(),
        },
    };
    device.launch(work, &Events(stream), only.is_some(), || call.call())
}

/// The program has waited for the device if `answer` says so, or has heard that it is done.
pub(super) fn waited(answer: Answer) -> Answer {
    let is_paced = !WORD.load(Ordering::Relaxed).is_null() && !is_free();
    if answer == SUCCESS && is_paced && CAPTURES.load(Ordering::Relaxed) == 0 {
        look();
    }
    answer
}

#[cold]
fn look() {
    let ordinal = driver::only_device().or_else(driver::current_device);
    if let Some(device) = ordinal.and_then(|ordinal| LEDGER.known(ordinal)) {
        device.has_waited(&Events(ptr::null_mut()));
    }
}

/// Whether a launch that is paced may go straight to the driver all the same. Then it is charged.
#[inline]
fn goes(work: Work) -> bool {
    CAPTURES.load(Ordering::Relaxed) == 0 && LEDGER.goes(work)
}

/// [`goes`] by the arguments of a launch that names its grid.
extern "C" fn kernel_goes(function: Handle, x: c_uint, y: c_uint, z: c_uint) -> bool {
    goes(kernel(function, [x, y, z]))
}

/// [`goes`] by those of one that points to it.
///
/// # Safety
/// `configuration` is null or points to one.
unsafe extern "C" fn configured_goes(configuration: *const c_void, function: Handle) -> bool {
    // SAFETY: as the caller says.
    goes(unsafe { configured(function, configuration) }.0)
}

/// Of what is launched too rarely to be worth a look of its own.
#[unsafe(naked)]
extern "C" fn never_goes() -> bool {
    answer!(0)
}

/// Events on one stream.
struct Events(Handle);

/// While a stream is captured, some calls of any thread end the capture, unless the thread says that it knows.
fn unseen<T>(call: impl FnOnce() -> T) -> T {
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
        unseen(driver::create_event) as u64
    }

    fn destroy(&self, event: u64) {
        unseen(|| driver::destroy_event(event as usize as Handle));
    }

    fn record(&self, event: u64) -> bool {
        unseen(|| driver::capture(self.0) == Some(false) && driver::record(event as usize as Handle, self.0))
    }

    fn is_done(&self, event: u64) -> Option<bool> {
        unseen(|| driver::is_done(event as usize as Handle))
    }

    fn elapsed(&self, from: u64, to: u64) -> Option<i64> {
        unseen(|| driver::elapsed(from as usize as Handle, to as usize as Handle))
    }
}

/// Defines the hook of a launch: as [`hook`], but its first look is at the word, in a few instructions that leave
/// everything as it is. Where that is not zero, `$goes` is asked, which is given the same arguments, and the driver is
/// still called by a jump: to hand on eleven arguments costs more than to charge the launch.
macro_rules! launch {
    ($(#[$meta:meta])* $goes:ident $name:ident($($argument:ident: $kind:ty),* $(,)?) |$real:ident| $body:block) => {
        mod $name {
            use super::*;

            /// Looked at.
            pub(super) unsafe extern "C" fn slow($($argument: $kind),*) -> Answer {
                let Some(address) = crate::genuine::function(crate::table::index::$name) else {
                    return crate::cuda::MISSING;
                };
                // SAFETY: the driver's function of that very name, whose signature this is.
                let function = unsafe { core::mem::transmute::<usize, unsafe extern "C" fn($($kind),*) -> Answer>(address) };
                // SAFETY: called with the arguments of our caller.
                let $real = |$($argument: $kind),*| unsafe { function($($argument),*) };
                $body
            }
        }

        $(#[$meta])*
        ///
        /// # Safety
        /// What `cuda.h` asks of the function of this name.
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
                // The arguments that are in registers; with the return address and one more the stack is aligned.
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
                word = sym WORD, functions = sym crate::genuine::FUNCTIONS,
                at = const crate::table::index::$name * 8, slow = sym $name::slow, goes = sym $goes,
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
                // The arguments that are in registers, and where to return to.
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
                word = sym WORD, functions = sym crate::genuine::FUNCTIONS,
                at = const crate::table::index::$name * 8, slow = sym $name::slow, goes = sym $goes,
            );
        }
    };
}

fn kernel(function: Handle, grid: [c_uint; 3]) -> Work {
    let [x, y, z] = grid.map(u64::from);
    let blocks = (x * y).saturating_mul(z);
    Work { function: function as u64, blocks }
}

/// `CUlaunchConfig`, as far as it is looked at.
#[repr(C)]
struct Configuration {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: Handle,
}

const _: () = assert!(core::mem::offset_of!(Configuration, stream) == 32);

/// # Safety
/// `configuration` is null or points to one.
unsafe fn configured(function: Handle, configuration: *const c_void) -> (Work, Handle) {
    // SAFETY: as the caller says. The driver refuses none.
    match unsafe { configuration.cast::<Configuration>().as_ref() } {
        Some(configuration) => (kernel(function, configuration.grid), configuration.stream),
        None => (kernel(function, [0; 3]), ptr::null_mut()),
    }
}

launch! {
    /// Since CUDA 4.0.
    kernel_goes cuLaunchKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        paced(kernel(function, [grid_x, grid_y, grid_z]), stream, by(&move || {
            real(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters, extra)
        }))
    }
}

launch! {
    /// On the per-thread default stream.
    kernel_goes cuLaunchKernel_ptsz(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        paced(kernel(function, [grid_x, grid_y, grid_z]), driver::per_thread(stream), by(&move || {
            real(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters, extra)
        }))
    }
}

launch! {
    /// Since CUDA 11.6.
    configured_goes cuLaunchKernelEx(
        configuration: *const c_void, function: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        // SAFETY: `cuda.h` asks for one.
        let (work, stream) = unsafe { configured(function, configuration) };
        paced(work, stream, by(&move || real(configuration, function, parameters, extra)))
    }
}

launch! {
    /// On the per-thread default stream.
    configured_goes cuLaunchKernelEx_ptsz(
        configuration: *const c_void, function: Handle, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) |real| {
        // SAFETY: `cuda.h` asks for one.
        let (work, stream) = unsafe { configured(function, configuration) };
        paced(work, driver::per_thread(stream), by(&move || real(configuration, function, parameters, extra)))
    }
}

launch! {
    /// Since CUDA 9.0.
    kernel_goes cuLaunchCooperativeKernel(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: Handle, parameters: *mut *mut c_void,
    ) |real| {
        paced(kernel(function, [grid_x, grid_y, grid_z]), stream, by(&move || {
            real(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters)
        }))
    }
}

launch! {
    /// On the per-thread default stream.
    kernel_goes cuLaunchCooperativeKernel_ptsz(
        function: Handle, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared: c_uint, stream: Handle, parameters: *mut *mut c_void,
    ) |real| {
        paced(kernel(function, [grid_x, grid_y, grid_z]), driver::per_thread(stream), by(&move || {
            real(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters)
        }))
    }
}

launch! {
    /// Of CUDA 9.0, several devices at once: charged to the current one, and never measured.
    never_goes cuLaunchCooperativeKernelMultiDevice(list: *mut Handle, count: c_uint, flags: c_uint) |real| {
        // SAFETY: the first word of each entry is its function; without entries the driver refuses.
        let first = if list.is_null() || count == 0 { ptr::null_mut() } else { unsafe { *list } };
        paced(kernel(first, [count, 1, 1]), ptr::null_mut(), by(&move || real(list, count, flags)))
    }
}

launch! {
    /// Before CUDA 4.0.
    never_goes cuLaunch(function: Handle) |real| {
        paced(kernel(function, [1; 3]), ptr::null_mut(), by(&move || real(function)))
    }
}

launch! {
    /// Before CUDA 4.0.
    never_goes cuLaunchGrid(function: Handle, width: c_int, height: c_int) |real| {
        paced(kernel(function, [width.unsigned_abs(), height.unsigned_abs(), 1]), ptr::null_mut(), by(&move || {
            real(function, width, height)
        }))
    }
}

launch! {
    /// Before CUDA 4.0.
    never_goes cuLaunchGridAsync(function: Handle, width: c_int, height: c_int, stream: Handle) |real| {
        paced(kernel(function, [width.unsigned_abs(), height.unsigned_abs(), 1]), stream, by(&move || {
            real(function, width, height, stream)
        }))
    }
}

/// A capture has begun if `answer` says so.
fn begun(answer: Answer) -> Answer {
    if answer == SUCCESS {
        CAPTURES.fetch_add(1, Ordering::Relaxed);
    }
    answer
}

/// A capture has ended, well or not. A stream that is destroyed meanwhile leaves one too many, which costs a question.
fn ended(answer: Answer) -> Answer {
    let _ = CAPTURES.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
    answer
}

twins! {
    begin(stream: Handle) of 1 |real| {
        begun(real(stream))
    }

    /// Of CUDA 10.0.
    cuStreamBeginCapture;
    /// On the per-thread default stream.
    cuStreamBeginCapture_ptsz;
}

twins! {
    begin_as(stream: Handle, mode: c_int) of 2 |real| {
        begun(real(stream, mode))
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
        begun(real(stream, graph, after, data, count, mode))
    }
}

hook! {
    /// On the per-thread default stream.
    cuStreamBeginCaptureToGraph_ptsz(
        stream: Handle, graph: Handle, after: *const Handle, data: *const c_void, count: usize, mode: c_int,
    ) |real| {
        begun(real(stream, graph, after, data, count, mode))
    }
}

twins! {
    end(stream: Handle, graph: *mut Handle) of 2 |real| {
        ended(real(stream, graph))
    }

    /// Since CUDA 10.0.
    cuStreamEndCapture;
    /// On the per-thread default stream.
    cuStreamEndCapture_ptsz;
}
