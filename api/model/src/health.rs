//! Health of a GPU: states, their causes, and what an administrator wants done in each state.
//!
//! Pure. The driver derives findings from NVML (`driver/src/gpu/health`); the publisher turns them
//! into taints.

use crate::placement::Placement;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Health of a GPU or of a MIG instance, from best to worst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HealthState {
    #[default]
    Healthy,
    /// It works, with less redundancy or speed: for example, spare memory rows are used up.
    Degraded,
    /// It must be reset before it works again.
    NeedsReset,
    /// A hardware call on it does not return.
    Stuck,
    /// The GPU driver cannot reach it; a reboot or a replacement is needed.
    Lost,
}

impl HealthState {
    /// All states, from best to worst.
    pub const ALL: [Self; 5] = [Self::Healthy, Self::Degraded, Self::NeedsReset, Self::Stuck, Self::Lost];

    /// The name in logs, metrics, taints and the node configuration.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::NeedsReset => "needs-reset",
            Self::Stuck => "stuck",
            Self::Lost => "lost",
        }
    }

    /// The action for an operator; empty for a healthy GPU.
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::Healthy => "",
            Self::Degraded => "reset the GPU when it is convenient",
            Self::NeedsReset => "stop its processes and reset the GPU",
            Self::Stuck => "check the kernel log, then reset the GPU or reboot the node",
            Self::Lost => "reboot the node, or replace the GPU if it does not come back",
        }
    }
}

impl fmt::Display for HealthState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

/// The action that NVIDIA's GPU driver asks for: `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`, since driver R565.
/// Source: NVIDIA, "GPU Memory Error Management", chapter "Error Recovery and Response Flags", and
/// nvml.h 13.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "u32", into = "u32")]
pub enum RecoveryAction {
    /// "The GPU can be immediately used again by starting a new GPU process."
    None,
    GpuReset,
    NodeReboot,
    /// All peer-to-peer traffic must stop. Then the GPU driver reports one of the other actions.
    DrainP2p,
    DrainAndReset,
    RecoverImexDomain,
    BusReset,
    SystemReboot,
    /// An action that is newer than this list.
    Other(u32),
}

impl From<u32> for RecoveryAction {
    fn from(number: u32) -> Self {
        match number {
            0 => Self::None,
            1 => Self::GpuReset,
            2 => Self::NodeReboot,
            3 => Self::DrainP2p,
            4 => Self::DrainAndReset,
            5 => Self::RecoverImexDomain,
            6 => Self::BusReset,
            7 => Self::SystemReboot,
            other => Self::Other(other),
        }
    }
}

impl From<RecoveryAction> for u32 {
    fn from(action: RecoveryAction) -> Self {
        match action {
            RecoveryAction::None => 0,
            RecoveryAction::GpuReset => 1,
            RecoveryAction::NodeReboot => 2,
            RecoveryAction::DrainP2p => 3,
            RecoveryAction::DrainAndReset => 4,
            RecoveryAction::RecoverImexDomain => 5,
            RecoveryAction::BusReset => 6,
            RecoveryAction::SystemReboot => 7,
            RecoveryAction::Other(other) => other,
        }
    }
}

impl RecoveryAction {
    /// The state of a GPU with this action. An action that this list does not know needs attention.
    pub const fn state(self) -> HealthState {
        match self {
            Self::None => HealthState::Healthy,
            // Only memory that is shared with other nodes is affected.
            Self::RecoverImexDomain => HealthState::Degraded,
            Self::GpuReset | Self::DrainP2p | Self::DrainAndReset | Self::BusReset | Self::Other(_) => {
                HealthState::NeedsReset
            }
            Self::NodeReboot | Self::SystemReboot => HealthState::Lost,
        }
    }
}

