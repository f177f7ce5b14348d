//! Applies the node configuration: reads the file, follows changes of it and of the Node's labels, and
//! sets the policy of each GPU.
//!
//! Changes need no restart and do not affect claims: a GPU keeps the settings of its time-slices until
//! the last one is released ([`GpuPolicy::beside_timeslices`]). While the file is refused, the last
//! valid configuration stays in force, and the daemon is not ready. After a start without a valid
//! file, GPUs are offered in no mode, and existing claims keep working.

use crate::cluster::events::{EventSender, Reason};
use crate::gpu::Gpus;
use crate::inotify::DirWatcher;
use crate::metrics::Metrics;
use divvy_api::GpuUuid;
use divvy_model::inventory::Gpu;
use divvy_model::nodeconfig::Labels;
use divvy_model::numbers::GpuNumber;
use divvy_model::{GpuPolicy, NodeConfig};
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

/// Debounce: a file may be written in several steps.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Retry interval while settings wait for time-slices, or the directory of the file cannot be watched.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Time that the start waits for the Node's labels.
const LABELS_TIMEOUT: Duration = Duration::from_secs(2);
/// Server-side timeout of a watch of the Node, in seconds.
const WATCH_TIMEOUT_SECONDS: u32 = 290;

/// Tells whether a claim holds a time-slice of a GPU.
pub type HoldsTimeslices = Arc<dyn Fn(&Gpu) -> bool + Send + Sync>;

/// The file, and the policy for GPUs without a rule.
#[derive(Clone, Debug)]
pub struct PolicyOptions {
    /// `None` means that every GPU offers every mode.
    pub file: Option<PathBuf>,
    pub node: String,
    pub exclusive_ownership: bool,
    pub shares: bool,
    /// Whether the library that enforces limits of shares is installed.
    pub has_library: bool,
}

/// The policies of the GPUs of this node.
pub struct Policies {
    file: Option<PathBuf>,
    node: String,
    /// The policy for GPUs without a rule.
    defaults: GpuPolicy,
    /// Whether the limits of shares can be enforced.
    has_library: bool,
    gpus: Gpus,
    /// The last valid configuration; `None` until there is one.
    config: Option<Arc<NodeConfig>>,
    /// Why the file is refused at the moment; `None` while it is valid.
    refused: watch::Sender<Option<String>>,
    labels: Option<Arc<Labels>>,
    /// GPUs whose policy offers shares although the library is missing.
    without_shares: watch::Sender<BTreeSet<GpuUuid>>,
    /// Whether a GPU keeps settings for its time-slices, so that the policy must be applied again.
    pending: Arc<AtomicBool>,
}

impl Policies {
    /// Creates the policies and reads the file.
    pub fn new(options: PolicyOptions, gpus: &Gpus) -> Self {
        let PolicyOptions { file, node, exclusive_ownership, shares, has_library } = options;
        let mut policies = Self {
            file,
            node,
            defaults: GpuPolicy { exclusive_ownership, shares, ..GpuPolicy::default() },
            has_library,
            gpus: gpus.clone(),
            config: None,
            refused: watch::Sender::default(),
            labels: None,
            without_shares: watch::Sender::default(),
            pending: Arc::default(),
        };
        policies.read();
        policies
    }

    /// Why the file is refused, and changes of that; `None` while it is valid or not configured.
    pub fn refused(&self) -> watch::Receiver<Option<String>> {
        self.refused.subscribe()
    }

    /// GPUs whose policy offers shares although they cannot be offered. It may name removed GPUs.
    pub fn without_shares(&self) -> watch::Receiver<BTreeSet<GpuUuid>> {
        self.without_shares.subscribe()
    }

    /// Reads the file; returns whether the configuration changed.
    fn read(&mut self) -> bool {
        let read = match &self.file {
            None => Ok(NodeConfig::default()),
            Some(file) => read(file),
        };
        match read {
            Ok(config) => {
                self.refused.send_if_modified(|refused| refused.take().is_some());
                let changed = self.config.as_deref() != Some(&config);
                if changed && let Some(file) = &self.file {
                    tracing::info!(
                        file = %file.display(), rules = config.rules.len(),
                        "node configuration read"
                    );
                }
                self.config = Some(Arc::new(config));
                changed
            }
            Err(why) => {
                let meanwhile = match self.config {
                    Some(_) => "the last valid configuration stays in force",
                    None => "no GPU is offered until it is valid",
                };
                let why = format!("{why}; {meanwhile}");
                self.refused.send_if_modified(|refused| {
                    let changed = refused.as_ref() != Some(&why);
                    if changed {
                        tracing::warn!("{why}");
                        *refused = Some(why);
                    }
                    changed
                });
                false
            }
        }
    }

