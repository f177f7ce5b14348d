//! The task behind [`super::Gpus`].
//!
//! NVML is `Closed` (looked for every poll), `Opening` (a thread of its own
//! loads it, then all GPUs are read), `Open`, or `Drained` (closed until
//! resumed). The task itself never blocks: readings run on the GPUs' threads
//! and come back as results, at most one at a time per GPU.

mod readings;

use super::known::Known;
use super::library::{self, LibraryFile};
use super::{GpusOptions, Policy, Shared, lock};
use crate::discover::{self, Doubts, Fresh, Ours};
use crate::sysfs::{PciFacts, Sysfs};
use divvy_api::GpuUuid;
use divvy_model::inventory::{Condition, Inventory, Presence};
use divvy_nvml::{Closing, Description, Event, NvmlError, Session, Snapshot, State};
use readings::Waiting;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

/// Changes come in bursts (an instance, its compute instance, NVML's event of each).
const SETTLE: Duration = Duration::from_millis(100);
/// How often GPUs that could not be read, or not as to a doubt, are tried again.
const RETRY: Duration = Duration::from_secs(10);

pub(super) enum Command {
    Refresh(GpuUuid, oneshot::Sender<()>),
    RefreshSoon(GpuUuid),
    SetOurs(Arc<Ours>),
    SetPolicy(Arc<Policy>, oneshot::Sender<()>),
    SetMps(BTreeMap<GpuUuid, String>),
    SetDevicePlugin(Option<String>),
    Drain(oneshot::Sender<()>),
    Resume,
    Stop(oneshot::Sender<()>),
}

type Reading = Result<(Arc<Description>, State), NvmlError>;

enum Nvml {
    Closed,
    Opening { file: LibraryFile, opened: oneshot::Receiver<Result<(Session, Snapshot), String>> },
    Open { file: LibraryFile, session: Session, events: mpsc::UnboundedReceiver<Event>, snapshot: Snapshot },
    Drained,
}

pub(super) struct Keeper {
    options: GpusOptions,
    shared: Arc<Shared>,
    sysfs: Sysfs,
    pci: BTreeMap<String, PciFacts>,
    known: Known,
    /// Descriptions or minors changed since they were kept.
    changed: bool,
    ours: Arc<Ours>,
    policy: Arc<Policy>,
    /// GPUs whose MPS control daemon is not well, and why.
    mps: BTreeMap<GpuUuid, String>,
    device_plugin: Option<String>,
    doubts: Doubts,
    nvml: Nvml,
    /// What the last look for the driver found wrong, to be logged once.
    trouble: String,
    first: Option<oneshot::Sender<()>>,
    reads: JoinSet<(GpuUuid, Reading)>,
    reading: BTreeMap<GpuUuid, Waiting>,
    soon: BTreeSet<GpuUuid>,
    settle_at: Instant,
}

enum Step {
    Command(Option<Command>),
    Nvml(FromNvml),
    Read(GpuUuid, Reading),
    Settled,
    Look,
    Retry,
}

impl Keeper {
    pub(super) fn new(options: GpusOptions, shared: Arc<Shared>, first: oneshot::Sender<()>) -> Self {
        Self {
            sysfs: Sysfs::new(&options.sys_root),
            pci: BTreeMap::new(),
            known: Known::load(&options.state_dir),
            changed: false,
            ours: Arc::new(|_, _, _| false),
            policy: Arc::new(|gpu| gpu.policy.clone()),
            mps: BTreeMap::new(),
            device_plugin: None,
            doubts: Doubts::default(),
            nvml: Nvml::Closed,
            trouble: String::new(),
            first: Some(first),
            reads: JoinSet::new(),
            reading: BTreeMap::new(),
            soon: BTreeSet::new(),
            settle_at: Instant::now(),
            options,
            shared,
        }
    }

