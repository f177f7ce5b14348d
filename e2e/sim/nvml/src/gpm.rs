//! GPU performance monitoring, as little as programs need to see that it works: samples in pairs, two metrics.
//!
//! A sample remembers when it was taken and how long what it was taken of had been at work by then. Hopper and later have it; it is the only
//! utilisation that a MIG device has.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};

use divvy_sim::catalogue::Architecture;
use divvy_sim::code::Code;
use divvy_sim::ledger::{Place, now};
use divvy_sim::state::Gpu;

use crate::abi::{GpmMetric, GpmMetricsHead, GpmSupport, Plain};
use crate::argument::{Argument, Out, Outcome};
use crate::handle::Device;
use crate::library::{Nvml, entry};
use crate::processes::invented;

const TAG: u64 = 0x60 << 56;
const NUMBER: u64 = (1 << 56) - 1;
/// `NVML_GPM_METRICS_GET_VERSION` and `NVML_GPM_SUPPORT_VERSION`.
const VERSION: u32 = 1;
/// `NVML_GPM_METRIC_MAX` of header 13.3.
const METRICS: u32 = 333;
/// Of processes that somebody has made up.
const BUSY: f64 = 60.0;

/// The samples of this process, by handle, once taken.
#[derive(Default)]
pub(crate) struct Samples {
    last: u64,
    samples: BTreeMap<u64, Option<Sample>>,
}

/// GPU and compute instance; none for the whole GPU.
type Instance = Option<(u32, u32)>;

/// What a sample remembers.
#[derive(Clone, Copy)]
struct Sample {
    /// Nanoseconds of the monotonic clock, and of work by then.
    at: u64,
    worked: u64,
    /// Per cent that processes are said to work that somebody has made up.
    invented: f64,
}

impl Sample {
    /// Per cent of the time since then that was worked.
    fn busy_since(self, first: Self) -> f64 {
        let time = self.at.saturating_sub(first.at);
        let worked = self.worked.saturating_sub(first.worked);
        let share = if time == 0 { 0.0 } else { worked as f64 / time as f64 * 100.0 };
        share.min(100.0).max(first.invented.midpoint(self.invented))
    }
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

/// Takes a sample: `here` says of which places of the GPU, the whole and its instances.
fn take(
    nvml: &Nvml,
    handle: SampleHandle,
    slot: usize,
    gpu: &Gpu,
    here: impl Fn(Instance) -> bool,
) -> Outcome {
    let watcher = nvml.shared.watcher();
    let mut places: Vec<Instance> = gpu.mig_devices().map(|(gi, ci)| Some((gi.id, ci.id))).collect();
    // Compute instances share the time of their GPU instance.
    places.dedup_by_key(|instance| instance.map(|(gi, _)| gi));
    places.push(None);
    let (mut at, mut worked) = (now(), 0);
    for instance in places.into_iter().filter(|place| here(*place)) {
        if let Some((then, busy)) =
            watcher.as_ref().and_then(|watcher| watcher.busy(Place { slot, instance }))
        {
            (at, worked) = (then, worked + busy);
        }
    }
    let invented = invented(nvml, slot)?.iter().any(|process| here(process.instance));
    let sample = Sample { at, worked, invented: if invented { BUSY } else { 0.0 } };
    nvml.shared.samples.with(|samples| {
        *samples.samples.get_mut(&handle.0).ok_or(Code::InvalidArgument)? = Some(sample);
        Ok(())
    })
}

/// Short name, long name, unit.
type MetricText = (&'static CStr, &'static CStr, &'static CStr);

/// What there is: utilisation of graphics and of multiprocessors.
fn metric(id: u32, busy: f64) -> Outcome<(f64, MetricText)> {
    match id {
        1 => Ok((busy, (c"gr_util", c"Graphics Utilization", c"%"))),
        // The simulator does not know how many multiprocessors a kernel leaves idle.
        2 => Ok((busy, (c"sm_util", c"SM Utilization", c"%"))),
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
        take(nvml, sample, target.slot, target.gpu, |place| here.is_none() || here == place)
    }

    fn nvmlGpmMigSampleGet(nvml, device: Device, gi: u32, sample: SampleHandle) {
        let (slot, gpu) = device.whole(&nvml.state)?;
        if !supported(gpu) || !gpu.mig.current {
            return Err(Code::NotSupported);
        }
        gpu.gi(gi).ok_or(Code::InvalidArgument)?;
        take(nvml, sample, slot, gpu, |place| place.is_some_and(|(here, _)| here == gi))
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
            let filled = match metric(asked.metric, second.busy_since(first)) {
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
