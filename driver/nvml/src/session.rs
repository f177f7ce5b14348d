//! One opening of NVML: the library, the GPUs it showed, their queues.
//!
//! The library is held by the session and by each thread; the last to let go
//! shuts NVML down and unloads it. So a stuck call keeps what it runs in.

use crate::code::Code;
use crate::error::{NvmlError, OpenError};
use crate::events::{self, Event};
use crate::job::{Seed, Shared, StuckCall};
use crate::queue::GpuQueue;
use crate::raw::{Device, Library};
use crate::read::{GpuReading, Snapshot};
use divvy_api::GpuUuid;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::mpsc;

/// How long a call may take before its caller is answered without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub query: Duration,
    pub mig_mode: Duration,
    pub create: Duration,
    pub destroy: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let slow = Duration::from_secs(20);
        Self { query: Duration::from_secs(10), mig_mode: slow, create: slow, destroy: slow }
    }
}

/// NVML, open. A clone is the same session.
#[derive(Clone)]
pub struct Session(Arc<Inner>);

struct Inner {
    driver_version: String,
    cuda_version: (u32, u32),
    gpus: Vec<(GpuUuid, Device)>,
    unreadable: Vec<(u32, Code)>,
    limits: Limits,
    closing: Arc<AtomicBool>,
    events: mpsc::UnboundedSender<Event>,
    open: Mutex<Open>,
}

/// What goes when the session closes.
struct Open {
    library: Option<(Arc<Library>, mpsc::Sender<()>)>,
    queues: BTreeMap<GpuUuid, GpuQueue>,
    events: Option<mpsc::UnboundedReceiver<Event>>,
    /// Ends when the last thread has dropped the library.
    closed: Option<mpsc::Receiver<()>>,
}

/// How closing ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Closing {
    /// NVML is shut down and the library unloaded.
    Unloaded,
    /// Calls that have not returned keep the library; it goes when they do.
    Held(Vec<StuckCall>),
}

impl Session {
    /// Loads that library and finds the GPUs. Blocks.
    ///
    /// The file is loaded by its real path, so that a library of another
    /// version is another file to the loader even while the old one is held.
    pub fn open(library: &Path, limits: Limits) -> Result<Self, OpenError> {
        let path =
            library.canonicalize().map_err(|cause| OpenError::Library { path: library.to_owned(), cause })?;
        let nvml = Library::open(&path)?;
        let call = |call: &'static str| {
            let path = path.clone();
            move |code| OpenError::Call { path, call, code }
        };
        let driver_version = nvml.driver_version().map_err(call("nvmlSystemGetDriverVersion"))?;
        let cuda_version = nvml.cuda_version().unwrap_or_default();
        let count = nvml.device_count().map_err(call("nvmlDeviceGetCount_v2"))?;
        let (mut gpus, mut unreadable) = (Vec::new(), Vec::new());
        for index in 0..count {
            let found = nvml.device_by_index(index).and_then(|device| Ok((nvml.uuid(device)?, device)));
            match found {
                Ok((uuid, device)) => gpus.push((GpuUuid::from(uuid), device)),
                Err(code) => unreadable.push((index, code)),
            }
        }
        let (alive, closed) = mpsc::channel(1);
        let (events, heard) = mpsc::unbounded_channel();
        let open = Open {
            library: Some((Arc::new(nvml), alive)),
            queues: BTreeMap::new(),
            events: Some(heard),
            closed: Some(closed),
        };
        Ok(Self(Arc::new(Inner {
            driver_version,
            cuda_version,
            gpus,
            unreadable,
            limits,
            closing: Arc::new(AtomicBool::new(false)),
            events,
            open: Mutex::new(open),
        })))
    }

    /// The GPUs that NVML showed at opening.
    pub fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        self.0.gpus.iter().map(|(uuid, _)| uuid)
    }

    /// Reads all GPUs side by side; one that does not answer takes nothing from the others.
    pub async fn snapshot(&self) -> Result<Snapshot, NvmlError> {
        let sent: Vec<_> = self.gpus().map(|uuid| (uuid.clone(), self.gpu(uuid).read())).collect();
        let mut gpus = Vec::with_capacity(sent.len());
        for (uuid, reading) in sent {
            match reading.await {
                Err(error @ NvmlError::Closed { .. }) => return Err(error),
                reading => gpus.push(GpuReading { uuid, reading }),
            }
        }
        Ok(Snapshot {
            driver_version: self.0.driver_version.clone(),
            cuda_version: self.0.cuda_version,
            gpus,
            unreadable: self.0.unreadable.clone(),
        })
    }

    /// The queue of a GPU; always the same one.
    pub fn gpu(&self, uuid: &GpuUuid) -> GpuQueue {
        let mut open = self.0.open();
        if let Some(queue) = open.queues.get(uuid) {
            return queue.clone();
        }
        let seed = open.library.as_ref().map(|(library, alive)| Seed {
            library: Arc::clone(library),
            device: self.0.gpus.iter().find(|(known, _)| known == uuid).map(|(_, device)| *device),
            alive: alive.clone(),
        });
        let queue = GpuQueue::new(Shared::new(uuid.clone(), seed, self.0.events.clone()), self.0.limits);
        open.queues.insert(uuid.clone(), queue.clone());
        queue
    }

    /// What happens from now on; the first caller gets it and starts the listening thread.
    pub fn events(&self) -> Option<mpsc::UnboundedReceiver<Event>> {
        let mut open = self.0.open();
        let heard = open.events.take()?;
        if let Some((library, alive)) = open.library.clone() {
            let (gpus, closing, events) =
                (self.0.gpus.clone(), Arc::clone(&self.0.closing), self.0.events.clone());
            let listener = std::thread::Builder::new()
                .name("nvml-events".to_owned())
                .stack_size(256 * 1024)
                .spawn(move || {
                    events::listen(&library, &gpus, &closing, &events);
                    drop(library);
                    drop(alive);
                });
            if let Err(cause) = listener {
                tracing::warn!(%cause, "no events from NVML: cannot start a thread");
            }
        }
        Some(heard)
    }

    /// Refuses new calls, waits for those that run, then shuts NVML down and unloads the library.
    pub async fn close(self) -> Closing {
        let closed = self.0.close();
        let Some(mut closed) = closed else { return Closing::Unloaded };
        let Limits { query, mig_mode, create, destroy } = self.0.limits;
        let longest = query.max(mig_mode).max(create).max(destroy);
        match tokio::time::timeout(longest, closed.recv()).await {
            Ok(_) => Closing::Unloaded,
            Err(_) => Closing::Held(self.0.open().queues.values().filter_map(GpuQueue::stuck).collect()),
        }
    }
}

impl Inner {
    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets go of everything; the receiver ends when the threads have done so too.
    fn close(&self) -> Option<mpsc::Receiver<()>> {
        self.closing.store(true, Ordering::Relaxed);
        let mut open = self.open();
        for queue in open.queues.values() {
            queue.close();
        }
        if let Some((library, alive)) = open.library.take() {
            // Shutting down can take long: not on a thread of the runtime.
            let last = std::thread::Builder::new().name("nvml-close".to_owned()).spawn(move || {
                drop(library);
                drop(alive);
            });
            if let Err(cause) = last {
                tracing::warn!(%cause, "NVML is shut down on the caller's thread");
            }
        }
        open.closed.take()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}
