//! Watches claims and writes annotations of Nodes while this replica leads and some mode is off.

use crate::metrics::Metrics;
use crate::removal::claims::{Allocations, Claim};
use crate::removal::off_modes::OffModes;
use crate::removal::planner::{Blocked, NodeName, Planner, removals};
use anyhow::Context;
use divvy_model::Removals;
use divvy_model::closing::{ALLOCATED, Allocated, ModeSet, REMOVABLE};
use futures::{Stream, StreamExt};
use k8s_openapi::api::core::v1::{Node, ObjectReference};
use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::events::{Event as NodeEvent, EventType, Recorder};
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};

/// Time limit of one write or of one page of a list.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Delay after a failed call.
const RETRY_DELAY: Duration = Duration::from_secs(10);
/// Interval between readings of all Nodes, in case another client changed their annotations.
const RESYNC_INTERVAL: Duration = Duration::from_secs(600);
/// Least interval between lists of all claims, so that nodes that become due one by one share a list.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(30);
/// Objects in one page of a list. A claim has 2 to 10 KB, the metadata of a Node about 4 KB.
const PAGE_SIZE: u32 = 100;

/// Approves removals and names claims on removed devices.
pub struct RemovalReconciler {
    pub client: kube::Client,
    pub recorder: Recorder,
    pub metrics: Metrics,
    /// `None` until the slices were listed once.
    pub off: watch::Receiver<Option<Arc<OffModes>>>,
    pub leader: watch::Receiver<bool>,
    /// Time without an allocation before a removal.
    pub delay: Duration,
}

