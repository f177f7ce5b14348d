//! Keeps a node's ResourceSlices on the API server equal to its inventory.
//!
//! It works in sessions. A session reads the Node, the server version and the slices, probes the
//! server's features, writes the differences, and follows a watch. Any unexpected event ends the
//! session, and the next one starts over after a back-off, so start and recovery are one path.
//! Deleted slices are recreated within a second, edited ones are repaired with growing delays,
//! and a rejected pool (422) is retried after minutes. When it stops, the slices stay.

use crate::compare;
use crate::kinds;
use crate::mode_states::{ModeFile, ModeStates, StoreError};
use crate::pool::{PoolOptions, Support, pool, pool_without_counters, same_pool};
use crate::scheduler_bugs::{SchedulerOptions, unsafe_counters};
use crate::slices::{as_published, slices, without_driver};
use crate::sync::{self, Action, Desired, Owner};
use crate::validate::{Invalid, validate};
use crate::wire::{Content, Slice};
use divvy_api::sharing::Mode;
use divvy_api::text::error_chain;
use divvy_model::{Inventory, ModeSet};
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Counter, CounterSet, Device, DeviceCapacity,
    DeviceCounterConsumption, DeviceTaint, ResourcePool, ResourceSlice, ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, DeleteParams, ListParams, ObjectList, PostParams, Preconditions, WatchParams};
use kube::core::{Request, WatchEvent};
use kube::{Client, ResourceExt};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout};
use tracing::{debug, error, info, warn};

/// The owner of the slices, and the timing of the publisher.
#[derive(Clone, Debug)]
pub struct PublishOptions {
    pub driver: String,
    /// Name of the Node object and of the pool.
    pub node: String,
    pub timing: PublishTiming,
    /// The scheduler, whose bugs can forbid devices with counters.
    pub scheduler: SchedulerOptions,
    pub held: HeldDevices,
    /// File for the states of modes that are off; `None` keeps them in memory.
    pub mode_file: Option<PathBuf>,
}

/// Names of devices that claims hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    pub all: BTreeSet<String>,
    /// Those that stay published on a server without counters.
    pub unguarded: BTreeSet<String>,
}

/// Returns the devices that claims hold, or `None` while they are not known.
#[derive(Clone)]
pub struct HeldDevices(Arc<dyn Fn() -> Option<Held> + Send + Sync>);

impl HeldDevices {
    pub fn new(read: impl Fn() -> Option<Held> + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    fn read(&self) -> Option<Held> {
        (self.0)()
    }
}

impl fmt::Debug for HeldDevices {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("HeldDevices")
    }
}

/// Time limits and delays of the publisher.
#[derive(Clone, Copy, Debug)]
pub struct PublishTiming {
    /// Time limit of one API call.
    pub call: Duration,
    /// Initial and maximum pause between sessions.
    pub backoff: (Duration, Duration),
    /// Pause after a rejected write.
    pub refused: Duration,
    /// Time without another deletion before deleted slices are recreated. A kubelet deletes all
    /// slices of the node when it starts.
    pub settle: Duration,
    /// Initial and maximum delay before an edited slice is repaired.
    pub repair: (Duration, Duration),
    /// Duration of one watch. Afterwards the Node and the server version are read again.
    pub watch: Duration,
    /// Interval between reads of the held devices, while they decide what is published.
    pub held: Duration,
}

impl Default for PublishTiming {
    fn default() -> Self {
        Self {
            call: Duration::from_secs(10),
            backoff: (Duration::from_millis(100), Duration::from_secs(5)),
            refused: Duration::from_secs(300),
            settle: Duration::from_millis(100),
            repair: (Duration::from_secs(1), Duration::from_secs(30)),
            watch: Duration::from_secs(240),
            // The time after a release until the GPU is published whole again.
            held: Duration::from_secs(10),
        }
    }
}

impl PublishOptions {
    /// Options for Divvy's own slices of a node.
    pub fn new(node: impl Into<String>) -> Self {
        Self {
            driver: divvy_api::names::DRIVER.to_owned(),
            node: node.into(),
            timing: PublishTiming::default(),
            scheduler: SchedulerOptions::default(),
            held: HeldDevices::new(|| Some(Held::default())),
            mode_file: None,
        }
    }
}

/// State of the publisher, for readiness, metrics and conditions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// Generation of the pool on the server; 0 before the first write.
    pub generation: i64,
    pub slices: usize,
    pub devices: usize,
    /// Whether the slices on the server match the inventory, as far as the watch has reported.
    pub in_sync: bool,
    /// Features that the API server does not support, and the effect on the published devices.
    pub degraded: Option<String>,
    /// Error of the last attempt; `None` after a success.
    pub error: Option<String>,
    /// Number of slices created, updated and deleted so far.
    pub writes: u64,
    /// Modes that the node configuration turns off. Those with a closing are still published.
    pub modes_off: ModeSet,
}

