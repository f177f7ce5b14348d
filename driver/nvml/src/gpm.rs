//! How much of its time a GPU instance or a whole GPU was at work, from one question to the next.
//!
//! NVML tells it of two samples that the caller keeps. So the GPU's thread keeps the last sample of each instance that it
//! is asked about, and of no other: the answer is of the time since then, and whoever was not asked about the last time
//! is new. NVML's figure is a part of the whole instance, so it is told only of those that one compute instance fills.
//!
//! A GPU that changes from one process to another is at work, for 0.17 ms each time (an H100, driver 580.159), and two
//! programs with many short kernels and pauses between have it change all the time. Its multiprocessors are not: for how much of
//! the time they are *active*, on the mean of all of them, is no more than kernels ran, and less where these are narrow.

use crate::error::NvmlError;
use crate::job::Worker;
use crate::raw::GpmSample;
use divvy_model::inventory::GpuInstance;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// NVML's counters are as old as this. Source: NVML API Reference Guide, of `nvmlGpmMetricsGet`.
const NEAR: Duration = Duration::from_millis(100);

/// What GPU instances had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceTimes {
    /// Nanoseconds a second by GPU instance, since the question before. Not of those of which that was none, nor where
    /// the GPU driver does not say.
    pub busy: BTreeMap<u32, u64>,
    /// The same, of their multiprocessors; and of the whole GPU's at `None`, where that was asked.
    pub active: BTreeMap<Option<u32>, u64>,
    /// Up to when.
    pub until: Instant,
}

/// The last sample of an instance.
pub(crate) struct Sampled {
    sample: GpmSample,
    at: Instant,
}

impl Worker {
    /// Of these instances, and of the GPU where `whole`, and no others.
    pub(crate) fn instance_times(
        &mut self,
        instances: &[GpuInstance],
        whole: bool,
    ) -> Result<InstanceTimes, NvmlError> {
        let device = self.device()?;
        let parts: Vec<Option<&GpuInstance>> =
            instances.iter().map(Some).chain(whole.then_some(None)).collect();
        let id_of = |part: &Option<&GpuInstance>| part.map(|instance| instance.id);
        let is_asked = |id: &Option<u32>| parts.iter().any(|part| id_of(part) == *id);
        let others: Vec<Option<u32>> = self.sampled.keys().copied().filter(|id| !is_asked(id)).collect();
        others.into_iter().for_each(|id| self.forget_sample(id));
        let (mut busy, mut active, at) = (BTreeMap::new(), BTreeMap::new(), Instant::now());
        for part in &parts {
            let id = id_of(part);
            let is_near = |was: &Sampled| at.duration_since(was.at) <= NEAR;
            let is_filled = part.map(|instance| unknown(self.is_filled(instance))).transpose()?;
            if self.sampled.get(&id).is_some_and(is_near) || is_filled.is_some_and(|is| is != Some(true)) {
                continue;
            }
            let call = if id.is_some() { "nvmlGpmMigSampleGet" } else { "nvmlGpmSampleGet" };
            let taken = self.call(call, |nvml| nvml.sample(device, id));
            let Some(sample) = unknown(taken)? else { continue };
            let worked = self
                .sampled
                .get(&id)
                .map(|was| self.call("nvmlGpmMetricsGet", |nvml| nvml.worked(&was.sample, &sample)));
            self.forget_sample(id);
            self.sampled.insert(id, Sampled { sample, at });
            let Some((percent, of_active)) = worked.map(unknown).transpose()?.flatten() else { continue };
            let time = |percent: f64| percent.is_finite().then_some((percent.clamp(0.0, 100.0) * 1e7) as u64);
            busy.extend(id.zip(time(percent)));
            active.extend(of_active.and_then(time).map(|active| (id, active)));
        }
        Ok(InstanceTimes { busy, active, until: at })
    }

    /// Of the whole GPU where it is none of an instance.
    pub(crate) fn forget_sample(&mut self, gpu_instance: Option<u32>) {
        if let Some(Sampled { sample, .. }) = self.sampled.remove(&gpu_instance) {
            // Of a job that was given up it goes with the library.
            let _freed = self.call("nvmlGpmSampleFree", |nvml| {
                nvml.free_sample(sample);
                Ok(())
            });
        }
    }

    /// Whether it has one compute instance, of all its slices.
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

/// None for an answer that says no more than that nothing is known: who asks has other things to go by.
fn unknown<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(known) => Ok(Some(known)),
        Err(NvmlError::Call { call, gpu, code }) => {
            tracing::debug!(%gpu, call, %code, "the time of a GPU instance is not known");
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
