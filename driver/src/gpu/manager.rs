//! The GPUs of this node: one NVML session, and the [`Inventory`] that follows it.
//!
//! [`Gpus`] is a handle. [`GpuManager`] is the task behind it, which owns the session, the last
//! reading of each GPU and the file of GPU numbers. Hardware calls go through [`Gpus::queue`] to
//! the GPU's own thread. The task itself never blocks: readings run on the GPUs' threads and come
//! back as results, at most one at a time per GPU. NVML's list is compared with the kernel's, and a
//! difference reopens NVML.

use crate::gpu::epoch::Epoch;
use crate::gpu::health::{self, HealthMonitor};
use crate::gpu::inventory;
use crate::gpu::inventory::{Ownership, PendingOwnership, ReadScope};
use crate::gpu::kernel::{Difference, GpuCounts, Kernel, KernelView, Listing, NvmlGpu};
use crate::gpu::library;
use crate::gpu::library::LibraryFile;
use crate::gpu::numbers::{Boot, GpuNumbersFile};
use crate::gpu::sysfs::{PciFacts, Sysfs};
use crate::paths::HostPaths;
use divvy_api::GpuUuid;
use divvy_api::text::error_chain;
use divvy_model::inventory::{Condition, Gpu, Inventory, Presence};
use divvy_model::numbers::GpuNumber;
use divvy_model::{GpuPolicy, HealthReading, Removals};
use divvy_nvml::{
    Closing, Description, Event, GpuQueue, LateReturn, NvmlError, RawMig, Session, Snapshot, State, Timeouts,
};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, MissedTickBehavior};

/// Computes the policy of a GPU from the GPU, which carries its last known policy.
pub type GpuPolicyFn = dyn Fn(&Gpu) -> GpuPolicy + Send + Sync;

/// How claim records use a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuUsage {
    /// A record names the GPU.
    pub named: bool,
    /// A record names an instance of the GPU.
    pub instances: bool,
    /// A released claim left a debt on the GPU.
    pub debts: bool,
}

/// Looks up how claim records use a GPU.
pub type GpuUsageFn = dyn Fn(&GpuUuid) -> GpuUsage + Send + Sync;

/// Options of the GPU manager.
#[derive(Clone, Debug)]
pub struct GpusOptions {
    /// As mounted in this process.
    pub driver_root: PathBuf,
    pub sys_root: PathBuf,
    pub proc_root: PathBuf,
    /// Directory of the device nodes, as mounted in this process.
    pub dev_dir: PathBuf,
    pub state_dir: PathBuf,
    pub timeouts: Timeouts,
    /// Interval at which the GPU driver's library and the kernel's list of names are checked.
    pub poll: Duration,
    /// Interval at which the health of every GPU is read.
    pub health_poll: Duration,
    /// Interval at which NVML's list of GPUs is compared with the kernel's if no name changed.
    pub compare_interval: Duration,
    /// How long a GPU that nothing names may be missing before it is forgotten.
    pub forget_after: Duration,
    /// How long [`Gpus::start`] waits for the first reading.
    pub first_reading: Duration,
}

impl GpusOptions {
    /// The defaults for these paths.
    pub fn new(paths: &HostPaths) -> Self {
        Self {
            driver_root: paths.local_path(&paths.driver_root),
            sys_root: paths.sys_root.clone(),
            proc_root: paths.proc_root.clone(),
            dev_dir: paths.local_path(&paths.dev("/dev")),
            state_dir: paths.state_dir.clone(),
            timeouts: Timeouts::default(),
            poll: Duration::from_secs(1),
            health_poll: HEALTH_POLL_INTERVAL,
            compare_interval: COMPARE_INTERVAL,
            forget_after: FORGET_AFTER,
            first_reading: Duration::from_secs(30),
        }
    }
}

/// Default interval of health readings. A GPU that dies without an event has its taint within 30 s,
/// even if a call first waits for its deadline (10 s) and an unknown error must repeat.
pub const HEALTH_POLL_INTERVAL: Duration = Duration::from_secs(10);

/// The GPUs of this node. A clone is the same.
#[derive(Clone)]
pub struct Gpus(Arc<Shared>);

struct Shared {
    /// Set and cleared by the manager task.
    session: Mutex<Option<Session>>,
    inventory: watch::Sender<Arc<Inventory>>,
    shortage: watch::Sender<Option<GpuCounts>>,
    events: broadcast::Sender<Event>,
    commands: mpsc::UnboundedSender<Command>,
    manager: Mutex<Option<JoinHandle<()>>>,
    health: Mutex<BTreeMap<GpuUuid, LastHealth>>,
}

/// The last reading of a GPU's health that saw the hardware as Divvy left it.
#[derive(Clone, Copy, Default)]
struct LastHealth {
    /// When Divvy last changed the hardware. An earlier reading tells nothing about that change.
    changed: Option<Instant>,
    reading: Option<HealthReading>,
}

/// Why there is no queue for a GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    #[error("the GPU driver is not loaded or is being replaced; {gpu} cannot be used until it is back")]
    NoDriver { gpu: GpuUuid },
    #[error("{gpu} is missing; look for it with nvidia-smi -L and in the kernel log")]
    Missing { gpu: GpuUuid },
    #[error("{gpu} is shown by the kernel driver and not by NVML yet; retry")]
    Unread { gpu: GpuUuid },
    #[error("{gpu} is not a GPU of this node")]
    Unknown { gpu: GpuUuid },
}

/// Why a GPU was neither handed over nor taken back.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HandOverError {
    #[error("{gpu} is not a GPU of this node; name it by UUID or number")]
    Unknown { gpu: String },
    #[error("{gpu} is not released")]
    NotHandedOver { gpu: GpuUuid },
    #[error("NVML does not let go of {gpu} alone, so it is closed for all GPUs until {gpu} is taken back")]
    AllClosed { gpu: GpuUuid },
    #[error("the GPU manager has stopped")]
    Stopped,
}

