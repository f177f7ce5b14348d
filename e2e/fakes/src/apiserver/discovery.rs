//! Discovery: versions, groups, resources, and enough OpenAPI for `kubectl apply` to detect that
//! the server validates fields.

use super::kinds::{KINDS, Kind};
use serde_json::{Map, Value, json};

/// The discovery document at a path, if there is one.
pub(crate) fn document(path: &str, version: &str) -> Option<Value> {
    let segments: Vec<&str> = path.split('/').filter(|segment| !segment.is_empty()).collect();
    match segments.as_slice() {
        ["version"] => Some(version_info(version)),
        ["api"] => Some(json!({
            "kind": "APIVersions", "apiVersion": "v1", "versions": ["v1"],
            "serverAddressByClientCIDRs": [],
        })),
        ["apis"] => Some(json!({
            "kind": "APIGroupList", "apiVersion": "v1",
            "groups": groups().into_iter().map(group).collect::<Vec<_>>(),
        })),
        ["apis", name] => groups().into_iter().find(|known| known.0 == *name).map(group),
        ["api", "v1"] => resources("", "v1"),
        ["apis", group, version] => resources(group, version),
        ["openapi", "v3"] => Some(openapi_index()),
        ["openapi", "v3", "api", "v1"] => Some(openapi("", "v1")),
        ["openapi", "v3", "apis", group, version] => Some(openapi(group, version)),
        _ => None,
    }
}

fn version_info(version: &str) -> Value {
    let mut numbers = version.trim_start_matches('v').split('.');
    json!({
        "major": numbers.next().unwrap_or_default(), "minor": numbers.next().unwrap_or_default(),
        "gitVersion": version, "gitCommit": "", "gitTreeState": "clean", "buildDate": "1970-01-01T00:00:00Z",
        "goVersion": "", "compiler": "", "platform": "linux/amd64",
    })
}

fn groups() -> Vec<(&'static str, &'static str)> {
    let mut groups: Vec<_> =
        KINDS.iter().filter(|kind| !kind.group.is_empty()).map(|kind| (kind.group, kind.version)).collect();
    groups.dedup();
    groups
}

fn group((name, version): (&str, &str)) -> Value {
    let version = json!({"groupVersion": format!("{name}/{version}"), "version": version});
    json!({
        "kind": "APIGroup", "apiVersion": "v1", "name": name,
        "versions": [version], "preferredVersion": version,
    })
}

fn resources(group: &str, version: &str) -> Option<Value> {
    let mut list = Vec::new();
    for kind in served(group, version) {
        list.push(json!({
            "name": kind.plural, "singularName": kind.singular, "namespaced": kind.namespaced,
            "kind": kind.kind, "shortNames": kind.short_names,
            "verbs": ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"],
        }));
        if kind.has_status {
            list.push(json!({
                "name": format!("{}/status", kind.plural), "singularName": "", "namespaced": kind.namespaced,
                "kind": kind.kind, "verbs": ["get", "patch", "update"],
            }));
        }
    }
    let group_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    (!list.is_empty()).then(|| {
        json!({
            "kind": "APIResourceList", "apiVersion": "v1",
            "groupVersion": group_version, "resources": list,
        })
    })
}

fn served<'a>(group: &'a str, version: &'a str) -> impl Iterator<Item = &'static Kind> + 'a {
    KINDS.iter().filter(move |kind| kind.group == group && kind.version == version)
}

fn openapi_index() -> Value {
    let mut paths = Map::new();
    paths.insert("api/v1".into(), json!({"serverRelativeURL": "/openapi/v3/api/v1"}));
    for (name, version) in groups() {
        let path = format!("apis/{name}/{version}");
        let url = format!("/openapi/v3/{path}");
        paths.insert(path, json!({"serverRelativeURL": url}));
    }
    json!({"paths": paths})
}

/// One PATCH operation per kind, with the `fieldValidation` parameter that `kubectl` looks for.
fn openapi(group: &str, version: &str) -> Value {
    let mut paths = Map::new();
    for kind in served(group, version) {
        let path = format!("/{}/{}/{{name}}", kind.api_version(), kind.plural);
        paths.insert(
            path,
            json!({"patch": {
                "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                "responses": {},
                "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind.kind},
            }}),
        );
    }
    json!({"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": version}, "paths": paths})
}
