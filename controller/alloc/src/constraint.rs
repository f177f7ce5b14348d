//! Constraints between the devices of a claim: attributes that must match or differ. A constraint
//! has no state: it evaluates the whole list of picked devices, so backtracking restores nothing.

use crate::error::AllocationError;
use crate::pool::Candidate;
use k8s_openapi::api::resource::v1::{DeviceAttribute, DeviceConstraint};
use std::collections::BTreeSet;

/// The full name of a request (`gpu/sub`), and the name of its parent (`gpu`).
pub(crate) type RequestNames<'a> = (&'a str, &'a str);

/// A constraint of a claim.
#[derive(Debug)]
pub(crate) struct Constraint<'a> {
    /// Names of the covered requests; empty means all.
    requests: &'a [String],
    attribute: &'a str,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// All devices must have a value in common.
    Match,
    /// No two devices may have a value in common.
    Distinct,
}

/// A scalar value, or one item of a list value.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Item<'a> {
    Bool(bool),
    Int(i64),
    Text(&'a str),
    Version(&'a str),
}

impl<'a> Constraint<'a> {
    pub(crate) fn read(claim: &str, wire: &'a DeviceConstraint) -> Result<Self, AllocationError> {
        let (attribute, kind) = match (&wire.match_attribute, &wire.distinct_attribute) {
            (Some(attribute), None) => (attribute, Kind::Match),
            (None, Some(attribute)) => (attribute, Kind::Distinct),
            _ => {
                let cause = "a constraint needs matchAttribute or distinctAttribute".to_owned();
                return Err(AllocationError::Claim { claim: claim.to_owned(), cause });
            }
        };
        Ok(Self { requests: wire.requests.as_deref().unwrap_or_default(), attribute, kind })
    }

    /// Whether the picked devices satisfy the constraint. Each comes with its request's full name
    /// and the name of the parent request.
    pub(crate) fn allows<'b>(
        &self,
        picked: impl Iterator<Item = (RequestNames<'b>, &'b Candidate<'b>)>,
    ) -> bool {
        let mut common: Option<BTreeSet<Item<'b>>> = None;
        for (_, device) in picked.filter(|(names, _)| self.covers(*names)) {
            let items = lookup(device, self.attribute).map(items).unwrap_or_default();
            if items.is_empty() {
                return false;
            }
            common = match (common, self.kind) {
                (None, _) => Some(items),
                (Some(common), Kind::Match) => Some(common.intersection(&items).cloned().collect()),
                (Some(common), Kind::Distinct) if common.is_disjoint(&items) => Some(&common | &items),
                (Some(_), Kind::Distinct) => return false,
            };
            if common.as_ref().is_some_and(BTreeSet::is_empty) {
                return false;
            }
        }
        true
    }

    fn covers(&self, (full, parent): RequestNames<'_>) -> bool {
        let named = |name: &String| name == full || name == parent;
        self.requests.is_empty() || self.requests.iter().any(named)
    }
}

/// An attribute by its qualified name, or by its bare name in the driver's own domain.
fn lookup<'b>(device: &Candidate<'b>, name: &str) -> Option<&'b DeviceAttribute> {
    let attributes = device.wire.attributes.as_ref()?;
    let bare = || name.strip_prefix(device.key.driver)?.strip_prefix('/');
    attributes.get(name).or_else(|| attributes.get(bare()?))
}

fn items(attribute: &DeviceAttribute) -> BTreeSet<Item<'_>> {
    let bools = attribute.bool.iter().chain(attribute.bools.iter().flatten()).map(|value| Item::Bool(*value));
    let ints = attribute.int.iter().chain(attribute.ints.iter().flatten()).map(|value| Item::Int(*value));
    let texts =
        attribute.string.iter().chain(attribute.strings.iter().flatten()).map(|value| Item::Text(value));
    let versions =
        attribute.version.iter().chain(attribute.versions.iter().flatten()).map(|value| Item::Version(value));
    bools.chain(ints).chain(texts).chain(versions).collect()
}
