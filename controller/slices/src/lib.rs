//! Publishes the GPUs of a node as ResourceSlices. One pool per node, named after the node.
//!
//! Inventory → [`mod@pool`] (all possible devices) → [`mod@slices`] (their ResourceSlices) →
//! [`mod@validate`] (API and scheduler rules) → [`sync`] (required writes) → [`publisher`] (writes).
//! All steps up to [`sync`] are pure.
//!
//! Invariant: a device that may be allocated stays published with the same name and counters. A
//! device that must not be allocated gets a taint. [`mode_states`] decides when the devices of a mode
//! that is off are removed.

mod amounts;
mod attributes;
mod compare;
mod mig;
mod mode_states;
mod modes;
mod needed;
mod order;
mod taints;
mod wire;

pub mod kinds;
pub mod pool;
pub mod slices;
pub mod validate;

pub mod sync;

pub mod publisher;
pub mod scheduler_bugs;

pub use mode_states::ModeStates;
pub use pool::{Pool, PoolOptions, Support, attributes, pool, pool_without_counters, same_pool};
pub use publisher::{Held, HeldDevices, PublishOptions, PublishTiming, Published, run};
pub use scheduler_bugs::{KubernetesVersion, SchedulerOptions, is_known_bug};
pub use slices::slices;
pub use sync::slices_of_new_node;
pub use validate::{Invalid, validate};
pub use wire::{Consumption, Content, Device, Slice};

#[cfg(test)]
#[path = "../tests/common/mod.rs"]
mod tests;