impl fmt::Display for RecoveryAction {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::None => "none",
            Self::GpuReset => "GPU reset",
            Self::NodeReboot => "node reboot",
            Self::DrainP2p => "drain peer-to-peer",
            Self::DrainAndReset => "drain and reset",
            Self::RecoverImexDomain => "recover IMEX domain",
            Self::BusReset => "bus reset",
            Self::SystemReboot => "system reboot",
            Self::Other(other) => return write!(out, "action {other}"),
        };
        out.write_str(name)
    }
}

/// The health of a GPU as NVML reports it. A property that the GPU or its driver lacks is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HealthReading {
    pub recovery_action: Option<RecoveryAction>,
    /// A memory row is remapped at the next reset.
    pub remap_pending: Option<bool>,
    /// A memory row could not be remapped. NVIDIA's RMA criterion; it outlives resets.
    pub remap_failed: Option<bool>,
    /// Uncorrected ECC errors since the last reset.
    pub uncorrected_ecc: Option<u64>,
    /// Energy since the last reset or load of the GPU driver, in mJ.
    pub energy_mj: Option<u64>,
}

impl HealthReading {
    /// The findings of the reading, from the most reliable property on.
    pub fn findings(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        let mut add = |state: HealthState, cause: String| {
            if state != HealthState::Healthy {
                findings.push(Finding::of_gpu(state, cause));
            }
        };
        if let Some(action) = self.recovery_action {
            add(action.state(), format!("recovery action is {action}"));
        }
        if self.remap_failed == Some(true) {
            add(HealthState::Degraded, "a memory row could not be remapped".to_owned());
        }
        if self.remap_pending == Some(true) {
            add(HealthState::Degraded, "a memory row is remapped at the next reset".to_owned());
        }
        if self.uncorrected_ecc.is_some_and(|errors| errors > 0) {
            // A GPU that remaps rows also contains the error (NVIDIA, "GPU Memory Error Management").
            // On older ones "a GPU reset or node reboot is needed to clear this error" (XID 48).
            let is_contained = self.recovery_action.is_some() || self.remap_pending.is_some();
            let state = if is_contained { HealthState::Degraded } else { HealthState::NeedsReset };
            add(state, "uncorrected ECC errors since the last reset".to_owned());
        }
        findings
    }

    /// Whether the GPU was reset between the earlier reading and this one: a counter that only a
    /// reset sets back is lower, or what only a reset ends has ended.
    pub fn is_after_reset(&self, earlier: &Self) -> bool {
        let fell = |before: Option<u64>, now: Option<u64>| before.zip(now).is_some_and(|(b, n)| n < b);
        let cleared = matches!(earlier.recovery_action, Some(action) if action != RecoveryAction::None)
            && self.recovery_action == Some(RecoveryAction::None);
        cleared
            || fell(earlier.energy_mj, self.energy_mj)
            || fell(earlier.uncorrected_ecc, self.uncorrected_ecc)
            || (earlier.remap_pending, self.remap_pending) == (Some(true), Some(false))
    }
}

/// The effect of a taint; `None` means that there is no taint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum TaintEffect {
    None,
    NoSchedule,
    NoExecute,
}

impl TaintEffect {
    /// The names in the node configuration.
    pub const NAMES: &'static [&'static str] = &["None", "NoSchedule", "NoExecute"];

    /// The effect with that name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::None, Self::NoSchedule, Self::NoExecute].into_iter().find(|effect| effect.as_str() == name)
    }

    /// Its name, as Kubernetes writes it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::None => "None",
            Self::NoSchedule => "NoSchedule",
            Self::NoExecute => "NoExecute",
        }
    }
}

/// The effect of the taint of each state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HealthEffects {
    pub degraded: TaintEffect,
    pub needs_reset: TaintEffect,
    pub stuck: TaintEffect,
    pub lost: TaintEffect,
}

impl Default for HealthEffects {
    fn default() -> Self {
        Self {
            degraded: TaintEffect::None,
            needs_reset: TaintEffect::NoSchedule,
            stuck: TaintEffect::NoSchedule,
            lost: TaintEffect::NoSchedule,
        }
    }
}

