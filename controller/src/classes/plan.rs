//! Plans one DeviceClass per MIG profile that a node offers. The functions are pure: they turn
//! profiles and existing classes into a list of writes.
//!
//! A managed class carries our label. If a user removes the label, Divvy never changes the class
//! again. Managed classes are owned by the chart's class `mig.divvy.dev`, so they are
//! garbage-collected with it; without that class none are created. A profile may disappear for a
//! moment, for instance while a kubelet restarts, so a class outlives it by a hold-off time.

use crate::profile::Profile;
use divvy_api::names::DRIVER;
use k8s_openapi::api::resource::v1::{CELDeviceSelector, DeviceClass, DeviceClassSpec, DeviceSelector};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The class that owns the managed classes.
pub const OWNER: &str = "mig.divvy.dev";
/// The label of managed classes.
pub const MANAGED_BY: (&str, &str) = ("app.kubernetes.io/managed-by", "divvy-controller");

/// All DeviceClasses, by name.
pub type Classes = BTreeMap<String, Arc<DeviceClass>>;

/// The writes to make, and the conflicts that prevent others.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub create: Vec<DeviceClass>,
    /// With the resource version that they replace.
    pub replace: Vec<DeviceClass>,
    /// As last observed.
    pub delete: Vec<Arc<DeviceClass>>,
    pub conflicts: Vec<NameConflict>,
}

/// A name that another owner already uses.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NameConflict {
    /// The name of the class.
    Class { class: String },
    /// The extended resource name.
    Resource { resource: String, ours: String, other: String },
}

/// Plans the writes for these profiles.
pub fn plan(profiles: &BTreeSet<Profile>, classes: &Classes, extended: bool) -> Plan {
    let mut plan = Plan::default();
    let owner = classes.get(OWNER).and_then(|class| class.metadata.uid.clone());
    let mut wanted: BTreeMap<String, &Profile> = BTreeMap::new();
    if owner.is_some() {
        wanted.extend(profiles.iter().map(|profile| (profile.class_name(), profile)));
    }
    for (name, profile) in &wanted {
        let there = classes.get(name);
        if there.is_some_and(|class| !is_ours(class)) {
            plan.conflicts.push(NameConflict::Class { class: name.clone() });
            continue;
        }
        let resource = extended.then(|| profile.resource_name());
        let other = resource.as_ref().and_then(|resource| class_with_resource(classes, resource));
        if let (Some(resource), Some(other)) = (&resource, &other) {
            let (resource, ours, other) = (resource.clone(), name.clone(), other.clone());
            plan.conflicts.push(NameConflict::Resource { resource, ours, other });
        }
        let resource = resource.filter(|_| other.is_none());
        let mut class = class(profile, owner.as_deref().unwrap_or_default(), resource);
        match there {
            None => plan.create.push(class),
            Some(there) if is_up_to_date(there, &class) => {}
            Some(there) => {
                class.metadata.resource_version = there.metadata.resource_version.clone();
                class.metadata.uid = there.metadata.uid.clone();
                plan.replace.push(class);
            }
        }
    }
    plan.delete = classes
        .iter()
        .filter(|(name, class)| is_ours(class) && !wanted.contains_key(*name))
        .map(|(_, class)| class.clone())
        .collect();
    plan
}

/// Whether a class carries our label.
pub fn is_ours(class: &DeviceClass) -> bool {
    let label = class.metadata.labels.as_ref().and_then(|labels| labels.get(MANAGED_BY.0));
    label.is_some_and(|value| value == MANAGED_BY.1)
}

/// A class of another owner with this extended resource name. The scheduler uses the newest of
/// several such classes, so a managed class would take over the other owner's pods.
fn class_with_resource(classes: &Classes, resource: &str) -> Option<String> {
    let holds = |class: &DeviceClass| extended_name(class) == Some(resource) && !is_ours(class);
    classes.iter().find(|(_, class)| holds(class)).map(|(name, _)| name.clone())
}

fn extended_name(class: &DeviceClass) -> Option<&str> {
    class.spec.as_ref().and_then(|spec| spec.extended_resource_name.as_deref())
}

