//! The tables that `kubectl get` requests.

use super::kinds::Kind;
use super::representation;
use serde_json::{Value, json};
use std::sync::Arc;

/// Title and JSON pointer of the columns between NAME and AGE.
fn columns(kind: &Kind) -> &'static [(&'static str, &'static str)] {
    match kind.plural {
        "resourceslices" => {
            &[("Node", "/spec/nodeName"), ("Driver", "/spec/driver"), ("Pool", "/spec/pool/name")]
        }
        "resourceclaims" => &[("State", "")],
        "pods" => &[("Status", "/status/phase"), ("Node", "/spec/nodeName")],
        "events" => &[("Type", "/type"), ("Reason", "/reason"), ("Message", "/message")],
        "namespaces" => &[("Status", "/status/phase")],
        _ => &[],
    }
}

/// The objects as a `meta.k8s.io/v1` Table.
pub(crate) fn table(kind: &Kind, objects: &[Arc<Value>], version: &str) -> Value {
    let definition =
        |name: &str| json!({"name": name, "type": "string", "format": "", "description": "", "priority": 0});
    let mut definitions = vec![definition("Name")];
    definitions.extend(columns(kind).iter().map(|(name, _)| definition(name)));
    definitions.push(definition("Age"));
    definitions[0]["format"] = json!("name");
    let rows: Vec<Value> = objects.iter().map(|object| row(kind, object)).collect();
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": version},
        "columnDefinitions": definitions, "rows": rows,
    })
}

fn row(kind: &Kind, object: &Value) -> Value {
    let mut cells = vec![object["metadata"]["name"].clone()];
    for (_, pointer) in columns(kind) {
        cells.push(match *pointer {
            "" => json!(claim_state(object)),
            pointer => json!(object.pointer(pointer).and_then(Value::as_str).unwrap_or_default()),
        });
    }
    cells.push(json!(age(object)));
    json!({"cells": cells, "object": representation::metadata(object)})
}

fn claim_state(claim: &Value) -> String {
    let mut states = Vec::new();
    if !claim["metadata"]["deletionTimestamp"].is_null() {
        states.push("deleted");
    }
    if claim["status"]["allocation"].is_null() {
        states.push("pending");
    } else {
        states.push("allocated");
        if claim["status"]["reservedFor"].as_array().is_some_and(|users| !users.is_empty()) {
            states.push("reserved");
        }
    }
    states.join(",")
}

fn age(object: &Value) -> String {
    let born = object["metadata"]["creationTimestamp"].as_str().and_then(|text| text.parse().ok());
    let Some(born): Option<jiff::Timestamp> = born else { return "<unknown>".to_owned() };
    match jiff::Timestamp::now().duration_since(born).as_secs() {
        seconds @ ..120 => format!("{}s", seconds.max(0)),
        seconds @ ..7200 => format!("{}m", seconds / 60),
        seconds @ ..172_800 => format!("{}h", seconds / 3600),
        seconds => format!("{}d", seconds / 86400),
    }
}
