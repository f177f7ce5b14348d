//! Watches: a position in the log of changes; the changes are sent as lines of JSON.

use super::Server;
use super::kinds::Kind;
use super::representation::Representation;
use super::selectors::Selection;
use super::status::Failure;
use axum::body::Body;
use futures::stream;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// The interval of bookmarks, for clients that request them.
const BOOKMARK_INTERVAL: Duration = Duration::from_secs(10);

/// The options of the client.
#[derive(Clone, Debug)]
pub(crate) struct WatchOptions {
    /// The start version. `None`: first the existing objects, then all changes.
    pub(crate) from: Option<u64>,
    pub(crate) initial_events: bool,
    pub(crate) bookmarks: bool,
    pub(crate) timeout: Duration,
    pub(crate) representation: Representation,
}

struct Watch {
    server: Arc<Server>,
    kind: &'static Kind,
    selection: Selection,
    options: WatchOptions,
    cursor: u64,
    lines: VecDeque<String>,
    changed: tokio::sync::watch::Receiver<u64>,
    deadline: Instant,
    next_bookmark: Instant,
    ended: bool,
}

/// The response body.
pub(crate) fn body(
    server: Arc<Server>,
    kind: &'static Kind,
    selection: Selection,
    options: WatchOptions,
) -> Body {
    let mut lines = VecDeque::new();
    let cursor = {
        let store = server.store();
        if options.from.is_none() || options.initial_events {
            for object in store.list(kind).filter(|object| selection.matches(object)) {
                lines.push_back(line("ADDED", &options.representation.one(kind, object)));
            }
            if options.initial_events {
                lines.push_back(bookmark(kind, options.representation, store.version(), true));
            }
            store.version()
        } else {
            options.from.unwrap_or_default()
        }
    };
    let now = Instant::now();
    let watch = Watch {
        changed: server.changed.subscribe(),
        server,
        kind,
        selection,
        cursor,
        lines,
        deadline: now + options.timeout,
        next_bookmark: now + BOOKMARK_INTERVAL,
        options,
        ended: false,
    };
    Body::from_stream(stream::unfold(watch, |mut watch| async move {
        let line = watch.next().await?;
        Some((line, watch))
    }))
}

impl Watch {
    async fn next(&mut self) -> Option<std::io::Result<String>> {
        loop {
            if self.server.outage().is_some() {
                self.ended = true;
                return Some(Err(std::io::ErrorKind::ConnectionReset.into()));
            }
            if let Some(line) = self.lines.pop_front() {
                return Some(Ok(line));
            }
            if self.ended {
                return None;
            }
            self.collect();
            if !self.lines.is_empty() {
                continue;
            }
            let next_bookmark =
                if self.options.bookmarks { self.next_bookmark } else { self.deadline + BOOKMARK_INTERVAL };
            tokio::select! {
                changed = self.changed.changed() => self.ended = changed.is_err(),
                () = sleep_until(self.deadline) => {
                    self.ended = true;
                    if self.options.bookmarks {
                        self.push_bookmark();
                    }
                }
                () = sleep_until(next_bookmark) => {
                    self.next_bookmark += BOOKMARK_INTERVAL;
                    self.push_bookmark();
                }
            }
        }
    }

    fn push_bookmark(&mut self) {
        let line = bookmark(self.kind, self.options.representation, self.cursor, false);
        self.lines.push_back(line);
    }

    /// Collects the changes since the cursor. For this watch, an object that enters the selection
    /// is an addition, and one that leaves it is a deletion.
    fn collect(&mut self) {
        self.changed.mark_unchanged();
        let store = self.server.store();
        let Some(changes) = store.since(self.cursor) else {
            self.lines.push_back(line("ERROR", &Failure::gone().object()));
            self.ended = true;
            return;
        };
        for change in changes {
            if (change.group, change.plural) != (self.kind.group, self.kind.plural) {
                continue;
            }
            let seen = |object: &Option<Arc<Value>>| {
                object.as_ref().filter(|object| self.selection.matches(object)).cloned()
            };
            let (event, object) = match (seen(&change.before), seen(&change.after)) {
                (None, None) => continue,
                (None, Some(after)) => ("ADDED", after),
                (Some(_), Some(after)) => ("MODIFIED", after),
                (Some(before), None) => {
                    let mut last = (*before).clone();
                    last["metadata"]["resourceVersion"] = Value::String(change.version.to_string());
                    ("DELETED", Arc::new(last))
                }
            };
            self.lines.push_back(line(event, &self.options.representation.one(self.kind, &object)));
        }
        self.cursor = store.version();
    }
}

fn line(event: &str, object: &Value) -> String {
    format!("{{\"type\":\"{event}\",\"object\":{object}}}\n")
}

fn bookmark(kind: &Kind, representation: Representation, version: u64, initial_end: bool) -> String {
    let mut object = json!({
        "kind": kind.kind, "apiVersion": kind.api_version(),
        "metadata": {"resourceVersion": version.to_string(), "creationTimestamp": null},
    });
    if kind.plural == "resourceslices" {
        // Clients decode a bookmark as an object of the watched kind.
        object["spec"] =
            json!({"driver": "", "pool": {"name": "", "generation": 0, "resourceSliceCount": 0}});
    } else {
        object["spec"] = json!({});
    }
    if initial_end {
        object["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
    }
    line("BOOKMARK", &representation.one(kind, &Arc::new(object)))
}
