//! The hooked functions of `libnvidia-ml.so.1`: what a share is shown, and what it is denied.
//!
//! The library is asked first; its answer is cut down where the device is one of a share. A structure of a version that
//! is not known here is left as it is.

mod deny;
mod processes;
mod view;

pub(crate) use deny::{denied, go};
pub(crate) use processes::*;
pub(crate) use view::*;

use crate::genuine;
use crate::share::{self, Device, Standing};
use crate::table::index;
use core::ffi::{c_char, c_uint, c_void};
use divvy_pages::Flags;

/// `nvmlReturn_t`.
pub(crate) type Answer = i32;
/// `nvmlDevice_t`.
pub(crate) type Handle = *mut c_void;
pub(crate) const SUCCESS: Answer = 0;
/// NVML_ERROR_FUNCTION_NOT_FOUND: the library is not loaded, or has no such function.
pub(crate) const MISSING: Answer = 13;

/// Defines the hook of one function: its exported name, its arguments in C's order, and a body that is given the
/// library's own function.
macro_rules! hook {
    ($(#[$meta:meta])* $name:ident($($argument:ident: $kind:ty),* $(,)?) |$real:ident| $body:block) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// What `nvml.h` asks of the function of this name.
        #[cfg_attr(panic = "abort", unsafe(no_mangle))]
        pub(crate) unsafe extern "C" fn $name($($argument: $kind),*) -> $crate::nvml::Answer {
            let Some(address) = $crate::genuine::function($crate::table::index::$name) else {
                return $crate::nvml::MISSING;
            };
            // SAFETY: the library's function of that very name, whose signature this is.
            let function = unsafe { core::mem::transmute::<usize, unsafe extern "C" fn($($kind),*) -> $crate::nvml::Answer>(address) };
            // SAFETY: called with the arguments of our caller, or with our own in place of some.
            let $real = |$($argument: $kind),*| unsafe { function($($argument),*) };
            $body
        }
    };
}
pub(crate) use hook;

/// The share that a device is, where its policy wants it shown in the device's place.
fn shown(answer: Answer, device: Handle) -> Option<Device> {
    if answer != SUCCESS || !share::is_any() {
        return None;
    }
    // "GPU-" or "MIG-" and a UUID.
    let mut text = [0u8; 96];
    type GetUuid = unsafe extern "C" fn(Handle, *mut c_char, c_uint) -> Answer;
    let address = genuine::function(index::nvmlDeviceGetUUID)?;
    // SAFETY: the library's own function of that name, with room of ours for its answer.
    let asked = unsafe {
        core::mem::transmute::<usize, GetUuid>(address)(
            device,
            text.as_mut_ptr().cast(),
            text.len() as c_uint,
        )
    };
    let end = text.iter().position(|byte| *byte == 0).filter(|_| asked == SUCCESS)?;
    match share::of_uuid(text.get(..end)?) {
        Standing::Share(device) => Some(device).filter(|device| device.has(Flags::NVML_VIEW)),
        Standing::Free | Standing::Closed => None,
    }
}
