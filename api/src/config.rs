//! Opaque configuration of claims and DeviceClasses, `resource.divvy.dev/v1alpha1`.
//!
//! Parsed strictly: an unknown kind, an unknown field and a duplicate key are
//! errors that name the field, because a setting that is silently ignored is
//! worse than a refusal. A `serde_json::Value` has already lost duplicate keys,
//! so [`DeviceConfig::parse`] works on the text and is what the driver uses;
//! [`DeviceConfig::from_value`] serves those who only have the value.

use crate::names::CONFIG_API_VERSION;
use crate::sharing::{MpsSettings, Sharing};
use serde::Deserializer;
use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// What a class or a claim may say about its devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceConfig {
    /// For whole GPUs.
    GpuConfig { sharing: Option<Sharing> },
    /// For MIG instances; there is no time slicing inside one.
    MigDeviceConfig { sharing: Option<MpsSettings> },
}

/// Why a configuration is refused; the message names the field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("configuration is not JSON: {cause}")]
    NotJson { cause: String },
    #[error("configuration is not a JSON object")]
    NotAnObject,
    #[error("field {field} is given twice")]
    DuplicateKey { field: String },
    #[error("field {field} is missing or not a text")]
    Missing { field: &'static str },
    #[error("field apiVersion is {found:?}, expected {CONFIG_API_VERSION:?}")]
    ApiVersion { found: String },
    #[error("field kind is {found:?}, expected GpuConfig or MigDeviceConfig")]
    UnknownKind { found: String },
    #[error("field {field} is unknown to {kind}")]
    UnknownField { kind: &'static str, field: String },
}

impl DeviceConfig {
    /// The `kind` under which it is written.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::GpuConfig { .. } => "GpuConfig",
            Self::MigDeviceConfig { .. } => "MigDeviceConfig",
        }
    }

    /// Reads the text of an opaque configuration.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let mut duplicate = None;
        let mut json = serde_json::Deserializer::from_str(text);
        let seed = Unrepeated { path: String::new(), duplicate: &mut duplicate };
        let value = seed.deserialize(&mut json).and_then(|value| json.end().map(|()| value));
        match (value, duplicate) {
            (_, Some(field)) => Err(ConfigError::DuplicateKey { field }),
            (Ok(value), None) => Self::from_value(&value),
            (Err(cause), None) => Err(ConfigError::NotJson { cause: cause.to_string() }),
        }
    }

    /// Reads a configuration whose duplicate keys, if any, are already lost.
    pub fn from_value(value: &Value) -> Result<Self, ConfigError> {
        let object = value.as_object().ok_or(ConfigError::NotAnObject)?;
        let version = text(object, "apiVersion")?;
        if version != CONFIG_API_VERSION {
            return Err(ConfigError::ApiVersion { found: version.to_owned() });
        }
        let config = match text(object, "kind")? {
            "GpuConfig" => Self::GpuConfig { sharing: None },
            "MigDeviceConfig" => Self::MigDeviceConfig { sharing: None },
            found => return Err(ConfigError::UnknownKind { found: found.to_owned() }),
        };
        match object.keys().find(|key| !["apiVersion", "kind"].contains(&key.as_str())) {
            Some(field) => Err(ConfigError::UnknownField { kind: config.kind(), field: field.clone() }),
            None => Ok(config),
        }
    }
}

fn text<'a>(object: &'a Map<String, Value>, field: &'static str) -> Result<&'a str, ConfigError> {
    object.get(field).and_then(Value::as_str).ok_or(ConfigError::Missing { field })
}

/// Builds a `Value` and stops at a key that repeats, whose path it leaves behind.
struct Unrepeated<'a> {
    path: String,
    duplicate: &'a mut Option<String>,
}

impl<'de> DeserializeSeed<'de> for Unrepeated<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Unrepeated<'_> {
    type Value = Value;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        loop {
            let path = format!("{}[{}]", self.path, list.len());
            match items.next_element_seed(Unrepeated { path, duplicate: self.duplicate })? {
                Some(item) => list.push(item),
                None => return Ok(Value::Array(list)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = fields.next_key::<String>()? {
            let path = if self.path.is_empty() { key.clone() } else { format!("{}.{key}", self.path) };
            if map.contains_key(&key) {
                *self.duplicate = Some(path);
                return Err(de::Error::custom("duplicate key"));
            }
            let value = fields.next_value_seed(Unrepeated { path, duplicate: self.duplicate })?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check(text: &str, expected: Result<DeviceConfig, &str>) {
        let found = DeviceConfig::parse(text).map_err(|error| error.to_string());
        assert_eq!(found, expected.map_err(str::to_owned), "{text}");
    }

    const API: &str = r#""apiVersion":"resource.divvy.dev/v1alpha1""#;

    #[test]
    fn known_kinds_are_read() {
        check(&format!(r#"{{{API},"kind":"GpuConfig"}}"#), Ok(DeviceConfig::GpuConfig { sharing: None }));
        check(
            &format!(r#" {{"kind":"MigDeviceConfig",{API}}} "#),
            Ok(DeviceConfig::MigDeviceConfig { sharing: None }),
        );
    }

    #[test]
    fn refusals_name_the_field() {
        check("7", Err("configuration is not a JSON object"));
        check("{}", Err("field apiVersion is missing or not a text"));
        check(&format!("{{{API}}}"), Err("field kind is missing or not a text"));
        check(&format!(r#"{{{API},"kind":1}}"#), Err("field kind is missing or not a text"));
        check(
            r#"{"apiVersion":"v1","kind":"GpuConfig"}"#,
            Err(r#"field apiVersion is "v1", expected "resource.divvy.dev/v1alpha1""#),
        );
        check(
            &format!(r#"{{{API},"kind":"Gpu"}}"#),
            Err(r#"field kind is "Gpu", expected GpuConfig or MigDeviceConfig"#),
        );
        check(
            &format!(r#"{{{API},"kind":"GpuConfig","sharing":{{}}}}"#),
            Err("field sharing is unknown to GpuConfig"),
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

    proptest! {
        #[test]
        fn no_text_panics(text in ".*", json in r#"[{}\[\]",:a0 ]{0,40}"#) {
            let _ = DeviceConfig::parse(&text);
            let _ = DeviceConfig::parse(&json);
        }
    }
}