/// Why a GPU was not forgotten.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ForgetError {
    #[error("{gpu} is not a GPU of this node; name it by UUID or number")]
    Unknown { gpu: String },
    #[error("{gpu} is not missing; remove it from the node first")]
    NotMissing { gpu: GpuUuid },
    #[error("{gpu} is named by claims; delete their pods and claims first")]
    InUse { gpu: GpuUuid },
    #[error("the GPU manager has stopped")]
    Stopped,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Values are replaced as a whole, so a panic cannot leave them half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gpus {
    /// Starts the task and waits for the first reading, since a GPU that was not read yet looks like
    /// a missing one. Without a GPU driver it does not wait.
    pub async fn start(options: GpusOptions) -> Self {
        let (commands, receiver) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            session: Mutex::new(None),
            inventory: watch::Sender::new(Arc::new(Inventory::default())),
            shortage: watch::Sender::new(None),
            events: broadcast::Sender::new(64),
            commands,
            manager: Mutex::new(None),
            health: Mutex::default(),
        });
        let (first, read) = oneshot::channel();
        let wait = options.first_reading;
        let manager = GpuManager::new(options, Arc::clone(&shared), first);
        *lock(&shared.manager) = Some(tokio::spawn(manager.run(receiver)));
        if tokio::time::timeout(wait, read).await.is_err() {
            tracing::warn!(waited = ?wait, "GPUs not read yet; continuing without them");
        }
        Self(shared)
    }

    /// The inventory of the node, and its changes.
    pub fn inventory(&self) -> watch::Receiver<Arc<Inventory>> {
        self.0.inventory.subscribe()
    }

    /// The numbers of GPUs while the kernel shows more than NVML lists, and their changes.
    pub fn shortage(&self) -> watch::Receiver<Option<GpuCounts>> {
        self.0.shortage.subscribe()
    }

    /// Forgets a missing GPU at once: its number and its last description. `gpu` is the UUID or the
    /// number, with or without `gpu-`.
    pub async fn forget(&self, gpu: &str) -> Result<(), ForgetError> {
        let (done, answer) = oneshot::channel();
        self.0.send(Command::Forget(gpu.to_owned(), done));
        answer.await.unwrap_or(Err(ForgetError::Stopped))
    }

    /// Lets go of a GPU, so that an operator can reset it. The other GPUs stay in use. Returns when the
    /// GPU's handles are closed. `gpu` is the UUID or the number, with or without `gpu-`.
    pub async fn hand_over(&self, gpu: &str) -> Result<(), HandOverError> {
        let (done, answer) = oneshot::channel();
        self.0.send(Command::HandOver(gpu.to_owned(), done));
        answer.await.unwrap_or(Err(HandOverError::Stopped))
    }

    /// Uses a GPU again that was handed over.
    pub async fn take_back(&self, gpu: &str) -> Result<(), HandOverError> {
        let (done, answer) = oneshot::channel();
        self.0.send(Command::TakeBack(gpu.to_owned(), done));
        answer.await.unwrap_or(Err(HandOverError::Stopped))
    }

    /// The last reading of the GPU's health since Divvy changed its hardware, also while NVML is closed.
    /// If a later reading shows a reset, that change is gone from the hardware.
    pub fn last_health(&self, gpu: &GpuUuid) -> Option<HealthReading> {
        lock(&self.0.health).get(gpu)?.reading
    }

    /// Notes that a step has changed the hardware of a GPU, or may have.
    pub fn note_change(&self, gpu: &GpuUuid) {
        let changed = LastHealth { changed: Some(Instant::now()), reading: None };
        lock(&self.0.health).insert(gpu.clone(), changed);
    }

    /// Sets the GPU numbers that the node configuration names; these GPUs are not forgotten by
    /// themselves. `None` means that the configuration is unknown, and no GPU is.
    pub fn set_configured(&self, numbers: Option<BTreeSet<GpuNumber>>) {
        self.0.send(Command::SetConfigured(numbers));
    }

    /// Events of the GPUs. [`Event::LateReturn`], the return of a stuck call, is sent after its GPU was
    /// read again.
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
            (Some(_), Some(Presence::Unread)) => Err(Unavailable::Unread { gpu: gpu.clone() }),
            (Some(session), Some(Presence::Present)) => Ok(session.gpu(gpu)),
        }
    }

    /// Reads a GPU again. When this returns, the inventory shows the result.
    pub async fn refresh(&self, gpu: &GpuUuid) {
        self.0.request(|done| Command::Refresh(gpu.clone(), done)).await;
    }

    /// Requests a reading without waiting for it; several requests become one reading.
    pub fn refresh_soon(&self, gpu: &GpuUuid) {
        self.0.send(Command::RefreshSoon(gpu.clone()));
    }

    /// Sets the function that tells whether a record has an instance, and classifies instances again.
    pub fn set_ownership(&self, ownership: Arc<Ownership>) {
        self.0.send(Command::SetOwnership(ownership));
    }

    /// Sets the function that tells how records use a GPU. Before the first call, no GPU is
    /// forgotten.
    pub fn set_usage(&self, usage: Arc<GpuUsageFn>) {
        self.0.send(Command::SetUsage(usage));
    }

    /// Sets the administrator's policy for GPUs. When this returns, the inventory shows it. Before
    /// the first call the inventory shows the policy of the daemon's last run.
    pub async fn set_policy(&self, policy: Arc<GpuPolicyFn>) {
        self.0.request(|done| Command::SetPolicy(policy, done)).await;
    }

    /// Sets the GPUs with a failed MPS control daemon, and the cause.
    pub fn set_mps(&self, failed: BTreeMap<GpuUuid, String>) {
        self.0.send(Command::SetMps(failed));
    }

    /// Sets the debts of released claims, as conditions of their GPUs.
    pub fn set_debts(&self, debts: BTreeMap<GpuUuid, Vec<Condition>>) {
        self.0.send(Command::SetDebts(debts));
    }

    /// Sets the resource under which a device plugin offers the GPUs, if there is one.
    pub fn set_device_plugin(&self, resource: Option<String>) {
        self.0.send(Command::SetDevicePlugin(resource));
    }

    /// Sets what the controller says about modes that are off.
    pub fn set_removals(&self, removals: Removals) {
        self.0.send(Command::SetRemovals(removals));
    }

    /// Closes NVML and keeps it closed, so that the GPU driver can be unloaded.
    pub async fn drain(&self) {
        self.0.request(Command::Drain).await;
    }

    /// Opens NVML again after [`Gpus::drain`].
    pub fn resume(&self) {
        self.0.send(Command::Resume);
    }

    /// Closes NVML and stops the task. All later calls return [`Unavailable::NoDriver`].
    pub async fn shutdown(&self) {
        self.0.request(Command::Stop).await;
        let manager = lock(&self.0.manager).take();
        if let Some(manager) = manager
            && let Err(cause) = manager.await
        {
            tracing::error!(%cause, "the GPU manager task panicked");
        }
    }
}

impl Shared {
    fn send(&self, command: Command) {
        // After shutdown there is no receiver, and nothing left to do.
        let _stopped = self.commands.send(command);
    }

    async fn request(&self, command: impl FnOnce(oneshot::Sender<()>) -> Command) {
        let (done, answer) = oneshot::channel();
        self.send(command(done));
        // If the task has stopped, there is nothing to wait for.
        let _ended = answer.await;
    }
}

