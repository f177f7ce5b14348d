//! The HTTP interface: routes requests to the store and encodes the answers.

use super::kinds::Kind;
use super::objects::{self, Preconditions, Target};
use super::representation::Representation;
use super::selectors::Selection;
use super::status::Failure;
use super::watch::{self, WatchOptions};
use super::{Outage, Request, Server, discovery};
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{Method, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// The real server's limit of a request body, in bytes.
const BODY_LIMIT_BYTES: usize = 3 << 20;

type HttpRequest = axum::http::Request<Body>;

/// The resource that a path names.
struct Route {
    kind: &'static Kind,
    namespace: Option<String>,
    name: Option<String>,
    status: bool,
}

pub(crate) fn router(server: Arc<Server>) -> axum::Router {
    axum::Router::new().fallback(answer).with_state(server)
}

async fn answer(State(server): State<Arc<Server>>, request: HttpRequest) -> Response {
    match server.outage() {
        Some(Outage::Answer503) => return Failure::unavailable().into_response(),
        // This answer closes the connection, and new connections are refused.
        Some(Outage::Refuse) => {
            return ([(header::CONNECTION, "close")], Failure::unavailable()).into_response();
        }
        None => {}
    }
    match handle(&server, request).await {
        Ok(response) => response,
        Err(failure) => failure.into_response(),
    }
}

async fn handle(server: &Arc<Server>, request: HttpRequest) -> Result<Response, Failure> {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    if let "/readyz" | "/livez" | "/healthz" = path.as_str() {
        return Ok("ok".into_response());
    }
    if let Some(document) = discovery::document(&path, &server.version()) {
        return Ok(axum::Json(document).into_response());
    }
    let Some(route) = route(&path) else {
        return Err(Failure::new(404, "NotFound", "the server could not find the requested resource"));
    };
    let axum::extract::Query(query) =
        axum::extract::Query::<HashMap<String, String>>::try_from_uri(&parts.uri).unwrap_or_default();
    let flag =
        |name: &str| query.get(name).is_some_and(|value| matches!(value.as_str(), "true" | "1" | "All"));
    let verb = verb(&parts.method, route.name.is_some(), flag("watch"));
    let accept = parts.headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let representation = Representation::requested(accept, matches!(verb, "list" | "deletecollection"))?;
    server.record(Request {
        verb,
        resource: route.kind.plural,
        namespace: route.namespace.clone(),
        name: route.name.clone(),
        dry_run: flag("dryRun"),
        metadata_only: representation == Representation::Metadata,
    })?;
    let body = to_bytes(body, BODY_LIMIT_BYTES).await.map_err(|_| {
        Failure::new(413, "RequestEntityTooLarge", "Request entity too large: limit is 3145728")
    })?;
    let body: Option<Value> = match body.is_empty() {
        true => None,
        false => {
            Some(serde_json::from_slice(&body).map_err(|error| Failure::bad_request(error.to_string()))?)
        }
    };
    let target = Target {
        kind: route.kind,
        namespace: route.namespace.clone().unwrap_or_default(),
        name: route.name.clone().unwrap_or_default(),
        status: route.status,
        dry_run: flag("dryRun"),
    };
    let need_body = || body.clone().ok_or_else(|| Failure::bad_request("a body is required"));
    let text = |name: &str| query.get(name).map(String::as_str).unwrap_or_default();
    let selection = || {
        Selection::parse(route.kind, route.namespace.clone(), text("fieldSelector"), text("labelSelector"))
    };
    let one = |code, object: &Arc<Value>| json_response(code, &representation.one(target.kind, object));
    match verb {
        "get" => {
            let store = server.store();
            let key = super::store::key(target.kind, &target.namespace, &target.name);
            let found =
                store.get(&key).ok_or_else(|| Failure::not_found(target.kind.plural, &target.name))?;
            Ok(one(200, found))
        }
        "list" => {
            let selection = selection()?;
            let store = server.store();
            let found: Vec<_> =
                store.list(route.kind).filter(|object| selection.matches(object)).cloned().collect();
            let version = store.version().to_string();
            let page = page(found, text("limit"), text("continue"), &version)?;
            Ok(list(route.kind, &page, representation))
        }
        "watch" => {
            let from = match text("resourceVersion") {
                "" | "0" => None,
                version => {
                    Some(version.parse().map_err(|_| Failure::bad_request("invalid resource version"))?)
                }
            };
            let options = WatchOptions {
                from,
                initial_events: flag("sendInitialEvents"),
                bookmarks: flag("allowWatchBookmarks"),
                timeout: Duration::from_secs(text("timeoutSeconds").parse().unwrap_or(1800)),
                representation,
            };
            let body = watch::body(server.clone(), route.kind, selection()?, options);
            Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
        }
        "create" => {
            let object = need_body()?;
            let created = server.write(|store, gates| objects::create(store, gates, target, object))?;
            Ok(one(201, &created))
        }
        "update" => {
            let object = need_body()?;
            let updated = server.write(|store, gates| objects::update(store, gates, &target, object))?;
            Ok(one(200, &updated))
        }
        "patch" => {
            let patch = need_body()?;
            let content =
                parts.headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
            if content.starts_with("application/json-patch") {
                return Err(Failure::new(
                    415,
                    "UnsupportedMediaType",
                    "JSON patches are not supported by the fake server",
                ));
            }
            let apply = content.starts_with("application/apply-patch");
            let patched = server.write(|store, gates| objects::patch(store, gates, &target, patch, apply))?;
            Ok(one(200, &patched))
        }
        "delete" => {
            let wanted = body.as_ref().map(|body| body["preconditions"].clone()).unwrap_or_default();
            let field = |name: &str| wanted[name].as_str().map(str::to_owned);
            let only = Preconditions { uid: field("uid"), version: field("resourceVersion") };
            let gone = server.write(|store, _| objects::delete(store, &target, &only))?;
            Ok(deleted(&target, &gone, representation))
        }
        "deletecollection" => {
            let selection = selection()?;
            let doomed: Vec<_> =
                server.store().list(route.kind).filter(|object| selection.matches(object)).cloned().collect();
            for object in &doomed {
                let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
                let target = Target { namespace: text("namespace"), name: text("name"), ..target.clone() };
                // An object that is already gone is not an error.
                let _ = server.write(|store, _| objects::delete(store, &target, &Preconditions::default()));
            }
            let version = server.store().version().to_string();
            Ok(list(route.kind, &Page { items: doomed, version, rest: None }, representation))
        }
        _ => Err(Failure::new(405, "MethodNotAllowed", "the server does not allow this method")),
    }
}

fn verb(method: &Method, named: bool, watch: bool) -> &'static str {
    match (method.as_str(), named) {
        ("GET", _) if watch => "watch",
        ("GET", true) => "get",
        ("GET", false) => "list",
        ("POST", false) => "create",
        ("PUT", true) => "update",
        ("PATCH", true) => "patch",
        ("DELETE", true) => "delete",
        ("DELETE", false) => "deletecollection",
        _ => "unknown",
    }
}

