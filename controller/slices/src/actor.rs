//! The one that writes: keeps the node's slices on the API server as the
//! inventory says, for as long as it lives.
//!
//! It works in sessions. A session reads what is there (Node, server version,
//! slices), asks the server by dry run what it would keep, brings the slices in
//! line, then follows a watch. Anything unexpected (an outage, a conflict, a
//! watch that lost its place) ends the session with an error; after a short
//! back-off the next one reads everything anew. So there is one way to
//! recover, and it is the way to start.
//!
//! What a session reacts to:
//! - a new inventory: at once;
//! - slices deleted by somebody (a kubelet deletes them all when it starts): as
//!   soon as the deletions pause, well within a second, and after another look
//!   at the Node: if it was re-created, its UID is new;
//! - slices edited by somebody: repaired after a second, more slowly each time;
//! - a refusal (422): an error of configuration that repeating does not cure;
//!   tried again after minutes, or at once with a new inventory.
//!
//! When it stops, what is published stays: the next one finds it in order.

mod observed;
mod probe;
mod server;
mod waiting;

use crate::compare;
use crate::pool::{PoolOptions, Support, pool, same_pool};
use crate::slices::{slices, without_driver};
use crate::sync::{self, Action, Desired, Owner};
use crate::validate::validate;
use crate::wire::Content;
use divvy_model::Inventory;
use futures::StreamExt;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::Client;
use observed::{Change, Observed};
use server::{PublishError, Server, chain};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tracing::{debug, error, info, warn};
use waiting::{Backoff, Due};

/// Whose slices to publish, and how long to wait for what.
#[derive(Clone, Debug)]
pub struct PublishOptions {
    pub driver: String,
    /// Name of the Node object; the pool has the same.
    pub node: String,
    pub limits: Limits,
}

/// Every wait there is.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// One call to the API server.
    pub call: Duration,
    /// Between sessions: at first, and at most.
    pub backoff: (Duration, Duration),
    /// After a refusal.
    pub refused: Duration,
    /// Quiet after a deletion before slices are created again.
    pub settle: Duration,
    /// Before a foreign edit is repaired: at first, and at most.
    pub repair: (Duration, Duration),
    /// Life of one watch, after which Node and server version are looked at again.
    pub watch: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            call: Duration::from_secs(10),
            backoff: (Duration::from_millis(100), Duration::from_secs(5)),
            refused: Duration::from_secs(300),
            settle: Duration::from_millis(100),
            repair: (Duration::from_secs(1), Duration::from_secs(30)),
            watch: Duration::from_secs(240),
        }
    }
}

impl PublishOptions {
    /// Divvy's own slices of a node.
    pub fn new(node: impl Into<String>) -> Self {
        Self { driver: divvy_api::names::DRIVER.to_owned(), node: node.into(), limits: Limits::default() }
    }
}

/// How publishing stands, for readiness, metrics and conditions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Published {
    /// Of the pool on the server; 0 before the first.
    pub generation: i64,
    pub slices: usize,
    pub devices: usize,
    /// The server has what the inventory says, as far as anybody told us.
    pub in_sync: bool,
    /// What the server cannot do, and what is published therefore.
    pub degraded: Option<String>,
    /// Why the last attempt failed; nothing once one succeeded.
    pub error: Option<String>,
    /// Slices created, updated and deleted so far.
    pub writes: u64,
}

/// Publishes until `stop` comes; what is published then stays.
pub async fn run(
    client: Client,
    options: PublishOptions,
    inventory: watch::Receiver<Arc<Inventory>>,
    published: watch::Sender<Published>,
    stop: impl Future<Output = ()>,
) {
    let mut actor = Actor::new(client, options, inventory, published);
    tokio::pin!(stop);
    loop {
        let ended = tokio::select! {
            () = &mut stop => return,
            ended = actor.session() => ended,
        };
        if let Err(error) = ended {
            actor.failed(&error);
        }
        let pause = actor.backoff.next();
        tokio::select! {
            () = &mut stop => return,
            () = sleep(pause) => {}
        }
    }
}

/// A server that answers each write with something else is given up after so many.
const MOST_PASSES: usize = 100;

