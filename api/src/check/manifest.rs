//! Checks of an object in a file: fields and API versions first, then the rules for its kind.
//!
//! A mistake is repaired with what was probably meant before the rules run, so that it has one
//! finding. Where the meaning is unknown, findings about the same request or container are dropped.

use super::types::{ClusterView, Finding};
use super::{fields, required};
use crate::check::{object, published::nearest};
use k8s_openapi::api::{apps, batch, core, resource};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde_json::{Map, Value, json};

/// Checks an object of a manifest. `None` for kinds that have no claims and no pods.
pub fn manifest(object: &Value, view: &dyn ClusterView) -> Option<Vec<Finding>> {
    let text = |field: &str| object[field].as_str().unwrap_or_default();
    let (version, kind) = (text("apiVersion"), text("kind"));
    let (known, mut findings) = match known_kind(version, kind) {
        Some(known) => known,
        None => return templates_only(object, view),
    };
    let mut object = object.clone();
    object["kind"] = known.kind.into();
    object["apiVersion"] = known.version.into();
    if known.version == RESOURCE_VERSION
        && let Some(finding) = with_v1_requests(&mut object, version)
    {
        findings.push(finding);
    }
    let (unrepaired, mut problems) = checked_fields(known, &mut object);
    findings.append(&mut problems);
    let mut rules = rules(&object, known, view);
    rules.retain(|finding| !unrepaired.iter().any(|about| finding.path.starts_with(about.as_str())));
    rules.iter_mut().for_each(|finding| complete(&mut finding.instead, &object));
    findings.append(&mut rules);
    Some(findings)
}

const RESOURCE_VERSION: &str = "resource.k8s.io/v1";

/// A kind that is checked.
struct Kind {
    version: &'static str,
    kind: &'static str,
    fields: fn(&Value) -> fields::Checked,
}

const KINDS: &[Kind] = &[
    Kind {
        version: RESOURCE_VERSION,
        kind: "ResourceClaim",
        fields: fields::check::<resource::v1::ResourceClaim>,
    },
    Kind {
        version: RESOURCE_VERSION,
        kind: "ResourceClaimTemplate",
        fields: fields::check::<resource::v1::ResourceClaimTemplate>,
    },
    Kind {
        version: RESOURCE_VERSION,
        kind: "DeviceClass",
        fields: fields::check::<resource::v1::DeviceClass>,
    },
    Kind { version: "v1", kind: "Pod", fields: fields::check::<core::v1::Pod> },
    Kind { version: "v1", kind: "PodTemplate", fields: fields::check::<core::v1::PodTemplate> },
    Kind {
        version: "v1",
        kind: "ReplicationController",
        fields: fields::check::<core::v1::ReplicationController>,
    },
    Kind { version: "apps/v1", kind: "Deployment", fields: fields::check::<apps::v1::Deployment> },
    Kind { version: "apps/v1", kind: "StatefulSet", fields: fields::check::<apps::v1::StatefulSet> },
    Kind { version: "apps/v1", kind: "DaemonSet", fields: fields::check::<apps::v1::DaemonSet> },
    Kind { version: "apps/v1", kind: "ReplicaSet", fields: fields::check::<apps::v1::ReplicaSet> },
    Kind { version: "batch/v1", kind: "Job", fields: fields::check::<batch::v1::Job> },
    Kind { version: "batch/v1", kind: "CronJob", fields: fields::check::<batch::v1::CronJob> },
];

