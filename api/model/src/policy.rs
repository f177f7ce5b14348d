//! What an administrator lets be made of a GPU: made from the node
//! configuration by the driver, part of the [`crate::Inventory`], read by the
//! publisher and by planning.
//!
//! A mode that is off is published all the same, with a taint: the scheduler
//! counts only what is published, so taking a device away that somebody holds
//! would free its counters.

use divvy_api::sharing::{Interval, Mode};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What one GPU offers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuPolicy {
    pub modes: BTreeSet<Mode>,
    /// Slots of the time-slice device, at least 1.
    pub slots: u32,
    /// Of the time-slice device.
    pub interval: Interval,
    /// An MPS claim that names nothing gets one of so many parts, at least 1.
    pub mps_clients: u32,
}

impl Default for GpuPolicy {
    fn default() -> Self {
        Self { modes: Mode::ALL.into_iter().collect(), slots: 4, interval: Interval::Default, mps_clients: 4 }
    }
}
