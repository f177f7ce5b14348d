//! One open NVML library, its GPUs and their queues.
//!
//! The session and each of its threads share the library. Dropping the last reference shuts NVML
//! down and unloads it, so a stuck call keeps the library loaded.

use crate::code::Code;
use crate::error::{NvmlError, OpenError};
use crate::events::{self, Event, StuckCall};
use crate::job::{Seed, Shared};
use crate::queue::{GpuQueue, Timeouts};
use crate::raw::{Device, Library};
use crate::types::{GpuReading, Snapshot};
use divvy_api::GpuUuid;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::mpsc;

/// An open NVML library. Clones share the session.
#[derive(Clone)]
pub struct Session(Arc<Inner>);

struct Inner {
    driver_version: String,
    cuda_version: (u32, u32),
    gpus: Vec<(GpuUuid, Device)>,
    unreadable: Vec<(u32, Code)>,
    timeouts: Timeouts,
    closing: Arc<AtomicBool>,
    events: mpsc::UnboundedSender<Event>,
    open: Mutex<Open>,
}

/// State that is dropped when the session closes.
struct Open {
    library: Option<(Arc<Library>, mpsc::Sender<()>)>,
    queues: BTreeMap<GpuUuid, GpuQueue>,
    events: Option<mpsc::UnboundedReceiver<Event>>,
    /// This channel closes when the last thread has dropped the library.
    closed: Option<mpsc::Receiver<()>>,
}

/// Result of closing a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Closing {
    /// NVML is shut down and the library is unloaded.
    Unloaded,
    /// These calls have not returned. The library is unloaded when they return.
    Held(Vec<StuckCall>),
}

impl Session {
    /// Loads the library and finds the GPUs. This call blocks.
    ///
    /// The file is loaded by its real path. So the loader treats a library of another version as
    /// another file, even while the old one is still loaded.
    ///
    /// # Errors
    /// The file cannot be loaded, or NVML cannot be initialised or queried.
    pub fn open(library: &Path, timeouts: Timeouts) -> Result<Self, OpenError> {
        Self::open_without(library, timeouts, &BTreeSet::new())
    }

    /// As [`Session::open`], but leaves out some GPUs. NVML is asked not to attach to all GPUs then.
    ///
    /// # Errors
    /// As [`Session::open`].
    pub fn open_without(
        library: &Path,
        timeouts: Timeouts,
        without: &BTreeSet<GpuUuid>,
    ) -> Result<Self, OpenError> {
        let path =
            library.canonicalize().map_err(|cause| OpenError::Library { path: library.to_owned(), cause })?;
        let nvml = Library::open(&path, without.is_empty())?;
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
                Ok((uuid, _)) if without.contains(&GpuUuid::from(uuid.as_str())) => {}
                Ok((uuid, device)) => gpus.push((GpuUuid::from(uuid), device)),
                Err(code) => unreadable.push((index, code)),
            }
        }
        let (alive, closed) = mpsc::channel(1);
        let (events, received) = mpsc::unbounded_channel();
        let open = Open {
            library: Some((Arc::new(nvml), alive)),
            queues: BTreeMap::new(),
            events: Some(received),
            closed: Some(closed),
        };
        Ok(Self(Arc::new(Inner {
            driver_version,
            cuda_version,
            gpus,
            unreadable,
            timeouts,
            closing: Arc::new(AtomicBool::new(false)),
            events,
            open: Mutex::new(open),
        })))
    }

    /// The GPUs that NVML reported when it was opened.
    pub fn gpus(&self) -> impl Iterator<Item = &GpuUuid> {
        self.0.gpus.iter().map(|(uuid, _)| uuid)
    }

    /// Reads all GPUs concurrently. An error of one GPU does not affect the others.
    ///
    /// # Errors
    /// [`NvmlError::Closed`] if the session is closed.
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

    /// The queue of a GPU; each GPU has one.
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
        let queue = GpuQueue::new(Shared::new(uuid.clone(), seed, self.0.events.clone()), self.0.timeouts);
        open.queues.insert(uuid.clone(), queue.clone());
        queue
    }

    /// The event channel. The first call returns it and starts the event thread; later calls return
    /// `None`.
    pub fn events(&self) -> Option<mpsc::UnboundedReceiver<Event>> {
        let mut open = self.0.open();
        let received = open.events.take()?;
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
                tracing::warn!(%cause, "NVML events are not received: cannot start the event thread");
            }
        }
        Some(received)
    }

    /// Rejects new calls, waits for running ones, then shuts NVML down and unloads the library.
    pub async fn close(self) -> Closing {
        let closed = self.0.close();
        let Some(mut closed) = closed else { return Closing::Unloaded };
        let Timeouts { query, mig_mode, create, destroy } = self.0.timeouts;
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

    /// Drops the library and all queues. The returned channel closes when the threads have done the
    /// same.
    fn close(&self) -> Option<mpsc::Receiver<()>> {
        self.closing.store(true, Ordering::Relaxed);
        let mut open = self.open();
        for queue in open.queues.values() {
            queue.close();
        }
        if let Some((library, alive)) = open.library.take() {
            // The shutdown can take long, so it does not run on a runtime thread.
            let last = std::thread::Builder::new().name("nvml-close".to_owned()).spawn(move || {
                drop(library);
                drop(alive);
            });
            if let Err(cause) = last {
                tracing::warn!(%cause, "cannot start a thread to close NVML; closing it on this thread");
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
