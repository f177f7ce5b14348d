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

use crate::names::CONFIG_API_VERSION;
use crate::quantity::Quantity;
use crate::schema::{self, Fault, Field, Object, Shape, Unread};
use crate::sharing::{Injection, Interval, Mode, MpsSettings, Priority, ShareSettings, Sharing};
use serde::Deserializer;
use serde_json::Value;
use std::collections::BTreeMap;

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
    #[error("field {field} is about compute time, which shares do not limit yet; remove it")]
    NotYet { field: &'static str },
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
        ];
        match for_class.iter().find(|(_, said)| *said) {
            Some((field, _)) => Err(Misfit::OnlyClass { field }),
            None => Ok(self.ceiling),
        }
    }

    /// What it says of compute time would not be kept.
    fn holds_now(self) -> Result<Self, ConfigError> {
        let later = [
            ("priority", self.priority.is_some()),
            ("weight", self.weight.is_some()),
            ("ceiling", self.ceiling.is_some()),
        ];
        match later.iter().find(|(_, said)| *said) {
            Some((field, _)) => Err(ConfigError::NotYet { field }),
            None => Ok(self),
        }
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

    /// Reads the text of an opaque configuration.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let mut json = serde_json::Deserializer::from_str(text);
        let value = untyped(&mut json)?;
        json.end().map_err(|cause| ConfigError::NotJson { cause: cause.to_string() })?;
        Self::from_value(&value)
    }

    /// Reads a configuration whose duplicate keys, if any, are already lost.
    pub fn from_value(value: &Value) -> Result<Self, ConfigError> {
        let object = value.as_object().ok_or(ConfigError::NotAnObject)?;
        let kind = match object.get("kind") {
            None | Some(Value::Null) => {
                let (field, expected) =
                    ("kind".to_owned(), "GpuConfig, MigDeviceConfig or ShareConfig".to_owned());
                return Err(Fault::Missing { field, expected }.into());
            }
            Some(Value::String(kind)) => kind.clone(),
            Some(other) => other.to_string(),
        };
        let table = match KINDS.iter().find(|table| table.name == kind) {
            Some(table) => table,
            None => return Err(ConfigError::UnknownKind { found: kind }),
        };
        let mig = table.name == MIG_DEVICE_CONFIG.name;
        if mig && value["sharing"]["strategy"] == TIME_SLICING {
            return Err(ConfigError::TimeSlicingOnMig);
        }
        let value = schema::read(Shape::Object(table), value).map_err(refused)?;
        if table.name == SHARE_CONFIG.name {
            return share_config(&value).holds_now().map(Self::ShareConfig);
        }
        let sharing = &value["sharing"];
        Ok(match (mig, sharing.is_null()) {
            (false, true) => Self::GpuConfig { sharing: None },
            (false, false) => Self::GpuConfig { sharing: Some(gpu_sharing(sharing)?) },
            (true, true) => Self::MigDeviceConfig { sharing: None },
            (true, false) => Self::MigDeviceConfig { sharing: Some(mps(&sharing["mpsConfig"], true)?) },
        })
    }
}

fn untyped<'de, D: Deserializer<'de>>(json: D) -> Result<Value, ConfigError> {
    schema::read(Shape::Any, json).map_err(refused)
}

fn refused<E: std::fmt::Display>(unread: Unread<E>) -> ConfigError {
    match unread.fault {
        Some(fault) => fault.into(),
        None => ConfigError::NotJson { cause: unread.cause.to_string() },
    }
}

fn gpu_sharing(sharing: &Value) -> Result<Sharing, ConfigError> {
    let other = |field: &'static str, strategy| match sharing[field].is_null() {
        true => Ok(()),
        false => Err(ConfigError::OtherStrategy { field, strategy }),
    };
    if sharing["strategy"] == MPS {
        other("timeSlicingConfig", MPS)?;
        return mps(&sharing["mpsConfig"], false).map(Sharing::Mps);
    }
    other("mpsConfig", TIME_SLICING)?;
    let interval = sharing["timeSlicingConfig"]["interval"].as_str();
    Ok(Sharing::TimeSlicing(interval.and_then(Interval::from_name).unwrap_or_default()))
}

