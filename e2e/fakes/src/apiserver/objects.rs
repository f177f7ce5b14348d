//! The effect of each verb on the store: generated names and UIDs, version checks, the status
//! subresource, and finalizers.

use super::gates::Gates;
use super::kinds::Kind;
use super::rules;
use super::status::Failure;
use super::store::{Key, Store, key};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The target of a write.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) kind: &'static Kind,
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// The subresource `status`.
    pub(crate) status: bool,
    pub(crate) dry_run: bool,
}

impl Target {
    fn key(&self) -> Key {
        key(self.kind, &self.namespace, &self.name)
    }

    fn missing(&self) -> Failure {
        Failure::not_found(self.kind.plural, &self.name)
    }
}

/// Preconditions of a deletion.
#[derive(Clone, Debug, Default)]
pub(crate) struct Preconditions {
    pub(crate) uid: Option<String>,
    pub(crate) version: Option<String>,
}

pub(crate) fn create(
    store: &mut Store,
    gates: &Gates,
    mut target: Target,
    object: Value,
) -> Result<Arc<Value>, Failure> {
    let mut object = decode(target.kind, object)?;
    let meta = metadata(&mut object);
    if target.name.is_empty() {
        target.name = match (
            meta.get("name").and_then(Value::as_str),
            meta.get("generateName").and_then(Value::as_str),
        ) {
            (Some(name), _) if !name.is_empty() => name.to_owned(),
            // The real server truncates a long prefix, so that the name has at most 63 bytes.
            (_, Some(prefix)) => format!("{}{}", &prefix[..prefix.floor_char_boundary(58)], suffix()),
            _ => return Err(Failure::invalid(target.kind.kind, "", &["metadata.name: required".to_owned()])),
        };
    }
    if store.get(&target.key()).is_some() {
        let message = format!("{} {:?} already exists", target.kind.plural, target.name);
        return Err(Failure::new(409, "AlreadyExists", message));
    }
    let now = now();
    meta.insert("name".into(), target.name.clone().into());
    if target.kind.namespaced {
        meta.insert("namespace".into(), target.namespace.clone().into());
    }
    meta.insert("uid".into(), uuid::Uuid::new_v4().to_string().into());
    meta.insert("creationTimestamp".into(), now.clone().into());
    meta.insert("generation".into(), 1.into());
    meta.remove("resourceVersion");
    // A new claim is unallocated, a new pod is unscheduled: their status is dropped.
    if target.kind.has_status && matches!(target.kind.plural, "resourceclaims" | "pods") {
        object["status"] = json!({});
    }
    rules::admit(target.kind, gates, &mut object, None, &now)?;
    if target.dry_run { Ok(Arc::new(object)) } else { Ok(store.put(target.key(), object)) }
}

pub(crate) fn update(
    store: &mut Store,
    gates: &Gates,
    target: &Target,
    object: Value,
) -> Result<Arc<Value>, Failure> {
    let stored = store.get(&target.key()).cloned().ok_or_else(|| target.missing())?;
    let mut object = decode(target.kind, object)?;
    let conflict = |why| Failure::conflict(target.kind.plural, &target.name, why);
    let (sent, held) = (&object["metadata"], &stored["metadata"]);
    if sent["name"].as_str().is_some_and(|name| name != target.name) {
        return Err(Failure::bad_request("the name of the object does not match the name on the URL"));
    }
    if !sent["resourceVersion"].is_null()
        && sent["resourceVersion"] != ""
        && sent["resourceVersion"] != held["resourceVersion"]
    {
        return Err(conflict(
            "the object has been modified; please apply your changes to the latest version",
        ));
    }
    if !sent["uid"].is_null() && sent["uid"] != "" && sent["uid"] != held["uid"] {
        return Err(conflict("the UID in the precondition does not match the UID in record"));
    }
    for field in [
        "name",
        "namespace",
        "uid",
        "creationTimestamp",
        "generation",
        "resourceVersion",
        "deletionTimestamp",
    ] {
        set(metadata(&mut object), field, &held[field]);
    }
    // Spec and status can each only be written through their own endpoint.
    if target.kind.has_status {
        if target.status {
            let status = object["status"].take();
            object = (*stored).clone();
            object["status"] = status;
        } else {
            let status = stored["status"].clone();
            match (status, object.as_object_mut()) {
                (Value::Null, Some(map)) => drop(map.remove("status")),
                (status, _) => object["status"] = status,
            }
        }
    }
    rules::admit(target.kind, gates, &mut object, Some(&stored), &now())?;
    if object == *stored {
        return Ok(stored);
    }
    if object["spec"] != stored["spec"] {
        let generation = held["generation"].as_i64().unwrap_or(0) + 1;
        metadata(&mut object).insert("generation".into(), generation.into());
    }
    if target.dry_run {
        return Ok(Arc::new(object));
    }
    let leaving = !object["metadata"]["deletionTimestamp"].is_null() && !held_back(&object);
    let updated = store.put(target.key(), object);
    if leaving {
        store.remove(&target.key());
    }
    Ok(updated)
}