fn class(profile: &Profile, owner: &str, resource: Option<String>) -> DeviceClass {
    let expression = format!(
        "device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'mig' && \
         device.attributes['{DRIVER}'].profile == '{profile}'"
    );
    let labels = [MANAGED_BY, ("app.kubernetes.io/part-of", "divvy")];
    let text = |(key, value): (&str, &str)| (key.to_owned(), value.to_owned());
    DeviceClass {
        metadata: ObjectMeta {
            name: Some(profile.class_name()),
            labels: Some(labels.map(text).into()),
            owner_references: Some(vec![OwnerReference {
                api_version: "resource.k8s.io/v1".to_owned(),
                kind: "DeviceClass".to_owned(),
                name: OWNER.to_owned(),
                uid: owner.to_owned(),
                ..OwnerReference::default()
            }]),
            ..ObjectMeta::default()
        },
        spec: Some(DeviceClassSpec {
            selectors: Some(vec![DeviceSelector { cel: Some(CELDeviceSelector { expression }) }]),
            extended_resource_name: resource,
            ..DeviceClassSpec::default()
        }),
    }
}

/// Whether the managed fields are equal. Labels and annotations may differ.
fn is_up_to_date(there: &DeviceClass, wanted: &DeviceClass) -> bool {
    there.spec == wanted.spec && there.metadata.owner_references == wanted.metadata.owner_references
}

/// Delays the removal of profiles that no node offers any more.
#[derive(Debug, Default)]
pub struct ProfileHoldOff {
    gone_since: BTreeMap<Profile, Instant>,
}

impl ProfileHoldOff {
    /// The profiles to keep classes for: the offered ones, and those that disappeared within the
    /// hold-off. Also returns when to call it again. `kept` are the profiles with a managed class.
    pub fn keep(
        &mut self,
        seen: &BTreeSet<Profile>,
        kept: &BTreeSet<Profile>,
        now: Instant,
        hold_off: Duration,
    ) -> (BTreeSet<Profile>, Option<Instant>) {
        self.gone_since.retain(|profile, _| !seen.contains(profile) && kept.contains(profile));
        for profile in kept.difference(seen) {
            self.gone_since.entry(profile.clone()).or_insert(now);
        }
        let mut keep = seen.clone();
        let mut next = None;
        for (profile, since) in &self.gone_since {
            let until = *since + hold_off;
            if now < until {
                keep.insert(profile.clone());
                next = Some(next.map_or(until, |next: Instant| next.min(until)));
            }
        }
        (keep, next)
    }
}

