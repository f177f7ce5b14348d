//! What a part of a GPU takes before a claim can have it: MIG mode, instances, and
//! what its processes share it by.

use super::{Part, Refusal};
use crate::sharing::Setup;
use crate::step::{InstanceKey, Step};
use divvy_api::GpuUuid;
use divvy_model::inventory::{MigMode, MigToggle, Origin};
use divvy_model::{Gpu, GpuInstance, Mig};
use std::collections::BTreeSet;

/// What one device takes.
#[derive(Default)]
pub(super) struct Needs {
    pub(super) steps: Vec<Step>,
    pub(super) meets_foreign: bool,
}

/// The whole GPU: no instance may be on it, and MIG mode must be off.
pub(super) fn whole(gpu: &Gpu, mig_enabled: &BTreeSet<GpuUuid>) -> Result<Needs, Refusal> {
    let Mig::Supported { mode, toggle, instances, .. } = &gpu.mig else {
        return Ok(Needs::default());
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
pub(super) fn instance(gpu: &Gpu, key: &InstanceKey) -> Result<Needs, Refusal> {
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

/// What sets a part up so that processes can share it.
pub(super) fn sets_up(gpu: &Gpu, part: &Part, setup: Setup, joined: bool) -> Vec<Step> {
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
