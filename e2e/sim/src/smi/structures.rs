//! The C structures of the calls that `nvidia-smi` makes, as NVML's header lays them out.

use std::ffi::c_char;

/// `nvmlDevice_t`, `nvmlGpuInstance_t` and `nvmlComputeInstance_t`: numbers to this program.
pub(super) type Handle = usize;

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Placement {
    pub(super) start: u32,
    pub(super) size: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Memory {
    pub(super) version: u32,
    pub(super) total: u64,
    pub(super) reserved: u64,
    pub(super) free: u64,
    pub(super) used: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Bar1 {
    pub(super) total: u64,
    pub(super) free: u64,
    pub(super) used: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Pci {
    pub(super) _legacy: [c_char; 16],
    pub(super) domain: u32,
    pub(super) bus: u32,
    pub(super) device: u32,
    pub(super) device_id: u32,
    pub(super) subsystem_id: u32,
    pub(super) bus_id: [c_char; 32],
}

/// A GPU-instance profile, version 2.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GiProfile {
    pub(super) version: u32,
    pub(super) id: u32,
    pub(super) p2p: u32,
    pub(super) slices: u32,
    pub(super) instances: u32,
    pub(super) sm: u32,
    pub(super) ce: u32,
    pub(super) dec: u32,
    pub(super) enc: u32,
    pub(super) jpg: u32,
    pub(super) ofa: u32,
    pub(super) memory_mib: u64,
    pub(super) name: [c_char; 96],
}

/// A compute-instance profile, version 2.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CiProfile {
    pub(super) version: u32,
    pub(super) id: u32,
    pub(super) slices: u32,
    pub(super) instances: u32,
    pub(super) sm: u32,
    pub(super) ce: u32,
    pub(super) dec: u32,
    pub(super) enc: u32,
    pub(super) jpg: u32,
    pub(super) ofa: u32,
    pub(super) name: [c_char; 96],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GiInfo {
    pub(super) _device: Handle,
    pub(super) id: u32,
    pub(super) profile: u32,
    pub(super) placement: Placement,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct CiInfo {
    pub(super) _device: Handle,
    pub(super) _gi: Handle,
    pub(super) id: u32,
    pub(super) profile: u32,
    pub(super) placement: Placement,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Attributes {
    pub(super) sm: u32,
    pub(super) ce: u32,
    pub(super) dec: u32,
    pub(super) enc: u32,
    pub(super) jpg: u32,
    pub(super) ofa: u32,
    pub(super) _slices: [u32; 2],
    pub(super) _memory_mib: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) used: u64,
    pub(super) gi: u32,
    pub(super) ci: u32,
}

impl Pci {
    pub(super) fn bus_id(&self) -> String {
        text(&self.bus_id)
    }
}

impl GiProfile {
    pub(super) fn name(&self) -> String {
        text(&self.name)
    }
}

impl CiProfile {
    pub(super) fn name(&self) -> String {
        text(&self.name)
    }
}

pub(super) fn text(array: &[c_char]) -> String {
    let bytes: Vec<u8> =
        array.iter().map(|byte| byte.cast_unsigned()).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The version word of a structure.
pub(super) const fn version<T>(number: u32) -> u32 {
    size_of::<T>() as u32 | number << 24
}
