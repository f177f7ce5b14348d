//! The thread that reacts between two audits: it waits for doorbells and updates the policy pages.
//!
//! An audit hands over what it found ([`WakeupThread::plan`]). The thread waits for doorbells
//! ([`super::doorbell`]) and checks shares that may have become idle. Decisions come from
//! [`super::grants`]; the [`super::grant_table`] writes them under one lock. GPUs on which nothing
//! is due are not touched, to save cache misses. Everything that is written expires, a closed gate
//! first, so a node without an agent blocks no share. A regular exit opens all gates.

use super::TimeLaw;
use super::doorbell::{self, WakeReason};
use super::explained::Unexplained;
use super::fast_sampling::ActivityChange;
use super::grant_table::{GrantSummary, GrantTable, PlannedShare};
use super::quantum_table::{QuantumTable, QuantumUsage, ShareGrants};
use crate::shares::snapshot::{Device, ShareKey, monotonic_ns};
use divvy_pages::GpuUuid;
use rustix::process::setpriority_process;
use rustix::thread::futex::{self, Flags};
use rustix::thread::gettid;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::Notify;

/// A wait that has no end of its own ends by then, in nanoseconds.
const LONGEST: u64 = 3_600_000_000_000;
const NAME: &str = "share-bell";
/// It runs before other work of the node: its work is short, and shares of high priority wait for
/// it, and then all others. At normal priority, other programs delay it at each fifth turn. Source:
/// setpriority(2).
const NICE: i32 = -10;

/// The thread, and what it shares with audits. It ends when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct WakeupThread {
    common: Arc<Common>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Common {
    law: TimeLaw,
    desk: Mutex<GrantTable>,
    quanta: Mutex<QuantumTable>,
    /// Changes when the thread has to look at the desk.
    poked: AtomicU32,
    /// More or fewer work on some GPU.
    moved: Notify,
    stops: AtomicBool,
}

impl WakeupThread {
    pub(crate) fn new(law: TimeLaw) -> Self {
        Self { common: Arc::new(Common { law, ..Common::default() }), thread: Mutex::default() }
    }

    /// The grants of the shares of a GPU since the previous call, up to `ago` before now.
    pub(crate) fn since(&self, gpu: GpuUuid, ago: Duration) -> BTreeMap<ShareKey, GrantSummary> {
        self.common.desk().since(gpu, monotonic_ns().saturating_sub(ago.as_nanos() as u64))
    }

    /// Returns when more or fewer shares work on GPUs: these.
    pub(crate) async fn activity_changes(&self) -> Vec<ActivityChange> {
        loop {
            self.common.moved.notified().await;
            let moved = self.common.desk().moved(monotonic_ns());
            // It may have been told twice before anybody came to look.
            if !moved.is_empty() {
                return moved;
            }
        }
    }

    /// Whether a share of that GPU has been planned.
    pub(crate) fn has(&self, gpu: GpuUuid, share: &ShareKey) -> bool {
        self.common.desk().has(gpu, share) || self.common.quanta().has(gpu, share)
    }

    /// From now on the shares of that GPU are these, as an audit found them.
    pub(crate) fn plan(&self, gpu: GpuUuid, shares: Vec<PlannedShare>) {
        let (exclusive, paced) = self.by_law(shares);
        // A law gives up the pages of a device before the other one writes them.
        self.common.quanta().retain(gpu, |mig| exclusive.iter().any(|share| share.mig == mig));
        let mut is_other = {
            let mut desk = self.common.desk();
            let is_other = desk.plan(gpu, paced, monotonic_ns());
            self.common.tell(&desk);
            is_other
        };
        is_other |= self.common.quanta().plan(gpu, exclusive, monotonic_ns());
        if is_other {
            self.start();
            self.common.poke();
        }
    }

    /// The counters of the shares of that GPU that launch under quanta; empty under rates.
    pub(crate) fn quantum_usage(&self, gpu: GpuUuid) -> BTreeMap<ShareKey, QuantumUsage> {
        self.common.quanta().usage(gpu, monotonic_ns())
    }

    /// The grants and charges of the shares of that GPU that launch under quanta, by device.
    pub(crate) fn grants(&self, gpu: GpuUuid) -> BTreeMap<Device, Vec<ShareGrants>> {
        self.common.quanta().grants(gpu, monotonic_ns())
    }

    /// Corrects the charges of a device, which do not explain its active time.
    pub(crate) fn correct(&self, device: &Device, unexplained: Unexplained) {
        self.common.quanta().correct(device, unexplained, monotonic_ns());
    }

    /// The shares of devices on which all can be granted exclusive quanta, and the others.
    fn by_law(&self, shares: Vec<PlannedShare>) -> (Vec<PlannedShare>, Vec<PlannedShare>) {
        let is_paced = |share: &PlannedShare| self.common.law == TimeLaw::Rates || !share.suits_quanta;
        let paced: BTreeSet<_> =
            shares.iter().filter(|share| is_paced(share)).map(|share| share.mig).collect();
        shares.into_iter().partition(|share| !paced.contains(&share.mig))
    }

