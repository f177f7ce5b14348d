//! The symbols that only have to be there: they check their arguments and answer NOT_SUPPORTED.
//!
//! `build.rs` writes one `stub!` line for each symbol of `symbols.txt` that is not real.

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