/// Debounce of readings: changes come in bursts (an instance, its compute instance, and an NVML event
/// for each).
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Retry interval for GPUs that could not be read, or have instances of undecided ownership.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Default of [`GpusOptions::compare_interval`]: a GPU must not stay invisible for longer when no
/// name in `/proc`, `/sys` or `/dev` changed.
const COMPARE_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum interval while NVML is closed: the kernel's list is then the only check of minors, and a
/// reload of the GPU driver may change them without a change of names.
const CLOSED_COMPARE_INTERVAL: Duration = Duration::from_secs(2);
/// Default of [`GpusOptions::forget_after`]: longer than a reboot or the exchange of a GPU takes.
const FORGET_AFTER: Duration = Duration::from_secs(3600);
/// Time that the start and each opening of NVML wait for the kernel's list, which may hang with a
/// GPU. Without an answer the last list stays; the first one contradicts nothing.
const KERNEL_READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Time that a drain waits for the last readings of the GPUs' health: it must not wait for a sick GPU.
const LAST_READING_TIMEOUT: Duration = Duration::from_secs(1);
/// Minimum time between two openings of NVML because of a difference; doubled after each opening
/// that changed nothing.
const REOPEN_DELAY: Duration = Duration::from_secs(1);
/// Maximum of that time while NVML lists no GPU.
const REOPEN_MAX_DELAY: Duration = Duration::from_secs(30);
/// Maximum of that time while NVML lists other GPUs: each opening interrupts calls on them for about
/// a second. A change of a device node or bus id ends the delay.
const REOPEN_MAX_DELAY_IN_USE: Duration = Duration::from_secs(300);

enum Command {
    Forget(String, oneshot::Sender<Result<(), ForgetError>>),
    SetConfigured(Option<BTreeSet<GpuNumber>>),
    Refresh(GpuUuid, oneshot::Sender<()>),
    RefreshSoon(GpuUuid),
    SetOwnership(Arc<Ownership>),
    SetUsage(Arc<GpuUsageFn>),
    SetPolicy(Arc<GpuPolicyFn>, oneshot::Sender<()>),
    SetMps(BTreeMap<GpuUuid, String>),
    SetDebts(BTreeMap<GpuUuid, Vec<Condition>>),
    HandOver(String, oneshot::Sender<Result<(), HandOverError>>),
    TakeBack(String, oneshot::Sender<Result<(), HandOverError>>),
    SetDevicePlugin(Option<String>),
    SetRemovals(Removals),
    Drain(oneshot::Sender<()>),
    Resume,
    Stop(oneshot::Sender<()>),
}

type Reading = Result<(Arc<Description>, State), NvmlError>;

/// Why the MIG facts of a GPU that was read are missing.
fn mig_error(reading: &Reading) -> Option<&NvmlError> {
    match reading {
        Ok((_, State { mig: RawMig::Unreadable { cause, .. }, .. })) => Some(cause),
        _ => None,
    }
}

/// The session, its first reading, and the kernel's list after it if that was read in time.
type Opened = Result<(Session, Snapshot, Option<KernelView>), String>;

/// State of the NVML session: closed (the library is looked for at each poll), being opened on a
/// thread of its own, open, or drained (closed until resumed).
enum Nvml {
    Closed,
    Opening { file: LibraryFile, opened: oneshot::Receiver<Opened> },
    Open { file: LibraryFile, session: Session, events: mpsc::UnboundedReceiver<Event>, snapshot: Snapshot },
    Drained,
}

struct GpuManager {
    options: GpusOptions,
    shared: Arc<Shared>,
    sysfs: Sysfs,
    pci: BTreeMap<String, PciFacts>,
    numbers_file: GpuNumbersFile,
    /// Whether the contents of that file changed since they were stored.
    changed: bool,
    kernel: Kernel,
    kernel_view: KernelView,
    kernel_reads: JoinSet<KernelView>,
    next_kernel_read: Instant,
    listing: Listing,
    reopening: Reopening,
    /// GPUs to leave out of the next inventory.
    forgotten: BTreeSet<GpuUuid>,
    configured: Option<BTreeSet<GpuNumber>>,
    ownership: Arc<Ownership>,
    usage: Option<Arc<GpuUsageFn>>,
    policy: Arc<GpuPolicyFn>,
    /// GPUs with a failed MPS control daemon, and the cause.
    mps: BTreeMap<GpuUuid, String>,
    /// Debts of released claims on GPUs.
    debts: BTreeMap<GpuUuid, Vec<Condition>>,
    /// Callers that wait until NVML is open without a GPU.
    handing_over: Vec<(GpuUuid, oneshot::Sender<Result<(), HandOverError>>)>,
    device_plugin: Option<String>,
    removals: Removals,
    pending: PendingOwnership,
    nvml: Nvml,
    health: HealthMonitor,
    /// The last error of the GPU driver, so that each is logged once.
    driver_error: String,
    first: Option<oneshot::Sender<()>>,
    reads: JoinSet<(GpuUuid, Reading)>,
    reading: BTreeMap<GpuUuid, Waiters>,
    scheduled: BTreeSet<GpuUuid>,
    debounce_until: Instant,
}

/// Delays between openings of NVML that do not end a difference.
struct Reopening {
    difference: Option<Difference>,
    delay: Duration,
    /// When NVML was opened for the last time.
    last: Instant,
}

enum Step {
    Kernel(KernelView),
    Command(Option<Command>),
    Nvml(NvmlMessage),
    Read(GpuUuid, Reading),
    HealthRead(health::Reading),
    HealthPoll,
    DebounceOver,
    PollLibrary,
    Retry,
}

impl GpuManager {
    fn new(options: GpusOptions, shared: Arc<Shared>, first: oneshot::Sender<()>) -> Self {
        let kernel = Kernel::new(&options.proc_root, &options.sys_root, options.dev_dir.clone());
        let mut numbers_file = GpuNumbersFile::load(&options.state_dir);
        // Without a boot id no earlier reading is valid, as after a reboot.
        let boot_id = Epoch::now(&options.proc_root, &options.sys_root).boot;
        let same_boot = numbers_file.boot.as_ref().is_some_and(|boot| Some(&boot.id) == boot_id.as_ref());
        if !same_boot {
            numbers_file.boot = Some(Boot {
                id: boot_id.unwrap_or_default(),
                read: BTreeSet::new(),
                handed_over: BTreeSet::new(),
            });
        }
        Self {
            sysfs: Sysfs::new(&options.sys_root),
            pci: BTreeMap::new(),
            numbers_file,
            changed: false,
            kernel,
            kernel_view: KernelView::default(),
            kernel_reads: JoinSet::new(),
            next_kernel_read: Instant::now(),
            listing: Listing::default(),
            reopening: Reopening { difference: None, delay: REOPEN_DELAY, last: Instant::now() },
            forgotten: BTreeSet::new(),
            configured: Some(BTreeSet::new()),
            ownership: Arc::new(|_, _, _| false),
            usage: None,
            policy: Arc::new(|gpu| gpu.policy.clone()),
            mps: BTreeMap::new(),
            debts: BTreeMap::new(),
            handing_over: Vec::new(),
            device_plugin: None,
            removals: Removals::default(),
            pending: PendingOwnership::default(),
            nvml: Nvml::Closed,
            health: HealthMonitor::new(&options),
            driver_error: String::new(),
            first: Some(first),
            reads: JoinSet::new(),
            reading: BTreeMap::new(),
            scheduled: BTreeSet::new(),
            debounce_until: Instant::now(),
            options,
            shared,
        }
    }

