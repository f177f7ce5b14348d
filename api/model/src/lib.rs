//! The pure rules of GPUs: what a node has ([`inventory`]), where a MIG
//! instance can lie ([`placement`]), what a device is called ([`device`]), which
//! number a GPU keeps ([`numbers`]), which allocation of it is a [`share`] and
//! what may be made of it ([`policy`], as written by the administrator in a
//! [`nodeconfig`]).
//!
//! No I/O, no clock, no async: every function here can be tested by its arguments.

pub mod device;
pub mod inventory;
pub mod nodeconfig;
pub mod numbers;
pub mod placement;
pub mod policy;
pub mod share;

pub use device::DeviceId;
pub use inventory::{Gpu, GpuInstance, Inventory, Mig, MigProfile};
pub use nodeconfig::NodeConfig;
pub use numbers::GpuNumber;
pub use placement::Placement;
pub use policy::GpuPolicy;
