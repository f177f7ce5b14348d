//! The allocations of our devices, from ResourceClaims. A claim is reduced while it is parsed, and
//! only claims with our devices are kept. Admin access holds nothing, so it does not count.

use crate::removal::planner::NodeName;
use divvy_api::ClaimRef;
use divvy_api::names::DRIVER;
use divvy_model::closing::Allocated;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// A ResourceClaim with only its allocation.
#[derive(Clone, Debug, Deserialize)]
pub struct Claim {
    metadata: ObjectMeta,
    #[serde(default)]
    status: Option<Status>,
}

#[derive(Clone, Debug, Deserialize)]
struct Status {
    #[serde(default)]
    allocation: Option<Allocation>,
}

#[derive(Clone, Debug, Deserialize)]
struct Allocation {
    #[serde(default)]
    devices: Option<Devices>,
}

#[derive(Clone, Debug, Deserialize)]
struct Devices {
    #[serde(default)]
    results: Option<Vec<DeviceResult>>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct DeviceResult {
    driver: String,
    pool: String,
    device: String,
    #[serde(default)]
    admin_access: Option<bool>,
}

impl kube::Resource for Claim {
    type DynamicType = ();
    type Scope = kube::core::NamespaceResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        "ResourceClaim".into()
    }

    fn group(_: &()) -> Cow<'_, str> {
        "resource.k8s.io".into()
    }

    fn version(_: &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural(_: &()) -> Cow<'_, str> {
        "resourceclaims".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl Claim {
    fn reference(&self) -> ClaimRef {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let metadata = &self.metadata;
        ClaimRef {
            namespace: text(&metadata.namespace),
            name: text(&metadata.name),
            uid: text(&metadata.uid).into(),
        }
    }

    /// Our devices that are allocated to it, with the node of each. A pool is named after its node.
    fn devices(&self) -> impl Iterator<Item = (NodeName, String)> {
        let allocation = self.status.as_ref().and_then(|status| status.allocation.as_ref());
        let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
        let ours = results
            .into_iter()
            .flatten()
            .filter(|result| result.driver == DRIVER && !result.admin_access.unwrap_or(false));
        ours.map(|result| (result.pool.as_str().into(), result.device.clone()))
    }
}

/// The allocated devices of each node.
#[derive(Clone, Debug, Default)]
pub struct Allocations {
    by_node: BTreeMap<NodeName, BTreeSet<Allocated>>,
    /// The nodes of each claim, by namespace and name.
    nodes: BTreeMap<(String, String), BTreeSet<NodeName>>,
    /// Claims that were listed since [`Self::relist`].
    listed: Option<BTreeSet<(String, String)>>,
}

impl Allocations {
    /// The allocations on a node.
    pub fn on(&self, node: &NodeName) -> &BTreeSet<Allocated> {
        static NONE: BTreeSet<Allocated> = BTreeSet::new();
        self.by_node.get(node).unwrap_or(&NONE)
    }

    /// Starts a list. Claims that it does not contain are removed when it ends.
    pub fn relist(&mut self) {
        self.listed = Some(BTreeSet::new());
    }

    /// Ends a list. Returns the nodes that changed.
    pub fn listed(&mut self) -> BTreeSet<NodeName> {
        let Some(listed) = self.listed.take() else { return BTreeSet::new() };
        let gone: Vec<_> = self.nodes.keys().filter(|key| !listed.contains(*key)).cloned().collect();
        gone.iter().flat_map(|key| self.remove(key)).collect()
    }

    /// Adds or updates a claim. Returns the nodes that it had or has devices of.
    pub fn apply(&mut self, claim: &Claim) -> BTreeSet<NodeName> {
        let reference = claim.reference();
        let key = (reference.namespace.clone(), reference.name.clone());
        if let Some(listed) = &mut self.listed {
            listed.insert(key.clone());
        }
        let mut changed = self.remove(&key);
        let mut nodes = BTreeSet::new();
        for (node, device) in claim.devices() {
            let allocated = Allocated { device: device.into(), claim: reference.clone() };
            self.by_node.entry(node.clone()).or_default().insert(allocated);
            nodes.insert(node);
        }
        if !nodes.is_empty() {
            changed.extend(nodes.iter().cloned());
            self.nodes.insert(key, nodes);
        }
        changed
    }

    /// Removes a claim. Returns the nodes that it had devices of.
    pub fn delete(&mut self, claim: &Claim) -> BTreeSet<NodeName> {
        let reference = claim.reference();
        self.remove(&(reference.namespace, reference.name))
    }

    fn remove(&mut self, key: &(String, String)) -> BTreeSet<NodeName> {
        let nodes = self.nodes.remove(key).unwrap_or_default();
        for node in &nodes {
            let Some(allocated) = self.by_node.get_mut(node) else { continue };
            allocated.retain(|one| (&one.claim.namespace, &one.claim.name) != (&key.0, &key.1));
            if allocated.is_empty() {
                self.by_node.remove(node);
            }
        }
        nodes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn claim(name: &str, results: Value) -> Claim {
        let status = json!({"allocation": {"devices": {"results": results}}});
        let metadata = json!({"namespace": "ns", "name": name, "uid": name});
        serde_json::from_value(json!({"metadata": metadata, "spec": {}, "status": status})).expect("a claim")
    }

    fn result(pool: &str, device: &str) -> Value {
        json!({"request": "r", "driver": DRIVER, "pool": pool, "device": device, "shareID": "s"})
    }

    #[track_caller]
    fn check(allocations: &Allocations, node: &str, expected: &[&str]) {
        let all = allocations.on(&node.into()).iter();
        let found: Vec<_> = all.map(|one| format!("{} {}", one.device, one.claim.name)).collect();
        assert_eq!(found, expected, "{node}");
    }

    #[test]
    fn devices_of_this_driver_are_allocated_until_the_claim_ends() {
        let mut allocations = Allocations::default();
        let both = claim("a", json!([result("n1", "gpu-0"), result("n2", "gpu-1")]));
        assert_eq!(allocations.apply(&both).len(), 2);
        let mut admin = result("n1", "gpu-3");
        admin["adminAccess"] = json!(true);
        let other = json!({"request": "r", "driver": "other", "pool": "n1", "device": "gpu-4"});
        assert_eq!(allocations.apply(&claim("b", json!([admin, other]))).len(), 0);
        check(&allocations, "n1", &["gpu-0 a"]);
        check(&allocations, "n2", &["gpu-1 a"]);
        assert_eq!(allocations.apply(&claim("a", json!([result("n2", "gpu-1")]))).len(), 2);
        check(&allocations, "n1", &[]);
        allocations.relist();
        allocations.apply(&claim("c", json!([result("n1", "gpu-0")])));
        assert_eq!(allocations.listed(), ["n2".into()].into());
        check(&allocations, "n2", &[]);
        check(&allocations, "n1", &["gpu-0 c"]);
        allocations.delete(&claim("c", json!(null)));
        check(&allocations, "n1", &[]);
    }
}