fn mps(config: &Value, mig: bool) -> Result<MpsSettings, ConfigError> {
    let mut per_device = BTreeMap::new();
    for (key, limit) in config["defaultPerDevicePinnedMemoryLimit"].as_object().into_iter().flatten() {
        let limit: Option<Quantity> = schema::memory(limit);
        match (is_device_key(key, mig), limit) {
            (true, Some(limit)) => per_device.insert(key.clone(), limit),
            // A null takes the entry away.
            (true, None) => continue,
            (false, _) => return Err(ConfigError::DeviceKey { key: key.clone(), mig }),
        };
    }
    let percentage = config["defaultActiveThreadPercentage"].as_u64();
    Ok(MpsSettings {
        active_thread_percentage: percentage.and_then(|percentage| u32::try_from(percentage).ok()),
        pinned_memory: schema::memory(&config["defaultPinnedDeviceMemoryLimit"]),
        pinned_memory_per_device: per_device,
        multi_user: config["multiUser"].as_bool(),
    })
}

fn share_config(config: &Value) -> ShareConfig {
    let count = |field: &str| config[field].as_u64().and_then(|count| u32::try_from(count).ok());
    ShareConfig {
        injection: config["injection"].as_str().and_then(Injection::from_name),
        observe_only: config["observeOnly"].as_bool(),
        priority: config["priority"].as_str().and_then(Priority::from_name),
        weight: count("weight"),
        ceiling: count("ceiling"),
    }
}

/// The index of a request's only device, or a GPU's UUID as NVML writes it. Which
/// GPU a claim gets is the scheduler's business: a limit for another one rests.
fn is_device_key(key: &str, mig: bool) -> bool {
    let uuid = |rest: &str| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    key == "0" || (!mig && key.strip_prefix("GPU-").is_some_and(uuid))
}

const TIME_SLICING: &str = "TimeSlicing";
const MPS: &str = "MPS";

/// All documents of this module, for the reader and the reference.
pub const KINDS: &[&Object] = &[&GPU_CONFIG, &MIG_DEVICE_CONFIG, &SHARE_CONFIG];

const API_VERSION: Field = Field {
    name: "apiVersion",
    shape: Shape::Literally(CONFIG_API_VERSION),
    required: true,
    absent: "",
    about: "The version of this document.",
};

static GPU_CONFIG: Object = Object {
    name: "GpuConfig",
    about: "For whole GPUs (DeviceClass `gpu.divvy.dev`). It says how the pods and containers of one claim share its GPU.",
    fields: &[
        API_VERSION,
        Field { name: "kind", shape: Shape::Literally("GpuConfig"), required: true, absent: "", about: "" },
        Field {
            name: "sharing",
            shape: Shape::Object(&GPU_SHARING),
            required: false,
            absent: "nothing is set up: processes take turns as the GPU driver's default has it",
            about: "How the GPU is shared.",
        },
    ],
};

static MIG_DEVICE_CONFIG: Object = Object {
    name: "MigDeviceConfig",
    about: "For MIG instances (DeviceClass `mig.divvy.dev` and those of single profiles).",
    fields: &[
        API_VERSION,
        Field {
            name: "kind",
            shape: Shape::Literally("MigDeviceConfig"),
            required: true,
            absent: "",
            about: "",
        },
        Field {
            name: "sharing",
            shape: Shape::Object(&MIG_SHARING),
            required: false,
            absent: "nothing is set up",
            about: "How the instance is shared.",
        },
    ],
};

static SHARE_CONFIG: Object = Object {
    name: "ShareConfig",
    about: "For shares, of a GPU or of a MIG instance: how the limits of a class's claims are kept. It belongs into a DeviceClass; in a claim it may say `ceiling` and nothing else, and no more than the class's. What is marked as later is refused until then.",
    fields: &[
        API_VERSION,
        Field { name: "kind", shape: Shape::Literally("ShareConfig"), required: true, absent: "", about: "" },
        Field {
            name: "injection",
            shape: Shape::OneOf(Injection::NAMES),
            required: false,
            absent: "preload",
            about: "How the library that keeps the limits comes into a container: `preload` by `/etc/ld.so.preload`, `shim` in the place of the GPU driver's own libraries, for programs that bear no preloaded library.",
        },
        Field {
            name: "observeOnly",
            shape: Shape::Flag,
            required: false,
            absent: "false",
            about: "Count what is used and refuse nothing. Memory of the GPU is then not safe from the share.",
        },
        Field {
            name: "priority",
            shape: Shape::OneOf(Priority::NAMES),
            required: false,
            absent: "Low",
            about: "Later: while a share of priority High works, those of priority Low on the same device wait.",
        },
        Field {
            name: "weight",
            shape: Shape::Count(1, 10_000),
            required: false,
            absent: "100",
            about: "Later: compute time that is guaranteed to nobody, or not used, is divided by weight.",
        },
        Field {
            name: "ceiling",
            shape: Shape::Count(1, 100),
            required: false,
            absent: "100, in a claim the class's",
            about: "Later: per cent of the device's compute time that the share gets at most, however idle the device is.",
        },
    ],
};

