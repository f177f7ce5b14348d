//! What a node has, as one value: made by the driver from NVML, sysfs and its
//! records, read by the publisher. It moves one way and is never edited in place.

use crate::numbers::GpuNumber;
use crate::placement::Placement;
use crate::policy::GpuPolicy;
use divvy_api::GpuUuid;
use serde::{Deserialize, Serialize};
use std::fmt;

/// All GPUs of a node, by number.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Inventory {
    /// The GPU driver's version as it writes it (`580.95.05`), empty while there is none.
    pub driver_version: String,
    /// CUDA driver version (major, minor).
    pub cuda_version: (u32, u32),
    pub gpus: Vec<Gpu>,
    /// The extended resource under which a device plugin hands out GPUs of this
    /// node at this moment, so that nobody else must.
    #[serde(default)]
    pub device_plugin: Option<String>,
}

/// One physical GPU. A GPU that is gone stays in the inventory with
/// `presence: Missing` and its last known description.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    pub number: GpuNumber,
    pub uuid: GpuUuid,
    /// NVML minor of this boot: `/dev/nvidia<minor>`. Not the number.
    pub minor: u32,
    pub product: String,
    pub brand: String,
    pub architecture: String,
    pub compute_capability: (u32, u32),
    /// NVML's total; 0 where NVML does not say.
    pub memory_bytes: u64,
    /// `HMM`, `ATS` or `None`; absent where the driver has no such call.
    pub addressing_mode: Option<String>,
    /// Lower case, `0000:1a:00.0`.
    pub pci_bus_id: String,
    /// `pci0000:16`, absent where sysfs lacks it.
    pub pcie_root: Option<String>,
    pub numa_node: Option<u32>,
    /// GPUs with the same group reach each other over NVLink; absent without NVLink.
    pub nvlink_group: Option<String>,
    /// How many GPUs of the node it reaches over NVLink.
    pub nvlink_peers: u32,
    pub mig: Mig,
    pub presence: Presence,
    /// Why nobody should be given this GPU now; published as taints.
    pub conditions: Vec<Condition>,
    /// What the administrator lets be made of it.
    #[serde(default, skip_serializing_if = "GpuPolicy::is_default")]
    pub policy: GpuPolicy,
}

/// Whether the GPU is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Presence {
    Present,
    Missing,
}

/// What keeps a GPU from being handed out.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Condition {
    /// A hardware call did not come back before its deadline.
    Stuck { call: String },
    /// NVML says GPU_IS_LOST.
    Lost,
    /// The GPU's MPS control daemon is not well; concerns the MPS device alone.
    Mps { cause: String },
}

/// What the GPU can do with MIG.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Mig {
    /// Not a MIG GPU, or the driver gives no profiles.
    Unsupported,
    Supported {
        mode: MigMode,
        toggle: MigToggle,
        /// All GPU-instance profiles, by profile id.
        profiles: Vec<MigProfile>,
        /// GPU instances that exist now, by id.
        instances: Vec<GpuInstance>,
    },
}

/// Current MIG mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigMode {
    Off,
    On,
}

/// How the mode is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigToggle {
    /// Hopper and later: while the GPU is idle, without a reset.
    Live,
    /// Ampere: by GPU reset; Divvy never toggles it.
    NeedsReset,
}

/// A GPU-instance profile, all figures as NVML gives them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigProfile {
    /// Column ID of `nvidia-smi mig -lgip`; opaque, per GPU model.
    pub id: u32,
    /// Argument of `nvmlDeviceGetGpuInstanceProfileInfo`.
    pub index: u32,
    /// Canonical name: `1g.10gb`, `1g.10gb+me`.
    pub name: String,
    /// MiB.
    pub memory_mib: u64,
    pub multiprocessors: u32,
    pub copy_engines: u32,
    pub decoders: u32,
    pub encoders: u32,
    pub jpeg_engines: u32,
    pub ofa_engines: u32,
    /// How many may exist at once.
    pub max_instances: u32,
    pub placements: Vec<Placement>,
}

/// A GPU instance that exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInstance {
    pub id: u32,
    pub profile_id: u32,
    pub placement: Placement,
    pub compute_instances: Vec<ComputeInstance>,
    pub origin: Origin,
}

/// A compute instance that exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeInstance {
    pub id: u32,
    pub profile_id: u32,
    /// `MIG-...`
    pub uuid: String,
}

/// Who made an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// A record explains it.
    Ours,
    /// Somebody else did; it is published as it is and left on release.
    Foreign,
}

impl Inventory {
    /// The GPU of that number.
    pub fn gpu(&self, number: GpuNumber) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.number == number)
    }
}

impl Gpu {
    /// The profile of that id.
    pub fn profile(&self, id: u32) -> Option<&MigProfile> {
        match &self.mig {
            Mig::Unsupported => None,
            Mig::Supported { profiles, .. } => profiles.iter().find(|profile| profile.id == id),
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Stuck { call } => write!(out, "{call} has not returned"),
            Self::Lost => out.write_str("GPU is lost"),
            Self::Mps { cause } => write!(out, "MPS control daemon is {cause}"),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A present GPU; the tests care for its number and its profiles.
    pub(crate) fn gpu(number: u32, mig: Mig) -> Gpu {
        Gpu {
            number: GpuNumber(number),
            uuid: GpuUuid::from(format!("GPU-{number}")),
            minor: number,
            product: "NVIDIA H100 80GB HBM3".to_owned(),
            brand: "Nvidia".to_owned(),
            architecture: "Hopper".to_owned(),
            compute_capability: (9, 0),
            memory_bytes: 81559 << 20,
            addressing_mode: None,
            pci_bus_id: "0000:1a:00.0".to_owned(),
            pcie_root: None,
            numa_node: None,
            nvlink_group: None,
            nvlink_peers: 0,
            mig,
            presence: Presence::Present,
            conditions: Vec::new(),
            policy: GpuPolicy::default(),
        }
    }

    pub(crate) fn mig(profiles: Vec<MigProfile>) -> Mig {
        Mig::Supported { mode: MigMode::Off, toggle: MigToggle::Live, profiles, instances: Vec::new() }
    }

    pub(crate) fn profile(id: u32, name: &str, placements: &[(u32, u32)]) -> MigProfile {
        MigProfile {
            id,
            index: 0,
            name: name.to_owned(),
            memory_mib: 9984,
            multiprocessors: 16,
            copy_engines: 1,
            decoders: 1,
            encoders: 0,
            jpeg_engines: 1,
            ofa_engines: 0,
            max_instances: 7,
            placements: placements.iter().map(|&(start, size)| Placement { start, size }).collect(),
        }
    }

    #[test]
    fn gpus_and_profiles_are_found_by_their_own_key() {
        let node = Inventory {
            gpus: vec![gpu(3, Mig::Unsupported), gpu(1, mig(vec![profile(19, "1g.10gb", &[(0, 1)])]))],
            ..Default::default()
        };
        assert_eq!(node.gpu(GpuNumber(1)).map(|gpu| gpu.uuid.as_str()), Some("GPU-1"));
        assert_eq!(node.gpu(GpuNumber(0)), None);
        let has = |number, id| node.gpu(GpuNumber(number)).and_then(|gpu| gpu.profile(id)).is_some();
        assert!(has(1, 19) && !has(1, 0) && !has(3, 19));
    }
}
