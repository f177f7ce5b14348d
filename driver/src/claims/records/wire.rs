//! The file format of a record: an envelope with format number and checksum, and a body.
//!
//! `{"format":1,"crc32":"5f0c7e21","record":{...}}`. The checksum covers the bytes of `record` as
//! they are in the file, so fields that a later build adds or omits never look like damage.
//!
//! The structs here belong to the format: a change of a domain type must not change a record.

use super::debts::Debt;
use super::record::HeldState;
use super::record::{ClaimRecord, DeviceRecord, InstanceIds};
use crate::claims::holding::Access;
use crate::claims::step::Undo;
use crate::gpu::epoch::Epoch;
use crate::gpu::part::{InstanceKey, Part};
use crate::gpu::sharing::{MpsLimits, Setup, ShareLimits};
use divvy_api::sharing::ShareSettings;
use divvy_api::{ClaimRef, sharing};
use divvy_model::Placement;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// The newest format that this build writes and reads.
///
/// | format | new in it |
/// |---|---|
/// | 1 | whole GPUs and MIG instances |
/// | 2 | the sharing setup of a device (`sharing`, `with`), and its undo steps |
/// | 3 | the limits of a share (`share`), and the undo of its pages |
///
/// Unknown fields are ignored. Information that an older build must not overlook needs a new
/// format, which makes the older build quarantine the file. A record is written in the lowest
/// format that can express it. So a downgrade quarantines only claims that the older build would
/// misread: a time-slice or a share as an exclusive GPU.
const FORMAT: u32 = 3;