static GPU_SHARING: Object = Object {
    name: "GpuSharing",
    about: "",
    fields: &[
        Field {
            name: "strategy",
            shape: Shape::OneOf(&[TIME_SLICING, MPS]),
            required: true,
            absent: "",
            about: "Processes take turns, or run at once as clients of an MPS control daemon.",
        },
        Field {
            name: "timeSlicingConfig",
            shape: Shape::Object(&TIME_SLICING_CONFIG),
            required: false,
            absent: "interval Default",
            about: "Only with strategy TimeSlicing.",
        },
        MPS_CONFIG_FIELD,
    ],
};

static MIG_SHARING: Object = Object {
    name: "MigDeviceSharing",
    about: "",
    fields: &[
        Field {
            name: "strategy",
            shape: Shape::OneOf(&[MPS]),
            required: true,
            absent: "",
            about: "Processes run at once as clients of an MPS control daemon. TimeSlicing is refused: its interval does nothing on a MIG instance.",
        },
        MPS_CONFIG_FIELD,
    ],
};

const MPS_CONFIG_FIELD: Field = Field {
    name: "mpsConfig",
    shape: Shape::Object(&MPS_CONFIG),
    required: false,
    absent: "no limits",
    about: "Only with strategy MPS.",
};

static TIME_SLICING_CONFIG: Object = Object {
    name: "TimeSlicingConfig",
    about: "",
    fields: &[Field {
        name: "interval",
        shape: Shape::OneOf(Interval::NAMES),
        required: false,
        absent: "Default",
        about: "How long one process runs before the next has its turn.",
    }],
};

