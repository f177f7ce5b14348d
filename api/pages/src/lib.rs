//! The two pages of a share, as the node writes them and a container reads them.
//!
//! A share is one (claim, shareID) and names exactly one device. The **policy page**
//! says what it may use; root owns it and the container sees it read-only. The
//! **account page** says what it does use; the container writes it, so whoever stands
//! outside reads it as a statement, not as the truth.
//!
//! A library inside a running container is weeks older than the node daemon that
//! looks at its pages, or weeks younger: the pages are an ABI. Their layout has a
//! major and a minor version. Another major is refused; a higher minor only adds
//! fields in places that were reserved and zero, so it is read.
//!
//! All numbers are little-endian in place, which is the order of every machine that
//! NVIDIA drives (x86-64, aarch64). The crate has no dependencies, no allocator and
//! no system calls: it is linked into foreign processes.

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
#[cfg(all(test, loom))]
mod threads;

pub use account::{AccountPage, Fault, Identity, Owner, PageError, SlotState};
pub use charge::{Full, NoSlot, Peers, SEATS, Seat, charge, charge_fixed, force, uncharge};
pub use id::{GpuUuid, Text};
pub use policy::{Codec, Compute, Flags, Memory, Policy, PolicyError, PolicyPage};

/// The major version of both layouts. A reader refuses any other.
pub const MAJOR: u16 = 1;
/// The minor version of both layouts: fields were added, none moved.
pub const MINOR: u16 = 3;
