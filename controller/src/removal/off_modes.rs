//! The modes that are off on each node, from the annotation of its first slice.

use crate::removal::planner::NodeName;
use divvy_model::ModeSet;
use divvy_model::closing::MODES_OFF;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// The modes that are off, of nodes that have any.
pub type OffModes = BTreeMap<NodeName, Arc<ModeSet>>;

/// Built from the events of a watch of our slices. It reads only metadata.
#[derive(Debug, Default)]
pub struct OffIndex {
    /// By slice name. Only slices with the annotation are kept.
    slices: BTreeMap<String, (NodeName, Arc<ModeSet>)>,
    /// Slice names that were listed since [`Self::relist`].
    listed: Option<BTreeSet<String>>,
    is_changed: bool,
}

impl OffIndex {
    /// Starts a list. Slices that it does not contain are removed when it ends.
    pub fn relist(&mut self) {
        self.listed = Some(BTreeSet::new());
    }

    /// Ends a list.
    pub fn listed(&mut self) {
        let Some(listed) = self.listed.take() else { return };
        let before = self.slices.len();
        self.slices.retain(|name, _| listed.contains(name));
        self.is_changed |= self.slices.len() != before;
    }

    /// Adds or updates a slice.
    pub fn apply(&mut self, slice: &ObjectMeta) {
        let Some(name) = &slice.name else { return };
        let Some(found) = read(slice) else { return self.delete(slice) };
        if let Some(listed) = &mut self.listed {
            listed.insert(name.clone());
        }
        if self.slices.get(name) != Some(&found) {
            self.slices.insert(name.clone(), found);
            self.is_changed = true;
        }
    }

    /// Removes a slice.
    pub fn delete(&mut self, slice: &ObjectMeta) {
        let removed = slice.name.as_ref().and_then(|name| self.slices.remove(name));
        self.is_changed |= removed.is_some();
    }

    /// The modes, if they changed since the last call.
    pub fn take_changes(&mut self) -> Option<OffModes> {
        std::mem::take(&mut self.is_changed).then(|| self.slices.values().cloned().collect())
    }
}

/// The node and the modes of a slice. The owner of a slice is its Node.
fn read(slice: &ObjectMeta) -> Option<(NodeName, Arc<ModeSet>)> {
    let text = slice.annotations.as_ref()?.get(MODES_OFF)?;
    let owner = slice.owner_references.iter().flatten().find(|owner| owner.kind == "Node")?;
    Some((owner.name.as_str().into(), Arc::new(ModeSet::parse(text))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn slice(name: &str, node: &str, modes: Option<&str>) -> ObjectMeta {
        let owner = json!([{"apiVersion": "v1", "kind": "Node", "name": node, "uid": "u"}]);
        let annotations = modes.map(|modes| json!({MODES_OFF: modes}));
        let metadata = json!({"name": name, "ownerReferences": owner, "annotations": annotations});
        serde_json::from_value(metadata).expect("metadata")
    }

    #[track_caller]
    fn check(index: &mut OffIndex, expected: Option<&[(&str, &str)]>) {
        let found = index.take_changes();
        let found = found.map(|nodes| {
            nodes.into_iter().map(|(node, modes)| (node.to_string(), modes.to_string())).collect::<Vec<_>>()
        });
        let text = |(node, modes): &(&str, &str)| ((*node).to_owned(), (*modes).to_owned());
        assert_eq!(found, expected.map(|nodes| nodes.iter().map(text).collect()));
    }

    #[test]
    fn modes_follow_the_first_slice_of_each_node() {
        let mut index = OffIndex::default();
        index.apply(&slice("0-a", "a", Some("mps:0")));
        index.apply(&slice("1-a", "a", None));
        index.apply(&slice("0-b", "b", Some("mps@7:0")));
        check(&mut index, Some(&[("a", "mps:0"), ("b", "mps@7:0")]));
        index.apply(&slice("0-b", "b", Some("mps@7:0")));
        check(&mut index, None);
        index.apply(&slice("0-a", "a", None));
        check(&mut index, Some(&[("b", "mps@7:0")]));
        index.relist();
        index.apply(&slice("0-a", "a", Some("mig:1")));
        index.listed();
        check(&mut index, Some(&[("a", "mig:1")]));
        index.delete(&slice("0-a", "a", None));
        check(&mut index, Some(&[]));
    }
}
