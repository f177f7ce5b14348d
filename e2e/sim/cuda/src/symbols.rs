//! Every symbol of the library, where it is, and how often it was called.
//!
//! `build.rs` writes the table from `symbols.txt`. It holds addresses, so the library never asks the dynamic linker for
//! its own functions. Each stub counts its calls in a place of its own: functions that were all alike would be merged
//! into one, and nobody could tell which was reached.

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::argument::Text;
use crate::array::*;
use crate::capture::*;
use crate::context::*;
use crate::contexts::*;
use crate::copy::*;
use crate::device::*;
use crate::entry::*;
use crate::event::*;
use crate::executable::*;
use crate::export::*;
use crate::external::*;
use crate::graph::*;
use crate::holders::*;
use crate::ipc::*;
use crate::launch::*;
use crate::linear::*;
use crate::module::*;
use crate::node::*;
use crate::physical::*;
use crate::pool::*;
use crate::shareable::*;
use crate::stream::*;
use crate::update::*;

/// A function of the library.
pub(crate) struct Symbol {
    pub(crate) name: &'static str,
    /// What `cuGetProcAddress` calls it and its other variants.
    pub(crate) base: &'static str,
    /// The CUDA version in which it came.
    pub(crate) version: u32,
    /// It means the thread's own default stream.
    pub(crate) twin: bool,
    pub(crate) pointer: Pointer,
}

/// An address of code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Pointer(pub(crate) *const ());

// SAFETY: code may be called from any thread.
unsafe impl Send for Pointer {}
// SAFETY: the same.
unsafe impl Sync for Pointer {}

macro_rules! stub {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> u32 {
            $crate::frame::call_missing(at::$name)
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/table.rs"));

static CALLS: [AtomicU64; COUNT] = [const { AtomicU64::new(0) }; COUNT];

/// Counts a call; two threads at once may count as one.
#[inline]
pub(crate) fn count(at: usize) {
    let calls = &CALLS[at];
    calls.store(calls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

/// How often the function of that name was entered in this process; `u64::MAX` if there is none.
///
/// For tests: it is no symbol of CUDA's.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn divvy_sim_cuda_calls(name: Text) -> u64 {
    let found = name.get().ok().and_then(|name| SYMBOLS.iter().position(|symbol| symbol.name == name));
    found.map_or(u64::MAX, |at| CALLS[at].load(Ordering::Relaxed))
}

/// Why there is no such function.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Missing {
    Symbol,
    /// It came later than the version asked for.
    Version,
}

/// The newest variant of a function that a program written for that CUDA version knows, of those for the thread's own
/// default stream if it asks for them and there is one.
pub(crate) fn resolve(name: &str, version: u32, own_stream: bool) -> Result<&'static Symbol, Missing> {
    // The table is in the order of symbols, and variants begin with what they are variants of.
    let begin = SYMBOLS.partition_point(|symbol| symbol.name < name);
    let known = || SYMBOLS[begin..].iter().take_while(|symbol| symbol.name.starts_with(name));
    let best = |twin: bool| {
        known()
            .filter(|symbol| symbol.base == name && symbol.twin == twin && symbol.version <= version)
            .max_by_key(|symbol| symbol.version)
    };
    let exact = || known().find(|symbol| symbol.name == name && symbol.version <= version);
    let twin = if own_stream { best(true) } else { None };
    twin.or_else(|| best(false)).or_else(exact).ok_or_else(|| {
        let any = known().any(|symbol| symbol.base == name || symbol.name == name);
        if any { Missing::Version } else { Missing::Symbol }
    })
}

/// The symbol at an address.
pub(crate) fn at_address(address: *const c_void) -> Option<&'static Symbol> {
    SYMBOLS.iter().find(|symbol| symbol.pointer.0.cast() == address)
}

/// A string of the table as C reads it.
pub(crate) const fn c_text(text: &'static str) -> *const c_char {
    text.as_ptr().cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(name: &str, version: u32, own_stream: bool, expected: Result<&str, Missing>) {
        assert_eq!(
            resolve(name, version, own_stream).map(|symbol| symbol.name),
            expected,
            "{name} {version}"
        );
    }

    #[test]
    fn a_function_is_found_by_version_and_stream() {
        check("cuMemAlloc", 2000, false, Ok("cuMemAlloc"));
        check("cuMemAlloc", 3019, false, Ok("cuMemAlloc"));
        check("cuMemAlloc", 13000, false, Ok("cuMemAlloc_v2"));
        check("cuMemAlloc", 13000, true, Ok("cuMemAlloc_v2"));
        check("cuCtxCreate", 3020, false, Ok("cuCtxCreate_v2"));
        check("cuCtxCreate", 11040, false, Ok("cuCtxCreate_v3"));
        check("cuCtxCreate", 12050, false, Ok("cuCtxCreate_v4"));
        check("cuMemPrefetchAsync", 8000, false, Ok("cuMemPrefetchAsync"));
        check("cuMemPrefetchAsync", 8000, true, Ok("cuMemPrefetchAsync_ptsz"));
        check("cuMemPrefetchAsync", 12020, false, Ok("cuMemPrefetchAsync_v2"));
        check("cuMemPrefetchAsync", 12020, true, Ok("cuMemPrefetchAsync_v2_ptsz"));
        check("cuMemcpyHtoD", 3020, true, Ok("cuMemcpyHtoD_v2"));
        check("cuMemcpyHtoD", 7000, true, Ok("cuMemcpyHtoD_v2_ptds"));
        check("cuGetProcAddress", 11030, false, Ok("cuGetProcAddress"));
        check("cuMemGetInfo_v2", 12000, false, Ok("cuMemGetInfo_v2"));
        check("cuGreenCtxCreate", 12000, false, Err(Missing::Version));
        check("cuNonsense", 13000, false, Err(Missing::Symbol));
        check("cu", 13000, false, Err(Missing::Symbol));
    }

    #[test]
    fn each_function_has_an_address_of_its_own() {
        let mut pointers: Vec<_> = SYMBOLS.iter().map(|symbol| symbol.pointer.0).collect();
        pointers.sort_unstable();
        pointers.dedup();
        assert_eq!(pointers.len(), COUNT);
        assert!(SYMBOLS.is_sorted_by_key(|symbol| symbol.name));
    }
}
