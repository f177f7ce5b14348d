//! An index of the kinds of devices that the cluster's nodes publish.
//!
//! A thousand nodes with eight GPUs each publish 250 MB of slices, so the index is built from the
//! metadata of slices. Slices with the same annotation have the same kinds of devices, and one of
//! them is read; a slice without the annotation is read itself. The index decides what to read, and
//! [`crate::slice_watch`] reads. Annotations are checked against what is read, so that a node cannot
//! change what other nodes offer. One sample device per kind remains, to evaluate class selectors.

use crate::profile::Profile;
use divvy_slices::kinds::{Facts, Kind, annotation, fingerprint};
use k8s_openapi::api::resource::v1::{Device, DeviceAttribute, DeviceCapacity};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// Limit of stored sample devices, about 3 MB. A cluster has a few for each product and driver
/// version. Further kinds still offer their profile, but no class is evaluated on them.
const SAMPLES_MAX: usize = 1000;

/// A summary of the devices that the cluster's nodes publish.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceSummary {
    pub profiles: BTreeSet<Profile>,
    /// One device of each kind.
    pub samples: Vec<Device>,
}

/// The metadata of a ResourceSlice, as far as the index needs it.
#[derive(Clone, Debug, Deserialize)]
pub struct SliceMetadata {
    #[serde(deserialize_with = "short")]
    pub(crate) metadata: ObjectMeta,
}

/// A ResourceSlice, reduced while it is parsed.
#[derive(Clone, Debug, Deserialize)]
pub struct Slice {
    #[serde(deserialize_with = "short")]
    metadata: ObjectMeta,
    spec: SliceSpec,
}

#[derive(Clone, Debug, Deserialize)]
struct SliceSpec {
    /// The first device of each kind.
    #[serde(default, deserialize_with = "kinds")]
    devices: BTreeMap<Kind, Device>,
}

/// Keeps what identifies a slice. Managed fields would take most of the memory of a list.
fn short<'de, D: Deserializer<'de>>(json: D) -> Result<ObjectMeta, D::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Short {
        name: Option<String>,
        resource_version: Option<String>,
        annotations: Option<BTreeMap<String, String>>,
        owner_references: Option<Vec<OwnerReference>>,
    }
    let Short { name, resource_version, annotations, owner_references } = Short::deserialize(json)?;
    Ok(ObjectMeta { name, resource_version, annotations, owner_references, ..ObjectMeta::default() })
}

/// The resource version as a number, which grows with each change. 0 if it is not a number.
fn version(metadata: &ObjectMeta) -> u64 {
    metadata.resource_version.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0)
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
                if let Some(kind) = Kind::of(&device.attributes) {
                    kinds.entry(kind).or_insert_with(|| device.into());
                }
            }
            Ok(kinds)
        }
    }
    json.deserialize_any(Fold)
}

impl kube::Resource for SliceMetadata {
    type DynamicType = ();
    type Scope = kube::core::ClusterResourceScope;

    fn metadata_api() -> bool {
        true
    }

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

/// The question that a read answers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Need {
    /// The kinds behind a fingerprint, from any slice with it in its annotation.
    Kinds(Arc<str>),
    /// The kinds of this slice.
    Slice(String),
}

/// A slice to read.
#[derive(Debug)]
pub struct Read {
    pub slice: String,
    need: Need,
}

#[derive(Debug, Default)]
struct Waiting {
    slices: BTreeSet<String>,
    /// Whether one of them is being read.
    is_read: bool,
}

#[derive(Debug, Default)]
struct IndexedSlice {
    version: u64,
    /// Fingerprint of its kinds: as of the last read or known annotation. `None` before the first.
    kinds: Option<Arc<str>>,
    need: Option<Need>,
    /// An annotation that turned out not to name the kinds of the slice.
    wrong: Option<String>,
}

/// The kinds behind a fingerprint, with a sample device of each.
#[derive(Debug)]
struct Kinds {
    devices: Vec<(Kind, Option<Device>)>,
    /// The number of slices that have them.
    slices: usize,
}

/// Built from the events of a watch and from reads; [`Self::summary`] is its result.
#[derive(Debug, Default)]
pub struct DeviceIndex {
    slices: BTreeMap<String, IndexedSlice>,
    /// By fingerprint.
    kinds: BTreeMap<Arc<str>, Kinds>,
    /// Never with an empty set of slices.
    needs: BTreeMap<Need, Waiting>,
    /// Slice names that were listed since [`Self::relist`].
    listed: Option<BTreeSet<String>>,
    /// Stored sample devices.
    samples: usize,
    /// Increases when the summary may have changed. Most changes of slices do not change it.
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