    async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>) {
        let mut poll = tokio::time::interval(self.options.poll);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut retry = tokio::time::interval(RETRY_INTERVAL);
        retry.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut health_poll = tokio::time::interval(self.options.health_poll);
        health_poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.start_kernel_read();
        // The first inventory must not show a GPU that is gone.
        match tokio::time::timeout(KERNEL_READ_TIMEOUT, self.kernel_reads.join_next()).await {
            Ok(view) => self.kernel_view = view.and_then(Result::ok).unwrap_or_default(),
            Err(_) => tracing::warn!("reading the GPUs of the kernel driver takes long; not waiting for it"),
        }
        loop {
            let debounce_until = self.debounce_until;
            let step = tokio::select! {
                biased;
                command = commands.recv() => Step::Command(command),
                Some(read) = self.reads.join_next() => match read {
                    Ok((gpu, reading)) => Step::Read(gpu, reading),
                    // A panicked reading counts as none.
                    Err(_) => Step::PollLibrary,
                },
                message = next_message(&mut self.nvml) => Step::Nvml(message),
                reading = self.health.next() => Step::HealthRead(reading),
                _ = health_poll.tick() => Step::HealthPoll,
                Some(view) = self.kernel_reads.join_next() => match view {
                    Ok(view) => Step::Kernel(view),
                    // A panicked reading counts as none.
                    Err(_) => continue,
                },
                () = tokio::time::sleep_until(debounce_until), if !self.scheduled.is_empty() => {
                    Step::DebounceOver
                }
                _ = poll.tick() => Step::PollLibrary,
                _ = retry.tick() => Step::Retry,
            };
            match step {
                Step::Command(Some(Command::Stop(done))) => {
                    self.close().await;
                    // The caller may have stopped waiting.
                    let _no_receiver = done.send(());
                    return;
                }
                Step::Command(None) => return,
                Step::Command(Some(command)) => self.command(command).await,
                Step::Nvml(NvmlMessage::Opened(opened)) => self.opened(opened),
                Step::Nvml(NvmlMessage::Event(event)) => self.event(event),
                Step::Read(gpu, reading) => self.read(gpu, reading),
                Step::HealthRead(reading) => {
                    if reading.result.is_ok() && self.is_unreadable(&reading.gpu) {
                        self.schedule_reading(reading.gpu.clone());
                    }
                    self.health_read(reading);
                }
                Step::HealthPoll => self.health(|health, session| {
                    health.start_all(session);
                    health.observe_epoch()
                }),
                Step::DebounceOver => {
                    for gpu in std::mem::take(&mut self.scheduled) {
                        self.start_reading(gpu, None);
                    }
                }
                Step::Kernel(view) => self.kernel_read(view).await,
                Step::PollLibrary => {
                    self.check_library().await;
                    self.check_kernel().await;
                }
                Step::Retry => self.retry(),
            }
        }
    }

    async fn command(&mut self, command: Command) {
        match command {
            Command::RefreshSoon(gpu) => self.schedule_reading(gpu),
            Command::Refresh(gpu, done) => self.start_reading(gpu, Some(done)),
            Command::SetOwnership(ownership) => {
                self.ownership = ownership;
                self.publish(ReadScope::Nothing);
            }
            Command::Forget(gpu, done) => {
                let _no_receiver = done.send(self.forget_now(&gpu));
            }
            Command::SetConfigured(numbers) => self.configured = numbers,
            Command::SetUsage(usage) => {
                self.usage = Some(usage);
                self.publish(ReadScope::Nothing);
            }
            Command::SetPolicy(policy, done) => {
                self.policy = policy;
                self.publish(ReadScope::Nothing);
                let _no_receiver = done.send(());
            }
            Command::SetDevicePlugin(resource) => {
                self.device_plugin = resource;
                self.publish(ReadScope::Nothing);
            }
            Command::SetRemovals(removals) => {
                self.removals = removals;
                self.publish(ReadScope::Nothing);
            }
            Command::HandOver(gpu, done) => self.hand_over(&gpu, done).await,
            Command::TakeBack(gpu, done) => {
                let _no_receiver = done.send(self.take_back(&gpu).await);
            }
            Command::SetDebts(debts) => {
                self.debts = debts;
                self.publish(ReadScope::Nothing);
            }
            Command::SetMps(mps) => {
                self.mps = mps;
                self.publish(ReadScope::Nothing);
            }
            Command::Drain(done) => {
                self.read_health_once().await;
                self.close().await;
                self.nvml = Nvml::Drained;
                self.next_kernel_read = Instant::now();
                self.publish(ReadScope::Nothing);
                tracing::info!("NVML is closed until it is resumed");
                let _no_receiver = done.send(());
            }
            Command::Resume => {
                if matches!(self.nvml, Nvml::Drained) {
                    self.nvml = Nvml::Closed;
                    self.check_library().await;
                }
            }
            Command::Stop(done) => drop(done),
        }
    }

    /// Looks for the library: opens NVML when it appears, and again when it was replaced.
    async fn check_library(&mut self) {
        let found = library::find(&self.options.driver_root);
        match (&self.nvml, found) {
            (Nvml::Drained | Nvml::Opening { .. }, _) => {}
            (Nvml::Open { file, .. }, found) if found.as_ref() == Some(file) => {}
            (Nvml::Closed, None) => {
                self.report_driver_error(format!(
                    "no libnvidia-ml.so.1 below {}",
                    self.options.driver_root.display()
                ));
            }
            (Nvml::Closed, Some(file)) => self.open(file),
            (Nvml::Open { .. }, found) => {
                tracing::info!(removed = found.is_none(), "the GPU driver's library was removed or replaced");
                self.close().await;
                match found {
                    Some(file) => self.open(file),
                    None => self.publish(ReadScope::Nothing),
                }
            }
        }
    }

    /// Logs a new error of the GPU driver, and shows all known GPUs without it.
    fn report_driver_error(&mut self, error: String) {
        if self.driver_error != error {
            tracing::warn!(cause = error, "waiting for the GPU driver");
            self.driver_error = error;
        }
        // A closed NVML holds no GPU.
        self.answer_hand_over(|_| Ok(()));
        self.publish(ReadScope::Nothing);
    }

    /// The GPUs that operators have.
    fn handed_over(&self) -> &BTreeSet<GpuUuid> {
        static NONE: BTreeSet<GpuUuid> = BTreeSet::new();
        self.numbers_file.boot.as_ref().map_or(&NONE, |boot| &boot.handed_over)
    }

    fn answer_hand_over(&mut self, answer: impl Fn(GpuUuid) -> Result<(), HandOverError>) {
        for (gpu, done) in self.handing_over.drain(..) {
            let _no_receiver = done.send(answer(gpu));
        }
    }

    /// A handed-over GPU whose device node this process has open.
    fn still_open(&self) -> Option<GpuUuid> {
        let inventory = self.shared.inventory.borrow();
        let mut handed_over = inventory.gpus.iter().filter(|gpu| self.handed_over().contains(&gpu.uuid));
        let open: BTreeSet<PathBuf> = std::fs::read_dir("/proc/self/fd")
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|fd| std::fs::read_link(fd.path()).ok())
            .collect();
        let is_open = |gpu: &&Gpu| {
            let node = format!("nvidia{}", gpu.minor);
            open.iter().any(|path| path.file_name().is_some_and(|name| *name == *node))
        };
        handed_over.find(is_open).map(|gpu| gpu.uuid.clone())
    }

    async fn hand_over(&mut self, name: &str, done: oneshot::Sender<Result<(), HandOverError>>) {
        let Some(gpu) = self.named(name) else {
            let _no_receiver = done.send(Err(HandOverError::Unknown { gpu: name.to_owned() }));
            return;
        };
        if let Some(boot) = &mut self.numbers_file.boot {
            boot.handed_over.insert(gpu.clone());
        }
        self.changed = true;
        self.handing_over.push((gpu, done));
        self.read_health_once().await;
        self.reopen().await;
    }

    async fn take_back(&mut self, name: &str) -> Result<(), HandOverError> {
        let gpu = self.named(name).ok_or_else(|| HandOverError::Unknown { gpu: name.to_owned() })?;
        let known = self.numbers_file.boot.as_mut().is_some_and(|boot| boot.handed_over.remove(&gpu));
        if !known {
            return Err(HandOverError::NotHandedOver { gpu });
        }
        self.health.observe_take_back(&gpu);
        self.changed = true;
        self.reopen().await;
        Ok(())
    }

    /// Closes NVML and opens it without the GPUs that operators have.
    async fn reopen(&mut self) {
        self.close().await;
        match library::find(&self.options.driver_root) {
            Some(file) => self.open(file),
            None => self.report_driver_error("the library of the GPU driver is gone".to_owned()),
        }
    }

    fn open(&mut self, file: LibraryFile) {
        let (answer, opened) = oneshot::channel();
        let (path, timeouts) = (file.path.clone(), self.options.timeouts);
        let without = self.handed_over().clone();
        let (runtime, kernel) = (tokio::runtime::Handle::current(), self.kernel.clone());
        // A separate thread and not the runtime's pool: initialisation may hang, and the exit must
        // not wait for it.
        let thread = std::thread::Builder::new().name("nvml-open".to_owned()).spawn(move || {
            let session =
                Session::open_without(&path, timeouts, &without).map_err(|cause| error_chain(&cause));
            let read = session.and_then(|session| {
                let snapshot = runtime.block_on(session.snapshot()).map_err(|cause| error_chain(&cause))?;
                Ok((session, snapshot, kernel.read_within(KERNEL_READ_TIMEOUT)))
            });
            // Without a receiver the session closes when it is dropped.
            let _no_receiver = answer.send(read);
        });
        match thread {
            Ok(_) => self.nvml = Nvml::Opening { file, opened },
            Err(cause) => self.report_driver_error(format!("cannot start a thread: {cause}")),
        }
    }

    fn opened(&mut self, opened: Opened) {
        let Nvml::Opening { file, .. } = std::mem::replace(&mut self.nvml, Nvml::Closed) else { return };
        let (session, snapshot, kernel_view) = match opened {
            Ok(opened) => opened,
            Err(error) => return self.report_driver_error(error),
        };
        if let Some(gpu) = self.still_open() {
            tracing::warn!(%gpu, "NVML opens a released GPU; it stays closed until the GPU is taken back");
            drop(session);
            self.nvml = Nvml::Drained;
            self.answer_hand_over(|gpu| Err(HandOverError::AllClosed { gpu }));
            return self.publish(ReadScope::Nothing);
        }
        self.answer_hand_over(|_| Ok(()));
        self.kernel_view = kernel_view.unwrap_or_else(|| self.kernel_view.clone());
        self.reopening.last = Instant::now();
        let Some(events) = session.events() else { return };
        for (index, code) in &snapshot.unreadable {
            tracing::warn!(index, %code, "GPU has no readable UUID and is not used");
        }
        for gpu in &snapshot.gpus {
            match &gpu.reading {
                Ok((description, state)) => {
                    let place = self.sysfs.pci(&description.pci_bus_id);
                    self.pci.insert(description.pci_bus_id.clone(), place);
                    tracing::info!(
                        gpu = %gpu.uuid, product = description.product, minor = state.minor,
                        "GPU found"
                    );
                }
                Err(cause) => tracing::warn!(gpu = %gpu.uuid, %cause, "cannot read the GPU"),
            }
        }
        tracing::info!(driver = snapshot.driver_version, gpus = snapshot.gpus.len(), "NVML is open");
        self.driver_error.clear();
        self.health.observe_epoch();
        self.health.start_all(&session);
        *lock(&self.shared.session) = Some(session.clone());
        self.nvml = Nvml::Open { file, session, events, snapshot };
        self.changed = true;
        self.show_shortage();
        // Until now this process could destroy no instance, so the reading is up to date.
        self.publish(ReadScope::All);
    }

    /// Waits for running calls, shuts NVML down and unloads it.
    async fn close(&mut self) {
        *lock(&self.shared.session) = None;
        let session = match std::mem::replace(&mut self.nvml, Nvml::Closed) {
            Nvml::Open { session, .. } => Some(session),
            Nvml::Opening { opened, .. } => {
                // A session that opens after the timeout closes when it is dropped.
                let opened = tokio::time::timeout(self.options.timeouts.query, opened).await;
                opened.ok().and_then(Result::ok).and_then(Result::ok).map(|(session, ..)| session)
            }
            Nvml::Closed | Nvml::Drained => None,
        };
        self.health.stop().await;
        self.reads.abort_all();
        while self.reads.join_next().await.is_some() {}
        self.reading.clear();
        self.scheduled.clear();
        let Some(session) = session else { return };
        if let Closing::Held(calls) = session.close().await {
            for stuck in calls {
                tracing::warn!(
                    gpu = %stuck.gpu, call = stuck.call,
                    "NVML stays loaded until the stuck call returns"
                );
            }
        }
    }

    fn event(&mut self, event: Event) {
        if matches!(event, Event::Unavailable { .. } | Event::Lost { .. } | Event::SomeGpuLost) {
            self.next_kernel_read = Instant::now();
        }
        match &event {
            Event::MigConfigChange { gpu } => self.schedule_reading(gpu.clone()),
            Event::Xid { gpu, xid, gpu_instance, .. } => {
                let inventory = Arc::clone(&self.shared.inventory.borrow());
                let instance = gpu_instance.and_then(|id| inventory.instance(gpu, id));
                self.health(|health, session| health.observe_xid(session, gpu, *xid, instance));
            }
            Event::HealthChange { gpu } => self.health(|health, session| {
                health.start(session, gpu);
                false
            }),
            Event::InstanceDestroyed { gpu, gpu_instance } => {
                self.health(|health, _| health.observe_destruction(gpu, *gpu_instance));
            }
            Event::Unavailable { gpu } => {
                tracing::error!(%gpu, "GPU driver has taken the GPU out of service");
                self.schedule_reading(gpu.clone());
                self.health(|health, session| {
                    health.start(session, gpu);
                    false
                });
            }
            Event::Lost { gpu, call } => {
                tracing::error!(%gpu, call, "GPU is lost; reset it or reboot the node");
                self.set(gpu, Err(NvmlError::Lost { call, gpu: gpu.clone() }));
            }
            Event::SomeGpuLost => {
                for gpu in self.gpus() {
                    self.schedule_reading(gpu);
                }
                self.health(|health, session| {
                    health.start_all(session);
                    false
                });
            }
            Event::Stuck(stuck) => {
                let (gpu, call, since) = (stuck.gpu.clone(), stuck.call, stuck.since);
                tracing::error!(%gpu, call, "GPU is stuck: an NVML call has not returned");
                self.set(&stuck.gpu, Err(NvmlError::Stuck { call, gpu, since }));
            }
            Event::LateReturn(late) => {
                tracing::warn!(
                    gpu = %late.gpu, call = late.call, after = ?late.after,
                    "stuck NVML call returned; GPU works again"
                );
                self.start_reading(late.gpu.clone(), None);
                if let Some(waiting) = self.reading.get_mut(&late.gpu) {
                    waiting.late.push(late.clone());
                }
                return;
            }
        }
        // There may be no subscriber.
        let _no_receiver = self.shared.events.send(event);
    }

    /// Notes something about the health of GPUs, and publishes the inventory if that changed findings.
    fn health(&mut self, note: impl FnOnce(&mut HealthMonitor, &Session) -> bool) {
        let Nvml::Open { session, .. } = &self.nvml else { return };
        if note(&mut self.health, session) {
            self.publish(ReadScope::Nothing);
        }
    }

    fn health_read(&mut self, reading: health::Reading) {
        let mut was_reset = false;
        if let Ok(found) = reading.result {
            let mut all = lock(&self.shared.health);
            let last = all.entry(reading.gpu.clone()).or_default();
            if last.changed.is_none_or(|changed| changed < reading.started) {
                let before = last.reading.replace(found);
                was_reset = before.is_some_and(|before| found.is_after_reset(&before));
            }
        }
        if was_reset {
            // The event of the reset may have been lost.
            self.schedule_reading(reading.gpu.clone());
        }
        self.health(|health, session| health.finish(session, reading));
    }

    /// Reads the health of all GPUs before an orderly close: later readings are compared with it to find
    /// resets.
    async fn read_health_once(&mut self) {
        let by = Instant::now() + LAST_READING_TIMEOUT;
        self.health(|health, session| {
            health.start_all(session);
            false
        });
        while self.health.is_reading()
            && let Ok(reading) = tokio::time::timeout_at(by, self.health.next()).await
        {
            self.health_read(reading);
        }
    }

    /// Whether the last reading of the GPU's state failed.
    fn is_unreadable(&self, gpu: &GpuUuid) -> bool {
        let Nvml::Open { snapshot, .. } = &self.nvml else { return false };
        snapshot.gpus.iter().any(|known| known.uuid == *gpu && known.reading.is_err())
    }

    fn gpus(&self) -> Vec<GpuUuid> {
        match &self.nvml {
            Nvml::Open { snapshot, .. } => snapshot.gpus.iter().map(|gpu| gpu.uuid.clone()).collect(),
            _ => Vec::new(),
        }
    }

    fn schedule_reading(&mut self, gpu: GpuUuid) {
        if self.scheduled.is_empty() {
            self.debounce_until = Instant::now() + DEBOUNCE;
        }
        self.scheduled.insert(gpu);
    }

    fn publish(&mut self, scope: ReadScope<'_>) {
        // The inventory is computed when it is open.
        if let Nvml::Opening { .. } = self.nvml {
            return;
        }
        let mut last: Inventory = match self.first {
            Some(_) => self.numbers_file.last.clone(),
            None => Inventory::clone(&self.shared.inventory.borrow()),
        };
        let forgotten = std::mem::take(&mut self.forgotten);
        last.gpus.retain(|gpu| !forgotten.contains(&gpu.uuid));
        self.update_read_in_boot(&last);
        let current = self.current(&last);
        let mut inventory = match &self.nvml {
            Nvml::Open { snapshot, .. } => {
                let classifier = self.pending.classify(&*self.ownership, scope);
                let names_instance =
                    |gpu: &GpuUuid| self.usage.as_ref().is_some_and(|usage| usage(gpu).instances);
                inventory::inventory(
                    snapshot,
                    &self.pci,
                    &mut self.numbers_file.numbers,
                    classifier,
                    &names_instance,
                    &current,
                    &last,
                )
            }
            Nvml::Opening { .. } | Nvml::Closed | Nvml::Drained => inventory::without_driver(&last, &current),
        };
        self.track_missing(&inventory);
        for gpu in self.pending.gpus().cloned().collect::<BTreeSet<_>>() {
            self.schedule_reading(gpu);
        }
        for gpu in &mut inventory.gpus {
            let before = last.gpus.iter().find(|before| before.uuid == gpu.uuid);
            gpu.policy = before.map(|before| before.policy.clone()).unwrap_or_default();
            let policy = (self.policy)(gpu);
            self.changed |= policy != gpu.policy;
            gpu.policy = policy;
        }
        if std::mem::take(&mut self.changed)
            && let Err(cause) = self.numbers_file.store(&inventory)
        {
            self.changed = true;
            tracing::error!(
                cause = error_chain(&cause),
                "cannot store GPU numbers; retrying at the next change"
            );
        }
        let handed_over = self.handed_over().clone();
        for gpu in &mut inventory.gpus {
            gpu.conditions.retain(|condition| {
                !matches!(condition, Condition::Mps { .. } | Condition::Debt { .. } | Condition::HandedOver)
            });
            if handed_over.contains(&gpu.uuid) {
                gpu.conditions.push(Condition::HandedOver);
            }
            gpu.conditions.extend(self.debts.get(&gpu.uuid).into_iter().flatten().cloned());
            if let (Presence::Present, Some(cause)) = (gpu.presence, self.mps.get(&gpu.uuid)) {
                gpu.conditions.push(Condition::Mps { cause: cause.clone() });
            }
        }
        self.health.add_conditions(&mut inventory);
        inventory.device_plugin.clone_from(&self.device_plugin);
        inventory.removals.clone_from(&self.removals);
        self.shared.inventory.send_if_modified(|published| {
            let changed = **published != inventory;
            if changed {
                *published = Arc::new(inventory);
            }
            changed
        });
        if let Some(first) = self.first.take() {
            let _no_receiver = first.send(());
        }
    }
}