impl HealthEffects {
    /// Whether these are the defaults.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// The effect of a state.
    pub const fn of(self, state: HealthState) -> TaintEffect {
        match state {
            HealthState::Healthy => TaintEffect::None,
            HealthState::Degraded => self.degraded,
            HealthState::NeedsReset => self.needs_reset,
            HealthState::Stuck => self.stuck,
            HealthState::Lost => self.lost,
        }
    }
}

/// Why a GPU, or one MIG instance of it, is not healthy.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Finding {
    pub state: HealthState,
    /// For people, without the state: `XID 79: GPU has fallen off the bus`.
    pub cause: String,
    /// The instance that NVML attributes the error to; `None` for the whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub instance: Option<Placement>,
}

impl Finding {
    /// A finding about the whole GPU.
    pub fn of_gpu(state: HealthState, cause: impl Into<String>) -> Self {
        Self { state, cause: cause.into(), instance: None }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.instance {
            None => write!(out, "GPU is {}: {}", self.state, self.cause),
            Some(at) => write!(out, "GPU instance at {} is {}: {}", at.start, self.state, self.cause),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recovery_actions_round_trip_through_numbers() {
        for number in (0..=9).chain([u32::MAX]) {
            assert_eq!(u32::from(RecoveryAction::from(number)), number);
            let healthy = RecoveryAction::from(number).state() == HealthState::Healthy;
            assert_eq!(healthy, number == 0, "{number}");
        }
    }

    #[test]
    fn reading_yields_a_finding_per_property() {
        let check = |reading: HealthReading, expected: &[&str]| {
            let found: Vec<_> = reading.findings().iter().map(Finding::to_string).collect();
            assert_eq!(found, expected, "{reading:?}");
        };
        let none = HealthReading::default();
        check(none, &[]);
        let action = |number: u32| HealthReading { recovery_action: Some(number.into()), ..none };
        check(action(0), &[]);
        check(action(1), &["GPU is needs-reset: recovery action is GPU reset"]);
        check(action(2), &["GPU is lost: recovery action is node reboot"]);
        check(action(8), &["GPU is needs-reset: recovery action is action 8"]);
        let remapped = HealthReading { remap_pending: Some(true), remap_failed: Some(true), ..none };
        check(
            remapped,
            &[
                "GPU is degraded: a memory row could not be remapped",
                "GPU is degraded: a memory row is remapped at the next reset",
            ],
        );
        let errors = HealthReading { uncorrected_ecc: Some(2), ..none };
        check(errors, &["GPU is needs-reset: uncorrected ECC errors since the last reset"]);
        let contained = HealthReading { remap_pending: Some(false), ..errors };
        check(contained, &["GPU is degraded: uncorrected ECC errors since the last reset"]);
    }

    #[test]
    fn reset_is_seen_by_what_it_sets_back() {
        let before = HealthReading {
            recovery_action: Some(RecoveryAction::GpuReset),
            remap_pending: Some(true),
            remap_failed: Some(false),
            uncorrected_ecc: Some(3),
            energy_mj: Some(1_000),
        };
        let check = |after: HealthReading, expected: bool| {
            assert_eq!(after.is_after_reset(&before), expected, "{after:?}");
        };
        check(before, false);
        check(HealthReading::default(), false);
        check(HealthReading { energy_mj: Some(2_000), uncorrected_ecc: Some(4), ..before }, false);
        check(HealthReading { recovery_action: Some(RecoveryAction::DrainP2p), ..before }, false);
        check(HealthReading { recovery_action: Some(RecoveryAction::None), ..before }, true);
        check(HealthReading { energy_mj: Some(1), ..before }, true);
        check(HealthReading { uncorrected_ecc: Some(0), ..before }, true);
        check(HealthReading { remap_pending: Some(false), ..before }, true);
    }
}
