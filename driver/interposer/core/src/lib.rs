//! The rules of the injected library, without its symbols, C pointers and system calls.
//!
//! A hook finds the [`Device`] of the call ([`ProcessState::device`]), charges it
//! ([`Device::reserve`]), calls the driver, and then reports the result. Every token handed out
//! between these steps undoes itself when dropped, so the path on which the driver fails needs no
//! code. No path panics: after an internal error an allocation is refused, every other call goes
//! through, and a fault counter of the account page is incremented. The crate needs neither an
//! allocator nor thread-local storage; only tests use `std`.

#![cfg_attr(not(test), no_std)]

pub mod codec;
pub mod device;
pub mod free;
pub mod handle_devices;
pub mod handle_metadata;
pub mod liveness;
mod messages;
pub mod nvml;
mod pages;
mod peers;
mod policies;
pub mod pools;
pub mod process_state;
mod quanta;
pub mod system;
pub mod table;
pub mod teardown;
#[cfg(test)]
mod tests;
pub mod throttle;
pub mod vmm;

pub use device::{AllocationKind, MemoryUsage, Reservation};
pub use divvy_pages::{AccountPage, Fault, GpuUuid, Identity, Policy, PolicyPage, Refused};
pub use free::{PendingFree, TakenEntry};
pub use pools::PoolKind;
pub use process_state::{Device, DeviceAccess, ProcessState};
pub use system::{MountedPolicy, System};
pub use teardown::PendingTeardown;
pub use throttle::{Timer, Work};