    /// Sets the policy of each GPU; when this returns, the inventory shows it. `None` for `holders`
    /// means that any GPU may hold time-slices.
    pub async fn apply(&self, holders: Option<&HoldsTimeslices>) {
        self.pending.store(false, Ordering::Relaxed);
        let (config, labels) = (self.config.clone(), self.labels.clone());
        let (defaults, pending) = (self.defaults.clone(), Arc::clone(&self.pending));
        let (has_library, holders) = (self.has_library, holders.cloned());
        let without_shares = self.without_shares.clone();
        let policy = move |gpu: &Gpu| {
            let mut wanted = match &config {
                Some(config) => config.explain(&defaults, labels.as_deref(), gpu.into()).policy,
                // Without a configuration, the GPU is offered in no mode.
                None => GpuPolicy { modes: BTreeSet::new(), ..defaults.clone() },
            };
            let lacks_shares = wanted.shares && !has_library;
            without_shares.send_if_modified(|gpus| match lacks_shares {
                true => gpus.insert(gpu.uuid.clone()),
                false => gpus.remove(&gpu.uuid),
            });
            wanted.shares &= has_library;
            let beside = wanted.clone().beside_timeslices(&gpu.policy);
            // Records are read from disk, so they are read only if they make a difference.
            if beside == wanted || !holders.as_ref().is_none_or(|holds| holds(gpu)) {
                return wanted;
            }
            pending.store(true, Ordering::Relaxed);
            beside
        };
        let configured = self.config.as_ref().map(|config| {
            config
                .rules
                .iter()
                .flat_map(|rule| &rule.matches.indices)
                .map(|index| GpuNumber(*index))
                .collect()
        });
        self.gpus.set_configured(configured);
        self.gpus.set_policy(Arc::new(policy)).await;
    }

    /// Reads the labels, so that the first published devices match them. Waits only briefly: if the API
    /// server does not answer, nothing is published either.
    pub async fn read_labels(&mut self, client: &kube::Client) {
        if !self.config.as_ref().is_some_and(|config| config.needs_labels()) {
            return;
        }
        let nodes: Api<Node> = Api::all(client.clone());
        if let Ok(Ok(node)) = tokio::time::timeout(LABELS_TIMEOUT, nodes.get_metadata(&self.node)).await {
            self.labels = Some(Arc::new(node.metadata.labels.unwrap_or_default()));
        }
    }

    /// Follows the file and the labels for the life of the daemon.
    pub async fn follow(
        mut self,
        holders: HoldsTimeslices,
        client: kube::Client,
        events: EventSender,
        metrics: Metrics,
    ) {
        let (sender, mut labels) = watch::channel(None);
        let nodes: Api<Node> = Api::all(client);
        let node = self.node.clone();
        let labels_of_node = follow_labels(nodes, node, sender);
        tokio::pin!(labels_of_node);
        let mut watcher = None;
        loop {
            let mut watched = watcher.is_some() || self.file.is_none();
            if !watched {
                watched = self.watch(&mut watcher);
                // The file may have changed before the watch started.
                if watched && self.read() {
                    self.apply(Some(&holders)).await;
                }
            }
            let refused = self.refused.borrow().clone();
            metrics.config_refused(refused.is_some());
            if let Some(why) = refused {
                events.node(Reason::ConfigRefused, &why);
            }
            let retry = !watched || self.pending.load(Ordering::Relaxed);
            let needs_labels = self.config.as_ref().is_some_and(|config| config.needs_labels());
            let apply = tokio::select! {
                result = next(&watcher) => {
                    if result.is_err() {
                        watcher = None;
                    }
                    tokio::time::sleep(DEBOUNCE).await;
                    self.read()
                }
                () = tokio::time::sleep(RETRY_INTERVAL), if retry => {
                    self.read() || self.pending.load(Ordering::Relaxed)
                }
                // Never completes.
                () = &mut labels_of_node, if needs_labels => false,
                _ = labels.changed() => {
                    self.labels.clone_from(&labels.borrow_and_update());
                    true
                }
            };
            if apply {
                self.apply(Some(&holders)).await;
            }
        }
    }

    /// Watches the directory of the file, because a ConfigMap changes by renaming a link in it. Returns
    /// whether that succeeded.
    fn watch(&self, watcher: &mut Option<DirWatcher>) -> bool {
        let Some(file) = &self.file else { return false };
        let dir = file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let watched = DirWatcher::new().and_then(|new| new.watch(dir).map(|()| new));
        *watcher = watched.ok();
        watcher.is_some()
    }
}

async fn next(watcher: &Option<DirWatcher>) -> std::io::Result<()> {
    match watcher {
        Some(watcher) => watcher.next().await,
        None => std::future::pending().await,
    }
}

fn read(file: &Path) -> Result<NodeConfig, String> {
    let refused =
        |cause: &dyn std::fmt::Display| format!("node configuration {} is refused: {cause}", file.display());
    let text = std::fs::read_to_string(file).map_err(|cause| refused(&cause))?;
    NodeConfig::parse(&text).map_err(|cause| refused(&cause))
}

/// Sends the labels of the Node when they change. Only metadata is transferred.
async fn follow_labels(nodes: Api<Node>, node: String, sender: watch::Sender<Option<Arc<Labels>>>) {
    loop {
        let params =
            WatchParams::default().fields(&format!("metadata.name={node}")).timeout(WATCH_TIMEOUT_SECONDS);
        // A watch from version 0 starts with the current object.
        let followed = async {
            let mut events = nodes.watch_metadata(&params, "0").await?.boxed();
            while let Some(event) = events.try_next().await? {
                if let WatchEvent::Added(node) | WatchEvent::Modified(node) = event {
                    let labels = node.metadata.labels.unwrap_or_default();
                    sender.send_if_modified(|known| {
                        let changed = known.as_deref() != Some(&labels);
                        *known = Some(Arc::new(labels));
                        changed
                    });
                }
            }
            Ok::<(), kube::Error>(())
        };
        if let Err(cause) = followed.await {
            tracing::debug!(%cause, "cannot watch the labels of the node");
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }
}
