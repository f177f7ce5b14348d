//! Memory in other places than the current device's, and by other ways than the plain ones, of a program in a container.
#![allow(unsafe_code, reason = "the driver is called through C")]

use super::guest::{Guest, MIB, Properties, UNTOUCHED, call, number, said};

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
    /// Physical memory in that place, as [`Properties::said`] has it.
    pub(super) fn create_at(&self, mib: &str, place: &str) -> String {
        let (mut handle, properties) = (UNTOUCHED, Properties::said(&[place]));
        let code = call!(self, "cuMemCreate", &mut handle => &mut u64, number(mib) * MIB => u64,
            &properties => &Properties, 0 => u64);
        said(code, handle)
    }

    /// Rows of 520 bytes, each of which takes 1,024: so many MiB of the device.
    pub(super) fn padded(&self, mib: u64) -> String {
        let (mut address, mut pitch) = (UNTOUCHED, 0u64);
        let code = call!(self, "cuMemAllocPitch_v2", &mut address => &mut u64, &mut pitch => &mut u64,
            520 => u64, mib * 1024 => u64, 8 => u32);
        if code == 0 {
            assert_eq!(pitch, 1024);
        }
        said(code, address)
    }

    /// Memory that another library has made and given as a descriptor: its address.
    pub(super) fn external(&self, mib: u64) -> String {
        // SAFETY: a new descriptor, which is given away.
        let descriptor = unsafe { libc::memfd_create(c"external".as_ptr(), 0) };
        let size = mib * MIB;
        let external = External { kind: 1, descriptor, rest: 0, size, flags: 0, reserved: [0; 16] };
        let part = Part { offset: 0, size, flags: 0, reserved: [0; 16] };
        let (mut memory, mut address) = (0u64, UNTOUCHED);
        let code = call!(self, "cuImportExternalMemory", &mut memory => &mut u64, &external => &External);
        assert_eq!(code, 0);
        let code = call!(self, "cuExternalMemoryGetMappedBuffer", &mut address => &mut u64, memory => u64,
            &part => &Part);
        said(code, address)
    }

    /// One use more of the current context.
    pub(super) fn attach(&self) -> String {
        let mut context = UNTOUCHED;
        said(call!(self, "cuCtxAttach", &mut context => &mut u64, 0 => u32), context)
    }

    /// A device's pools, by that function: `get WAY DEVICE`, `set WAY DEVICE POOL`.
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
                said(code, pool)
            }
            ["set", way, device, given] => {
                let (at, given) = (location(device), number(given));
                let code = match way.starts_with("cuDevice") {
                    true => call!(self, way, at[1] => i32, given => u64),
                    false => call!(self, way, &at => &[i32; 2], pinned => u32, given => u64),
                };
                code.to_string()
            }
            other => panic!("no such word: {other:?}"),
        }
    }
}
