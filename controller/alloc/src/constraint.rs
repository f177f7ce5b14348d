//! Constraints between the devices of a claim: attributes that must match or differ. A constraint
//! has no state: it compares a device with the picks of its claim, so backtracking restores nothing.

use crate::error::AllocationError;
use crate::pool::Candidate;
use crate::release::Release;
use k8s_openapi::api::resource::v1::{DeviceAttribute, DeviceConstraint};

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
    /// All devices must have the same value.
    Match,
    /// No two devices may have the same value.
    Distinct,
}

/// The value of an attribute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scalar<'a> {
    Missing,
    /// A list, which constraints support only with a feature that is off by default.
    List,
    Bool(bool),
    Int(i64),
    Text(&'a str),
    Version(&'a str),
}

/// The decision of a constraint about a device.
pub(crate) enum Verdict {
    Allowed,
    Excluded,
    /// The scheduler stops.
    Unsupported,
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

    /// Compares the value of a device with those of the covered devices that were picked before.
    /// The scheduler compares a match only with the first device.
    pub(crate) fn verdict<'b>(
        &self,
        release: Release,
        value: Scalar<'b>,
        mut picked: impl Iterator<Item = Scalar<'b>>,
    ) -> Verdict {
        let same = |other: Scalar<'b>| value != Scalar::List && value == other;
        let allowed = match (value, self.kind) {
            (Scalar::Missing, _) => false,
            (Scalar::List, _) if release.refuses_list_constraints() => return Verdict::Unsupported,
            (Scalar::List, _) => picked.next().is_none(),
            (_, Kind::Match) => picked.next().is_none_or(same),
            (_, Kind::Distinct) => !picked.any(same),
        };
        if allowed { Verdict::Allowed } else { Verdict::Excluded }
    }

    pub(crate) fn covers(&self, (full, parent): RequestNames<'_>) -> bool {
        let named = |name: &String| name == full || name == parent;
        self.requests.is_empty() || self.requests.iter().any(named)
    }

    /// The value of the device's attribute, by its qualified name, or by its bare name in the
    /// driver's own domain.
    pub(crate) fn value<'b>(&self, release: Release, device: &Candidate<'b>) -> Scalar<'b> {
        let Some(attributes) = device.wire.attributes.as_ref() else {
            return Scalar::Missing;
        };
        let bare = || self.attribute.strip_prefix(device.key.driver)?.strip_prefix('/');
        let found = attributes.get(self.attribute).or_else(|| attributes.get(bare()?));
        found.map_or(Scalar::Missing, |attribute| scalar(release, attribute))
    }
}

fn scalar(release: Release, attribute: &DeviceAttribute) -> Scalar<'_> {
    let release_part = |version| match release.ignores_build_metadata() {
        true => str::split(version, '+').next().unwrap_or(version),
        false => version,
    };
    match attribute {
        DeviceAttribute { bool: Some(value), .. } => Scalar::Bool(*value),
        DeviceAttribute { int: Some(value), .. } => Scalar::Int(*value),
        DeviceAttribute { string: Some(value), .. } => Scalar::Text(value),
        DeviceAttribute { version: Some(value), .. } => Scalar::Version(release_part(value)),
        _ => Scalar::List,
    }
}