/// Why bytes cannot be decoded as a record.
#[derive(Debug, thiserror::Error)]
pub(super) enum DecodeError {
    #[error("not a record: {0}")]
    Envelope(#[source] serde_json::Error),
    #[error("written in format {found}; this build reads up to {FORMAT}")]
    Format { found: u32 },
    #[error("checksum is {found}, but the content has {actual}")]
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
    #[serde(default, skip_serializing_if = "EpochFields::is_unknown")]
    epoch: EpochFields,
}

#[derive(Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct EpochFields {
    #[serde(skip_serializing_if = "Option::is_none")]
    boot: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    module: Option<u64>,
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
    /// How the claim's own pods share the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    sharing: Option<Sharing>,
    /// How the device is shared with other claims.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    with: Option<Sharing>,
    /// The limits of a share of the device.
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

/// Encodes a record as the content of its file.
pub(super) fn encode(record: &ClaimRecord) -> Result<Vec<u8>, serde_json::Error> {
    let format = record.devices.iter().map(|device| match device.access {
        Access::Share(_) => 3,
        access if access.setup().is_some() => 2,
        _ => 1,
    });
    enclose(format.max().unwrap_or(1), &Record::from(record))
}

/// Adds the envelope.
fn enclose(format: u32, body: &impl Serialize) -> Result<Vec<u8>, serde_json::Error> {
    let body = serde_json::to_string(body)?;
    let checksum = crc32fast::hash(body.as_bytes());
    Ok(format!("{{\"format\":{format},\"crc32\":\"{checksum:08x}\",\"record\":{body}}}\n").into_bytes())
}

/// Removes the envelope.
fn body(bytes: &[u8], newest: u32) -> Result<(u32, &RawValue), DecodeError> {
    let envelope: Envelope<'_> = serde_json::from_slice(bytes).map_err(DecodeError::Envelope)?;
    let actual = format!("{:08x}", crc32fast::hash(envelope.record.get().as_bytes()));
    match envelope.format {
        found if found == 0 || found > newest => Err(DecodeError::Format { found }),
        _ if actual != envelope.crc32 => Err(DecodeError::Checksum { found: envelope.crc32, actual }),
        format => Ok((format, envelope.record)),
    }
}

/// Decodes a file that this build or an older one wrote.
pub(super) fn decode(bytes: &[u8]) -> Result<ClaimRecord, DecodeError> {
    let (format, body) = body(bytes, FORMAT)?;
    let record: Record =
        serde_json::from_str(body.get()).map_err(|cause| DecodeError::Body { format, cause })?;
    Ok(record.into())
}

/// The claim, the held parts and the undo steps of a record in a newer format, as far as this build
/// understands them. `None` for any other file.
pub(super) fn decode_newer(bytes: &[u8]) -> Option<(ClaimRef, Vec<Part>, Vec<Undo>, Epoch)> {
    #[derive(Deserialize)]
    struct Newer {
        claim: Claim,
        #[serde(default)]
        devices: Vec<serde_json::Value>,
        #[serde(default)]
        undo: Vec<serde_json::Value>,
        #[serde(default)]
        epoch: EpochFields,
    }
    #[derive(Deserialize)]
    struct HeldDevice {
        #[serde(default)]
        admin: bool,
        gpu: String,
        #[serde(default)]
        mig: Option<At>,
    }
    let (format, body) = body(bytes, u32::MAX).ok()?;
    if format <= FORMAT {
        return None;
    }
    let newer: Newer = serde_json::from_str(body.get()).ok()?;
    let held =
        newer.devices.into_iter().filter_map(|device| serde_json::from_value::<HeldDevice>(device).ok());
    let held = held.filter(|device| !device.admin).map(|device| match device.mig {
        None => Part::Whole { gpu: device.gpu.into() },
        Some(at) => Part::Instance(at.key(device.gpu)),
    });
    let undo = newer.undo.into_iter().filter_map(|step| serde_json::from_value::<UndoStep>(step).ok());
    Some((newer.claim.into(), held.collect(), undo.map(Undo::from).collect(), newer.epoch.into()))
}

/// The newest format of a debt that this build writes and reads.
const DEBT_FORMAT: u32 = 1;

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct DebtFields {
    claim: Claim,
    gpu: String,
    #[serde(default)]
    epoch: EpochFields,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    held: Vec<Held>,
    undo: Vec<UndoStep>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    instances: Vec<Mig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reading: Option<divvy_model::HealthReading>,
    #[serde(default)]
    cause: String,
}

/// A held part: the whole GPU without `mig`.
#[derive(Serialize, Deserialize)]
struct Held {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mig: Option<At>,
}

/// Encodes a debt as the content of its file.
pub(super) fn encode_debt(debt: &Debt) -> Result<Vec<u8>, serde_json::Error> {
    let held = |part: &Part| Held {
        mig: match part {
            Part::Whole { .. } => None,
            Part::Instance(key) => Some(key.into()),
        },
    };
    let instances = debt.instances.iter();
    let fields = DebtFields {
        claim: Claim::from(&debt.claim),
        gpu: debt.gpu.to_string(),
        epoch: EpochFields::from(&debt.epoch),
        held: debt.held.iter().map(held).collect(),
        undo: debt.undo.iter().map(UndoStep::from).collect(),
        instances: instances.map(|(key, ids)| Mig { at: key.into(), instance: Some(ids.into()) }).collect(),
        reading: debt.reading,
        cause: debt.cause.clone(),
    };
    enclose(DEBT_FORMAT, &fields)
}

/// Decodes the file of a debt.
pub(super) fn decode_debt(bytes: &[u8]) -> Result<Debt, DecodeError> {
    let (format, body) = body(bytes, DEBT_FORMAT)?;
    let fields: DebtFields =
        serde_json::from_str(body.get()).map_err(|cause| DecodeError::Body { format, cause })?;
    let gpu = || fields.gpu.clone();
    let instances = fields.instances.iter().filter_map(|mig| {
        let ids = mig.instance.as_ref()?;
        Some((mig.at.key(gpu()), InstanceIds::from(ids)))
    });
    let held = |held: &Held| match held.mig {
        None => Part::Whole { gpu: gpu().into() },
        Some(at) => Part::Instance(at.key(gpu())),
    };
    Ok(Debt {
        instances: instances.collect(),
        held: fields.held.iter().map(held).collect(),
        gpu: gpu().into(),
        claim: fields.claim.into(),
        epoch: fields.epoch.into(),
        undo: fields.undo.into_iter().map(Undo::from).collect(),
        reading: fields.reading,
        cause: fields.cause,
    })
}

impl EpochFields {
    fn is_unknown(&self) -> bool {
        *self == Self::default()
    }
}

impl From<&Epoch> for EpochFields {
    fn from(epoch: &Epoch) -> Self {
        Self { boot: epoch.boot.clone(), module: epoch.module }
    }
}

impl From<EpochFields> for Epoch {
    fn from(fields: EpochFields) -> Self {
        Self { boot: fields.boot, module: fields.module }
    }
}

impl From<&ClaimRef> for Claim {
    fn from(claim: &ClaimRef) -> Self {
        Self { namespace: claim.namespace.clone(), name: claim.name.clone(), uid: claim.uid.to_string() }
    }
}

impl From<Claim> for ClaimRef {
    fn from(claim: Claim) -> Self {
        Self { namespace: claim.namespace, name: claim.name, uid: claim.uid.into() }
    }
}

impl From<&InstanceIds> for Instance {
    fn from(ids: &InstanceIds) -> Self {
        let InstanceIds { gpu_instance, compute_instance, uuid } = ids.clone();
        Self { gpu_instance, compute_instance, uuid }
    }
}

impl From<&Instance> for InstanceIds {
    fn from(ids: &Instance) -> Self {
        let (gpu_instance, compute_instance) = (ids.gpu_instance, ids.compute_instance);
        Self { gpu_instance, compute_instance, uuid: ids.uuid.clone() }
    }
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
        Self {
            claim: Claim::from(&record.claim),
            state: match record.state {
                HeldState::Intent => State::Intent,
                HeldState::Prepared => State::Prepared,
                HeldState::Releasing => State::Releasing,
            },
            devices: record.devices.iter().map(Device::from).collect(),
            undo: record.undo.iter().map(UndoStep::from).collect(),
            epoch: EpochFields::from(&record.epoch),
        }
    }
}

