//! The library that is loaded before NVIDIA's libraries in containers with a share.
//!
//! It enforces the share's limits, and shows the share when a program queries its GPU. The rules
//! are in [`divvy_interposer_core`]. It runs in every process of a container, so it has no
//! constructor, thread-local variable, allocator or signal handler. It reads no environment
//! variable, prints nothing, writes only the account page, and starts a thread only if memory is
//! overcommitted. Unhooked calls go straight to the driver.
#![cfg_attr(panic = "abort", no_std)]
#![cfg_attr(not(panic = "abort"), allow(dead_code, reason = "a plain build exports nothing"))]
#![allow(unsafe_code, reason = "the C boundary: exported symbols, and pointers that C programs give")]
#![allow(
    non_snake_case,
    non_upper_case_globals,
    reason = "hooks have the names of the functions they stand for"
)]

/// The body of a naked function that returns a constant. A compiled function would bring unwind
/// data longer than its code.
#[cfg(target_arch = "x86_64")]
macro_rules! constant_body {
    ($number:expr) => {
        core::arch::naked_asm!("mov eax, {}", "ret", const $number)
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! constant_body {
    ($number:expr) => {
        core::arch::naked_asm!("mov x0, {}", "ret", const $number)
    };
}

// Functions that run at a process's start, from the first `dlsym` to `cuInit`, are marked `#[cold]`.
// The linker places these together, so that a start touches few of the library's pages.

mod codec;
mod cuda;
mod elf;
mod lookup;
mod nvml;
mod pages;
mod process;
mod real_symbols;
mod share;
mod symbol_table;
mod sys;

/// No code panics by intent. If it happens, only the calling thread sleeps forever, which keeps the
/// limit. Killing the program would be worse, and the thread cannot continue.
#[cfg(panic = "abort")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {
        sys::pause();
    }
}
