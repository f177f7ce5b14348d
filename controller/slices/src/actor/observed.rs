//! The slices on the server as far as we know: a list, our own writes over it,
//! and the watch.
//!
//! The watch lags behind our writes. An event older than what we hold is
//! therefore no news, and a slice that we deleted does not come back by an event
//! from before its deletion.
//!
//! Slices are kept as JSON. They are looked at again only when something is to
//! be written, and as objects a pool of eight GPUs takes two megabytes for good.

use super::server::PublishError;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::ResourceExt;
use kube::core::WatchEvent;
use std::collections::{BTreeMap, HashSet};

#[derive(Debug, Default)]
pub(super) struct Observed {
    by_name: BTreeMap<String, Kept>,
    /// UIDs of slices that we deleted.
    removed: HashSet<String>,
}

/// A slice, and what is asked of it often.
#[derive(Debug)]
struct Kept {
    uid: Option<String>,
    version: u64,
    pool: String,
    generation: i64,
    json: Box<[u8]>,
}

impl Kept {
    fn new(slice: &ResourceSlice) -> Self {
        Self {
            uid: slice.metadata.uid.clone(),
            version: version(slice),
            pool: slice.spec.pool.name.clone(),
            generation: slice.spec.pool.generation,
            // Writing an object of the API to memory cannot fail.
            json: serde_json::to_vec(slice).unwrap_or_default().into_boxed_slice(),
        }
    }
}

/// What an event says that we did not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Nothing,
    Edited,
    Deleted,
}

impl Observed {
    /// What a list shows, read after all our writes.
    pub(super) fn replace(&mut self, slices: Vec<ResourceSlice>) {
        self.removed.clear();
        self.by_name = slices.iter().map(|slice| (slice.name_any(), Kept::new(slice))).collect();
    }

    /// The slices as objects, by name.
    pub(super) fn slices(&self) -> Vec<ResourceSlice> {
        self.by_name.values().filter_map(|kept| serde_json::from_slice(&kept.json).ok()).collect()
    }

    /// The highest generation of a pool.
    pub(super) fn generation(&self, pool: &str) -> i64 {
        let ours = self.by_name.values().filter(|kept| kept.pool == pool);
        ours.map(|kept| kept.generation).max().unwrap_or(0)
    }

    pub(super) fn wrote(&mut self, slice: &ResourceSlice) {
        self.by_name.insert(slice.name_any(), Kept::new(slice));
    }

    pub(super) fn removed(&mut self, slice: &ResourceSlice) {
        self.by_name.remove(&slice.name_any());
        self.removed.extend(slice.metadata.uid.clone());
    }

    /// Takes an event and moves the position of the watch behind it.
    pub(super) fn event(
        &mut self,
        event: WatchEvent<ResourceSlice>,
        position: &mut String,
    ) -> Result<Change, PublishError> {
        let (slice, deleted) = match event {
            WatchEvent::Added(slice) | WatchEvent::Modified(slice) => (slice, false),
            WatchEvent::Deleted(slice) => (slice, true),
            WatchEvent::Bookmark(bookmark) => {
                *position = bookmark.metadata.resource_version;
                return Ok(Change::Nothing);
            }
            WatchEvent::Error(status) => return Err(PublishError::Watch { why: status.message }),
        };
        if let Some(version) = slice.resource_version() {
            *position = version;
        }
        let name = slice.name_any();
        let known = self.by_name.get(&name);
        if deleted {
            // Of another slice with that name, or of one that we deleted.
            if known.is_none_or(|known| known.uid != slice.metadata.uid) {
                return Ok(Change::Nothing);
            }
            self.by_name.remove(&name);
            return Ok(Change::Deleted);
        }
        let gone = slice.metadata.uid.as_ref().is_some_and(|uid| self.removed.contains(uid));
        if gone || known.is_some_and(|known| known.version >= version(&slice)) {
            return Ok(Change::Nothing);
        }
        self.by_name.insert(name, Kept::new(&slice));
        Ok(Change::Edited)
    }
}

/// Resource versions of one server are numbers that grow.
fn version(slice: &ResourceSlice) -> u64 {
    slice.metadata.resource_version.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0)
}
