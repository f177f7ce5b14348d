//! A simulated node for one test.

use divvy_api::GpuUuid;
use divvy_nvml::{Event, GpuQueue, Session, Timeouts};
use divvy_sim::control::{Pattern, When};
use divvy_sim::{Options, Sim, State};
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;

pub(crate) struct TestNode {
    pub(crate) sim: Sim,
    _dir: tempfile::TempDir,
}

impl TestNode {
    pub(crate) fn new(gpus: &str) -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let library = divvy_sim::library().expect("simulated library");
        let program = std::env::current_exe().expect("this test");
        let sim = divvy_sim::create(dir.path(), gpus, &Options::new(library, program)).expect("simulator");
        Self { sim, _dir: dir }
    }

    pub(crate) fn library(&self) -> std::path::PathBuf {
        self.sim.root().join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")
    }

    pub(crate) fn open(&self, limits: Timeouts) -> Session {
        Session::open(&self.library(), limits).expect("open")
    }

    pub(crate) fn uuid(&self, slot: usize) -> GpuUuid {
        GpuUuid::from(self.sim.read().expect("state").gpus[slot].uuid.as_str())
    }

    pub(crate) fn queue(&self, session: &Session, slot: usize) -> GpuQueue {
        session.gpu(&self.uuid(slot))
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut State)) {
        self.sim
            .update(|state| {
                change(state);
                Ok(())
            })
            .expect("changed");
    }

    pub(crate) fn hold(&self, call: &str, slot: usize, when: When) {
        let pattern = Pattern { call: call.to_owned(), gpu: Some(slot) };
        self.change(|state| state.add_hold(pattern, None, when));
    }

    pub(crate) fn release(&self) {
        self.change(|state| state.release(None));
    }

    /// Waits until a call is blocked.
    pub(crate) async fn held(&self) {
        while self.sim.read().expect("state").control.held.is_empty() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    pub(crate) fn instances(&self, slot: usize) -> usize {
        self.sim.read().expect("state").gpus[slot].instances.len()
    }
}

/// Timeouts that a held call exceeds soon, and no other call does.
pub(crate) fn short_timeouts() -> Timeouts {
    let soon = Duration::from_millis(1500);
    Timeouts { query: soon, mig_mode: soon, create: soon, destroy: soon }
}

/// The next event that `pick` selects.
pub(crate) async fn next<T>(events: &mut UnboundedReceiver<Event>, pick: impl Fn(Event) -> Option<T>) -> T {
    loop {
        if let Some(found) = pick(events.recv().await.expect("an open session")) {
            return found;
        }
    }
}
