//! Processing of objects before they are stored: quantities become canonical, taints get a time,
//! and an invalid ResourceSlice is rejected with 422.
//!
//! The rules are implemented from the API definition, independently of the publisher's validator,
//! so that the two do not share mistakes.

use super::gates::Gates;
use super::kinds::Kind;
use super::status::Failure;
use serde_json::Value;
use std::collections::HashSet;

/// Processes and validates an object before it is stored; `stored` is the object that it replaces.
pub(crate) fn admit(
    kind: &Kind,
    gates: &Gates,
    object: &mut Value,
    stored: Option<&Value>,
    now: &str,
) -> Result<(), Failure> {
    if kind.plural == "resourceslices" {
        gates.drop_fields(object, stored);
        let broken = slice(object, stored);
        if !broken.is_empty() {
            let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
            return Err(Failure::invalid("ResourceSlice.resource.k8s.io", &name, &broken));
        }
        for device in devices_mut(object) {
            for taint in device.get_mut("taints").into_iter().flat_map(items_mut) {
                if taint["timeAdded"].is_null() {
                    taint["timeAdded"] = Value::String(now.to_owned());
                }
            }
        }
    }
    if kind.group == "resource.k8s.io" {
        canonical(object);
    }
    Ok(())
}

/// Makes each quantity canonical, at the keys that contain quantities.
fn canonical(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (key, entry) in map {
                match key.as_str() {
                    "value" | "default" | "min" | "max" | "step" => rewrite(entry),
                    "validValues" => items_mut(entry).for_each(rewrite),
                    "consumedCapacity" | "requests" if entry.is_object() => {
                        entry.as_object_mut().into_iter().flatten().for_each(|(_, amount)| rewrite(amount));
                    }
                    // Opaque to the server.
                    "parameters" | "data" | "annotations" | "labels" | "attributes" => {}
                    _ => canonical(entry),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(canonical),
        _ => {}
    }
}

fn rewrite(value: &mut Value) {
    if let Some(quantity) = value.as_str().and_then(|text| text.parse::<divvy_api::Quantity>().ok()) {
        *value = Value::String(quantity.to_string());
    }
}

fn slice(object: &Value, stored: Option<&Value>) -> Vec<String> {
    let spec = &object["spec"];
    let mut broken = Vec::new();
    let mut rule = |holds: bool, text: &str| {
        if !holds {
            broken.push(text.to_owned());
        }
    };
    if let Some(old) = stored.map(|stored| &stored["spec"]) {
        rule(old["driver"] == spec["driver"], "spec.driver: field is immutable");
        rule(old["nodeName"] == spec["nodeName"], "spec.nodeName: field is immutable");
        rule(old["pool"]["name"] == spec["pool"]["name"], "spec.pool.name: field is immutable");
    }
    let driver = spec["driver"].as_str().unwrap_or_default();
    rule(
        !driver.is_empty() && driver.len() <= 63,
        "spec.driver: must be a DNS subdomain of at most 63 characters",
    );
    rule(spec["pool"]["name"].as_str().is_some_and(|name| !name.is_empty()), "spec.pool.name: required");
    rule(
        spec["pool"]["generation"].as_i64().is_some_and(|n| n >= 0),
        "spec.pool.generation: must not be negative",
    );
    rule(
        spec["pool"]["resourceSliceCount"].as_i64() > Some(0),
        "spec.pool.resourceSliceCount: must be positive",
    );
    let selections = ["nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection"];
    let set = selections.iter().filter(|field| !spec[**field].is_null()).count();
    rule(
        set == 1,
        "spec: exactly one of nodeName, nodeSelector, allNodes, perDeviceNodeSelection is required",
    );
    rule(spec["nodeName"] != "", "spec.nodeName: must not be empty");
    rule(
        spec["devices"].is_null() || spec["sharedCounters"].is_null(),
        "spec: only one of `sharedCounters` or `devices` is allowed",
    );
    rule(items(&spec["sharedCounters"]).count() <= 8, "spec.sharedCounters: must have at most 8 items");
    rule(unique(&spec["sharedCounters"]), "spec.sharedCounters: duplicate name");
    for set in items(&spec["sharedCounters"]) {
        let count = set["counters"].as_object().map_or(0, |counters| counters.len());
        rule((1..=32).contains(&count), "spec.sharedCounters.counters: must have 1 to 32 entries");
        rule(
            label(set["name"].as_str().unwrap_or_default()),
            "spec.sharedCounters.name: must be a DNS label",
        );
    }
    let advanced = |device: &Value| {
        !device["taints"].is_null() || !device["consumesCounters"].is_null() || has_list(device)
    };
    let most = if items(&spec["devices"]).any(advanced) { 64 } else { 128 };
    rule(
        items(&spec["devices"]).count() <= most,
        if most == 64 {
            "spec.devices: must have at most 64 items"
        } else {
            "spec.devices: must have at most 128 items"
        },
    );
    rule(unique(&spec["devices"]), "spec.devices: duplicate name");
    for entry in items(&spec["devices"]) {
        device(entry, &mut rule);
    }
    broken
}

fn device(device: &Value, rule: &mut dyn FnMut(bool, &str)) {
    let entries = |field: &str| device[field].as_object().into_iter().flatten();
    rule(label(device["name"].as_str().unwrap_or_default()), "spec.devices.name: must be a DNS label");
    rule(
        entries("attributes").count() + entries("capacity").count() <= 32,
        "spec.devices: at most 32 attributes and capacities",
    );
    for (_, value) in entries("attributes") {
        rule(
            value.as_object().is_some_and(|kinds| kinds.len() == 1),
            "attributes: exactly one value must be specified",
        );
        rule(
            value["string"].as_str().is_none_or(|text| text.len() <= 64),
            "attributes.string: at most 64 bytes",
        );
        rule(value["version"].as_str().is_none_or(semver), "attributes.version: must be a semantic version");
    }
    for (_, capacity) in entries("capacity") {
        rule(
            capacity["requestPolicy"].is_null() || device["allowMultipleAllocations"] == true,
            "capacity.requestPolicy: forbidden without allowMultipleAllocations",
        );
    }
    rule(items(&device["consumesCounters"]).count() <= 2, "consumesCounters: must have at most 2 items");
    for consumed in items(&device["consumesCounters"]) {
        let count = consumed["counters"].as_object().map_or(0, |counters| counters.len());
        rule((1..=32).contains(&count), "consumesCounters.counters: must have 1 to 32 entries");
    }
    rule(items(&device["taints"]).count() <= 16, "taints: must have at most 16 items");
    for taint in items(&device["taints"]) {
        let effect = taint["effect"].as_str().unwrap_or_default();
        rule(["None", "NoSchedule", "NoExecute"].contains(&effect), "taints.effect: unsupported value");
    }
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// The devices of a slice. (Indexing a mutable value would insert a `null` if there are none.)
pub(crate) fn devices_mut(slice: &mut Value) -> impl Iterator<Item = &mut Value> {
    slice.pointer_mut("/spec/devices").into_iter().flat_map(items_mut)
}

fn items_mut(list: &mut Value) -> impl Iterator<Item = &mut Value> {
    list.as_array_mut().into_iter().flatten()
}

fn unique(list: &Value) -> bool {
    let mut seen = HashSet::new();
    items(list).all(|item| seen.insert(item["name"].as_str()))
}

fn has_list(device: &Value) -> bool {
    device["attributes"].as_object().is_some_and(|attributes| {
        attributes.values().flat_map(|v| v.as_object()).flatten().any(|(_, v)| v.is_array())
    })
}

fn label(name: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=63).contains(&name.len())
        && name.chars().all(inner)
        && !name.starts_with('-')
        && !name.ends_with('-')
}

fn semver(text: &str) -> bool {
    let core = text.split(['-', '+']).next().unwrap_or_default();
    let number = |part: &str| {
        !part.is_empty()
            && part.chars().all(|c| c.is_ascii_digit())
            && (part == "0" || !part.starts_with('0'))
    };
    text.len() <= 64 && core.split('.').count() == 3 && core.split('.').all(number)
}
