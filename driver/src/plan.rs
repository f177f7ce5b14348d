//! Turns an allocated claim into steps. Pure: no clock, no files, no NVML.
//!
//! The scheduler has already decided; this is the last line of defence. It
//! refuses what would give one part of a GPU to two claims or two modes to one
//! GPU, whoever asked for it, and says which claim is in the way.
//!
//! Claims that share a GPU hold all of it together, in one mode. The first sets
//! the GPU up; those after it find a claim that is Prepared and join it, which
//! costs them nothing. Shares of a GPU or of a MIG instance join each other in the
//! same way, and together never have more memory than there is.
//!
//! A claim with adminAccess looks on: it gets what is there, nothing is made
//! for it and nothing is held by it. A mode that the node's configuration turned
//! off is no reason to refuse: the scheduler was told, and a claim that it had
//! allocated before is to be served.

mod needs;
mod part;
mod refusal;
pub use part::{Access, Holding, Part};
pub use refusal::{PlanError, Refusal};

use crate::sharing::{MpsLimits, Setup, ShareLimits};
use crate::step::{InstanceKey, Step, Undo};
use divvy_api::sharing::Mode;
use divvy_api::{
    AllocatedClaim, AllocatedDevice, ClaimRef, DeviceName, GpuUuid, Hold, PoolName, Quantity, RequestName,
    ShareId,
};
use divvy_model::inventory::{Condition, Presence};
use divvy_model::share;
use divvy_model::{DeviceId, Gpu, Inventory};
use needs::Needs;
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
    pub share_id: Option<ShareId>,
    pub access: Access,
    pub part: Part,
}

/// What is wrong with the hardware of a GPU, if anything is; a sick MPS daemon is
/// the MPS device's trouble alone.
pub fn trouble(gpu: &Gpu) -> Option<&Condition> {
    gpu.conditions.iter().find(|condition| !matches!(condition, Condition::Mps { .. }))
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
    one_daemon_per_request(&plan)?;
    if plan.devices.iter().any(|device| device.access.limits().is_some()) {
        plan.steps.push(Step::WritePages);
    }
    plan.steps.push(Step::WriteCdi);
    Ok(plan)
}

/// One device: find it, refuse what stands against it, then say what it takes.
fn add(plan: &mut Plan, device: &AllocatedDevice, view: View<'_>) -> Result<(), Refusal> {
    if device.pool != *view.pool {
        return Err(Refusal::OtherPool { pool: device.pool.clone(), ours: view.pool.clone() });
    }
    let Found { gpu, part, mode, memory } =
        find(&device.device, view.inventory).ok_or(Refusal::UnknownDevice)?;
    // Of all claims that share the GPU the first that is done shows how.
    let others = || view.held.iter().filter(|held| held.claim.uid != plan.claim.uid);
    let access = access(device, gpu, mode, memory)?;
    let beside = || others().filter(|held| held.part == part && held.access.joins(access));
    let joined = beside().find(|held| held.ready);
    let access = match (access, joined.map(|held| held.access)) {
        (Access::Shared(Setup::Timeslice(_)), Some(theirs)) => theirs,
        _ => access,
    };
    if gpu.presence == Presence::Missing {
        return Err(Refusal::Missing { gpu: gpu.uuid.clone() });
    }
    if access.holds() {
        may_have(plan, gpu, &part, access, others())?;
        if let Some(limits) = access.limits() {
            let taken = beside().map(|held| held.access);
            has_room(plan, gpu, &part, memory, limits, taken)?;
        }
        let needs = match (&part, joined) {
            // The claim that is there keeps MIG mode off.
            (Part::Whole { .. }, Some(_)) => Needs::default(),
            (Part::Whole { .. }, None) => needs::whole(gpu, view.mig_enabled)?,
            (Part::Instance(_), Some(joined)) => {
                Needs { steps: joined.made_by_first(), meets_foreign: false }
            }
            (Part::Instance(key), None) => match beside().next() {
                None => needs::instance(gpu, key)?,
                // Nobody knows whether the instance is there.
                Some(held) => {
                    return Err(Refusal::HalfDone { gpu: gpu.uuid.clone(), holder: held.claim.clone() });
                }
            },
        };
        plan.meets_foreign |= needs.meets_foreign;
        let sets_up = access.setup().map(|setup| needs::sets_up(gpu, &part, setup, joined.is_some()));
        for step in needs.steps.into_iter().chain(sets_up.into_iter().flatten()) {
            push(&mut plan.steps, step);
        }
    }
    plan.devices.push(PlannedDevice {
        request: device.request.clone(),
        pool: device.pool.clone(),
        device: device.device.clone(),
        share_id: device.hold.share_id().cloned(),
        access,
        part,
    });
    Ok(())
}

/// Once what two devices of the claim need once.
fn push(steps: &mut Vec<Step>, step: Step) {
    if let Step::StartMps { part, limits } = &step {
        let started = steps.iter_mut().find_map(|have| match have {
            Step::StartMps { part: other, limits } if other == part => Some(limits),
            _ => None,
        });
        if let Some(have) = started {
            *have = have.or_more(*limits);
            return;
        }
    }
    if !steps.contains(&step) {
        steps.push(step);
    }
}