/// Publishes until `stop` resolves. The slices stay on the server.
pub async fn run(
    client: Client,
    options: PublishOptions,
    inventory: watch::Receiver<Arc<Inventory>>,
    published: watch::Sender<Published>,
    stop: impl Future<Output = ()>,
) {
    let mut publisher = Publisher::new(client, options, inventory, published);
    tokio::pin!(stop);
    loop {
        let result = tokio::select! {
            () = &mut stop => return,
            result = publisher.session() => result,
        };
        if let Err(error) = result {
            publisher.report_error(&error);
        }
        let pause = publisher.backoff.next();
        tokio::select! {
            () = &mut stop => return,
            () = sleep(pause) => {}
        }
    }
}

/// Limit of passes in one synchronisation, for a server that changes every write.
const PASSES_MAX: usize = 100;

struct Publisher {
    api: SliceApi,
    options: PublishOptions,
    inventory: watch::Receiver<Arc<Inventory>>,
    published: watch::Sender<Published>,
    /// Inventory that the last pool was built from.
    last: Arc<Inventory>,
    cache: SliceCache,
    /// Held devices as last known. `None` before that, and where they make no difference.
    held: Option<Held>,
    modes: ModeStates,
    mode_file: ModeFile,
    /// Features of the server.
    server: Support,
    /// Features that are used: those of the server, without counters if the scheduler's bugs forbid
    /// them.
    support: Support,
    /// `gitVersion` of the server that was probed.
    version: String,
    /// Contents that the server stores differently: as sent, and as stored.
    rewritten: Vec<(Content, Content)>,
    /// Whether slices get the annotation of their kinds. False once the server has dropped it.
    annotate: bool,
    /// Highest generation that was observed or written.
    generation: i64,
    backoff: Backoff,
    schedule: Schedule,
}

impl Publisher {
    fn new(
        client: Client,
        options: PublishOptions,
        inventory: watch::Receiver<Arc<Inventory>>,
        published: watch::Sender<Published>,
    ) -> Self {
        let (mode_file, modes) = ModeFile::load(options.mode_file.clone());
        Self {
            api: SliceApi::new(client, &options),
            inventory,
            published,
            last: Arc::default(),
            cache: SliceCache::default(),
            held: None,
            modes,
            mode_file,
            server: Support::default(),
            support: Support::default(),
            version: String::new(),
            rewritten: Vec::new(),
            annotate: true,
            generation: 0,
            backoff: Backoff::new(options.timing.backoff),
            schedule: Schedule::new(&options.timing),
            options,
        }
    }

    /// Runs from a fresh read until the first unexpected event.
    async fn session(&mut self) -> Result<(), PublishError> {
        // Sequential calls share one connection.
        let uid = self.api.node_uid().await?;
        let version = self.api.version().await?;
        let support = self.api.probe().await?;
        let there = self.api.list().await?;
        self.set_server(version, support);
        let mut position = there.metadata.resource_version.unwrap_or_default();
        self.cache.replace(there.items);
        let mut owner =
            Owner { driver: self.options.driver.clone(), node: self.options.node.clone(), node_uid: uid };
        self.schedule.sync_now();
        loop {
            let opened = Instant::now();
            let events = self.api.watch(&position).await?;
            self.follow(events.boxed(), &mut owner, &mut position).await?;
            if opened.elapsed() < Duration::from_secs(1) {
                return Err(PublishError::Watch { why: "the server closed it immediately".to_owned() });
            }
            // A watch ends when a server is upgraded. The Node and the version have no watch of their
            // own, so they are read now.
            let uid = self.api.node_uid().await?;
            let version = self.api.version().await?;
            if version != self.version {
                let support = self.api.probe().await?;
                self.set_server(version, support);
                self.schedule.sync_now();
            }
            if uid != owner.node_uid {
                owner.node_uid = uid;
                self.schedule.sync_now();
            }
        }
    }

