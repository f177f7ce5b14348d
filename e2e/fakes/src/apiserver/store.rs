//! What the server holds, and everything that ever changed it.
//!
//! One resource version counts for all resources, as in etcd. Every change is
//! an event in one log; a watch is a position in that log. Old events are
//! forgotten (`compact`), and a watch that wants them gets 410.

use super::kinds::Kind;
use serde_json::Value;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// How many events are kept.
const HISTORY: usize = 4096;

pub(crate) type Key = (&'static str, &'static str, String, String);

pub(crate) fn key(kind: &'static Kind, namespace: &str, name: &str) -> Key {
    (kind.group, kind.plural, namespace.to_owned(), name.to_owned())
}

/// One change. `after` is absent for a deletion.
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
    /// Changes up to this version are forgotten.
    floor: u64,
}

impl Default for Store {
    fn default() -> Self {
        // Not 1: a client that counts on small numbers is wrong.
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

    /// Removes an object; the last event shows it with the version of its removal.
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
        if self.log.len() > HISTORY
            && let Some(oldest) = self.log.pop_front()
        {
            self.floor = oldest.version;
        }
    }

    /// Forgets all history, as etcd's compaction does.
    pub(crate) fn compact(&mut self) {
        self.log.clear();
        self.floor = self.version;
    }

    /// Changes after a version, or nothing if some of them are forgotten.
    pub(crate) fn since(&self, version: u64) -> Option<impl Iterator<Item = &Change>> {
        if version < self.floor {
            return None;
        }
        let from = self.log.partition_point(|change| change.version <= version);
        Some(self.log.range(from..))
    }
}
