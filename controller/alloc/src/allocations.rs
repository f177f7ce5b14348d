//! The devices and capacities that allocated claims hold.

use crate::error::{AllocationError, claim_name};
use crate::names::canonical;
use crate::release::Release;
use divvy_api::Quantity;
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::collections::{BTreeMap, BTreeSet};

/// Identifies a device of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DeviceKey<'a> {
    pub(crate) driver: &'a str,
    pub(crate) pool: &'a str,
    pub(crate) device: &'a str,
}

/// Amounts by capacity name.
pub(crate) type Amounts<'a> = BTreeMap<&'a str, Quantity>;

/// The holdings of all allocated claims. Allocations with adminAccess hold nothing.
#[derive(Debug, Default)]
pub(crate) struct Allocations<'a> {
    dedicated: BTreeSet<DeviceKey<'a>>,
    /// In nano-units, by canonical name.
    shared: BTreeMap<DeviceKey<'a>, BTreeMap<&'a str, i128>>,
}

impl<'a> Allocations<'a> {
    pub(crate) fn read(claims: &'a [ResourceClaim], release: Release) -> Result<Self, AllocationError> {
        let mut allocations = Self::default();
        for claim in claims {
            let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
            let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
            for result in devices.and_then(|devices| devices.results.as_ref()).into_iter().flatten() {
                if result.admin_access == Some(true) {
                    continue;
                }
                let key = DeviceKey { driver: &result.driver, pool: &result.pool, device: &result.device };
                if result.share_id.is_none() {
                    allocations.dedicated.insert(key);
                    continue;
                }
                let amounts = allocations.shared.entry(key).or_default();
                for (name, wire) in result.consumed_capacity.iter().flatten() {
                    let amount = Quantity::try_from(wire).map_err(|cause| AllocationError::Claim {
                        claim: claim_name(claim),
                        cause: cause.to_string(),
                    })?;
                    let sum = amounts.entry(canonical(release, &result.driver, name)).or_insert(0);
                    *sum = sum.saturating_add(amount.as_nano());
                }
            }
        }
        Ok(allocations)
    }

    /// Whether one claim holds the device exclusively.
    pub(crate) fn is_dedicated(&self, key: &DeviceKey<'a>) -> bool {
        self.dedicated.contains(key)
    }

    /// The amounts that shares of the device hold, or `None` without shares.
    pub(crate) fn shared(&self, key: &DeviceKey<'a>) -> Option<&BTreeMap<&'a str, i128>> {
        self.shared.get(key)
    }

    pub(crate) fn is_allocated(&self, key: &DeviceKey<'a>) -> bool {
        self.is_dedicated(key) || self.shared.contains_key(key)
    }
}
