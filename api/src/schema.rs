//! Strict parsing of configuration documents by tables of their fields. The reference documentation
//! uses the same tables, so both know the same fields.
//!
//! An ignored setting is worse than an error: unknown fields, duplicate fields and values of
//! another shape are errors that name the path of the field. `null` counts as absent, as for the
//! API server. The parser works on any `Deserializer`, so one for YAML can add the line to the
//! error.

use crate::quantity::Quantity;
use serde::Deserializer;
use serde::de::{self, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// An object and its fields.
#[derive(Debug)]
pub struct Object {
    /// The name in messages: `GpuConfig`.
    pub name: &'static str,
    pub about: &'static str,
    pub fields: &'static [Field],
}

/// A field of an object.
#[derive(Debug)]
pub struct Field {
    pub name: &'static str,
    pub shape: Shape,
    pub required: bool,
    /// The default, in words.
    pub absent: &'static str,
    pub about: &'static str,
}

/// The allowed values of a field.
#[derive(Clone, Copy, Debug)]
pub enum Shape {
    /// Anything. Duplicate keys in it are errors too.
    Any,
    /// A text that is not empty.
    Text,
    /// The value of a label: a text, which may be empty. YAML reads `true` or `1` as other types,
    /// so the message suggests quotes.
    Label,
    /// Exactly this text.
    Literally(&'static str),
    /// One of these texts.
    OneOf(&'static [&'static str]),
    /// A whole number in this inclusive range.
    Count(u32, u32),
    Flag,
    /// A time of day, `22:30`.
    Clock,
    /// A Kubernetes quantity of at least 1Mi.
    Memory,
    Object(&'static Object),
    List(&'static Shape),
    /// An object with arbitrary keys.
    Map(&'static Shape),
}

/// Why a document is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    #[error("field {field} is given twice")]
    Twice { field: String },
    #[error("field {field} is unknown to {object}{}", did_you_mean(*near))]
    Unknown { field: String, object: &'static str, near: Option<&'static str> },
    #[error("field {field} is missing, expected {expected}")]
    Missing { field: String, expected: String },
    #[error("field {field} is {found}, expected {expected}")]
    Wrong { field: String, found: String, expected: String },
}

fn did_you_mean(near: Option<&str>) -> String {
    near.map(|near| format!("; did you mean {near}?")).unwrap_or_default()
}

/// A failed read: a fault of the document, or a syntax error. `cause` has the position in the text
/// in both cases.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadError<E> {
    pub fault: Option<FieldError>,
    pub cause: E,
}

impl<E: fmt::Display> fmt::Display for ReadError<E> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.fault {
            Some(fault) => fault.fmt(out),
            None => self.cause.fmt(out),
        }
    }
}

/// Reads a document of that shape.
///
/// # Errors
/// The text is not valid for its format, or the document is not valid for the shape.
pub fn read<'de, D: Deserializer<'de>>(shape: Shape, document: D) -> Result<Value, ReadError<D::Error>> {
    let mut fault = None;
    let reader = Reader { shape, path: String::new(), fault: &mut fault };
    let document = reader.deserialize(document).map_err(|cause| ReadError { fault, cause })?;
    // Inside a document, null counts as absent.
    if document.is_null() && !matches!(shape, Shape::Any) {
        let fault = FieldError::Wrong {
            field: WHOLE_DOCUMENT.to_owned(),
            found: described(&document),
            expected: shape.expected(),
        };
        return Err(ReadError { cause: de::Error::custom(&fault), fault: Some(fault) });
    }
    Ok(document)
}

/// All faults of a value, in the order of its keys. [`read`] stops at the first one.
pub fn faults(shape: Shape, value: &Value) -> Vec<FieldError> {
    let mut found = Vec::new();
    collect(shape, value, "", &mut found);
    found
}

fn collect(shape: Shape, value: &Value, path: &str, found: &mut Vec<FieldError>) {
    match (shape, value) {
        (Shape::Object(object), Value::Object(map)) => {
            for (key, value) in map {
                let field = within(path, key);
                match object.fields.iter().find(|field| field.name == key) {
                    Some(known) => collect(known.shape, value, &field, found),
                    None => {
                        let near = nearest(key, object);
                        found.push(FieldError::Unknown { field, object: object.name, near });
                    }
                }
            }
            let absent = |field: &&Field| field.required && map.get(field.name).is_none_or(Value::is_null);
            let missing = object.fields.iter().filter(absent);
            found.extend(missing.map(|field| FieldError::Missing {
                field: within(path, field.name),
                expected: field.shape.expected(),
            }));
        }
        (Shape::Map(of), Value::Object(map)) => {
            map.iter().for_each(|(key, value)| collect(*of, value, &within(path, key), found));
        }
        (Shape::List(of), Value::Array(items)) => {
            for (index, item) in items.iter().enumerate() {
                collect(*of, item, &format!("{path}[{index}]"), found);
            }
        }
        _ if shape.accepts(value) => {}
        _ => {
            let field = if path.is_empty() { WHOLE_DOCUMENT.to_owned() } else { path.to_owned() };
            found.push(FieldError::Wrong { field, found: described(value), expected: shape.expected() });
        }
    }
}

