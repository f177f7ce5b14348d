//! The bytes of a record: an envelope that says how to read it, and a body.
//!
//! ```text
//! {"format":1,"crc32":"5f0c7e21","record":{...}}
//! ```
//!
//! The checksum is over the bytes of `record` as they stand in the file, so a
//! field that a later build adds or leaves out never looks like damage. Fields
//! that are not known are ignored; a meaning that an older build must not
//! overlook is a new format, and then the older build sets the file aside.
//!
//! | format | since it says |
//! |---|---|
//! | 1 | whole GPUs and MIG instances |
//! | 2 | what a device is set up with to be shared (`sharing`, `with`), and how that is undone |
//! | 3 | the limits of a share (`share`), and its pages |
//!
//! A record is written in the lowest format that says it, so that after a step
//! back to an older build only those claims are set aside that it would take
//! for something else: a time-slice, or a share, for a GPU that one claim has for itself.
//!
//! The structs are the file's own: a domain type can change without a record
//! changing by accident.

mod share;

use super::{ClaimRecord, DeviceRecord, InstanceIds};
use crate::engine::HeldState;
use crate::plan::{Access, Part};
use crate::sharing::{MpsLimits, Setup};
use crate::step::{InstanceKey, Undo};
use divvy_api::ClaimRef;
use divvy_api::sharing;
use divvy_model::Placement;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use share::Share;

/// The newest format that this build writes and reads.
const FORMAT: u32 = 3;

/// Why bytes are not a record.
#[derive(Debug, thiserror::Error)]
pub(super) enum DecodeError {
    #[error("not a record: {0}")]
    Envelope(#[source] serde_json::Error),
    #[error("written in format {found}; this build reads up to {FORMAT}")]
    Format { found: u32 },
    #[error("checksum is {found}, the content has {actual}")]
    Checksum { found: String, actual: String },
    #[error("not a record of format {format}: {cause}")]
    Body {
        format: u32,
        #[source]
        cause: serde_json::Error,
    },
}

#[derive(Deserialize)]
struct Envelope<'a> {
    format: u32,
    #[serde(default)]
    crc32: String,
    #[serde(borrow)]
    record: &'a RawValue,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Record {
    claim: Claim,
    state: State,
    devices: Vec<Device>,
    undo: Vec<UndoStep>,
}

