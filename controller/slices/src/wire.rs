//! Device and slice types that serialize like those of `k8s-openapi` but share their maps.
//!
//! The devices of a node have nearly the same attributes, capacities and counters. The types of
//! `k8s-openapi` own every string, so copies would dominate the time to build a pool and take
//! megabytes. These maps are shared until one device changes its own. Names and order of the
//! fields match the API, so the bytes are equal (`tests/wire.rs`). Fields that Divvy never sets
//! exist too, because content from the server is compared and may be published again.

use k8s_openapi::Resource;
use k8s_openapi::api::core::v1::NodeSelector;
use k8s_openapi::api::resource::v1::{
    self as api, Counter, CounterSet, DeviceAttribute, DeviceCapacity, DeviceTaint, NodeAllocatableResource,
    ResourcePool, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Serialize, Serializer};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A device; see [`api::Device`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all_nodes: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allow_multiple_allocations: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attributes: Option<Arc<BTreeMap<String, DeviceAttribute>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub binding_conditions: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub binding_failure_conditions: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub binds_to_node: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<Arc<BTreeMap<String, DeviceCapacity>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub consumes_counters: Option<Vec<Consumption>>,
    pub name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_allocatable_resources: Option<BTreeMap<String, NodeAllocatableResource>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_selector: Option<NodeSelector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub taints: Option<Vec<DeviceTaint>>,
}

/// The counters that a device takes from a set; see [`api::DeviceCounterConsumption`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Consumption {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compatibility_groups: Option<Vec<String>>,
    pub counter_set: String,
    pub counters: Arc<BTreeMap<String, Counter>>,
}

impl Device {
    /// The attributes, copied if shared, to change only this device.
    pub(crate) fn attributes_mut(&mut self) -> &mut BTreeMap<String, DeviceAttribute> {
        Arc::make_mut(self.attributes.get_or_insert_default())
    }

    /// The capacities, copied if shared, to change only this device.
    pub(crate) fn capacities_mut(&mut self) -> &mut BTreeMap<String, DeviceCapacity> {
        Arc::make_mut(self.capacity.get_or_insert_default())
    }
}

impl From<api::Device> for Device {
    fn from(device: api::Device) -> Self {
        Self {
            all_nodes: device.all_nodes,
            allow_multiple_allocations: device.allow_multiple_allocations,
            attributes: device.attributes.map(Arc::new),
            binding_conditions: device.binding_conditions,
            binding_failure_conditions: device.binding_failure_conditions,
            binds_to_node: device.binds_to_node,
            capacity: device.capacity.map(Arc::new),
            consumes_counters: device
                .consumes_counters
                .map(|consumptions| consumptions.into_iter().map(Consumption::from).collect()),
            name: device.name,
            node_allocatable_resources: device.node_allocatable_resources,
            node_name: device.node_name,
            node_selector: device.node_selector,
            taints: device.taints,
        }
    }
}

impl From<api::DeviceCounterConsumption> for Consumption {
    fn from(consumption: api::DeviceCounterConsumption) -> Self {
        let api::DeviceCounterConsumption { compatibility_groups, counter_set, counters } = consumption;
        Self { compatibility_groups, counter_set, counters: Arc::new(counters) }
    }
}

/// The content of one slice: counter sets or devices.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Content {
    pub counters: Vec<CounterSet>,
    pub devices: Vec<Device>,
}

/// A slice to write; see [`ResourceSlice`].
#[derive(Clone, Debug, PartialEq)]
pub struct Slice {
    pub metadata: ObjectMeta,
    pub driver: String,
    pub node: String,
    pub pool: ResourcePool,
    pub content: Content,
}

impl Serialize for Slice {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Object<'a> {
            api_version: &'a str,
            kind: &'a str,
            metadata: &'a ObjectMeta,
            spec: Spec<'a>,
        }
        #[derive(Serialize)]
        #[serde(rename_all = "camelCase")]
        struct Spec<'a> {
            // Never serialize an empty list: the server would treat the field as set.
            #[serde(skip_serializing_if = "<[Device]>::is_empty")]
            devices: &'a [Device],
            driver: &'a str,
            node_name: &'a str,
            pool: &'a ResourcePool,
            #[serde(skip_serializing_if = "<[CounterSet]>::is_empty")]
            shared_counters: &'a [CounterSet],
        }
        let Self { metadata, driver, node, pool, content: Content { counters, devices } } = self;
        let spec = Spec { devices, driver, node_name: node, pool, shared_counters: counters };
        Object { api_version: ResourceSlice::API_VERSION, kind: ResourceSlice::KIND, metadata, spec }
            .serialize(serializer)
    }
}