/// The path of the document itself.
const WHOLE_DOCUMENT: &str = "(all)";

impl Shape {
    /// The shape in words, for errors and the reference documentation.
    pub fn expected(self) -> String {
        match self {
            Self::Any => "anything".to_owned(),
            Self::Text => "a text".to_owned(),
            Self::Label => "a text; write it in quotes".to_owned(),
            Self::Literally(text) => format!("{text:?}"),
            Self::OneOf(texts) => match texts {
                [rest @ .., last] if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
                texts => texts.concat(),
            },
            Self::Count(least, u32::MAX) => format!("a whole number from {least}"),
            Self::Count(least, most) => format!("a whole number from {least} to {most}"),
            Self::Flag => "true or false".to_owned(),
            Self::Clock => "a time of day in UTC from 00:00 to 23:59, in quotes".to_owned(),
            Self::Memory => "a quantity of memory of at least 1Mi, such as 512Mi or 10Gi".to_owned(),
            Self::Object(object) => format!("an object {}", object.name),
            Self::List(item) => format!("a list, each item {}", item.expected()),
            Self::Map(value) => format!("an object, each value {}", value.expected()),
        }
    }

    fn accepts(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Any, _)
            | (_, Value::Null)
            | (Self::Flag, Value::Bool(_))
            | (Self::Label, Value::String(_))
            | (Self::Object(_) | Self::Map(_), Value::Object(_))
            | (Self::List(_), Value::Array(_)) => true,
            (Self::Text, Value::String(text)) => !text.is_empty(),
            (Self::Clock, Value::String(text)) => Clock::parse(text).is_some(),
            (Self::Literally(only), Value::String(text)) => text == only,
            (Self::OneOf(texts), Value::String(text)) => texts.contains(&text.as_str()),
            (Self::Count(least, most), Value::Number(_)) => {
                value.as_u64().is_some_and(|count| (u64::from(least)..=u64::from(most)).contains(&count))
            }
            (Self::Memory, _) => memory(value).is_some(),
            _ => false,
        }
    }
}

/// A time of day: minutes since midnight UTC, below 1,440.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Clock(u16);

impl Clock {
    /// Two digits each, `05:30`.
    pub fn parse(text: &str) -> Option<Self> {
        let (hours, minutes) = text.split_once(':')?;
        let two = |digits: &str| {
            let is_two = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_digit());
            is_two.then(|| digits.parse::<u16>().ok()).flatten()
        };
        let (hours, minutes) =
            (two(hours).filter(|hours| *hours < 24)?, two(minutes).filter(|minutes| *minutes < 60)?);
        Some(Self(hours * 60 + minutes))
    }

    /// The time of day of a Unix time in seconds.
    pub fn at(unix_seconds: u64) -> Self {
        Self((unix_seconds % 86_400 / 60) as u16)
    }

    /// Whether the time is in `from..to`, which wraps over midnight if `to` is earlier.
    pub fn is_within(self, from: Self, to: Self) -> bool {
        if from <= to { (from..to).contains(&self) } else { self >= from || self < to }
    }
}

/// A quantity of memory of at least 1Mi. Kubernetes also accepts a bare number.
pub fn memory(value: &Value) -> Option<Quantity> {
    let amount = match value {
        Value::String(text) => text.parse().ok()?,
        Value::Number(_) => Quantity::bytes(value.as_u64()?),
        _ => return None,
    };
    (amount >= Quantity::bytes(1 << 20) && amount.as_bytes().is_some()).then_some(amount)
}

/// A value in words, for errors.
fn described(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Null => "null".to_owned(),
        Value::String(text) => format!("{text:?}"),
        scalar => scalar.to_string(),
    }
}

/// Builds a `Value` of a shape and records the fault, if any.
struct Reader<'a> {
    shape: Shape,
    path: String,
    fault: &'a mut Option<FieldError>,
}

impl Reader<'_> {
    fn refuse<E: de::Error>(self, fault: FieldError) -> E {
        refuse(self.fault, fault)
    }

    fn accept<E: de::Error>(self, value: Value) -> Result<Value, E> {
        match self.shape.accepts(&value) {
            true => Ok(value),
            false => {
                let (found, expected) = (described(&value), self.shape.expected());
                let field = if self.path.is_empty() { WHOLE_DOCUMENT.to_owned() } else { self.path.clone() };
                Err(self.refuse(FieldError::Wrong { field, found, expected }))
            }
        }
    }
}

