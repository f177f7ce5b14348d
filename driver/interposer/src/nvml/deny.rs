//! Functions that change a device, its instances or the node, and those that tell of processes which have ended, of which
//! nobody knows whose they were. A tenant shares the device with others, so it is told NVML_ERROR_NO_PERMISSION, as it is
//! where it has no right to them. Without a share the call goes on.
//!
//! One stub serves them all, whatever their arguments: it asks where to go and jumps there with the caller's registers.

use crate::genuine;
use crate::share;
use core::arch::naked_asm;

const NO_PERMISSION: super::Answer = 4;

/// Defines the entry point of a denied function from its name and its index.
macro_rules! denied {
    ($name:ident, $at:literal) => {
        /// # Safety
        /// What `nvml.h` asks of the function of this name.
        #[cfg_attr(panic = "abort", unsafe(no_mangle))]
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            core::arch::naked_asm!("mov eax, {at}", "jmp {go}", at = const $at, go = sym $crate::nvml::go);
            #[cfg(target_arch = "aarch64")]
            core::arch::naked_asm!("mov w9, {at}", "b {go}", at = const $at, go = sym $crate::nvml::go);
        }
    };
}
pub(crate) use denied;

/// Index in eax; arguments where the caller put them (integers and pointers only: no function of NVML that changes
/// something takes a floating-point number).
///
/// # Safety
/// Only jumped to from the entry points above.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn go() {
    naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 8",
        "mov edi, eax",
        "call {target}",
        "add rsp, 8",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp rax",
        target = sym target,
    )
}

/// As on x86-64, index in w9.
///
/// # Safety
/// Only jumped to from the entry points above.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
pub(crate) unsafe extern "C" fn go() {
    naked_asm!(
        "stp x29, x30, [sp, #-80]!",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "stp x6, x7, [sp, #64]",
        "mov w0, w9",
        "bl {target}",
        "mov x16, x0",
        "ldp x0, x1, [sp, #16]",
        "ldp x2, x3, [sp, #32]",
        "ldp x4, x5, [sp, #48]",
        "ldp x6, x7, [sp, #64]",
        "ldp x29, x30, [sp], #80",
        "br x16",
        target = sym target,
    )
}

extern "C" fn target(at: u32) -> usize {
    if share::is_any() {
        return no_permission as *const () as usize;
    }
    genuine::function(at as usize).unwrap_or(not_found as *const () as usize)
}

#[unsafe(naked)]
extern "C" fn no_permission() -> super::Answer {
    answer!(NO_PERMISSION)
}

#[unsafe(naked)]
extern "C" fn not_found() -> super::Answer {
    answer!(super::MISSING)
}