/// Applies a merge patch. With `create_missing` (server-side apply) the object may be new, except
/// for its status alone.
pub(crate) fn patch(
    store: &mut Store,
    gates: &Gates,
    target: &Target,
    patch: Value,
    create_missing: bool,
) -> Result<Arc<Value>, Failure> {
    let Some(stored) = store.get(&target.key()) else {
        return match create_missing && !target.status {
            true => create(store, gates, target.clone(), patch),
            false => Err(target.missing()),
        };
    };
    let mut merged = (**stored).clone();
    let version = patch["metadata"]["resourceVersion"].clone();
    merge(&mut merged, patch);
    set(metadata(&mut merged), "resourceVersion", &version);
    update(store, gates, target, merged)
}

pub(crate) fn delete(
    store: &mut Store,
    target: &Target,
    only: &Preconditions,
) -> Result<Arc<Value>, Failure> {
    let stored = store.get(&target.key()).cloned().ok_or_else(|| target.missing())?;
    let differs = |wanted: &Option<String>, field: &str| {
        wanted.as_deref().is_some_and(|wanted| stored["metadata"][field] != wanted)
    };
    if differs(&only.uid, "uid") || differs(&only.version, "resourceVersion") {
        return Err(Failure::conflict(target.kind.plural, &target.name, "a precondition failed"));
    }
    if target.dry_run {
        return Ok(stored);
    }
    if held_back(&stored) {
        let mut leaving = (*stored).clone();
        if leaving["metadata"]["deletionTimestamp"].is_null() {
            metadata(&mut leaving).insert("deletionTimestamp".into(), now().into());
            return Ok(store.put(target.key(), leaving));
        }
        return Ok(stored);
    }
    store.remove(&target.key()).ok_or_else(|| target.missing())
}

fn decode(kind: &Kind, object: Value) -> Result<Value, Failure> {
    (kind.decode)(object)
        .map_err(|error| Failure::bad_request(format!("{} cannot be handled: {error}", kind.kind)))
}

fn metadata(object: &mut Value) -> &mut Map<String, Value> {
    if !object["metadata"].is_object() {
        object["metadata"] = json!({});
    }
    match &mut object["metadata"] {
        Value::Object(map) => map,
        _ => unreachable!("made an object above"),
    }
}

fn set(map: &mut Map<String, Value>, field: &str, value: &Value) {
    match value {
        Value::Null => drop(map.remove(field)),
        value => drop(map.insert(field.to_owned(), value.clone())),
    }
}

fn held_back(object: &Value) -> bool {
    object["metadata"]["finalizers"].as_array().is_some_and(|list| !list.is_empty())
}

/// RFC 7386.
fn merge(into: &mut Value, patch: Value) {
    let Value::Object(patch) = patch else {
        *into = patch;
        return;
    };
    if !into.is_object() {
        *into = json!({});
    }
    let Value::Object(map) = into else { return };
    for (field, value) in patch {
        match value {
            Value::Null => drop(map.remove(&field)),
            value => merge(map.entry(field).or_insert(Value::Null), value),
        }
    }
}

/// Five random characters, like those that the real server appends to a `generateName`.
fn suffix() -> String {
    const ALPHABET: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
    uuid::Uuid::new_v4().as_bytes()[..5]
        .iter()
        .map(|b| char::from(ALPHABET[usize::from(*b) % ALPHABET.len()]))
        .collect()
}

/// The current time with a precision of seconds, as in Kubernetes.
pub(crate) fn now() -> String {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}
