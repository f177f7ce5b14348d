//! The macro that defines hooks of NVML's functions, and the share that a device is shown as.

use crate::real_symbols;
use crate::share::{self, Device, DeviceAccess};
use crate::symbol_table::index;
use core::ffi::{c_char, c_uint, c_void};
use divvy_pages::Flags;

/// `nvmlReturn_t`.
pub(crate) type NvmlReturn = i32;
/// `nvmlDevice_t`.
pub(crate) type Handle = *mut c_void;
pub(crate) const SUCCESS: NvmlReturn = 0;
/// NVML_ERROR_FUNCTION_NOT_FOUND: the library is not loaded, or has no such function.
pub(crate) const MISSING: NvmlReturn = 13;

/// Defines a hook: its exported name, its arguments in C's order, and a body that gets the
/// library's own function.
macro_rules! hook {
    ($(#[$meta:meta])* $name:ident($($argument:ident: $kind:ty),* $(,)?) |$real:ident| $body:block) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// As required by `nvml.h` for this function.
        #[cfg_attr(panic = "abort", unsafe(no_mangle))]
        pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> $crate::nvml::call::NvmlReturn {
            let Some(address) = $crate::real_symbols::function($crate::symbol_table::index::$name) else {
                return $crate::nvml::call::MISSING;
            };
            // SAFETY: the library's function of that name, with this signature.
            let function = unsafe {
                core::mem::transmute::<
                    usize,
                    unsafe extern "C" fn($($kind),*) -> $crate::nvml::call::NvmlReturn,
                >(address)
            };
            // SAFETY: called with the caller's arguments, or with our own in place of some.
            let $real = |$($argument: $kind),*| unsafe { function($($argument),*) };
            $body
        }
    };
}
pub(crate) use hook;

/// The device's share, if the policy shows the share instead of the device.
pub(super) fn visible_share(answer: NvmlReturn, device: Handle) -> Option<Device> {
    if answer != SUCCESS || !share::has_shares() {
        return None;
    }
    // "GPU-" or "MIG-" and a UUID.
    let mut text = [0u8; 96];
    type GetUuid = unsafe extern "C" fn(Handle, *mut c_char, c_uint) -> NvmlReturn;
    let address = real_symbols::function(index::nvmlDeviceGetUUID)?;
    // SAFETY: the library's own function of that name, with our buffer for the result.
    let asked = unsafe {
        core::mem::transmute::<usize, GetUuid>(address)(
            device,
            text.as_mut_ptr().cast(),
            text.len() as c_uint,
        )
    };
    let end = text.iter().position(|byte| *byte == 0).filter(|_| asked == SUCCESS)?;
    match share::for_uuid(text.get(..end)?) {
        DeviceAccess::Share(device) => Some(device).filter(|device| device.has(Flags::NVML_VIEW)),
        DeviceAccess::Unmanaged | DeviceAccess::Denied => None,
    }
}
