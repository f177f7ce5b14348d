//! The stored objects, and the log of their changes.
//!
//! All resources share one resource version, as in etcd. Every change is an event in one log, and a
//! watch is a position in that log. Old events are discarded (`compact`), and a watch that needs
//! them gets 410.

use super::kinds::Kind;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// The number of events to keep.
const MAX_EVENTS: usize = 4096;

pub(crate) type Key = (&'static str, &'static str, String, String);

pub(crate) fn key(kind: &'static Kind, namespace: &str, name: &str) -> Key {
    (kind.group, kind.plural, namespace.to_owned(), name.to_owned())
}

/// A change. `after` is `None` for a deletion.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) version: u64,
    pub(crate) group: &'static str,
    pub(crate) plural: &'static str,
    pub(crate) before: Option<Arc<Value>>,
    pub(crate) after: Option<Arc<Value>>,
}

#[derive(Debug)]
pub(crate) struct Store {
    objects: BTreeMap<Key, Arc<Value>>,
    log: VecDeque<Change>,
    version: u64,
    /// Changes up to this version were discarded.
    floor: u64,
}

impl Default for Store {
    fn default() -> Self {
        // Not 1, to reveal clients that rely on small numbers.
        Self { objects: BTreeMap::new(), log: VecDeque::new(), version: 1000, floor: 1000 }
    }
}

impl Store {
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn get(&self, key: &Key) -> Option<&Arc<Value>> {
        self.objects.get(key)
    }

    /// All objects of a resource, by namespace and name.
    pub(crate) fn list(&self, kind: &'static Kind) -> impl Iterator<Item = &Arc<Value>> {
        let from = key(kind, "", "");
        self.objects
            .range(from..)
            .take_while(|(key, _)| key.0 == kind.group && key.1 == kind.plural)
            .map(|(_, object)| object)
    }

    /// Stores an object under the next resource version.
    pub(crate) fn put(&mut self, key: Key, mut object: Value) -> Arc<Value> {
        self.version += 1;
        object["metadata"]["resourceVersion"] = Value::String(self.version.to_string());
        let object = Arc::new(object);
        let before = self.objects.insert(key.clone(), object.clone());
        self.record(&key, before, Some(object.clone()));
        object
    }

    /// Removes an object. Its last event carries the version of the removal.
    pub(crate) fn remove(&mut self, key: &Key) -> Option<Arc<Value>> {
        let before = self.objects.remove(key)?;
        self.version += 1;
        let mut last = (*before).clone();
        last["metadata"]["resourceVersion"] = Value::String(self.version.to_string());
        let last = Arc::new(last);
        self.record(key, Some(last.clone()), None);
        Some(last)
    }

    fn record(&mut self, key: &Key, before: Option<Arc<Value>>, after: Option<Arc<Value>>) {
        self.log.push_back(Change { version: self.version, group: key.0, plural: key.1, before, after });
        if self.log.len() > MAX_EVENTS
            && let Some(oldest) = self.log.pop_front()
        {
            self.floor = oldest.version;
        }
    }

    /// Discards all events, like etcd's compaction.
    pub(crate) fn compact(&mut self) {
        self.log.clear();
        self.floor = self.version;
    }

    /// The changes after a version, or `None` if some of them were discarded.
    pub(crate) fn since(&self, version: u64) -> Option<impl Iterator<Item = &Change>> {
        if version < self.floor {
            return None;
        }
        let from = self.log.partition_point(|change| change.version <= version);
        Some(self.log.range(from..))
    }
}
