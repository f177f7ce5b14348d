//! The contents of a claim's record.

use crate::claims::holding::{Access, Holding};
use crate::claims::plan::Plan;
use crate::claims::step::Undo;
use crate::gpu::epoch::Epoch;
use crate::gpu::part::{InstanceKey, Part};
use crate::gpu::sharing::ShareLimits;
use divvy_api::{ClaimRef, DeviceName, GpuUuid, PoolName, RequestName, ShareId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The record of a claim.
///
/// ```text
///             write            steps            write
/// (absent) ---------> Intent --------> Intent --------> Prepared
///     ^                 | a step failed, or a crash        | unprepare
///     |                 v                                  v
///     +---- undo, in reverse, then remove <----------- Releasing
/// ```
///
/// Files are replaced by rename without fsync. A crash of the process keeps the page cache, and a
/// crash of the machine removes the GPU instances too, so a record is never older than the hardware.
/// A file damaged by a power failure is quarantined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimRecord {
    pub claim: ClaimRef,
    pub state: HeldState,
    pub devices: Vec<DeviceRecord>,
    /// Undo steps in the order of the steps; they run in reverse.
    pub undo: Vec<Undo>,
    /// When the hardware was changed. In another epoch, a reset has undone the hardware steps.
    pub epoch: Epoch,
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
    /// Ids of a MIG instance, from the last time it was created; `None` before.
    pub instance: Option<InstanceIds>,
    pub cdi_ids: Vec<String>,
}

/// Ids of a MIG instance, valid until it is created again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceIds {
    pub gpu_instance: u32,
    pub compute_instance: u32,
    pub uuid: String,
}

/// State of a claim's record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HeldState {
    /// Written before the first step; the hardware may or may not have changed.
    Intent,
    /// All steps are done; the kubelet may have the devices.
    Prepared,
    /// The claim is being released.
    Releasing,
}

/// A prepared device, as the kubelet gets it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PreparedDevice {
    pub requests: Vec<RequestName>,
    pub pool: PoolName,
    pub device: DeviceName,
    pub cdi_ids: Vec<String>,
    pub share_id: Option<ShareId>,
}

impl ClaimRecord {
    /// The record that is written before the first step of a plan.
    pub fn intent(plan: &Plan, epoch: Epoch) -> Self {
        let device = |device: &crate::claims::plan::PlannedDevice| DeviceRecord {
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
            epoch,
        }
    }

    /// The GPUs that the claim uses or its undo steps change.
    pub fn gpus(&self) -> BTreeSet<GpuUuid> {
        let devices = self.devices.iter().map(|device| device.part.gpu());
        devices.chain(self.undo.iter().filter_map(Undo::gpu)).cloned().collect()
    }

    /// The parts of GPUs that the claim holds.
    pub fn holdings(&self) -> impl Iterator<Item = Holding> {
        self.devices.iter().filter(|device| device.access.holds()).map(|device| Holding {
            claim: self.claim.clone(),
            part: device.part.clone(),
            access: device.access,
            ready: self.state == HeldState::Prepared,
            made: self.undo.iter().filter(|undo| undo.destroys(&device.part)).cloned().collect(),
        })
    }

    /// The devices that are shares, with id and limits.
    pub fn shares(&self) -> impl Iterator<Item = (&DeviceRecord, &ShareId, ShareLimits)> {
        self.devices.iter().filter_map(|device| {
            let limits = device.access.limits()?;
            Some((device, device.share_id.as_ref()?, limits))
        })
    }

    /// The devices as the kubelet gets them.
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
    /// Whether the claim holds this instance.
    pub fn holds(&self, key: &InstanceKey) -> bool {
        self.access.holds() && matches!(&self.part, Part::Instance(own) if own == key)
    }
}