struct Actor {
    server: Server,
    options: PublishOptions,
    inventory: watch::Receiver<Arc<Inventory>>,
    published: watch::Sender<Published>,
    /// What the last pool was made of.
    last: Arc<Inventory>,
    observed: Observed,
    support: Support,
    /// `gitVersion` of the server that was asked what it keeps.
    version: String,
    /// What the server makes of contents that it does not keep as sent.
    rewritten: Vec<(Content, Content)>,
    /// Highest generation that we saw or wrote.
    generation: i64,
    backoff: Backoff,
    due: Due,
}

impl Actor {
    fn new(
        client: Client,
        options: PublishOptions,
        inventory: watch::Receiver<Arc<Inventory>>,
        published: watch::Sender<Published>,
    ) -> Self {
        Self {
            server: Server::new(client, &options),
            inventory,
            published,
            last: Arc::default(),
            observed: Observed::default(),
            support: Support::default(),
            version: String::new(),
            rewritten: Vec::new(),
            generation: 0,
            backoff: Backoff::new(options.limits.backoff),
            due: Due::new(&options.limits),
            options,
        }
    }

    /// From a fresh look to the first thing that does not go as expected.
    async fn session(&mut self) -> Result<(), PublishError> {
        // One after the other: each at once would need a connection of its own.
        let uid = self.server.node_uid().await?;
        let version = self.server.version().await?;
        let support = self.server.probe().await?;
        let there = self.server.list().await?;
        self.adopt(version, support);
        let mut position = there.metadata.resource_version.unwrap_or_default();
        self.observed.replace(there.items);
        let mut owner =
            Owner { driver: self.options.driver.clone(), node: self.options.node.clone(), node_uid: uid };
        self.due.now();
        loop {
            let opened = Instant::now();
            let events = self.server.watch(&position).await?;
            self.follow(events.boxed(), &mut owner, &mut position).await?;
            if opened.elapsed() < Duration::from_secs(1) {
                return Err(PublishError::Watch { why: "the server closed it at once".to_owned() });
            }
            // The end of a watch is when a server is replaced, and when to look at what has no watch.
            let uid = self.server.node_uid().await?;
            let version = self.server.version().await?;
            if version != self.version {
                let support = self.server.probe().await?;
                self.adopt(version, support);
                self.due.now();
            }
            if uid != owner.node_uid {
                owner.node_uid = uid;
                self.due.now();
            }
        }
    }

    /// Follows one watch to its end.
    async fn follow<S>(
        &mut self,
        mut events: S,
        owner: &mut Owner,
        position: &mut String,
    ) -> Result<(), PublishError>
    where
        S: futures::Stream<Item = kube::Result<kube::core::WatchEvent<ResourceSlice>>> + Unpin,
    {
        // A connection that died silently ends no watch.
        let end = Instant::now() + self.options.limits.watch + self.options.limits.call;
        let mut asking = true;
        loop {
            tokio::select! {
                biased;
                changed = self.inventory.changed(), if asking => match changed {
                    Ok(()) => {
                        if self.is_news() {
                            self.due.now();
                        }
                    }
                    // Nobody will change it any more; what it says stays true.
                    Err(_) => asking = false,
                },
                () = sleep_until(self.due.at()), if self.due.is_set() => {
                    if self.due.take_node_check() {
                        owner.node_uid = self.server.node_uid().await?;
                    }
                    match self.sync(owner).await {
                        Ok(()) => self.backoff.reset(),
                        Err(error) if error.is_configuration() => {
                            self.failed(&error);
                            self.due.refused();
                        }
                        Err(error) => return Err(error),
                    }
                }
                event = events.next() => match event {
                    None => return Ok(()),
                    Some(Err(error)) => return Err(PublishError::Watch { why: error.to_string() }),
                    Some(Ok(event)) => {
                        let change = self.observed.event(event, position)?;
                        match change {
                            Change::Nothing => continue,
                            Change::Deleted => self.due.deleted(),
                            Change::Edited => self.due.edited(),
                        }
                        self.published.send_if_modified(|state| std::mem::take(&mut state.in_sync));
                    }
                },
                () = sleep_until(end) => return Ok(()),
            }
        }
    }

    /// Brings the server in line with the inventory.
    async fn sync(&mut self, owner: &Owner) -> Result<(), PublishError> {
        self.due.clear();
        // Each pass may teach one more thing that the server does not keep.
        for _ in 0..MOST_PASSES {
            if self.pass(owner).await? {
                return Ok(());
            }
        }
        Err(PublishError::Unsettled { passes: MOST_PASSES })
    }

