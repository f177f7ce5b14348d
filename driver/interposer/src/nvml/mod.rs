//! Hooks of `libnvidia-ml.so.1`: what a share is shown, and what it is denied.
//!
//! The library is called first; its result is restricted if the device has a share. Structures of
//! unknown versions are left unchanged.

mod call;
pub(crate) mod deny;
mod processes;
mod view;

pub(crate) use deny::denied;
pub(crate) use processes::*;
pub(crate) use view::*;
