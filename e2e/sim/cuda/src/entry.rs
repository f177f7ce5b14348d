//! Functions that work before `cuInit`: initialisation, versions, errors, and the lookup of
//! functions.

use std::ffi::{c_char, c_void};
use std::fs::File;
use std::io::Write;
use std::sync::OnceLock;

use crate::argument::{Out, Text, c_text};
use crate::code::{Code, Outcome};
use crate::frame::entry;
use crate::process;
use crate::symbols::{self, Missing};

/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`.
const LEGACY_STREAM: u64 = 1;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`.
const OWN_STREAM: u64 = 2;

entry! {
    early fn cuInit(flags: u32) {
        if flags != 0 { Err(Code::InvalidValue) } else { process::init() }
    }

    early fn cuDriverGetVersion(version: Out<u32>) {
        version.check()?;
        version.set(process::driver_version()?)
    }

    early fn cuGetErrorName(code: u32, text: Out<*const c_char>) {
        let found = Code::texts(code);
        text.set(found.map_or(std::ptr::null(), |(name, _)| c_text(name)))?;
        found.map(drop).ok_or(Code::InvalidValue)
    }

    early fn cuGetErrorString(code: u32, text: Out<*const c_char>) {
        let found = Code::texts(code);
        text.set(found.map_or(std::ptr::null(), |(_, string)| c_text(string)))?;
        found.map(drop).ok_or(Code::InvalidValue)
    }

    early fn cuGetProcAddress(name: Text, pointer: Out<*const c_void>, version: i32, flags: u64) {
        look_up(name, pointer, version, flags, None)
    }

    early fn cuGetProcAddress_v2(
        name: Text, pointer: Out<*const c_void>, version: i32, flags: u64, status: Out<u32>,
    ) {
        look_up(name, pointer, version, flags, Some(status))
    }

    early fn cuGetProcAddress_v2_ptsz(
        name: Text, pointer: Out<*const c_void>, version: i32, flags: u64, status: Out<u32>,
    ) {
        // A program that is compiled for per-thread default streams gets them by default.
        look_up(name, pointer, version, if flags == 0 { OWN_STREAM } else { flags }, Some(status))
    }
}

/// The file that records the requested functions, a line each, for tests of programs that look up
/// functions.
fn lookup_log() -> Option<&'static File> {
    static LOG: OnceLock<Option<File>> = OnceLock::new();
    let open = || {
        File::options().append(true).create(true).open(std::env::var_os("DIVVY_SIM_CUDA_LOOKUP_LOG")?).ok()
    };
    LOG.get_or_init(open).as_ref()
}

/// A missing function is reported by NULL and a status. The first version of the call has no status
/// and returns NOT_FOUND.
fn look_up(
    name: Text,
    pointer: Out<*const c_void>,
    version: i32,
    flags: u64,
    status: Option<Out<u32>>,
) -> Outcome {
    let name = name.get()?;
    pointer.check()?;
    let version = u32::try_from(version).map_err(|_| Code::InvalidValue)?;
    if flags & !(LEGACY_STREAM | OWN_STREAM) != 0 {
        return Err(Code::InvalidValue);
    }
    let too_new = version > process::driver_version()?;
    let (found, status_code) = match symbols::resolve(name, version, flags & OWN_STREAM != 0) {
        _ if too_new => (std::ptr::null(), 0),
        Ok(symbol) => (symbol.pointer.0.cast(), 0),
        Err(Missing::Symbol) => (std::ptr::null(), 1),
        Err(Missing::Version) => (std::ptr::null(), 2),
    };
    if let Some(file) = lookup_log() {
        let got = symbols::at_address(found).map_or("-", |symbol| symbol.name);
        // A single write per line. A failing log must not affect the caller.
        let _ = (&*file).write_all(format!("{name} {version} {flags} {got}\n").as_bytes());
    }
    if too_new {
        return Err(Code::InvalidValue);
    }
    pointer.set(found)?;
    match status {
        Some(status) => status.offer(status_code),
        None if status_code != 0 => return Err(Code::NotFound),
        None => {}
    }
    Ok(())
}
