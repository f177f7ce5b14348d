//! What the server would keep, asked before anything is published.
//!
//! A server with a feature off drops its fields without a word, in a dry run as
//! in earnest. A pair of slices with every kind of field that we publish is
//! sent as a dry run; what comes back is what the server can do.

use crate::pool::Support;
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Counter, CounterSet, Device, DeviceCapacity,
    DeviceCounterConsumption, DeviceTaint, ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use std::collections::BTreeMap;

/// One slice with a counter set, one with a device that draws from it and that
/// several claims may hold.
pub(super) fn pair(driver: &str, node: &str) -> [ResourceSlice; 2] {
    let counters = BTreeMap::from([("memory".to_owned(), Counter { value: Quantity("1".to_owned()) })]);
    let amount = |count: u32| Quantity(count.to_string());
    let shares = DeviceCapacity {
        value: amount(2),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(amount(1)),
            valid_range: Some(CapacityRequestPolicyRange {
                min: amount(1),
                max: None,
                step: Some(amount(1)),
            }),
            valid_values: None,
        }),
    };
    let device = Device {
        name: "probe".to_owned(),
        allow_multiple_allocations: Some(true),
        capacity: Some(BTreeMap::from([("shares".to_owned(), shares)])),
        consumes_counters: Some(vec![DeviceCounterConsumption {
            counter_set: "probe".to_owned(),
            counters: counters.clone(),
            ..DeviceCounterConsumption::default()
        }]),
        taints: Some(vec![DeviceTaint {
            key: format!("{driver}/probe"),
            effect: "NoSchedule".to_owned(),
            ..DeviceTaint::default()
        }]),
        ..Device::default()
    };
    let set = CounterSet { name: "probe".to_owned(), counters };
    [(Some(vec![set]), None), (None, Some(vec![device]))].map(|(shared_counters, devices)| ResourceSlice {
        metadata: ObjectMeta { generate_name: Some("probe-".to_owned()), ..ObjectMeta::default() },
        spec: ResourceSliceSpec {
            driver: driver.to_owned(),
            node_name: Some(node.to_owned()),
            pool: ResourcePool { name: node.to_owned(), generation: 0, resource_slice_count: 2 },
            shared_counters,
            devices,
            ..ResourceSliceSpec::default()
        },
    })
}

/// What the answers tell; a refused slice is absent.
pub(super) fn support(counters: Option<&ResourceSlice>, devices: Option<&ResourceSlice>) -> Support {
    let device = devices.and_then(|slice| slice.spec.devices.as_ref()?.first());
    Support {
        counters: counters.is_some_and(|slice| slice.spec.shared_counters.is_some())
            && device.is_some_and(|device| device.consumes_counters.is_some()),
        shares: device.is_some_and(|device| {
            device.allow_multiple_allocations == Some(true)
                && device.capacity.iter().flatten().any(|(_, capacity)| capacity.request_policy.is_some())
        }),
        taints: device.is_some_and(|device| device.taints.is_some()),
    }
}

/// What a server lacks, and what is published therefore.
pub(super) fn degraded(support: Support, version: &str) -> Option<String> {
    let lacks = [
        (
            support.counters,
            "shared counters (only whole GPUs and the MIG instances that exist are published, no shares, no time-slices and no MPS)",
        ),
        (
            support.shares,
            "consumable capacity (GPUs and MIG instances go to one claim at a time, no time-slices and no MPS are published)",
        ),
        (support.taints, "device taints (devices that must not be handed out are not published)"),
    ];
    let lacks: Vec<&str> = lacks.into_iter().filter_map(|(has, what)| (!has).then_some(what)).collect();
    (!lacks.is_empty()).then(|| format!("API server {version} does not keep {}", lacks.join(", nor ")))
}
