//! The inventory of a node as one value. The driver creates it from NVML, sysfs and its records;
//! the publisher reads it. It is never edited in place.

use crate::closing::Removals;
use crate::health::{Finding, HealthState, TaintEffect};
use crate::numbers::GpuNumber;
use crate::placement::Placement;
use crate::policy::GpuPolicy;
use divvy_api::GpuUuid;
use serde::{Deserialize, Serialize};
use std::fmt;

/// All GPUs of a node, by number.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Inventory {
    /// The version of the GPU driver (`580.95.05`); empty if there is none.
    pub driver_version: String,
    /// CUDA driver version (major, minor).
    pub cuda_version: (u32, u32),
    pub gpus: Vec<Gpu>,
    /// The extended resource that a device plugin currently offers for the GPUs of this node. Then
    /// no other driver may hand them out.
    #[serde(default)]
    pub device_plugin: Option<String>,
    /// The controller's decisions about modes that are off.
    #[serde(default, skip_serializing_if = "Removals::is_empty")]
    pub removals: Removals,
}

/// One physical GPU. A missing GPU stays in the inventory with `presence: Missing` and its last
/// known description.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Gpu {
    pub number: GpuNumber,
    pub uuid: GpuUuid,
    /// The NVML minor number in this boot: `/dev/nvidia<minor>`. It is not the GPU number.
    pub minor: u32,
    pub product: String,
    pub brand: String,
    pub architecture: String,
    pub compute_capability: (u32, u32),
    /// NVML's total; 0 if NVML does not report it.
    pub memory_bytes: u64,
    /// `HMM`, `ATS` or `None`; missing if the GPU driver lacks the call.
    pub addressing_mode: Option<String>,
    /// Lower case, `0000:1a:00.0`.
    pub pci_bus_id: String,
    /// `pci0000:16`; missing if sysfs lacks it.
    pub pcie_root: Option<String>,
    pub numa_node: Option<u32>,
    /// GPUs with the same group are connected by NVLink; missing without NVLink.
    pub nvlink_group: Option<String>,
    /// The number of GPUs of the node that are connected by NVLink.
    pub nvlink_peers: u32,
    pub mig: Mig,
    pub presence: Presence,
    /// Reasons not to hand out this GPU now; published as taints.
    pub conditions: Vec<Condition>,
    /// The uses that the administrator allows.
    #[serde(default, skip_serializing_if = "GpuPolicy::is_default")]
    pub policy: GpuPolicy,
}

/// Whether the GPU is present.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Presence {
    /// NVML lists it.
    Present,
    /// NVML is closed or not loadable. NVML listed the GPU in this boot, and the kernel driver does
    /// not contradict that, so the minor number is valid.
    Unread,
    /// The GPU is gone, or was not read in this boot yet. Its minor number means nothing.
    Missing,
}

/// A reason not to hand out a GPU or some of its devices.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Condition {
    /// The GPU, or one instance of it, is not healthy.
    Health(Finding),
    /// The GPU's MPS control daemon is unhealthy. This concerns only the MPS device.
    Mps { cause: String },
    /// The MIG profiles or instances cannot be read; the GPU shows the last ones that were.
    MigUnreadable { cause: String },
    /// State of a released claim is still on the hardware, because it could not be undone.
    /// `placement` is the MIG instance; `None` concerns the whole GPU.
    Debt { placement: Option<Placement>, undo: String },
    /// An operator has taken the GPU, for example to reset it.
    HandedOver,
}

/// The MIG support and state of a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Mig {
    /// The GPU does not support MIG, or the driver reports no profiles.
    Unsupported,
    Supported {
        mode: MigMode,
        toggle: MigToggle,
        /// All GPU instance profiles, by profile id.
        profiles: Vec<MigProfile>,
        /// Existing GPU instances, by id.
        instances: Vec<GpuInstance>,
    },
}

/// The current MIG mode.
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
    /// Ampere: by a GPU reset. Divvy never does that.
    NeedsReset,
}

/// A GPU instance profile with the figures of NVML.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigProfile {
    /// The ID of `nvidia-smi mig -lgip`; it depends on the GPU model.
    pub id: u32,
    /// The argument of `nvmlDeviceGetGpuInstanceProfileInfo`.
    pub index: u32,
    /// The canonical name: `1g.10gb`, `1g.10gb+me`.
    pub name: String,
    /// MiB.
    pub memory_mib: u64,
    pub multiprocessors: u32,
    pub copy_engines: u32,
    pub decoders: u32,
    pub encoders: u32,
    pub jpeg_engines: u32,
    pub ofa_engines: u32,
    /// Maximum number of instances at one time.
    pub max_instances: u32,
    pub placements: Vec<Placement>,
}

