//! Turns an allocated claim into steps. Pure: no clock, no files, no NVML.
//!
//! The scheduler has already decided; planning is the last check. It refuses to give one part of a
//! GPU to two claims, or two modes to one GPU, and names the claim that is in the way. The first
//! claim that shares a GPU or instance sets it up, and later ones join it ([`Step::Join`]). Claims
//! with adminAccess get only what exists and hold nothing. A disabled mode is not refused here, because
//! earlier claims stay valid. Refused is what overlaps a claim on a device that was removed too early.

use crate::claims::holding::{Access, Holding};
use crate::claims::records::Debt;
use crate::claims::step::{Step, Undo};
use crate::gpu::part::{InstanceKey, Part};
use crate::gpu::sharing::{MpsLimits, Setup, ShareLimits};
use divvy_api::check::ONE_DAEMON_PER_CONTAINER;
use divvy_api::config::ConfigMismatch;
use divvy_api::sharing::{Interval, Mode};
use divvy_api::{
    AllocatedClaim, AllocatedDevice, ClaimRef, DeviceName, GpuUuid, Hold, PoolName, Quantity, RequestName,
    ShareId,
};
use divvy_model::closing::Allocated;
use divvy_model::inventory::{Condition, MigMode, MigToggle, Origin, Presence};
use divvy_model::share::ShareError;
use divvy_model::{DeviceId, Gpu, GpuInstance, Inventory, Mig, share};
use std::collections::BTreeSet;

/// Input of planning.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The node's pool.
    pub pool: &'a PoolName,
    pub inventory: &'a Inventory,
    /// Holdings of other claims on the GPUs of this claim, unfinished claims included.
    pub held: &'a [Holding],
    /// Debts of the GPUs of this claim.
    pub debts: &'a [Debt],
    /// GPUs on which Divvy enabled MIG mode and has not disabled it, even if the inventory does not
    /// show it yet.
    pub mig_enabled: &'a BTreeSet<GpuUuid>,
}

/// The devices and steps of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub claim: ClaimRef,
    /// In the order of the allocation.
    pub devices: Vec<PlannedDevice>,
    pub steps: Vec<Step>,
    /// Whether an instance that Divvy did not create is used by the plan. The caller then reads the
    /// hardware again before it trusts the plan.
    pub involves_foreign: bool,
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

impl Plan {
    /// The undo steps of the whole plan, in the order of its steps.
    pub fn undo(&self) -> Vec<Undo> {
        self.steps.iter().filter_map(Step::undo).collect()
    }
}

/// The GPUs of a claim that this node knows. They must be locked before [`plan`] is called.
pub fn gpus(claim: &AllocatedClaim, inventory: &Inventory) -> BTreeSet<GpuUuid> {
    let known = |device: &AllocatedDevice| {
        let id = DeviceId::try_from(&device.device).ok()?;
        Some(inventory.gpu(id.gpu())?.uuid.clone())
    };
    claim.devices.iter().filter_map(known).collect()
}

/// Plans the steps that prepare the claim's devices.
pub fn plan(claim: &AllocatedClaim, view: View<'_>) -> Result<Plan, PlanError> {
    let mut plan =
        Plan { claim: claim.claim.clone(), devices: Vec::new(), steps: Vec::new(), involves_foreign: false };
    for device in &claim.devices {
        add(&mut plan, device, view).map_err(|refusal| PlanError {
            claim: claim.claim.clone(),
            device: device.device.clone(),
            cause: Box::new(refusal),
        })?;
    }
    check_one_daemon_per_request(&plan)?;
    if plan.devices.iter().any(|device| device.access.limits().is_some()) {
        plan.steps.push(Step::WritePages);
    }
    plan.steps.push(Step::WriteCdi);
    Ok(plan)
}

