//! What happens by itself: events that NVML delivers, and what the queues
//! notice. One thread owns the event set; it ends when the session closes.

use crate::code::Code;
use crate::error::NvmlError;
use crate::job::StuckCall;
use crate::raw::{Device, Heard, Library};
use divvy_api::GpuUuid;
use nvml_wrapper_sys::bindings as sys;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::UnboundedSender;

/// Something happened to a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An error number of the GPU driver, with the instance it hit where NVML says.
    Xid { gpu: GpuUuid, xid: u64, gpu_instance: Option<u32>, compute_instance: Option<u32> },
    /// MIG mode or instances changed, by us or by somebody else.
    MigConfigChange { gpu: GpuUuid },
    /// The GPU driver has taken the GPU out of service.
    Unavailable { gpu: GpuUuid },
    /// A call answered that the GPU is lost; told once until a call succeeds.
    Lost { gpu: GpuUuid, call: &'static str },
    /// A GPU is lost and NVML does not say which.
    SomeGpuLost,
    /// A call that nobody waits for any more is still running.
    Stuck(StuckCall),
    /// That call returned.
    Late(Late),
}

/// A call that returned after it was given up. The hardware may have changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Late {
    pub gpu: GpuUuid,
    pub call: &'static str,
    pub after: Duration,
    /// Of the whole job: [`NvmlError::Deadline`] where it stopped after that call.
    pub result: Result<(), NvmlError>,
}

/// How long a wait for events lasts, and so how long closing waits for the thread.
const WAIT: Duration = Duration::from_millis(250);

const XID: u64 = sys::nvmlEventTypeXidCriticalError as u64;
const MIG_CONFIG_CHANGE: u64 = 0x100;
const UNAVAILABLE: u64 = sys::nvmlEventTypeGpuUnavailableError as u64;

/// Runs until `closing`; returns at once where no GPU has events.
pub(crate) fn listen(
    library: &Library,
    gpus: &[(GpuUuid, Device)],
    closing: &Arc<AtomicBool>,
    events: &UnboundedSender<Event>,
) {
    let set = match library.create_event_set() {
        Ok(set) => set,
        Err(code) => {
            tracing::warn!(%code, "no events from NVML: cannot create an event set");
            return;
        }
    };
    let mut registered = false;
    for (gpu, device) in gpus {
        let wanted = XID | MIG_CONFIG_CHANGE | UNAVAILABLE;
        let kinds = library.supported_events(*device).map_or(XID, |supported| supported & wanted);
        // One GPU without events takes nothing from the others.
        match library.register_events(*device, kinds, &set) {
            Ok(()) => registered = true,
            Err(code) => tracing::warn!(%gpu, %code, "no events of this GPU"),
        }
    }
    let mut failing = false;
    while registered && !closing.load(Ordering::Relaxed) {
        let begun = Instant::now();
        match library.wait(&set, WAIT.as_millis() as u32) {
            Ok(heard) => {
                failing = false;
                if let Some(event) = name(library, gpus, heard) {
                    // Nobody listens after close.
                    let _unheard = events.send(event);
                }
                continue;
            }
            Err(Code::Timeout) => failing = false,
            Err(code) => {
                if !failing {
                    tracing::warn!(%code, "waiting for NVML events failed");
                    let _unheard = events.send(Event::SomeGpuLost);
                }
                failing = true;
            }
        }
        // Neither a failing wait nor one that does not wait may spin.
        std::thread::sleep(WAIT.saturating_sub(begun.elapsed()));
    }
    library.free_event_set(set);
}

fn name(library: &Library, gpus: &[(GpuUuid, Device)], heard: Heard) -> Option<Event> {
    let known = gpus.iter().find(|(_, device)| device.is(heard.device)).map(|(gpu, _)| gpu.clone());
    let gpu = known.or_else(|| library.uuid(heard.device).ok().map(GpuUuid::from))?;
    let instance = |id: u32| (id != u32::MAX).then_some(id);
    match heard.kind {
        XID => Some(Event::Xid {
            gpu,
            xid: heard.data,
            gpu_instance: instance(heard.gpu_instance),
            compute_instance: instance(heard.compute_instance),
        }),
        MIG_CONFIG_CHANGE => Some(Event::MigConfigChange { gpu }),
        UNAVAILABLE => Some(Event::Unavailable { gpu }),
        _ => None,
    }
}
