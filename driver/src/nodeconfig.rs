//! The node configuration at work: reads the file, follows it and the labels of
//! the Node, and tells [`Gpus`] what may be made of each GPU.
//!
//! A change takes effect without a restart and without a claim noticing: on a GPU
//! with time-slices, what they stand on stays until they are gone (see
//! [`GpuPolicy::beside_timeslices`]). A file that cannot be used changes nothing;
//! it is said in a warning, an event and a metric. At a start there is nothing
//! that could stay: until the file can be used no GPU offers anything, claims that
//! are there are served and ended as ever.

use crate::args::Args;
use crate::changes::Changes;
use crate::engine::Engine;
use crate::events::{Events, Reason};
use crate::gpus::Gpus;
use crate::metrics::Metrics;
use divvy_model::inventory::Gpu;
use divvy_model::nodeconfig::Labels;
use divvy_model::{DeviceId, GpuPolicy, NodeConfig};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{WatchEvent, WatchParams};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::watch;

/// A file is written in several steps; what is read is what lies there then.
const SETTLE: Duration = Duration::from_millis(100);
/// What waits for time-slices to end, or for a directory that is not there, is tried this often.
const AGAIN: Duration = Duration::from_secs(10);
/// How long a start waits for the labels.
const LABELS: Duration = Duration::from_secs(2);
/// Life of one watch of the Node.
const WATCH: u32 = 290;

/// Who may hold time-slices.
pub enum Holders {
    /// Nobody can say yet.
    Anyone,
    Engine(Engine),
}

/// What the GPUs of this node are to offer.
pub struct Policies {
    file: Option<PathBuf>,
    node: String,
    /// Where no rule says anything.
    otherwise: GpuPolicy,
    /// Limits of shares can be kept.
    has_library: bool,
    gpus: Gpus,
    /// The last configuration that could be used; `None` until there is one.
    config: Option<Arc<NodeConfig>>,
    /// What is wrong with the file as it is now.
    refused: Option<String>,
    labels: Option<Arc<Labels>>,
    /// Some GPU keeps what its time-slices stand on.
    waits: Arc<AtomicBool>,
}

impl Policies {
    /// Reads the file for the first time.
    pub fn new(args: &Args, gpus: &Gpus, has_library: bool) -> Self {
        let (exclusive_ownership, shares) = (args.gpus.exclusive_ownership, args.gpus.shares);
        let mut policies = Self {
            file: args.gpus.config.clone(),
            node: args.cluster.node_name.clone(),
            otherwise: GpuPolicy { exclusive_ownership, shares, ..GpuPolicy::default() },
            has_library,
            gpus: gpus.clone(),
            config: None,
            refused: None,
            labels: None,
            waits: Arc::default(),
        };
        policies.read();
        policies
    }

    /// Reads the file; says whether it is another than before.
    fn read(&mut self) -> bool {
        let read = match &self.file {
            None => Ok(NodeConfig::default()),
            Some(file) => read(file),
        };
        match read {
            Ok(config) => {
                self.refused = None;
                let changed = self.config.as_deref() != Some(&config);
                if changed && let Some(file) = &self.file {
                    tracing::info!(file = %file.display(), rules = config.rules.len(), "node configuration read");
                }
                self.config = Some(Arc::new(config));
                changed
            }
            Err(why) => {
                let meanwhile = match self.config {
                    Some(_) => "what was read before holds",
                    None => "until it can be used no GPU is offered",
                };
                let why = format!("{why}; {meanwhile}");
                if self.refused.as_ref() != Some(&why) {
                    tracing::warn!("{why}");
                }
                self.refused = Some(why);
                false
            }
        }
    }

    /// Tells the GPUs; when this returns the inventory says so.
    pub async fn apply(&self, holders: &Holders) {
        self.waits.store(false, Ordering::Relaxed);
        let (config, labels) = (self.config.clone(), self.labels.clone());
        let (otherwise, waits) = (self.otherwise.clone(), Arc::clone(&self.waits));
        let has_library = self.has_library;
        let engine = match holders {
            Holders::Anyone => None,
            Holders::Engine(engine) => Some(engine.clone()),
        };
        let policy = move |gpu: &Gpu| {
            let mut wanted = match &config {
                Some(config) => config.explain(&otherwise, labels.as_deref(), gpu.into()).policy,
                // Nothing is known of what it may be used for.
                None => GpuPolicy { modes: BTreeSet::new(), ..otherwise.clone() },
            };
            wanted.shares &= has_library;
            let beside = wanted.clone().beside_timeslices(&gpu.policy);
            // Records are read from disk, so only where it makes a difference.
            if beside == wanted || !engine.as_ref().is_none_or(|engine| has_timeslices(engine, gpu)) {
                return wanted;
            }
            waits.store(true, Ordering::Relaxed);
            beside
        };
        self.gpus.set_policy(Arc::new(policy)).await;
    }

