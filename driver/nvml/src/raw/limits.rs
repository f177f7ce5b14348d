//! Memory limits of cgroups. `nvml-wrapper-sys` does not have them yet: layouts and signatures are
//! from nvml.h 13.5 (PyPI `nvidia-nvml-dev` 13.5.37).

use super::{Answer, Device, Library, check, sys};
use crate::code::Code;
use std::ffi::{CStr, c_char};
use std::path::Path;

/// `nvmlSetMemoryLimits_v1_t`; it has no version field.
#[repr(C)]
struct Set {
    cgroup: *const c_char,
    soft: u64,
    hard: u64,
}

/// `nvmlGetMemoryLimits_v1_t`.
#[repr(C)]
struct Get {
    cgroup: *const c_char,
    soft: u64,
    hard: u64,
    used: u64,
}

const _: () = assert!(size_of::<Set>() == 24);
const _: () = assert!(size_of::<Get>() == 32);

/// `NVML_DEVICE_MEMORY_LIMIT_MAX`.
const NO_LIMIT: u64 = u64::MAX;

/// Timeouts and usage of a GPU's memory by the processes of a cgroup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupMemory {
    /// Bytes reserved for the cgroup.
    pub soft: u64,
    /// Hard limit in bytes; `None` is no limit.
    pub hard: Option<u64>,
    /// Used bytes.
    pub used: u64,
}

type Call<T> = unsafe extern "C" fn(sys::nvmlDevice_t, *mut T) -> sys::nvmlReturn_t;

impl Library {
    fn limits<T>(&self, name: &CStr, device: Device, limits: &mut T) -> Answer<()> {
        // SAFETY: both symbols that are looked up have this signature in nvml.h.
        let symbol = unsafe { self.0.lib().__library.get::<Call<T>>(name.to_bytes_with_nul()) };
        let symbol = symbol.map_err(|_| Code::FunctionNotFound)?;
        // SAFETY: see the module comment above; `limits` and its string outlive the call.
        check(unsafe { symbol(device.0, limits) })
    }

    /// Timeouts the memory of a cgroup (its directory); `None` removes the limit.
    pub(crate) fn set_cgroup_memory(&self, device: Device, cgroup: &Path, limit: Option<u64>) -> Answer<()> {
        let cgroup = super::c_path(cgroup)?;
        let (soft, hard) = limit.map_or((0, NO_LIMIT), |limit| (limit, limit));
        let mut set = Set { cgroup: cgroup.as_ptr(), soft, hard };
        self.limits(c"nvmlDeviceSetMemoryLimits_v1", device, &mut set)
    }

    /// The limits of a cgroup; `None` if none was ever set.
    pub(crate) fn cgroup_memory(&self, device: Device, cgroup: &Path) -> Answer<Option<CgroupMemory>> {
        let cgroup = super::c_path(cgroup)?;
        let mut get = Get { cgroup: cgroup.as_ptr(), soft: 0, hard: NO_LIMIT, used: 0 };
        match self.limits(c"nvmlDeviceGetMemoryLimits_v1", device, &mut get) {
            Ok(()) => {
                let hard = (get.hard != NO_LIMIT).then_some(get.hard);
                Ok(Some(CgroupMemory { soft: get.soft, hard, used: get.used }))
            }
            Err(Code::NotFound) => Ok(None),
            Err(code) => Err(code),
        }
    }
}
