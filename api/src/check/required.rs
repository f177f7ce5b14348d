//! Rules of the API server for claims, which it reports one at a time, and only when a manifest is
//! applied. Sources: Kubernetes `pkg/apis/resource/validation` and `apimachinery/pkg/util/validation`.

use super::published::{attributes_of, nearest};
use super::types::Finding;
use crate::names::DRIVER;
use k8s_openapi::api::resource::v1::DeviceClaim;
use serde_json::Value;
use std::collections::BTreeSet;

const ALLOCATION_MODES: [&str; 2] = ["ExactCount", "All"];

/// The name of an object.
pub(super) fn name(object: &Value) -> Option<Finding> {
    let metadata = &object["metadata"];
    let given = |field: &str| metadata[field].as_str().is_some_and(|name| !name.is_empty());
    if !given("name") && !given("generateName") {
        return Some(Finding::error("metadata.name", "the object has no name; add metadata.name"));
    }
    let name = metadata["name"].as_str().unwrap_or("a");
    let part = |part: &str| is_label(part, usize::MAX);
    (!(name.len() <= 253 && name.split('.').all(part)))
        .then(|| Finding::error("metadata.name", format!("{name:?} is not a valid name; {LETTERS}")))
}

const LETTERS: &str = "use lowercase letters, digits and -";

/// Whether a text is a DNS label.
fn is_label(text: &str, max: usize) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=max).contains(&text.len())
        && text.bytes().all(plain)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

/// The devices of a claim at `path`.
pub(super) fn devices(claim: Option<&DeviceClaim>, path: &str) -> Vec<Finding> {
    let requests = claim.and_then(|claim| claim.requests.as_deref()).unwrap_or_default();
    let Some(claim) = claim.filter(|_| !requests.is_empty()) else {
        let message = "the claim requests no device; add a request with a deviceClassName";
        return vec![Finding::warning(format!("{path}.requests"), message)];
    };
    let mut findings = Vec::new();
    let mut names = BTreeSet::new();
    for (index, request) in requests.iter().enumerate() {
        let path = format!("{path}.requests[{index}]");
        findings.extend(label(&request.name, &format!("{path}.name"), "request"));
        if !names.insert(request.name.as_str()) && !request.name.is_empty() {
            let message = format!("two requests have the name {}; rename one of them", request.name);
            findings.push(Finding::error(format!("{path}.name"), message));
        }
        let alternatives = request.first_available.as_deref().unwrap_or_default();
        match (&request.exactly, alternatives.is_empty()) {
            (None, true) => {
                let message = format!(
                    "request {} has neither exactly nor firstAvailable; add exactly with a deviceClassName",
                    request.name
                );
                findings.push(Finding::error(&path, message));
            }
            (Some(_), false) => {
                let message =
                    format!("request {} has exactly and firstAvailable; remove one of them", request.name);
                findings.push(Finding::error(&path, message));
            }
            _ => {}
        }
        if let Some(one) = &request.exactly {
            let path = format!("{path}.exactly");
            findings.extend(count(one.allocation_mode.as_deref(), one.count, &path));
            findings.extend(class(&one.device_class_name, &path));
        }
        for (index, one) in alternatives.iter().enumerate() {
            let path = format!("{path}.firstAvailable[{index}]");
            findings.extend(label(&one.name, &format!("{path}.name"), "alternative"));
            findings.extend(count(one.allocation_mode.as_deref(), one.count, &path));
            findings.extend(class(&one.device_class_name, &path));
        }
    }
    for (index, constraint) in claim.constraints.iter().flatten().enumerate() {
        let path = format!("{path}.constraints[{index}]");
        let known = || requests.iter().map(|request| request.name.as_str());
        for name in constraint.requests.iter().flatten() {
            let base = name.split('/').next().unwrap_or(name);
            if !known().any(|known| known == base) {
                let remedy = match nearest(base, known()) {
                    Some(near) => format!("did you mean {near}?"),
                    None => "name one of its requests".to_owned(),
                };
                let message = format!("the claim has no request {name}; {remedy}");
                findings.push(Finding::error(format!("{path}.requests"), message));
            }
        }
        let attributes = [
            ("matchAttribute", &constraint.match_attribute),
            ("distinctAttribute", &constraint.distinct_attribute),
        ];
        if attributes.iter().all(|(_, attribute)| attribute.is_none()) {
            let message =
                format!("the constraint names no attribute; add matchAttribute: {DRIVER}/parentUUID");
            findings.push(Finding::error(&path, message));
        }
        for (field, attribute) in attributes {
            let Some(attribute) = attribute else { continue };
            findings.extend(constraint_attribute(attribute, format!("{path}.{field}")));
        }
    }
    findings
}

fn constraint_attribute(attribute: &str, path: String) -> Option<Finding> {
    let Some((domain, name)) = attribute.split_once('/') else {
        let message = format!("{attribute} has no domain; write {DRIVER}/{attribute}");
        return Some(Finding::error(path, message));
    };
    let table = attributes_of(domain)?;
    if table.iter().any(|one| one.name == name) {
        return None;
    }
    let remedy = match nearest(name, table.iter().map(|one| one.name)) {
        Some(near) => format!("did you mean {domain}/{near}?"),
        None => "use an attribute that devices publish, such as uuid".to_owned(),
    };
    Some(Finding::error(path, format!("no device has the attribute {attribute}; {remedy}")))
}

fn label(name: &str, path: &str, of: &str) -> Option<Finding> {
    match name {
        "" => Some(Finding::error(path, format!("the {of} has no name; add name: gpu"))),
        name if is_label(name, 63) => None,
        name => Some(Finding::error(path, format!("{name:?} is not a valid name; {LETTERS}"))),
    }
}

fn class(name: &str, path: &str) -> Option<Finding> {
    name.is_empty().then(|| {
        let message = "the request names no DeviceClass; add deviceClassName, such as share.divvy.dev";
        Finding::error(format!("{path}.deviceClassName"), message)
    })
}

fn count(mode: Option<&str>, count: Option<i64>, path: &str) -> Option<Finding> {
    let mode = mode.unwrap_or("ExactCount");
    if !ALLOCATION_MODES.contains(&mode) {
        let near = nearest(mode, ALLOCATION_MODES).unwrap_or("ExactCount");
        let message = format!("allocationMode is {mode:?}, expected ExactCount or All; did you mean {near}?");
        return Some(Finding::error(format!("{path}.allocationMode"), message));
    }
    match count {
        Some(count) if mode == "All" => {
            let message =
                format!("count is {count}, but allocationMode All takes all devices; remove one of them");
            Some(Finding::error(format!("{path}.count"), message))
        }
        Some(count) if count < 1 => {
            let message = format!("count is {count}, expected at least 1; correct it");
            Some(Finding::error(format!("{path}.count"), message))
        }
        _ => None,
    }
}