/// A message from the NVML session.
enum NvmlMessage {
    Opened(Opened),
    Event(Event),
}

async fn next_message(nvml: &mut Nvml) -> NvmlMessage {
    match nvml {
        Nvml::Opening { opened, .. } => NvmlMessage::Opened(
            opened.await.unwrap_or_else(|_| Err("the thread that opens NVML panicked".to_owned())),
        ),
        Nvml::Open { events, .. } => match events.recv().await {
            Some(event) => NvmlMessage::Event(event),
            // The session holds the sender, so this is not reached while it is open.
            None => std::future::pending().await,
        },
        Nvml::Closed | Nvml::Drained => std::future::pending().await,
    }
}

impl GpuManager {
    /// Notes the GPUs that NVML read in this boot, and drops those that it does not list any more.
    fn update_read_in_boot(&mut self, last: &Inventory) {
        let (Nvml::Open { snapshot, .. }, Some(boot)) = (&self.nvml, &mut self.numbers_file.boot) else {
            return;
        };
        let before = boot.read.clone();
        for gpu in &snapshot.gpus {
            if gpu.reading.is_ok() {
                boot.read.insert(gpu.uuid.clone());
            } else if last.gpus.iter().any(|last| last.uuid == gpu.uuid && self.kernel_view.contradicts(last))
            {
                // Its minor changed while NVML was closed, and the new one is unknown.
                boot.read.remove(&gpu.uuid);
            }
        }
        let is_shown =
            |read: &GpuUuid| last.gpus.iter().any(|last| last.uuid == *read && self.kernel_view.shows(last));
        boot.read.retain(|read| snapshot.gpus.iter().any(|gpu| gpu.uuid == *read) || is_shown(read));
        self.changed |= boot.read != before;
    }