    /// One pass; false if it learnt that something else is to be published.
    async fn pass(&mut self, owner: &Owner) -> Result<bool, PublishError> {
        let there = self.observed.slices();
        let mut contents = self.desired(&there);
        validate(&contents)?;
        let devices = contents.iter().map(|content| content.devices.len()).sum();
        compare::keep_times(&mut contents, there.iter().map(|slice| &slice.spec));
        for content in &mut contents {
            if let Some((_, kept)) = self.rewritten.iter().find(|(sent, _)| compare::same(sent, content)) {
                content.clone_from(kept);
            }
        }
        self.generation = self.observed.generation(&owner.node).max(self.generation);
        let slices = contents.len();
        let desired = Desired { owner, contents, used_generation: self.generation };
        let actions = sync::plan(desired, &there);
        drop(there);
        let writes = actions.len() as u64;
        for action in actions {
            let (sent, kept) = match action {
                Action::Delete(slice) => {
                    self.server.delete(&slice).await?;
                    self.observed.removed(&slice);
                    continue;
                }
                Action::Update { slice: sent, .. } => {
                    let kept = self.server.update(&sent).await?;
                    (sent, kept)
                }
                Action::Create { slice: sent, .. } => {
                    let kept = self.server.create(&sent).await?;
                    (sent, kept)
                }
            };
            self.observed.wrote(&kept);
            let (sent, kept) = (sent.content, compare::content(&kept.spec));
            if let Some(difference) = compare::dropped(&sent, &kept) {
                // The pool is complete with its last slice only: stopping here
                // leaves nothing that a scheduler would believe.
                self.learn(difference, sent, kept);
                return Ok(false);
            }
        }
        self.generation = self.observed.generation(&owner.node);
        self.report(writes, slices, devices);
        Ok(true)
    }

    /// Whether the inventory makes another pool than the last that was made.
    /// Claims come and go all day, and making a pool of a large node takes
    /// megabytes that a process seldom gives back.
    fn is_news(&mut self) -> bool {
        let now = self.inventory.borrow_and_update().clone();
        !self.support.counters || !same_pool(&self.last, &now)
    }

    /// What the inventory says should be there.
    fn desired(&mut self, there: &[ResourceSlice]) -> Vec<Content> {
        let inventory = self.inventory.borrow_and_update().clone();
        self.last = inventory.clone();
        if inventory.gpus.is_empty() {
            return without_driver(there, self.support);
        }
        slices(pool(&inventory, &PoolOptions { support: self.support }))
    }

    /// Takes over what a server says of itself.
    fn adopt(&mut self, version: String, support: Support) {
        if self.version != version {
            self.rewritten.clear();
        }
        self.version = version;
        self.set_support(support);
    }

    /// The server kept less than was sent.
    fn learn(&mut self, difference: compare::Difference, sent: Content, kept: Content) {
        let support = Support {
            counters: self.support.counters && !difference.counters,
            shares: self.support.shares && !difference.shares,
            taints: self.support.taints && !difference.taints,
        };
        if support != self.support {
            self.set_support(support);
        } else {
            // Accepted as it is, or we would write it for ever.
            error!(version = %self.version, "the API server changes what is published; its version of it stays");
            self.rewritten.push((sent, kept));
        }
    }

    fn set_support(&mut self, support: Support) {
        if self.support != support {
            match probe::degraded(support, &self.version) {
                Some(why) => warn!("{why}"),
                None => info!(version = %self.version, "the API server keeps all that is published"),
            }
        }
        self.support = support;
        let why = probe::degraded(support, &self.version);
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
            };
        });
    }

    fn failed(&self, error: &PublishError) {
        let text = chain(error);
        // Once per cause: an outage is tried at for hours.
        let repeated = self.published.borrow().error.as_ref() == Some(&text);
        match error {
            _ if repeated || matches!(error, PublishError::Overtaken { .. }) => debug!("publishing: {text}"),
            _ if error.is_configuration() => error!("publishing: {text}"),
            _ => warn!("publishing: {text}"),
        }
        self.published.send_modify(|published| {
            published.in_sync = false;
            published.error = Some(text);
        });
    }
}
