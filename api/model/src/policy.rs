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
    /// The whole GPU and its MIG instances are dealt out in shares too, not only
    /// to one claim at a time.
    pub shares: bool,
    /// All GPU instances on it are Divvy's: one that no record explains is destroyed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub exclusive_ownership: bool,
}

impl GpuPolicy {
    /// Whether it is what every GPU offers where nobody says anything.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// This policy for a GPU on which claims hold time-slices under another: they
    /// stand on the interval that was set for them, and on slots that the
    /// scheduler has counted already. A mode that is off takes nothing away, so
    /// all else changes at once.
    pub fn beside_timeslices(mut self, before: &Self) -> Self {
        self.interval = before.interval;
        self.slots = self.slots.max(before.slots);
        self
    }
}

impl Default for GpuPolicy {
    fn default() -> Self {
        Self {
            modes: Mode::ALL.into_iter().collect(),
            slots: 4,
            interval: Interval::Default,
            mps_clients: 4,
            shares: true,
            exclusive_ownership: false,
        }
    }
}
