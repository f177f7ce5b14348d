//! Waits for the device: when they are over, what was launched has ended, and is looked at while the program is still there.
//!
//! A launch is measured by events that a later call looks at; a program that launches one kernel, waits for it and ends
//! makes none. Copies to the host wait as well.

use super::driver::Handle;
use super::launch::waited;
use super::{hook, twins};

hook! {
    /// Since CUDA 2.0.
    cuCtxSynchronize() |real| {
        waited(real())
    }
}

twins! {
    wait_for(what: Handle) of 1 |real| {
        waited(real(what))
    }

    /// Since CUDA 13.0, of any context.
    cuCtxSynchronize_v2;
    /// Since CUDA 2.0.
    cuStreamSynchronize;
    /// On the per-thread default stream.
    cuStreamSynchronize_ptsz;
    /// Since CUDA 2.0.
    cuStreamQuery;
    /// On the per-thread default stream.
    cuStreamQuery_ptsz;
    /// Since CUDA 2.0.
    cuEventSynchronize;
    /// Since CUDA 2.0.
    cuEventQuery;
}

twins! {
    copy(to: u64, from: u64, bytes: usize) of 3 |real| {
        waited(real(to, from, bytes))
    }

    /// Since CUDA 3.2.
    cuMemcpyDtoH_v2;
    /// On the per-thread default stream.
    cuMemcpyDtoH_v2_ptds;
    /// Since CUDA 4.0, between any two places.
    cuMemcpy;
    /// On the per-thread default stream.
    cuMemcpy_ptds;
}
