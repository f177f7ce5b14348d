//! Health of a GPU: states, their causes, and what an administrator wants done in each state.
//!
//! Pure. The driver derives findings from NVML (`driver/src/gpu/health`); the publisher turns them
//! into taints.

use crate::inventory::{Condition, Gpu, Mig, Presence};
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
}

impl fmt::Display for HealthState {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.as_str())
    }
}

/// What a taint does, or that there is none.
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

impl Gpu {
    /// The worst health state of the GPU and its instances.
    pub fn health(&self) -> HealthState {
        self.findings().map(|finding| finding.state).max().unwrap_or_default()
    }

    /// What the taint of a condition does. A device with any other effect than `None` is not
    /// handed out.
    pub fn effect(&self, condition: &Condition) -> TaintEffect {
        match condition {
            Condition::Health(finding) => self.policy.health.of(finding.state),
            // No instance was ever published, so the whole GPU is safe to use.
            Condition::MigUnreadable { .. } if self.mig == Mig::Unsupported => TaintEffect::None,
            Condition::Mps { .. }
            | Condition::MigUnreadable { .. }
            | Condition::Debt { .. }
            | Condition::HandedOver => TaintEffect::NoSchedule,
        }
    }

    /// The first condition that keeps a device from being handed out: a MIG instance at
    /// `placement`, or the whole GPU. A failed MPS control daemon and debts, which depend on the
    /// claim, are left out.
    pub fn obstacle(&self, placement: Option<Placement>) -> Option<&Condition> {
        self.conditions.iter().find(|condition| {
            !matches!(condition, Condition::Mps { .. } | Condition::Debt { .. })
                && condition.concerns(placement)
                && self.effect(condition) != TaintEffect::None
        })
    }

    /// Whether calls on the GPU can be tried: it is present, and no finding about the whole GPU says
    /// otherwise.
    pub fn is_usable(&self) -> bool {
        self.presence == Presence::Present
            && !self.conditions.contains(&Condition::HandedOver)
            && self
                .findings()
                .all(|finding| finding.instance.is_some() || finding.state < HealthState::NeedsReset)
    }

    /// Why it is not healthy.
    pub fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.conditions.iter().filter_map(|condition| match condition {
            Condition::Health(finding) => Some(finding),
            _ => None,
        })
    }
}
