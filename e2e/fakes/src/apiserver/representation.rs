//! The forms of an object that a client can ask for with `Accept`: whole, as a table for `kubectl get`,
//! or its metadata only.

use super::kinds::Kind;
use super::status::Failure;
use super::table;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::sync::Arc;

/// The form of the objects of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Representation {
    Whole,
    Table,
    Metadata,
}

impl Representation {
    /// The form that an `Accept` header asks for first. As on the real server, a list has its own
    /// kind, and the kind of one object is not acceptable for it.
    pub(crate) fn requested(accept: &str, is_list: bool) -> Result<Self, Failure> {
        let first = accept.split(',').next().unwrap_or_default();
        let kind = first.split(';').find_map(|parameter| parameter.trim().strip_prefix("as="));
        match (kind, is_list) {
            (None, _) => Ok(Self::Whole),
            (Some("Table"), _) => Ok(Self::Table),
            (Some("PartialObjectMetadata"), false) | (Some("PartialObjectMetadataList"), true) => {
                Ok(Self::Metadata)
            }
            (Some(kind), _) => {
                let message = format!("the server cannot represent this answer as {kind}");
                Err(Failure::new(406, "NotAcceptable", message))
            }
        }
    }

    /// One object in this form.
    pub(crate) fn one<'a>(self, kind: &Kind, object: &'a Arc<Value>) -> Cow<'a, Value> {
        match self {
            Self::Whole => Cow::Borrowed(object),
            Self::Table => Cow::Owned(table::table(kind, std::slice::from_ref(object), "")),
            Self::Metadata => Cow::Owned(metadata(object)),
        }
    }

    /// A list in this form.
    pub(crate) fn list(self, kind: &Kind, items: &[Arc<Value>], list_metadata: Value) -> Value {
        let version = list_metadata["resourceVersion"].as_str().unwrap_or_default();
        let list = |kind: &str, api_version: &str, items: Vec<Cow<'_, Value>>| {
            json!({
                "kind": format!("{kind}List"), "apiVersion": api_version,
                "metadata": list_metadata, "items": items,
            })
        };
        let objects = || items.iter().map(|object| self.one(kind, object)).collect();
        match self {
            Self::Table => table::table(kind, items, version),
            Self::Whole => list(kind.kind, &kind.api_version(), objects()),
            Self::Metadata => list("PartialObjectMetadata", "meta.k8s.io/v1", objects()),
        }
    }
}

/// The object as a `meta.k8s.io/v1` PartialObjectMetadata.
pub(crate) fn metadata(object: &Value) -> Value {
    json!({"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"]})
}