    /// Adds or updates a slice. It keeps the kinds that it had until the new ones are known.
    pub fn apply(&mut self, slice: &SliceMetadata) {
        let Some(name) = &slice.metadata.name else { return };
        if let Some(listed) = &mut self.listed {
            listed.insert(name.clone());
        }
        let version = version(&slice.metadata);
        if let Some(before) = self.slices.get(name) {
            // A read can be newer than an event. After a restore of etcd, a list can be older.
            let is_old =
                if self.listed.is_some() { version == before.version } else { version <= before.version };
            if version > 0 && is_old {
                return;
            }
        }
        let indexed = self.slices.entry(name.clone()).or_default();
        indexed.version = version;
        match annotation(&slice.metadata).filter(|named| indexed.wrong.as_deref() != Some(named)) {
            Some(named) => match self.kinds.get_key_value(named).map(|(known, _)| known.clone()) {
                Some(known) => self.assign(name, &known),
                None => self.wait(name, Need::Kinds(named.into())),
            },
            None => self.wait(name, Need::Slice(name.clone())),
        }
    }

    /// Removes a slice.
    pub fn delete(&mut self, slice: &SliceMetadata) {
        if let Some(name) = &slice.metadata.name {
            self.remove(name);
        }
    }

    /// Whether a slice must be read that is not being read yet.
    pub fn has_next_read(&self) -> bool {
        self.needs.values().any(|waiting| !waiting.is_read)
    }

    /// Whether the kinds of all slices are known.
    pub fn is_complete(&self) -> bool {
        self.needs.is_empty()
    }

    /// The next slice to read. [`Self::read`] or [`Self::retry`] must follow.
    pub fn next_read(&mut self) -> Option<Read> {
        let (need, waiting) = self.needs.iter_mut().find(|(_, waiting)| !waiting.is_read)?;
        let slice = waiting.slices.first()?.clone();
        waiting.is_read = true;
        Some(Read { slice, need: need.clone() })
    }

    /// Repeats a failed read later.
    pub fn retry(&mut self, read: &Read) {
        if let Some(waiting) = self.needs.get_mut(&read.need) {
            waiting.is_read = false;
        }
    }

    /// Adds what was read. `None` if the slice is gone; its deletion follows as an event.
    pub fn read(&mut self, read: &Read, found: Option<Slice>) {
        self.retry(read);
        let Some(indexed) = self.slices.get_mut(&read.slice) else { return };
        let Some(slice) = found else {
            if indexed.need.as_ref() == Some(&read.need) {
                self.satisfy(&read.slice);
            }
            return;
        };
        let found: Arc<str> = fingerprint(slice.spec.devices.values().filter_map(Facts::of)).into();
        // An event that came during the read can be newer.
        let is_newest = indexed.version <= version(&slice.metadata);
        if is_newest {
            indexed.version = version(&slice.metadata);
            let named = annotation(&slice.metadata);
            indexed.wrong = named.filter(|named| **named != *found).map(str::to_owned);
        }
        let waiting = self.needs.get(&Need::Kinds(found.clone())).map(|waiting| waiting.slices.clone());
        let mut slices = waiting.unwrap_or_default();
        slices.extend(is_newest.then(|| read.slice.clone()));
        if !slices.is_empty() {
            self.learn(&found, slice.spec.devices);
        }
        for name in slices {
            self.assign(&name, &found);
        }
    }

    fn remove(&mut self, name: &str) {
        self.satisfy(name);
        if let Some(kinds) = self.slices.remove(name).and_then(|slice| slice.kinds) {
            self.release(&kinds);
        }
    }

    /// Marks a slice to be read.
    fn wait(&mut self, name: &str, need: Need) {
        let Some(slice) = self.slices.get(name).filter(|slice| slice.need.as_ref() != Some(&need)) else {
            return;
        };
        if slice.need.is_some() {
            self.satisfy(name);
        }
        self.needs.entry(need.clone()).or_default().slices.insert(name.to_owned());
        if let Some(slice) = self.slices.get_mut(name) {
            slice.need = Some(need);
        }
    }

