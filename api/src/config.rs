//! Opaque configuration of claims and DeviceClasses, `resource.divvy.dev/v1alpha1`.
//!
//! The documents are those of NVIDIA's DRA driver (`resource.nvidia.com/v1beta1`)
//! under our own group, with the same defaults, so that they port by search and
//! replace. They are read more strictly: see [`crate::schema`], and below what is
//! refused here and taken there.
//!
//! | document | here | NVIDIA's driver |
//! |---|---|---|
//! | `sharing` absent or null | the device is not set up for sharing | the same |
//! | `sharing: {}` | refused: a strategy is missing | refused |
//! | `timeSlicingConfig: {}`, or without it | interval Default | the first stops its webhook |
//! | `mpsConfig: {}`, or without it | no limits, clients of different users where the GPU driver can | no limits, one user |
//! | a strategy with the other one's config | refused | refused in prepare only |
//! | `TimeSlicing` on a MIG instance | refused | taken, does nothing |
//! | `defaultActiveThreadPercentage: 0` | refused: it would leave no multiprocessor | taken |
//! | a memory limit below 1Mi | refused | refused in prepare only |
//! | `defaultPerDevicePinnedMemoryLimit` by index | 0 only, a request with MPS has one device | any device of the claim |
//! | the same by the UUID of a MIG instance | refused, it is not known before | taken |
//!
//! A `serde_json::Value` has already lost duplicate keys, so
//! [`DeviceConfig::parse`] works on the text and is what the driver uses;
//! [`DeviceConfig::from_value`] serves those who only have the value.

mod documents;
mod read;

use crate::schema::{Clock, Fault};
use crate::sharing::{Injection, Mode, MpsSettings, Priority, ShareSettings, Sharing};
pub use documents::KINDS;
use documents::{GPU_CONFIG, MIG_DEVICE_CONFIG, SHARE_CONFIG};

/// What a class or a claim may say about its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceConfig {
    /// For whole GPUs.
    GpuConfig { sharing: Option<Sharing> },
    /// For MIG instances; there is no time slicing inside one.
    MigDeviceConfig { sharing: Option<MpsSettings> },
    /// For shares, of a GPU or of a MIG instance.
    ShareConfig(ShareConfig),
}

/// What a class says about its shares, and a claim about its ceiling; what is
/// absent is the default of [`ShareSettings`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShareConfig {
    pub injection: Option<Injection>,
    pub observe_only: Option<bool>,
    pub priority: Option<Priority>,
    /// 1 to 10,000.
    pub weight: Option<u32>,
    /// Per cent, 1 to 100.
    pub ceiling: Option<u32>,
    /// Per cent of the claimed memory, 100 to 1,000.
    pub overcommit: Option<u32>,
    /// Open sessions at most.
    pub encoders: Option<u32>,
    pub decoders: Option<u32>,
    pub schedule: Vec<Tide>,
}

/// Hours of each day in which other numbers hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tide {
    pub from: Clock,
    /// Another time than `from`.
    pub to: Clock,
    pub priority: Option<Priority>,
    pub weight: Option<u32>,
    pub ceiling: Option<u32>,
}

/// A configuration that is meant for a device's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppliedConfig {
    pub config: DeviceConfig,
    pub source: Source,
}

/// Who wrote a configuration, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// An administrator, for the devices of a class that it fits.
    Class,
    /// The claim's author, for the devices that it fits: without `requests`, or
    /// for the base of a sub-request, whose alternatives may be of several kinds.
    Claim,
    /// The claim's author, for this very request (or sub-request), so it must
    /// fit the device.
    Request,
}

/// Why a configuration is refused; the message names the field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("configuration is not JSON: {cause}")]
    NotJson { cause: String },
    #[error("configuration is not a JSON object")]
    NotAnObject,
    #[error("field kind is {found:?}, expected GpuConfig, MigDeviceConfig or ShareConfig")]
    UnknownKind { found: String },
    #[error(transparent)]
    Field(#[from] Fault),
    #[error("field sharing.{field} does not go with strategy {strategy}; remove one of them")]
    OtherStrategy { field: &'static str, strategy: &'static str },
    #[error(
        "field sharing.strategy is TimeSlicing, which does nothing on a MIG instance; use MPS, or a GpuConfig for a whole GPU"
    )]
    TimeSlicingOnMig,
    #[error(
        "field sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit has the key {key:?}, expected 0, since a request has one device where it has an MPS control daemon{}", if *mig { "; the UUID of a MIG instance is not known before it is made" } else { ", or the UUID of a GPU" }
    )]
    DeviceKey { key: String, mig: bool },
}

