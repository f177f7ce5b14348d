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

use crate::sharing::{MpsLimits, Setup, ShareLimits};
use crate::step::{InstanceKey, Step, Undo};
use divvy_api::check::ONE_DAEMON;
use divvy_api::config::Misfit;
use divvy_api::sharing::Mode;
use divvy_api::{
    AllocatedClaim, AllocatedDevice, ClaimRef, DeviceName, GpuUuid, Hold, PoolName, Quantity, RequestName,
    ShareId,
};
use divvy_model::inventory::{Condition, MigMode, MigToggle, Origin, Presence};
use divvy_model::share::{self, ShareError};
use divvy_model::{DeviceId, Gpu, GpuInstance, Inventory, Mig};
use std::collections::BTreeSet;
use std::fmt;

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

/// A part of a GPU that a claim has, for itself or with others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    pub claim: ClaimRef,
    pub part: Part,
    pub access: Access,
    /// Whether the claim is Prepared: what it was set up with is in force.
    pub ready: bool,
    /// What gives its GPU instance back; empty where somebody else made it.
    pub made: Vec<Undo>,
}

/// What of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    Whole { gpu: GpuUuid },
    Instance(InstanceKey),
}

/// Whether the claim has it for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It has; its own pods may share it so.
    Exclusive(Option<Setup>),
    /// Together with other claims of the same mode.
    Shared(Setup),
    /// A part of its memory, beside other shares.
    Share(ShareLimits),
    /// It looks on.
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
    pub share_id: Option<ShareId>,
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
    #[error(transparent)]
    Consumed(#[from] ShareError),
    #[error(
        "was allocated with {percent} per cent of the cores, and compute time is not divided yet; ask for memory alone"
    )]
    Cores { percent: u32 },
    #[error("has {left} of memory left beside other shares on {gpu}, and the claim takes {wanted}")]
    Full { gpu: GpuUuid, left: Quantity, wanted: Quantity },
    #[error("is shared with claim {holder}, which is half done on {gpu}; it is tried again")]
    HalfDone { gpu: GpuUuid, holder: ClaimRef },
    #[error("is on {gpu}, which is missing")]
    Missing { gpu: GpuUuid },
    #[error("cannot be used now: {condition} on {gpu}")]
    Unusable { gpu: GpuUuid, condition: Condition },
    #[error("overlaps what claim {holder} holds on {gpu}")]
    Held { gpu: GpuUuid, holder: ClaimRef },
    #[error("needs {gpu} in mode {wanted}, and claim {holder} holds it in mode {held}")]
    OtherMode { gpu: GpuUuid, wanted: Mode, holder: ClaimRef, held: Mode },
    #[error("has a configuration that does not fit: {0}")]
    Config(#[from] Misfit),
    #[error("is of request {request}: {ONE_DAEMON}")]
    TwoDaemons { request: RequestName },
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

    /// Whether nobody can have this and that at once.
    fn excludes(&self, access: Access, (other, others): (&Self, Access)) -> bool {
        self.gpu() == other.gpu()
            && match (self, other) {
                (Self::Instance(one), Self::Instance(two)) if one == two => !access.joins(others),
                (Self::Instance(one), Self::Instance(two)) => one.placement.overlaps(two.placement),
                (Self::Whole { .. }, Self::Whole { .. }) => !access.joins(others),
                _ => true,
            }
    }

    /// The mode that it gives the GPU.
    fn mode(&self, access: Access) -> Mode {
        match (self, access) {
            (Self::Whole { .. }, Access::Shared(setup)) => setup.mode(),
            (Self::Whole { .. }, _) => Mode::Whole,
            (Self::Instance(_), _) => Mode::Mig,
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole { gpu } => gpu.fmt(out),
            Self::Instance(key) => key.fmt(out),
        }
    }
}

impl Holding {
    /// The steps by which its instance was made, for a claim that shares it.
    fn made_by_first(&self) -> Vec<Step> {
        let made = |undo: &Undo| match undo {
            Undo::DestroyGpuInstance(key) => Some(Step::CreateGpuInstance(key.clone())),
            Undo::DestroyComputeInstances(key) => Some(Step::CreateComputeInstance(key.clone())),
            _ => None,
        };
        self.made.iter().filter_map(made).map(|step| Step::Join(Box::new(step))).collect()
    }
}

impl Access {
    /// Whether it keeps anything from others.
    pub fn holds(self) -> bool {
        self != Self::Admin
    }

