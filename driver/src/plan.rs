//! Turns an allocated claim into steps. Pure: no clock, no files, no NVML.
//!
//! The scheduler has already decided; this is the last line of defence. It
//! refuses what would give one part of a GPU to two claims or two modes to one
//! GPU, whoever asked for it, and says which claim is in the way.
//!
//! A claim with adminAccess looks on: it gets what is there, nothing is made
//! for it and nothing is held by it.

use crate::step::{InstanceKey, Step, Undo};
use divvy_api::sharing::Mode;
use divvy_api::{
    AllocatedClaim, AllocatedDevice, ClaimRef, DeviceName, GpuUuid, Hold, PoolName, RequestName,
};
use divvy_model::inventory::{Condition, MigMode, MigToggle, Origin, Presence};
use divvy_model::{DeviceId, Gpu, GpuInstance, Inventory, Mig};
use std::collections::BTreeSet;

/// What planning may look at.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The node's pool.
    pub pool: &'a PoolName,
    pub inventory: &'a Inventory,
    /// What other claims hold on the GPUs of this claim, half-done ones included.
    pub held: &'a [Holding],
    /// GPUs on which we turned MIG mode on and have not turned it off, whatever
    /// the inventory last saw.
    pub mig_enabled: &'a BTreeSet<GpuUuid>,
}

/// A part of a GPU that a claim has for itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    pub claim: ClaimRef,
    pub part: Part,
}

/// What of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    Whole { gpu: GpuUuid },
    Instance(InstanceKey),
}

/// Whether the claim has it for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Exclusive,
    Admin,
}

/// What is to be done for a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub claim: ClaimRef,
    /// In the order of the allocation.
    pub devices: Vec<PlannedDevice>,
    pub steps: Vec<Step>,
    /// Some instance of it was found made by somebody else, or somebody else's
    /// is in its way: look at the hardware before believing it.
    pub meets_foreign: bool,
}

/// A device of the claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedDevice {
    pub request: RequestName,
    pub pool: PoolName,
    pub device: DeviceName,
    pub access: Access,
    pub part: Part,
}

/// Why a claim cannot be had; the message names claim, device and cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("claim {claim}: device {device} {cause}")]
pub struct PlanError {
    pub claim: ClaimRef,
    pub device: DeviceName,
    pub cause: Box<Refusal>,
}

/// What stands against a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("is of pool {pool}, and this node's pool is {ours}")]
    OtherPool { pool: PoolName, ours: PoolName },
    #[error("is not on this node")]
    UnknownDevice,
    #[error("cannot be shared; ask for it without a capacity")]
    Share,
    #[error("is on {gpu}, which is missing")]
    Missing { gpu: GpuUuid },
    #[error("cannot be used now: {condition} on {gpu}")]
    Unusable { gpu: GpuUuid, condition: Condition },
    #[error("overlaps what claim {holder} holds on {gpu}")]
    Held { gpu: GpuUuid, holder: ClaimRef },
    #[error("overlaps another device of the same claim")]
    OverlapsItself,
    #[error("overlaps GPU instance {instance} of {gpu}, which Divvy did not make; destroy it or claim it")]
    Foreign { gpu: GpuUuid, instance: u32 },
    #[error("needs MIG mode off on {gpu}, which takes a GPU reset; drain the node and turn it off")]
    NeedsMigOff { gpu: GpuUuid },
    #[error("needs MIG mode on on {gpu}, which takes a GPU reset; drain the node and turn it on")]
    NeedsMigOn { gpu: GpuUuid },
}

impl PlanError {
    /// Whether the cause is something that the inventory may have seen too early.
    pub fn meets_foreign(&self) -> bool {
        matches!(*self.cause, Refusal::Foreign { .. })
    }
}

impl Part {
    /// The GPU it lies on.
    pub fn gpu(&self) -> &GpuUuid {
        match self {
            Self::Whole { gpu } => gpu,
            Self::Instance(key) => &key.gpu,
        }
    }

    /// Whether two claims cannot have both.
    pub fn excludes(&self, other: &Self) -> bool {
        self.gpu() == other.gpu()
            && match (self, other) {
                (Self::Instance(one), Self::Instance(two)) => one.placement.overlaps(two.placement),
                _ => true,
            }
    }
}

impl Plan {
    /// What takes the whole plan back, in the order of its steps.
    pub fn undo(&self) -> Vec<Undo> {
        self.steps.iter().filter_map(Step::undo).collect()
    }
}

/// The GPUs that a claim touches, as far as this node knows them; what must be
/// locked before [`plan`] is asked.
pub fn gpus(claim: &AllocatedClaim, inventory: &Inventory) -> BTreeSet<GpuUuid> {
    let known = |device: &AllocatedDevice| {
        let id = DeviceId::try_from(&device.device).ok()?;
        Some(inventory.gpu(id.gpu())?.uuid.clone())
    };
    claim.devices.iter().filter_map(known).collect()
}

/// The steps that make the claim's devices ready.
pub fn plan(claim: &AllocatedClaim, view: View<'_>) -> Result<Plan, PlanError> {
    let mut plan =
        Plan { claim: claim.claim.clone(), devices: Vec::new(), steps: Vec::new(), meets_foreign: false };
    for device in &claim.devices {
        add(&mut plan, device, view).map_err(|refusal| PlanError {
            claim: claim.claim.clone(),
            device: device.device.clone(),
            cause: Box::new(refusal),
        })?;
    }
    plan.steps.push(Step::WriteCdi);
    Ok(plan)
}