    /// The GPUs whose last description is valid in this boot. The kernel must show a GPU that an
    /// open NVML does not list.
    fn current(&self, last: &Inventory) -> BTreeSet<GpuUuid> {
        let Some(boot) = &self.numbers_file.boot else { return BTreeSet::new() };
        let is_valid = |gpu: &&Gpu| {
            let is_unlisted = match &self.nvml {
                Nvml::Open { snapshot, .. } => snapshot.gpus.iter().all(|listed| listed.uuid != gpu.uuid),
                _ => false,
            };
            let is_valid = match is_unlisted {
                true => self.kernel_view.shows(gpu),
                false => !self.kernel_view.contradicts(gpu),
            };
            is_valid && boot.read.contains(&gpu.uuid)
        };
        last.gpus.iter().filter(is_valid).map(|gpu| gpu.uuid.clone()).collect()
    }

    fn start_kernel_read(&mut self) {
        self.listing = self.kernel.listing();
        let interval = match &self.nvml {
            Nvml::Open { .. } => self.options.compare_interval,
            _ => self.options.compare_interval.min(CLOSED_COMPARE_INTERVAL),
        };
        self.next_kernel_read = Instant::now() + interval;
        let kernel = self.kernel.clone();
        self.kernel_reads.spawn_blocking(move || kernel.read());
    }

