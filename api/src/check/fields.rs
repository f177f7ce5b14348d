//! Unknown fields and values of another type in Kubernetes objects.
//!
//! The types of `k8s-openapi` tell their deserializer the names of their fields. [`Typed`] compares
//! them with the object, records each problem, and continues with what was probably meant. The
//! repaired object has the remaining problems only, so no mistake is reported twice.

use super::published::nearest;
use super::types::Finding;
use super::units;
use serde::de::value::StrDeserializer;
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor,
};
use serde_json::Value;
use std::cell::RefCell;

/// A step from an object to a value in it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Key(String),
    /// The key of a map, such as the name of a capacity.
    Entry(String),
    Index(usize),
}

/// The repair of a problem: the most likely meaning.
#[derive(Clone, Debug)]
enum Repair {
    Rename(&'static str),
    /// The field belongs into an object below its place.
    MoveInto(&'static [&'static str]),
    Remove,
    Replace(Value),
}

#[derive(Default)]
struct Log {
    findings: Vec<Finding>,
    repairs: Vec<(Vec<Step>, Repair)>,
}

/// Fields that are often written one level too high: type, field, and the objects between.
const MISPLACED: &[(&str, &[&str], &[&str])] = &[
    ("Container", &["claims", "limits", "requests"], &["resources"]),
    ("Container", &["privileged", "runAsUser", "capabilities"], &["securityContext"]),
    ("ResourceClaimSpec", &["requests", "constraints", "config"], &["devices"]),
    ("ResourceClaimTemplateSpec", &["devices"], &["spec"]),
    ("ExactDeviceRequest", &["memory", "cores", "slots", "threads", "clients"], &["capacity", "requests"]),
    ("ExactDeviceRequest", &["requests"], &["capacity"]),
    ("CapacityRequirements", &["memory", "cores", "slots", "threads", "clients"], &["requests"]),
    ("DeviceSelector", &["expression"], &["cel"]),
    (
        "DeviceRequest",
        &[
            "deviceClassName",
            "selectors",
            "allocationMode",
            "count",
            "adminAccess",
            "tolerations",
            "capacity",
        ],
        &["exactly"],
    ),
    ("DeviceClaimConfiguration", &["driver", "parameters"], &["opaque"]),
    ("DeviceClassConfiguration", &["driver", "parameters"], &["opaque"]),
    ("Pod", &["containers", "resourceClaims", "restartPolicy", "volumes"], &["spec"]),
];

/// The findings of the fields of an object.
pub(super) struct Checked {
    pub(super) findings: Vec<Finding>,
    /// The object with what was probably meant.
    pub(super) repaired: Value,
    /// Paths of values that were removed, because their meaning is unknown.
    pub(super) removed: Vec<String>,
}

/// Checks the fields of an object of a type.
pub(super) fn check<T: DeserializeOwned>(object: &Value) -> Checked {
    let log = RefCell::new(Log::default());
    let read = T::deserialize(Typed { value: object, path: Vec::new(), log: &log });
    let mut log = log.into_inner();
    if let Err(Unread(cause)) = read
        && log.findings.is_empty()
    {
        log.findings.push(Finding::error("", format!("{cause}; correct the value")));
    }
    let mut repaired = object.clone();
    let mut removed = Vec::new();
    // Later problems first: a removal moves the items behind it.
    for (path, repair) in log.repairs.into_iter().rev() {
        if matches!(repair, Repair::Remove) {
            removed.push(shown(&path));
        }
        apply(&mut repaired, &path, repair);
    }
    Checked { findings: log.findings, repaired, removed }
}

