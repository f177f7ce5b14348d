//! The node's GPUs: one NVML session, opened when the GPU driver is there and
//! again when it was replaced, and the [`Inventory`] that everyone watches.
//!
//! [`Gpus`] is a handle; the work is done by one task (see `keeper`), which
//! owns the session, the last reading of each GPU and the file of GPU numbers.
//! Hardware calls go through [`Gpus::queue`] straight to the GPU's own thread.

mod keeper;
mod known;
mod library;

use crate::discover::Ours;
use crate::paths::HostPaths;
use divvy_api::GpuUuid;
use divvy_model::GpuPolicy;
use divvy_model::inventory::{Gpu, Inventory};
use divvy_nvml::{Event, GpuQueue, Limits, Session};
use keeper::{Command, Keeper};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::task::JoinHandle;

/// What may be made of a GPU, which carries what might be made of it so far.
pub type Policy = dyn Fn(&Gpu) -> GpuPolicy + Send + Sync;

/// How the GPUs are found and watched.
#[derive(Clone, Debug)]
pub struct GpusOptions {
    /// As this process sees it.
    pub driver_root: PathBuf,
    pub sys_root: PathBuf,
    pub state_dir: PathBuf,
    pub limits: Limits,
    /// How often the GPU driver's library is looked for.
    pub poll: Duration,
    /// How long [`Gpus::start`] waits for the first reading.
    pub first_reading: Duration,
}

impl GpusOptions {
    /// The defaults for these paths.
    pub fn new(paths: &HostPaths) -> Self {
        Self {
            driver_root: paths.seen(&paths.driver_root),
            sys_root: paths.sys_root.clone(),
            state_dir: paths.state_dir.clone(),
            limits: Limits::default(),
            poll: Duration::from_secs(1),
            first_reading: Duration::from_secs(30),
        }
    }
}

/// The GPUs of this node. A clone is the same.
#[derive(Clone)]
pub struct Gpus(Arc<Shared>);

struct Shared {
    /// Set and cleared by the keeper.
    session: Mutex<Option<Session>>,
    inventory: watch::Sender<Arc<Inventory>>,
    events: broadcast::Sender<Event>,
    commands: mpsc::UnboundedSender<Command>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

/// Why there is no queue for a GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    #[error("the GPU driver is not there or is being replaced, {gpu} cannot be used until it is back")]
    NoDriver { gpu: GpuUuid },
    #[error("{gpu} is missing; look for it with nvidia-smi -L and in the kernel log")]
    Missing { gpu: GpuUuid },
    #[error("{gpu} is not a GPU of this node")]
    Unknown { gpu: GpuUuid },
}

/// The NVML library of a driver root, where this process sees it.
pub(crate) fn library(driver_root: &std::path::Path) -> Option<PathBuf> {
    Some(library::find(driver_root)?.path)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panicking holder leaves behind is whole: values are replaced, not edited.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpus {
    /// Starts and waits for the first reading: until then nobody can tell a
    /// missing GPU from one not read yet. Without a GPU driver it does not wait.
    pub async fn start(options: GpusOptions) -> Self {
        let (commands, orders) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            session: Mutex::new(None),
            inventory: watch::Sender::new(Arc::new(Inventory::default())),
            events: broadcast::Sender::new(64),
            commands,
            keeper: Mutex::new(None),
        });
        let (first, read) = oneshot::channel();
        let wait = options.first_reading;
        let keeper = Keeper::new(options, Arc::clone(&shared), first);
        *lock(&shared.keeper) = Some(tokio::spawn(keeper.run(orders)));
        if tokio::time::timeout(wait, read).await.is_err() {
            tracing::warn!(waited = ?wait, "the GPUs have not been read yet, going on without them");
        }
        Self(shared)
    }

    /// What the node has, now and from now on.
    pub fn inventory(&self) -> watch::Receiver<Arc<Inventory>> {
        self.0.inventory.subscribe()
    }

    /// What happens to the GPUs. A late call ([`Event::Late`]) comes after its
    /// GPU was read again.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.0.events.subscribe()
    }

    /// The queue for hardware calls on a GPU.
    pub fn queue(&self, gpu: &GpuUuid) -> Result<GpuQueue, Unavailable> {
        use divvy_model::inventory::Presence;
        let inventory = self.0.inventory.borrow();
        let known = inventory.gpus.iter().find(|have| have.uuid == *gpu);
        let session = lock(&self.0.session);
        match (session.as_ref(), known.map(|known| known.presence)) {
            (None, _) => Err(Unavailable::NoDriver { gpu: gpu.clone() }),
            (Some(_), None) => Err(Unavailable::Unknown { gpu: gpu.clone() }),
            (Some(_), Some(Presence::Missing)) => Err(Unavailable::Missing { gpu: gpu.clone() }),
            (Some(session), Some(Presence::Present)) => Ok(session.gpu(gpu)),
        }
    }

    /// Reads a GPU again now; when this returns the inventory shows it.
    pub async fn refresh(&self, gpu: &GpuUuid) {
        self.0.ask(|done| Command::Refresh(gpu.clone(), done)).await;
    }

    /// Reads a GPU again soon; several requests become one reading.
    pub fn refresh_soon(&self, gpu: &GpuUuid) {
        self.0.send(Command::RefreshSoon(gpu.clone()));
    }

    /// Says which instances the records explain, and judges those that exist anew.
    pub fn set_ours(&self, ours: Arc<Ours>) {
        self.0.send(Command::SetOurs(ours));
    }

    /// Says what the administrator lets be made of each GPU; when this returns the
    /// inventory shows it. Until then it shows what it showed in its last life.
    pub async fn set_policy(&self, policy: Arc<Policy>) {
        self.0.ask(|done| Command::SetPolicy(policy, done)).await;
    }

    /// Says whose MPS control daemon is not well, and why.
    pub fn set_mps(&self, sick: BTreeMap<GpuUuid, String>) {
        self.0.send(Command::SetMps(sick));
    }

    /// Says under which resource a device plugin hands the GPUs out, if one does.
    pub fn set_device_plugin(&self, resource: Option<String>) {
        self.0.send(Command::SetDevicePlugin(resource));
    }

    /// Closes NVML and leaves it closed, for a GPU driver that is to be unloaded.
    pub async fn drain(&self) {
        self.0.ask(Command::Drain).await;
    }

    /// Opens NVML again after [`Gpus::drain`].
    pub fn resume(&self) {
        self.0.send(Command::Resume);
    }

    /// Closes NVML and ends; every call from now on finds no GPU driver.
    pub async fn shutdown(&self) {
        self.0.ask(Command::Stop).await;
        let keeper = lock(&self.0.keeper).take();
        if let Some(keeper) = keeper
            && let Err(cause) = keeper.await
        {
            tracing::error!(%cause, "the GPU keeper ended badly");
        }
    }
}

impl Shared {
    fn send(&self, command: Command) {
        // After shutdown there is nothing to do any more.
        let _stopped = self.commands.send(command);
    }

    async fn ask(&self, command: impl FnOnce(oneshot::Sender<()>) -> Command) {
        let (done, answer) = oneshot::channel();
        self.send(command(done));
        // A keeper that has ended has done all there is to do.
        let _ended = answer.await;
    }
}