    /// Ends the wait of a slice.
    fn satisfy(&mut self, name: &str) {
        let Some(need) = self.slices.get_mut(name).and_then(|slice| slice.need.take()) else { return };
        if let Some(waiting) = self.needs.get_mut(&need) {
            waiting.slices.remove(name);
            if waiting.slices.is_empty() {
                self.needs.remove(&need);
            }
        }
    }

    /// Sets the kinds of a slice. They must be known.
    fn assign(&mut self, name: &str, kinds: &Arc<str>) {
        self.satisfy(name);
        let Some(slice) = self.slices.get_mut(name) else { return };
        if slice.kinds.as_ref() == Some(kinds) {
            return;
        }
        let before = slice.kinds.replace(kinds.clone());
        if let Some(kinds) = self.kinds.get_mut(kinds) {
            kinds.slices += 1;
        }
        if let Some(before) = before {
            self.release(&before);
        }
    }

    fn learn(&mut self, fingerprint: &Arc<str>, devices: BTreeMap<Kind, Device>) {
        if self.kinds.contains_key(fingerprint) {
            return;
        }
        let mut left = SAMPLES_MAX.saturating_sub(self.samples);
        let sample = |(kind, device)| {
            let sample = (left > 0).then_some(device);
            left -= usize::from(sample.is_some());
            (kind, sample)
        };
        let kinds = Kinds { devices: devices.into_iter().map(sample).collect(), slices: 0 };
        self.samples += kinds.samples();
        self.kinds.insert(fingerprint.clone(), kinds);
        self.revision += 1;
    }

    /// Forgets kinds that no slice has any more.
    fn release(&mut self, fingerprint: &Arc<str>) {
        let Some(kinds) = self.kinds.get_mut(fingerprint) else { return };
        kinds.slices -= 1;
        if kinds.slices == 0 {
            self.samples -= kinds.samples();
            self.kinds.remove(fingerprint);
            self.revision += 1;
        }
    }

    /// Number of indexed slices.
    pub fn slices(&self) -> usize {
        self.slices.len()
    }

    /// The current summary.
    pub fn summary(&self) -> DeviceSummary {
        let mut samples = BTreeMap::new();
        let mut profiles = BTreeSet::new();
        for (kind, device) in self.kinds.values().flat_map(|kinds| &kinds.devices) {
            if let Some(device) = device {
                samples.entry(kind).or_insert(device);
            }
            let profile = kind.profile.as_deref().filter(|_| kind.type_ == "mig");
            profiles.extend(profile.and_then(Profile::parse));
        }
        DeviceSummary { profiles, samples: samples.into_values().cloned().collect() }
    }
}

