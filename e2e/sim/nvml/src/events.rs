//! Event sets: registration and waiting.
//!
//! The event queue is part of the state, so an event reaches every process. A waiting call polls
//! the state file.

use std::time::{Duration, Instant};

use divvy_sim::code::Code;
use divvy_sim::state::Event;

use crate::abi::{
    EventData, SystemEventData, SystemEventSetRequest, SystemRegisterRequest, SystemWaitRequest,
};
use crate::argument::{Argument, Out, Outcome};
use crate::handle::Device;
use crate::library::{Nvml, Shared, entry};
use crate::tables::{EventSet, Registration};

/// Interval at which a waiting call checks the state.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Events that the simulator can generate (SBE, DBE, XID, MIG configuration, GPU unavailable,
/// recovery action), and performance state and clock changes, which programs also register for.
const SUPPORTED_EVENT_TYPES: u64 = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x100 | 0x4000 | 0x8000;
/// Event bits that header 13.3 defines.
const KNOWN_EVENT_TYPES: u64 = 0xff9f;
/// NVML's value for events that are not attributed to an instance.
const NO_INSTANCE: u32 = u32::MAX;
/// `nvmlSystemEventTypeGpuDriverUnbind` and `Bind`.
const SYSTEM_EVENT_TYPES: u64 = 3;

const SET_TAG: u64 = 0x5e << 56;
const SYSTEM_TAG: u64 = 0x5f << 56;
const NUMBER_MASK: u64 = (1 << 56) - 1;

/// `nvmlEventSet_t`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct SetHandle(u64);

impl Argument for SetHandle {
    fn is_missing(&self) -> bool {
        self.0 & !NUMBER_MASK != SET_TAG
    }
}

/// Waits for an event of the set. Fails when the timeout ends or all GPUs of the set are lost.
fn wait(shared: &Shared, set: SetHandle, timeout: Duration) -> Outcome<(Event, Device)> {
    let deadline = Instant::now() + timeout;
    loop {
        let state = shared.sim.read_stored()?;
        if let Some(event) = shared.sets.with(|sets| sets.next_event(set.0, &state))? {
            let gpu = state.gpus.get(event.slot).ok_or(Code::Unknown)?;
            let device = Device::of_gpu(event.slot, gpu);
            return Ok((event, device));
        }
        if shared.sets.with(|sets| sets.all_gpus_lost(set.0, &state)) {
            return Err(Code::GpuIsLost);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Code::Timeout);
        }
        std::thread::sleep(left.min(POLL_INTERVAL));
    }
}

fn data(event: &Event, device: Device, attributed: bool) -> EventData {
    let (gi, ci) = event.instance.filter(|_| attributed).unwrap_or((NO_INSTANCE, NO_INSTANCE));
    EventData {
        device: device.raw(),
        kind: event.kind.mask(),
        data: event.kind.data(),
        gpu_instance_id: gi,
        compute_instance_id: ci,
    }
}

fn wait_on(nvml: &Nvml, set: SetHandle, timeout_ms: u32, attributed: bool) -> Outcome<EventData> {
    let (event, device) = wait(&nvml.shared, set, Duration::from_millis(timeout_ms.into()))?;
    Ok(data(&event, device, attributed))
}

entry! {
    fn nvmlDeviceGetSupportedEventTypes(nvml, device: Device, kinds: Out<u64>) {
        device.whole(&nvml.state)?;
        kinds.set(SUPPORTED_EVENT_TYPES);
        Ok(())
    }

    fn nvmlEventSetCreate(nvml, set: Out<u64>) {
        let handle = nvml.shared.sets.with(|sets| {
            let handle = SET_TAG | sets.next_number();
            sets.sets.insert(handle, EventSet { delivered: nvml.state.events.last, ..EventSet::default() });
            handle
        });
        set.set(handle);
        Ok(())
    }

    /// If one of the kinds is not supported, none is registered. A MIG device has no events.
    fn nvmlDeviceRegisterEvents(nvml, device: Device, kinds: u64, set: SetHandle) {
        let (slot, _) = device.whole(&nvml.state)?;
        if kinds & !KNOWN_EVENT_TYPES != 0 {
            return Err(Code::InvalidArgument);
        }
        if kinds & !SUPPORTED_EVENT_TYPES != 0 {
            return Err(Code::NotSupported);
        }
        nvml.shared.sets.with(|sets| {
            let set = sets.sets.get_mut(&set.0).ok_or(Code::InvalidArgument)?;
            let fresh = Registration { mask: 0, since: nvml.state.events.last };
            set.registered.entry(slot).or_insert(fresh).mask |= kinds;
            Ok(())
        })
    }

    /// The first version does not report instances.
    fn nvmlEventSetWait(nvml, set: SetHandle, place: Out<EventData>, timeout_ms: u32) {
        place.set(wait_on(nvml, set, timeout_ms, false)?);
        Ok(())
    }

    fn nvmlEventSetWait_v2(nvml, set: SetHandle, place: Out<EventData>, timeout_ms: u32) {
        place.set(wait_on(nvml, set, timeout_ms, true)?);
        Ok(())
    }

    fn nvmlEventSetFree(nvml, set: SetHandle) {
        nvml.shared.sets.with(|sets| sets.sets.remove(&set.0)).map(drop).ok_or(Code::InvalidArgument)
    }

    /// System events report drivers that are bound or unbound. The simulator has none, so a wait
    /// always times out.
    fn nvmlSystemEventSetCreate(nvml, request: Out<SystemEventSetRequest>) {
        request.expect_version()?;
        let set = nvml.shared.sets.with(|sets| {
            let handle = SYSTEM_TAG | sets.next_number();
            sets.system.insert(handle, 0);
            handle
        });
        request.set(SystemEventSetRequest { set, ..request.get() });
        Ok(())
    }

    fn nvmlSystemRegisterEvents(nvml, request: Out<SystemRegisterRequest>) {
        request.expect_version()?;
        let SystemRegisterRequest { kinds, set, .. } = request.get();
        if kinds & !SYSTEM_EVENT_TYPES != 0 {
            return Err(Code::InvalidArgument);
        }
        let sets = &nvml.shared.sets;
        sets.with(|sets| sets.system.get_mut(&set).map(|mask| *mask |= kinds)).ok_or(Code::InvalidArgument)
    }

    fn nvmlSystemEventSetWait(nvml, request: Out<SystemWaitRequest>) {
        request.expect_version()?;
        let SystemWaitRequest { set, timeout_ms, data, data_size, .. } = request.get();
        let known = nvml.shared.sets.with(|sets| sets.system.contains_key(&set));
        if !known || data.is_null() || data_size < size_of::<SystemEventData>() as u32 {
            return Err(Code::InvalidArgument);
        }
        std::thread::sleep(Duration::from_millis(timeout_ms.into()));
        request.set(SystemWaitRequest { events: 0, ..request.get() });
        Err(Code::Timeout)
    }

    fn nvmlSystemEventSetFree(nvml, request: Out<SystemEventSetRequest>) {
        request.expect_version()?;
        let set = request.get().set;
        nvml.shared.sets.with(|sets| sets.system.remove(&set)).map(drop).ok_or(Code::InvalidArgument)
    }
}
