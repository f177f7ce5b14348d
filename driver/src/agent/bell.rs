//! The agent's quick half: who hears a share ring, and changes what pages say before the next audit.
//!
//! The audit brings what it found ([`Bell::plan`]); a thread waits for doorbells ([`super::door`]) and, where several may
//! work, looks at those who may have come to rest by then. Each look waits a little for something else that wakes the thread, and of
//! the GPUs on which nothing is due nothing is touched: what a wake costs is mostly what is in no cache. Either way [`super::orders`]
//! decides, and what is new is written to the policy pages under one lock ([`super::desk`]). While nobody works beside
//! others the thread sleeps and costs nothing.
//!
//! What is written ends by itself, a closed gate soonest, so that a node whose agent is gone keeps nobody out. An
//! agent that ends in order opens the gates that it closed.

use super::desk::{Desk, Had, Moved, Planned};
use super::door::{self, Rang};
use divvy_api::{ClaimUid, ShareId};
use divvy_pages::GpuUuid;
use rustix::process::setpriority_process;
use rustix::thread::futex::{self, Flags};
use rustix::thread::gettid;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::Notify;

pub(super) type Key = (ClaimUid, ShareId);

/// Between two looks at who is awake and in debt, or cannot be heard, in nanoseconds.
pub(super) const TICK: u64 = 10_000_000;
/// A wait that has no end of its own ends by then, in nanoseconds.
const LONGEST: u64 = 3_600_000_000_000;
const NAME: &str = "share-bell";
/// It goes before other work of the node: what it does is short, and whoever precedes others waits for it, as do these after that. Put
/// off behind who computes it is interrupted at each fifth turn. Source: setpriority(2).
const NICE: i32 = -10;

/// The thread, and what it shares with audits. It ends when this is dropped.
#[derive(Debug, Default)]
pub(super) struct Bell {
    common: Arc<Common>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Common {
    desk: Mutex<Desk>,
    /// Changes when the thread has to look at the desk.
    poked: AtomicU32,
    /// More or fewer work on some GPU.
    moved: Notify,
    stops: AtomicBool,
}

impl Bell {
    /// What the shares of a GPU were granted since this was last asked, up to so long ago.
    pub(super) fn since(&self, gpu: GpuUuid, ago: Duration) -> BTreeMap<Key, Had> {
        self.common.desk().since(gpu, now().saturating_sub(ago.as_nanos() as u64))
    }

    /// Returns when more or fewer shares work on GPUs: these.
    pub(super) async fn moved(&self) -> Vec<Moved> {
        loop {
            self.common.moved.notified().await;
            let moved = self.common.desk().moved(now());
            // It may have been told twice before anybody came to look.
            if !moved.is_empty() {
                return moved;
            }
        }
    }

    /// Whether a share of that GPU has been planned.
    pub(super) fn has(&self, gpu: GpuUuid, share: &Key) -> bool {
        self.common.desk().has(gpu, share)
    }

    /// From now on the shares of that GPU are these, as an audit found them.
    pub(super) fn plan(&self, gpu: GpuUuid, shares: Vec<Planned>) {
        let is_other = {
            let mut desk = self.common.desk();
            let is_other = desk.plan(gpu, shares, now());
            self.common.tell(&desk);
            is_other
        };
        if is_other {
            self.start();
            self.common.poke();
        }
    }

    /// The GPUs that have shares.
    pub(super) fn keep(&self, are_there: impl Fn(&GpuUuid) -> bool) {
        self.common.desk().keep(are_there);
    }

    /// Has these shares of a GPU take turns of so many nanoseconds, or, where there are none, work side by side.
    pub(super) fn turns(&self, gpu: GpuUuid, order: Vec<Key>, quantum: u64) {
        if self.common.desk().turns(gpu, order, quantum, now()) {
            self.start();
            self.common.poke();
        }
    }