    /// Follows one watch until it ends.
    async fn follow<S>(
        &mut self,
        mut events: S,
        owner: &mut Owner,
        position: &mut String,
    ) -> Result<(), PublishError>
    where
        S: Stream<Item = kube::Result<WatchEvent<ResourceSlice>>> + Unpin,
    {
        // A broken connection may never report the end of the watch.
        let end = Instant::now() + self.options.timing.watch + self.options.timing.call;
        let mut asking = true;
        let mut held = interval(self.options.timing.held);
        held.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                changed = self.inventory.changed(), if asking => match changed {
                    Ok(()) => {
                        if self.pool_changed() {
                            self.schedule.sync_now();
                        }
                    }
                    // The sender is gone, so the inventory is final.
                    Err(_) => asking = false,
                },
                () = sleep_until(self.schedule.due_at()), if self.schedule.is_set() => {
                    if self.schedule.take_node_check() {
                        owner.node_uid = self.api.node_uid().await?;
                    }
                    match self.sync(owner).await {
                        Ok(()) => self.backoff.reset(),
                        Err(error) if error.is_configuration() => {
                            self.report_error(&error);
                            self.schedule.refused();
                        }
                        Err(error) => return Err(error),
                    }
                }
                event = events.next() => match event {
                    None => return Ok(()),
                    Some(Err(error)) => return Err(PublishError::Watch { why: error.to_string() }),
                    Some(Ok(event)) => {
                        let change = self.cache.event(event, position)?;
                        match change {
                            Change::Nothing => continue,
                            Change::Deleted => self.schedule.deleted(),
                            Change::Edited => self.schedule.edited(),
                        }
                        self.published.send_if_modified(|state| std::mem::take(&mut state.in_sync));
                    }
                },
                _ = held.tick(), if self.depends_on_held() => {
                    if self.held_changed() {
                        self.schedule.sync_now();
                    }
                }
                () = sleep_until(end) => return Ok(()),
            }
        }
    }

    /// Writes the differences between the inventory and the server.
    async fn sync(&mut self, owner: &Owner) -> Result<(), PublishError> {
        self.schedule.clear();
        // Each pass may reveal another field that the server drops.
        for _ in 0..PASSES_MAX {
            if self.pass(owner).await? {
                return Ok(());
            }
        }
        Err(PublishError::Unsettled { passes: PASSES_MAX })
    }

    /// Makes one pass. Returns false if the server dropped fields, so the contents must be rebuilt.
    async fn pass(&mut self, owner: &Owner) -> Result<bool, PublishError> {
        let there = self.cache.slices();
        let Wanted { mut contents, modes_off } = self.desired(&there)?;
        validate(&contents)?;
        let devices = contents.iter().map(|content| content.devices.len()).sum();
        compare::keep_times(&mut contents, there.iter().map(|slice| &slice.spec));
        for content in &mut contents {
            if let Some((_, kept)) = self.rewritten.iter().find(|(sent, _)| compare::same(sent, content)) {
                content.clone_from(kept);
            }
        }
        self.generation = self.cache.generation(&owner.node).max(self.generation);
        let slices = contents.len();
        let desired =
            Desired { owner, contents, modes_off, used_generation: self.generation, annotate: self.annotate };
        let actions = sync::plan(desired, &there);
        drop(there);
        let writes = actions.len() as u64;
        for action in actions {
            let (sent, kept) = match action {
                Action::Delete(slice) => {
                    self.api.delete(&slice).await?;
                    self.cache.removed(&slice);
                    continue;
                }
                Action::Update { slice: sent, .. } => {
                    let kept = self.api.update(&sent).await?;
                    (sent, kept)
                }
                Action::Create { slice: sent, .. } => {
                    let kept = self.api.create(&sent).await?;
                    (sent, kept)
                }
            };
            self.cache.wrote(&kept);
            self.check_annotation(&sent, &kept);
            let (sent, kept) = (sent.content, compare::content(&kept.spec));
            if let Some(difference) = compare::dropped(&sent, &kept) {
                // A pool is complete only with its last slice, so schedulers ignore the unfinished one.
                self.record_dropped(difference, sent, kept);
                return Ok(false);
            }
        }
        self.generation = self.cache.generation(&owner.node);
        self.report(writes, slices, devices);
        Ok(true)
    }

    /// Whether the inventory results in another pool than the last one. Claims change the inventory
    /// often, and building the pool of a large node takes megabytes of heap.
    fn pool_changed(&mut self) -> bool {
        let now = self.inventory.borrow_and_update().clone();
        !self.support.counters || !same_pool(&self.last, &now)
    }

    /// The contents that the inventory requires.
    fn desired(&mut self, there: &[ResourceSlice]) -> Result<Wanted, PublishError> {
        let inventory = self.inventory.borrow_and_update().clone();
        self.last = inventory.clone();
        let support = self.support;
        let published_modes_off =
            || there.iter().find_map(|slice| sync::modes_off(&slice.metadata)).map(str::to_owned);
        if inventory.gpus.is_empty() {
            // Nothing is known about the GPUs, so what was said about their modes stays.
            let contents = without_driver(there, support);
            return Ok(Wanted { contents, modes_off: published_modes_off() });
        }
        self.held = match self.depends_on_held() {
            true => self.options.held.read().or(self.held.take()),
            false => None,
        };
        let none = Held::default();
        let held = match &self.held {
            Some(held) => held,
            None if !self.depends_on_held() => &none,
            // Any published device may be held.
            None => {
                return Ok(Wanted { contents: as_published(there), modes_off: published_modes_off() });
            }
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let (pool_name, has_off) = (&self.options.node, has_mode_off(&inventory));
        let there = there.iter().filter(|slice| has_off && slice.spec.pool.name == *pool_name);
        let closings = self.modes.decide(&inventory, &held.all, there, now);
        self.mode_file.store(&self.modes)?;
        let options = PoolOptions { support, closings };
        let contents = slices(match support.counters {
            true => pool(&inventory, &options),
            false => pool_without_counters(&inventory, &options, &held.unguarded),
        });
        let modes_off = Some(self.modes.off().to_string()).filter(|text| !text.is_empty());
        Ok(Wanted { contents, modes_off })
    }

    /// Whether the held devices decide what is published.
    fn depends_on_held(&self) -> bool {
        !self.support.counters || has_mode_off(&self.last)
    }

    fn held_changed(&self) -> bool {
        let Some(held) = self.options.held.read() else { return false };
        let is_new = |before: &Held| !self.support.counters && held.unguarded != before.unguarded;
        self.held.as_ref().is_none_or(is_new) || self.modes.would_change(&self.last, &held.all)
    }

    /// Sets the version and the features of the server.
    fn set_server(&mut self, version: String, support: Support) {
        if self.version != version {
            self.rewritten.clear();
            self.annotate = true;
        }
        self.version = version;
        self.set_support(support);
    }

    /// Stops to annotate on a server that drops annotations; otherwise each pass would write all slices.
    fn check_annotation(&mut self, sent: &Slice, kept: &ResourceSlice) {
        let (sent, kept) = (kinds::annotation(&sent.metadata), kinds::annotation(&kept.metadata));
        if self.annotate && sent != kept {
            self.annotate = false;
            warn!(
                annotation = kinds::ANNOTATION,
                "the API server drops an annotation of slices; the controller reads more slices"
            );
        }
    }

    /// Handles a server that stored less than was sent.
    fn record_dropped(&mut self, difference: compare::Difference, sent: Content, kept: Content) {
        let support = Support {
            counters: self.server.counters && !difference.counters,
            shares: self.server.shares && !difference.shares,
            taints: self.server.taints && !difference.taints,
        };
        if support != self.server {
            self.set_support(support);
        } else {
            // Accept the stored content; otherwise it would be written again for ever.
            error!(
                version = %self.version,
                "the API server changes published slices for an unknown reason; its content is accepted"
            );
            self.rewritten.push((sent, kept));
        }
    }

    fn set_support(&mut self, server: Support) {
        let bugs = unsafe_counters(&self.options.scheduler, &self.version, server);
        let support = Support { counters: server.counters && bugs.is_none(), ..server };
        let missing = unsupported_features(server, &self.version);
        let why = [missing, bugs].into_iter().flatten().reduce(|one, other| format!("{one}; {other}"));
        if (self.server, self.support) != (server, support) {
            match &why {
                Some(why) => warn!("{why}"),
                None => info!(version = %self.version, "the API server supports all published fields"),
            }
        }
        (self.server, self.support) = (server, support);
        self.published
            .send_if_modified(|published| std::mem::replace(&mut published.degraded, why.clone()) != why);
    }

    fn report(&self, writes: u64, slices: usize, devices: usize) {
        let generation = self.generation;
        if writes > 0 {
            info!(generation, slices, devices, writes, "published");
        }
        self.published.send_modify(|published| {
            *published = Published {
                generation,
                slices,
                devices,
                in_sync: true,
                degraded: published.degraded.take(),
                error: None,
                writes: published.writes + writes,
                modes_off: self.modes.off().clone(),
            };
        });
    }

    fn report_error(&self, error: &PublishError) {
        let text = error_chain(error);
        // Each error is logged once, because an outage may last for hours.
        let repeated = self.published.borrow().error.as_ref() == Some(&text);
        match error {
            _ if repeated || matches!(error, PublishError::Overtaken { .. }) => {
                debug!("cannot publish ResourceSlices: {text}");
            }
            _ if error.is_configuration() => error!("cannot publish ResourceSlices: {text}"),
            _ => warn!("cannot publish ResourceSlices: {text}"),
        }
        self.published.send_modify(|published| {
            published.in_sync = false;
            published.error = Some(text);
        });
    }
}