fn route(path: &str) -> Option<Route> {
    let segments: Vec<&str> = path.split('/').filter(|segment| !segment.is_empty()).collect();
    let (group, version, rest) = match segments.as_slice() {
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return None,
    };
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..] if !matches!(rest, [] | ["status" | "finalize"]) => {
            (Some((*namespace).to_owned()), rest)
        }
        rest => (None, rest),
    };
    let (plural, name, sub) = match rest {
        [plural] => (*plural, None, None),
        [plural, name] => (*plural, Some((*name).to_owned()), None),
        [plural, name, sub] => (*plural, Some((*name).to_owned()), Some(*sub)),
        _ => return None,
    };
    let kind = Kind::find(group, version, plural)?;
    if sub.is_some_and(|sub| sub != "status" || !kind.has_status) {
        return None;
    }
    Some(Route { kind, namespace, name, status: sub.is_some() })
}

fn json_response(code: u16, object: &Value) -> Response {
    let code = axum::http::StatusCode::from_u16(code).unwrap_or_default();
    (code, [(header::CONTENT_TYPE, "application/json")], object.to_string()).into_response()
}

/// A page of a list.
struct Page {
    items: Vec<Arc<Value>>,
    /// The resource version of the whole list.
    version: String,
    /// The number of remaining objects, and the token to continue with.
    rest: Option<(usize, String)>,
}

/// At most `limit` objects, continuing after the previous page. The token contains the version of
/// the first page, so that a watch from the last page misses nothing. Later changes are visible, as
/// on a server that has compacted the snapshot and returns an inconsistent continuation.
fn page(found: Vec<Arc<Value>>, limit: &str, token: &str, now: &str) -> Result<Page, Failure> {
    let bad = || Failure::bad_request("continue key is not valid");
    let (version, after) = match token {
        "" => (now, None),
        token => token.split_once('|').map(|(version, after)| (version, Some(after))).ok_or_else(bad)?,
    };
    let name = |object: &Value| {
        let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
        (text("namespace"), text("name"))
    };
    let after = after.map(|after| after.split_once('/').ok_or_else(bad)).transpose()?;
    let after = after.map(|(namespace, name)| (namespace.to_owned(), name.to_owned()));
    let mut items: Vec<_> =
        found.into_iter().filter(|object| after.is_none() || Some(name(object)) > after).collect();
    let limit = limit.parse().ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    let left = items.len().saturating_sub(limit);
    items.truncate(limit);
    let rest = items.last().filter(|_| left > 0).map(|last| {
        let (namespace, name) = name(last);
        (left, format!("{version}|{namespace}/{name}"))
    });
    Ok(Page { version: version.to_owned(), items, rest })
}

fn list(kind: &Kind, page: &Page, representation: Representation) -> Response {
    let mut metadata = json!({"resourceVersion": page.version});
    if let Some((left, token)) = &page.rest {
        metadata["remainingItemCount"] = json!(left);
        metadata["continue"] = json!(token);
    }
    json_response(200, &representation.list(kind, &page.items, metadata))
}

/// The object while finalizers block its deletion, otherwise a Status.
fn deleted(target: &Target, object: &Arc<Value>, representation: Representation) -> Response {
    if !object["metadata"]["deletionTimestamp"].is_null() {
        return json_response(200, &representation.one(target.kind, object));
    }
    let details = json!({
        "name": target.name, "group": target.kind.group, "kind": target.kind.plural,
        "uid": object["metadata"]["uid"],
    });
    json_response(
        200,
        &json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details,
        }),
    )
}
