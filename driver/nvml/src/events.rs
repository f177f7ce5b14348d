//! Events: those of NVML, and those that the queues detect. One thread owns the event set; it exits
//! only when the session closes. When a wait fails, the thread builds a new set without the GPUs
//! that cannot be registered, and tries those again later.

use crate::code::Code;
use crate::error::NvmlError;
use crate::raw::{Device, EventData, EventSet, Library};
use divvy_api::GpuUuid;
use nvml_wrapper_sys::bindings as sys;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// An event of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An Xid error of the GPU driver, with the affected instance if NVML reports it.
    Xid { gpu: GpuUuid, xid: u64, gpu_instance: Option<u32>, compute_instance: Option<u32> },
    /// The MIG mode or the instances changed, by this driver or by another tool.
    MigConfigChange { gpu: GpuUuid },
    /// Something changed that [`GpuQueue::health`](crate::GpuQueue::health) reads: the recovery
    /// action, ECC errors or retired memory.
    HealthChange { gpu: GpuUuid },
    /// This driver destroyed a GPU instance. Its id may be used again.
    InstanceDestroyed { gpu: GpuUuid, gpu_instance: u32 },
    /// The GPU driver took the GPU out of service.
    Unavailable { gpu: GpuUuid },
    /// A call reported that the GPU is lost. Sent once, until a call succeeds again.
    Lost { gpu: GpuUuid, call: &'static str },
    /// A GPU is lost, and NVML does not report which one.
    SomeGpuLost,
    /// The caller of a running call no longer waits for it.
    Stuck(StuckCall),
    /// A stuck call returned.
    LateReturn(LateReturn),
}

/// A running call whose caller no longer waits for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StuckCall {
    pub gpu: GpuUuid,
    pub call: &'static str,
    pub since: Instant,
}

/// A call that returned after its caller stopped waiting. The hardware may have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LateReturn {
    pub gpu: GpuUuid,
    pub call: &'static str,
    pub after: Duration,
    /// The result of the whole job; [`NvmlError::Deadline`] if it stopped after this call.
    pub result: Result<(), NvmlError>,
}

/// Timeout of one wait for events, and so the longest delay of closing by this thread.
const WAIT_TIMEOUT: Duration = Duration::from_millis(250);

const XID: u64 = sys::nvmlEventTypeXidCriticalError as u64;
const MIG_CONFIG_CHANGE: u64 = 0x100;
const UNAVAILABLE: u64 = sys::nvmlEventTypeGpuUnavailableError as u64;
/// Events after which the health of a GPU is read.
const HEALTH: u64 = (sys::nvmlEventTypeDoubleBitEccError
    | sys::nvmlEventTypeDramRetirementEvent
    | sys::nvmlEventTypeDramRetirementFailure
    | sys::nvmlEventTypeNonFatalPoisonError
    | sys::nvmlEventTypeFatalPoisonError
    | sys::nvmlEventTypeGpuRecoveryAction) as u64;

/// Interval at which GPUs without registration are tried again. A lost GPU may come back after a
/// reset, and one attempt costs four short calls.
const REGISTER_INTERVAL: Duration = Duration::from_secs(5);
/// Timeout of the wait that checks whether NVML can wait for events of a GPU, in milliseconds.
const PROBE_TIMEOUT_MS: u32 = 1;

/// Runs until `closing` is set. A GPU that cannot be registered does not affect the others.
pub(crate) fn listen(
    library: &Library,
    gpus: &[(GpuUuid, Device)],
    closing: &Arc<AtomicBool>,
    events: &UnboundedSender<Event>,
) {
    let mut listener =
        Listener { library, gpus, events, set: None, registered: vec![Registration::Pending; gpus.len()] };
    let mut next_attempt = Instant::now();
    let mut failing = false;
    while !closing.load(Ordering::Relaxed) {
        let begun = Instant::now();
        if begun >= next_attempt {
            listener.register();
            next_attempt = begun + REGISTER_INTERVAL;
        }
        match listener.set.as_ref().map(|set| library.wait(set, WAIT_TIMEOUT.as_millis() as u32)) {
            None => {}
            Some(Ok(received)) => {
                failing = false;
                listener.send(received);
                continue;
            }
            Some(Err(Code::Timeout)) => failing = false,
            Some(Err(code)) => {
                // A lost GPU spoils its set for ever, so the other GPUs need a new one.
                listener.free_set();
                if !failing {
                    tracing::warn!(%code, "waiting for NVML events failed; a GPU may be lost");
                    // After close there is no receiver.
                    let _no_receiver = events.send(Event::SomeGpuLost);
                    next_attempt = begun;
                }
                failing = true;
            }
        }
        // A wait that returns early must not make this loop spin.
        std::thread::sleep(WAIT_TIMEOUT.saturating_sub(begun.elapsed()));
    }
    listener.free_set();
}

