//! Devices and slices as the API takes them, with their long parts shared.
//!
//! A device is about a hundred short texts, and those of a node say nearly the
//! same: instances of a profile differ from each other by a memory slice, those of
//! two GPUs by an address. The types of `k8s-openapi` own every text, so each
//! device would have a copy of all of them, which is most of the time that a pool
//! takes, and megabytes on a node of many GPUs. Here the maps are shared, and
//! copied only when one device is to say something else. They are shared up to
//! the bytes that are sent; what the server sends has the types of `k8s-openapi`.
//!
//! Fields have the names and the order of the API's, so that the bytes are those
//! that its own types would give (see `tests/wire.rs`). All are here, those that
//! we never set too: what is on the server is compared, and may be published again.

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

/// What a device takes of a counter set; see [`api::DeviceCounterConsumption`].
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Consumption {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compatibility_groups: Option<Vec<String>>,
    pub counter_set: String,
    pub counters: Arc<BTreeMap<String, Counter>>,
}

impl Device {
    /// The attributes, to be changed for this device alone.
    pub(crate) fn attributes_mut(&mut self) -> &mut BTreeMap<String, DeviceAttribute> {
        Arc::make_mut(self.attributes.get_or_insert_default())
    }

    /// The capacities, to be changed for this device alone.
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

/// What one slice holds; at most one of the two is not empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Content {
    pub counters: Vec<CounterSet>,
    pub devices: Vec<Device>,
}

/// A slice to be written; see [`ResourceSlice`].
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
            // Never an empty list: the server counts it as devices that are there.
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
