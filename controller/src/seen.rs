//! What the cluster's nodes offer, as little of it as is needed.
//!
//! A thousand nodes with eight GPUs each publish a quarter of a gigabyte of slices.
//! None is kept: a device becomes its [`Kind`] while its JSON is read, a slice
//! becomes the set of kinds in it, and of each kind one device is kept as it was
//! published, for the question which devices a class selects.

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

/// What makes two devices alike to whoever selects one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Kind {
    /// `gpu`, `mig`, `timeslice`, `mps`.
    type_: String,
    product: String,
    profile: Option<String>,
}

/// What is offered somewhere in the cluster.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Offer {
    pub profiles: BTreeSet<Profile>,
    /// One device of each kind.
    pub samples: Vec<Device>,
}

/// A ResourceSlice, reduced while it is read.
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

/// The parts of a device that a selector can ask for.
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

/// The projection: fed with the events of a watch, asked for the [`Offer`].
#[derive(Debug, Default)]
pub struct Seen {
    /// Kinds by slice.
    slices: BTreeMap<String, Vec<Arc<Kind>>>,
    /// One device of each kind, and in how many slices the kind is.
    samples: BTreeMap<Arc<Kind>, (Device, usize)>,
    /// Names listed since [`Seen::relist`].
    listed: Option<BTreeSet<String>>,
    /// Counts changes of what is offered; most changes of slices are none.
    pub revision: u64,
}

impl Seen {
    /// A list begins: what it does not name is gone when it ends.
    pub fn relist(&mut self) {
        self.listed = Some(BTreeSet::new());
    }

    /// The list has ended.
    pub fn listed(&mut self) {
        let Some(listed) = self.listed.take() else { return };
        let gone: Vec<String> = self.slices.keys().filter(|name| !listed.contains(*name)).cloned().collect();
        for name in gone {
            self.remove(&name);
        }
    }

    /// A slice is there, or has changed.
    pub fn apply(&mut self, slice: Slice) {
        let Some(name) = slice.metadata.name else { return };
        let mut kinds = Vec::with_capacity(slice.spec.devices.len());
        for (kind, device) in slice.spec.devices {
            let known = self.samples.get_key_value(&kind).map(|(kind, _)| kind.clone());
            let kind = known.unwrap_or_else(|| {
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

    /// A slice is gone.
    pub fn delete(&mut self, slice: &Slice) {
        if let Some(name) = &slice.metadata.name {
            self.remove(name);
        }
    }

    fn remove(&mut self, name: &str) {
        let before = self.slices.remove(name);
        self.release(before.unwrap_or_default());
    }

    /// Drops the samples of kinds that no slice has any more.
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

    /// How many slices it covers.
    pub fn slices(&self) -> usize {
        self.slices.len()
    }

    /// What is offered now.
    pub fn offer(&self) -> Offer {
        let profiles = self.samples.keys().filter(|kind| kind.type_ == "mig");
        let profiles = profiles.filter_map(|kind| Profile::parse(kind.profile.as_deref()?));
        let samples = self.samples.values().map(|(device, _)| device.clone());
        Offer { profiles: profiles.collect(), samples: samples.collect() }
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
            json!({"name": "d", "attributes": attributes, "consumesCounters": [{"counterSet": "x", "counters": {}}]})
        };
        let devices: Vec<Value> = devices.iter().map(device).collect();
        serde_json::from_value(
            json!({"metadata": {"name": name}, "spec": {"driver": DRIVER, "devices": devices}}),
        )
        .unwrap()
    }

    #[track_caller]
    fn check(seen: &Seen, profiles: &[&str], samples: usize) {
        let offer = seen.offer();
        let found: Vec<&str> = offer.profiles.iter().map(Profile::as_str).collect();
        assert_eq!((found.as_slice(), offer.samples.len()), (profiles, samples));
    }

    #[test]
    fn a_profile_is_offered_while_some_slice_has_it() {
        let mut seen = Seen::default();
        seen.apply(slice("a", &[("gpu", ""), ("mig", "1g.10gb"), ("mig", "1g.10gb")]));
        seen.apply(slice("b", &[("mig", "1g.10gb"), ("mig", "3g.40gb")]));
        check(&seen, &["1g.10gb", "3g.40gb"], 3);
        let before = seen.revision;
        seen.apply(slice("b", &[("mig", "1g.10gb"), ("mig", "3g.40gb")]));
        assert_eq!(seen.revision, before, "nothing has changed");
        seen.apply(slice("b", &[("mig", "1g.10gb")]));
        assert!(seen.revision > before);
        check(&seen, &["1g.10gb"], 2);
        seen.delete(&slice("a", &[]));
        check(&seen, &["1g.10gb"], 1);
        seen.delete(&slice("b", &[]));
        check(&seen, &[], 0);
    }

    #[test]
    fn what_a_new_list_does_not_name_is_gone() {
        let mut seen = Seen::default();
        seen.apply(slice("a", &[("mig", "1g.10gb")]));
        seen.apply(slice("b", &[("mig", "3g.40gb")]));
        seen.relist();
        seen.apply(slice("b", &[("mig", "7g.80gb")]));
        check(&seen, &["1g.10gb", "7g.80gb"], 2);
        seen.listed();
        check(&seen, &["7g.80gb"], 1);
    }

    #[test]
    fn slices_without_devices_and_devices_of_no_type_are_nothing() {
        let mut seen = Seen::default();
        for spec in [json!({}), json!({"devices": null}), json!({"devices": [{"name": "x"}]})] {
            seen.apply(serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": spec})).unwrap());
        }
        check(&seen, &[], 0);
    }
}
