//! Parses a claim: requests in order, each with one or more alternatives.

use crate::allocations::Amounts;
use crate::constraint::{Constraint, RequestNames};
use crate::error::{AllocationError, claim_name};
use crate::selectors::Selectors;
use divvy_api::Quantity;
use k8s_openapi::api::resource::v1::{
    CapacityRequirements, DeviceClass, DeviceDerivedAttribute, DeviceRequest, DeviceSelector,
    DeviceToleration, ResourceClaim,
};

/// A parsed claim.
#[derive(Debug)]
pub(crate) struct ParsedClaim<'a> {
    /// `namespace/name`.
    pub(crate) claim: String,
    pub(crate) requests: Vec<Request<'a>>,
    pub(crate) constraints: Vec<Constraint<'a>>,
}

/// A request. The first alternative that fits satisfies it.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) alternatives: Vec<Alternative<'a>>,
}

/// `exactly`, or one entry of `firstAvailable`.
#[derive(Debug)]
pub(crate) struct Alternative<'a> {
    /// Full name: `gpu`, or `gpu/sub`.
    pub(crate) name: String,
    /// Name of the parent request: `gpu`.
    pub(crate) base: &'a str,
    pub(crate) class: &'a DeviceClass,
    /// Indices in [`Selectors`].
    pub(crate) class_selectors: Vec<usize>,
    pub(crate) selectors: Vec<usize>,
    pub(crate) count: Count,
    pub(crate) admin: bool,
    pub(crate) tolerations: &'a [DeviceToleration],
    pub(crate) capacity: Amounts<'a>,
}

impl Alternative<'_> {
    pub(crate) fn names(&self) -> RequestNames<'_> {
        (&self.name, self.base)
    }
}

/// The number of requested devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Count {
    Exactly(usize),
    /// Every selected device.
    All,
}

impl<'a> ParsedClaim<'a> {
    pub(crate) fn read(
        claim: &'a ResourceClaim,
        classes: &'a [DeviceClass],
        selectors: &mut Selectors<'a>,
    ) -> Result<Self, AllocationError> {
        let name = claim_name(claim);
        if claim.status.as_ref().is_some_and(|status| status.allocation.is_some()) {
            return Err(AllocationError::Claim { claim: name, cause: "it is already allocated".to_owned() });
        }
        let devices = claim.spec.as_ref().and_then(|spec| spec.devices.as_ref());
        let constraints = devices.and_then(|devices| devices.constraints.as_deref()).unwrap_or_default();
        let constraints =
            constraints.iter().map(|wire| Constraint::read(&name, wire)).collect::<Result<_, _>>()?;
        let requests = devices.and_then(|devices| devices.requests.as_deref()).unwrap_or_default();
        let mut read = |wire| read_request(&name, wire, classes, selectors);
        let requests = requests.iter().map(&mut read).collect::<Result<_, _>>()?;
        Ok(Self { claim: name, requests, constraints })
    }
}

/// The common fields of `exactly` and `firstAvailable`.
struct Wire<'a> {
    sub: Option<&'a str>,
    class: &'a str,
    selectors: Option<&'a Vec<DeviceSelector>>,
    mode: Option<&'a str>,
    count: Option<i64>,
    admin: bool,
    tolerations: Option<&'a Vec<DeviceToleration>>,
    capacity: Option<&'a CapacityRequirements>,
    derived: Option<&'a Vec<DeviceDerivedAttribute>>,
}

fn read_request<'a>(
    claim: &str,
    wire: &'a DeviceRequest,
    classes: &'a [DeviceClass],
    compiled: &mut Selectors<'a>,
) -> Result<Request<'a>, AllocationError> {
    let exactly = wire.exactly.iter().map(|one| Wire {
        sub: None,
        class: &one.device_class_name,
        selectors: one.selectors.as_ref(),
        mode: one.allocation_mode.as_deref(),
        count: one.count,
        admin: one.admin_access == Some(true),
        tolerations: one.tolerations.as_ref(),
        capacity: one.capacity.as_ref(),
        derived: one.derived_attributes.as_ref(),
    });
    let first = wire.first_available.iter().flatten().map(|sub| Wire {
        sub: Some(&sub.name),
        class: &sub.device_class_name,
        selectors: sub.selectors.as_ref(),
        mode: sub.allocation_mode.as_deref(),
        count: sub.count,
        admin: false,
        tolerations: sub.tolerations.as_ref(),
        capacity: sub.capacity.as_ref(),
        derived: sub.derived_attributes.as_ref(),
    });
    let alternatives: Vec<_> = exactly
        .chain(first)
        .map(|alternative| read_alternative(claim, &wire.name, alternative, classes, compiled))
        .collect::<Result<_, _>>()?;
    match alternatives.is_empty() {
        true => Err(AllocationError::Request {
            claim: claim.to_owned(),
            request: wire.name.clone(),
            cause: "it has neither exactly nor firstAvailable".to_owned(),
        }),
        false => Ok(Request { alternatives }),
    }
}

fn read_alternative<'a>(
    claim: &str,
    base: &'a str,
    wire: Wire<'a>,
    classes: &'a [DeviceClass],
    compiled: &mut Selectors<'a>,
) -> Result<Alternative<'a>, AllocationError> {
    let name = wire.sub.map_or(base.to_owned(), |sub| format!("{base}/{sub}"));
    let refuse =
        |cause: String| AllocationError::Request { claim: claim.to_owned(), request: name.clone(), cause };
    if wire.derived.is_some_and(|derived| !derived.is_empty()) {
        return Err(refuse("derived attributes are not supported".to_owned()));
    }
    let class = classes
        .iter()
        .find(|class| class.metadata.name.as_deref() == Some(wire.class))
        .ok_or_else(|| refuse(format!("DeviceClass {:?} does not exist", wire.class)))?;
    let count = match (wire.mode.unwrap_or("ExactCount"), wire.count.unwrap_or(1)) {
        ("ExactCount", count) => match usize::try_from(count) {
            Ok(count) if count > 0 => Count::Exactly(count),
            _ => return Err(refuse(format!("count {count} is not a positive number of devices"))),
        },
        ("All", _) => Count::All,
        (mode, _) => return Err(refuse(format!("unknown allocationMode {mode:?}"))),
    };
    let mut selectors = |wire: Option<&'a Vec<DeviceSelector>>| {
        let read = |selector: &'a DeviceSelector| match &selector.cel {
            Some(cel) => Ok(compiled.add(&cel.expression)),
            None => Err(refuse("a selector has no CEL expression".to_owned())),
        };
        wire.into_iter().flatten().map(read).collect::<Result<Vec<_>, _>>()
    };
    let mut capacity = Amounts::new();
    for (key, amount) in wire.capacity.and_then(|capacity| capacity.requests.as_ref()).into_iter().flatten() {
        let amount =
            Quantity::try_from(amount).map_err(|cause| refuse(format!("capacity {key}: {cause}")))?;
        capacity.insert(key.as_str(), amount);
    }
    Ok(Alternative {
        base,
        class,
        class_selectors: selectors(class.spec.as_ref().and_then(|spec| spec.selectors.as_ref()))?,
        selectors: selectors(wire.selectors)?,
        count,
        admin: wire.admin,
        tolerations: wire.tolerations.map(Vec::as_slice).unwrap_or_default(),
        capacity,
        name: name.clone(),
    })
}
