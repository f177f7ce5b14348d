//! Approves the removal of devices whose mode is off; the rules are in [`divvy_model::closing`].
//!
//! The leader counts the time itself, from when it saw a closing or the end of its last allocation, so
//! a new leader starts again and clocks are not compared. Before it approves, it lists the claims
//! once more from the API server, so a lagging watch cannot hide an allocation. It works only while
//! a mode of some node is off.

mod claims;
mod off_modes;
mod planner;
mod reconciler;

pub use claims::{Allocations, Claim};
pub use off_modes::{OffIndex, OffModes};
pub use planner::{NodeName, Planner, removals};
pub use reconciler::RemovalReconciler;
