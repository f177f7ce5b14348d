//! Memory in other locations than the current device, and from other functions, for programs in a
//! container.
#![allow(unsafe_code, reason = "the driver is called through C")]

use super::guest::{Guest, MIB, Properties, UNTOUCHED, call, format_result, number};

/// CUDA_EXTERNAL_MEMORY_HANDLE_DESC.
#[repr(C)]
struct External {
    kind: u32,
    descriptor: i32,
    rest: u64,
    size: u64,
    flags: u32,
    reserved: [u32; 16],
}

/// CUDA_EXTERNAL_MEMORY_BUFFER_DESC.
#[repr(C)]
struct Part {
    offset: u64,
    size: u64,
    flags: u32,
    reserved: [u32; 16],
}

impl Guest {
    /// Creates physical memory in that location, as parsed by [`Properties::parse`].
    pub(super) fn create_at(&self, mib: &str, place: &str) -> String {
        let (mut handle, properties) = (UNTOUCHED, Properties::parse(&[place]));
        let code = call!(self, "cuMemCreate", &mut handle => &mut u64, number(mib) * MIB => u64,
            &properties => &Properties, 0 => u64);
        format_result(code, handle)
    }

    /// Allocates rows of 520 bytes, each of which takes 1,024, `mib` MiB in total.
    pub(super) fn padded(&self, mib: u64) -> String {
        let (mut address, mut pitch) = (UNTOUCHED, 0u64);
        let code = call!(self, "cuMemAllocPitch_v2", &mut address => &mut u64, &mut pitch => &mut u64,
            520 => u64, mib * 1024 => u64, 8 => u32);
        if code == 0 {
            assert_eq!(pitch, 1024);
        }
        format_result(code, address)
    }

    /// Imports memory of another library from a file descriptor and returns its address.
    pub(super) fn external(&self, mib: u64) -> String {
        // SAFETY: creates a new descriptor, which is passed on.
        let descriptor = unsafe { libc::memfd_create(c"external".as_ptr(), 0) };
        let size = mib * MIB;
        let external = External { kind: 1, descriptor, rest: 0, size, flags: 0, reserved: [0; 16] };
        let part = Part { offset: 0, size, flags: 0, reserved: [0; 16] };
        let (mut memory, mut address) = (0u64, UNTOUCHED);
        let code = call!(self, "cuImportExternalMemory", &mut memory => &mut u64, &external => &External);
        assert_eq!(code, 0);
        let code = call!(self, "cuExternalMemoryGetMappedBuffer", &mut address => &mut u64, memory => u64,
            &part => &Part);
        format_result(code, address)
    }

    /// Adds a reference to the current context.
    pub(super) fn attach(&self) -> String {
        let mut context = UNTOUCHED;
        format_result(call!(self, "cuCtxAttach", &mut context => &mut u64, 0 => u32), context)
    }

    /// Gets or sets a device's pool: `get FUNCTION DEVICE`, `set FUNCTION DEVICE POOL`.
    pub(super) fn current_pool(&self, words: &[&str]) -> String {
        let (mut pool, pinned) = (UNTOUCHED, 1);
        let location = |device: &str| [1, number(device) as i32];
        match words {
            ["get", way, device] => {
                let at = location(device);
                let code = match way.starts_with("cuDevice") {
                    true => call!(self, way, &mut pool => &mut u64, at[1] => i32),
                    false => call!(self, way, &mut pool => &mut u64, &at => &[i32; 2], pinned => u32),
                };
                format_result(code, pool)
            }
            ["set", way, device, given] => {
                let (at, given) = (location(device), number(given));
                let code = match way.starts_with("cuDevice") {
                    true => call!(self, way, at[1] => i32, given => u64),
                    false => call!(self, way, &at => &[i32; 2], pinned => u32, given => u64),
                };
                code.to_string()
            }
            other => panic!("unknown command: {other:?}"),
        }
    }
}
