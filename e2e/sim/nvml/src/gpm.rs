//! GPU performance monitoring (GPM): pairs of samples and two metrics, which is the minimum that
//! programs use. Hopper and later GPUs support it. It is the only source of utilisation for MIG
//! devices.

use std::ffi::{CStr, c_void};

use divvy_sim::catalogue::Architecture;
use divvy_sim::code::Code;
use divvy_sim::state::Gpu;
use divvy_sim::usage::{Place, now};

use crate::abi::{GpmMetric, GpmMetricsHead, GpmSupport, Plain};
use crate::argument::{Argument, Out, Outcome};
use crate::handle::Device;
use crate::library::{Nvml, entry};
use crate::processes::manual_processes;
use crate::tables::GpmSample;

const SAMPLE_TAG: u64 = 0x60 << 56;
const NUMBER_MASK: u64 = (1 << 56) - 1;
/// `NVML_GPM_METRICS_GET_VERSION` and `NVML_GPM_SUPPORT_VERSION`.
const GPM_VERSION: u32 = 1;
/// `NVML_GPM_METRIC_MAX` of header 13.3.
const METRIC_COUNT: u32 = 333;
/// Utilisation in percent of a GPU with processes that were added by hand.
const MANUAL_PROCESS_PERCENT: f64 = 60.0;

/// GPU and compute instance ids; none for the whole GPU.
type Instance = Option<(u32, u32)>;

/// `nvmlGpmSample_t`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct SampleHandle(u64);

impl Argument for SampleHandle {
    fn is_missing(&self) -> bool {
        self.0 & !NUMBER_MASK != SAMPLE_TAG
    }
}

fn supported(gpu: &Gpu) -> bool {
    gpu.model().architecture >= Architecture::Hopper
}

/// Takes a sample of the instances, or the whole GPU, for which `here` returns true.
fn take_sample(
    nvml: &Nvml,
    handle: SampleHandle,
    slot: usize,
    gpu: &Gpu,
    here: impl Fn(Instance) -> bool,
) -> Outcome {
    let monitor = nvml.shared.usage_monitor();
    let mut places: Vec<Instance> = gpu.mig_devices().map(|(gi, ci)| Some((gi.id, ci.id))).collect();
    // Compute instances share the time of their GPU instance.
    places.dedup_by_key(|instance| instance.map(|(gi, _)| gi));
    places.push(None);
    let (mut at, mut busy_ns, mut switch_ns) = (now(), 0, 0);
    for instance in places.into_iter().filter(|place| here(*place)) {
        let times = monitor.as_ref().and_then(|monitor| monitor.times(Place { slot, instance }));
        if let Some(times) = times {
            (at, busy_ns) = (times.at, busy_ns + times.busy_ns());
            switch_ns += times.switch_ns;
        }
    }
    let has_manual = manual_processes(nvml, slot)?.iter().any(|process| here(process.instance));
    let sample = GpmSample {
        at,
        busy_ns,
        switch_ns,
        manual_percent: if has_manual { MANUAL_PROCESS_PERCENT } else { 0.0 },
    };
    nvml.shared.samples.with(|samples| {
        *samples.samples.get_mut(&handle.0).ok_or(Code::InvalidArgument)? = Some(sample);
        Ok(())
    })
}

/// Short name, long name and unit.
type MetricText = (&'static CStr, &'static CStr, &'static CStr);

/// The supported metrics between two samples: utilisation of graphics and of multiprocessors.
fn metric(id: u32, first: GpmSample, second: GpmSample) -> Outcome<(f64, MetricText)> {
    match id {
        1 => Ok((second.busy_since(first), (c"gr_util", c"Graphics Utilization", c"%"))),
        // The simulator does not track how many multiprocessors a kernel leaves idle.
        2 => Ok((second.active_since(first), (c"sm_util", c"SM Utilization", c"%"))),
        0 | METRIC_COUNT.. => Err(Code::InvalidArgument),
        _ => Err(Code::NotSupported),
    }
}

entry! {
    fn nvmlGpmQueryDeviceSupport(nvml, device: Device, support: Out<GpmSupport>) {
        if support.get().version != GPM_VERSION {
            return Err(Code::ArgumentVersionMismatch);
        }
        let supported = supported(device.target(&nvml.state)?.gpu).into();
        support.set(GpmSupport { version: GPM_VERSION, supported });
        Ok(())
    }

    fn nvmlGpmSampleAlloc(nvml, sample: Out<u64>) {
        let handle = nvml.shared.samples.with(|samples| {
            samples.last += 1;
            let handle = SAMPLE_TAG | samples.last;
            samples.samples.insert(handle, None);
            handle
        });
        sample.set(handle);
        Ok(())
    }

    fn nvmlGpmSampleFree(nvml, sample: SampleHandle) {
        let removed = nvml.shared.samples.with(|samples| samples.samples.remove(&sample.0));
        removed.map(drop).ok_or(Code::InvalidArgument)
    }

    fn nvmlGpmSampleGet(nvml, device: Device, sample: SampleHandle) {
        let target = device.target(&nvml.state)?;
        if !supported(target.gpu) {
            return Err(Code::NotSupported);
        }
        let here = target.mig.map(|(gi, ci)| (gi.id, ci.id));
        take_sample(nvml, sample, target.slot, target.gpu, |place| here.is_none() || here == place)
    }

    fn nvmlGpmMigSampleGet(nvml, device: Device, gi: u32, sample: SampleHandle) {
        let (slot, gpu) = device.whole(&nvml.state)?;
        if !supported(gpu) || !gpu.mig.current {
            return Err(Code::NotSupported);
        }
        gpu.gi(gi).ok_or(Code::InvalidArgument)?;
        take_sample(nvml, sample, slot, gpu, |place| place.is_some_and(|(here, _)| here == gi))
    }

    /// The metrics follow the head. Only as many as the caller specifies are read.
    fn nvmlGpmMetricsGet(nvml, request: Out<GpmMetricsHead>) {
        let head = request.get();
        if head.version != GPM_VERSION {
            return Err(Code::ArgumentVersionMismatch);
        }
        if head.metrics == 0 || head.metrics > METRIC_COUNT {
            return Err(Code::InvalidArgument);
        }
        let samples = &nvml.shared.samples;
        let taken = |handle| samples.with(|samples| samples.samples.get(&handle).copied().flatten());
        let (Some(first), Some(second)) = (taken(head.first), taken(head.second)) else {
            return Err(Code::InvalidArgument);
        };
        let metrics = request.array_after::<GpmMetric>();
        for at in 0..head.metrics as usize {
            let place = metrics.at(at);
            let asked = place.get();
            let filled = match metric(asked.metric, first, second) {
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
