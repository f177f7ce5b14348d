//! Utilization of GPU instances and whole GPUs by GPM (GPU performance monitoring), between two queries.
//!
//! GPM compares two samples, so the thread keeps the last sample of each instance in the last query.
//! Only instances filled by one compute instance are reported, as NVML reports a share of the whole
//! instance. For short kernels use *active* SM time, the mean over all SMs: a context switch counts as
//! graphics time for 0.17 ms (H100, driver 580.159), but not as SM time.

use crate::error::NvmlError;
use crate::job::Worker;
use crate::raw::TimedSample;
use divvy_model::inventory::GpuInstance;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// NVML's counters are updated at this interval. Source: NVML API Reference Guide,
/// `nvmlGpmMetricsGet`.
const GPM_UPDATE_INTERVAL: Duration = Duration::from_millis(100);

/// Utilization of GPU instances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceUtilization {
    /// Busy nanoseconds per second by GPU instance, since the previous query. Instances without a
    /// previous sample, and those that the GPU driver does not report, are missing.
    pub busy: BTreeMap<u32, u64>,
    /// SM-active nanoseconds per second, by GPU instance; `None` is the whole GPU if it was
    /// queried.
    pub active: BTreeMap<Option<u32>, u64>,
    /// The end of the measured interval.
    pub until: Instant,
}

impl Worker {
    /// Samples these instances and, with `whole`, the GPU. Other samples are dropped.
    pub(crate) fn instance_utilization(
        &mut self,
        instances: &[GpuInstance],
        whole: bool,
    ) -> Result<InstanceUtilization, NvmlError> {
        let device = self.device()?;
        let parts: Vec<Option<&GpuInstance>> =
            instances.iter().map(Some).chain(whole.then_some(None)).collect();
        let id_of = |part: &Option<&GpuInstance>| part.map(|instance| instance.id);
        let is_requested = |id: &Option<u32>| parts.iter().any(|part| id_of(part) == *id);
        let others: Vec<Option<u32>> =
            self.gpm_samples.keys().copied().filter(|id| !is_requested(id)).collect();
        others.into_iter().for_each(|id| self.forget_sample(id));
        let (mut busy, mut active, at) = (BTreeMap::new(), BTreeMap::new(), Instant::now());
        for part in &parts {
            let id = id_of(part);
            let is_too_recent = |was: &TimedSample| at.duration_since(was.at) <= GPM_UPDATE_INTERVAL;
            let is_filled = part.map(|instance| none_if_unknown(self.is_filled(instance))).transpose()?;
            if self.gpm_samples.get(&id).is_some_and(is_too_recent)
                || is_filled.is_some_and(|is| is != Some(true))
            {
                continue;
            }
            let call = if id.is_some() { "nvmlGpmMigSampleGet" } else { "nvmlGpmSampleGet" };
            let taken = self.call(call, |nvml| nvml.sample(device, id));
            let Some(sample) = none_if_unknown(taken)? else { continue };
            let worked = self.gpm_samples.get(&id).map(|was| {
                self.call("nvmlGpmMetricsGet", |nvml| nvml.utilization_between(&was.sample, &sample))
            });
            self.forget_sample(id);
            self.gpm_samples.insert(id, TimedSample { sample, at });
            let Some((percent, of_active)) = worked.map(none_if_unknown).transpose()?.flatten() else {
                continue;
            };
            let time = |percent: f64| percent.is_finite().then_some((percent.clamp(0.0, 100.0) * 1e7) as u64);
            busy.extend(id.zip(time(percent)));
            active.extend(of_active.and_then(time).map(|active| (id, active)));
        }
        Ok(InstanceUtilization { busy, active, until: at })
    }

    /// Frees the last sample of a GPU instance; `None` is the whole GPU.
    pub(crate) fn forget_sample(&mut self, gpu_instance: Option<u32>) {
        if let Some(TimedSample { sample, .. }) = self.gpm_samples.remove(&gpu_instance) {
            // After an abandoned job, the sample is freed with the library.
            let _freed = self.call("nvmlGpmSampleFree", |nvml| {
                nvml.free_sample(sample);
                Ok(())
            });
        }
    }

    /// Whether exactly one compute instance fills the GPU instance.
    fn is_filled(&mut self, instance: &GpuInstance) -> Result<bool, NvmlError> {
        let [only] = instance.compute_instances.as_slice() else { return Ok(false) };
        let profiles = match self.ci_profiles.get(&instance.profile_id) {
            Some(known) => known.clone(),
            None => {
                let device = self.device()?;
                let gi =
                    self.call("nvmlDeviceGetGpuInstanceById", |nvml| nvml.gpu_instance(device, instance.id))?;
                self.ci_profiles(gi, instance.profile_id)?
            }
        };
        let slices =
            profiles.iter().find(|profile| profile.id == only.profile_id).map(|profile| profile.slices);
        Ok(slices.is_some() && slices == profiles.iter().map(|profile| profile.slices).max())
    }
}

/// Turns an NVML error into `None`: callers have other sources for the usage.
fn none_if_unknown<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(known) => Ok(Some(known)),
        Err(NvmlError::Call { call, gpu, code }) => {
            tracing::debug!(%gpu, call, %code, "the utilization of a GPU instance is unknown");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
