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
    let mut found = Vec::new();
    for (index, document) in serde_norway::Deserializer::from_str(text).enumerate() {
        let value = schema::read(Shape::Any, document).map_err(|unread| match unread.cause.location() {
            Some(place) if unread.fault.is_some() => format!("line {}: {unread}", place.line()),
            _ => format!("not YAML: {unread}"),
        })?;
        unpack(value, Some(index), &mut found);
    }
    Ok(found)
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