/// A configuration that cannot hold for the device it is meant for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misfit {
    /// It names a request whose device is of another kind.
    #[error("{kind} is for {}, and the device is {}; {}", for_kind(kind), of_mode(*mode), remedy(*mode))]
    Kind {
        kind: &'static str,
        /// Of the device.
        mode: Mode,
    },
    /// It names a request that has a share.
    #[error("{kind} is for {}, and the device is a share; remove the configuration", for_kind(kind))]
    KindOfShare { kind: &'static str },
    /// A tenant may tighten its share, and nothing else.
    #[error(
        "field {field} of ShareConfig is for a DeviceClass to say, and this one is of a claim; remove it"
    )]
    OnlyClass { field: &'static str },
    #[error("field ceiling of ShareConfig is {asked}, and its DeviceClass allows {allowed}; ask for no more")]
    Ceiling { asked: u32, allowed: u32 },
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

fn of_mode(mode: Mode) -> &'static str {
    match mode {
        Mode::Whole => "a whole GPU",
        Mode::Mig => "a MIG instance",
        Mode::Timeslice => "a time-slice",
        Mode::Mps => "a share of MPS",
    }
}

fn remedy(mode: Mode) -> &'static str {
    match mode {
        Mode::Whole => "use GpuConfig",
        Mode::Mig => "use MigDeviceConfig",
        Mode::Timeslice => "its interval is set by the node configuration, so remove the configuration",
        Mode::Mps => "its limits are the claim's capacities, so remove the configuration",
    }
}

/// The configuration of a device that a claim has for itself, or that is shared
/// in its own mode: how the claim's pods share it, if they do.
///
/// The order is that of NVIDIA's driver: `configs` come lowest precedence first
/// and are walked from the back, the first that is for the device's kind holds,
/// and nothing is merged.
pub fn effective(configs: &[AppliedConfig], mode: Mode) -> Result<Option<Sharing>, Misfit> {
    for AppliedConfig { config, source } in configs.iter().rev() {
        match (config, mode) {
            (DeviceConfig::GpuConfig { sharing }, Mode::Whole) => return Ok(sharing.clone()),
            (DeviceConfig::MigDeviceConfig { sharing }, Mode::Mig) => {
                return Ok(sharing.clone().map(Sharing::Mps));
            }
            _ if *source == Source::Request => return Err(Misfit::Kind { kind: config.kind(), mode }),
            _ => {}
        }
    }
    Ok(None)
}

/// The settings of a share. Of a class the last ShareConfig holds; of a claim the
/// last one may lower its ceiling, and none may say more.
pub fn share_settings(configs: &[AppliedConfig]) -> Result<ShareSettings, Misfit> {
    let (mut class, mut claim) = (None, None);
    for AppliedConfig { config, source } in configs {
        match (config, source) {
            (DeviceConfig::ShareConfig(config), Source::Class) => class = Some(config),
            (DeviceConfig::ShareConfig(config), _) => claim = Some(config.of_claim()?),
            (_, Source::Request) => return Err(Misfit::KindOfShare { kind: config.kind() }),
            _ => {}
        }
    }
    let default = ShareSettings::default();
    let class = class.cloned().unwrap_or_default();
    let allowed = class.ceiling.unwrap_or(default.ceiling);
    let ceiling = match claim.flatten() {
        Some(asked) if asked > allowed => return Err(Misfit::Ceiling { asked, allowed }),
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
    })
}

impl ShareConfig {
    /// The ceiling, if that is all it says.
    fn of_claim(&self) -> Result<Option<u32>, Misfit> {
        let for_class = [
            ("injection", self.injection.is_some()),
            ("observeOnly", self.observe_only.is_some()),
            ("priority", self.priority.is_some()),
            ("weight", self.weight.is_some()),
            ("overcommit", self.overcommit.is_some()),
            ("encoders", self.encoders.is_some()),
            ("decoders", self.decoders.is_some()),
            ("schedule", !self.schedule.is_empty()),
        ];
        match for_class.iter().find(|(_, said)| *said) {
            Some((field, _)) => Err(Misfit::OnlyClass { field }),
            None => Ok(self.ceiling),
        }
    }

    /// What holds at that time of the day, without a schedule.
    #[must_use]
    pub fn at(&self, now: Clock) -> Self {
        let mut all = Self { schedule: Vec::new(), ..self.clone() };
        for tide in self.schedule.iter().filter(|tide| now.is_within(tide.from, tide.to)) {
            all.priority = tide.priority.or(all.priority);
            all.weight = tide.weight.or(all.weight);
            all.ceiling = tide.ceiling.or(all.ceiling);
        }
        all
    }
}

impl DeviceConfig {
    /// The `kind` under which it is written.
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
