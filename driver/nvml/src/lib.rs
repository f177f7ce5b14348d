//! The only caller of NVML. Its face is owned values, one queue per GPU and
//! deadlines; no handle, pointer or borrowed buffer leaves this crate.
//!
//! ```text
//! Session ── open: load the library, initialise, find the GPUs
//!    ├─ GpuQueue ── one OS thread per GPU: calls in order, each with a deadline
//!    ├─ snapshot ── all GPUs side by side, each on its own thread
//!    └─ events   ── one thread waits; what it hears is delivered with what the queues notice
//! ```
//!
//! NVML blocks, and a blocked C call cannot be cancelled. So a call that
//! nobody waits for any more (its deadline passed, or its caller went away)
//! makes the GPU *stuck*: every later call answers [`NvmlError::Stuck`] at once
//! and no second thread is started. When the call comes back after all, the
//! queue is free again and [`Event::Late`] tells that the hardware may have
//! changed without a record of it.
//!
//! Raw calls are made through the symbol table of `nvml-wrapper`, which owns
//! loading and unloading; its wrappers lose what matters here (placements,
//! return codes above 22, the MIG ids of events). A symbol that the library
//! lacks is the answer [`Code::FunctionNotFound`], never a failure to load.
#![allow(unsafe_code)] // NVML is a C library; every unsafe block is in `raw`.

mod code;
mod compute_mode;
mod error;
mod events;
mod gpm;
mod job;
mod mig;
mod names;
mod queue;
mod raw;
mod read;
mod session;
mod usage;

pub use code::Code;
pub use compute_mode::ComputeMode;
pub use error::{NvmlError, OpenError};
pub use events::{Event, Late};
pub use gpm::InstanceTimes;
pub use job::StuckCall;
pub use queue::GpuQueue;
pub use raw::CgroupMemory;
pub use read::{Description, Fabric, GpuReading, Links, RawInstance, RawMig, Snapshot, State};
pub use session::{Closing, Limits, Session};
pub use usage::{ProcessTimes, ProcessUse};