impl RemovalReconciler {
    /// Runs until a channel closes.
    pub async fn run(mut self) {
        loop {
            let is_needed = self.off.borrow_and_update().as_ref().is_some_and(|off| !off.is_empty());
            if *self.leader.borrow_and_update() && is_needed {
                let mut leader = self.leader.clone();
                let session = Session::new(&self);
                tokio::select! {
                    () = session.run() => {}
                    // All state belongs to one leadership.
                    _ = leader.wait_for(|leads| !*leads) => {}
                }
                self.metrics.closings([0; 3], 0);
                continue;
            }
            let changed = tokio::select! {
                changed = self.off.changed() => changed,
                changed = self.leader.changed() => changed,
            };
            if changed.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

/// The work of one leadership.
struct Session<'a> {
    of: &'a RemovalReconciler,
    off_modes: watch::Receiver<Option<Arc<OffModes>>>,
    started: Instant,
    off: Arc<OffModes>,
    allocations: Allocations,
    planner: Planner,
    /// The annotations of Nodes that have any.
    written: BTreeMap<NodeName, Removals>,
    /// Nodes to look at.
    dirty: BTreeSet<NodeName>,
    /// Nodes whose write failed.
    failed: BTreeSet<NodeName>,
    /// Claims that were reported in an event.
    reported: BTreeSet<(NodeName, Blocked)>,
    retry: Option<Instant>,
    resync: Instant,
    next_confirm: Instant,
}

impl<'a> Session<'a> {
    fn new(of: &'a RemovalReconciler) -> Self {
        let now = Instant::now();
        Self {
            of,
            off_modes: of.off.clone(),
            started: now,
            off: Arc::default(),
            allocations: Allocations::default(),
            planner: Planner::new(of.delay),
            written: BTreeMap::new(),
            dirty: BTreeSet::new(),
            failed: BTreeSet::new(),
            reported: BTreeSet::new(),
            retry: None,
            resync: now,
            next_confirm: now,
        }
    }

    /// Runs until no mode is off any more and no Node says anything.
    async fn run(mut self) {
        let config = watcher::Config::default().page_size(PAGE_SIZE);
        let claims = watcher(Api::<Claim>::all(self.of.client.clone()), config);
        let mut claims = std::pin::pin!(claims.default_backoff());
        self.list_claims(&mut claims).await;
        self.off_changed();
        loop {
            if let Err(cause) = self.reconcile().await {
                tracing::warn!("cannot approve removals of devices; it is retried: {cause:#}");
                self.retry = Some(Instant::now() + RETRY_DELAY);
            }
            if self.off.is_empty() && self.written.is_empty() {
                return;
            }
            let wake = self.next_wake();
            tokio::select! {
                event = claims.next() => match event {
                    Some(event) => self.claim_changed(event),
                    None => return,
                },
                changed = self.off_modes.changed() => match changed {
                    Ok(()) => self.off_changed(),
                    Err(_) => return std::future::pending().await,
                },
                () = sleep_until(wake) => {}
            }
        }
    }

    /// Reads the claims once. Before that, nothing can be decided.
    async fn list_claims(
        &mut self,
        claims: &mut (impl Stream<Item = watcher::Result<Event<Claim>>> + Unpin),
    ) {
        while let Some(event) = claims.next().await {
            let is_done = matches!(event, Ok(Event::InitDone));
            self.claim_changed(event);
            if is_done {
                return;
            }
        }
    }

    fn claim_changed(&mut self, event: watcher::Result<Event<Claim>>) {
        let changed = match event {
            Ok(Event::Init) => {
                self.allocations.relist();
                BTreeSet::new()
            }
            Ok(Event::InitApply(claim) | Event::Apply(claim)) => self.allocations.apply(&claim),
            Ok(Event::InitDone) => self.allocations.listed(),
            Ok(Event::Delete(claim)) => self.allocations.delete(&claim),
            Err(cause) => {
                tracing::warn!(%cause, "watch of ResourceClaims failed; it is retried");
                BTreeSet::new()
            }
        };
        self.dirty.extend(changed);
    }

    fn off_changed(&mut self) {
        let now = self.off_modes.borrow_and_update().clone().unwrap_or_default();
        let changed = now.iter().filter(|(node, modes)| self.off.get(*node) != Some(*modes));
        self.dirty.extend(changed.map(|(node, _)| node.clone()));
        for node in self.off.keys().filter(|node| !now.contains_key(*node)) {
            self.planner.forget(node);
        }
        self.off = now;
    }

    /// When the next work without an event is due.
    fn next_wake(&self) -> Instant {
        let due = self.planner.next_due().map(|due| (self.started + due).max(self.next_confirm));
        self.retry.unwrap_or_else(|| due.map_or(self.resync, |due| due.min(self.resync)))
    }

    async fn reconcile(&mut self) -> anyhow::Result<()> {
        let now = Instant::now();
        if self.retry.is_some_and(|at| now < at) {
            return Ok(());
        }
        self.retry = None;
        self.dirty.append(&mut self.failed);
        let is_resync = now >= self.resync;
        if is_resync {
            self.read_nodes().await?;
            self.resync = now + RESYNC_INTERVAL;
        }
        let since_start = now - self.started;
        for node in &self.dirty {
            if let Some(off) = self.off.get(node) {
                self.planner.observe(since_start, node, off, self.allocations.on(node));
            }
        }
        let is_due = self.planner.next_due().is_some_and(|due| due <= since_start);
        if is_due && now >= self.next_confirm {
            self.next_confirm = now + CONFIRM_INTERVAL.min(self.of.delay);
            let confirmed = self.confirmed().await?;
            self.dirty.append(&mut self.planner.approve(since_start, |node| confirmed.on(node)));
        }
        for node in std::mem::take(&mut self.dirty) {
            if !is_resync && !self.off.contains_key(&node) {
                continue;
            }
            if let Err(cause) = self.update(&node).await {
                tracing::warn!(%node, "cannot write annotations of the Node; it is retried: {cause:#}");
                self.failed.insert(node);
                self.retry = Some(Instant::now() + RETRY_DELAY);
            }
        }
        let removed = self.written.values().map(|removals| removals.allocated.len()).sum();
        self.of.metrics.closings(self.planner.counts(), removed);
        Ok(())
    }

    /// Writes the annotations of the Node, and reports claims that keep a mode published.
    async fn update(&mut self, node: &NodeName) -> anyhow::Result<()> {
        let before = self.written.get(node).cloned().unwrap_or_default();
        let allocated = self.allocations.on(node);
        let after = match self.off.get(node) {
            Some(off) => removals(self.planner.removable(node), off, allocated, &before),
            None => removals(ModeSet::default(), &ModeSet::default(), allocated, &before),
        };
        let blocked = self.planner.blocked(node, allocated);
        if after != before {
            self.write(node, &after).await?;
            for Allocated { device, claim } in
                after.allocated.iter().filter(|one| !before.allocated.contains(one))
            {
                let note = format!(
                    "claim {claim} is allocated on {device}, whose mode is off and which was not published; \
                     it is published again, and overlapping claims are refused until one of them is deleted"
                );
                self.report(node, "AllocatedAfterRemoval", EventType::Warning, note).await;
            }
            match after.is_empty() {
                true => drop(self.written.remove(node)),
                false => drop(self.written.insert(node.clone(), after)),
            }
        }
        self.reported.retain(|(of, claim)| of != node || blocked.contains(claim));
        for claim in blocked {
            let Blocked { by: Allocated { device, claim: holder }, .. } = &claim;
            let note = format!(
                "the mode of {device} is off, but its devices stay published while claim {holder} is \
                 allocated on it; delete the pods of the claim to remove them"
            );
            if self.reported.insert((node.clone(), claim)) {
                self.report(node, "ModeInUse", EventType::Normal, note).await;
            }
        }
        Ok(())
    }

    async fn write(&self, node: &NodeName, removals: &Removals) -> anyhow::Result<()> {
        let annotations: serde_json::Map<_, _> =
            removals.annotations().into_iter().map(|(key, value)| (key.to_owned(), json!(value))).collect();
        let patch = Patch::Merge(json!({"metadata": {"annotations": annotations}}));
        let nodes: Api<Node> = Api::all(self.of.client.clone());
        let params = PatchParams::default();
        match timeout(CALL_TIMEOUT, nodes.patch_metadata(node, &params, &patch)).await {
            Err(_) => anyhow::bail!("the API server did not answer within {CALL_TIMEOUT:?}"),
            // The Node is gone; its slices go with it.
            Ok(Err(kube::Error::Api(status))) if status.code == 404 => Ok(()),
            Ok(Err(cause)) => Err(cause).context("patch of the Node"),
            Ok(Ok(_)) => {
                tracing::info!(%node, removable = %removals.removable, allocated = removals.allocated.len(),
                    "annotations of the Node written");
                Ok(())
            }
        }
    }

    /// Reads the annotations of the Nodes. A Node whose modes are all on is cleaned here and not at
    /// once: its slices may be missing for a moment, because a starting kubelet deletes them.
    async fn read_nodes(&mut self) -> anyhow::Result<()> {
        let nodes: Api<Node> = Api::all(self.of.client.clone());
        let mut params = ListParams::default().limit(PAGE_SIZE);
        let mut written = BTreeMap::new();
        loop {
            let page = timeout(CALL_TIMEOUT, nodes.list_metadata(&params)).await;
            let page = page.context("list of Nodes: no answer in time")?.context("list of Nodes")?;
            for node in page.items {
                let annotations = node.metadata.annotations.unwrap_or_default();
                let text = |key: &str| annotations.get(key).map(String::as_str);
                let removals = Removals::parse(text(REMOVABLE), text(ALLOCATED));
                if let (false, Some(name)) = (removals.is_empty(), node.metadata.name) {
                    written.insert(NodeName::from(name), removals);
                }
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => break,
            }
        }
        self.dirty.extend(written.keys().chain(self.written.keys()).chain(self.off.keys()).cloned());
        self.written = written;
        Ok(())
    }

    /// The allocations as the API server has them now.
    async fn confirmed(&self) -> anyhow::Result<Allocations> {
        let claims: Api<Claim> = Api::all(self.of.client.clone());
        // Without a resource version, a list is consistent with all earlier writes.
        let mut params = ListParams::default().limit(PAGE_SIZE);
        let mut confirmed = Allocations::default();
        loop {
            let page = timeout(CALL_TIMEOUT, claims.list(&params)).await;
            let page = page.context("list of ResourceClaims: no answer in time")?;
            let page = page.context("list of ResourceClaims")?;
            for claim in &page.items {
                confirmed.apply(claim);
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params = params.continue_token(&token),
                None => return Ok(confirmed),
            }
        }
    }

    async fn report(&self, node: &NodeName, reason: &str, type_: EventType, note: String) {
        tracing::info!(%node, reason, "{note}");
        // As the kubelet does, so that `kubectl describe node` shows the event.
        let name = Some(node.to_string());
        let regarding = ObjectReference {
            kind: Some("Node".to_owned()),
            name: name.clone(),
            uid: name,
            ..Default::default()
        };
        let (reason, action) = (reason.to_owned(), "KeepDevices".to_owned());
        let event = NodeEvent { type_, reason, note: Some(note), action, secondary: None };
        if let Ok(Err(cause)) = timeout(CALL_TIMEOUT, self.of.recorder.publish(&event, &regarding)).await {
            tracing::debug!(%cause, "cannot write the event");
        }
    }
}
