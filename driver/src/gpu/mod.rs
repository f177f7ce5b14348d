//! The GPUs of a node: one NVML session, the inventory, health, MPS and time-slices.

pub mod epoch;
mod health;
pub mod inventory;
mod kernel;
mod library;
mod manager;
pub mod mps;
mod numbers;
pub mod part;
pub mod sharing;
pub mod sysfs;
pub mod timeslice;

pub use kernel::GpuCounts;
pub use manager::*;