/// Registration of a GPU for events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Registration {
    /// Not attempted since the set was created.
    Pending,
    Done,
    Failed(Code),
}

/// The event set and the GPUs that are registered in it.
struct Listener<'a> {
    library: &'a Library,
    gpus: &'a [(GpuUuid, Device)],
    events: &'a UnboundedSender<Event>,
    /// Without a registered GPU there is no set.
    set: Option<EventSet>,
    /// In the order of the GPUs.
    registered: Vec<Registration>,
}

impl Listener<'_> {
    /// Registers all GPUs that are not registered yet and that can be. Logs each new failure once.
    fn register(&mut self) {
        for (at, (gpu, device)) in self.gpus.iter().enumerate() {
            if self.registered[at] == Registration::Done {
                continue;
            }
            let result = self.probe(*device).and_then(|()| self.add(*device));
            let now = result.map_or_else(Registration::Failed, |()| Registration::Done);
            match now {
                Registration::Failed(code) if now != self.registered[at] => {
                    tracing::warn!(
                        %gpu, %code,
                        "cannot register for events of this GPU; they are not received"
                    );
                }
                _ => {}
            }
            self.registered[at] = now;
        }
    }

    /// Checks with a set of its own whether NVML can wait for events of the GPU. A GPU that cannot
    /// would spoil the common set.
    fn probe(&self, device: Device) -> Result<(), Code> {
        let set = self.library.create_event_set()?;
        let waited = self.register_in(&set, device).and_then(|()| self.library.wait(&set, PROBE_TIMEOUT_MS));
        self.library.free_event_set(set);
        match waited {
            Ok(received) => {
                self.send(received);
                Ok(())
            }
            Err(Code::Timeout) => Ok(()),
            Err(code) => Err(code),
        }
    }

    /// Adds the GPU to the common set, which is created for the first one.
    fn add(&mut self, device: Device) -> Result<(), Code> {
        if let Some(set) = &self.set {
            return self.register_in(set, device);
        }
        let set = self.library.create_event_set()?;
        match self.register_in(&set, device) {
            Ok(()) => {
                self.set = Some(set);
                Ok(())
            }
            Err(code) => {
                self.library.free_event_set(set);
                Err(code)
            }
        }
    }

    fn register_in(&self, set: &EventSet, device: Device) -> Result<(), Code> {
        let requested = XID | MIG_CONFIG_CHANGE | UNAVAILABLE | HEALTH;
        let kinds = match self.library.supported_events(device) {
            Ok(supported) => supported & requested,
            Err(Code::GpuIsLost) => return Err(Code::GpuIsLost),
            Err(_) => XID,
        };
        self.library.register_events(device, kinds, set)
    }

    fn free_set(&mut self) {
        if let Some(set) = self.set.take() {
            self.library.free_event_set(set);
        }
        for registered in &mut self.registered {
            if *registered == Registration::Done {
                *registered = Registration::Pending;
            }
        }
    }

    fn send(&self, received: EventData) {
        if let Some(event) = name(self.library, self.gpus, received) {
            // After close there is no receiver.
            let _no_receiver = self.events.send(event);
        }
    }
}

fn name(library: &Library, gpus: &[(GpuUuid, Device)], received: EventData) -> Option<Event> {
    let known = gpus.iter().find(|(_, device)| device.is(received.device)).map(|(gpu, _)| gpu.clone());
    let gpu = known.or_else(|| library.uuid(received.device).ok().map(GpuUuid::from))?;
    let instance = |id: u32| (id != u32::MAX).then_some(id);
    match received.kind {
        XID => Some(Event::Xid {
            gpu,
            xid: received.data,
            gpu_instance: instance(received.gpu_instance),
            compute_instance: instance(received.compute_instance),
        }),
        MIG_CONFIG_CHANGE => Some(Event::MigConfigChange { gpu }),
        UNAVAILABLE => Some(Event::Unavailable { gpu }),
        kind if kind & HEALTH != 0 => Some(Event::HealthChange { gpu }),
        _ => None,
    }
}
