//! The voice: what a node has, told to the API server.
//!
//! ```text
//! Inventory ─▶ pool ─▶ slices ─▶ validate ─▶ sync ─▶ actor ─▶ ResourceSlices
//!              (what   (which    (no before  (what   (the only one
//!              exists)  slice)    the server) to do)  that writes)
//! ```
//!
//! Everything up to [`sync`] is pure. [`actor`] owns the watch, the writes and
//! the waiting, and keeps one pool per node, named after the node. Where two
//! rules meet, the stronger one is: a device that may be allocated stays
//! published, with its name and its cost; what must not be handed out is tainted.

mod amounts;
mod compare;
mod gpu;
mod mig;
mod modes;
mod order;
mod taints;
mod wire;
mod words;

pub mod pool;
pub mod slices;
pub mod validate;

pub mod sync;

pub mod actor;

pub use actor::{Limits, PublishOptions, Published, run};
pub use pool::{Pool, PoolOptions, Support, attributes, pool, same_pool};
pub use slices::slices;
pub use validate::{Invalid, validate};
pub use wire::{Consumption, Content, Device, Slice};

#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod tests;
