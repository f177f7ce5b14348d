//! Opaque configuration of claims and DeviceClasses, `resource.divvy.dev/v1alpha1`.
//!
//! Parsed strictly: an unknown kind, an unknown field and a duplicate key are
//! errors that name the field, because a setting that is silently ignored is
//! worse than a refusal.

use serde::{Deserialize, Serialize};

/// What a class or a claim may say about its devices.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", deny_unknown_fields)]
pub enum DeviceConfig {
    /// For whole GPUs.
    GpuConfig {},
    /// For MIG instances.
    MigDeviceConfig {},
}

/// Why a configuration is refused; the message names the field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);
