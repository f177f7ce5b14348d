//! From text to a [`DeviceConfig`].
//!
//! The tables of [`super::documents`] say what a document may hold; what one field
//! says of another is said here.

use super::documents::{KINDS, MIG_DEVICE_CONFIG, MPS, SHARE_CONFIG, TIME_SLICING};
use super::{ConfigError, DeviceConfig, ShareConfig, Tide};
use crate::quantity::Quantity;
use crate::schema::{self, Clock, Fault, Shape, Unread};
use crate::sharing::{Injection, Interval, MpsSettings, Priority, Sharing};
use serde::Deserializer;
use serde_json::Value;
use std::collections::BTreeMap;

impl DeviceConfig {
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
            return share_config(&value).map(Self::ShareConfig);
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

fn share_config(config: &Value) -> Result<ShareConfig, ConfigError> {
    let schedule = config["schedule"].as_array().into_iter().flatten().enumerate();
    Ok(ShareConfig {
        injection: config["injection"].as_str().and_then(Injection::from_name),
        observe_only: config["observeOnly"].as_bool(),
        priority: priority(config),
        weight: count(config, "weight"),
        ceiling: count(config, "ceiling"),
        overcommit: count(config, "overcommit"),
        encoders: count(config, "encoders"),
        decoders: count(config, "decoders"),
        schedule: schedule.filter(|(_, tide)| !tide.is_null()).map(tide).collect::<Result<_, _>>()?,
    })
}

fn tide((index, tide): (usize, &Value)) -> Result<Tide, ConfigError> {
    let clock = |field: &str| tide[field].as_str().and_then(Clock::parse).unwrap_or_default();
    let (from, to) = (clock("from"), clock("to"));
    if from == to {
        let (field, found) = (format!("schedule[{index}].to"), tide["to"].to_string());
        let expected = "another time than from; for all day, say it outside the schedule".to_owned();
        return Err(Fault::Wrong { field, found, expected }.into());
    }
    let (priority, weight, ceiling) = (priority(tide), count(tide, "weight"), count(tide, "ceiling"));
    Ok(Tide { from, to, priority, weight, ceiling })
}

fn count(object: &Value, field: &str) -> Option<u32> {
    object[field].as_u64().and_then(|count| u32::try_from(count).ok())
}

fn priority(object: &Value) -> Option<Priority> {
    object["priority"].as_str().and_then(Priority::from_name)
}

/// The index of a request's only device, or a GPU's UUID as NVML writes it. Which
/// GPU a claim gets is the scheduler's business: a limit for another one rests.
fn is_device_key(key: &str, mig: bool) -> bool {
    let uuid = |rest: &str| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    key == "0" || (!mig && key.strip_prefix("GPU-").is_some_and(uuid))
}
