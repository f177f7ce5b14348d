//! Parses a [`DeviceConfig`]. The tables of [`super::documents`] define the fields; constraints
//! between fields are checked here.

use super::documents::{KINDS, MIG_DEVICE_CONFIG, MPS, SHARE_CONFIG, TIME_SLICING};
use super::{ConfigError, DeviceConfig, ScheduleEntry, ShareConfig};
use crate::quantity::Quantity;
use crate::schema::{self, Clock, FieldError, ReadError, Shape};
use crate::sharing::{Injection, Interval, MpsSettings, Priority, Sharing};
use serde::Deserializer;
use serde_json::Value;
use std::collections::BTreeMap;

impl DeviceConfig {
    /// Parses the text of an opaque configuration.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let mut json = serde_json::Deserializer::from_str(text);
        let value = untyped(&mut json)?;
        json.end().map_err(|cause| ConfigError::NotJson { cause: cause.to_string() })?;
        Self::from_value(&value)
    }

    /// Reads a value, in which duplicate keys are lost already.
    pub fn from_value(value: &Value) -> Result<Self, ConfigError> {
        let object = value.as_object().ok_or(ConfigError::NotAnObject)?;
        let kind = match object.get("kind") {
            None | Some(Value::Null) => {
                let (field, expected) =
                    ("kind".to_owned(), "GpuConfig, MigDeviceConfig or ShareConfig".to_owned());
                return Err(FieldError::Missing { field, expected }.into());
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

fn refused<E: std::fmt::Display>(unread: ReadError<E>) -> ConfigError {
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
            // A null removes the entry.
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
        messages: config["messages"].as_bool(),
        schedule: schedule.filter(|(_, entry)| !entry.is_null()).map(entry).collect::<Result<_, _>>()?,
    })
}

fn entry((index, entry): (usize, &Value)) -> Result<ScheduleEntry, ConfigError> {
    let clock = |field: &str| entry[field].as_str().and_then(Clock::parse).unwrap_or_default();
    let (from, to) = (clock("from"), clock("to"));
    if from == to {
        let (field, found) = (format!("schedule[{index}].to"), entry["to"].to_string());
        let expected = "a time other than from; set values for the whole day outside the schedule".to_owned();
        return Err(FieldError::Wrong { field, found, expected }.into());
    }
    let (priority, weight, ceiling) = (priority(entry), count(entry, "weight"), count(entry, "ceiling"));
    Ok(ScheduleEntry { from, to, priority, weight, ceiling })
}

fn count(object: &Value, field: &str) -> Option<u32> {
    object[field].as_u64().and_then(|count| u32::try_from(count).ok())
}

fn priority(object: &Value) -> Option<Priority> {
    object["priority"].as_str().and_then(Priority::from_name)
}

/// Whether the key is 0, the index of a request's only device, or the UUID of a GPU. A limit for a
/// GPU that the claim did not get has no effect.
fn is_device_key(key: &str, mig: bool) -> bool {
    let uuid = |rest: &str| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    key == "0" || (!mig && key.strip_prefix("GPU-").is_some_and(uuid))
}
