//! YAML and JSON files with several documents, as kubectl reads and writes them.

use anyhow::{Context, Result};
use divvy_api::schema::{self, Shape};
use serde_json::Value;
use std::path::Path;

/// A document and its position.
pub(crate) struct Document {
    pub(crate) value: Value,
    /// Index in the file, with which a reader can find the line numbers. `None` for items of a list.
    pub(crate) index: Option<usize>,
}

/// Reads a file; `-` is standard input.
pub(crate) fn text(file: &Path) -> Result<String> {
    match file.as_os_str() == "-" {
        true => std::io::read_to_string(std::io::stdin()).context("cannot read standard input"),
        false => std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display())),
    }
}

/// The documents of a text. Items of a list become documents.
///
/// # Errors
/// The text is not YAML, or a key occurs twice, which the API server also rejects.
pub(crate) fn documents(text: &str) -> Result<Vec<Document>, String> {
    let (found, mut faults) = all_documents(text);
    match faults.is_empty() {
        true => Ok(found),
        false => Err(faults.remove(0)),
    }
}

/// The documents of a text that can be read, and the faults of the others.
pub(crate) fn all_documents(text: &str) -> (Vec<Document>, Vec<String>) {
    let (mut found, mut faults) = (Vec::new(), Vec::new());
    for (index, document) in serde_norway::Deserializer::from_str(text).enumerate() {
        match schema::read(Shape::Any, document) {
            Ok(value) => unpack(value, Some(index), &mut found),
            Err(unread) => match unread.cause.location() {
                Some(place) if unread.fault.is_some() => {
                    faults.push(format!("line {}: {unread}", place.line()));
                }
                // The reader loses its place at a syntax error.
                _ => {
                    faults.push(format!("not YAML: {unread}"));
                    break;
                }
            },
        }
    }
    (found, faults)
}

/// Objects as YAML documents, as kubectl reads them.
///
/// # Errors
/// An object cannot be written.
pub(crate) fn yaml(objects: &[Value]) -> Result<String> {
    let texts = objects.iter().map(|object| serde_norway::to_string(&ordered(object)));
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("---\n"))
}

/// The object with the fields that identify it first, as people write it.
fn ordered(value: &Value) -> serde_norway::Value {
    const FIRST: [&str; 5] = ["apiVersion", "kind", "metadata", "name", "image"];
    let rank = |key: &str| FIRST.iter().position(|first| *first == key).unwrap_or(FIRST.len());
    match value {
        Value::Object(fields) => {
            let mut fields: Vec<_> = fields.iter().collect();
            fields.sort_by_key(|(key, _)| rank(key));
            let fields = fields.into_iter().map(|(key, value)| (key.as_str().into(), ordered(value)));
            serde_norway::Value::Mapping(fields.collect())
        }
        Value::Array(items) => serde_norway::Value::Sequence(items.iter().map(ordered).collect()),
        Value::Null => serde_norway::Value::Null,
        Value::Bool(value) => (*value).into(),
        Value::String(text) => text.as_str().into(),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => number.into(),
            (_, Some(number)) => number.into(),
            _ => number.as_f64().unwrap_or_default().into(),
        },
    }
}

/// The YAML texts in the `data` of a ConfigMap, by key; empty for other objects.
pub(crate) fn config_map(object: &Value) -> Vec<(String, String)> {
    let data = if object["kind"] == "ConfigMap" { object["data"].as_object() } else { None };
    let text = |(key, value): (&String, &Value)| Some((key.clone(), value.as_str()?.to_owned()));
    data.into_iter().flatten().filter_map(text).collect()
}

fn unpack(value: Value, index: Option<usize>, found: &mut Vec<Document>) {
    let kind = value["kind"].as_str().unwrap_or_default();
    match (kind.strip_suffix("List"), &value["items"]) {
        (Some(of), Value::Array(items)) => {
            for item in items {
                let mut item = item.clone();
                if let (true, Some(object)) = (item["kind"].is_null() && !of.is_empty(), item.as_object_mut())
                {
                    object.insert("kind".to_owned(), of.into());
                    object.insert("apiVersion".to_owned(), value["apiVersion"].clone());
                }
                unpack(item, None, found);
            }
        }
        _ if value.is_null() => {}
        _ => found.push(Document { value, index }),
    }
}
