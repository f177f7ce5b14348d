//! The symbols of the library and their addresses.
//!
//! `build.rs` writes the table from `symbols.txt`. It contains addresses, so the library never
//! looks up its own functions by the dynamic linker. Each stub counts its calls by its own index,
//! because identical functions would be merged and could not be told apart.

use std::ffi::c_void;

use crate::argument::{Pointer, Text};
use crate::array::*;
use crate::call_index::{self, COUNT, at};
use crate::capture::*;
use crate::context::*;
use crate::copy::*;
use crate::device::*;
use crate::entry::*;
use crate::event::*;
use crate::executable::*;
use crate::export::*;
use crate::external::*;
use crate::graph::*;
use crate::ipc::*;
use crate::launch::*;
use crate::linear::*;
use crate::module::*;
use crate::node::*;
use crate::physical::*;
use crate::pool::*;
use crate::stream::*;

/// A function of the library.
pub(crate) struct Symbol {
    pub(crate) name: &'static str,
    /// The name of the function and its variants in `cuGetProcAddress`.
    pub(crate) base: &'static str,
    /// The CUDA version that introduced it, 13000 for 13.0.
    pub(crate) version: u32,
    /// Whether it uses the per-thread default stream.
    pub(crate) twin: bool,
    pub(crate) pointer: Pointer,
}

macro_rules! stub {
    ($name:ident) => {
        #[unsafe(no_mangle)]
        extern "C" fn $name() -> u32 {
            $crate::frame::call_missing(at::$name)
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/table.rs"));

/// How often the function of that name was called in this process; `u64::MAX` if there is none.
///
/// For tests; CUDA has no such symbol.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn divvy_sim_cuda_calls(name: Text) -> u64 {
    name.get().ok().and_then(call_index::calls).unwrap_or(u64::MAX)
}

/// The reason why a function was not found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Missing {
    Symbol,
    /// It is newer than the requested version.
    Version,
}

/// The newest variant of a function for a program of that CUDA version; the variant for the
/// per-thread default stream, if it is requested and exists.
pub(crate) fn resolve(name: &str, version: u32, own_stream: bool) -> Result<&'static Symbol, Missing> {
    // The table is sorted by symbol, and the names of variants begin with the name of their
    // function.
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
    fn function_is_resolved_by_version_and_stream() {
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
    fn function_addresses_are_distinct() {
        let mut pointers: Vec<_> = SYMBOLS.iter().map(|symbol| symbol.pointer.0).collect();
        pointers.sort_unstable();
        pointers.dedup();
        assert_eq!(pointers.len(), COUNT);
        assert!(SYMBOLS.is_sorted_by_key(|symbol| symbol.name));
    }
}
