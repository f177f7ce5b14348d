//! What the GPU driver is asked at a look.
//!
//! What it says of time comes from two places: samples, of which it takes a few a second, and counters (GPM), which tell
//! of the time since they were read last. Both are held against what shares say that they had since the last look, so all
//! must be of the same time. Where no sample was taken since then the look waits for the next, which tells of both
//! times, and the counters are not read: they would tell of the later one alone, and a GPU that was idle in the earlier and
//! at work in the later would have had far more than anybody explains.

use super::gather::Found;
use super::look::Use;
use super::{Agent, instances, meter};
use divvy_model::Inventory;
use divvy_nvml::{GpuQueue, NvmlError, ProcessUse};
use divvy_pages::GpuUuid;
use std::collections::BTreeSet;

/// What the GPU driver said of a GPU.
pub(super) struct Asked {
    pub(super) uses: Vec<Use>,
    /// Containers whose limit it keeps, by id.
    pub(super) kept: BTreeSet<String>,
    /// None where it is told at the next look.
    pub(super) timed: Option<Timed>,
}

/// What it said of the time since the last look that was told.
pub(super) struct Timed {
    pub(super) times: meter::Times,
    /// Whether that is what each process had; see [`divvy_nvml::ProcessTimes::divides`].
    pub(super) divides: Option<bool>,
    /// What instances had that have shares.
    pub(super) busy: instances::Busy,
    pub(super) active: instances::Active,
    /// Up to when either is told.
    pub(super) until: Option<meter::Until>,
}

impl Agent {
    /// Has the GPU driver keep what limits it can, and asks it who has what.
    pub(super) async fn ask(
        &self,
        gpu: GpuUuid,
        queue: &GpuQueue,
        found: &[Found],
        meter: &meter::Memory,
        is_divided: bool,
    ) -> Result<Asked, NvmlError> {
        let kept = self.hold(queue, found).await?;
        let inventory = self.inventory.borrow().clone();
        let uses = queue.usage().await?;
        let timed = time(gpu, &inventory, queue, found, &uses, meter, is_divided).await?;
        let uses = uses.iter().filter_map(|usage| instances::place(gpu, &inventory, usage)).collect();
        Ok(Asked { uses, kept, timed })
    }
}

/// Who had how much of its time.
async fn time(
    gpu: GpuUuid,
    inventory: &Inventory,
    queue: &GpuQueue,
    found: &[Found],
    uses: &[ProcessUse],
    meter: &meter::Memory,
    is_divided: bool,
) -> Result<Option<Timed>, NvmlError> {
    let times = queue.times(meter.since_us()).await?;
    let divides = times.as_ref().and_then(|times| times.divides);
    let mut until = times.as_ref().and_then(|times| times.until_us).and_then(meter::Until::of);
    let times = times.map(|times| times.percent);
    if meter.awaits(&times) {
        return Ok(None);
    }
    let shares: Vec<_> = found.iter().filter_map(|found| found.policy.mig).collect();
    let (mut busy, mut active) = (instances::Busy::new(), instances::Active::new());
    // What all had together is worth knowing where several shares may have it and it may be all that is.
    let whole = !is_divided && found.len() > shares.len() + 1;
    if !shares.is_empty() || whole {
        // Even if it is of none: what was before is forgotten then.
        let own = instances::own(instances::of(gpu, inventory), &shares, uses);
        let had = queue.instance_times(own.clone(), whole).await?;
        until = until.or_else(|| meter::Until::at(had.until));
        busy = instances::busy(&own, &had);
        active = instances::active(&own, &had);
    }
    Ok(Some(Timed { times, divides, busy, active, until }))
}
