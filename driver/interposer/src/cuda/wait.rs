//! Waits for the device: when they are over, what was launched has ended, and is looked at while the program is still there.
//!
//! A launch is measured by events that a later call looks at; a program that launches one kernel, waits for it and ends
//! makes none. Copies to the host wait as well.

use super::driver::Handle;
use super::hook;
use super::launch::waited;
use core::ffi::c_void;

/// Defines the hooks of functions after which what was launched may have ended.
macro_rules! waits {
    ($($(#[$meta:meta])* $name:ident($($argument:ident: $kind:ty),*);)*) => {$(
        hook! {
            $(#[$meta])*
            $name($($argument: $kind),*) |real| {
                waited(real($($argument),*))
            }
        }
    )*};
}

waits! {
    /// Since CUDA 2.0.
    cuCtxSynchronize();
    /// Since CUDA 13.0, of any context.
    cuCtxSynchronize_v2(context: Handle);
    /// Since CUDA 2.0.
    cuStreamSynchronize(stream: Handle);
    /// On the per-thread default stream.
    cuStreamSynchronize_ptsz(stream: Handle);
    /// Since CUDA 2.0.
    cuStreamQuery(stream: Handle);
    /// On the per-thread default stream.
    cuStreamQuery_ptsz(stream: Handle);
    /// Since CUDA 2.0.
    cuEventSynchronize(event: Handle);
    /// Since CUDA 2.0.
    cuEventQuery(event: Handle);
    /// Since CUDA 3.2.
    cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize);
    /// On the per-thread default stream.
    cuMemcpyDtoH_v2_ptds(to: *mut c_void, from: u64, bytes: usize);
    /// Since CUDA 4.0, between any two places.
    cuMemcpy(to: u64, from: u64, bytes: usize);
    /// On the per-thread default stream.
    cuMemcpy_ptds(to: u64, from: u64, bytes: usize);
}
