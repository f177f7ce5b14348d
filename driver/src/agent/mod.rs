//! The agent: it does not believe the tenant.
//!
//! The library in a container keeps honest programs within their share. This holds
//! what the container's account page says against what the GPU driver and the kernel
//! say, once a second for each GPU with shares:
//!
//! ```text
//! pages ─▶ NVML: memory by process ─▶ pages again, /proc ─▶ Look ─┬▶ judge ─▶ findings ─▶ report, end
//!  (first copy)      and time                      (second copy)  ├▶ lines ─▶ the node's line of slots
//!                                                                 ├▶ arbiter ─┬▶ orders ─▶ policy pages
//!                                       doorbells of shares ─▶ bell ─────────┘
//!                                                                 └▶ meter ─▶ what each share had ─▶ report
//! ```
//!
//! Between two audits containers are heard that have just come ([`tellings`]), for their limits in the GPU driver; and where
//! more or fewer shares work than before, a few looks come sooner, which correct and judge nothing ([`soon`]).
//!
//! [`ask`] asks the GPU driver; [`judge`], [`overtime`], [`lines`], [`arbiter`], [`orders`] and [`meter`] are pure; [`gather`] reads files and writes
//! lines, [`respond`] tells and has [`end`] end a process, [`desk`] writes orders; [`bell`] is the thread that does so
//! between two audits. A finding counts when two looks in a row see it, so that nothing
//! that is only just happening is taken for what it is not; where one look is proof,
//! it counts at once. Both together stay well within the five seconds in which
//! something must be done.
//!
//! **Fail-static.** The agent keeps nothing that must outlive it. Limits are on the
//! pages, what it measured is in the slots, who belongs to whom is in cgroups, mounts
//! and the hook's files: the next agent finds all of it. While there is none, the
//! limits stay as they are. Of two at once, as when the daemon is replaced, the one
//! that holds a GPU's lock file audits it ([`locks`]).
//!
//! Whoever hosts it gives it GPUs, paths and a place to tell its findings to; it knows
//! no claim beyond its UID, no API server and no records.

mod arbiter;
mod arbitrate;
mod ask;
mod audit;
mod balance;
mod bell;
mod context;
mod cuts;
mod desk;
mod door;
mod end;
mod files;
mod finding;
mod gather;
mod instances;
mod joint;
mod judge;
mod lack;
mod lines;
mod locks;
mod look;
mod meter;
mod mounts;
mod names;
mod orders;
mod overtime;
mod press;
mod pressure;
mod process;
mod respond;
mod soon;
mod spared;
mod tellings;
mod turns;

pub use finding::{Finding, Kind, Response, Suspect};

use crate::gpus::Gpus;
use crate::paths::HostPaths;
use crate::shares::{ACCOUNT, Contexts, POLICY, Shares};
use bell::Bell;
use desk::Planned;
use divvy_api::top::ShareNow;
use divvy_api::{ClaimUid, ShareId};
use divvy_model::Inventory;
use divvy_nvml::GpuQueue;
use divvy_pages as pages;
use files::Files;
use finding::Key;
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use gather::Found;
use locks::Locks;
use press::Pressed;
use soon::Soon;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tellings::Tellings;
use tokio::sync::{mpsc, watch};
use tokio::time::MissedTickBehavior;

/// Between two audits of a GPU.
pub const EVERY: Duration = Duration::from_secs(1);
/// What has not been told by then is told again.
const AGAIN: Duration = Duration::from_secs(600);
/// As many reports wait at most; more are in the log alone.
const QUEUE: usize = 256;

/// What the agent tells.
#[derive(Clone, Debug)]
pub enum Report {
    /// Something is not as it must be.
    Found { finding: Box<Finding>, done: Done },
    /// Nothing is wrong with the share any more.
    Well { claim: ClaimUid, share: ShareId },
    /// A GPU was audited: how it stands with its shares, without the names of claims.
    Audited { took: Duration, gpu: pages::GpuUuid, shares: Vec<ShareNow> },
}

/// What was done about a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Done {
    Reported,
    Ended,
    /// It was to be ended, and could not be.
    NotEnded,
}

impl Done {
    /// In metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Reported => "reported",
            Self::Ended => "ended",
            Self::NotEnded => "not-ended",
        }
    }
}

