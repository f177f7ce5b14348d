//! An allocated ResourceClaim as the driver understands it.
//!
//! [`AllocatedClaim::try_from`] is the edge: results of other drivers are left
//! out, sub-requests are folded into their base, class and claim configuration
//! are merged in the upstream precedence (class first, claim over class, later
//! over earlier), and whatever is malformed is an error that names the claim.

use crate::config::DeviceConfig;
use crate::names::{ClaimRef, DeviceName, PoolName, RequestName, ShareId};
use crate::quantity::Quantity;
use k8s_openapi::api::resource::v1::ResourceClaim;
use std::collections::BTreeMap;

/// A claim with an allocation, reduced to our driver's results, in result order.
/// Invariant: `devices` is not empty and (pool, device, hold) does not repeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedClaim {
    pub claim: ClaimRef,
    pub devices: Vec<AllocatedDevice>,
}

/// One result of the allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedDevice {
    /// Base request.
    pub request: RequestName,
    pub pool: PoolName,
    pub device: DeviceName,
    pub hold: Hold,
    /// Configuration that applies, lowest precedence first.
    pub configs: Vec<DeviceConfig>,
}

/// How the claim holds the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Nobody else may.
    Exclusive,
    /// Together with other shares of the same device.
    Share { id: ShareId, consumed: BTreeMap<String, Quantity> },
    /// adminAccess: looks on, owns nothing.
    Admin,
}

/// Why a ResourceClaim cannot be read; every message names the claim.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClaimError {
    #[error("claim {claim} has no {field}")]
    Missing { claim: String, field: &'static str },
    #[error("claim {claim} is not allocated")]
    NotAllocated { claim: ClaimRef },
    #[error("claim {claim} has no device of driver gpu.divvy.dev")]
    NotOurs { claim: ClaimRef },
    #[error("claim {claim}, request {request}: {cause}")]
    Config { claim: ClaimRef, request: String, cause: crate::config::ConfigError },
    #[error("claim {claim}, device {device}: {cause}")]
    Capacity { claim: ClaimRef, device: DeviceName, cause: crate::quantity::QuantityError },
}

impl TryFrom<&ResourceClaim> for AllocatedClaim {
    type Error = ClaimError;
    fn try_from(_claim: &ResourceClaim) -> Result<Self, ClaimError> {
        Err(ClaimError::Missing { claim: String::new(), field: "implementation" })
    }
}