    /// The GPUs that have shares.
    pub(crate) fn retain_gpus(&self, are_there: impl Fn(&GpuUuid) -> bool) {
        self.common.desk().keep(&are_there);
        self.common.quanta().keep(&are_there);
    }

    /// The shares of a GPU take turns of `quantum` nanoseconds, or run concurrently if the list is
    /// empty.
    pub(crate) fn set_turns(&self, gpu: GpuUuid, order: Vec<ShareKey>, quantum: u64) {
        if self.common.desk().turns(gpu, order, quantum, monotonic_ns()) {
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
                Err(cause) => {
                    tracing::warn!(%cause, "doorbell thread not started: shares resume at the next audit");
                }
            }
        }
    }
}

impl Drop for WakeupThread {
    fn drop(&mut self) {
        self.common.stops.store(true, SeqCst);
        self.common.poke();
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // It has panicked if this fails, and the log has that.
        let _ = thread.map(JoinHandle::join);
        self.common.desk().leave();
        self.common.quanta().leave();
    }
}

impl Common {
    fn desk(&self) -> MutexGuard<'_, GrantTable> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn quanta(&self) -> MutexGuard<'_, QuantumTable> {
        self.quanta.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, desk: &GrantTable) {
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
            tracing::debug!(%cause, "priority of the doorbell thread not raised");
        }
        let mut rang = WakeReason::Anybody;
        while !self.stops.load(SeqCst) {
            // Before the desk is looked at: what changes after that ends the wait.
            let poked = self.poked.load(SeqCst);
            let (exclusive, earlier) = {
                let mut quanta = self.quanta();
                quanta.tick(monotonic_ns(), &rang);
                quanta.doors()
            };
            let (paced, until) = {
                let (mut desk, now) = (self.desk(), monotonic_ns());
                desk.tick(now, &rang);
                self.tell(&desk);
                desk.doors(now)
            };
            let until = until.min(earlier).min(monotonic_ns().saturating_add(LONGEST));
            let doors =
                if paced.is_empty() { exclusive } else { Arc::new([&exclusive[..], &paced].concat()) };
            rang = doorbell::wait(&self.poked, poked, &doors, until);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::grant_table::tests::{GPU, Share, launch};
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
    fn device_that_changes_its_law_stays_divided() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name, weight| Share::new(dir.path(), name, Compute { weight, ..Compute::default() });
        let (first, other) = (of("a", 2), of("b", 1));
        let bell = WakeupThread::new(TimeLaw::Quanta);
        let plan = |suits_quanta| {
            let planned = [&first, &other].map(|share| PlannedShare { suits_quanta, ..share.planned(50) });
            bell.plan(GPU, planned.into());
            let page = first.page();
            (page.is_exclusive(), page.is_agent_limited())
        };
        assert_eq!([true, false, true].map(plan), [(true, true), (false, true), (true, true)]);
    }

    #[test]
    fn idle_share_is_detected_without_a_doorbell() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name| Share::new(dir.path(), name, Compute { cores: 30, ..Compute::default() });
        let (first, other) = (of("a"), of("b"));
        let bell = WakeupThread::new(TimeLaw::Rates);
        bell.plan(GPU, vec![first.planned(30), other.planned(30)]);
        assert_eq!(first.page().wakeup_request(), 0);
        soon("it rests, and is asked", || first.page().wakeup_request() > 0);
    }

    #[tokio::test]
    async fn only_activity_changes_are_reported() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name| Share::new(dir.path(), name, Compute { cores: 30, ..Compute::default() });
        let (first, other) = (of("a"), of("b"));
        let bell = WakeupThread::new(TimeLaw::Rates);
        let plan = |wants| bell.plan(GPU, vec![first.planned(wants), other.planned(0)]);
        let moved = async || tokio::time::timeout(Duration::from_secs(60), bell.activity_changes()).await;
        plan(0);
        launch(&other);
        assert_eq!(moved().await, Ok(vec![ActivityChange { gpu: GPU, is_first: true }]), "it rang");
        plan(0);
        plan(0);
        assert!(!bell.common.desk().has_moved());
    }

    #[test]
    fn doorbell_wakes_the_thread_despite_a_truncated_page() {
        let dir = tempfile::tempdir().unwrap();
        let of = |name, cores, ceiling| {
            Share::new(dir.path(), name, Compute { cores, ceiling, ..Compute::default() })
        };
        let (borrower, owner, vandal) = (of("a", 20, 100), of("b", 60, 0), of("c", 5, 0));
        let bell = WakeupThread::new(TimeLaw::Rates);
        let plan = || bell.plan(GPU, vec![borrower.planned(100), owner.planned(0), vandal.planned(0)]);
        plan();
        assert_eq!(borrower.rate(monotonic_ns()), Some(100));
        launch(&owner);
        soon("it is heard", || borrower.rate(monotonic_ns()) == Some(40));
        soon("it rests", || borrower.rate(monotonic_ns()) == Some(100));
        let account = std::fs::File::options().write(true).open(dir.path().join("c-account")).unwrap();
        account.set_len(0).unwrap();
        plan();
        launch(&owner);
        soon("it is heard again", || borrower.rate(monotonic_ns()) == Some(40));
    }
}
