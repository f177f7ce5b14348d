//! An index of the devices that the cluster's nodes publish.
//!
//! A thousand nodes with eight GPUs each publish 250 MB of slices, so slices are not stored.
//! Each device is reduced to its [`Kind`] while its JSON is parsed, and a slice to its set of
//! kinds. One sample device per kind remains, to evaluate which devices a class selects.

use crate::profile::Profile;
use divvy_api::names::DRIVER;
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceCapacity};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// Devices of one kind are equal for the purposes of class selection.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    /// `gpu`, `mig`, `timeslice`, `mps`.
    type_: String,
    product: String,
    profile: Option<String>,
}

/// A summary of the devices that the cluster's nodes publish.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceSummary {
    pub profiles: BTreeSet<Profile>,
    /// One device of each kind.
    pub samples: Vec<Device>,
}

/// A ResourceSlice, reduced while it is parsed.
#[derive(Clone, Debug, Deserialize)]
pub struct Slice {
    metadata: ObjectMeta,
    spec: SliceSpec,
}

#[derive(Clone, Debug, Deserialize)]
struct SliceSpec {
    #[serde(default, deserialize_with = "kinds")]
    devices: BTreeMap<Kind, Device>,
}

/// The fields of a device that a selector can refer to.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Published {
    name: String,
    #[serde(default)]
    attributes: BTreeMap<String, DeviceAttribute>,
    #[serde(default)]
    capacity: BTreeMap<String, DeviceCapacity>,
    allow_multiple_allocations: Option<bool>,
}

impl Published {
    fn text(&self, attribute: &str) -> Option<String> {
        let value = self.attributes.get(attribute).or_else(|| {
            let (_, value) = self.attributes.iter().find(|(name, _)| {
                name.strip_prefix(DRIVER).and_then(|rest| rest.strip_prefix('/')) == Some(attribute)
            })?;
            Some(value)
        });
        value.and_then(|value| value.string.clone())
    }

    fn kind(&self) -> Option<Kind> {
        let type_ = self.text("type")?;
        let product = self.text("productName").unwrap_or_default();
        Some(Kind { type_, product, profile: self.text("profile") })
    }
}

impl From<Published> for Device {
    fn from(device: Published) -> Self {
        Self {
            name: device.name,
            attributes: Some(device.attributes),
            capacity: Some(device.capacity),
            allow_multiple_allocations: device.allow_multiple_allocations,
            ..Self::default()
        }
    }
}

fn kinds<'de, D: Deserializer<'de>>(json: D) -> Result<BTreeMap<Kind, Device>, D::Error> {
    struct Fold;
    impl<'de> Visitor<'de> for Fold {
        type Value = BTreeMap<Kind, Device>;

        fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
            out.write_str("devices")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(BTreeMap::new())
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut devices: A) -> Result<Self::Value, A::Error> {
            let mut kinds = BTreeMap::new();
            while let Some(device) = devices.next_element::<Published>()? {
                if let Some(kind) = device.kind() {
                    kinds.entry(kind).or_insert_with(|| device.into());
                }
            }
            Ok(kinds)
        }
    }
    json.deserialize_any(Fold)
}

impl kube::Resource for Slice {
    type DynamicType = ();
    type Scope = kube::core::ClusterResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        "ResourceSlice".into()
    }

    fn group(_: &()) -> Cow<'_, str> {
        "resource.k8s.io".into()
    }

    fn version(_: &()) -> Cow<'_, str> {
        "v1".into()
    }

    fn plural(_: &()) -> Cow<'_, str> {
        "resourceslices".into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

/// Built from the events of a watch; [`Self::summary`] is its result.
#[derive(Debug, Default)]
pub struct DeviceIndex {
    /// Kinds of each slice, by slice name.
    slices: BTreeMap<String, Vec<Arc<Kind>>>,
    /// One sample device of each kind, and the number of slices that contain the kind.
    samples: BTreeMap<Arc<Kind>, (Device, usize)>,
    /// Slice names that were listed since [`Self::relist`].
    listed: Option<BTreeSet<String>>,
    /// Increases when the summary changes. Most changes of slices do not change it.
    pub revision: u64,
}

impl DeviceIndex {
    /// Starts a list. Slices that it does not contain are removed when it ends.
    pub fn relist(&mut self) {
        self.listed = Some(BTreeSet::new());
    }

    /// Ends a list.
    pub fn listed(&mut self) {
        let Some(listed) = self.listed.take() else { return };
        let gone: Vec<String> = self.slices.keys().filter(|name| !listed.contains(*name)).cloned().collect();
        for name in gone {
            self.remove(&name);
        }
    }

