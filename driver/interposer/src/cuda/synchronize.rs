//! Synchronising calls: measurements are collected when they return.
//!
//! Events of a measured launch are normally read by a later call. A program that launches one
//! kernel, waits for it and exits makes no such call. Copies to the host wait as well.

use super::call::{hook, twins};
use super::driver::Handle;
use super::launch::{after_wait, waiting};

hook! {
    /// Since CUDA 2.0.
    cuCtxSynchronize() |real| {
        waiting(real)
    }
}

twins! {
    wait_for(what: Handle) of 1 |real| {
        waiting(|| real(what))
    }

    /// Since CUDA 13.0, of any context.
    cuCtxSynchronize_v2;
    /// Since CUDA 2.0.
    cuStreamSynchronize;
    /// On the per-thread default stream.
    cuStreamSynchronize_ptsz;
    /// Since CUDA 2.0.
    cuEventSynchronize;
}

twins! {
    poll(what: Handle) of 1 |real| {
        after_wait(real(what))
    }

    /// Since CUDA 2.0.
    cuStreamQuery;
    /// On the per-thread default stream.
    cuStreamQuery_ptsz;
    /// Since CUDA 2.0.
    cuEventQuery;
}

twins! {
    copy(to: u64, from: u64, bytes: usize) of 3 |real| {
        waiting(|| real(to, from, bytes))
    }

    /// Since CUDA 3.2.
    cuMemcpyDtoH_v2;
    /// On the per-thread default stream.
    cuMemcpyDtoH_v2_ptds;
    /// Since CUDA 4.0, between any two addresses.
    cuMemcpy;
    /// On the per-thread default stream.
    cuMemcpy_ptds;
}
