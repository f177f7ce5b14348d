//! The policy of a GPU: what an administrator allows it to be used for. The driver creates it from
//! the node configuration; it is part of the [`crate::Inventory`]. The devices of a disabled mode are
//! removed as [`crate::closing`] describes.

use crate::health::HealthEffects;
use divvy_api::sharing::{Interval, Mode};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The offered modes and settings of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuPolicy {
    pub modes: BTreeSet<Mode>,
    /// Slots of the time-slice device, at least 1.
    pub slots: u32,
    /// The time slice of the time-slice device.
    pub interval: Interval,
    /// An MPS claim without memory or threads gets one of this many equal parts, at least 1.
    pub mps_clients: u32,
    /// The whole GPU is also offered in shares.
    pub shares: bool,
    /// MIG instances are offered in shares instead of exclusively, if `shares` is set too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub mig_shares: bool,
    /// All GPU instances on it belong to Divvy: instances without a record are destroyed.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub exclusive_ownership: bool,
    /// The effect of the taint of each health state.
    #[serde(skip_serializing_if = "HealthEffects::is_default")]
    pub health: HealthEffects,
}

impl GpuPolicy {
    /// Whether it is the default policy.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Whether devices of the mode are offered.
    pub fn offers(&self, mode: Mode) -> bool {
        match mode {
            Mode::Share => self.shares && self.modes.contains(&Mode::Whole),
            mode => self.modes.contains(&mode),
        }
    }

    /// This policy for a GPU on which claims hold time-slices under the policy `before`. Their
    /// interval stays, and the slots do not decrease, because the scheduler has counted them. All
    /// other settings change at once, because disabling a mode takes nothing away.
    pub fn beside_timeslices(mut self, before: &Self) -> Self {
        self.interval = before.interval;
        self.slots = self.slots.max(before.slots);
        self
    }
}

impl Default for GpuPolicy {
    fn default() -> Self {
        Self {
            modes: Mode::LISTED.into_iter().collect(),
            slots: 4,
            interval: Interval::Default,
            mps_clients: 4,
            shares: true,
            mig_shares: false,
            exclusive_ownership: false,
            health: HealthEffects::default(),
        }
    }
}
