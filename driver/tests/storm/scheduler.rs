//! The scheduler: admission checks, then the offline allocator on the slices that the daemon has published.

use crate::harness::{DRIVER, NODE, TestNode};
use divvy_api::check::{self, Objects, Severity};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use serde_json::{Value, json};

/// The scheduler's own state, besides the objects in the API server.
pub(crate) struct Scheduler {
    node: Node,
    classes: Vec<DeviceClass>,
    /// Number of shares so far, from which shareIDs are made.
    shares: usize,
}

/// The result of scheduling a claim.
pub(crate) enum Decision {
    /// Admission rejects the claim, for this reason.
    Refused(String),
    /// No free device matches.
    Pending,
    Allocated(Box<AllocationResult>),
}

impl Scheduler {
    /// A scheduler with the DeviceClasses of the chart.
    pub(crate) fn new() -> Self {
        let class = |kind: &str| {
            let ours = format!("device.driver == '{DRIVER}'");
            let kind_is = format!("device.attributes['{DRIVER}'].type == '{kind}'");
            let selector = json!({"cel": {"expression": format!("{ours} && {kind_is}")}});
            let class = json!({
                "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
                "metadata": {"name": format!("{kind}.divvy.dev")}, "spec": {"selectors": [selector]},
            });
            serde_json::from_value(class).unwrap()
        };
        let node = json!({"metadata": {"name": NODE}});
        Self {
            node: serde_json::from_value(node).unwrap(),
            classes: ["gpu", "share", "mig", "timeslice", "mps"].map(class).into(),
            shares: 0,
        }
    }

    /// Checks and allocates a claim. `sees` selects the claims that the scheduler knows, by name.
    pub(crate) fn decide(
        &mut self,
        node: &TestNode,
        name: &str,
        devices: &Value,
        sees: impl Fn(&str) -> bool,
    ) -> Decision {
        let object = claim(name, devices);
        let findings = check::object(object.to_string().as_bytes(), &Objects::default()).unwrap();
        if let Some(finding) = findings.into_iter().find(|finding| finding.severity == Severity::Error) {
            return Decision::Refused(finding.message);
        }
        let mut claims = node.api.list::<ResourceClaim>();
        claims.retain(|claim| claim.metadata.name.as_deref().is_some_and(&sees));
        let slices = node.api.list::<ResourceSlice>();
        let seen = divvy_alloc::ClusterView {
            slices: &slices,
            classes: &self.classes,
            claims: &claims,
            node: &self.node,
            release: divvy_alloc::Release::default(),
        };
        let object: ResourceClaim = serde_json::from_value(object).unwrap();
        let mut share = || {
            self.shares += 1;
            format!("share-{}", self.shares)
        };
        match divvy_alloc::allocate(&seen, &object, &mut share) {
            Ok(allocation) => Decision::Allocated(Box::new(allocation)),
            Err(_) => Decision::Pending,
        }
    }
}

/// A claim as a user writes it. Its UID equals its name.
pub(crate) fn claim(name: &str, devices: &Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "ns", "name": name, "uid": name},
        "spec": {"devices": devices},
    })
}
