//! `cuGetProcAddress`, by which the CUDA runtime and newer libraries find driver functions.
//!
//! A name has several variants with different signatures; which one a program gets depends on the
//! CUDA version and the flags that it passes. So the driver is asked first with the program's
//! arguments. Its result is compared by address with the hooked variants, and replaced only if it
//! is one of them: a hook is never returned for a different signature.

use super::call::{CuResult, SUCCESS, hook};
use crate::real_symbols;
use crate::symbol_table::{self, index};
use core::ffi::{c_char, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};

/// By index in [`symbol_table::VARIANTS`]: what the driver returns for that variant. It may differ
/// from the address of the export. 0 if not asked yet.
static ANSWERS: [AtomicUsize; symbol_table::VARIANTS.len()] =
    [const { AtomicUsize::new(0) }; symbol_table::VARIANTS.len()];
/// The driver does not know the variant.
const NONE: usize = 1;

hook! {
    /// Since CUDA 12.0.
    cuGetProcAddress_v2(
        symbol: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int,
    ) |real| {
        let answer = real(symbol, out, version, flags, status);
        // SAFETY: the driver has accepted both.
        unsafe { substitute(answer, symbol, out) }
    }
}

hook! {
    /// For programs with the per-thread default stream, if the driver has it.
    cuGetProcAddress_v2_ptsz(
        symbol: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int,
    ) |real| {
        let answer = real(symbol, out, version, flags, status);
        // SAFETY: the driver has accepted both.
        unsafe { substitute(answer, symbol, out) }
    }
}

hook! {
    /// CUDA 11.3.
    cuGetProcAddress(symbol: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64) |real| {
        let answer = real(symbol, out, version, flags);
        // SAFETY: the driver has accepted both.
        unsafe { substitute(answer, symbol, out) }
    }
}

/// # Safety
/// If `answer` is success, `symbol` is null or ends with a zero byte, and `out` is null or
/// writable.
unsafe fn substitute(answer: CuResult, symbol: *const c_char, out: *mut *mut c_void) -> CuResult {
    if answer != SUCCESS || symbol.is_null() || out.is_null() {
        return answer;
    }
    // SAFETY: guaranteed by the caller.
    let (found, family) = unsafe { (*out as usize, symbol_table::family(symbol.cast())) };
    let hook = match family {
        Some(mut family) => family
            .find(|(at, variant)| {
                real_symbols::function(variant.export()) == Some(found)
                    || driver_answers(*at, symbol) == found
            })
            .map(|(_, variant)| variant.export()),
        // SAFETY: guaranteed by the caller. A driver may also know a function by its full name.
        None => unsafe { symbol_table::export(symbol.cast()) }
            .filter(|at| real_symbols::function(*at) == Some(found)),
    };
    if let Some(address) = hook.filter(|_| found != 0).and_then(symbol_table::hook) {
        // SAFETY: guaranteed by the caller.
        unsafe { *out = address as *mut c_void };
    }
    answer
}

/// Returns the driver's answer for the minimum version and the flags of a variant.
fn driver_answers(at: usize, symbol: *const c_char) -> usize {
    match ANSWERS[at].load(Ordering::Relaxed) {
        0 => {
            let found = ask(symbol, &symbol_table::VARIANTS[at]).unwrap_or(NONE);
            ANSWERS[at].store(found, Ordering::Relaxed);
            found
        }
        found => found,
    }
}

fn ask(symbol: *const c_char, variant: &symbol_table::Variant) -> Option<usize> {
    type V2 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> CuResult;
    type V1 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> CuResult;
    let (mut out, mut status) = (ptr::null_mut(), 0);
    let (version, flags) = (variant.version as c_int, u64::from(variant.flags));
    // SAFETY: the driver's own functions of those names, with local outputs.
    let answer = unsafe {
        if let Some(address) = real_symbols::function(index::cuGetProcAddress_v2) {
            core::mem::transmute::<usize, V2>(address)(symbol, &mut out, version, flags, &mut status)
        } else {
            let address = real_symbols::function(index::cuGetProcAddress)?;
            core::mem::transmute::<usize, V1>(address)(symbol, &mut out, version, flags)
        }
    };
    (answer == SUCCESS && !out.is_null()).then_some(out as usize)
}
