//! The limits of a share, as a record has them. What the first build with shares did not know is left out where it says
//! nothing: an older build then reads what it has always read.

use crate::sharing::ShareLimits;
use divvy_api::sharing::{self, ShareSettings};
use serde::{Deserialize, Serialize};

/// All that a policy page says of the claim, so that it can be made again.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Share {
    /// Bytes.
    memory: u64,
    /// Per cent.
    cores: u32,
    injection: Injection,
    observe_only: bool,
    priority: Priority,
    weight: u32,
    /// Per cent.
    ceiling: u32,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    burst: bool,
    /// Per cent; none is 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    overcommit: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    encoders: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    decoders: Option<u32>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Injection {
    Preload,
    Shim,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Priority {
    Low,
    High,
}

impl From<ShareLimits> for Share {
    fn from(limits: ShareLimits) -> Self {
        let ShareSettings { injection, observe_only, priority, weight, ceiling, burst, .. } = limits.settings;
        let ShareSettings { overcommit, encoders, decoders, .. } = limits.settings;
        Self {
            memory: limits.memory,
            cores: limits.cores,
            injection: match injection {
                sharing::Injection::Preload => Injection::Preload,
                sharing::Injection::Shim => Injection::Shim,
            },
            observe_only,
            priority: match priority {
                sharing::Priority::Low => Priority::Low,
                sharing::Priority::High => Priority::High,
            },
            weight,
            ceiling,
            burst,
            overcommit: Some(overcommit).filter(|percent| *percent != 100),
            encoders,
            decoders,
        }
    }
}

impl From<Share> for ShareLimits {
    fn from(share: Share) -> Self {
        let settings = ShareSettings {
            injection: match share.injection {
                Injection::Preload => sharing::Injection::Preload,
                Injection::Shim => sharing::Injection::Shim,
            },
            observe_only: share.observe_only,
            priority: match share.priority {
                Priority::Low => sharing::Priority::Low,
                Priority::High => sharing::Priority::High,
            },
            weight: share.weight,
            ceiling: share.ceiling,
            burst: share.burst,
            overcommit: share.overcommit.unwrap_or(100),
            encoders: share.encoders,
            decoders: share.decoders,
        };
        Self { memory: share.memory, cores: share.cores, settings }
    }
}
