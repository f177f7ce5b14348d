//! What the injected library decides, apart from what it calls.
//!
//! The library around this crate has the symbols, the pointers of C programs and the
//! system calls; here are the rules: who is charged what for which event, what a program
//! is told when it asks for memory figures, and who is dead. Everything runs with `std`
//! in tests and without it, without an allocator and without thread-locals, in a container.
//!
//! A hook goes like this: find the [`Device`] of the call ([`Ledger::device`]), ask for room
//! ([`Device::reserve`]), call the driver, and say how it ended. What is handed out between
//! the two calls is a token that undoes itself: a [`Reservation`] that is dropped gives its
//! bytes back, a [`Taken`] entry that is dropped was not freed after all. So the path on
//! which the driver fails needs no code.
//!
//! - [`ledger`]: what a process knows of its shares, made at the first call and anew in a child.
//! - `place`, `neighbours`: the pages and slots of a device, and the share's other processes.
//! - [`freeing`]: a free, whose entry is used only after the driver's call.
//! - [`leaving`]: the end of a context.
//! - [`device`]: charging, and the memory figures of a share.
//! - [`table`]: which allocation is how large, so that its free can be given back.
//! - [`vmm`]: physical memory with handles and mappings, which lives as long as either.
//! - [`growing`]: pools and graph memory, which are charged by what the driver has reserved.
//! - [`known`]: whose memory a pool has, and what an executable graph needs.
//! - [`pace`]: compute time, and the waits of launches.
//! - [`codec`]: sessions of the video engines.
//! - [`handles`]: which device a session is of.
//! - [`alive`]: when a process is proven dead.
//! - [`nvml`]: NVML's answers, cut down to the share.
//! - [`system`]: what all this needs of the operating system.
//!
//! No path panics. On an inner error an allocation is refused and everything else is let
//! through, and a fault counter of the account page says so.

#![cfg_attr(not(test), no_std)]

pub mod alive;
pub mod codec;
pub mod device;
pub mod freeing;
pub mod growing;
pub mod handles;
pub mod known;
pub mod leaving;
pub mod ledger;
mod neighbours;
pub mod nvml;
pub mod pace;
mod place;
mod policies;
pub mod system;
pub mod table;
#[cfg(test)]
mod tests;
pub mod vmm;

pub use device::{Device, Kind, Reservation};
pub use divvy_pages::{AccountPage, Fault, Full, GpuUuid, Identity, Policy, PolicyPage};
pub use freeing::Freeing;
pub use growing::Grown;
pub use leaving::Leaving;
pub use ledger::{Found, Ledger, Standing, Taken};
pub use pace::{Timer, Work};
pub use system::System;
