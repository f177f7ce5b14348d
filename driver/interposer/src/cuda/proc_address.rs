//! `cuGetProcAddress`, by which the CUDA runtime and everything newer finds the driver's functions.
//!
//! A name has several variants with different signatures, and which one a program gets depends on the CUDA version and
//! on flags that it names. So the driver is asked first, with the program's own arguments; then the answer is compared
//! with the variants that are hooked, by address. What is not one of them is returned as it is: a hook is never given
//! out for a signature that it does not have.

use super::{Answer, SUCCESS, hook};
use crate::genuine;
use crate::table::{self, index};
use core::ffi::{c_char, c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicUsize, Ordering};

/// By the place in [`table::VARIANTS`]: what the driver answers when asked for that variant. It may be another address
/// than the export of the same function. 0: not asked yet.
static ANSWERS: [AtomicUsize; table::VARIANTS.len()] = [const { AtomicUsize::new(0) }; table::VARIANTS.len()];
/// The driver does not know the variant.
const NONE: usize = 1;

hook! {
    /// Since CUDA 12.0.
    cuGetProcAddress_v2(symbol: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int)
    |real| {
        let answer = real(symbol, out, version, flags, status);
        // SAFETY: the driver has accepted both.
        unsafe { substitute(answer, symbol, out) }
    }
}

hook! {
    /// For programs of the per-thread default stream, where a driver has it.
    cuGetProcAddress_v2_ptsz(symbol: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int)
    |real| {
        let answer = real(symbol, out, version, flags, status);
        // SAFETY: the driver has accepted both.
        unsafe { substitute(answer, symbol, out) }
    }
}

hook! {
    /// Of CUDA 11.3.
    cuGetProcAddress(symbol: *const c_char, out: *mut *mut c_void, version: c_int, flags: u64) |real| {
        let answer = real(symbol, out, version, flags);
        // SAFETY: the driver has accepted both.
        unsafe { substitute(answer, symbol, out) }
    }
}

/// # Safety
/// Where `answer` is success, `symbol` is null or ends with a zero byte, and `out` is null or can be written.
unsafe fn substitute(answer: Answer, symbol: *const c_char, out: *mut *mut c_void) -> Answer {
    if answer != SUCCESS || symbol.is_null() || out.is_null() {
        return answer;
    }
    // SAFETY: as the caller says.
    let (found, family) = unsafe { (*out as usize, table::family(symbol.cast())) };
    let hook = match family {
        Some(mut family) => family
            .find(|(at, variant)| {
                genuine::function(variant.export()) == Some(found) || driver_answers(*at, symbol) == found
            })
            .map(|(_, variant)| variant.export()),
        // SAFETY: as the caller says. A driver may know a function by its full name too.
        None => unsafe { table::export(symbol.cast()) }.filter(|at| genuine::function(*at) == Some(found)),
    };
    if let Some(address) = hook.filter(|_| found != 0).and_then(table::hook) {
        // SAFETY: as the caller says.
        unsafe { *out = address as *mut c_void };
    }
    answer
}

/// What the driver says to the least version and the flags of a variant.
fn driver_answers(at: usize, symbol: *const c_char) -> usize {
    match ANSWERS[at].load(Ordering::Relaxed) {
        0 => {
            let found = ask(symbol, &table::VARIANTS[at]).unwrap_or(NONE);
            ANSWERS[at].store(found, Ordering::Relaxed);
            found
        }
        found => found,
    }
}

fn ask(symbol: *const c_char, variant: &table::Variant) -> Option<usize> {
    type V2 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> Answer;
    type V1 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> Answer;
    let (mut out, mut status) = (ptr::null_mut(), 0);
    let (version, flags) = (variant.version as c_int, u64::from(variant.flags));
    // SAFETY: the driver's own functions of those names, with places of our own to write to.
    let answer = unsafe {
        if let Some(address) = genuine::function(index::cuGetProcAddress_v2) {
            core::mem::transmute::<usize, V2>(address)(symbol, &mut out, version, flags, &mut status)
        } else {
            let address = genuine::function(index::cuGetProcAddress)?;
            core::mem::transmute::<usize, V1>(address)(symbol, &mut out, version, flags)
        }
    };
    (answer == SUCCESS && !out.is_null()).then_some(out as usize)
}