fn apply(object: &mut Value, path: &[Step], repair: Repair) {
    let Some((last, above)) = path.split_last() else { return };
    let mut place = object;
    for step in above {
        let next = match step {
            Step::Key(key) | Step::Entry(key) => place.get_mut(key),
            Step::Index(index) => place.get_mut(index),
        };
        match next {
            Some(next) => place = next,
            None => return,
        }
    }
    match (place, last) {
        (Value::Object(fields), Step::Key(key) | Step::Entry(key)) => {
            let Some(value) = fields.remove(key) else { return };
            match repair {
                Repair::Remove => {}
                Repair::Rename(name) => drop(fields.insert(name.to_owned(), value)),
                Repair::Replace(value) => drop(fields.insert(key.clone(), value)),
                Repair::MoveInto(below) => {
                    let mut place = fields;
                    for name in below {
                        let next = place
                            .entry((*name).to_owned())
                            .or_insert_with(|| Value::Object(Default::default()));
                        let Value::Object(next) = next else { return };
                        place = next;
                    }
                    place.entry(key.clone()).or_insert(value);
                }
            }
        }
        (Value::Array(items), Step::Index(index)) if *index < items.len() => match repair {
            Repair::Replace(value) => items[*index] = value,
            _ => drop(items.remove(*index)),
        },
        _ => {}
    }
}

fn shown(path: &[Step]) -> String {
    let mut text = String::new();
    for step in path {
        match step {
            Step::Index(index) => text.push_str(&format!("[{index}]")),
            Step::Entry(key) => text.push_str(&format!("[{key}]")),
            Step::Key(key) if text.is_empty() => text.push_str(key),
            Step::Key(key) => text.push_str(&format!(".{key}")),
        }
    }
    text
}

/// A value that cannot be read, and the cause.
#[derive(Debug)]
struct Unread(String);

impl std::fmt::Display for Unread {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}
impl std::error::Error for Unread {}
impl de::Error for Unread {
    fn custom<T: std::fmt::Display>(cause: T) -> Self {
        Self(cause.to_string())
    }
}

/// Deserializes a value, and records problems instead of failing.
struct Typed<'a> {
    value: &'a Value,
    path: Vec<Step>,
    log: &'a RefCell<Log>,
}

/// Shortens a value for a message.
fn described(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::String(text) if text.len() > 40 => "a text".to_owned(),
        scalar => scalar.to_string(),
    }
}

impl<'a> Typed<'a> {
    fn below(&self, step: Step, value: &'a Value) -> Self {
        let mut path = self.path.clone();
        path.push(step);
        Self { value, path, log: self.log }
    }

    /// The last field of the path.
    fn key(&self) -> &str {
        let key = self.path.iter().rev().find_map(|step| match step {
            Step::Key(key) | Step::Entry(key) => Some(key.as_str()),
            Step::Index(_) => None,
        });
        key.unwrap_or("the object")
    }

    fn wrong(&self, expected: &str, repair: Repair) {
        self.report(format!("{} is {}, expected {expected}", self.key(), described(self.value)), repair);
    }

    fn report(&self, message: String, repair: Repair) {
        let mut log = self.log.borrow_mut();
        log.findings.push(Finding::error(shown(&self.path), message));
        log.repairs.push((self.path.clone(), repair));
    }

    fn unknown(&self, type_: &str, key: &str, fields: &'static [&'static str], has: &dyn Fn(&str) -> bool) {
        let misplaced = MISPLACED.iter().find(|(of, names, _)| *of == type_ && names.contains(&key));
        let near = nearest(key, fields.iter().copied().filter(|field| !has(field)));
        let near = near.and_then(|near| fields.iter().copied().find(|field| *field == near));
        let (remedy, repair) = match (misplaced, near) {
            (Some((_, _, into)), _) => (format!("put it under {}", into.join(".")), Repair::MoveInto(into)),
            (None, Some(near)) => (format!("did you mean {near}?"), Repair::Rename(near)),
            (None, None) => {
                let known: Vec<_> = fields.iter().copied().filter(|field| !has(field)).collect();
                let remedy = match known.len() {
                    1..=8 => format!("remove it, or use {}", known.join(", ")),
                    _ => "remove it".to_owned(),
                };
                (remedy, Repair::Remove)
            }
        };
        let mut path = self.path.clone();
        path.push(Step::Key(key.to_owned()));
        let mut log = self.log.borrow_mut();
        let message = format!("field {key} is unknown to {type_}; {remedy}");
        log.findings.push(Finding::error(shown(&path), message));
        log.repairs.push((path, repair));
    }
}

