//! The API types of Divvy: names, quantities, allocated claims and opaque configuration.
//!
//! Nothing here does I/O, reads a clock or knows a GPU. Kubernetes objects come in as `k8s-openapi`
//! types and are converted to types without unchecked `Option`s, such as [`claim::AllocatedClaim`].

pub mod check;
pub mod claim;
pub mod config;
pub mod control;
pub mod foreign;
pub mod mps;
pub mod names;
pub mod quantity;
pub mod schema;
pub mod sharing;
pub mod text;
pub mod top;

pub use claim::{AllocatedClaim, AllocatedDevice, Hold, Share};
pub use names::{ClaimRef, ClaimUid, DeviceName, GpuUuid, PoolName, RequestName, ShareId};
pub use quantity::Quantity;