    /// Adds or updates a slice.
    pub fn apply(&mut self, slice: Slice) {
        let Some(name) = slice.metadata.name else { return };
        let mut kinds = Vec::with_capacity(slice.spec.devices.len());
        for (kind, device) in slice.spec.devices {
            let existing = self.samples.get_key_value(&kind).map(|(kind, _)| kind.clone());
            let kind = existing.unwrap_or_else(|| {
                self.revision += 1;
                Arc::new(kind)
            });
            self.samples.entry(kind.clone()).or_insert((device, 0)).1 += 1;
            kinds.push(kind);
        }
        if let Some(listed) = &mut self.listed {
            listed.insert(name.clone());
        }
        let before = self.slices.insert(name, kinds);
        self.release(before.unwrap_or_default());
    }

    /// Removes a slice.
    pub fn delete(&mut self, slice: &Slice) {
        if let Some(name) = &slice.metadata.name {
            self.remove(name);
        }
    }

    fn remove(&mut self, name: &str) {
        let before = self.slices.remove(name);
        self.release(before.unwrap_or_default());
    }

    /// Drops the samples of kinds that no slice contains any more.
    fn release(&mut self, kinds: Vec<Arc<Kind>>) {
        for kind in kinds {
            if let Some((_, slices)) = self.samples.get_mut(&kind) {
                *slices -= 1;
                if *slices == 0 {
                    self.samples.remove(&kind);
                    self.revision += 1;
                }
            }
        }
    }

    /// Number of indexed slices.
    pub fn slices(&self) -> usize {
        self.slices.len()
    }

    /// The current summary.
    pub fn summary(&self) -> DeviceSummary {
        let profiles = self.samples.keys().filter(|kind| kind.type_ == "mig");
        let profiles = profiles.filter_map(|kind| Profile::parse(kind.profile.as_deref()?));
        let samples = self.samples.values().map(|(device, _)| device.clone());
        DeviceSummary { profiles: profiles.collect(), samples: samples.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn slice(name: &str, devices: &[(&str, &str)]) -> Slice {
        let device = |(type_, profile): &(&str, &str)| {
            let mut attributes = json!({"type": {"string": type_}, "productName": {"string": "H100"}});
            if !profile.is_empty() {
                attributes["profile"] = json!({"string": profile});
            }
            json!({"name": "d", "attributes": attributes, "consumesCounters": [{"counterSet": "x",
                "counters": {}}]})
        };
        let devices: Vec<Value> = devices.iter().map(device).collect();
        serde_json::from_value(
            json!({"metadata": {"name": name}, "spec": {"driver": DRIVER, "devices": devices}}),
        )
        .unwrap()
    }

    #[track_caller]
    fn check(index: &DeviceIndex, profiles: &[&str], samples: usize) {
        let summary = index.summary();
        let found: Vec<&str> = summary.profiles.iter().map(Profile::as_str).collect();
        assert_eq!((found.as_slice(), summary.samples.len()), (profiles, samples));
    }

    #[test]
    fn profile_is_offered_while_a_slice_contains_it() {
        let mut index = DeviceIndex::default();
        index.apply(slice("a", &[("gpu", ""), ("mig", "1g.10gb"), ("mig", "1g.10gb")]));
        index.apply(slice("b", &[("mig", "1g.10gb"), ("mig", "3g.40gb")]));
        check(&index, &["1g.10gb", "3g.40gb"], 3);
        let before = index.revision;
        index.apply(slice("b", &[("mig", "1g.10gb"), ("mig", "3g.40gb")]));
        assert_eq!(index.revision, before, "nothing has changed");
        index.apply(slice("b", &[("mig", "1g.10gb")]));
        assert!(index.revision > before);
        check(&index, &["1g.10gb"], 2);
        index.delete(&slice("a", &[]));
        check(&index, &["1g.10gb"], 1);
        index.delete(&slice("b", &[]));
        check(&index, &[], 0);
    }

    #[test]
    fn slices_missing_from_a_new_list_are_removed() {
        let mut index = DeviceIndex::default();
        index.apply(slice("a", &[("mig", "1g.10gb")]));
        index.apply(slice("b", &[("mig", "3g.40gb")]));
        index.relist();
        index.apply(slice("b", &[("mig", "7g.80gb")]));
        check(&index, &["1g.10gb", "7g.80gb"], 2);
        index.listed();
        check(&index, &["7g.80gb"], 1);
    }

    #[test]
    fn slices_and_devices_without_a_type_are_ignored() {
        let mut index = DeviceIndex::default();
        for spec in [json!({}), json!({"devices": null}), json!({"devices": [{"name": "x"}]})] {
            index.apply(serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": spec})).unwrap());
        }
        check(&index, &[], 0);
    }
}
