//! Events: those of NVML, and those that the queues detect. One thread owns the event set; it exits
//! when the session closes.

use crate::code::Code;
use crate::error::NvmlError;
use crate::raw::{Device, EventData, Library};
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

/// Runs until `closing` is set. Returns at once if no GPU supports events.
pub(crate) fn listen(
    library: &Library,
    gpus: &[(GpuUuid, Device)],
    closing: &Arc<AtomicBool>,
    events: &UnboundedSender<Event>,
) {
    let set = match library.create_event_set() {
        Ok(set) => set,
        Err(code) => {
            tracing::warn!(%code, "NVML events are not received: cannot create an event set");
            return;
        }
    };
    let mut registered = false;
    for (gpu, device) in gpus {
        let requested = XID | MIG_CONFIG_CHANGE | UNAVAILABLE | HEALTH;
        let kinds = library.supported_events(*device).map_or(XID, |supported| supported & requested);
        // A GPU without events does not affect the others.
        match library.register_events(*device, kinds, &set) {
            Ok(()) => registered = true,
            Err(code) => {
                tracing::warn!(%gpu, %code, "cannot register for events of this GPU; they are not received")
            }
        }
    }
    let mut failing = false;
    while registered && !closing.load(Ordering::Relaxed) {
        let begun = Instant::now();
        match library.wait(&set, WAIT_TIMEOUT.as_millis() as u32) {
            Ok(received) => {
                failing = false;
                if let Some(event) = name(library, gpus, received) {
                    // After close there is no receiver.
                    let _no_receiver = events.send(event);
                }
                continue;
            }
            Err(Code::Timeout) => failing = false,
            Err(code) => {
                if !failing {
                    tracing::warn!(%code, "waiting for NVML events failed; a GPU may be lost");
                    let _no_receiver = events.send(Event::SomeGpuLost);
                }
                failing = true;
            }
        }
        // A wait that returns early must not make this loop spin.
        std::thread::sleep(WAIT_TIMEOUT.saturating_sub(begun.elapsed()));
    }
    library.free_event_set(set);
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
