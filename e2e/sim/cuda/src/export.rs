//! `cuGetExportTable`: tables of private functions that the CUDA runtime looks up by UUID.
//!
//! Their layout is not documented; it is known from another driver (ZLUDA) and from watching the
//! runtimes of CUDA 12.9 and 13.5. A table begins with its size in bytes. Functions that the
//! runtimes were not seen to call return NOT_SUPPORTED. The runtimes need only the two tables here
//! to look up all driver functions, which is what the tests need. They stop afterwards, because
//! they verify that the driver is NVIDIA's own.

use std::ffi::c_void;
use std::sync::atomic::AtomicU64;

use crate::argument::{In, Out, Pointer};
use crate::code::Code;
use crate::context::cuDevicePrimaryCtxRetain;
use crate::device::Uuid;
use crate::frame::entry;
use crate::objects::ContextHandle;

/// "CUDART interface".
const RUNTIME: Uuid = 0x6bd5_fb6c_5bf4_e74a_8987_d939_12fd_9df9_u128.to_be_bytes();
/// "Tools runtime callback hooks".
const TOOLS: Uuid = 0xa094_798c_2e74_2e74_93f2_0800_200c_0a66_u128.to_be_bytes();

/// A table's first word, and its functions.
#[repr(C)]
struct Table<const N: usize> {
    size: usize,
    functions: [Pointer; N],
}

static RUNTIME_TABLE: Table<12> = Table {
    size: size_of::<Table<12>>(),
    functions: {
        let mut functions = [Pointer(unknown as *const ()); 12];
        functions[1] = Pointer(primary_context as *const ());
        // "Load compilers", called if the environment requests eager module loading.
        functions[11] = Pointer(nothing as *const ());
        functions
    },
};

static TOOLS_TABLE: Table<6> = Table {
    size: size_of::<Table<6>>(),
    functions: {
        let mut functions = [Pointer(unknown as *const ()); 6];
        functions[1] = Pointer(callbacks as *const ());
        functions[5] = Pointer(switches as *const ());
        functions
    },
};

/// The runtime's own data about callbacks and tool switches; nothing here reads it.
static CALLBACKS: [AtomicU64; 128] = [const { AtomicU64::new(0) }; 128];
static SWITCHES: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

extern "C" fn unknown() -> u32 {
    Code::NotSupported as u32
}

extern "C" fn nothing() -> u32 {
    0
}

extern "C" fn primary_context(context: Out<ContextHandle>, device: i32) -> u32 {
    cuDevicePrimaryCtxRetain(context, device)
}

extern "C" fn callbacks(place: Out<*const AtomicU64>, size: Out<usize>) {
    place.offer(CALLBACKS.as_ptr());
    size.offer(size_of_val(&CALLBACKS));
}

extern "C" fn switches(place: Out<*const AtomicU64>, size: Out<usize>) {
    place.offer(SWITCHES.as_ptr());
    size.offer(14);
}

entry! {
    early fn cuGetExportTable(table: Out<*const c_void>, uuid: In<Uuid>) {
        table.check()?;
        match uuid.get()? {
            RUNTIME => table.set((&raw const RUNTIME_TABLE).cast()),
            TOOLS => table.set((&raw const TOOLS_TABLE).cast()),
            _ => Err(Code::NotFound),
        }
    }
}
