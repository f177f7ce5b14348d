//! Builders for slices, classes and claims from short JSON.

#![allow(dead_code, reason = "each test uses only a part")]

use divvy_alloc::{AllocationError, ClusterView, Release, allocate_pod};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use serde_json::{Value, from_value, json};

pub(crate) const DRIVER: &str = "gpu.divvy.dev";
pub(crate) const NODE: &str = "node-a";

#[derive(Clone, Default)]
pub(crate) struct Cluster {
    pub(crate) slices: Vec<ResourceSlice>,
    pub(crate) classes: Vec<DeviceClass>,
    pub(crate) claims: Vec<ResourceClaim>,
    pub(crate) release: Release,
}

/// Adds the fields of `more` to `value`.
pub(crate) fn with(mut value: Value, more: Value) -> Value {
    for (key, field) in more.as_object().into_iter().flatten() {
        value[key] = field.clone();
    }
    value
}

pub(crate) fn node(name: &str) -> Node {
    let labels = json!({"kubernetes.io/hostname": name, "zone": "z1"});
    from_value(json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}))
        .expect("node")
}

/// A slice of this node, of generation 1, in a pool of one slice.
pub(crate) fn slice(name: &str, pool: &str, more: Value) -> Value {
    let spec = json!({
        "driver": DRIVER, "nodeName": NODE,
        "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1},
    });
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name},
        "spec": with(spec, more)})
}

pub(crate) fn pool_of(slices: i64, generation: i64, name: &str) -> Value {
    json!({"name": name, "generation": generation, "resourceSliceCount": slices})
}

pub(crate) fn device(name: &str) -> Value {
    json!({"name": name})
}

pub(crate) fn devices(names: &[&str]) -> Value {
    names.iter().map(|name| device(name)).collect()
}

pub(crate) fn class(name: &str, expressions: &[&str]) -> Value {
    let selectors: Vec<_> = expressions.iter().map(|text| json!({"cel": {"expression": text}})).collect();
    json!({"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": name},
        "spec": {"selectors": selectors}})
}

/// A claim with this `spec.devices`.
pub(crate) fn claim(devices: Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"namespace": "ns", "name": "c", "uid": "u"}, "spec": {"devices": devices},
    })
}

/// A request for one device of the class `any`.
pub(crate) fn one(name: &str, more: Value) -> Value {
    json!({"name": name, "exactly": with(json!({"deviceClassName": "any"}), more)})
}

pub(crate) fn requests(requests: &[Value]) -> Value {
    claim(json!({"requests": requests}))
}

pub(crate) fn select(expression: &str) -> Value {
    json!({"selectors": [{"cel": {"expression": expression}}]})
}

/// A result of an allocated claim.
pub(crate) fn held(device: &str, more: Value) -> Value {
    with(json!({"request": "r", "driver": DRIVER, "pool": "p", "device": device}), more)
}

impl Cluster {
    /// A cluster with these slices, the class `any` that selects every device, and allocated claims.
    pub(crate) fn new(slices: &[Value], held: &[Value]) -> Self {
        let read = |value: &Value| from_value(value.clone()).expect("a slice");
        let mut cluster =
            Self { slices: slices.iter().map(read).collect(), ..Self::default() }.class(class("any", &[]));
        for (index, result) in held.iter().enumerate() {
            let status = json!({"allocation": {"devices": {"results": [result]}}});
            let holder = with(claim(json!({})), json!({"status": status}));
            let holder =
                with(holder, json!({"metadata": {"namespace": "ns", "name": format!("holder-{index}")}}));
            cluster.claims.push(from_value(holder).expect("a claim"));
        }
        cluster
    }

    pub(crate) fn class(mut self, class: Value) -> Self {
        self.classes.push(from_value(class).expect("a class"));
        self
    }

    pub(crate) fn allocate(&self, claim: &Value) -> Result<AllocationResult, AllocationError> {
        self.allocate_pod(&[claim]).map(|mut results| results.pop().expect("a result per claim"))
    }

    /// Allocates the claims of one pod.
    pub(crate) fn allocate_pod(&self, claims: &[&Value]) -> Result<Vec<AllocationResult>, AllocationError> {
        let node = node(NODE);
        let view = ClusterView {
            slices: &self.slices,
            classes: &self.classes,
            claims: &self.claims,
            node: &node,
            release: self.release,
        };
        let read = |claim: &&Value| from_value((*claim).clone()).expect("a claim");
        let claims: Vec<ResourceClaim> = claims.iter().map(read).collect();
        let mut shares = 0;
        allocate_pod(&view, &claims.iter().collect::<Vec<_>>(), &mut || {
            shares += 1;
            format!("share-{shares}")
        })
    }

    /// Allocates a claim and keeps the allocation.
    pub(crate) fn take(&mut self, name: &str, claim: &Value) -> Result<AllocationResult, AllocationError> {
        let result = self.allocate(claim)?;
        let mut claim: ResourceClaim = from_value(claim.clone()).expect("a claim");
        claim.metadata.name = Some(name.to_owned());
        claim.status.get_or_insert_default().allocation = Some(result.clone());
        self.claims.push(claim);
        Ok(result)
    }

    /// Adds an allocated claim.
    pub(crate) fn hold(&mut self, claim: &Value) {
        self.claims.push(from_value(claim.clone()).expect("a claim"));
    }

    pub(crate) fn release(&mut self, name: &str) {
        self.claims.retain(|claim| claim.metadata.name.as_deref() != Some(name));
    }
}

/// The devices of an allocation as `request=device`.
pub(crate) fn picked(result: &AllocationResult) -> Vec<String> {
    let results = result.devices.iter().flat_map(|devices| devices.results.iter().flatten());
    results.map(|result| format!("{}={}", result.request, result.device)).collect()
}

pub(crate) fn check(cluster: &Cluster, claim: &Value, expected: &[&str]) {
    match cluster.allocate(claim) {
        Ok(result) => assert_eq!(picked(&result), expected, "{claim}"),
        Err(why) => panic!("{why}"),
    }
}

pub(crate) fn check_not(cluster: &Cluster, claim: &Value, why: &str) {
    let found = cluster.allocate(claim).map(|result| picked(&result)).expect_err("no allocation").to_string();
    assert!(found.contains(why), "{found}");
}
