//! GPM samples of GPUs and GPU instances, and the metrics between two samples. Hopper and later
//! GPUs have GPM.

use super::{Answer, Device, Library, Plain, check, sys};
use crate::code::Code;
use std::time::Instant;

/// A GPM sample; it belongs to the thread that took it.
pub(crate) struct GpmSample(sys::nvmlGpmSample_t);
// SAFETY: an opaque handle that only NVML dereferences, and that one thread at a time owns.
unsafe impl Send for GpmSample {}

/// A sample and when it was taken.
pub(crate) struct TimedSample {
    pub(crate) sample: GpmSample,
    pub(crate) at: Instant,
}

impl Library {
    /// Takes a sample of a GPU instance, or of the whole GPU.
    pub(crate) fn sample(&self, device: Device, gpu_instance: Option<u32>) -> Answer<GpmSample> {
        let mut sample = std::ptr::null_mut();
        nvml!(self, nvmlGpmSampleAlloc(&mut sample))?;
        let sample = GpmSample(sample);
        let taken = match gpu_instance {
            Some(id) => nvml!(self, nvmlGpmMigSampleGet(device.0, id, sample.0)),
            None => nvml!(self, nvmlGpmSampleGet(device.0, sample.0)),
        };
        match taken {
            Ok(()) => Ok(sample),
            Err(code) => {
                self.free_sample(sample);
                Err(code)
            }
        }
    }

    /// Percent of the time between two samples in which the GPU or instance was busy, and in which
    /// its SMs were active (mean over all SMs; `None` if unknown).
    pub(crate) fn utilization_between(
        &self,
        first: &GpmSample,
        second: &GpmSample,
    ) -> Answer<(f64, Option<f64>)> {
        let mut request = sys::nvmlGpmMetricsGet_t::zeroed();
        // Later headers have longer lists in the same version: NVML reads `numMetrics` entries.
        (request.version, request.numMetrics) = (sys::NVML_GPM_METRICS_GET_VERSION, 2);
        (request.sample1, request.sample2) = (first.0, second.0);
        request.metrics[0].metricId = sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_GRAPHICS_UTIL;
        request.metrics[1].metricId = sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_UTIL;
        nvml!(self, nvmlGpmMetricsGet(&mut request))?;
        let [utilization_between, active, ..] = &request.metrics;
        check(utilization_between.nvmlReturn)?;
        Ok((utilization_between.value, check(active.nvmlReturn).is_ok().then_some(active.value)))
    }

    pub(crate) fn free_sample(&self, sample: GpmSample) {
        // A sample that cannot be freed is freed with the library.
        let _freed: Answer<()> = nvml!(self, nvmlGpmSampleFree(sample.0));
    }
}