/// What a device name stands for on this node.
struct Found<'a> {
    gpu: &'a Gpu,
    part: Part,
    mode: Mode,
    /// Bytes, as published.
    memory: u64,
}

fn find<'a>(name: &DeviceName, inventory: &'a Inventory) -> Option<Found<'a>> {
    let id = DeviceId::try_from(name).ok()?;
    let (gpu, instance) = id.resolve(inventory).ok()?;
    let memory = share::memory(gpu, instance);
    let part = match instance {
        None => Part::Whole { gpu: gpu.uuid.clone() },
        Some((profile, placement)) => {
            Part::Instance(InstanceKey { gpu: gpu.uuid.clone(), profile_id: profile.id, placement })
        }
    };
    Some(Found { gpu, part, mode: id.mode(), memory })
}

/// How the claim has the device. Where the server knows no shares, a device to
/// be shared is allocated to one claim at a time; that claim is its only sharer.
fn access(device: &AllocatedDevice, gpu: &Gpu, mode: Mode, memory: u64) -> Result<Access, Refusal> {
    if mode.has_shares()
        && let Some(share) = share::share(&device.hold, memory)?
    {
        let settings = device.share_settings()?;
        return Ok(Access::Share(ShareLimits { memory: share.memory, cores: share.cores, settings }));
    }
    let sharing = device.sharing(mode)?;
    let none = Default::default();
    let consumed = match &device.hold {
        Hold::Admin { .. } => return Ok(Access::Admin),
        Hold::Exclusive => &none,
        Hold::Share { consumed, .. } => consumed,
    };
    match mode {
        Mode::Timeslice => Ok(Access::Shared(Setup::Timeslice(gpu.policy.interval))),
        Mode::Mps => {
            let limits = MpsLimits::of_share(consumed, gpu.memory_bytes, &gpu.policy);
            Ok(Access::Shared(Setup::Mps(limits)))
        }
        Mode::Whole | Mode::Mig => {
            let uuid = (mode == Mode::Whole).then_some(&gpu.uuid);
            Ok(Access::Exclusive(sharing.map(|sharing| Setup::of_config(&sharing, uuid))))
        }
    }
}

/// Nothing is wrong with the GPU and nobody else has the part.
fn may_have<'a>(
    plan: &Plan,
    gpu: &Gpu,
    part: &Part,
    access: Access,
    mut others: impl Iterator<Item = &'a Holding>,
) -> Result<(), Refusal> {
    let sick = match access {
        Access::Shared(Setup::Mps(_)) => gpu.conditions.first(),
        _ => trouble(gpu),
    };
    if let Some(condition) = sick {
        return Err(Refusal::Unusable { gpu: gpu.uuid.clone(), condition: condition.clone() });
    }
    let own = |device: &PlannedDevice| {
        device.access.holds() && part.excludes(access, (&device.part, device.access))
    };
    if plan.devices.iter().any(own) {
        return Err(Refusal::OverlapsItself);
    }
    let Some(in_the_way) = others.find(|held| part.excludes(access, (&held.part, held.access))) else {
        return Ok(());
    };
    let (gpu, holder) = (gpu.uuid.clone(), in_the_way.claim.clone());
    let (wanted, held) = (part.mode(access), in_the_way.part.mode(in_the_way.access));
    Err(match wanted == held {
        true => Refusal::Held { gpu, holder },
        false => Refusal::OtherMode { gpu, wanted, holder, held },
    })
}

/// Whether a part has memory and guaranteed compute time left for one more share. The
/// scheduler has counted already, and what it counts by may have changed since.
fn has_room(
    plan: &Plan,
    gpu: &Gpu,
    part: &Part,
    memory: u64,
    limits: ShareLimits,
    others: impl Iterator<Item = Access>,
) -> Result<(), Refusal> {
    let own = plan.devices.iter().filter(|device| device.part == *part).map(|device| device.access);
    let (mut bytes, mut cores) = (memory, 100_u32);
    for other in others.chain(own).filter_map(Access::limits) {
        bytes = bytes.saturating_sub(other.memory);
        cores = cores.saturating_sub(other.cores);
    }
    let gpu = || gpu.uuid.clone();
    if limits.memory > bytes {
        let (left, wanted) = (Quantity::bytes(bytes), Quantity::bytes(limits.memory));
        return Err(Refusal::Full { gpu: gpu(), left, wanted });
    }
    if limits.cores > cores {
        return Err(Refusal::Busy { gpu: gpu(), left: cores, wanted: limits.cores });
    }
    Ok(())
}

/// A container gets all devices of a request, and reaches one daemon only.
fn one_daemon_per_request(plan: &Plan) -> Result<(), PlanError> {
    let clients = || plan.devices.iter().filter(|d| matches!(d.access.setup(), Some(Setup::Mps(_))));
    let two = |device: &&PlannedDevice| {
        clients().any(|other| other.request == device.request && other.part != device.part)
    };
    match clients().find(two) {
        None => Ok(()),
        Some(device) => Err(PlanError {
            claim: plan.claim.clone(),
            device: device.device.clone(),
            cause: Box::new(Refusal::TwoDaemons { request: device.request.clone() }),
        }),
    }
}

#[cfg(test)]
mod tests;
