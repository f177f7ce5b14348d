//! The language of Divvy: names, quantities, allocated claims and opaque
//! configuration, as types that every other room speaks.
//!
//! Nothing here does I/O, reads a clock or knows a GPU. Wire objects of
//! Kubernetes come in as `k8s-openapi` types and leave as ours: after
//! [`claim::AllocatedClaim`] is made there is no `Option` left to check.

pub mod check;
pub mod claim;
pub mod config;
pub mod mps;
pub mod names;
pub mod quantity;
pub mod schema;
pub mod sharing;
pub mod top;

pub use claim::{AllocatedClaim, AllocatedDevice, Hold, Share};
pub use names::{ClaimRef, ClaimUid, DeviceName, GpuUuid, PoolName, RequestName, ShareId};
pub use quantity::Quantity;
