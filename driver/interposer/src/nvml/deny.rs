//! Denied NVML functions.
//!
//! They change a device, its instances or the node, or report past processes whose owner is
//! unknown. A tenant shares the device, so the result is NVML_ERROR_NO_PERMISSION, as without
//! privileges. Without a share the call goes on. One stub serves all functions, whatever their
//! arguments: it asks where to go and jumps there with the caller's registers.

use crate::real_symbols;
use crate::share;
use core::arch::naked_asm;

const NO_PERMISSION: super::call::NvmlReturn = 4;

/// Defines the entry point of a denied function from its name and its index.
macro_rules! denied {
    ($name:ident, $at:literal) => {
        /// # Safety
        /// As required by `nvml.h` for this function.
        #[cfg_attr(panic = "abort", unsafe(no_mangle))]
        #[unsafe(naked)]
        pub(crate) unsafe extern "C" fn $name() {
            #[cfg(target_arch = "x86_64")]
            core::arch::naked_asm!(
                "mov eax, {at}", "jmp {go}",
                at = const $at, go = sym $crate::nvml::deny::go,
            );
            #[cfg(target_arch = "aarch64")]
            core::arch::naked_asm!(
                "mov w9, {at}", "b {go}",
                at = const $at, go = sym $crate::nvml::deny::go,
            );
        }
    };
}
pub(crate) use denied;

/// Index in eax; arguments where the caller put them. All are integers and pointers: no NVML
/// function that changes a device takes a floating-point number.
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

/// As on x86-64, with the index in w9.
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
    if share::has_shares() {
        return no_permission as *const () as usize;
    }
    real_symbols::function(at as usize).unwrap_or(not_found as *const () as usize)
}

#[unsafe(naked)]
extern "C" fn no_permission() -> super::call::NvmlReturn {
    constant_body!(NO_PERMISSION)
}

#[unsafe(naked)]
extern "C" fn not_found() -> super::call::NvmlReturn {
    constant_body!(super::call::MISSING)
}
