//! Records: what this node has promised, one file per claim.
//!
//! ```text
//! <state>/claims/<uid>.json       the claim's record            (this file, [`wire`])
//! <state>/gpus/<GPU UUID>         lock, generation, MIG owner   ([`locks`])
//! <state>/quarantine/             records that could not be read
//!
//!             write            steps            write
//! (absent) ---------> Intent --------> Intent --------> Prepared
//!     ^                 | a step failed, or a crash        | unprepare
//!     |                 v                                  v
//!     +---- undo, in reverse, then remove <----------- Releasing
//! ```
//!
//! A record is written before the hardware changes and removed after the
//! hardware is restored. Files are replaced by rename without fsync: a crash of
//! the process keeps the page cache, and a crash of the machine takes the GPU
//! instances with it, so a record can never be older than the hardware. What
//! the power takes from the disk shows as a damaged file, which is set aside.
//!
//! One file per claim, because a shared one would rewrite every record on each
//! prepare. What others hold on a GPU is kept in memory and trusted only while
//! the generation in the GPU's lock file stands where we left it: a second
//! instance of the driver, as during an upgrade, moves it on.

mod index;
mod locks;
mod store;
mod wire;

pub use index::Records;
pub use locks::{GpuFileError, LockError, Locked, LockedGpu, Locks};
pub use store::{Quarantined, RecordError};

use crate::engine::{HeldState, PreparedDevice};
use crate::plan::{Access, Holding, Part, Plan};
use crate::sharing::ShareLimits;
use crate::step::{InstanceKey, Undo};
use divvy_api::{ClaimRef, DeviceName, GpuUuid, PoolName, RequestName, ShareId};
use std::collections::BTreeSet;

/// What is known of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRecord {
    pub claim: ClaimRef,
    pub state: HeldState,
    pub devices: Vec<DeviceRecord>,
    /// What gives everything back, in the order of the steps; run in reverse.
    pub undo: Vec<Undo>,
}

/// A device of the claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceRecord {
    pub request: RequestName,
    pub pool: PoolName,
    pub device: DeviceName,
    pub share_id: Option<ShareId>,
    pub access: Access,
    pub part: Part,
    /// The ids that the hardware gave a MIG part when it was last made; none before.
    pub instance: Option<InstanceIds>,
    pub cdi_ids: Vec<String>,
}

/// Ids of a MIG instance, good until it is made again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceIds {
    pub gpu_instance: u32,
    pub compute_instance: u32,
    pub uuid: String,
}

impl ClaimRecord {
    /// What is announced before the first step.
    pub fn intent(plan: &Plan) -> Self {
        let device = |device: &crate::plan::PlannedDevice| DeviceRecord {
            request: device.request.clone(),
            pool: device.pool.clone(),
            device: device.device.clone(),
            share_id: device.share_id.clone(),
            access: device.access,
            part: device.part.clone(),
            instance: None,
            cdi_ids: Vec::new(),
        };
        Self {
            claim: plan.claim.clone(),
            state: HeldState::Intent,
            devices: plan.devices.iter().map(device).collect(),
            undo: plan.undo(),
        }
    }

    /// The GPUs it touches.
    pub fn gpus(&self) -> BTreeSet<GpuUuid> {
        let devices = self.devices.iter().map(|device| device.part.gpu());
        devices.chain(self.undo.iter().filter_map(Undo::gpu)).cloned().collect()
    }

    /// What it keeps from others.
    pub fn holdings(&self) -> impl Iterator<Item = Holding> {
        self.devices.iter().filter(|device| device.access.holds()).map(|device| Holding {
            claim: self.claim.clone(),
            part: device.part.clone(),
            access: device.access,
            ready: self.state == HeldState::Prepared,
            made: self.undo.iter().filter(|undo| undo.gives_back(&device.part)).cloned().collect(),
        })
    }

    /// Its devices that are shares, with the id and the limits of each.
    pub fn shares(&self) -> impl Iterator<Item = (&DeviceRecord, &ShareId, ShareLimits)> {
        self.devices.iter().filter_map(|device| {
            let limits = device.access.limits()?;
            Some((device, device.share_id.as_ref()?, limits))
        })
    }

    /// What the kubelet is told.
    pub fn answer(&self) -> Vec<PreparedDevice> {
        let device = |device: &DeviceRecord| PreparedDevice {
            requests: vec![device.request.clone()],
            pool: device.pool.clone(),
            device: device.device.clone(),
            cdi_ids: device.cdi_ids.clone(),
            share_id: device.share_id.clone(),
        };
        self.devices.iter().map(device).collect()
    }
}

impl DeviceRecord {
    /// Whether it has that instance for itself.
    pub fn holds(&self, key: &InstanceKey) -> bool {
        self.access.holds() && matches!(&self.part, Part::Instance(own) if own == key)
    }
}