/// The entries of an object: `fields` limits them to those of a struct.
struct Entries<'a> {
    of: Typed<'a>,
    rest: Vec<(&'a String, &'a Value)>,
    step: fn(String) -> Step,
    next: Option<(&'a String, &'a Value)>,
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = Unread;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, Unread> {
        self.next = self.rest.pop();
        match self.next {
            None => Ok(None),
            Some((key, _)) => {
                let key: StrDeserializer<'_, Unread> = key.as_str().into_deserializer();
                seed.deserialize(key).map(Some)
            }
        }
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Unread> {
        let Some((key, value)) = self.next.take() else { return Err(Unread("no value".to_owned())) };
        seed.deserialize(self.of.below((self.step)(key.clone()), value))
    }
}

struct Items<'a> {
    of: Typed<'a>,
    items: std::iter::Enumerate<std::slice::Iter<'a, Value>>,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = Unread;

    fn next_element_seed<T: DeserializeSeed<'de>>(&mut self, seed: T) -> Result<Option<T::Value>, Unread> {
        match self.items.next() {
            None => Ok(None),
            Some((index, value)) => seed.deserialize(self.of.below(Step::Index(index), value)).map(Some),
        }
    }
}

/// Methods for numbers in a range.
macro_rules! whole {
    ($($method:ident $visit:ident $type:ty),*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
            let number = self.value.as_i64().and_then(|number| <$type>::try_from(number).ok());
            match number {
                Some(number) => visitor.$visit(number),
                None => {
                    let text = self.value.as_str().and_then(|text| text.trim().parse::<i64>().ok());
                    match text {
                        Some(number) => self.wrong(
                            &format!("a whole number; write {number} without quotes"),
                            Repair::Replace(number.into()),
                        ),
                        None => self.wrong("a whole number; correct it", Repair::Remove),
                    }
                    visitor.$visit(0)
                }
            }
        }
    )*};
}

