//! Pure rules about GPUs, without I/O, clock or async: every function can be tested by its arguments.
//!
//! [`inventory`] describes the GPUs of a node, [`device`] their device names and [`numbers`] their stable
//! numbers. [`names`] spells the numbers of NVML. [`placement`] tells where a MIG instance fits.
//! [`share`] tells which allocations are shares. [`policy`] and [`nodeconfig`] define what GPUs may be
//! used for. [`health`] defines the states of a GPU, and [`xid`] what the errors of the GPU driver say
//! about it. [`closing`] decides when devices of a mode that is off are removed, and [`removed`] which
//! claims overlap them.

pub mod closing;
pub mod device;
pub mod health;
pub mod inventory;
pub mod names;
pub mod nodeconfig;
pub mod numbers;
pub mod placement;
pub mod policy;
pub mod removed;
pub mod share;
pub mod xid;

pub use closing::{ClosingId, Closings, ModeSet, Removals};
pub use device::DeviceId;
pub use health::{Finding, HealthEffects, HealthReading, HealthState, RecoveryAction, TaintEffect};
pub use inventory::{Gpu, GpuInstance, Inventory, Mig, MigProfile};
pub use nodeconfig::NodeConfig;
pub use numbers::GpuNumber;
pub use placement::Placement;
pub use policy::GpuPolicy;
