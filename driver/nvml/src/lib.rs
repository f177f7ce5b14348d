//! The only crate that calls NVML. It returns owned values; no handle, pointer or borrowed buffer
//! leaves it.
//!
//! Each GPU has one OS thread that runs its calls in order, each with a deadline ([`GpuQueue`]).
//! NVML blocks, and a blocked C call cannot be cancelled. If a caller stops waiting for a running
//! call, the GPU is *stuck*: later calls fail with [`NvmlError::Stuck`] at once. When the call
//! returns after all, the queue works again and [`Event::LateReturn`] reports that the hardware may
//! have changed without a record.
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
mod types;
mod usage;

pub use code::Code;
pub use compute_mode::ComputeMode;
pub use error::{NvmlError, OpenError};
pub use events::{Event, LateReturn, StuckCall};
pub use gpm::InstanceUtilization;
pub use queue::{GpuQueue, Timeouts};
pub use raw::CgroupMemory;
pub use session::{Closing, Session};
pub use types::{Description, Fabric, GpuReading, Links, RawInstance, RawMig, Snapshot, State};
pub use usage::{ProcessUse, ProcessUtilization};