static MPS_CONFIG: Object = Object {
    name: "MpsConfig",
    about: "Limits hold for each client process and are cooperative: MPS believes a client that lifts them.",
    fields: &[
        Field {
            name: "defaultActiveThreadPercentage",
            shape: Shape::Count(1, 100),
            required: false,
            absent: "all multiprocessors",
            about: "Per cent of the multiprocessors that a client may use.",
        },
        Field {
            name: "defaultPinnedDeviceMemoryLimit",
            shape: Shape::Memory,
            required: false,
            absent: "all memory",
            about: "Device memory that a client may take, in whole Mi, rounded down.",
        },
        Field {
            name: "defaultPerDevicePinnedMemoryLimit",
            shape: Shape::Map(&Shape::Memory),
            required: false,
            absent: "the limit above on each device",
            about: "The same for one device: the key is 0, or for a whole GPU its UUID. A limit for a GPU that the claim did not get rests.",
        },
        Field {
            name: "multiUser",
            shape: Shape::Flag,
            required: false,
            absent: "where the GPU driver has it",
            about: "Whether clients of different users may run at once.",
        },
    ],
};

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(text: &str, expected: Result<DeviceConfig, &str>) {
        let found = DeviceConfig::parse(text).map_err(|error| error.to_string());
        assert_eq!(found, expected.map_err(str::to_owned), "{text}");
    }

    const API: &str = r#""apiVersion":"resource.divvy.dev/v1alpha1""#;

    fn check_gpu(sharing: &str, expected: Result<Option<Sharing>, &str>) {
        let text = format!(r#"{{{API},"kind":"GpuConfig","sharing":{sharing}}}"#);
        check(&text, expected.map(|sharing| DeviceConfig::GpuConfig { sharing }));
    }

    fn check_mig(sharing: &str, expected: Result<Option<MpsSettings>, &str>) {
        let text = format!(r#"{{{API},"kind":"MigDeviceConfig","sharing":{sharing}}}"#);
        check(&text, expected.map(|sharing| DeviceConfig::MigDeviceConfig { sharing }));
    }

    fn check_mps(config: &str, expected: Result<MpsSettings, &str>) {
        let sharing = format!(r#"{{"strategy":"MPS","mpsConfig":{config}}}"#);
        check_gpu(&sharing, expected.clone().map(|settings| Some(Sharing::Mps(settings))));
        check_mig(&sharing, expected.map(Some));
    }

    #[test]
    fn known_kinds_are_read() {
        check(&format!(r#"{{{API},"kind":"GpuConfig"}}"#), Ok(DeviceConfig::GpuConfig { sharing: None }));
        check(
            &format!(r#" {{"kind":"MigDeviceConfig",{API}}} "#),
            Ok(DeviceConfig::MigDeviceConfig { sharing: None }),
        );
    }

    #[test]
    fn every_partial_object_has_a_meaning() {
        let slicing = |interval| Ok(Some(Sharing::TimeSlicing(interval)));
        let defaults = || Ok(Some(Sharing::Mps(MpsSettings::default())));
        let no_strategy = "field sharing.strategy is missing, expected TimeSlicing or MPS";
        check_gpu("null", Ok(None));
        check_gpu("{}", Err(no_strategy));
        check_gpu(r#"{"strategy":null,"mpsConfig":{}}"#, Err(no_strategy));
        check_gpu(r#"{"strategy":"TimeSlicing"}"#, slicing(Interval::Default));
        check_gpu(r#"{"strategy":"TimeSlicing","timeSlicingConfig":null}"#, slicing(Interval::Default));
        check_gpu(r#"{"strategy":"TimeSlicing","timeSlicingConfig":{}}"#, slicing(Interval::Default));
        check_gpu(
            r#"{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":null}}"#,
            slicing(Interval::Default),
        );
        check_gpu(
            r#"{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"},"mpsConfig":null}"#,
            slicing(Interval::Long),
        );
        check_gpu(r#"{"strategy":"MPS"}"#, defaults());
        check_gpu(r#"{"strategy":"MPS","mpsConfig":{}}"#, defaults());
        check_mig("null", Ok(None));
        check_mig("{}", Err("field sharing.strategy is missing, expected MPS"));
        check_mig(r#"{"strategy":"MPS"}"#, Ok(Some(MpsSettings::default())));
    }

    #[test]
    fn mps_settings_are_read() {
        let limit = |text: &str| -> Quantity { text.parse().expect("a quantity") };
        check_mps(
            r#"{"defaultActiveThreadPercentage":50,"defaultPinnedDeviceMemoryLimit":"10Gi","multiUser":false,
                "defaultPerDevicePinnedMemoryLimit":{"0":1048576}}"#,
            Ok(MpsSettings {
                active_thread_percentage: Some(50),
                pinned_memory: Some(limit("10Gi")),
                pinned_memory_per_device: [("0".to_owned(), limit("1Mi"))].into(),
                multi_user: Some(false),
            }),
        );
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        let percentage = |found: &str| {
            format!(
                "field sharing.mpsConfig.defaultActiveThreadPercentage is {found}, expected a whole number from 1 to 100"
            )
        };
        for bad in ["0", "101", "-1", "50.5", "\"50\"", "true", "{}", "[]"] {
            let found = match bad {
                "{}" => "an object",
                "[]" => "a list",
                bad => bad,
            };
            check_mps(&format!(r#"{{"defaultActiveThreadPercentage":{bad}}}"#), Err(&percentage(found)));
        }
        for bad in ["\"1023Ki\"", "\"-1Gi\"", "\"much\"", "0", "1.5", "true"] {
            let refused = format!(
                "field sharing.mpsConfig.defaultPinnedDeviceMemoryLimit is {bad}, expected a quantity of memory of at least 1Mi, such as 512Mi or 10Gi"
            );
            check_mps(&format!(r#"{{"defaultPinnedDeviceMemoryLimit":{bad}}}"#), Err(&refused));
        }
        let keyed = |key: &str| {
            format!(
                r#"{{"strategy":"MPS","mpsConfig":{{"defaultPerDevicePinnedMemoryLimit":{{{key:?}:"1Gi"}}}}}}"#
            )
        };
        for key in ["", "00", "-1", "1", "gpu-0", "GPU-", "GPU-a b", "MIG-1"] {
            let refused = format!(
                "field sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit has the key {key:?}, expected 0, since a request has one device where it has an MPS control daemon, or the UUID of a GPU"
            );
            check_gpu(&keyed(key), Err(&refused));
        }
        let refused = r#"field sharing.mpsConfig.defaultPerDevicePinnedMemoryLimit has the key "GPU-1", expected 0, since a request has one device where it has an MPS control daemon; the UUID of a MIG instance is not known before it is made"#;
        check_mig(&keyed("GPU-1"), Err(refused));
        assert!(
            DeviceConfig::from_value(&serde_json::json!({
                "apiVersion": CONFIG_API_VERSION, "kind": "GpuConfig",
                "sharing": serde_json::from_str::<Value>(&keyed("GPU-8d6b-1")).expect("JSON"),
            }))
            .is_ok()
        );
        check_gpu(
            r#"{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"long"}}"#,
            Err(
                r#"field sharing.timeSlicingConfig.interval is "long", expected Default, Short, Medium or Long"#,
            ),
        );
    }

    #[test]
    fn a_strategy_takes_its_own_config_only() {
        check_gpu(
            r#"{"strategy":"TimeSlicing","mpsConfig":{}}"#,
            Err("field sharing.mpsConfig does not go with strategy TimeSlicing; remove one of them"),
        );
        check_gpu(
            r#"{"strategy":"MPS","timeSlicingConfig":{}}"#,
            Err("field sharing.timeSlicingConfig does not go with strategy MPS; remove one of them"),
        );
        let on_mig = "field sharing.strategy is TimeSlicing, which does nothing on a MIG instance; use MPS, or a GpuConfig for a whole GPU";
        check_mig(r#"{"strategy":"TimeSlicing"}"#, Err(on_mig));
        check_mig(r#"{"strategy":"TimeSlicing","timeSlicingConfig":{"interval":"Long"}}"#, Err(on_mig));
    }

    #[test]
    fn refusals_name_the_field() {
        check("7", Err("configuration is not a JSON object"));
        check("{}", Err("field kind is missing, expected GpuConfig, MigDeviceConfig or ShareConfig"));
        check(
            r#"{"kind":1}"#,
            Err(r#"field kind is "1", expected GpuConfig, MigDeviceConfig or ShareConfig"#),
        );
        let missing = r#"field apiVersion is missing, expected "resource.divvy.dev/v1alpha1""#;
        check(r#"{"kind":"GpuConfig"}"#, Err(missing));
        check(
            r#"{"apiVersion":"v1","kind":"GpuConfig"}"#,
            Err(r#"field apiVersion is "v1", expected "resource.divvy.dev/v1alpha1""#),
        );
        check(
            &format!(r#"{{{API},"kind":"Gpu"}}"#),
            Err(r#"field kind is "Gpu", expected GpuConfig, MigDeviceConfig or ShareConfig"#),
        );
        check(
            &format!(r#"{{{API},"kind":"GpuConfig","cores":{{}}}}"#),
            Err("field cores is unknown to GpuConfig"),
        );
        check_gpu("7", Err("field sharing is 7, expected an object GpuSharing"));
        check_gpu(
            r#"{"strategy":"MPS","mpsconfig":{}}"#,
            Err("field sharing.mpsconfig is unknown to GpuSharing; did you mean mpsConfig?"),
        );
        check(
            &format!(r#"{{{API},"kind":"GpuConfig","kind":"GpuConfig"}}"#),
            Err("field kind is given twice"),
        );
        check(r#"{"a":[0,{"b":1,"c":2,"b":3}]}"#, Err("field a[1].b is given twice"));
    }

    #[test]
    fn broken_text_is_refused_and_not_followed_into_the_deep() {
        let deep = "[".repeat(100_000);
        for text in ["", "{", "{} {}", "nul", deep.as_str()] {
            let found = DeviceConfig::parse(text);
            assert!(matches!(found, Err(ConfigError::NotJson { .. })), "{found:?}");
        }
    }

    #[test]
    fn the_last_that_fits_holds_and_nothing_is_merged() {
        let gpu = |interval| DeviceConfig::GpuConfig { sharing: Some(Sharing::TimeSlicing(interval)) };
        let mig = || DeviceConfig::MigDeviceConfig { sharing: Some(MpsSettings::default()) };
        let check = |configs: &[(DeviceConfig, bool)], mode, expected: Result<Option<Sharing>, &str>| {
            let configs: Vec<_> = configs
                .iter()
                .map(|(config, addressed)| AppliedConfig {
                    config: config.clone(),
                    source: if *addressed { Source::Request } else { Source::Class },
                })
                .collect();
            let found = effective(&configs, mode).map_err(|misfit| misfit.to_string());
            assert_eq!(found, expected.map_err(str::to_owned), "{configs:?}");
        };
        let slicing = |interval| Ok(Some(Sharing::TimeSlicing(interval)));
        let nothing = DeviceConfig::GpuConfig { sharing: None };
        check(&[], Mode::Whole, Ok(None));
        check(
            &[(gpu(Interval::Short), false), (gpu(Interval::Long), false)],
            Mode::Whole,
            slicing(Interval::Long),
        );
        check(&[(gpu(Interval::Short), true), (nothing, false)], Mode::Whole, Ok(None));
        check(&[(gpu(Interval::Short), false), (mig(), false)], Mode::Whole, slicing(Interval::Short));
        check(
            &[(gpu(Interval::Short), false), (mig(), false)],
            Mode::Mig,
            Ok(Some(Sharing::Mps(MpsSettings::default()))),
        );
        check(&[(gpu(Interval::Short), false), (mig(), false)], Mode::Timeslice, Ok(None));
        check(
            &[(gpu(Interval::Short), false), (mig(), true)],
            Mode::Whole,
            Err("MigDeviceConfig is for MIG instances, and the device is a whole GPU; use GpuConfig"),
        );
        check(
            &[(gpu(Interval::Short), true)],
            Mode::Mps,
            Err(
                "GpuConfig is for whole GPUs, and the device is a share of MPS; its limits are the claim's capacities, so remove the configuration",
            ),
        );
        check(&[(mig(), true), (gpu(Interval::Long), false)], Mode::Whole, slicing(Interval::Long));
    }

    fn check_share(fields: &str, expected: Result<ShareConfig, &str>) {
        let text = format!(r#"{{{API},"kind":"ShareConfig"{fields}}}"#);
        check(&text, expected.map(DeviceConfig::ShareConfig));
    }

    #[test]
    fn share_settings_are_read_and_what_is_not_kept_yet_is_refused() {
        let share =
            ShareConfig { injection: Some(Injection::Shim), observe_only: Some(true), ..Default::default() };
        check_share("", Ok(ShareConfig::default()));
        check_share(r#","injection":null,"ceiling":null"#, Ok(ShareConfig::default()));
        check_share(r#","injection":"shim","observeOnly":true"#, Ok(share));
        check_share(r#","injection":"none""#, Err(r#"field injection is "none", expected preload or shim"#));
        check_share(r#","ceiling":0"#, Err("field ceiling is 0, expected a whole number from 1 to 100"));
        check_share(r#","memory":"1Gi""#, Err("field memory is unknown to ShareConfig"));
        let later = |field: &str| {
            format!("field {field} is about compute time, which shares do not limit yet; remove it")
        };
        check_share(r#","ceiling":50"#, Err(&later("ceiling")));
        check_share(r#","weight":1"#, Err(&later("weight")));
        check_share(r#","priority":"High""#, Err(&later("priority")));
    }

    #[test]
    fn a_tenant_may_only_tighten_itself() {
        let class = |ceiling| {
            let weight = Some(7);
            (
                ShareConfig { injection: Some(Injection::Shim), weight, ceiling, ..Default::default() },
                Source::Class,
            )
        };
        let claim = |ceiling| (ShareConfig { ceiling: Some(ceiling), ..Default::default() }, Source::Claim);
        let check = |configs: &[(ShareConfig, Source)], expected: Result<(Injection, u32, u32), &str>| {
            let applied = |(config, source): &(ShareConfig, Source)| AppliedConfig {
                config: DeviceConfig::ShareConfig(config.clone()),
                source: *source,
            };
            let configs: Vec<_> = configs.iter().map(applied).collect();
            let found = share_settings(&configs).map(|found| (found.injection, found.weight, found.ceiling));
            assert_eq!(
                found.map_err(|misfit| misfit.to_string()),
                expected.map_err(str::to_owned),
                "{configs:?}"
            );
        };
        use Injection::{Preload, Shim};
        check(&[], Ok((Preload, 100, 100)));
        check(&[claim(40)], Ok((Preload, 100, 40)));
        check(&[class(None), claim(100)], Ok((Shim, 7, 100)));
        check(&[class(Some(60)), claim(40)], Ok((Shim, 7, 40)));
        check(&[class(Some(60))], Ok((Shim, 7, 60)));
        check(&[class(Some(60)), (ShareConfig::default(), Source::Class), claim(70)], Ok((Preload, 100, 70)));
        check(&[class(Some(60)), claim(70), claim(50)], Ok((Shim, 7, 50)));
        let more = "field ceiling of ShareConfig is 70, and its DeviceClass allows 60; ask for no more";
        check(&[class(Some(60)), claim(70)], Err(more));
        let only = |field: &str| {
            format!(
                "field {field} of ShareConfig is for a DeviceClass to say, and this one is of a claim; remove it"
            )
        };
        let observe = ShareConfig { observe_only: Some(false), ..Default::default() };
        check(&[class(None), (observe, Source::Request), claim(1)], Err(&only("observeOnly")));
        check(&[(class(None).0, Source::Claim)], Err(&only("injection")));
    }

    #[test]
    fn a_configuration_for_another_kind_does_not_fit_a_share() {
        let gpu = |source| AppliedConfig { config: DeviceConfig::GpuConfig { sharing: None }, source };
        assert_eq!(share_settings(&[gpu(Source::Class), gpu(Source::Claim)]), Ok(ShareSettings::default()));
        let misfit = share_settings(&[gpu(Source::Request)]).map_err(|misfit| misfit.to_string());
        let expected = "GpuConfig is for whole GPUs, and the device is a share; remove the configuration";
        assert_eq!(misfit, Err(expected.to_owned()));
        let share = AppliedConfig {
            config: DeviceConfig::ShareConfig(ShareConfig::default()),
            source: Source::Request,
        };
        let misfit = effective(&[share], Mode::Mig).map_err(|misfit| misfit.to_string());
        let expected = "ShareConfig is for shares, and the device is a MIG instance; use MigDeviceConfig";
        assert_eq!(misfit, Err(expected.to_owned()));
    }

    /// Documents around the tables: known names mostly, any values.
    fn document() -> impl Strategy<Value = Value> {
        let key = prop_oneof![
            Just("sharing"),
            Just("strategy"),
            Just("timeSlicingConfig"),
            Just("interval"),
            Just("mpsConfig"),
            Just("defaultActiveThreadPercentage"),
            Just("defaultPinnedDeviceMemoryLimit"),
            Just("defaultPerDevicePinnedMemoryLimit"),
            Just("multiUser"),
            Just("0"),
            Just("x"),
        ];
        let scalar = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            Just(Value::from(0.5)),
            Just("MPS".into()),
            Just("TimeSlicing".into()),
            Just("Long".into()),
            Just("1Gi".into()),
            ".{0,4}".prop_map(Value::from),
        ];
        scalar.prop_recursive(5, 40, 4, move |inner| {
            prop_oneof![
                3 => prop::collection::btree_map(key.clone().prop_map(str::to_owned), inner.clone(), 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
                1 => prop::collection::vec(inner, 0..3).prop_map(Value::Array),
            ]
        })
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".*", json in r#"[{}\[\]",:a0 ]{0,40}"#) {
            let _ = DeviceConfig::parse(&text);
            let _ = DeviceConfig::parse(&json);
        }

        #[test]
        fn text_and_value_are_read_alike(sharing in document(), gpu in any::<bool>()) {
            let kind = if gpu { "GpuConfig" } else { "MigDeviceConfig" };
            let value = serde_json::json!({"apiVersion": CONFIG_API_VERSION, "kind": kind, "sharing": sharing});
            prop_assert_eq!(DeviceConfig::parse(&value.to_string()), DeviceConfig::from_value(&value));
        }
    }
}