    fn start(&self) {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let common = Arc::clone(&self.common);
            match std::thread::Builder::new().name(NAME.to_owned()).spawn(move || common.listen()) {
                Ok(started) => *thread = Some(started),
                Err(cause) => tracing::warn!(%cause, "nobody hears shares that begin to work"),
            }
        }
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        self.common.stops.store(true, SeqCst);
        self.common.poke();
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // It has panicked if this fails, and the log has that.
        let _ = thread.map(JoinHandle::join);
        self.common.desk().leave();
    }
}

impl Common {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, desk: &Desk) {
        if desk.has_moved() {
            self.moved.notify_one();
        }
    }

    fn poke(&self) {
        self.poked.fetch_add(1, SeqCst);
        // It fails for no word of ours.
        let _ = futex::wake(&self.poked, Flags::PRIVATE, 1);
    }

    fn listen(&self) {
        if let Err(cause) = setpriority_process(Some(gettid()), NICE) {
            tracing::debug!(%cause, "doorbells of shares are heard as soon as it is this process's turn");
        }
        let mut rang = Rang::Anybody;
        while !self.stops.load(SeqCst) {
            // Before the desk is looked at: what changes after that ends the wait.
            let poked = self.poked.load(SeqCst);
            let (doors, until) = {
                let (mut desk, now) = (self.desk(), now());
                desk.tick(now, &rang);
                self.tell(&desk);
                let (doors, until) = desk.doors(now);
                (doors, until.min(now.saturating_add(LONGEST)))
            };
            rang = door::wait(&self.poked, poked, &doors, until);
        }
    }
}

/// The monotonic clock, in nanoseconds.
pub(super) fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let since = Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0));
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::super::desk::tests::{GPU, Share, launch};
    use super::*;
    use divvy_pages::Compute;
    use std::time::Instant;

    /// That comes true in time.
    fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_share_that_comes_to_rest_is_seen_though_nobody_rings() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name| Share::new(dir.path(), name, Compute { cores: 30, ..Compute::default() });
        let (first, other) = (of("a"), of("b"));
        let bell = Bell::default();
        bell.plan(GPU, vec![first.planned(30), other.planned(30)]);
        assert_eq!(first.page().call(), 0);
        soon("it rests, and is asked", || first.page().call() > 0);
    }

    #[tokio::test]
    async fn who_begins_to_work_is_told_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name| Share::new(dir.path(), name, Compute { cores: 30, ..Compute::default() });
        let (first, other) = (of("a"), of("b"));
        let bell = Bell::default();
        let plan = |wants| bell.plan(GPU, vec![first.planned(wants), other.planned(0)]);
        let moved = async || tokio::time::timeout(Duration::from_secs(60), bell.moved()).await;
        plan(0);
        launch(&other);
        assert_eq!(moved().await, Ok(vec![Moved { gpu: GPU, is_first: true }]), "it rang");
        plan(0);
        plan(0);
        assert!(!bell.common.desk().has_moved());
    }

    #[test]
    fn a_share_that_rings_is_heard_and_one_whose_page_is_cut_short_keeps_nobody_from_that() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name, cores, ceiling| {
            Share::new(dir.path(), name, Compute { cores, ceiling, ..Compute::default() })
        };
        let (borrower, owner, vandal) = (of("a", 20, 100), of("b", 60, 0), of("c", 5, 0));
        let bell = Bell::default();
        let plan = || bell.plan(GPU, vec![borrower.planned(100), owner.planned(0), vandal.planned(0)]);
        plan();
        assert_eq!(borrower.rate(now()), Some(100));
        launch(&owner);
        soon("it is heard", || borrower.rate(now()) == Some(40));
        soon("it rests", || borrower.rate(now()) == Some(100));
        let account = std::fs::File::options().write(true).open(dir.path().join("c-account")).unwrap();
        account.set_len(0).unwrap();
        plan();
        launch(&owner);
        soon("it is heard again", || borrower.rate(now()) == Some(40));
    }
}
