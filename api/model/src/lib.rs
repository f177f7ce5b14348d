//! The pure rules of GPUs: what a node has ([`inventory`]), where a MIG
//! instance can lie ([`placement`]), what a device is called ([`device`]) and
//! which number a GPU keeps ([`numbers`]).
//!
//! No I/O, no clock, no async: every function here can be tested by its arguments.

pub mod device;
pub mod inventory;
pub mod numbers;
pub mod placement;
pub mod policy;

pub use device::DeviceId;
pub use inventory::{Gpu, GpuInstance, Inventory, Mig, MigProfile};
pub use numbers::GpuNumber;
pub use placement::Placement;
pub use policy::GpuPolicy;