impl From<Record> for ClaimRecord {
    fn from(record: Record) -> Self {
        Self {
            claim: record.claim.into(),
            state: match record.state {
                State::Intent => HeldState::Intent,
                State::Prepared => HeldState::Prepared,
                State::Releasing => HeldState::Releasing,
            },
            devices: record.devices.into_iter().map(DeviceRecord::from).collect(),
            undo: record.undo.into_iter().map(Undo::from).collect(),
            epoch: record.epoch.into(),
        }
    }
}

impl From<&DeviceRecord> for Device {
    fn from(device: &DeviceRecord) -> Self {
        let instance = device.instance.as_ref().map(Instance::from);
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
            instance: instance.as_ref().map(InstanceIds::from),
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

/// The limits and settings of a share: everything that is needed to write its policy page again.
/// Fields that came after format 3 are omitted while they have their default, so that an older build
/// reads such records unchanged.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Share {
    /// Memory in bytes.
    memory: u64,
    /// Guaranteed compute time, in per cent.
    cores: u32,
    injection: Injection,
    observe_only: bool,
    priority: Priority,
    weight: u32,
    /// Per cent of the GPU's compute time.
    ceiling: u32,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    burst: bool,
    /// Per cent of `memory`; absent means 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    overcommit: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    encoders: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    decoders: Option<u32>,
    /// Absent means true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    messages: Option<bool>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Injection {
    Preload,
    Shim,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Priority {
    Low,
    High,
}

impl From<ShareLimits> for Share {
    fn from(limits: ShareLimits) -> Self {
        let ShareSettings { injection, observe_only, priority, weight, ceiling, burst, .. } = limits.settings;
        let ShareSettings { overcommit, encoders, decoders, messages, .. } = limits.settings;
        Self {
            memory: limits.memory,
            cores: limits.cores,
            injection: match injection {
                sharing::Injection::Preload => Injection::Preload,
                sharing::Injection::Shim => Injection::Shim,
            },
            observe_only,
            priority: match priority {
                sharing::Priority::Low => Priority::Low,
                sharing::Priority::High => Priority::High,
            },
            weight,
            ceiling,
            burst,
            overcommit: Some(overcommit).filter(|percent| *percent != 100),
            encoders,
            decoders,
            messages: Some(messages).filter(|messages| !messages),
        }
    }
}

impl From<Share> for ShareLimits {
    fn from(share: Share) -> Self {
        let settings = ShareSettings {
            injection: match share.injection {
                Injection::Preload => sharing::Injection::Preload,
                Injection::Shim => sharing::Injection::Shim,
            },
            observe_only: share.observe_only,
            priority: match share.priority {
                Priority::Low => sharing::Priority::Low,
                Priority::High => sharing::Priority::High,
            },
            weight: share.weight,
            ceiling: share.ceiling,
            burst: share.burst,
            overcommit: share.overcommit.unwrap_or(100),
            encoders: share.encoders,
            decoders: share.decoders,
            messages: share.messages.unwrap_or(true),
        };
        Self { memory: share.memory, cores: share.cores, settings }
    }
}

#[cfg(test)]
mod tests;