/// Adds one device: finds it, checks that it is available, and adds its steps.
fn add(plan: &mut Plan, device: &AllocatedDevice, view: View<'_>) -> Result<(), Refusal> {
    if device.pool != *view.pool {
        return Err(Refusal::OtherPool { pool: device.pool.clone(), ours: view.pool.clone() });
    }
    let Found { gpu, part, mode, memory, observer } =
        find(&device.device, view.inventory).ok_or(Refusal::UnknownDevice)?;
    // Among the claims that share the GPU, the first one that is Prepared defines the setup.
    let others = || view.held.iter().filter(|held| held.claim.uid != plan.claim.uid);
    if observer && !matches!(device.hold, Hold::Admin { .. }) {
        return Err(Refusal::OnlyObserves);
    }
    let access = access(device, gpu, mode, memory)?;
    let sharers = || others().filter(|held| held.part == part && held.access.can_share_with(access));
    let joined = sharers().find(|held| held.ready);
    let access = match (access, joined.map(|held| held.access)) {
        (Access::Shared(Setup::Timeslice(_)), Some(theirs)) => theirs,
        _ => access,
    };
    match gpu.presence {
        Presence::Present => {}
        Presence::Unread => return Err(Refusal::Unread { gpu: gpu.uuid.clone() }),
        Presence::Missing => return Err(Refusal::Missing { gpu: gpu.uuid.clone() }),
    }
    if access.holds() {
        check_debts(&part, &plan.claim, view.debts)?;
        check_removed(device, gpu, &plan.claim, view.inventory)?;
        check_available(plan, gpu, &part, access, others())?;
        if let Some(limits) = access.limits() {
            let taken = sharers().map(|held| held.access);
            check_capacity(plan, gpu, &part, memory, limits, taken)?;
        }
        let needs = match (&part, joined) {
            // The claims that share the GPU keep MIG mode off.
            (Part::Whole { .. }, Some(_)) => Requirements::default(),
            (Part::Whole { .. }, None) => whole_gpu_requirements(gpu, view.mig_enabled)?,
            (Part::Instance(_), Some(joined)) => {
                Requirements { steps: joined.creation_steps(), involves_foreign: false }
            }
            (Part::Instance(key), None) => match sharers().next() {
                None => instance_requirements(gpu, key)?,
                // The other claim is unfinished, so the instance may or may not exist.
                Some(held) => {
                    return Err(Refusal::HalfDone { gpu: gpu.uuid.clone(), holder: held.claim.clone() });
                }
            },
        };
        plan.involves_foreign |= needs.involves_foreign;
        let setup_steps = access.setup().map(|setup| setup_steps(gpu, &part, setup, joined.is_some()));
        for step in needs.steps.into_iter().chain(setup_steps.into_iter().flatten()) {
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

/// Adds a step unless the plan has it. For a daemon that is already planned, the limits are combined.
fn push(steps: &mut Vec<Step>, step: Step) {
    if let Step::StartMps { part, limits } = &step {
        let started = steps.iter_mut().find_map(|have| match have {
            Step::StartMps { part: other, limits } if other == part => Some(limits),
            _ => None,
        });
        if let Some(have) = started {
            *have = have.or_larger(*limits);
            return;
        }
    }
    if !steps.contains(&step) {
        steps.push(step);
    }
}

/// The part of a GPU that a device name stands for.
struct Found<'a> {
    gpu: &'a Gpu,
    part: Part,
    mode: Mode,
    /// Memory in bytes, as published.
    memory: u64,
    /// Whether the device is for adminAccess only.
    observer: bool,
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
    Some(Found { gpu, part, mode: id.mode(), memory, observer: matches!(id, DeviceId::Observer(_)) })
}

/// How the claim holds the device. On an API server without consumable capacity, a shared device is
/// allocated to one claim at a time; that claim is its only user.
fn access(device: &AllocatedDevice, gpu: &Gpu, mode: Mode, memory: u64) -> Result<Access, Refusal> {
    if mode.may_hold_shares()
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
        // A share of everything is the whole device.
        Mode::Whole | Mode::Share | Mode::Mig => {
            let uuid = (mode != Mode::Mig).then_some(&gpu.uuid);
            Ok(Access::Exclusive(sharing.map(|sharing| Setup::of_config(&sharing, uuid))))
        }
    }
}

/// Checks that no other claim left anything on the part. A claim whose record was quarantined may be
/// prepared again while its containers run.
fn check_debts(part: &Part, claim: &ClaimRef, debts: &[Debt]) -> Result<(), Refusal> {
    let own = |debt: &Debt| debt.claim.uid == claim.uid && !debt.held.is_empty();
    let overlaps = |debt: &&Debt| debt.parts().iter().any(|left| left.overlaps(part));
    match debts.iter().filter(|debt| !own(debt)).find(overlaps) {
        None => Ok(()),
        Some(debt) => Err(Refusal::NotUndone {
            gpu: debt.gpu.clone(),
            claim: debt.claim.clone(),
            what: debt.to_string(),
        }),
    }
}

/// Checks that no other claim is allocated on an overlapping device that was removed from the pool.
/// The scheduler did not charge that device, so it may have allocated the GPU twice.
fn check_removed(
    device: &AllocatedDevice,
    gpu: &Gpu,
    claim: &ClaimRef,
    inventory: &Inventory,
) -> Result<(), Refusal> {
    match inventory.removals.overlap(inventory, &claim.uid, &device.device) {
        None => Ok(()),
        Some(Allocated { device, claim }) => {
            Err(Refusal::Removed { gpu: gpu.uuid.clone(), device: device.clone(), holder: claim.clone() })
        }
    }
}

/// Checks that the GPU works and that no other claim holds the part.
fn check_available<'a>(
    plan: &Plan,
    gpu: &Gpu,
    part: &Part,
    access: Access,
    mut others: impl Iterator<Item = &'a Holding>,
) -> Result<(), Refusal> {
    let placement = match part {
        Part::Whole { .. } => None,
        Part::Instance(key) => Some(key.placement),
    };
    let failed_mps = match access {
        Access::Shared(Setup::Mps(_)) => {
            gpu.conditions.iter().find(|condition| matches!(condition, Condition::Mps { .. }))
        }
        _ => None,
    };
    if let Some(condition) = gpu.obstacle(placement).or(failed_mps) {
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

/// Checks that the part has memory and guaranteed compute time left for one more share. The
/// scheduler checked this too, but the published capacity may have changed since.
fn check_capacity(
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

/// Checks that all MPS devices of a request are served by one daemon: a container gets all devices of
/// a request, and can connect to one daemon only.
fn check_one_daemon_per_request(plan: &Plan) -> Result<(), PlanError> {
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

/// Steps that one device needs.
#[derive(Default)]
struct Requirements {
    steps: Vec<Step>,
    involves_foreign: bool,
}

/// Requirements of a whole GPU: it has no foreign instance, and MIG mode is off.
fn whole_gpu_requirements(gpu: &Gpu, mig_enabled: &BTreeSet<GpuUuid>) -> Result<Requirements, Refusal> {
    let Mig::Supported { mode, toggle, instances, .. } = &gpu.mig else {
        return Ok(Requirements::default());
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
    Ok(Requirements { steps, involves_foreign: false })
}

/// Requirements of a MIG instance: it is created, or used as it is if it has another owner.
fn instance_requirements(gpu: &Gpu, key: &InstanceKey) -> Result<Requirements, Refusal> {
    let Mig::Supported { mode, toggle, instances, .. } = &gpu.mig else {
        return Err(Refusal::UnknownDevice);
    };
    let in_the_way =
        |other: &&GpuInstance| !matches_key(other, key) && other.placement.overlaps(key.placement);
    if let Some(other) = foreign(instances).find(in_the_way) {
        return Err(Refusal::Foreign { gpu: gpu.uuid.clone(), instance: other.id });
    }
    if *mode == MigMode::Off && *toggle == MigToggle::NeedsReset {
        return Err(Refusal::NeedsMigOn { gpu: gpu.uuid.clone() });
    }
    let there = foreign(instances).find(|other| matches_key(other, key));
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
    Ok(Requirements { steps, involves_foreign: there.is_some() })
}

/// Instances that Divvy did not create. Divvy's own are judged by the records, because the inventory
/// may lag behind a change of a moment ago.
fn foreign(instances: &[GpuInstance]) -> impl Iterator<Item = &GpuInstance> {
    instances.iter().filter(|instance| instance.origin == Origin::Foreign)
}

fn matches_key(instance: &GpuInstance, key: &InstanceKey) -> bool {
    instance.profile_id == key.profile_id && instance.placement == key.placement
}

/// Steps that set up a part so that processes can share it.
fn setup_steps(gpu: &Gpu, part: &Part, setup: Setup, joined: bool) -> Vec<Step> {
    let by_first = |step| if joined { Step::Join(Box::new(step)) } else { step };
    let uuid = || gpu.uuid.clone();
    match setup {
        // The GPU driver's default needs no step and no tool.
        Setup::Timeslice(Interval::Default) => Vec::new(),
        Setup::Timeslice(interval) => vec![by_first(Step::SetInterval { gpu: uuid(), interval })],
        Setup::Mps(limits) => {
            // MIG devices have no compute mode.
            let mode =
                matches!(part, Part::Whole { .. }).then(|| by_first(Step::SetComputeMode { gpu: uuid() }));
            let start = Step::StartMps { part: part.clone(), limits };
            mode.into_iter().chain([start]).collect()
        }
    }
}

/// Why a claim is refused. The message names claim, device and cause.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("claim {claim}: device {device} {cause}")]
pub struct PlanError {
    pub claim: ClaimRef,
    pub device: DeviceName,
    pub cause: Box<Refusal>,
}

/// Why a device cannot be given to the claim.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("is of pool {pool}, and this node's pool is {ours}")]
    OtherPool { pool: PoolName, ours: PoolName },
    #[error("is not on this node")]
    UnknownDevice,
    #[error(transparent)]
    Consumed(#[from] ShareError),
    #[error("has {left} of memory left beside other shares on {gpu}, and the claim requests {wanted}")]
    Full { gpu: GpuUuid, left: Quantity, wanted: Quantity },
    #[error(
        "has {left} percent of the cores left beside other shares on {gpu}, and the claim requests {wanted}"
    )]
    Busy { gpu: GpuUuid, left: u32, wanted: u32 },
    #[error("is shared with claim {holder}, which is not prepared yet on {gpu}; retry")]
    HalfDone { gpu: GpuUuid, holder: ClaimRef },
    #[error("is on {gpu}, which is missing")]
    Missing { gpu: GpuUuid },
    #[error("is on {gpu}, and the GPU driver is not loaded or is being replaced; retry when it is back")]
    Unread { gpu: GpuUuid },
    #[error("cannot be used now: {condition} on {gpu}")]
    Unusable { gpu: GpuUuid, condition: Condition },
    #[error("overlaps what released claim {claim} left on {gpu}: {what}; it is retried every 10 s")]
    NotUndone { gpu: GpuUuid, claim: ClaimRef, what: String },
    #[error(
        "overlaps device {device} on {gpu}, which is not published and which claim {holder} is allocated; \
         delete the pods of one of the two claims"
    )]
    Removed { gpu: GpuUuid, device: DeviceName, holder: ClaimRef },
    #[error("overlaps what claim {holder} holds on {gpu}")]
    Held { gpu: GpuUuid, holder: ClaimRef },
    #[error("needs {gpu} in mode {wanted}, and claim {holder} holds it in mode {held}")]
    OtherMode { gpu: GpuUuid, wanted: Mode, holder: ClaimRef, held: Mode },
    #[error("has a configuration that does not fit: {0}")]
    Config(#[from] ConfigMismatch),
    #[error("is of request {request}: {ONE_DAEMON_PER_CONTAINER}")]
    TwoDaemons { request: RequestName },
    #[error("is for monitoring only; request it with adminAccess, or another class of devices")]
    OnlyObserves,
    #[error("overlaps another device of the same claim")]
    OverlapsItself,
    #[error("overlaps GPU instance {instance} of {gpu}, which Divvy did not create; destroy it or claim it")]
    Foreign { gpu: GpuUuid, instance: u32 },
    #[error("needs MIG mode off on {gpu}, which requires a GPU reset; drain the node and turn it off")]
    NeedsMigOff { gpu: GpuUuid },
    #[error("needs MIG mode on on {gpu}, which requires a GPU reset; drain the node and turn it on")]
    NeedsMigOn { gpu: GpuUuid },
}

impl PlanError {
    /// Whether a new reading of the GPUs may end the cause: an instance of another owner may be gone, and
    /// a failed reading may succeed.
    pub fn may_be_outdated(&self) -> bool {
        matches!(
            *self.cause,
            Refusal::Foreign { .. } | Refusal::Unusable { condition: Condition::MigUnreadable { .. }, .. }
        )
    }
}

#[cfg(test)]
mod tests;
