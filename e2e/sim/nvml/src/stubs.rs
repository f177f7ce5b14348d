//! Symbols that only check their arguments and return NOT_SUPPORTED.
//!
//! `build.rs` writes one `stub!` line for each symbol of `symbols.txt` that is not marked as real.

use divvy_sim::code::Code;

use crate::argument::{DeviceArgument, LongArgument, PointerArgument, WordArgument};
use crate::library::entry;

macro_rules! stub {
    ($name:ident $(, $argument:ident: $kind:ty)*) => {
        entry! {
            fn $name(_nvml $(, $argument: $kind)*) {
                Err(Code::NotSupported)
            }
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/stubs.rs"));
