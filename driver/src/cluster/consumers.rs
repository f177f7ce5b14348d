//! The consumers of a claim: the objects that `status.reservedFor` names.
//!
//! The scheduler reserves a claim for each pod, or once for a PodGroup (KEP-5729,
//! `DRAWorkloadResourceClaims`). Then any number of the group's pods use it, and no pod is named.

use k8s_openapi::Resource;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimConsumerReference};
use k8s_openapi::api::scheduling::v1beta1::PodGroup;

/// The kind of a consumer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConsumerKind {
    Pod,
    PodGroup,
    /// A kind that this version does not know. It counts as a use, but cannot get events.
    Unknown,
}

/// A consumer of a claim, in the namespace of the claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Consumer {
    pub kind: ConsumerKind,
    pub name: String,
    pub uid: String,
}

impl From<&ResourceClaimConsumerReference> for Consumer {
    fn from(reference: &ResourceClaimConsumerReference) -> Self {
        let group = reference.api_group.as_deref().unwrap_or_default();
        let kind = match (group, reference.resource.as_str()) {
            (Pod::GROUP, "pods") => ConsumerKind::Pod,
            (PodGroup::GROUP, "podgroups") => ConsumerKind::PodGroup,
            _ => ConsumerKind::Unknown,
        };
        Self { kind, name: reference.name.clone(), uid: reference.uid.clone() }
    }
}

impl Consumer {
    /// The reference for an event about the consumer; `None` for an unknown kind.
    pub fn event_object(&self, namespace: &str) -> Option<ObjectReference> {
        let (api_version, kind) = match self.kind {
            ConsumerKind::Pod => (Pod::API_VERSION, Pod::KIND),
            ConsumerKind::PodGroup => (PodGroup::API_VERSION, PodGroup::KIND),
            ConsumerKind::Unknown => return None,
        };
        Some(ObjectReference {
            api_version: Some(api_version.to_owned()),
            kind: Some(kind.to_owned()),
            namespace: Some(namespace.to_owned()),
            name: Some(self.name.clone()),
            uid: Some(self.uid.clone()),
            ..ObjectReference::default()
        })
    }
}

/// All consumers of a claim.
pub fn consumers(claim: &ResourceClaim) -> Vec<Consumer> {
    let reserved = claim.status.as_ref().and_then(|status| status.reserved_for.as_ref());
    reserved.into_iter().flatten().map(Consumer::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn check(group: Option<&str>, resource: &str, kind: ConsumerKind, object: Option<(&str, &str)>) {
        let consumer = json!({"apiGroup": group, "resource": resource, "name": "n", "uid": "u"});
        let claim = serde_json::from_value(json!({
            "metadata": {}, "spec": {}, "status": {"reservedFor": [consumer]},
        }))
        .unwrap();
        let expected = Consumer { kind, name: "n".to_owned(), uid: "u".to_owned() };
        assert_eq!(consumers(&claim), [expected], "{group:?} {resource}");
        let reference = consumers(&claim)[0].event_object("ns");
        let found = reference.map(|reference| (reference.api_version.unwrap(), reference.kind.unwrap()));
        let object = object.map(|(version, kind)| (version.to_owned(), kind.to_owned()));
        assert_eq!(found, object, "{group:?} {resource}");
    }

    #[test]
    fn each_kind_of_consumer_is_counted() {
        check(None, "pods", ConsumerKind::Pod, Some(("v1", "Pod")));
        check(Some(""), "pods", ConsumerKind::Pod, Some(("v1", "Pod")));
        let group = Some("scheduling.k8s.io");
        let object = Some(("scheduling.k8s.io/v1beta1", "PodGroup"));
        check(group, "podgroups", ConsumerKind::PodGroup, object);
        check(group, "compositepodgroups", ConsumerKind::Unknown, None);
        check(Some("example.com"), "pods", ConsumerKind::Unknown, None);
    }
}