/// One device: find it, refuse what stands against it, then say what it takes.
fn add(plan: &mut Plan, device: &AllocatedDevice, view: View<'_>) -> Result<(), Refusal> {
    if device.pool != *view.pool {
        return Err(Refusal::OtherPool { pool: device.pool.clone(), ours: view.pool.clone() });
    }
    let (gpu, part) = find(&device.device, view.inventory).ok_or(Refusal::UnknownDevice)?;
    let access = match &device.hold {
        Hold::Exclusive => Access::Exclusive,
        Hold::Admin => Access::Admin,
        Hold::Share { .. } => return Err(Refusal::Share),
    };
    if gpu.presence == Presence::Missing {
        return Err(Refusal::Missing { gpu: gpu.uuid.clone() });
    }
    if access == Access::Exclusive {
        may_have(plan, gpu, &part, view.held)?;
        let needs = match &part {
            Part::Whole { .. } => whole(gpu, view.mig_enabled)?,
            Part::Instance(key) => instance(gpu, key)?,
        };
        plan.meets_foreign |= needs.meets_foreign;
        for step in needs.steps {
            if !plan.steps.contains(&step) {
                plan.steps.push(step);
            }
        }
    }
    plan.devices.push(PlannedDevice {
        request: device.request.clone(),
        pool: device.pool.clone(),
        device: device.device.clone(),
        access,
        part,
    });
    Ok(())
}

/// What one device takes.
struct Needs {
    steps: Vec<Step>,
    meets_foreign: bool,
}

/// The device that a name stands for on this node.
fn find<'a>(name: &DeviceName, inventory: &'a Inventory) -> Option<(&'a Gpu, Part)> {
    let id = DeviceId::try_from(name).ok().filter(|id| matches!(id.mode(), Mode::Whole | Mode::Mig))?;
    let (gpu, instance) = id.resolve(inventory).ok()?;
    let part = match instance {
        None => Part::Whole { gpu: gpu.uuid.clone() },
        Some((profile, placement)) => {
            Part::Instance(InstanceKey { gpu: gpu.uuid.clone(), profile_id: profile.id, placement })
        }
    };
    Some((gpu, part))
}

/// Nothing is wrong with the GPU and nobody else has the part.
fn may_have(plan: &Plan, gpu: &Gpu, part: &Part, held: &[Holding]) -> Result<(), Refusal> {
    if let Some(condition) = gpu.conditions.first() {
        return Err(Refusal::Unusable { gpu: gpu.uuid.clone(), condition: condition.clone() });
    }
    let own = |device: &PlannedDevice| device.access == Access::Exclusive && device.part.excludes(part);
    if plan.devices.iter().any(own) {
        return Err(Refusal::OverlapsItself);
    }
    match held.iter().find(|holding| holding.claim.uid != plan.claim.uid && holding.part.excludes(part)) {
        None => Ok(()),
        Some(holding) => Err(Refusal::Held { gpu: gpu.uuid.clone(), holder: holding.claim.clone() }),
    }
}

/// The whole GPU: no instance may be on it, and MIG mode must be off.
fn whole(gpu: &Gpu, mig_enabled: &BTreeSet<GpuUuid>) -> Result<Needs, Refusal> {
    let Mig::Supported { mode, toggle, instances, .. } = &gpu.mig else {
        return Ok(Needs { steps: Vec::new(), meets_foreign: false });
    };
    if let Some(other) = foreign(instances).next() {
        return Err(Refusal::Foreign { gpu: gpu.uuid.clone(), instance: other.id });
    }
    let on = *mode == MigMode::On || mig_enabled.contains(&gpu.uuid);
    let steps = match (on, toggle) {
        (false, _) => Vec::new(),
        (true, MigToggle::Live) => vec![Step::DisableMig { gpu: gpu.uuid.clone() }],
        (true, MigToggle::NeedsReset) => return Err(Refusal::NeedsMigOff { gpu: gpu.uuid.clone() }),
    };
    Ok(Needs { steps, meets_foreign: false })
}

/// A MIG instance: made, or taken as it is where somebody else made it.
fn instance(gpu: &Gpu, key: &InstanceKey) -> Result<Needs, Refusal> {
    let Mig::Supported { mode, toggle, instances, .. } = &gpu.mig else {
        return Err(Refusal::UnknownDevice);
    };
    let in_the_way = |other: &&GpuInstance| !is(other, key) && other.placement.overlaps(key.placement);
    if let Some(other) = foreign(instances).find(in_the_way) {
        return Err(Refusal::Foreign { gpu: gpu.uuid.clone(), instance: other.id });
    }
    if *mode == MigMode::Off && *toggle == MigToggle::NeedsReset {
        return Err(Refusal::NeedsMigOn { gpu: gpu.uuid.clone() });
    }
    let there = foreign(instances).find(|other| is(other, key));
    let mut steps = Vec::new();
    if there.is_none() {
        if *toggle == MigToggle::Live {
            steps.push(Step::EnableMig { gpu: gpu.uuid.clone() });
        }
        steps.push(Step::CreateGpuInstance(key.clone()));
    }
    if there.is_none_or(|instance| instance.compute_instances.is_empty()) {
        steps.push(Step::CreateComputeInstance(key.clone()));
    }
    Ok(Needs { steps, meets_foreign: there.is_some() })
}

/// Instances that somebody else made. Ours are judged by the records: the
/// inventory may lag behind what we made or destroyed a moment ago.
fn foreign(instances: &[GpuInstance]) -> impl Iterator<Item = &GpuInstance> {
    instances.iter().filter(|instance| instance.origin == Origin::Foreign)
}

fn is(instance: &GpuInstance, key: &InstanceKey) -> bool {
    instance.profile_id == key.profile_id && instance.placement == key.placement
}

#[cfg(test)]
mod tests;