/// An existing GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInstance {
    pub id: u32,
    pub profile_id: u32,
    pub placement: Placement,
    pub compute_instances: Vec<ComputeInstance>,
    pub origin: Origin,
}

/// An existing compute instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeInstance {
    pub id: u32,
    pub profile_id: u32,
    /// `MIG-...`
    pub uuid: String,
}

/// The creator of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// A record of Divvy accounts for it.
    Ours,
    /// Another tool created it. It is published as it is, and kept on release.
    Foreign,
}

impl Inventory {
    /// The GPU with that number.
    pub fn gpu(&self, number: GpuNumber) -> Option<&Gpu> {
        self.gpus.iter().find(|gpu| gpu.number == number)
    }

    /// The GPU instance with that id on a GPU.
    pub fn instance(&self, gpu: &GpuUuid, id: u32) -> Option<&GpuInstance> {
        match &self.gpus.iter().find(|known| known.uuid == *gpu)?.mig {
            Mig::Unsupported => None,
            Mig::Supported { instances, .. } => instances.iter().find(|instance| instance.id == id),
        }
    }
}

impl Gpu {
    /// The profile with that id.
    pub fn profile(&self, id: u32) -> Option<&MigProfile> {
        match &self.mig {
            Mig::Unsupported => None,
            Mig::Supported { profiles, .. } => profiles.iter().find(|profile| profile.id == id),
        }
    }
}

impl Gpu {
    /// The worst health state of the GPU and its instances.
    pub fn health(&self) -> HealthState {
        self.findings().map(|finding| finding.state).max().unwrap_or_default()
    }

    /// The effect of a condition's taint. A device with any other effect than `None` is not
    /// handed out.
    pub fn effect(&self, condition: &Condition) -> TaintEffect {
        match condition {
            Condition::Health(finding) => self.policy.health.of(finding.state),
            // No instance was ever published, so the whole GPU is safe to use.
            Condition::MigUnreadable { .. } if self.mig == Mig::Unsupported => TaintEffect::None,
            Condition::Mps { .. }
            | Condition::MigUnreadable { .. }
            | Condition::Debt { .. }
            | Condition::HandedOver => TaintEffect::NoSchedule,
        }
    }

    /// The first condition that keeps a device from being handed out: a MIG instance at
    /// `placement`, or the whole GPU. A failed MPS control daemon and debts, which depend on the
    /// claim, are left out.
    pub fn obstacle(&self, placement: Option<Placement>) -> Option<&Condition> {
        self.conditions.iter().find(|condition| {
            !matches!(condition, Condition::Mps { .. } | Condition::Debt { .. })
                && condition.concerns(placement)
                && self.effect(condition) != TaintEffect::None
        })
    }

    /// Whether calls on the GPU can be tried: it is present, and no finding about the whole GPU says
    /// otherwise.
    pub fn is_usable(&self) -> bool {
        self.presence == Presence::Present
            && !self.conditions.contains(&Condition::HandedOver)
            && self
                .findings()
                .all(|finding| finding.instance.is_some() || finding.state < HealthState::NeedsReset)
    }

    /// Why it is not healthy.
    pub fn findings(&self) -> impl Iterator<Item = &Finding> {
        self.conditions.iter().filter_map(|condition| match condition {
            Condition::Health(finding) => Some(finding),
            _ => None,
        })
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Health(finding) => finding.fmt(out),
            Self::Mps { cause } => write!(out, "MPS control daemon is {cause}"),
            Self::MigUnreadable { cause } => write!(out, "MIG state cannot be read: {cause}"),
            Self::Debt { undo, .. } => write!(out, "a released claim is not undone yet: {undo}"),
            Self::HandedOver => out.write_str("GPU is handed over to an operator"),
        }
    }
}

impl Condition {
    /// Whether it concerns a device of the GPU: a MIG instance at `placement`, or the whole GPU in
    /// any mode.
    pub fn concerns(&self, placement: Option<Placement>) -> bool {
        let own = match self {
            Self::Health(finding) => finding.instance,
            Self::Debt { placement, .. } => *placement,
            Self::Mps { .. } | Self::MigUnreadable { .. } | Self::HandedOver => None,
        };
        match (own, placement) {
            (Some(own), Some(placement)) => own.overlaps(placement),
            (None, _) | (_, None) => true,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A present GPU for tests of its number and profiles.
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
    fn gpus_and_profiles_are_found_by_key() {
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