    /// Reads the kernel's list if a name changed or the interval is over, and compares NVML with it.
    async fn check_kernel(&mut self) {
        let now = Instant::now();
        if self.kernel.listing() != self.listing {
            self.next_kernel_read = now;
            self.reopening.delay = REOPEN_DELAY;
        }
        if now >= self.next_kernel_read && self.kernel_reads.is_empty() {
            self.start_kernel_read();
        }
        self.compare().await;
    }

    async fn kernel_read(&mut self, view: KernelView) {
        let changed = std::mem::replace(&mut self.kernel_view, view) != self.kernel_view;
        // The first inventory waits for NVML.
        if changed && self.first.is_none() {
            self.publish(ReadScope::Nothing);
        }
        self.compare().await;
        self.forget_missing();
    }

    fn difference(&self) -> Option<Difference> {
        let Nvml::Open { snapshot, .. } = &self.nvml else { return None };
        let listed = snapshot.gpus.iter().map(|gpu| NvmlGpu {
            bus_id: gpu.reading.as_ref().ok().map(|(description, _)| description.pci_bus_id.clone()),
            uuid: Some(gpu.uuid.clone()),
        });
        let unreadable = snapshot.unreadable.iter().map(|_| NvmlGpu { bus_id: None, uuid: None });
        // NVML was opened without these on purpose, and they may vanish while they are reset.
        let inventory = self.shared.inventory.borrow();
        let handed_over = inventory.gpus.iter().filter(|gpu| self.handed_over().contains(&gpu.uuid));
        let view = self.kernel_view.without(&handed_over.map(|gpu| gpu.pci_bus_id.clone()).collect());
        view.differs(&listed.chain(unreadable).collect::<Vec<_>>())
    }

    /// Shows whether NVML lists fewer GPUs than the kernel. While NVML is closed or being opened, the
    /// last answer stays.
    fn show_shortage(&self) {
        let Nvml::Open { .. } = self.nvml else { return };
        let counts = self.difference().map(|difference| difference.counts);
        let shortage = counts.filter(|counts| counts.kernel > counts.nvml);
        self.shared.shortage.send_if_modified(|shown| std::mem::replace(shown, shortage) != shortage);
    }

    /// Opens NVML again if its list differs from the kernel's. A stuck call keeps the library loaded,
    /// and a library that stays loaded shows no other GPUs.
    async fn compare(&mut self) {
        self.show_shortage();
        let Nvml::Open { session, .. } = &self.nvml else { return };
        let Some(difference) = self.difference() else {
            self.reopening.difference = None;
            return;
        };
        let is_stuck = session.gpus().any(|gpu| session.gpu(gpu).stuck().is_some());
        if is_stuck || !self.reopening.is_due(&difference, Instant::now()) {
            return;
        }
        let Some(file) = library::find(&self.options.driver_root) else { return };
        tracing::warn!(
            counts = %difference.counts, unlisted = ?difference.unlisted, vanished = ?difference.vanished,
            "NVML's list of GPUs differs from the kernel's; opening NVML again"
        );
        self.reopening.begin(difference);
        self.close().await;
        self.open(file);
    }

    /// Notes since when each missing GPU is missing. Without NVML that is not known.
    fn track_missing(&mut self, inventory: &Inventory) {
        let Nvml::Open { .. } = self.nvml else { return };
        let (now, since) = (unix_seconds(), &mut self.numbers_file.missing_since);
        let before = since.clone();
        let is_missing = |uuid: &GpuUuid| {
            inventory.gpus.iter().any(|gpu| gpu.uuid == *uuid && gpu.presence == Presence::Missing)
        };
        since.retain(|uuid, _| is_missing(uuid));
        for gpu in inventory.gpus.iter().filter(|gpu| gpu.presence == Presence::Missing) {
            let since = since.entry(gpu.uuid.clone()).or_insert(now);
            // The clock was set back.
            *since = (*since).min(now);
        }
        self.changed |= self.numbers_file.missing_since != before;
    }

    /// Forgets GPUs that were missing for long enough and that nothing names.
    fn forget_missing(&mut self) {
        let (Nvml::Open { .. }, Some(usage), Some(configured)) = (&self.nvml, &self.usage, &self.configured)
        else {
            return;
        };
        let now = unix_seconds();
        let inventory = Arc::clone(&self.shared.inventory.borrow());
        let is_due = |gpu: &&Gpu| {
            let since = self.numbers_file.missing_since.get(&gpu.uuid);
            gpu.presence == Presence::Missing
                && since
                    .is_some_and(|since| now.saturating_sub(*since) >= self.options.forget_after.as_secs())
                && !self.kernel_view.may_show(&gpu.uuid)
                && !configured.contains(&gpu.number)
                && matches!(usage(&gpu.uuid), GpuUsage { named: false, debts: false, .. })
        };
        let due: Vec<GpuUuid> = inventory.gpus.iter().filter(is_due).map(|gpu| gpu.uuid.clone()).collect();
        if !due.is_empty() {
            self.forget(due);
        }
    }