/// The kind that an object has or means, with a finding if its header is wrong.
fn known_kind(version: &str, kind: &str) -> Option<(&'static Kind, Vec<Finding>)> {
    let group = version.rsplit_once('/').map_or("", |(group, _)| group);
    let group_of = |known: &Kind| known.version.rsplit_once('/').map_or("", |(group, _)| group);
    if let Some(known) = KINDS.iter().find(|known| known.kind == kind) {
        if known.version == version {
            return Some((known, Vec::new()));
        }
        let right = known.version;
        let message = match version {
            "" => format!("the object has no apiVersion; add apiVersion: {right}"),
            // Reported together with its old form.
            _ if group == "resource.k8s.io" => return Some((known, Vec::new())),
            // Other groups have kinds of these names.
            _ if group.contains('.') && group != group_of(known) => return None,
            _ => format!("kind {kind} has no apiVersion {version}; write apiVersion: {right}"),
        };
        return Some((known, vec![Finding::error("apiVersion", message)]));
    }
    if version.is_empty() && kind.is_empty() {
        return None;
    }
    // Kinds of the same group only: other names are other objects.
    let of_group = || KINDS.iter().filter(|known| group_of(known) == group && !group.is_empty());
    if kind == "ResourceSlice" {
        return None;
    }
    let near = match version {
        "v1" => (kind.eq_ignore_ascii_case("pod") || kind == "Pods").then_some("Pod"),
        _ if group == "resource.k8s.io" => nearest(kind, of_group().map(|known| known.kind)),
        _ => {
            let same = |known: &&Kind| known.kind.eq_ignore_ascii_case(kind.trim_end_matches('s'));
            of_group().find(same).map(|known| known.kind)
        }
    }?;
    let known = KINDS.iter().find(|known| known.kind == near)?;
    let message = format!("there is no kind {kind} in {version}; did you mean {near}?");
    Some((known, vec![Finding::error("kind", message)]))
}

/// Repairs the fields of an object. Returns the paths whose meaning is unknown, and the findings.
fn checked_fields(known: &Kind, object: &mut Value) -> (Vec<String>, Vec<Finding>) {
    // A renamed field may hide further problems.
    const ROUNDS_MAX: usize = 4;
    let (mut unrepaired, mut findings) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS_MAX {
        let checked = (known.fields)(object);
        if checked.findings.is_empty() {
            break;
        }
        unrepaired.extend(checked.removed.iter().map(|path| about(path).to_owned()));
        findings.extend(checked.findings);
        *object = checked.repaired;
    }
    (unrepaired, findings)
}

/// Turns the devices of a claim into the whole object.
fn complete(instead: &mut [Value], object: &Value) {
    let path: &[&str] = match object["kind"].as_str() {
        Some("ResourceClaim") => &["spec"],
        Some("ResourceClaimTemplate") => &["spec", "spec"],
        _ => return,
    };
    for part in instead.iter_mut().filter(|part| part["kind"].is_null()) {
        let mut whole = object.clone();
        if let Some(fields) = whole.as_object_mut() {
            fields.remove("status");
        }
        let above = path.iter().fold(&mut whole, |value, field| &mut value[*field]);
        above["devices"] = part["devices"].take();
        *part = whole;
    }
}

/// The request or container of a path, or the path itself.
fn about(path: &str) -> &str {
    let mut end = path.len();
    while let Some(start) = path[..end].rfind('[') {
        let close = path[start..].find(']').map_or(path.len(), |close| start + close);
        if path[start + 1..close].bytes().all(|byte| byte.is_ascii_digit()) {
            return &path[..path.len().min(close + 1)];
        }
        end = start;
    }
    path
}

/// The rules for the kind of a repaired object.
fn rules(object: &Value, known: &Kind, view: &dyn ClusterView) -> Vec<Finding> {
    let mut findings: Vec<_> = required::name(object).into_iter().collect();
    let claim = |path: &[&str]| {
        let devices = path.iter().fold(object, |value, field| &value[*field]);
        serde_json::from_value(devices.clone()).ok()
    };
    match known.kind {
        "ResourceClaim" => {
            findings.extend(required::devices(claim(&["spec", "devices"]).as_ref(), "spec.devices"));
        }
        "ResourceClaimTemplate" => {
            let devices = claim(&["spec", "spec", "devices"]);
            findings.extend(required::devices(devices.as_ref(), "spec.spec.devices"));
        }
        "DeviceClass" | "Pod" => {}
        _ => {
            findings.extend(of_templates(object, view, false));
            return findings;
        }
    }
    match self::object(object.to_string().as_bytes(), view) {
        Ok(found) => findings.extend(found),
        // The fields were checked, so this is a value that no rule knows.
        Err(cause) if findings.is_empty() => findings.push(Finding::error("", cause)),
        Err(_) => {}
    }
    findings
}

