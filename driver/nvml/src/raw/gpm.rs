//! GPU performance monitoring: samples of GPUs and GPU instances, and what lies between two. Hopper and later have it.

use super::{Answer, Device, Library, Plain, check, sys};
use crate::code::Code;

/// A sample; belongs to the thread that took it.
pub(crate) struct GpmSample(sys::nvmlGpmSample_t);
// SAFETY: an opaque handle that only NVML looks at, and one thread at a time has it.
unsafe impl Send for GpmSample {}

impl Library {
    /// A sample of a GPU instance, or of the whole GPU, as it is now.
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

    /// Per cent of the time between two samples in which it was at work, and in which its multiprocessors were, on the mean of
    /// them: none where that is not known.
    pub(crate) fn worked(&self, first: &GpmSample, second: &GpmSample) -> Answer<(f64, Option<f64>)> {
        let mut asked = sys::nvmlGpmMetricsGet_t::zeroed();
        // Later headers have longer lists of the same version: NVML looks at as many as are asked for.
        (asked.version, asked.numMetrics) = (sys::NVML_GPM_METRICS_GET_VERSION, 2);
        (asked.sample1, asked.sample2) = (first.0, second.0);
        asked.metrics[0].metricId = sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_GRAPHICS_UTIL;
        asked.metrics[1].metricId = sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_UTIL;
        nvml!(self, nvmlGpmMetricsGet(&mut asked))?;
        let [worked, active, ..] = &asked.metrics;
        check(worked.nvmlReturn)?;
        Ok((worked.value, check(active.nvmlReturn).is_ok().then_some(active.value)))
    }

    pub(crate) fn free_sample(&self, sample: GpmSample) {
        // One that cannot be freed goes with the library.
        let _freed: Answer<()> = nvml!(self, nvmlGpmSampleFree(sample.0));
    }
}
