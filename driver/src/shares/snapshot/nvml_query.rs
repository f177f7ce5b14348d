//! Asks NVML for the memory and the time of the processes on a GPU.
//!
//! GPU time comes from two sources: utilization samples, a few per second, and hardware counters
//! (GPM) that cover the time since they were last read. Both are compared with what shares report
//! for the time since the last snapshot, so both must cover the same time. If NVML took no sample
//! since then, the counters are not read either.

use super::collect::FoundShare;
use super::usage::{PercentByPid, SampleEnd, UsageHistory};
use super::{MigBusyNs, ProcessMemory, SmActiveNs, mig_totals};
use divvy_model::Inventory;
use divvy_nvml::{GpuQueue, NvmlError, ProcessUse};
use divvy_pages::GpuUuid;
use std::collections::BTreeSet;

/// NVML's report about a GPU.
pub(crate) struct NvmlReport {
    pub(crate) uses: Vec<ProcessMemory>,
    /// Ids of the containers whose memory limit the GPU driver enforces.
    pub(crate) driver_limited: BTreeSet<String>,
    /// `None` if the next snapshot covers this time as well.
    pub(crate) utilization: Option<Utilization>,
}

/// NVML's report about the time since the last snapshot that had a sample.
pub(crate) struct Utilization {
    pub(crate) percent_by_pid: PercentByPid,
    /// Whether the percentages are per process; see [`divvy_nvml::ProcessUtilization::is_per_process`].
    pub(crate) is_per_process: Option<bool>,
    /// Busy time of the MIG instances that have shares.
    pub(crate) mig_busy_ns: MigBusyNs,
    pub(crate) sm_active_ns: SmActiveNs,
    /// When the last sample or the counters were taken.
    pub(crate) until: Option<SampleEnd>,
}

/// Asks NVML about one GPU. `is_per_process`: earlier samples were known to be per process.
pub(crate) async fn query(
    gpu: GpuUuid,
    inventory: &Inventory,
    queue: &GpuQueue,
    found: &[FoundShare],
    history: &UsageHistory,
    is_per_process: bool,
    driver_limited: BTreeSet<String>,
) -> Result<NvmlReport, NvmlError> {
    let uses = queue.usage().await?;
    let utilization = utilization(gpu, inventory, queue, found, &uses, history, is_per_process).await?;
    let uses = uses.iter().filter_map(|usage| mig_totals::locate(gpu, inventory, usage)).collect();
    Ok(NvmlReport { uses, driver_limited, utilization })
}

/// Reading the counters without a new sample would split the time: a GPU that was idle first and
/// busy later would appear to have used far more than its shares can explain.
async fn utilization(
    gpu: GpuUuid,
    inventory: &Inventory,
    queue: &GpuQueue,
    found: &[FoundShare],
    uses: &[ProcessUse],
    history: &UsageHistory,
    is_per_process: bool,
) -> Result<Option<Utilization>, NvmlError> {
    let samples = queue.process_utilization(history.query_from_us()).await?;
    let now_per_process = samples.as_ref().and_then(|samples| samples.is_per_process);
    let mut until = samples.as_ref().and_then(|samples| samples.until_us).and_then(SampleEnd::from_us);
    let percent_by_pid = samples.map(|samples| samples.percent);
    if history.awaits_sample(&percent_by_pid) {
        return Ok(None);
    }
    let migs: Vec<_> = found.iter().filter_map(|found| found.policy.mig).collect();
    let (mut mig_busy_ns, mut sm_active_ns) = (MigBusyNs::new(), SmActiveNs::new());
    // The total of the whole GPU matters if several shares use it and the samples may not be per process.
    let whole = !is_per_process && found.len() > migs.len() + 1;
    if !migs.is_empty() || whole {
        // Also without an exclusive instance, because the call resets counters that were read before.
        let exclusive = mig_totals::exclusive(mig_totals::instances(gpu, inventory), &migs, uses);
        let counters = queue.instance_utilization(exclusive.clone(), whole).await?;
        until = until.or_else(|| SampleEnd::at(counters.until));
        mig_busy_ns = mig_totals::busy_ns(&exclusive, &counters);
        sm_active_ns = mig_totals::active_ns(&exclusive, &counters);
    }
    Ok(Some(Utilization {
        percent_by_pid,
        is_per_process: now_per_process,
        mig_busy_ns,
        sm_active_ns,
        until,
    }))
}
