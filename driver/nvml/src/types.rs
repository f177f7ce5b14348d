//! Data read from a GPU: a [`Description`] that is constant while the library is open, and a
//! [`State`] that changes and is cheap to read.

use crate::code::Code;
use crate::error::NvmlError;
use divvy_api::GpuUuid;
use divvy_model::inventory::{ComputeInstance, MigMode, MigProfile, MigToggle};
use divvy_model::placement::Placement;
use std::sync::Arc;

/// All GPUs that NVML found when it was opened.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub driver_version: String,
    /// (major, minor).
    pub cuda_version: (u32, u32),
    pub gpus: Vec<GpuReading>,
    /// NVML indices without a UUID, and the error.
    pub unreadable: Vec<(u32, Code)>,
}

/// One GPU, or the error of reading it.
#[derive(Clone, Debug)]
pub struct GpuReading {
    pub uuid: GpuUuid,
    pub reading: Result<(Arc<Description>, State), NvmlError>,
}

/// Properties of a GPU that do not change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    pub product: String,
    pub brand: String,
    pub architecture: String,
    pub compute_capability: (u32, u32),
    /// 0 if NVML does not report it.
    pub memory_bytes: u64,
    pub addressing_mode: Option<String>,
    /// In the form of sysfs, `0000:1a:00.0`.
    pub pci_bus_id: String,
    pub toggle: MigToggle,
    /// Sorted by profile id; empty if the GPU does not support MIG. An error is queried again at
    /// each reading.
    pub profiles: Result<Vec<MigProfile>, NvmlError>,
    /// `None` while MIG is on, because NVLinks are inactive then.
    pub links: Option<Links>,
}

/// The remote ends of the active NVLinks of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Links {
    /// Bus ids of directly connected GPUs.
    pub gpus: Vec<String>,
    /// The fabric, if any link leads to an NVSwitch.
    pub switch: Option<Fabric>,
}

/// An NVSwitch fabric; all zeros if the GPU driver reports none.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Fabric {
    pub cluster: [u8; 16],
    pub clique: u32,
}

/// Properties of a GPU that change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    /// The number in `/dev/nvidia<minor>`. It may change with the MIG mode.
    pub minor: u32,
    pub mig: RawMig,
}

/// The current MIG state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RawMig {
    Unsupported,
    Supported {
        mode: MigMode,
        instances: Vec<RawInstance>,
    },
    /// A query of the mode, the profiles or the instances failed. `mode` is known unless its query
    /// failed.
    Unreadable {
        mode: Option<MigMode>,
        cause: NvmlError,
    },
}

/// An existing GPU instance, created by any tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawInstance {
    pub id: u32,
    pub profile_id: u32,
    pub placement: Placement,
    pub compute_instances: Vec<ComputeInstance>,
}