    /// Reads the labels, so that the first that is published is what they say. An
    /// API server that does not answer is not waited for: nothing is published to it.
    pub async fn read_labels(&mut self, client: &kube::Client) {
        if !self.config.as_ref().is_some_and(|config| config.needs_labels()) {
            return;
        }
        let nodes: Api<Node> = Api::all(client.clone());
        if let Ok(Ok(node)) = tokio::time::timeout(LABELS, nodes.get_metadata(&self.node)).await {
            self.labels = Some(Arc::new(node.metadata.labels.unwrap_or_default()));
        }
    }

    /// Follows the file and the labels for ever.
    pub async fn follow(mut self, engine: Engine, client: kube::Client, events: Events, metrics: Metrics) {
        let holders = Holders::Engine(engine);
        let (tell, mut labels) = watch::channel(None);
        let nodes: Api<Node> = Api::all(client);
        let node = self.node.clone();
        let labels_of_node = follow_labels(nodes, node, tell);
        tokio::pin!(labels_of_node);
        let mut changes = None;
        loop {
            let mut watched = changes.is_some() || self.file.is_none();
            if !watched {
                watched = self.watch(&mut changes);
                // What came before the watch is not told by it.
                if watched && self.read() {
                    self.apply(&holders).await;
                }
            }
            metrics.config_refused(self.refused.is_some());
            if let Some(why) = &self.refused {
                events.node(Reason::ConfigRefused, why);
            }
            let again = !watched || self.waits.load(Ordering::Relaxed);
            let needs_labels = self.config.as_ref().is_some_and(|config| config.needs_labels());
            let apply = tokio::select! {
                heard = next(&changes) => {
                    if heard.is_err() {
                        changes = None;
                    }
                    tokio::time::sleep(SETTLE).await;
                    self.read()
                }
                () = tokio::time::sleep(AGAIN), if again => self.read() || self.waits.load(Ordering::Relaxed),
                // Never ends.
                () = &mut labels_of_node, if needs_labels => false,
                _ = labels.changed() => {
                    self.labels.clone_from(&labels.borrow_and_update());
                    true
                }
            };
            if apply {
                self.apply(&holders).await;
            }
        }
    }

    /// Watches the directory of the file: a ConfigMap changes by a link that is
    /// renamed beside it. Says whether it can.
    fn watch(&self, changes: &mut Option<Changes>) -> bool {
        let Some(file) = &self.file else { return false };
        let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let watched = Changes::new().and_then(|new| new.watch(dir).map(|()| new));
        *changes = watched.ok();
        changes.is_some()
    }
}

async fn next(changes: &Option<Changes>) -> std::io::Result<()> {
    match changes {
        Some(changes) => changes.next().await,
        None => std::future::pending().await,
    }
}

fn read(file: &Path) -> Result<NodeConfig, String> {
    let refused =
        |cause: &dyn std::fmt::Display| format!("node configuration {} is refused: {cause}", file.display());
    let text = std::fs::read_to_string(file).map_err(|cause| refused(&cause))?;
    NodeConfig::parse(&text).map_err(|cause| refused(&cause))
}

fn has_timeslices(engine: &Engine, gpu: &Gpu) -> bool {
    let device = DeviceId::Timeslice(gpu.number).name();
    engine.held().iter().any(|claim| claim.devices.contains(&device))
}

/// The labels of the Node, whenever they are others. Only metadata is sent, and
/// nothing between changes.
async fn follow_labels(nodes: Api<Node>, node: String, tell: watch::Sender<Option<Arc<Labels>>>) {
    loop {
        let params = WatchParams::default().fields(&format!("metadata.name={node}")).timeout(WATCH);
        // From version 0 the object as it is comes first.
        let followed = async {
            let mut events = nodes.watch_metadata(&params, "0").await?.boxed();
            while let Some(event) = events.try_next().await? {
                if let WatchEvent::Added(node) | WatchEvent::Modified(node) = event {
                    let labels = node.metadata.labels.unwrap_or_default();
                    tell.send_if_modified(|known| {
                        let changed = known.as_deref() != Some(&labels);
                        *known = Some(Arc::new(labels));
                        changed
                    });
                }
            }
            Ok::<(), kube::Error>(())
        };
        if let Err(cause) = followed.await {
            tracing::debug!(%cause, "the labels of the node cannot be followed");
            tokio::time::sleep(AGAIN).await;
        }
    }
}