/// Why a session ended or a synchronisation failed.
#[derive(Debug, thiserror::Error)]
enum PublishError {
    #[error("{call} failed")]
    Call { call: &'static str, source: Box<kube::Error> },
    #[error("{call}: no answer within {}s", .after.as_secs())]
    Timeout { call: &'static str, after: Duration },
    #[error("node {node} does not exist, but it must own the slices; check the name of the node")]
    NoNode { node: String },
    #[error("the watch ended: {why}")]
    Watch { why: String },
    #[error("slice {slice} was changed by another client; it is read again")]
    Overtaken { slice: String },
    #[error("the API server rejected slice {slice}: {message}")]
    Refused { slice: String, message: String },
    #[error("the API server still changes written slices after {passes} attempts")]
    Unsettled { passes: usize },
    #[error("the pool is invalid and was not sent")]
    Invalid(#[from] Invalid),
    #[error(transparent)]
    ModeStates(#[from] StoreError),
}

/// Whether the node configuration turns a mode of a GPU off.
fn has_mode_off(inventory: &Inventory) -> bool {
    inventory.gpus.iter().any(|gpu| Mode::ALL.iter().any(|mode| !gpu.policy.offers(*mode)))
}

/// The required state of the server.
struct Wanted {
    contents: Vec<Content>,
    /// Value of the annotation about modes that are off.
    modes_off: Option<String>,
}

impl PublishError {
    /// Whether a retry is useless until the inventory or the server changes.
    fn is_configuration(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Unsettled { .. } | Self::Invalid(_))
    }
}

/// The API calls of the publisher.
struct SliceApi {
    client: Client,
    slices: Api<ResourceSlice>,
    nodes: Api<Node>,
    options: PublishOptions,
}

impl SliceApi {
    fn new(client: Client, options: &PublishOptions) -> Self {
        Self {
            slices: Api::all(client.clone()),
            nodes: Api::all(client.clone()),
            client,
            options: options.clone(),
        }
    }

    /// Field selector of the slices of this driver on this node.
    fn fields(&self) -> String {
        format!("spec.driver={},spec.nodeName={}", self.options.driver, self.options.node)
    }

    /// Lists the slices. The list's resource version is the position for [`Self::watch`].
    async fn list(&self) -> Result<ObjectList<ResourceSlice>, PublishError> {
        let params = ListParams::default().fields(&self.fields());
        self.call("list of slices", self.slices.list(&params)).await
    }

    /// Watches the slices from a resource version.
    async fn watch(
        &self,
        position: &str,
    ) -> Result<impl Stream<Item = kube::Result<WatchEvent<ResourceSlice>>> + use<>, PublishError> {
        let seconds = u32::try_from(self.options.timing.watch.as_secs()).unwrap_or(u32::MAX);
        let params = WatchParams::default().fields(&self.fields()).timeout(seconds);
        self.call("watch of slices", self.slices.watch(&params, position)).await
    }

    /// Builds write requests, because [`Slice`] is not the type that kube reads.
    fn path(&self) -> Request {
        Request::new(self.slices.resource_url())
    }

    /// Creates a slice and returns it as the server stored it.
    async fn create(&self, slice: &Slice) -> Result<ResourceSlice, PublishError> {
        let name = slice.metadata.generate_name.clone().unwrap_or_default();
        let call = async {
            let request = self.path().create(&PostParams::default(), bytes(slice)?);
            self.client.request(request.map_err(kube::Error::BuildRequest)?).await
        };
        self.write("creation of a slice", name, call).await
    }

    /// Updates a slice, with the resource version that was read as precondition.
    async fn update(&self, slice: &Slice) -> Result<ResourceSlice, PublishError> {
        let name = slice.metadata.name.clone().unwrap_or_default();
        let call = async {
            let request = self.path().replace(&name, &PostParams::default(), bytes(slice)?);
            self.client.request(request.map_err(kube::Error::BuildRequest)?).await
        };
        self.write("update of a slice", name.clone(), call).await
    }

    /// Deletes a slice, with the version that was read as precondition. It may be absent.
    async fn delete(&self, slice: &ResourceSlice) -> Result<(), PublishError> {
        let name = slice.name_any();
        let preconditions = Preconditions {
            uid: slice.metadata.uid.clone(),
            resource_version: slice.metadata.resource_version.clone(),
        };
        let params = DeleteParams::default().preconditions(preconditions);
        let call = async {
            match self.slices.delete(&name, &params).await {
                Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
                other => other.map(drop),
            }
        };
        self.write("deletion of a slice", name.clone(), call).await
    }

    /// Makes a write and classifies its errors.
    async fn write<T>(
        &self,
        call: &'static str,
        slice: String,
        answer: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, PublishError> {
        self.call(call, answer).await.map_err(|error| match error {
            PublishError::Call { source, .. } if code(&source) == Some(409) || code(&source) == Some(404) => {
                PublishError::Overtaken { slice }
            }
            PublishError::Call { source, .. } if matches!(code(&source), Some(400 | 413 | 422)) => {
                PublishError::Refused { slice, message: source.to_string() }
            }
            other => other,
        })
    }

    /// Makes one call with a time limit.
    async fn call<T>(
        &self,
        call: &'static str,
        answer: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, PublishError> {
        let after = self.options.timing.call;
        let answered = timeout(after, answer).await.map_err(|_| PublishError::Timeout { call, after })?;
        answered.map_err(|source| PublishError::Call { call, source: Box::new(source) })
    }

    /// UID of the Node object.
    async fn node_uid(&self) -> Result<String, PublishError> {
        let node = self.call("read of the node", self.nodes.get_metadata_opt(&self.options.node)).await?;
        let uid = node.and_then(|node| node.metadata.uid);
        uid.ok_or_else(|| PublishError::NoNode { node: self.options.node.clone() })
    }

    /// `gitVersion` of the server.
    async fn version(&self) -> Result<String, PublishError> {
        Ok(self.call("read of the server version", self.client.apiserver_version()).await?.git_version)
    }

    /// Determines which published fields the server supports. A server with a feature gate off
    /// silently drops the fields, in a dry run too, so the answers of two dry runs show them.
    async fn probe(&self) -> Result<Support, PublishError> {
        let dry = PostParams { dry_run: true, field_manager: None };
        let mut answers = [None, None];
        for (slice, answer) in probe_slices(&self.options.driver, &self.options.node).iter().zip(&mut answers)
        {
            *answer = match self.call("dry run of a slice", self.slices.create(&dry, slice)).await {
                Ok(kept) => Some(kept),
                // A server that rejects the probe would also reject the pool.
                Err(PublishError::Call { source, .. }) if matches!(code(&source), Some(400 | 422)) => None,
                Err(error) => return Err(error),
            };
        }
        let [counters, devices] = answers;
        Ok(probe_result(counters.as_ref(), devices.as_ref()))
    }
}

fn bytes(slice: &Slice) -> kube::Result<Vec<u8>> {
    serde_json::to_vec(slice).map_err(kube::Error::SerdeError)
}

fn code(error: &kube::Error) -> Option<u16> {
    match error {
        kube::Error::Api(status) => Some(status.code),
        _ => None,
    }
}
/// The slices on the server: the last list, updated by own writes and by the watch.
///
/// The watch lags behind own writes, so events older than the cached version are ignored, and
/// events from before a deletion do not restore a deleted slice. Slices are cached as JSON: they
/// are needed only for writes, and the objects of an eight-GPU pool take two megabytes.

#[derive(Debug, Default)]
struct SliceCache {
    by_name: BTreeMap<String, CachedSlice>,
    /// UIDs of slices that the publisher deleted.
    removed: HashSet<String>,
}

/// A slice as JSON, with the fields that every event needs.
#[derive(Debug)]
struct CachedSlice {
    uid: Option<String>,
    version: u64,
    pool: String,
    generation: i64,
    json: Box<[u8]>,
}

impl CachedSlice {
    fn new(slice: &ResourceSlice) -> Self {
        Self {
            uid: slice.metadata.uid.clone(),
            version: resource_version_number(slice),
            pool: slice.spec.pool.name.clone(),
            generation: slice.spec.pool.generation,
            // Serializing an API object to memory cannot fail.
            json: serde_json::to_vec(slice).unwrap_or_default().into_boxed_slice(),
        }
    }
}

/// The effect of a watch event on the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Nothing,
    Edited,
    Deleted,
}

impl SliceCache {
    /// Replaces the cache with a list that was read after all own writes.
    fn replace(&mut self, slices: Vec<ResourceSlice>) {
        self.removed.clear();
        self.by_name = slices.iter().map(|slice| (slice.name_any(), CachedSlice::new(slice))).collect();
    }

    /// The slices as objects, sorted by name.
    fn slices(&self) -> Vec<ResourceSlice> {
        self.by_name.values().filter_map(|kept| serde_json::from_slice(&kept.json).ok()).collect()
    }

    /// The highest generation of a pool, or 0.
    fn generation(&self, pool: &str) -> i64 {
        let ours = self.by_name.values().filter(|kept| kept.pool == pool);
        ours.map(|kept| kept.generation).max().unwrap_or(0)
    }

    fn wrote(&mut self, slice: &ResourceSlice) {
        self.by_name.insert(slice.name_any(), CachedSlice::new(slice));
    }

    fn removed(&mut self, slice: &ResourceSlice) {
        self.by_name.remove(&slice.name_any());
        self.removed.extend(slice.metadata.uid.clone());
    }

    /// Applies an event and advances the watch position.
    fn event(
        &mut self,
        event: WatchEvent<ResourceSlice>,
        position: &mut String,
    ) -> Result<Change, PublishError> {
        let (slice, deleted) = match event {
            WatchEvent::Added(slice) | WatchEvent::Modified(slice) => (slice, false),
            WatchEvent::Deleted(slice) => (slice, true),
            WatchEvent::Bookmark(bookmark) => {
                *position = bookmark.metadata.resource_version;
                return Ok(Change::Nothing);
            }
            WatchEvent::Error(status) => return Err(PublishError::Watch { why: status.message }),
        };
        if let Some(version) = slice.resource_version() {
            *position = version;
        }
        let name = slice.name_any();
        let known = self.by_name.get(&name);
        if deleted {
            // A deletion of another slice with this name, or our own deletion.
            if known.is_none_or(|known| known.uid != slice.metadata.uid) {
                return Ok(Change::Nothing);
            }
            self.by_name.remove(&name);
            return Ok(Change::Deleted);
        }
        let gone = slice.metadata.uid.as_ref().is_some_and(|uid| self.removed.contains(uid));
        if gone || known.is_some_and(|known| known.version >= resource_version_number(&slice)) {
            return Ok(Change::Nothing);
        }
        self.by_name.insert(name, CachedSlice::new(&slice));
        Ok(Change::Edited)
    }
}

/// The resource version as a number. Versions of one server are ordered numbers.
fn resource_version_number(slice: &ResourceSlice) -> u64 {
    slice.metadata.resource_version.as_deref().and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Two slices with all published features: a counter set, and a shareable, tainted device that
/// consumes its counters.
fn probe_slices(driver: &str, node: &str) -> [ResourceSlice; 2] {
    let counters = BTreeMap::from([("memory".to_owned(), Counter { value: Quantity("1".to_owned()) })]);
    let amount = |count: u32| Quantity(count.to_string());
    let shares = DeviceCapacity {
        value: amount(2),
        request_policy: Some(CapacityRequestPolicy {
            default: Some(amount(1)),
            valid_range: Some(CapacityRequestPolicyRange {
                min: amount(1),
                max: None,
                step: Some(amount(1)),
            }),
            valid_values: None,
        }),
    };
    let device = Device {
        name: "probe".to_owned(),
        allow_multiple_allocations: Some(true),
        capacity: Some(BTreeMap::from([("shares".to_owned(), shares)])),
        consumes_counters: Some(vec![DeviceCounterConsumption {
            counter_set: "probe".to_owned(),
            counters: counters.clone(),
            ..DeviceCounterConsumption::default()
        }]),
        taints: Some(vec![DeviceTaint {
            key: format!("{driver}/probe"),
            effect: "NoSchedule".to_owned(),
            ..DeviceTaint::default()
        }]),
        ..Device::default()
    };
    let set = CounterSet { name: "probe".to_owned(), counters };
    [(Some(vec![set]), None), (None, Some(vec![device]))].map(|(shared_counters, devices)| ResourceSlice {
        metadata: ObjectMeta { generate_name: Some("probe-".to_owned()), ..ObjectMeta::default() },
        spec: ResourceSliceSpec {
            driver: driver.to_owned(),
            node_name: Some(node.to_owned()),
            pool: ResourcePool { name: node.to_owned(), generation: 0, resource_slice_count: 2 },
            shared_counters,
            devices,
            ..ResourceSliceSpec::default()
        },
    })
}

/// Reads the features from the answers; `None` is a rejected slice.
fn probe_result(counters: Option<&ResourceSlice>, devices: Option<&ResourceSlice>) -> Support {
    let device = devices.and_then(|slice| slice.spec.devices.as_ref()?.first());
    Support {
        counters: counters.is_some_and(|slice| slice.spec.shared_counters.is_some())
            && device.is_some_and(|device| device.consumes_counters.is_some()),
        shares: device.is_some_and(|device| {
            device.allow_multiple_allocations == Some(true)
                && device.capacity.iter().flatten().any(|(_, capacity)| capacity.request_policy.is_some())
        }),
        taints: device.is_some_and(|device| device.taints.is_some()),
    }
}

/// Describes the missing features and their effect, or returns `None`.
fn unsupported_features(support: Support, version: &str) -> Option<String> {
    let missing = [
        (
            support.counters,
            "shared counters (only whole GPUs and existing MIG instances are published, without shares, \
             time-slices and MPS)",
        ),
        (
            support.shares,
            "consumable capacity (each GPU or MIG instance goes to one claim at a time; \
             time-slices and MPS are not published)",
        ),
        (support.taints, "device taints (devices that need a taint are not published)"),
    ];
    let missing: Vec<&str> = missing.into_iter().filter_map(|(has, what)| (!has).then_some(what)).collect();
    (!missing.is_empty()).then(|| format!("API server {version} does not support {}", missing.join(", nor ")))
}

/// Exponential backoff with jitter, so that the nodes of a cluster do not retry at the same time.
#[derive(Debug)]
struct Backoff {
    first: Duration,
    most: Duration,
    failures: u32,
}

impl Backoff {
    fn new((first, most): (Duration, Duration)) -> Self {
        Self { first, most, failures: 0 }
    }

    fn reset(&mut self) {
        self.failures = 0;
    }

    /// The next pause: 75 to 100 % of the doubled value.
    fn next(&mut self) -> Duration {
        let pause = doubled((self.first, self.most), self.failures);
        self.failures = self.failures.saturating_add(1);
        let spread = RandomState::new().hash_one(self.failures) % 256;
        pause.mul_f64(0.75 + 0.25 * spread as f64 / 256.0)
    }
}

/// Decides when the next synchronisation is due.
#[derive(Debug)]
struct Schedule {
    settle: Duration,
    refused: Duration,
    repair: (Duration, Duration),
    at: Option<Instant>,
    /// Earliest time of a synchronisation, unless the inventory changes.
    hold: Option<Instant>,
    /// Time of the first deletion that was not handled yet.
    deleting_since: Option<Instant>,
    node_check: bool,
    edits: u32,
    last_edit: Option<Instant>,
}

/// Limit of the delay after the first deletion, as a multiple of the `settle` time.
const SETTLE_DELAYS_MAX: u32 = 4;
/// Time without edits after which the repair delay returns to its initial value.
const EDIT_RESET_AFTER: Duration = Duration::from_secs(120);

impl Schedule {
    fn new(timing: &PublishTiming) -> Self {
        Self {
            settle: timing.settle,
            refused: timing.refused,
            repair: timing.repair,
            at: None,
            hold: None,
            deleting_since: None,
            node_check: false,
            edits: 0,
            last_edit: None,
        }
    }

    fn is_set(&self) -> bool {
        self.at.is_some()
    }

    /// The due time. Valid only while [`Self::is_set`].
    fn due_at(&self) -> Instant {
        let at = self.at.unwrap_or_else(Instant::now);
        self.hold.map_or(at, |hold| hold.max(at))
    }

    /// A synchronisation is due at once.
    fn sync_now(&mut self) {
        self.hold = None;
        self.at = Some(Instant::now());
    }

    /// Another client deleted a slice: waits until the deletions pause.
    fn deleted(&mut self) {
        let now = Instant::now();
        let since = *self.deleting_since.get_or_insert(now);
        self.node_check = true;
        self.at = Some((now + self.settle).min(since + self.settle * SETTLE_DELAYS_MAX));
    }

    /// Another client edited a slice: waits longer after each edit.
    fn edited(&mut self) {
        let now = Instant::now();
        if self.last_edit.is_none_or(|last| now - last > EDIT_RESET_AFTER) {
            self.edits = 0;
        }
        self.last_edit = Some(now);
        let at = now + doubled(self.repair, self.edits);
        self.edits = self.edits.saturating_add(1);
        self.at = Some(self.at.map_or(at, |due| due.min(at)));
    }

    /// The server rejected the pool: waits before another attempt.
    fn refused(&mut self) {
        let at = Instant::now() + self.refused;
        self.hold = Some(at);
        self.at = Some(at);
    }

    /// A synchronisation starts.
    fn clear(&mut self) {
        self.at = None;
        self.deleting_since = None;
    }

    /// Whether the Node may have been recreated since it was last read. Clears the mark.
    fn take_node_check(&mut self) -> bool {
        std::mem::take(&mut self.node_check)
    }
}

fn doubled((first, most): (Duration, Duration), times: u32) -> Duration {
    first.saturating_mul(1 << times.min(20)).min(most)
}
