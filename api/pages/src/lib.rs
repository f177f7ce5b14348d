//! The two memory-mapped pages of a share, which the node and the containers use.
//!
//! A share is one (claim, shareID) on one device. The **policy page** holds its limits: root owns it,
//! and containers see it read-only. The **account page** holds its usage: containers write it, so the
//! node does not trust it. The layouts are an ABI, because the library in a container may be older or
//! newer than the node daemon. Readers reject another major version; a higher minor version only adds
//! fields. The crate is linked into foreign processes: no dependencies, allocator or system calls.

#![cfg_attr(not(any(test, loom)), no_std)]

#[cfg(not(target_endian = "little"))]
compile_error!("the pages are laid out for little-endian machines");

pub mod account;
mod charge;
mod crc;
mod id;
pub mod policy;
pub mod sync;
mod word;

#[cfg(test)]
mod explore;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod steps;
#[cfg(all(test, loom))]
mod threads;

pub use account::{AccountPage, Fault, Identity, Owner, PageError, SlotState};
pub use charge::{MAX_PAGES, NoSlot, Peers, Refused, SlotRef, charge, charge_fixed, force_charge, uncharge};
pub use id::{GpuUuid, Text};
pub use policy::{Codec, Compute, Flags, Memory, Policy, PolicyError, PolicyPage};

/// The major version of both layouts. A reader rejects any other.
pub const MAJOR: u16 = 1;
/// The minor version of both layouts. A higher one adds fields in reserved places that were zero.
pub const MINOR: u16 = 4;
