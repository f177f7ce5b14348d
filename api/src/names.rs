//! Names and identifiers. Each identifier has its own type, so that a claim UID is never passed as
//! a GPU UUID. Attribute names are those of NVIDIA's driver under our domain, so that selectors can
//! be ported by search and replace.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The DRA driver name, the domain of attributes and capacities, and the CDI vendor.
pub const DRIVER: &str = "gpu.divvy.dev";
/// The CDI kind of claim devices. A `.` in the class part would require CDI 0.6.0.
pub const CDI_KIND: &str = "gpu.divvy.dev/claim";
/// The DeviceClass of devices for adminAccess.
pub const OBSERVER_CLASS: &str = "observer.divvy.dev";
/// Key of the taint of devices for adminAccess.
pub const OBSERVER_TAINT: &str = "gpu.divvy.dev/observer";
/// API group and version of opaque configuration.
pub const CONFIG_API_VERSION: &str = "resource.divvy.dev/v1alpha1";

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(String);

        impl $name {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.to_owned())
            }
        }

        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
    };
}

name!(
    /// UID of a ResourceClaim.
    ClaimUid
);
name!(
    /// Name of a request in a claim. It is always the base request: `gpu/sub` belongs to `gpu`.
    RequestName
);
name!(
    /// Name of a pool. Each node has one, named after the node.
    PoolName
);
name!(
    /// Name of a device in a pool, for example `gpu-0-mig-1g10gb-19-0`.
    DeviceName
);
name!(
    /// UUID of a physical GPU in NVML's form, for example `GPU-5d5a...`.
    GpuUuid
);
name!(
    /// The scheduler's id of one share of a device with multiple allocations.
    ShareId
);

/// Identifies a claim, in messages by namespace and name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ClaimRef {
    pub namespace: String,
    pub name: String,
    pub uid: ClaimUid,
}

impl fmt::Display for ClaimRef {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.namespace, self.name)
    }
}