    /// What the device is set up with.
    pub fn setup(self) -> Option<Setup> {
        match self {
            Self::Exclusive(setup) => setup,
            Self::Shared(setup) => Some(setup),
            Self::Share(_) | Self::Admin => None,
        }
    }

    /// What it may have of the device, if that is not all.
    pub fn limits(self) -> Option<ShareLimits> {
        match self {
            Self::Share(limits) => Some(limits),
            Self::Exclusive(_) | Self::Shared(_) | Self::Admin => None,
        }
    }

    /// Whether the two can have one part together.
    fn joins(self, other: Self) -> bool {
        match (self, other) {
            (Self::Shared(one), Self::Shared(two)) => one.mode() == two.mode(),
            (Self::Share(_), Self::Share(_)) => true,
            _ => false,
        }
    }
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
            (Part::Whole { .. }, Some(_)) => Needs { steps: Vec::new(), meets_foreign: false },
            (Part::Whole { .. }, None) => whole(gpu, view.mig_enabled)?,
            (Part::Instance(_), Some(joined)) => {
                Needs { steps: joined.made_by_first(), meets_foreign: false }
            }
            (Part::Instance(key), None) => match beside().next() {
                None => instance(gpu, key)?,
                // Nobody knows whether the instance is there.
                Some(held) => {
                    return Err(Refusal::HalfDone { gpu: gpu.uuid.clone(), holder: held.claim.clone() });
                }
            },
        };
        plan.meets_foreign |= needs.meets_foreign;
        let sets_up = access.setup().map(|setup| sets_up(gpu, &part, setup, joined.is_some()));
        for step in needs.steps.into_iter().chain(sets_up.into_iter().flatten()) {
            push(&mut plan.steps, step);
        }
    }
    plan.devices.push(PlannedDevice {
        request: device.request.clone(),
        pool: device.pool.clone(),
        device: device.device.clone(),
        share_id: share_id(device).cloned(),
        access,
        part,
    });
    Ok(())
}

/// The scheduler's name of the share, if it is one.
pub fn share_id(device: &AllocatedDevice) -> Option<&ShareId> {
    match &device.hold {
        Hold::Share { id, .. } => Some(id),
        Hold::Exclusive | Hold::Admin => None,
    }
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

/// What one device takes.
struct Needs {
    steps: Vec<Step>,
    meets_foreign: bool,
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
        if share.cores > 0 {
            return Err(Refusal::Cores { percent: share.cores });
        }
        let settings = device.share_settings()?;
        return Ok(Access::Share(ShareLimits { memory: share.memory, cores: share.cores, settings }));
    }
    let sharing = device.sharing(mode)?;
    let none = Default::default();
    let consumed = match &device.hold {
        Hold::Admin => return Ok(Access::Admin),
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

/// Whether the memory of a part has room for one more share. The scheduler has
/// counted already, and what it counts by may have changed since.
fn has_room(
    plan: &Plan,
    gpu: &Gpu,
    part: &Part,
    memory: u64,
    limits: ShareLimits,
    others: impl Iterator<Item = Access>,
) -> Result<(), Refusal> {
    let own = plan.devices.iter().filter(|device| device.part == *part).map(|device| device.access);
    let taken = others.chain(own).filter_map(Access::limits).map(|limits| limits.memory);
    let left = memory.saturating_sub(taken.fold(0, u64::saturating_add));
    match limits.memory <= left {
        true => Ok(()),
        false => {
            let (left, wanted) = (Quantity::bytes(left), Quantity::bytes(limits.memory));
            Err(Refusal::Full { gpu: gpu.uuid.clone(), left, wanted })
        }
    }
}

/// What sets a part up so that processes can share it.
fn sets_up(gpu: &Gpu, part: &Part, setup: Setup, joined: bool) -> Vec<Step> {
    let by_first = |step| if joined { Step::Join(Box::new(step)) } else { step };
    let uuid = || gpu.uuid.clone();
    match setup {
        // Without time slices to choose (before Volta) the default is what there is.
        Setup::Timeslice(interval) if interval == Default::default() && gpu.compute_capability < (7, 0) => {
            Vec::new()
        }
        Setup::Timeslice(interval) => vec![by_first(Step::SetInterval { gpu: uuid(), interval })],
        Setup::Mps(limits) => {
            // MIG handles have no compute mode.
            let mode =
                matches!(part, Part::Whole { .. }).then(|| by_first(Step::SetComputeMode { gpu: uuid() }));
            let start = Step::StartMps { part: part.clone(), limits };
            mode.into_iter().chain([start]).collect()
        }
    }
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
