//! Opaque configuration of claims and DeviceClasses, `resource.divvy.dev/v1alpha1`.
//!
//! The documents are those of NVIDIA's DRA driver (`resource.nvidia.com/v1beta1`) under our group,
//! with the same defaults, so they can be ported by search and replace. Parsing is stricter; see
//! [`crate::schema`] and the table at [`DeviceConfig`]. [`DeviceConfig::parse`] reads text and
//! detects duplicate keys, so the driver uses it. [`DeviceConfig::from_value`] is for callers that
//! only have a value.

mod documents;
mod read;

use crate::schema::{Clock, FieldError};
use crate::sharing::{Injection, Mode, MpsSettings, Priority, ShareSettings, Sharing};
pub use documents::KINDS;
use documents::{GPU_CONFIG, MIG_DEVICE_CONFIG, SHARE_CONFIG};

/// The configuration of a device, from a class or a claim. It differs from NVIDIA's driver:
///
/// | document | here | NVIDIA's driver |
/// |---|---|---|
/// | `sharing` absent or null | no sharing is configured | the same |
/// | `sharing: {}` | rejected: the strategy is missing | rejected |
/// | `timeSlicingConfig` absent or `{}` | interval Default | absent stops its webhook |
/// | `mpsConfig` absent or `{}` | no limits; several users if the GPU driver can | no limits; one user |
/// | a strategy with the config of another | rejected | rejected in prepare only |
/// | `TimeSlicing` on a MIG instance | rejected | accepted, has no effect |
/// | `defaultActiveThreadPercentage: 0` | rejected: leaves no SM | accepted |
/// | a memory limit below 1Mi | rejected | rejected in prepare only |
/// | `defaultPerDevicePinnedMemoryLimit` by index | only 0: MPS requests have one device | any device |
/// | the same by UUID of a MIG instance | rejected: unknown in advance | accepted |
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceConfig {
    /// For whole GPUs.
    GpuConfig { sharing: Option<Sharing> },
    /// For MIG instances. They have no time-slicing.
    MigDeviceConfig { sharing: Option<MpsSettings> },
    /// For shares of a GPU or of a MIG instance.
    ShareConfig(ShareConfig),
}

/// The settings of a class's shares, or the ceiling of a claim's share. Absent fields have the
/// defaults of [`ShareSettings`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShareConfig {
    pub injection: Option<Injection>,
    pub observe_only: Option<bool>,
    pub priority: Option<Priority>,
    /// 1 to 10,000.
    pub weight: Option<u32>,
    /// Percent, 1 to 100.
    pub ceiling: Option<u32>,
    /// Percent of the claimed memory, 100 to 1,000.
    pub overcommit: Option<u32>,
    /// Most sessions that may be open at once.
    pub encoders: Option<u32>,
    pub decoders: Option<u32>,
    pub messages: Option<bool>,
    pub schedule: Vec<ScheduleEntry>,
}

/// A time of day with other settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScheduleEntry {
    pub from: Clock,
    /// Never equal to `from`.
    pub to: Clock,
    pub priority: Option<Priority>,
    pub weight: Option<u32>,
    pub ceiling: Option<u32>,
}

/// A configuration that applies to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppliedConfig {
    pub config: DeviceConfig,
    pub source: Source,
}

/// The origin and target of a configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// An administrator, for the devices of a class that it is valid for.
    Class,
    /// The author of the claim, for all requests or for a base request. Its alternatives may be of
    /// several kinds, so it applies where it is valid.
    Claim,
    /// The author of the claim, for exactly this request or sub-request, so it must be valid for
    /// the device.
    Request,
}

/// Why a configuration is invalid. The message names the field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("configuration is not JSON: {cause}")]
    NotJson { cause: String },
    #[error("configuration is not a JSON object")]
    NotAnObject,
    #[error("field kind is {found:?}, expected GpuConfig, MigDeviceConfig or ShareConfig")]
    UnknownKind { found: String },
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error("field sharing.{field} is not allowed with strategy {strategy}; remove one of them")]
    OtherStrategy { field: &'static str, strategy: &'static str },
    #[error(
        "field sharing.strategy is TimeSlicing, which has no effect on a MIG instance; use MPS, or a \
         GpuConfig for a whole GPU"
    )]
    TimeSlicingOnMig,
    #[error(
        "field sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit has the key {key:?}, expected 0, \
         because a request with MPS has one device{}",
        if *mig {
            "; the UUID of a MIG instance is not known before it is created"
        } else {
            ", or the UUID of a GPU"
        }
    )]
    DeviceKey { key: String, mig: bool },
}

/// A configuration that is not valid for the device it applies to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigMismatch {
    /// It names a request whose device is of another kind.
    #[error(
        "{kind} is for {}, but the device is {}; {}",
        for_kind(kind), mode.device(), remedy(kind, *mode)
    )]
    Kind {
        kind: &'static str,
        /// The mode of the device.
        mode: Mode,
    },
    /// It names a request for a share.
    #[error("{kind} is for {}, but the device is a share; remove the configuration", for_kind(kind))]
    KindOfShare { kind: &'static str },
    /// A claim may only lower the limits of its share.
    #[error("field {field} of ShareConfig may only be set in a DeviceClass, not in a claim; remove it")]
    OnlyClass { field: &'static str },
    #[error(
        "field ceiling of ShareConfig is {asked}, but its DeviceClass allows at most {allowed}; request no \
         more"
    )]
    Ceiling { asked: u32, allowed: u32 },
}