/// The agent of a node.
pub struct Agent {
    gpus: Gpus,
    inventory: watch::Receiver<Arc<Inventory>>,
    sources: Arc<Sources>,
    reports: mpsc::Sender<Report>,
}

/// Where things are, and what is done.
struct Sources {
    shares: Shares,
    contexts: Contexts,
    files: Files,
    process_root: PathBuf,
    cgroup_root: PathBuf,
    locks: Locks,
    response: Response,
    bell: Bell,
}

/// What the next audit of a GPU goes by.
#[derive(Default)]
struct Memory {
    before: judge::Before,
    processes: process::Known,
    /// Seen at the last look, whatever came of it.
    seen: BTreeSet<Key>,
    /// When findings were last looked for; none: never.
    judged: Option<Instant>,
    /// Told, and when.
    told: BTreeMap<Key, Instant>,
    meter: meter::Memory,
    names: names::Memory,
    balances: balance::Memory,
    joint: joint::Memory,
    over_time: overtime::Memory,
    /// The least that a context was seen to take, in bytes.
    context: Option<u64>,
}

impl Memory {
    /// Whether findings are to be looked for again.
    fn is_due(&self, now: Instant) -> bool {
        // A timer may be early by a little.
        self.judged.is_none_or(|at| now.duration_since(at) >= EVERY * 9 / 10)
    }
}

impl Agent {
    /// An agent, and where it tells what it finds.
    pub fn new(gpus: Gpus, paths: &HostPaths, response: Response) -> (Self, mpsc::Receiver<Report>) {
        let (reports, told) = mpsc::channel(QUEUE);
        let sources = Sources {
            shares: Shares::new(paths),
            contexts: Contexts::new(paths),
            files: Files::default(),
            process_root: paths.process_root.clone(),
            cgroup_root: paths.sys_root.join("fs/cgroup"),
            locks: Locks::of(&paths.run_dir),
            response,
            bell: Bell::default(),
        };
        (Self { inventory: gpus.inventory(), gpus, sources: Arc::new(sources), reports }, told)
    }