fn refuse<E: de::Error>(place: &mut Option<FieldError>, fault: FieldError) -> E {
    let error = E::custom(&fault);
    *place = Some(fault);
    error
}

fn within(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

impl<'de> DeserializeSeed<'de> for Reader<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, document: D) -> Result<Value, D::Error> {
        document.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reader<'_> {
    type Value = Value;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.shape.expected())
    }

    fn visit_unit<E: de::Error>(self) -> Result<Value, E> {
        self.accept(Value::Null)
    }

    /// An empty YAML document.
    fn visit_none<E: de::Error>(self) -> Result<Value, E> {
        self.accept(Value::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<Value, E> {
        self.accept(value.into())
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Value, E> {
        self.accept(value.into())
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<Value, E> {
        self.accept(value.into())
    }

    fn visit_f64<E: de::Error>(self, value: f64) -> Result<Value, E> {
        self.accept(value.into())
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Value, E> {
        self.accept(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let shape = match self.shape {
            Shape::List(item) => *item,
            Shape::Any => Shape::Any,
            _ => return self.accept(Value::Array(Vec::new())),
        };
        let mut list = Vec::new();
        loop {
            let path = format!("{}[{}]", self.path, list.len());
            let reader = Reader { shape, path: path.clone(), fault: &mut *self.fault };
            match items.next_element_seed(reader)? {
                Some(Value::Null) if !matches!(shape, Shape::Any) => {
                    let fault = FieldError::Wrong {
                        field: path,
                        found: "null".to_owned(),
                        expected: shape.expected(),
                    };
                    return Err(self.refuse(fault));
                }
                Some(item) => list.push(item),
                None => return Ok(Value::Array(list)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        if !matches!(self.shape, Shape::Object(_) | Shape::Map(_) | Shape::Any) {
            return self.accept(Value::Object(Map::new()));
        }
        let mut map = Map::new();
        loop {
            let key = Key { shape: self.shape, path: &self.path, seen: &map, fault: &mut *self.fault };
            let Some((key, shape)) = entries.next_key_seed(key)? else { break };
            let reader = Reader { shape, path: within(&self.path, &key), fault: &mut *self.fault };
            let value = entries.next_value_seed(reader)?;
            map.insert(key, value);
        }
        let fields = match self.shape {
            Shape::Object(object) => object.fields,
            _ => &[],
        };
        let absent = |field: &&Field| field.required && map.get(field.name).is_none_or(Value::is_null);
        match fields.iter().find(absent) {
            None => Ok(Value::Object(map)),
            Some(field) => {
                let (path, expected) = (within(&self.path, field.name), field.shape.expected());
                Err(self.refuse(FieldError::Missing { field: path, expected }))
            }
        }
    }
}

/// Reads a key and returns the shape of its value, so that a bad key is reported at its position.
struct Key<'a> {
    shape: Shape,
    path: &'a str,
    seen: &'a Map<String, Value>,
    fault: &'a mut Option<FieldError>,
}

impl<'de> DeserializeSeed<'de> for Key<'_> {
    type Value = (String, Shape);
    fn deserialize<D: Deserializer<'de>>(self, key: D) -> Result<(String, Shape), D::Error> {
        key.deserialize_str(self)
    }
}

impl Visitor<'_> for Key<'_> {
    type Value = (String, Shape);

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("the name of a field")
    }

    fn visit_str<E: de::Error>(self, key: &str) -> Result<(String, Shape), E> {
        let field = within(self.path, key);
        if self.seen.contains_key(key) {
            return Err(refuse(self.fault, FieldError::Twice { field }));
        }
        let shape = match self.shape {
            Shape::Object(object) => match object.fields.iter().find(|field| field.name == key) {
                Some(field) => field.shape,
                None => {
                    let near = nearest(key, object);
                    return Err(refuse(self.fault, FieldError::Unknown { field, object: object.name, near }));
                }
            },
            Shape::Map(value) => *value,
            _ => Shape::Any,
        };
        Ok((key.to_owned(), shape))
    }
}

/// The field that was probably meant.
fn nearest(key: &str, object: &Object) -> Option<&'static str> {
    let key = key.to_ascii_lowercase();
    let alike = |field: &&Field| strsim::jaro_winkler(&key, &field.name.to_ascii_lowercase());
    let best = object.fields.iter().max_by(|a, b| alike(a).total_cmp(&alike(b)))?;
    (alike(&best) > 0.8).then_some(best.name)
}
