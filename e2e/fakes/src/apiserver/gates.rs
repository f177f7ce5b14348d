//! Feature gates: a server with a disabled gate silently drops its fields, unless the stored object
//! already has them. A policy of the cluster can remove annotations.

use super::rules::devices_mut;
use serde_json::Value;

/// The enabled features of the server; all by default, as in 1.37.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gates {
    /// `sharedCounters`, `consumesCounters`, `perDeviceNodeSelection`.
    pub partitionable_devices: bool,
    /// `allowMultipleAllocations`, and request policies, which need it.
    pub consumable_capacity: bool,
    /// `taints`.
    pub device_taints: bool,
    /// `bindsToNode`, `bindingConditions`, `bindingFailureConditions`.
    pub binding_conditions: bool,
    /// `metadata.annotations`, which a mutating policy can remove.
    pub annotations: bool,
}

impl Default for Gates {
    fn default() -> Self {
        Self {
            partitionable_devices: true,
            consumable_capacity: true,
            device_taints: true,
            binding_conditions: true,
            annotations: true,
        }
    }
}

impl Gates {
    /// Removes the fields of a slice that neither a gate nor the stored object allows.
    pub(crate) fn drop_fields(&self, slice: &mut Value, stored: Option<&Value>) {
        let used = |fields: &[&str]| stored.is_some_and(|old| fields.iter().any(|field| has(old, field)));
        let mut drop = |on: bool, of_spec: &[&str], of_device: &[&str]| {
            if on || used(of_spec) || used(of_device) {
                return;
            }
            for field in of_spec {
                remove(&mut slice["spec"], field);
            }
            for device in devices_mut(slice) {
                for field in of_device {
                    remove(device, field);
                }
            }
        };
        drop(
            self.partitionable_devices,
            &["sharedCounters", "perDeviceNodeSelection"],
            &["consumesCounters", "nodeName", "nodeSelector", "allNodes"],
        );
        drop(self.consumable_capacity, &[], &["allowMultipleAllocations"]);
        drop(self.device_taints, &[], &["taints"]);
        drop(self.binding_conditions, &[], &["bindsToNode", "bindingConditions", "bindingFailureConditions"]);
        if !self.annotations {
            remove(&mut slice["metadata"], "annotations");
        }
        if !self.consumable_capacity && !used(&["allowMultipleAllocations"]) {
            for device in devices_mut(slice) {
                for (_, capacity) in
                    device.get_mut("capacity").and_then(Value::as_object_mut).into_iter().flatten()
                {
                    remove(capacity, "requestPolicy");
                }
            }
        }
    }
}

fn remove(object: &mut Value, field: &str) {
    if let Some(map) = object.as_object_mut() {
        map.remove(field);
    }
}

/// Whether the spec of a slice, or one of its devices, has a field.
fn has(slice: &Value, field: &str) -> bool {
    let spec = &slice["spec"];
    !spec[field].is_null()
        || spec["devices"]
            .as_array()
            .is_some_and(|devices| devices.iter().any(|device| !device[field].is_null()))
}