impl<'de> Deserializer<'de> for Typed<'_> {
    type Error = Unread;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        match self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::String(value) => visitor.visit_str(value),
            Value::Number(number) => match (number.as_i64(), number.as_u64(), number.as_f64()) {
                (Some(number), ..) => visitor.visit_i64(number),
                (_, Some(number), _) => visitor.visit_u64(number),
                (_, _, Some(number)) => visitor.visit_f64(number),
                _ => Err(Unread("a number is out of range".to_owned())),
            },
            Value::Array(_) => self.deserialize_seq(visitor),
            Value::Object(_) => self.deserialize_map(visitor),
        }
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        match self.value {
            Value::Bool(value) => visitor.visit_bool(*value),
            other => {
                let meant = match other.as_str().map(str::to_ascii_lowercase).as_deref() {
                    Some("true" | "yes" | "on") => Some(true),
                    Some("false" | "no" | "off") => Some(false),
                    _ => None,
                };
                match meant {
                    Some(meant) => self.wrong(
                        &format!("true or false; write {meant} without quotes"),
                        Repair::Replace(meant.into()),
                    ),
                    None => self.wrong("true or false; correct it", Repair::Remove),
                }
                visitor.visit_bool(meant.unwrap_or_default())
            }
        }
    }

    whole!(
        deserialize_i8 visit_i8 i8, deserialize_i16 visit_i16 i16, deserialize_i32 visit_i32 i32,
        deserialize_i64 visit_i64 i64, deserialize_u8 visit_u8 u8, deserialize_u16 visit_u16 u16,
        deserialize_u32 visit_u32 u32, deserialize_u64 visit_u64 u64
    );

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        self.deserialize_f64(visitor)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        match self.value.as_f64() {
            Some(number) => visitor.visit_f64(number),
            None => {
                self.wrong("a number; correct it", Repair::Remove);
                visitor.visit_f64(0.0)
            }
        }
    }

    fn deserialize_char<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        self.deserialize_str(visitor)
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        match self.value {
            Value::String(text) => visitor.visit_str(text),
            Value::Number(_) | Value::Bool(_) => {
                let text = self.value.to_string();
                self.wrong(
                    &format!("a text; write \"{text}\" in quotes"),
                    Repair::Replace(text.as_str().into()),
                );
                visitor.visit_str(&text)
            }
            _ => {
                self.wrong("a text; correct it", Repair::Remove);
                visitor.visit_str("")
            }
        }
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        self.deserialize_str(visitor)
    }

    fn deserialize_bytes<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        self.deserialize_str(visitor)
    }

    fn deserialize_byte_buf<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        match self.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_unit<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        visitor.visit_unit()
    }

    fn deserialize_unit_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Unread> {
        visitor.visit_unit()
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Unread> {
        if name == "Quantity" {
            let text = match self.value {
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let is_text = matches!(self.value, Value::String(_) | Value::Number(_));
            match units::misspelt(self.key(), &text) {
                Some(misspelt) if is_text => {
                    let meant = misspelt.meant.map_or(Repair::Remove, |meant| Repair::Replace(meant.into()));
                    self.report(misspelt.message, meant);
                }
                None if is_text => {}
                _ => self.wrong("a quantity such as 10Gi; correct it", Repair::Remove),
            }
            let text: StrDeserializer<'_, Unread> = "0".into_deserializer();
            return visitor.visit_newtype_struct(text);
        }
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        match self.value {
            Value::Array(items) => visitor.visit_seq(Items { of: self, items: items.iter().enumerate() }),
            Value::Object(_) => {
                let one = Value::Array(vec![self.value.clone()]);
                self.wrong("a list; write `- ` before the item", Repair::Replace(one));
                visitor.visit_seq(Items { of: self, items: [].iter().enumerate() })
            }
            _ => {
                self.wrong("a list; correct it", Repair::Remove);
                visitor.visit_seq(Items { of: self, items: [].iter().enumerate() })
            }
        }
    }

    fn deserialize_tuple<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value, Unread> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_tuple_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: usize,
        visitor: V,
    ) -> Result<V::Value, Unread> {
        self.deserialize_seq(visitor)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        let rest = match self.value {
            Value::Object(fields) => fields.iter().rev().collect(),
            _ => {
                self.wrong("an object; correct it", Repair::Remove);
                Vec::new()
            }
        };
        visitor.visit_map(Entries { of: self, rest, step: Step::Entry, next: None })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unread> {
        let Value::Object(entries) = self.value else {
            let is_single =
                self.value.as_array().is_some_and(|items| items.len() == 1 && items[0].is_object());
            match (is_single, self.value.get(0)) {
                (true, Some(item)) => {
                    self.wrong("an object; remove the `- `", Repair::Replace(item.clone()));
                }
                _ => self.wrong("an object; correct it", Repair::Remove),
            }
            return visitor.visit_map(Entries { of: self, rest: Vec::new(), step: Step::Key, next: None });
        };
        let has = |field: &str| entries.contains_key(field);
        for key in entries.keys().filter(|key| !fields.contains(&key.as_str())) {
            self.unknown(name, key, fields, &has);
        }
        let mut rest: Vec<_> = entries.iter().filter(|(key, _)| fields.contains(&key.as_str())).collect();
        rest.reverse();
        visitor.visit_map(Entries { of: self, rest, step: Step::Key, next: None })
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Unread> {
        match self.value.as_str() {
            Some(text) => visitor.visit_enum(text.into_deserializer()),
            None => Err(Unread("the value is not a text".to_owned())),
        }
    }

    fn deserialize_identifier<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        self.deserialize_str(visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Unread> {
        visitor.visit_unit()
    }
}