/// The profiles that have a managed class.
pub fn profiles_with_class(classes: &Classes) -> BTreeSet<Profile> {
    let ours = classes.values().filter(|class| is_ours(class));
    let selectors = ours.filter_map(|class| class.spec.as_ref()?.selectors.as_ref()?.first()?.cel.as_ref());
    let profile = |cel: &CELDeviceSelector| {
        let (_, rest) = cel.expression.split_once(".profile == '")?;
        Profile::parse(rest.strip_suffix('\'')?)
    };
    selectors.filter_map(profile).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profiles(names: &[&str]) -> BTreeSet<Profile> {
        names.iter().map(|name| Profile::parse(name).unwrap()).collect()
    }

    fn other(name: &str, resource: Option<&str>) -> (String, Arc<DeviceClass>) {
        let metadata = ObjectMeta { name: Some(name.into()), uid: Some(name.into()), ..Default::default() };
        let spec =
            DeviceClassSpec { extended_resource_name: resource.map(str::to_owned), ..Default::default() };
        (name.to_owned(), Arc::new(DeviceClass { metadata, spec: Some(spec) }))
    }

    /// Applies the plan as the API server would.
    fn apply(classes: &Classes, plan: &Plan) -> Classes {
        let mut classes = classes.clone();
        for class in plan.create.iter().chain(&plan.replace) {
            let name = class.metadata.name.clone().unwrap();
            classes.insert(name, Arc::new(class.clone()));
        }
        for class in &plan.delete {
            classes.remove(class.metadata.name.as_ref().unwrap());
        }
        classes
    }

    /// Checks the managed classes and their resource names, and that a second plan is empty.
    #[track_caller]
    fn check(
        profiles: &BTreeSet<Profile>,
        classes: &Classes,
        extended: bool,
        ours: &[(&str, Option<&str>)],
    ) -> Classes {
        let end = apply(classes, &plan(profiles, classes, extended));
        let second = plan(profiles, &end, extended);
        assert_eq!(
            (second.create, second.replace, second.delete),
            (vec![], vec![], vec![]),
            "the second plan is not empty"
        );
        let found: Vec<_> = end
            .iter()
            .filter(|(_, class)| is_ours(class))
            .map(|(name, class)| (name.as_str(), extended_name(class)))
            .collect();
        assert_eq!(found, ours);
        end
    }

    #[test]
    fn offered_profile_has_a_class_until_it_is_gone() {
        let start: Classes = [other(OWNER, None)].into();
        let ours = [
            ("mig-1g.10gb.divvy.dev", Some("nvidia.com/mig-1g.10gb")),
            ("mig-1g.10gb.me.divvy.dev", Some("nvidia.com/mig-1g.10gb.me")),
        ];
        let there = check(&profiles(&["1g.10gb", "1g.10gb+me"]), &start, true, &ours);
        assert_eq!(profiles_with_class(&there), profiles(&["1g.10gb", "1g.10gb+me"]));
        let there = check(&profiles(&["1g.10gb"]), &there, true, &ours[..1]);
        let there = check(&profiles(&["1g.10gb"]), &there, false, &[(ours[0].0, None)]);
        check(&profiles(&[]), &there, true, &[]);
    }

    #[test]
    fn classes_require_the_owning_class() {
        let there = check(
            &profiles(&["1g.10gb"]),
            &[other(OWNER, None)].into(),
            false,
            &[("mig-1g.10gb.divvy.dev", None)],
        );
        let class = &there["mig-1g.10gb.divvy.dev"];
        assert_eq!(class.metadata.owner_references.as_ref().unwrap()[0].uid, OWNER);
        let orphans = there.into_iter().filter(|(name, _)| name != OWNER).collect();
        check(&profiles(&["1g.10gb"]), &orphans, true, &[]);
        check(&profiles(&["1g.10gb"]), &Classes::new(), true, &[]);
    }

    #[test]
    fn class_of_another_owner_is_not_changed() {
        let start: Classes = [other(OWNER, None), other("mig-1g.10gb.divvy.dev", None)].into();
        let found = plan(&profiles(&["1g.10gb"]), &start, true);
        let conflicts = vec![NameConflict::Class { class: "mig-1g.10gb.divvy.dev".into() }];
        assert_eq!(found, Plan { conflicts, ..Plan::default() });
    }

    #[test]
    fn resource_name_of_another_owner_is_released() {
        let start: Classes = [other(OWNER, None)].into();
        let mut there = check(
            &profiles(&["1g.10gb"]),
            &start,
            true,
            &[("mig-1g.10gb.divvy.dev", Some("nvidia.com/mig-1g.10gb"))],
        );
        there.extend([other("theirs", Some("nvidia.com/mig-1g.10gb"))]);
        let conflicts = plan(&profiles(&["1g.10gb"]), &there, true).conflicts;
        assert!(
            matches!(&conflicts[..], [NameConflict::Resource { other, .. }] if other == "theirs"),
            "{conflicts:?}"
        );
        check(&profiles(&["1g.10gb"]), &there, true, &[("mig-1g.10gb.divvy.dev", None)]);
    }

    #[test]
    fn manual_edits_are_reverted() {
        let mut there = check(
            &profiles(&["1g.10gb"]),
            &[other(OWNER, None)].into(),
            false,
            &[("mig-1g.10gb.divvy.dev", None)],
        );
        let class = there.get_mut("mig-1g.10gb.divvy.dev").unwrap();
        let mut edited = (**class).clone();
        edited.spec = None;
        edited.metadata.resource_version = Some("7".into());
        *class = Arc::new(edited);
        let found = plan(&profiles(&["1g.10gb"]), &there, false);
        assert_eq!(found.replace[0].metadata.resource_version.as_deref(), Some("7"));
        assert!(found.replace[0].spec.is_some());
    }

    #[test]
    fn profile_that_returns_within_hold_off_keeps_its_class() {
        let (mut hold_off_state, start) = (ProfileHoldOff::default(), Instant::now());
        let hold_off = Duration::from_secs(60);
        let mut at = |second: u64, seen: &[&str], kept: &[&str]| {
            let now = start + Duration::from_secs(second);
            let (keep, next) = hold_off_state.keep(&profiles(seen), &profiles(kept), now, hold_off);
            (keep.len(), next.map(|next| (next - start).as_secs()))
        };
        assert_eq!(at(0, &["1g.10gb"], &[]), (1, None));
        assert_eq!(at(1, &[], &["1g.10gb"]), (1, Some(61)));
        assert_eq!(at(30, &["1g.10gb"], &["1g.10gb"]), (1, None));
        assert_eq!(at(31, &[], &["1g.10gb"]), (1, Some(91)));
        assert_eq!(at(91, &[], &["1g.10gb"]), (0, None));
        assert_eq!(at(92, &[], &[]), (0, None));
    }
}