    /// For as long as the host runs. A GPU that does not answer delays no other.
    pub async fn run(self) {
        let agent = &self;
        let mut tick = tokio::time::interval(EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut press = tokio::time::interval(press::PAUSE);
        press.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut pressed = Pressed::default();
        let mut memories: BTreeMap<pages::GpuUuid, Memory> = BTreeMap::new();
        let mut busy: BTreeSet<pages::GpuUuid> = BTreeSet::new();
        let mut audits = FuturesUnordered::new();
        let mut tellings = Tellings::new();
        let mut holds = FuturesUnordered::new();
        let mut soon = Soon::default();
        loop {
            tokio::select! {
                Some((gpu, memory)) = audits.next() => {
                    busy.remove(&gpu);
                    memories.insert(gpu, memory);
                }
                _ = press.tick(), if pressed.is_any => {
                    pressed = agent.press(pressed).await;
                    press.reset_after(pressed.pause());
                }
                Some(()) = holds.next() => {}
                moved = agent.sources.bell.moved() => {
                    if soon.begin(moved, Instant::now()) {
                        tick.reset_after(soon::FIRST);
                    }
                }
                // One after the other: what is told meanwhile is heard then.
                () = tellings.next(), if holds.is_empty() => {
                    tellings.watch(&agent.sources.shares);
                    let (by_gpu, _) = agent.found(BTreeSet::new()).await;
                    // Before it launches anything that nobody paces.
                    if soon.comes(agent.unplanned(&by_gpu), Instant::now()) {
                        tick.reset_immediately();
                    }
                    holds.push(agent.hold_all(by_gpu));
                }
                _ = tick.tick() => {
                    if tellings.is_deaf() {
                        tellings.watch(&agent.sources.shares);
                    }
                    let now = Instant::now();
                    let rests = |(gpu, memory): &(&_, &Memory)| !memory.is_due(now) && !soon.has(gpu, now);
                    let resting: BTreeSet<_> = memories.iter().filter(rests).map(|(gpu, _)| *gpu).collect();
                    let (by_gpu, presses) = agent.found(resting.clone()).await;
                    pressed.is_any = presses;
                    memories.retain(|gpu, _| by_gpu.contains_key(gpu));
                    agent.sources.bell.keep(|gpu| by_gpu.contains_key(gpu));
                    for (gpu, found) in by_gpu {
                        if !resting.contains(&gpu) && busy.insert(gpu) {
                            let memory = memories.remove(&gpu).unwrap_or_default();
                            audits.push(async move { (gpu, agent.audit(gpu, found, memory).await) });
                        }
                    }
                    if soon.is_any(now) {
                        tick.reset_after(soon::PAUSE);
                    }
                }
            }
        }
    }

    /// A look at the shares that may hold more than their GPUs have, and what follows from it.
    async fn press(&self, pressed: Pressed) -> Pressed {
        let sources = self.sources.clone();
        let looked = tokio::task::spawn_blocking(move || sources.press(pressed.gpus));
        // A panic, which the log tells of: nothing is remembered of a look that went wrong.
        Pressed { is_any: pressed.is_any, gpus: looked.await.unwrap_or_default() }
    }

    /// The shares of each GPU that is this agent's, none of those that are not looked at; and whether a share of any may
    /// hold more than it has.
    async fn found(&self, resting: BTreeSet<pages::GpuUuid>) -> (BTreeMap<pages::GpuUuid, Vec<Found>>, bool) {
        // On most nodes; not worth a thread, as it is a directory in memory.
        if self.sources.shares.claims().is_empty() {
            self.sources.files.sweep();
            self.sources.locks.keep(|_| false);
            return Default::default();
        }
        let sources = self.sources.clone();
        let looked = tokio::task::spawn_blocking(move || {
            let (mut by_gpu, mut presses) = (BTreeMap::<_, Vec<Found>>::new(), false);
            // Once for each GPU, however many shares it has.
            let mut own = BTreeMap::new();
            let found = gather::found(&sources.shares, &sources.files, |policy| {
                let is_own = *own.entry(policy.gpu).or_insert_with(|| sources.locks.take(policy.gpu));
                if is_own {
                    by_gpu.entry(policy.gpu).or_default();
                    presses |= gather::presses(policy);
                }
                is_own && !resting.contains(&policy.gpu)
            });
            found.into_iter().for_each(|share| by_gpu.entry(share.policy.gpu).or_default().push(share));
            sources.locks.keep(|gpu| by_gpu.contains_key(gpu));
            (by_gpu, presses)
        });
        looked.await.unwrap_or_default()
    }

    /// The GPUs on which several have shares, and one of these has just come.
    fn unplanned(
        &self,
        by_gpu: &BTreeMap<pages::GpuUuid, Vec<Found>>,
    ) -> impl Iterator<Item = pages::GpuUuid> {
        let has_come = |gpu: pages::GpuUuid, found: &Found| !self.sources.bell.has(gpu, &found.key());
        let are_new = move |(gpu, found): &(&pages::GpuUuid, &Vec<Found>)| {
            found.len() > 1 && found.iter().any(|found| has_come(**gpu, found))
        };
        by_gpu.iter().filter(are_new).map(|(gpu, _)| *gpu)
    }

    /// One audit of a GPU.
    async fn audit(&self, gpu: pages::GpuUuid, found: Vec<Found>, memory: Memory) -> Memory {
        let begun = Instant::now();
        let asked = match self.queue(gpu) {
            Some(queue) => self.ask(gpu, &queue, &found, &memory.meter, memory.names.divides).await,
            // A GPU that is away has no processes.
            None => return memory,
        };
        let asked = match asked {
            Ok(asked) => asked,
            Err(error) => {
                // What is wrong with the GPU is told by those who watch GPUs.
                tracing::debug!(%gpu, %error, "GPU not audited");
                return memory;
            }
        };
        let sources = self.sources.clone();
        let audited = tokio::task::spawn_blocking(move || sources.audit(gpu, found, asked, memory));
        let Ok((memory, mut reports, shares)) = audited.await else {
            // A panic, which the log tells of. Nothing is remembered of a look that went wrong.
            return Memory::default();
        };
        reports.extend(shares.map(|shares| Report::Audited { took: begun.elapsed(), gpu, shares }));
        for report in reports {
            if self.reports.try_send(report).is_err() {
                tracing::debug!("a report is in the log alone: too many wait");
            }
        }
        memory
    }

    fn queue(&self, gpu: pages::GpuUuid) -> Option<GpuQueue> {
        let inventory = self.inventory.borrow().clone();
        let known =
            inventory.gpus.iter().find(|known| pages::GpuUuid::parse(known.uuid.as_str()) == Some(gpu))?;
        self.gpus.queue(&known.uuid).ok()
    }
}