    /// The GPU with that UUID or number.
    fn named(&self, name: &str) -> Option<GpuUuid> {
        let number = name.strip_prefix("gpu-").unwrap_or(name).parse().map(GpuNumber);
        let is_named = |gpu: &&Gpu| gpu.uuid.as_str() == name || number == Ok(gpu.number);
        self.shared.inventory.borrow().gpus.iter().find(is_named).map(|gpu| gpu.uuid.clone())
    }

    /// Forgets a missing GPU on request of an operator.
    fn forget_now(&mut self, name: &str) -> Result<(), ForgetError> {
        let uuid = self.named(name).ok_or_else(|| ForgetError::Unknown { gpu: name.to_owned() })?;
        let is_missing = |gpu: &Gpu| gpu.uuid == uuid && gpu.presence == Presence::Missing;
        if !self.shared.inventory.borrow().gpus.iter().any(is_missing) {
            return Err(ForgetError::NotMissing { gpu: uuid });
        }
        if self.usage.as_ref().is_some_and(|usage| usage(&uuid).named) {
            return Err(ForgetError::InUse { gpu: uuid });
        }
        self.forget(vec![uuid]);
        Ok(())
    }

    fn forget(&mut self, gpus: Vec<GpuUuid>) {
        let file = &mut self.numbers_file;
        for gpu in gpus {
            let number = file.numbers.forget(&gpu).map(|number| number.0);
            tracing::warn!(%gpu, number, "missing GPU forgotten");
            file.last.gpus.retain(|last| last.uuid != gpu);
            file.missing_since.remove(&gpu);
            self.forgotten.insert(gpu);
        }
        self.changed = true;
        self.publish(ReadScope::Nothing);
    }
}

impl Reopening {
    /// Whether NVML may be opened again for this difference.
    fn is_due(&self, difference: &Difference, now: Instant) -> bool {
        let is_same = self.difference.as_ref() == Some(difference);
        now >= self.last + if is_same { self.delay } else { REOPEN_DELAY }
    }

    fn begin(&mut self, difference: Difference) {
        let max = if difference.counts.nvml == 0 { REOPEN_MAX_DELAY } else { REOPEN_MAX_DELAY_IN_USE };
        let is_same = self.difference.as_ref() == Some(&difference);
        self.delay = if is_same { (self.delay * 2).min(max) } else { REOPEN_DELAY };
        self.difference = Some(difference);
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Callers that wait for readings of one GPU.
#[derive(Default)]
struct Waiters {
    /// Waiting for the reading in progress.
    now: Vec<oneshot::Sender<()>>,
    /// Waiting for the reading after it; `None` if there will be none.
    next: Option<Vec<oneshot::Sender<()>>>,
    /// Late events to send when the reading in progress is complete.
    late: Vec<LateReturn>,
}

impl GpuManager {
    /// Reads a GPU, or schedules another reading after the one in progress, which may be too early
    /// for the caller.
    fn start_reading(&mut self, gpu: GpuUuid, done: Option<oneshot::Sender<()>>) {
        let Nvml::Open { session, snapshot, .. } = &self.nvml else { return };
        if snapshot.gpus.iter().all(|known| known.uuid != gpu) {
            return;
        }
        if let Some(waiting) = self.reading.get_mut(&gpu) {
            waiting.next.get_or_insert_default().extend(done);
            return;
        }
        let waiting = Waiters { now: done.into_iter().collect(), ..Waiters::default() };
        self.reading.insert(gpu.clone(), waiting);
        self.pending.reading_begins(&gpu, &*self.ownership);
        let reading = session.gpu(&gpu).read();
        self.reads.spawn(async move { (gpu, reading.await) });
    }

    fn read(&mut self, gpu: GpuUuid, reading: Reading) {
        let mut waiting = self.reading.remove(&gpu).unwrap_or_default();
        let succeeded = reading.is_ok();
        self.set(&gpu, reading);
        if succeeded && !waiting.now.is_empty() && self.pending.gpus().any(|undecided| *undecided == gpu) {
            // The callers want the owner of the instances, which is not decided yet.
            waiting.next.get_or_insert_default().append(&mut waiting.now);
        }
        for done in waiting.now {
            let _no_receiver = done.send(());
        }
        for late in waiting.late {
            let _no_receiver = self.shared.events.send(Event::LateReturn(late));
        }
        if let Some(next) = waiting.next {
            self.start_reading(gpu.clone(), None);
            if let Some(waiting) = self.reading.get_mut(&gpu) {
                waiting.now = next;
            }
        }
    }

    /// Stores the result of a reading and publishes the inventory.
    fn set(&mut self, gpu: &GpuUuid, reading: Reading) {
        let Nvml::Open { session, snapshot, .. } = &mut self.nvml else { return };
        let Some(known) = snapshot.gpus.iter_mut().find(|known| known.uuid == *gpu) else { return };
        // An answer without information about the GPU does not replace an earlier one.
        if matches!(reading, Err(NvmlError::Busy { .. } | NvmlError::Closed { .. })) {
            return;
        }
        let state = reading.as_ref().map(|(_, state)| match &state.mig {
            RawMig::Supported { instances, .. } => Some(instances.as_slice()),
            RawMig::Unsupported => Some(&[][..]),
            RawMig::Unreadable { .. } => None,
        });
        self.health.observe_state(session, gpu, state);
        if let (Err(_), Ok((description, _))) = (&known.reading, &reading) {
            let place = self.sysfs.pci(&description.pci_bus_id);
            self.pci.insert(description.pci_bus_id.clone(), place);
            tracing::info!(%gpu, "GPU is readable again");
        }
        let same = match (&known.reading, &reading) {
            (Ok((was, before)), Ok((is, now))) => Arc::ptr_eq(was, is) && before.minor == now.minor,
            _ => false,
        };
        self.changed |= !same;
        if let Some(cause) = mig_error(&reading)
            && mig_error(&known.reading) != Some(cause)
        {
            tracing::warn!(%gpu, %cause, "cannot read the MIG state of the GPU");
        }
        known.reading = reading;
        self.publish(ReadScope::Gpu(gpu));
    }

    fn retry(&mut self) {
        let Nvml::Open { snapshot, .. } = &self.nvml else { return };
        let is_incomplete = |reading: &Reading| reading.is_err() || mig_error(reading).is_some();
        let failed = snapshot.gpus.iter().filter(|gpu| is_incomplete(&gpu.reading)).map(|gpu| &gpu.uuid);
        for gpu in failed.chain(self.pending.gpus()).cloned().collect::<BTreeSet<_>>() {
            self.start_reading(gpu, None);
        }
    }
}