impl Kinds {
    fn samples(&self) -> usize {
        self.devices.iter().filter(|(_, device)| device.is_some()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_api::names::DRIVER;
    use divvy_slices::kinds::ANNOTATION;
    use serde_json::{Value, json};

    /// The slices of a simulated server, by name: version, annotation and devices.
    #[derive(Default)]
    struct Server {
        slices: BTreeMap<String, Value>,
        version: u64,
        /// Names of the slices that were read.
        reads: Vec<String>,
    }

    impl Server {
        /// Writes a slice as a current publisher does. Returns its event.
        fn put(&mut self, name: &str, devices: &[(&str, &str)]) -> SliceMetadata {
            let slice = self.put_annotated(name, devices, None);
            let read: Slice = serde_json::from_value(self.slices[name].clone()).unwrap();
            let right = fingerprint(read.spec.devices.values().filter_map(Facts::of));
            self.slices.get_mut(name).unwrap()["metadata"]["annotations"] = json!({ANNOTATION: right});
            drop(slice);
            self.event(name)
        }

        /// Writes a slice with this annotation, or none.
        fn put_annotated(
            &mut self,
            name: &str,
            devices: &[(&str, &str)],
            kinds: Option<&str>,
        ) -> SliceMetadata {
            self.version += 1;
            let device = |(type_, profile): &(&str, &str)| {
                let mut attributes = json!({"type": {"string": type_}, "productName": {"string": "H100"},
                    "uuid": {"string": name}});
                if !profile.is_empty() {
                    attributes["profile"] = json!({"string": profile});
                }
                json!({"name": "d", "attributes": attributes, "consumesCounters": [{"counterSet": "x",
                    "counters": {}}]})
            };
            let devices: Vec<Value> = devices.iter().map(device).collect();
            let annotations = kinds.map(|kinds| json!({ANNOTATION: kinds}));
            let slice = json!({
                "metadata": {"name": name, "resourceVersion": self.version.to_string(),
                    "annotations": annotations, "managedFields": [{"manager": "m"}]},
                "spec": {"driver": DRIVER, "devices": devices},
            });
            self.slices.insert(name.to_owned(), slice);
            self.event(name)
        }

        fn event(&self, name: &str) -> SliceMetadata {
            serde_json::from_value(self.slices[name].clone()).unwrap()
        }

        /// Makes all reads that the index needs.
        fn answer(&mut self, index: &mut DeviceIndex) {
            while let Some(read) = index.next_read() {
                self.reads.push(read.slice.clone());
                let found = self.slices.get(&read.slice).cloned();
                index.read(&read, found.map(|slice| serde_json::from_value(slice).unwrap()));
            }
            assert!(index.is_complete() && !index.has_next_read());
        }

        fn take_reads(&mut self) -> usize {
            std::mem::take(&mut self.reads).len()
        }
    }

    #[track_caller]
    fn check(index: &DeviceIndex, profiles: &[&str], samples: usize) {
        let summary = index.summary();
        let found: Vec<&str> = summary.profiles.iter().map(Profile::as_str).collect();
        assert_eq!((found.as_slice(), summary.samples.len()), (profiles, samples));
    }

    #[test]
    fn profile_is_offered_while_a_slice_contains_it() {
        let (mut server, mut index) = (Server::default(), DeviceIndex::default());
        index.apply(&server.put("a", &[("gpu", ""), ("mig", "1g.10gb"), ("mig", "1g.10gb")]));
        index.apply(&server.put("b", &[("mig", "1g.10gb"), ("mig", "3g.40gb")]));
        server.answer(&mut index);
        check(&index, &["1g.10gb", "3g.40gb"], 3);
        let before = index.revision;
        index.apply(&server.put("b", &[("mig", "1g.10gb"), ("mig", "3g.40gb")]));
        assert!(index.is_complete());
        assert_eq!(index.revision, before, "nothing has changed");
        index.apply(&server.put("b", &[("mig", "1g.10gb")]));
        check(&index, &["1g.10gb", "3g.40gb"], 3);
        server.answer(&mut index);
        assert!(index.revision > before);
        check(&index, &["1g.10gb"], 2);
        index.delete(&server.event("a"));
        check(&index, &["1g.10gb"], 1);
        index.delete(&server.event("b"));
        check(&index, &[], 0);
        assert_eq!((index.kinds.len(), index.samples), (0, 0));
    }

    #[test]
    fn equal_slices_lead_to_one_read() {
        let (mut server, mut index) = (Server::default(), DeviceIndex::default());
        index.relist();
        for node in 0..1000 {
            index.apply(&server.put(&format!("n{node}"), &[("gpu", ""), ("mig", "1g.10gb")]));
        }
        index.listed();
        server.answer(&mut index);
        assert_eq!((server.take_reads(), index.slices()), (1, 1000));
        check(&index, &["1g.10gb"], 2);
        index.apply(&server.put("new", &[("gpu", ""), ("mig", "1g.10gb")]));
        index.apply(&server.put("n0", &[("gpu", "")]));
        index.apply(&server.put("n1", &[("gpu", "")]));
        server.answer(&mut index);
        assert_eq!(server.take_reads(), 1, "one new fingerprint");
    }

    #[test]
    fn slice_without_annotation_is_read_once_per_change() {
        let (mut server, mut index) = (Server::default(), DeviceIndex::default());
        for name in ["a", "b", "c"] {
            index.apply(&server.put_annotated(name, &[("mig", "1g.10gb")], None));
        }
        server.answer(&mut index);
        assert_eq!((server.take_reads(), index.kinds.len()), (3, 1));
        check(&index, &["1g.10gb"], 1);
        index.relist();
        for name in ["a", "b", "c"] {
            index.apply(&server.event(name));
        }
        index.listed();
        index.apply(&server.put_annotated("a", &[("mig", "3g.40gb")], None));
        server.answer(&mut index);
        assert_eq!(server.take_reads(), 1);
        // The upgraded publisher adds the annotation.
        index.apply(&server.put("b", &[("mig", "1g.10gb")]));
        server.answer(&mut index);
        assert_eq!(server.take_reads(), 0);
        check(&index, &["1g.10gb", "3g.40gb"], 2);
    }

    #[test]
    fn wrong_annotation_concerns_only_its_slice() {
        let (mut server, mut index) = (Server::default(), DeviceIndex::default());
        let right = server.put("b", &[("mig", "1g.10gb")]);
        let named = annotation(&right.metadata).unwrap().to_owned();
        let wrong = server.put_annotated("a", &[("mig", "9g.90gb")], Some(&named));
        index.apply(&wrong);
        index.apply(&right);
        server.answer(&mut index);
        assert_eq!(std::mem::take(&mut server.reads), ["a", "b"]);
        check(&index, &["1g.10gb", "9g.90gb"], 2);
        // The slice itself is read from now on.
        let wrong = server.put_annotated("a", &[("mig", "3g.40gb")], Some(&named));
        index.apply(&wrong);
        server.answer(&mut index);
        assert_eq!(std::mem::take(&mut server.reads), ["a"]);
        check(&index, &["1g.10gb", "3g.40gb"], 2);
        index.apply(&server.put("a", &[("mig", "1g.10gb")]));
        server.answer(&mut index);
        check(&index, &["1g.10gb"], 1);
    }

    #[test]
    fn slice_can_vanish_or_change_while_it_is_read() {
        let (mut server, mut index) = (Server::default(), DeviceIndex::default());
        index.apply(&server.put("a", &[("mig", "1g.10gb")]));
        index.apply(&server.put("b", &[("mig", "1g.10gb")]));
        let read = index.next_read().unwrap();
        assert_eq!(read.slice, "a");
        assert!(index.next_read().is_none(), "one read at a time for a fingerprint");
        index.read(&read, None);
        let read = index.next_read().unwrap();
        assert_eq!(read.slice, "b");
        index.retry(&read);
        let read = index.next_read().unwrap();
        // An event overtakes the answer.
        let old: Slice = serde_json::from_value(server.slices["b"].clone()).unwrap();
        index.apply(&server.put("b", &[("mig", "3g.40gb")]));
        index.read(&read, Some(old));
        check(&index, &[], 0);
        server.answer(&mut index);
        check(&index, &["3g.40gb"], 1);
        // A read overtakes its event, and a deleted slice does not return.
        index.apply(&server.put_annotated("c", &[("gpu", "")], None));
        let event = server.put_annotated("c", &[("mig", "1g.10gb")], None);
        server.answer(&mut index);
        index.apply(&event);
        assert!(index.is_complete());
        check(&index, &["1g.10gb", "3g.40gb"], 2);
        index.apply(&server.put_annotated("c", &[("gpu", "")], None));
        let read = index.next_read().unwrap();
        index.delete(&event);
        index.read(&read, Some(serde_json::from_value(server.slices["c"].clone()).unwrap()));
        check(&index, &["3g.40gb"], 1);
        assert_eq!(index.kinds.len(), 1);
    }

    #[test]
    fn slices_missing_from_a_new_list_are_removed() {
        let (mut server, mut index) = (Server::default(), DeviceIndex::default());
        index.apply(&server.put("a", &[("mig", "1g.10gb")]));
        index.apply(&server.put("b", &[("mig", "3g.40gb")]));
        server.answer(&mut index);
        index.relist();
        index.apply(&server.put("b", &[("mig", "7g.80gb")]));
        server.answer(&mut index);
        check(&index, &["1g.10gb", "7g.80gb"], 2);
        index.listed();
        check(&index, &["7g.80gb"], 1);
    }

    #[test]
    fn samples_are_limited_and_profiles_are_not() {
        let (mut server, mut index) = (Server::default(), DeviceIndex::default());
        for n in 0..2 * SAMPLES_MAX {
            let profile = format!("1g.{}gb", n + 1);
            index.apply(&server.put(&format!("n{n}"), &[("mig", &profile)]));
        }
        server.answer(&mut index);
        let summary = index.summary();
        assert_eq!((summary.samples.len(), summary.profiles.len()), (SAMPLES_MAX, 2 * SAMPLES_MAX));
        for slice in server.slices.keys() {
            index.delete(&server.event(slice));
        }
        assert_eq!((index.samples, index.kinds.len()), (0, 0));
    }

    #[test]
    fn slices_and_devices_without_a_type_are_ignored() {
        let mut index = DeviceIndex::default();
        for spec in [json!({}), json!({"devices": null}), json!({"devices": [{"name": "x"}]})] {
            let slice = json!({"metadata": {"name": "a"}, "spec": spec});
            index.apply(&serde_json::from_value(slice.clone()).unwrap());
            let read = index.next_read().unwrap();
            index.read(&read, Some(serde_json::from_value(slice).unwrap()));
        }
        check(&index, &[], 0);
    }
}