#[derive(Serialize, Deserialize)]
struct Claim {
    namespace: String,
    name: String,
    uid: String,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum State {
    Intent,
    Prepared,
    Releasing,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Device {
    request: String,
    pool: String,
    device: String,
    #[serde(rename = "shareID", default, skip_serializing_if = "Option::is_none")]
    share_id: Option<String>,
    #[serde(default)]
    admin: bool,
    gpu: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mig: Option<Mig>,
    /// How the claim's own pods share it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sharing: Option<Sharing>,
    /// How it is shared with other claims.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    with: Option<Sharing>,
    /// What it may have beside other shares of the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    share: Option<Share>,
    #[serde(rename = "cdiDeviceIDs", default)]
    cdi_ids: Vec<String>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(tag = "mode", rename_all = "camelCase")]
enum Sharing {
    Timeslice {
        interval: Interval,
    },
    #[serde(rename_all = "camelCase")]
    Mps {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        threads: Option<u32>,
        #[serde(rename = "memoryMiB", default, skip_serializing_if = "Option::is_none")]
        memory_mib: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        multi_user: Option<bool>,
    },
}

#[derive(Clone, Copy, Serialize, Deserialize)]
enum Interval {
    Default,
    Short,
    Medium,
    Long,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
struct At {
    #[serde(rename = "profileID")]
    profile_id: u32,
    start: u32,
    size: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Mig {
    #[serde(flatten)]
    at: At,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    instance: Option<Instance>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Instance {
    gpu_instance: u32,
    compute_instance: u32,
    uuid: String,
}

#[derive(Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "camelCase")]
enum UndoStep {
    DestroyGpuInstance {
        gpu: String,
        #[serde(flatten)]
        at: At,
    },
    DestroyComputeInstances {
        gpu: String,
        #[serde(flatten)]
        at: At,
    },
    ResetInterval {
        gpu: String,
    },
    ResetComputeMode {
        gpu: String,
    },
    StopMps {
        gpu: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        mig: Option<At>,
    },
    RemovePages,
    RemoveCdi,
}

/// The file's content.
pub(super) fn encode(record: &ClaimRecord) -> Result<Vec<u8>, serde_json::Error> {
    let body = serde_json::to_string(&Record::from(record))?;
    let checksum = crc32fast::hash(body.as_bytes());
    let format = record.devices.iter().map(|device| match device.access {
        Access::Share(_) => 3,
        access if access.setup().is_some() => 2,
        _ => 1,
    });
    let format = format.max().unwrap_or(1);
    Ok(format!("{{\"format\":{format},\"crc32\":\"{checksum:08x}\",\"record\":{body}}}\n").into_bytes())
}

/// Reads what this build or an older one wrote.
pub(super) fn decode(bytes: &[u8]) -> Result<ClaimRecord, DecodeError> {
    let envelope: Envelope<'_> = serde_json::from_slice(bytes).map_err(DecodeError::Envelope)?;
    let format = envelope.format;
    if !(1..=FORMAT).contains(&format) {
        return Err(DecodeError::Format { found: format });
    }
    let actual = format!("{:08x}", crc32fast::hash(envelope.record.get().as_bytes()));
    if actual != envelope.crc32 {
        return Err(DecodeError::Checksum { found: envelope.crc32, actual });
    }
    let record: Record =
        serde_json::from_str(envelope.record.get()).map_err(|cause| DecodeError::Body { format, cause })?;
    Ok(record.into())
}

impl At {
    fn key(self, gpu: String) -> InstanceKey {
        InstanceKey {
            gpu: gpu.into(),
            profile_id: self.profile_id,
            placement: Placement { start: self.start, size: self.size },
        }
    }
}

impl From<&InstanceKey> for At {
    fn from(key: &InstanceKey) -> Self {
        Self { profile_id: key.profile_id, start: key.placement.start, size: key.placement.size }
    }
}

impl From<&ClaimRecord> for Record {
    fn from(record: &ClaimRecord) -> Self {
        let claim = &record.claim;
        Self {
            claim: Claim {
                namespace: claim.namespace.clone(),
                name: claim.name.clone(),
                uid: claim.uid.to_string(),
            },
            state: match record.state {
                HeldState::Intent => State::Intent,
                HeldState::Prepared => State::Prepared,
                HeldState::Releasing => State::Releasing,
            },
            devices: record.devices.iter().map(Device::from).collect(),
            undo: record.undo.iter().map(UndoStep::from).collect(),
        }
    }
}

impl From<Record> for ClaimRecord {
    fn from(record: Record) -> Self {
        let Claim { namespace, name, uid } = record.claim;
        Self {
            claim: ClaimRef { namespace, name, uid: uid.into() },
            state: match record.state {
                State::Intent => HeldState::Intent,
                State::Prepared => HeldState::Prepared,
                State::Releasing => HeldState::Releasing,
            },
            devices: record.devices.into_iter().map(DeviceRecord::from).collect(),
            undo: record.undo.into_iter().map(Undo::from).collect(),
        }
    }
}

impl From<&DeviceRecord> for Device {
    fn from(device: &DeviceRecord) -> Self {
        let instance = device.instance.as_ref().map(|ids| Instance {
            gpu_instance: ids.gpu_instance,
            compute_instance: ids.compute_instance,
            uuid: ids.uuid.clone(),
        });
        Self {
            request: device.request.to_string(),
            pool: device.pool.to_string(),
            device: device.device.to_string(),
            share_id: device.share_id.as_ref().map(ToString::to_string),
            admin: device.access == Access::Admin,
            gpu: device.part.gpu().to_string(),
            mig: match &device.part {
                Part::Whole { .. } => None,
                Part::Instance(key) => Some(Mig { at: key.into(), instance }),
            },
            sharing: match device.access {
                Access::Exclusive(setup) => setup.map(Sharing::from),
                Access::Shared(_) | Access::Share(_) | Access::Admin => None,
            },
            with: match device.access {
                Access::Shared(setup) => Some(setup.into()),
                Access::Exclusive(_) | Access::Share(_) | Access::Admin => None,
            },
            share: device.access.limits().map(Share::from),
            cdi_ids: device.cdi_ids.clone(),
        }
    }
}

impl From<Device> for DeviceRecord {
    fn from(device: Device) -> Self {
        let (part, instance) = match device.mig {
            None => (Part::Whole { gpu: device.gpu.into() }, None),
            Some(Mig { at, instance }) => (Part::Instance(at.key(device.gpu)), instance),
        };
        Self {
            request: device.request.into(),
            pool: device.pool.into(),
            device: device.device.into(),
            share_id: device.share_id.map(Into::into),
            access: match (device.share, device.with) {
                _ if device.admin => Access::Admin,
                (Some(share), _) => Access::Share(share.into()),
                (None, Some(with)) => Access::Shared(with.into()),
                (None, None) => Access::Exclusive(device.sharing.map(Setup::from)),
            },
            part,
            instance: instance.map(|ids| InstanceIds {
                gpu_instance: ids.gpu_instance,
                compute_instance: ids.compute_instance,
                uuid: ids.uuid,
            }),
            cdi_ids: device.cdi_ids,
        }
    }
}

impl From<Setup> for Sharing {
    fn from(setup: Setup) -> Self {
        match setup {
            Setup::Timeslice(interval) => Self::Timeslice {
                interval: match interval {
                    sharing::Interval::Default => Interval::Default,
                    sharing::Interval::Short => Interval::Short,
                    sharing::Interval::Medium => Interval::Medium,
                    sharing::Interval::Long => Interval::Long,
                },
            },
            Setup::Mps(MpsLimits { threads, memory_mib, multi_user }) => {
                Self::Mps { threads, memory_mib, multi_user }
            }
        }
    }
}

impl From<Sharing> for Setup {
    fn from(sharing: Sharing) -> Self {
        match sharing {
            Sharing::Timeslice { interval } => Self::Timeslice(match interval {
                Interval::Default => sharing::Interval::Default,
                Interval::Short => sharing::Interval::Short,
                Interval::Medium => sharing::Interval::Medium,
                Interval::Long => sharing::Interval::Long,
            }),
            Sharing::Mps { threads, memory_mib, multi_user } => {
                Self::Mps(MpsLimits { threads, memory_mib, multi_user })
            }
        }
    }
}

impl From<&Undo> for UndoStep {
    fn from(undo: &Undo) -> Self {
        match undo {
            Undo::DestroyGpuInstance(key) => {
                Self::DestroyGpuInstance { gpu: key.gpu.to_string(), at: key.into() }
            }
            Undo::DestroyComputeInstances(key) => {
                Self::DestroyComputeInstances { gpu: key.gpu.to_string(), at: key.into() }
            }
            Undo::ResetInterval { gpu } => Self::ResetInterval { gpu: gpu.to_string() },
            Undo::ResetComputeMode { gpu } => Self::ResetComputeMode { gpu: gpu.to_string() },
            Undo::StopMps { part } => Self::StopMps {
                gpu: part.gpu().to_string(),
                mig: match part {
                    Part::Whole { .. } => None,
                    Part::Instance(key) => Some(key.into()),
                },
            },
            Undo::RemovePages => Self::RemovePages,
            Undo::RemoveCdi => Self::RemoveCdi,
        }
    }
}

impl From<UndoStep> for Undo {
    fn from(undo: UndoStep) -> Self {
        match undo {
            UndoStep::DestroyGpuInstance { gpu, at } => Self::DestroyGpuInstance(at.key(gpu)),
            UndoStep::DestroyComputeInstances { gpu, at } => Self::DestroyComputeInstances(at.key(gpu)),
            UndoStep::ResetInterval { gpu } => Self::ResetInterval { gpu: gpu.into() },
            UndoStep::ResetComputeMode { gpu } => Self::ResetComputeMode { gpu: gpu.into() },
            UndoStep::StopMps { gpu, mig: None } => Self::StopMps { part: Part::Whole { gpu: gpu.into() } },
            UndoStep::StopMps { gpu, mig: Some(at) } => Self::StopMps { part: Part::Instance(at.key(gpu)) },
            UndoStep::RemovePages => Self::RemovePages,
            UndoStep::RemoveCdi => Self::RemoveCdi,
        }
    }
}

#[cfg(test)]
mod tests;
