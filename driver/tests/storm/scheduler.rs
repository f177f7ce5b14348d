//! The scheduler's part: admission, then the offline allocator over what the
//! daemon has really published.

use crate::harness::{DRIVER, NODE, World};
use divvy_api::check::{self, Objects, Severity};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use serde_json::{Value, json};

/// What the scheduler knows beside the API server.
pub(crate) struct Scheduler {
    node: Node,
    classes: Vec<DeviceClass>,
    shares: usize,
}

/// What becomes of a claim before a node hears of it.
pub(crate) enum Decision {
    /// Admission would not let it in.
    Refused(String),
    /// It waits: nothing fits.
    Pending,
    Allocated(Box<AllocationResult>),
}

impl Scheduler {
    /// With the classes of the chart.
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
            classes: ["gpu", "mig", "timeslice", "mps"].map(class).into(),
            shares: 0,
        }
    }

    /// Decides; `sees` says which claims the scheduler knows of.
    pub(crate) fn decide(
        &mut self,
        world: &World,
        name: &str,
        devices: &Value,
        sees: impl Fn(&str) -> bool,
    ) -> Decision {
        let object = claim(name, devices);
        let findings = check::object(object.to_string().as_bytes(), &Objects::default()).unwrap();
        if let Some(finding) = findings.into_iter().find(|finding| finding.severity == Severity::Error) {
            return Decision::Refused(finding.message);
        }
        let mut claims = world.api.list::<ResourceClaim>();
        claims.retain(|claim| claim.metadata.name.as_deref().is_some_and(&sees));
        let slices = world.api.list::<ResourceSlice>();
        let seen =
            divvy_alloc::World { slices: &slices, classes: &self.classes, claims: &claims, node: &self.node };
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

/// A claim as somebody wrote it; UID and name are the same text.
pub(crate) fn claim(name: &str, devices: &Value) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "ns", "name": name, "uid": name},
        "spec": {"devices": devices},
    })
}