/// Checks an object of an unknown kind, if it contains pod templates.
fn templates_only(object: &Value, view: &dyn ClusterView) -> Option<Vec<Finding>> {
    let is_object = object["apiVersion"].is_string() && object["kind"].is_string();
    let mut found = Vec::new();
    find_templates(&object["spec"], "spec", 0, &mut found);
    (is_object && !found.is_empty()).then(|| of_templates(object, view, true))
}

/// Deeper objects are no workloads.
const DEPTH_MAX: usize = 8;

/// Finds objects that have a pod's spec, with their paths.
fn find_templates<'a>(value: &'a Value, path: &str, depth: usize, found: &mut Vec<(String, &'a Value)>) {
    if depth > DEPTH_MAX {
        return;
    }
    if value["spec"]["containers"].is_array() {
        found.push((path.to_owned(), value));
        return;
    }
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                find_templates(value, &format!("{path}.{key}"), depth + 1, found);
            }
        }
        Value::Array(items) => {
            for (index, value) in items.iter().enumerate() {
                find_templates(value, &format!("{path}[{index}]"), depth + 1, found);
            }
        }
        _ => {}
    }
}

/// Checks the pod templates of a workload. Those of known kinds have had their fields checked.
fn of_templates(object: &Value, view: &dyn ClusterView, with_fields: bool) -> Vec<Finding> {
    let mut found = Vec::new();
    find_templates(&object["spec"], "spec", 0, &mut found);
    find_templates(&object["template"], "template", 0, &mut found);
    let mut findings = Vec::new();
    for (path, template) in found {
        let mut template = template.clone();
        let mut add = |mut all: Vec<Finding>| {
            all.iter_mut().for_each(|finding| {
                let separator = if finding.path.is_empty() { "" } else { "." };
                finding.path.insert_str(0, &format!("{path}{separator}"));
            });
            findings.append(&mut all);
        };
        if with_fields {
            let checked = fields::check::<core::v1::PodTemplateSpec>(&template);
            add(checked.findings);
            template = checked.repaired;
        }
        let metadata = serde_json::from_value::<ObjectMeta>(template["metadata"].clone()).unwrap_or_default();
        let pod = json!({
            "apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
            "metadata": {
                "name": object["metadata"]["name"], "namespace": object["metadata"]["namespace"],
                "annotations": metadata.annotations, "labels": metadata.labels,
            },
        });
        match self::object(pod.to_string().as_bytes(), view) {
            Ok(all) => add(all),
            Err(cause) => add(vec![Finding::error("", cause)]),
        }
    }
    findings
}

/// Fields that `resource.k8s.io/v1beta1` has in a request, and v1 has in `exactly`.
const EXACTLY: [&str; 7] =
    ["deviceClassName", "selectors", "allocationMode", "count", "adminAccess", "tolerations", "capacity"];

/// Converts requests of v1beta1 to v1, and reports an old version or an old form.
fn with_v1_requests(object: &mut Value, version: &str) -> Option<Finding> {
    let devices = match object["kind"].as_str() {
        Some("ResourceClaim") => object.pointer_mut("/spec/devices"),
        Some("ResourceClaimTemplate") => object.pointer_mut("/spec/spec/devices"),
        _ => None,
    };
    let mut old_form = false;
    let requests = devices.and_then(|devices| devices.get_mut("requests")?.as_array_mut());
    for request in requests.into_iter().flatten() {
        let Some(fields) = request.as_object_mut() else { continue };
        if fields.contains_key("exactly") || !EXACTLY.iter().any(|field| fields.contains_key(*field)) {
            continue;
        }
        old_form = true;
        let moved = EXACTLY.into_iter().filter_map(|field| Some((field.to_owned(), fields.remove(field)?)));
        let exactly: Map<String, Value> = moved.collect();
        fields.insert("exactly".to_owned(), exactly.into());
    }
    let message = match (version == RESOURCE_VERSION || version.is_empty(), old_form) {
        (true, false) => return None,
        (true, true) => "these fields of a request are of v1beta1; in v1 they are under exactly".to_owned(),
        (false, _) => format!("apiVersion {version} is not supported; use {RESOURCE_VERSION}"),
    };
    let mut instead = object.clone();
    if let Some(fields) = instead.as_object_mut() {
        fields.remove("status");
    }
    let instead = if object["spec"].is_null() { Vec::new() } else { vec![instead] };
    Some(Finding::error("", message).with(instead))
}