    pub(super) async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>) {
        let mut look = tokio::time::interval(self.options.poll);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut retry = tokio::time::interval(RETRY);
        retry.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let settle_at = self.settle_at;
            let step = tokio::select! {
                biased;
                command = commands.recv() => Step::Command(command),
                Some(read) = self.reads.join_next() => match read {
                    Ok((gpu, reading)) => Step::Read(gpu, reading),
                    // A reading that panicked is one that did not happen.
                    Err(_) => Step::Look,
                },
                news = news(&mut self.nvml) => Step::Nvml(news),
                () = tokio::time::sleep_until(settle_at), if !self.soon.is_empty() => Step::Settled,
                _ = look.tick() => Step::Look,
                _ = retry.tick() => Step::Retry,
            };
            match step {
                Step::Command(Some(Command::Stop(done))) => {
                    self.close().await;
                    // Nobody may wait for it.
                    let _unheard = done.send(());
                    return;
                }
                Step::Command(None) => return,
                Step::Command(Some(command)) => self.command(command).await,
                Step::Nvml(FromNvml::Opened(opened)) => self.opened(opened),
                Step::Nvml(FromNvml::Event(event)) => self.event(event),
                Step::Read(gpu, reading) => self.read(gpu, reading),
                Step::Settled => {
                    for gpu in std::mem::take(&mut self.soon) {
                        self.start_reading(gpu, None);
                    }
                }
                Step::Look => self.look().await,
                Step::Retry => self.retry(),
            }
        }
    }

    async fn command(&mut self, command: Command) {
        match command {
            Command::RefreshSoon(gpu) => self.soon(gpu),
            Command::Refresh(gpu, done) => self.start_reading(gpu, Some(done)),
            Command::SetOurs(ours) => {
                self.ours = ours;
                self.publish(Fresh::Nothing);
            }
            Command::SetPolicy(policy, done) => {
                self.policy = policy;
                self.publish(Fresh::Nothing);
                let _unheard = done.send(());
            }
            Command::SetDevicePlugin(resource) => {
                self.device_plugin = resource;
                self.publish(Fresh::Nothing);
            }
            Command::SetMps(mps) => {
                self.mps = mps;
                self.publish(Fresh::Nothing);
            }
            Command::Drain(done) => {
                self.close().await;
                self.nvml = Nvml::Drained;
                self.publish(Fresh::Nothing);
                tracing::info!("NVML is closed until it is resumed");
                let _unheard = done.send(());
            }
            Command::Resume => {
                if matches!(self.nvml, Nvml::Drained) {
                    self.nvml = Nvml::Closed;
                    self.look().await;
                }
            }
            Command::Stop(done) => drop(done),
        }
    }

    /// Looks for the library: opens it when it is there, anew when it is another.
    async fn look(&mut self) {
        let found = library::find(&self.options.driver_root);
        match (&self.nvml, found) {
            (Nvml::Drained | Nvml::Opening { .. }, _) => {}
            (Nvml::Open { file, .. }, found) if found.as_ref() == Some(file) => {}
            (Nvml::Closed, None) => {
                self.trouble(format!("no libnvidia-ml.so.1 below {}", self.options.driver_root.display()));
            }
            (Nvml::Closed, Some(file)) => self.open(file),
            (Nvml::Open { .. }, found) => {
                tracing::info!(gone = found.is_none(), "the GPU driver's library was replaced");
                self.close().await;
                match found {
                    Some(file) => self.open(file),
                    None => self.publish(Fresh::Nothing),
                }
            }
        }
    }

    /// The GPU driver cannot be used: said once, and what was known is missing.
    fn trouble(&mut self, trouble: String) {
        if self.trouble != trouble {
            tracing::warn!(trouble, "waiting for the GPU driver");
            self.trouble = trouble;
        }
        self.publish(Fresh::Nothing);
    }

    fn open(&mut self, file: LibraryFile) {
        let (answer, opened) = oneshot::channel();
        let (path, limits) = (file.path.clone(), self.options.limits);
        let runtime = tokio::runtime::Handle::current();
        // Its own thread, not the runtime's pool: initialising may hang, and
        // then nothing must wait for it at exit.
        let thread = std::thread::Builder::new().name("nvml-open".to_owned()).spawn(move || {
            let session = Session::open(&path, limits).map_err(|cause| chain(&cause));
            let read = session.and_then(|session| {
                let snapshot = runtime.block_on(session.snapshot()).map_err(|cause| chain(&cause))?;
                Ok((session, snapshot))
            });
            // Unheard when the keeper has ended: the session closes by its drop.
            let _unheard = answer.send(read);
        });
        match thread {
            Ok(_) => self.nvml = Nvml::Opening { file, opened },
            Err(cause) => self.trouble(format!("cannot start a thread: {cause}")),
        }
    }

    fn opened(&mut self, opened: Result<(Session, Snapshot), String>) {
        let Nvml::Opening { file, .. } = std::mem::replace(&mut self.nvml, Nvml::Closed) else { return };
        let (session, snapshot) = match opened {
            Ok(opened) => opened,
            Err(trouble) => return self.trouble(trouble),
        };
        let Some(events) = session.events() else { return };
        for (index, code) in &snapshot.unreadable {
            tracing::warn!(index, %code, "a GPU gives no UUID and is not used");
        }
        for gpu in &snapshot.gpus {
            match &gpu.reading {
                Ok((description, state)) => {
                    let place = self.sysfs.pci(&description.pci_bus_id);
                    self.pci.insert(description.pci_bus_id.clone(), place);
                    tracing::info!(gpu = %gpu.uuid, product = description.product, minor = state.minor, "found a GPU");
                }
                Err(cause) => tracing::warn!(gpu = %gpu.uuid, %cause, "cannot read a GPU"),
            }
        }
        tracing::info!(driver = snapshot.driver_version, gpus = snapshot.gpus.len(), "NVML is open");
        self.trouble.clear();
        *lock(&self.shared.session) = Some(session.clone());
        self.nvml = Nvml::Open { file, session, events, snapshot };
        self.changed = true;
        // Until now no instance could be destroyed through NVML.
        self.publish(Fresh::All);
    }

    /// Lets running calls end, shuts NVML down, unloads it.
    async fn close(&mut self) {
        *lock(&self.shared.session) = None;
        let session = match std::mem::replace(&mut self.nvml, Nvml::Closed) {
            Nvml::Open { session, .. } => Some(session),
            Nvml::Opening { opened, .. } => {
                // What opens later than this closes by its drop.
                let opened = tokio::time::timeout(self.options.limits.query, opened).await;
                opened.ok().and_then(Result::ok).and_then(Result::ok).map(|(session, _)| session)
            }
            Nvml::Closed | Nvml::Drained => None,
        };
        self.reads.abort_all();
        while self.reads.join_next().await.is_some() {}
        self.reading.clear();
        self.soon.clear();
        let Some(session) = session else { return };
        if let Closing::Held(calls) = session.close().await {
            for stuck in calls {
                tracing::warn!(gpu = %stuck.gpu, call = stuck.call, "NVML stays loaded until this call returns");
            }
        }
    }

    fn event(&mut self, event: Event) {
        match &event {
            Event::MigConfigChange { gpu } => self.soon(gpu.clone()),
            Event::Xid { gpu, xid, gpu_instance, .. } => {
                tracing::warn!(%gpu, xid, ?gpu_instance, "the GPU driver reports an Xid");
            }
            Event::Unavailable { gpu } => {
                tracing::error!(%gpu, "the GPU driver has taken the GPU out of service");
                self.soon(gpu.clone());
            }
            Event::Lost { gpu, call } => {
                tracing::error!(%gpu, call, "GPU is lost");
                self.set(gpu, Err(NvmlError::Lost { call, gpu: gpu.clone() }));
            }
            Event::SomeGpuLost => {
                for gpu in self.gpus() {
                    self.soon(gpu);
                }
            }
            Event::Stuck(stuck) => {
                let (gpu, call, since) = (stuck.gpu.clone(), stuck.call, stuck.since);
                tracing::error!(%gpu, call, "GPU is stuck: the call has not returned");
                self.set(&stuck.gpu, Err(NvmlError::Stuck { call, gpu, since }));
            }
            Event::Late(late) => {
                tracing::warn!(gpu = %late.gpu, call = late.call, after = ?late.after, "GPU answers again");
                self.start_reading(late.gpu.clone(), None);
                if let Some(waiting) = self.reading.get_mut(&late.gpu) {
                    waiting.late.push(late.clone());
                }
                return;
            }
        }
        // Nobody may listen.
        let _unheard = self.shared.events.send(event);
    }

    fn gpus(&self) -> Vec<GpuUuid> {
        match &self.nvml {
            Nvml::Open { snapshot, .. } => snapshot.gpus.iter().map(|gpu| gpu.uuid.clone()).collect(),
            _ => Vec::new(),
        }
    }

    fn soon(&mut self, gpu: GpuUuid) {
        if self.soon.is_empty() {
            self.settle_at = Instant::now() + SETTLE;
        }
        self.soon.insert(gpu);
    }

    fn publish(&mut self, fresh: Fresh<'_>) {
        let last: Arc<Inventory> = match self.first {
            Some(_) => Arc::new(self.known.last.clone()),
            None => Arc::clone(&self.shared.inventory.borrow()),
        };
        let mut inventory = match &self.nvml {
            Nvml::Open { snapshot, .. } => {
                let judge = self.doubts.judge(&*self.ours, fresh);
                discover::inventory(snapshot, &self.pci, &mut self.known.numbers, judge, &last)
            }
            // Judged when it is open.
            Nvml::Opening { .. } => return,
            Nvml::Closed | Nvml::Drained => discover::without_driver(&last),
        };
        for gpu in self.doubts.gpus().cloned().collect::<BTreeSet<_>>() {
            self.soon(gpu);
        }
        for gpu in &mut inventory.gpus {
            let before = last.gpus.iter().find(|before| before.uuid == gpu.uuid);
            gpu.policy = before.map(|before| before.policy.clone()).unwrap_or_default();
            let policy = (self.policy)(gpu);
            self.changed |= policy != gpu.policy;
            gpu.policy = policy;
        }
        if std::mem::take(&mut self.changed)
            && let Err(cause) = self.known.keep(&inventory)
        {
            self.changed = true;
            tracing::error!(cause = chain(&cause), "GPU numbers are not kept");
        }
        for gpu in &mut inventory.gpus {
            gpu.conditions.retain(|condition| !matches!(condition, Condition::Mps { .. }));
            if let (Presence::Present, Some(cause)) = (gpu.presence, self.mps.get(&gpu.uuid)) {
                gpu.conditions.push(Condition::Mps { cause: cause.clone() });
            }
        }
        inventory.device_plugin.clone_from(&self.device_plugin);
        self.shared.inventory.send_if_modified(|published| {
            let changed = **published != inventory;
            if changed {
                *published = Arc::new(inventory);
            }
            changed
        });
        if let Some(first) = self.first.take() {
            let _unheard = first.send(());
        }
    }
}

/// An error with its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// What NVML tells by itself.
enum FromNvml {
    Opened(Result<(Session, Snapshot), String>),
    Event(Event),
}

async fn news(nvml: &mut Nvml) -> FromNvml {
    match nvml {
        Nvml::Opening { opened, .. } => FromNvml::Opened(
            opened.await.unwrap_or_else(|_| Err("the thread that opens NVML ended badly".to_owned())),
        ),
        Nvml::Open { events, .. } => match events.recv().await {
            Some(event) => FromNvml::Event(event),
            // The session holds the other end, so this is not reached while it is open.
            None => std::future::pending().await,
        },
        Nvml::Closed | Nvml::Drained => std::future::pending().await,
    }
}
