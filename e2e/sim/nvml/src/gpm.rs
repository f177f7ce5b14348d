//! GPU performance monitoring, as little as programs need to see that it works: samples in pairs, two metrics.
//!
//! A sample remembers when it was taken and how busy what it was taken of was. Hopper and later have it; it is the only
//! utilisation that a MIG device has.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};

use divvy_sim::catalogue::Architecture;
use divvy_sim::code::Code;
use divvy_sim::state::Gpu;

use crate::abi::{GpmMetric, GpmMetricsHead, GpmSupport, Plain};
use crate::argument::{Argument, Out, Outcome};
use crate::handle::Device;
use crate::library::{Nvml, entry};

const TAG: u64 = 0x60 << 56;
const NUMBER: u64 = (1 << 56) - 1;
/// `NVML_GPM_METRICS_GET_VERSION` and `NVML_GPM_SUPPORT_VERSION`.
const VERSION: u32 = 1;
/// `NVML_GPM_METRIC_MAX` of header 13.3.
const METRICS: u32 = 333;
const BUSY: f64 = 60.0;

/// The samples of this process, by handle: how busy, once taken.
#[derive(Default)]
pub(crate) struct Samples {
    last: u64,
    samples: BTreeMap<u64, Option<f64>>,
}

/// `nvmlGpmSample_t`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct SampleHandle(u64);

impl Argument for SampleHandle {
    fn missing(&self) -> bool {
        self.0 & !NUMBER != TAG
    }
}

fn supported(gpu: &Gpu) -> bool {
    gpu.model().architecture >= Architecture::Hopper
}

fn take(nvml: &Nvml, sample: SampleHandle, busy: f64) -> Outcome {
    nvml.shared.samples.with(|samples| {
        *samples.samples.get_mut(&sample.0).ok_or(Code::InvalidArgument)? = Some(busy);
        Ok(())
    })
}

fn busy(running: bool) -> f64 {
    if running { BUSY } else { 0.0 }
}

/// Short name, long name, unit.
type MetricText = (&'static CStr, &'static CStr, &'static CStr);

/// What there is: utilisation of graphics and of multiprocessors.
fn metric(id: u32, busy: f64) -> Outcome<(f64, MetricText)> {
    match id {
        1 => Ok((busy, (c"gr_util", c"Graphics Utilization", c"%"))),
        2 => Ok((busy / 2.0, (c"sm_util", c"SM Utilization", c"%"))),
        0 | METRICS.. => Err(Code::InvalidArgument),
        _ => Err(Code::NotSupported),
    }
}

entry! {
    fn nvmlGpmQueryDeviceSupport(nvml, device: Device, support: Out<GpmSupport>) {
        if support.get().version != VERSION {
            return Err(Code::ArgumentVersionMismatch);
        }
        let supported = supported(device.target(&nvml.state)?.gpu).into();
        support.set(GpmSupport { version: VERSION, supported });
        Ok(())
    }

    fn nvmlGpmSampleAlloc(nvml, sample: Out<u64>) {
        let handle = nvml.shared.samples.with(|samples| {
            samples.last += 1;
            let handle = TAG | samples.last;
            samples.samples.insert(handle, None);
            handle
        });
        sample.set(handle);
        Ok(())
    }

    fn nvmlGpmSampleFree(nvml, sample: SampleHandle) {
        nvml.shared.samples.with(|samples| samples.samples.remove(&sample.0)).map(drop).ok_or(Code::InvalidArgument)
    }

    fn nvmlGpmSampleGet(nvml, device: Device, sample: SampleHandle) {
        let target = device.target(&nvml.state)?;
        if !supported(target.gpu) {
            return Err(Code::NotSupported);
        }
        let here = target.mig.map(|(gi, ci)| (gi.id, ci.id));
        let runs = |instance| here.is_none() || here == instance;
        take(nvml, sample, busy(target.gpu.processes.iter().any(|process| runs(process.instance))))
    }

    fn nvmlGpmMigSampleGet(nvml, device: Device, gi: u32, sample: SampleHandle) {
        let (_, gpu) = device.whole(&nvml.state)?;
        if !supported(gpu) || !gpu.mig.current {
            return Err(Code::NotSupported);
        }
        gpu.gi(gi).ok_or(Code::InvalidArgument)?;
        let runs = |instance: Option<(u32, u32)>| instance.is_some_and(|(here, _)| here == gi);
        take(nvml, sample, busy(gpu.processes.iter().any(|process| runs(process.instance))))
    }

    /// The metrics lie behind the head; only as many as the caller says are read.
    fn nvmlGpmMetricsGet(nvml, request: Out<GpmMetricsHead>) {
        let head = request.get();
        if head.version != VERSION {
            return Err(Code::ArgumentVersionMismatch);
        }
        if head.metrics == 0 || head.metrics > METRICS {
            return Err(Code::InvalidArgument);
        }
        let taken = |handle| nvml.shared.samples.with(|samples| samples.samples.get(&handle).copied().flatten());
        let (Some(first), Some(second)) = (taken(head.first), taken(head.second)) else {
            return Err(Code::InvalidArgument);
        };
        let metrics = request.behind::<GpmMetric>();
        for at in 0..head.metrics as usize {
            let place = metrics.at(at);
            let asked = place.get();
            let filled = match metric(asked.metric, first.midpoint(second)) {
                Ok((value, (short, long, unit))) => GpmMetric {
                    metric: asked.metric,
                    result: Code::Success.into(),
                    value,
                    short_name: text(short),
                    long_name: text(long),
                    unit: text(unit),
                },
                Err(code) => GpmMetric { metric: asked.metric, result: code.into(), ..GpmMetric::zeroed() },
            };
            place.set(filled);
        }
        Ok(())
    }

    fn nvmlGpmQueryIfStreamingEnabled(nvml, device: Device, state: Out<u32>) {
        let (_, gpu) = device.whole(&nvml.state)?;
        if !supported(gpu) {
            return Err(Code::NotSupported);
        }
        state.set(0);
        Ok(())
    }
}

const fn text(text: &'static CStr) -> *const c_void {
    text.as_ptr().cast()
}