/// All faults of the fields of a document of a known kind; [`DeviceConfig::parse`] stops at the first
/// one.
pub fn faults(document: &serde_json::Value) -> Vec<FieldError> {
    let table = KINDS.iter().find(|table| document["kind"] == table.name);
    table
        .map(|table| crate::schema::faults(crate::schema::Shape::Object(table), document))
        .unwrap_or_default()
}

fn for_kind(kind: &str) -> &'static str {
    if kind == GPU_CONFIG.name {
        "whole GPUs"
    } else if kind == MIG_DEVICE_CONFIG.name {
        "MIG instances"
    } else {
        "shares"
    }
}

fn remedy(kind: &str, mode: Mode) -> &'static str {
    match mode {
        Mode::Whole if kind == SHARE_CONFIG.name => "request part of a GPU with share.divvy.dev",
        Mode::Whole => "use GpuConfig",
        Mode::Share => "use ShareConfig",
        Mode::Mig => "use MigDeviceConfig",
        Mode::Timeslice => "its interval is set by the node configuration, so remove the configuration",
        Mode::Mps => "its limits are the claim's capacities, so remove the configuration",
    }
}

/// The effective configuration of a device that a claim holds exclusively, or that is shared in its
/// own mode: how the pods of the claim share it.
///
/// The order is that of NVIDIA's driver: `configs` are sorted by ascending precedence. The last one
/// for the kind of the device applies, and nothing is merged.
pub fn effective(configs: &[AppliedConfig], mode: Mode) -> Result<Option<Sharing>, ConfigMismatch> {
    for AppliedConfig { config, source } in configs.iter().rev() {
        match (config, mode) {
            (DeviceConfig::GpuConfig { sharing }, Mode::Whole) => return Ok(sharing.clone()),
            (DeviceConfig::MigDeviceConfig { sharing }, Mode::Mig) => {
                return Ok(sharing.clone().map(Sharing::Mps));
            }
            _ if *source == Source::Request => {
                return Err(ConfigMismatch::Kind { kind: config.kind(), mode });
            }
            _ => {}
        }
    }
    Ok(None)
}

/// The settings of a share. The last ShareConfig of the class applies. The last one of the claim
/// may lower the ceiling and set nothing else.
pub fn share_settings(configs: &[AppliedConfig]) -> Result<ShareSettings, ConfigMismatch> {
    let (mut class, mut claim) = (None, None);
    for AppliedConfig { config, source } in configs {
        match (config, source) {
            (DeviceConfig::ShareConfig(config), Source::Class) => class = Some(config),
            (DeviceConfig::ShareConfig(config), _) => claim = Some(config.of_claim()?),
            (_, Source::Request) => return Err(ConfigMismatch::KindOfShare { kind: config.kind() }),
            _ => {}
        }
    }
    let default = ShareSettings::default();
    let class = class.cloned().unwrap_or_default();
    let allowed = class.ceiling.unwrap_or(default.ceiling);
    let ceiling = match claim.flatten() {
        Some(asked) if asked > allowed => return Err(ConfigMismatch::Ceiling { asked, allowed }),
        Some(asked) => asked,
        None => allowed,
    };
    Ok(ShareSettings {
        injection: class.injection.unwrap_or(default.injection),
        observe_only: class.observe_only.unwrap_or(default.observe_only),
        priority: class.priority.unwrap_or(default.priority),
        weight: class.weight.unwrap_or(default.weight),
        ceiling,
        overcommit: class.overcommit.unwrap_or(default.overcommit),
        encoders: class.encoders,
        decoders: class.decoders,
        burst: class.ceiling.is_some(),
        messages: class.messages.unwrap_or(default.messages),
    })
}

impl ShareConfig {
    /// The ceiling, if no other field is set.
    fn of_claim(&self) -> Result<Option<u32>, ConfigMismatch> {
        let for_class = [
            ("injection", self.injection.is_some()),
            ("observeOnly", self.observe_only.is_some()),
            ("priority", self.priority.is_some()),
            ("weight", self.weight.is_some()),
            ("overcommit", self.overcommit.is_some()),
            ("encoders", self.encoders.is_some()),
            ("decoders", self.decoders.is_some()),
            ("messages", self.messages.is_some()),
            ("schedule", !self.schedule.is_empty()),
        ];
        match for_class.iter().find(|(_, said)| *said) {
            Some((field, _)) => Err(ConfigMismatch::OnlyClass { field }),
            None => Ok(self.ceiling),
        }
    }

    /// The settings at that time of day, without a schedule.
    #[must_use]
    pub fn at(&self, now: Clock) -> Self {
        let mut all = Self { schedule: Vec::new(), ..self.clone() };
        for entry in self.schedule.iter().filter(|entry| now.is_within(entry.from, entry.to)) {
            all.priority = entry.priority.or(all.priority);
            all.weight = entry.weight.or(all.weight);
            all.ceiling = entry.ceiling.or(all.ceiling);
        }
        all
    }
}

impl DeviceConfig {
    /// The `kind` of the document.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::GpuConfig { .. } => GPU_CONFIG.name,
            Self::MigDeviceConfig { .. } => MIG_DEVICE_CONFIG.name,
            Self::ShareConfig(_) => SHARE_CONFIG.name,
        }
    }
}

#[cfg(test)]
mod tests;
