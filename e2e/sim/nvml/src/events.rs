//! Event sets: what a program registered for, and waiting for it.
//!
//! A set remembers, for each registration, the number of the newest event at that moment, and for all the number it
//! has delivered last: events before a registration are never delivered, none twice. The queue itself is part of the
//! state, so an event reaches every process. Waiting looks at the state file every few milliseconds.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use divvy_sim::State;
use divvy_sim::code::Code;
use divvy_sim::state::Event;

use crate::abi::{
    EventData, SystemEventData, SystemEventSetRequest, SystemRegisterRequest, SystemWaitRequest,
};
use crate::argument::{Argument, Out, Outcome};
use crate::handle::Device;
use crate::library::{Nvml, Shared, entry};

/// How often a waiting call looks.
const LOOK: Duration = Duration::from_millis(10);
/// SBE, DBE, XID, MIG configuration, GPU unavailable, recovery action: what the simulator can make happen, and
/// performance state and clocks, which programs register for as well.
const SUPPORTED: u64 = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x100 | 0x4000 | 0x8000;
/// Bits that header 13.3 knows.
const KNOWN: u64 = 0xff9f;
/// "Not attributed to an instance."
const NOBODY: u32 = u32::MAX;
/// `nvmlSystemEventTypeGpuDriverUnbind` and `Bind`.
const SYSTEM_KNOWN: u64 = 3;

const SET_TAG: u64 = 0x5e << 56;
const SYSTEM_TAG: u64 = 0x5f << 56;
const NUMBER: u64 = (1 << 56) - 1;

/// The sets of this process, by handle.
#[derive(Default)]
pub(crate) struct Sets {
    last: u64,
    sets: BTreeMap<u64, Set>,
    system: BTreeMap<u64, u64>,
}

#[derive(Default)]
struct Set {
    /// By slot.
    registered: BTreeMap<usize, Registration>,
    /// Number of the newest event delivered.
    delivered: u64,
}

struct Registration {
    mask: u64,
    /// Events up to this one happened before.
    since: u64,
}

/// `nvmlEventSet_t`.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct SetHandle(u64);

impl Argument for SetHandle {
    fn missing(&self) -> bool {
        self.0 & !NUMBER != SET_TAG
    }
}

impl Sets {
    fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The next event of a set that it has not delivered.
    fn next(&mut self, handle: u64, state: &State) -> Outcome<Option<Event>> {
        let set = self.sets.get_mut(&handle).ok_or(Code::InvalidArgument)?;
        let wanted = |event: &&Event| {
            event.seq > set.delivered
                && set.registered.get(&event.slot).is_some_and(|registration| {
                    event.seq > registration.since && registration.mask & event.kind.mask() != 0
                })
        };
        let found = state.events.queue.iter().find(wanted).cloned();
        set.delivered = found.as_ref().map_or(state.events.last.max(set.delivered), |event| event.seq);
        Ok(found)
    }

    /// Whether nothing that the set is registered for can still come.
    fn lost(&self, handle: u64, state: &State) -> bool {
        self.sets.get(&handle).is_some_and(|set| {
            let gone = |slot: &usize| state.gpus.get(*slot).is_none_or(|gpu| gpu.lost || gpu.missing);
            !set.registered.is_empty() && set.registered.keys().all(gone)
        })
    }
}

/// Delivers events until there is one, the time is over, or all GPUs of the set are lost.
fn wait(shared: &Shared, set: SetHandle, timeout: Duration) -> Outcome<Event> {
    let deadline = Instant::now() + timeout;
    loop {
        let state = shared.sim.written()?;
        if let Some(event) = shared.sets.with(|sets| sets.next(set.0, &state))? {
            return Ok(event);
        }
        if shared.sets.with(|sets| sets.lost(set.0, &state)) {
            return Err(Code::GpuIsLost);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Code::Timeout);
        }
        std::thread::sleep(left.min(LOOK));
    }
}

fn data(event: &Event, attributed: bool) -> EventData {
    let (gi, ci) = event.instance.filter(|_| attributed).unwrap_or((NOBODY, NOBODY));
    EventData {
        device: Device::of_gpu(event.slot).raw(),
        kind: event.kind.mask(),
        data: event.kind.data(),
        gpu_instance_id: gi,
        compute_instance_id: ci,
    }
}

fn wait_on(nvml: &Nvml, set: SetHandle, timeout_ms: u32, attributed: bool) -> Outcome<EventData> {
    let event = wait(&nvml.shared, set, Duration::from_millis(timeout_ms.into()))?;
    Ok(data(&event, attributed))
}

entry! {
    fn nvmlDeviceGetSupportedEventTypes(nvml, device: Device, kinds: Out<u64>) {
        device.whole(&nvml.state)?;
        kinds.set(SUPPORTED);
        Ok(())
    }

    fn nvmlEventSetCreate(nvml, set: Out<u64>) {
        let handle = nvml.shared.sets.with(|sets| {
            let handle = SET_TAG | sets.number();
            sets.sets.insert(handle, Set { delivered: nvml.state.events.last, ..Set::default() });
            handle
        });
        set.set(handle);
        Ok(())
    }

    /// None of the kinds is registered where one is not supported; a MIG device has no events.
    fn nvmlDeviceRegisterEvents(nvml, device: Device, kinds: u64, set: SetHandle) {
        let (slot, _) = device.whole(&nvml.state)?;
        if kinds & !KNOWN != 0 {
            return Err(Code::InvalidArgument);
        }
        if kinds & !SUPPORTED != 0 {
            return Err(Code::NotSupported);
        }
        nvml.shared.sets.with(|sets| {
            let set = sets.sets.get_mut(&set.0).ok_or(Code::InvalidArgument)?;
            let fresh = Registration { mask: 0, since: nvml.state.events.last };
            set.registered.entry(slot).or_insert(fresh).mask |= kinds;
            Ok(())
        })
    }

    /// The first version knows nothing of instances.
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

    /// System events tell of drivers that come and go; the simulator's never does, so a wait ends by its time.
    fn nvmlSystemEventSetCreate(nvml, request: Out<SystemEventSetRequest>) {
        request.expect_version()?;
        let set = nvml.shared.sets.with(|sets| {
            let handle = SYSTEM_TAG | sets.number();
            sets.system.insert(handle, 0);
            handle
        });
        request.set(SystemEventSetRequest { set, ..request.get() });
        Ok(())
    }

    fn nvmlSystemRegisterEvents(nvml, request: Out<SystemRegisterRequest>) {
        request.expect_version()?;
        let SystemRegisterRequest { kinds, set, .. } = request.get();
        if kinds & !SYSTEM_KNOWN != 0 {
            return Err(Code::InvalidArgument);
        }
        nvml.shared.sets.with(|sets| sets.system.get_mut(&set).map(|mask| *mask |= kinds)).ok_or(Code::InvalidArgument)
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
