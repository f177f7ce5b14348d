//! A fake MPS supervisor: it answers the files of the driver at once, as the real one does, but runs
//! no processes. Tests choose the phase that it reports.

#![allow(dead_code)] // Each test target uses only some of these items.

use divvy_api::mps::{ACTUAL, Actual, DESIRED, DIRECTORY, Desired, FORMAT, Phase};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// It runs until it is dropped. The files of its daemons stay.
pub(crate) struct FakeSupervisor {
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
}

struct Shared {
    mps: PathBuf,
    stop: AtomicBool,
    state: Mutex<State>,
}

struct State {
    phase: Phase,
    incarnation: u64,
    /// Every change of a desired state, with its target, in order.
    history: Vec<(String, Desired)>,
    /// The current desired state of each target.
    desired: BTreeMap<String, Desired>,
}

impl FakeSupervisor {
    pub(crate) fn start(run_dir: &Path) -> Self {
        let state =
            State { phase: Phase::Ready, incarnation: 1, history: Vec::new(), desired: BTreeMap::new() };
        let mps = run_dir.join(DIRECTORY);
        let shared = Arc::new(Shared { mps, stop: AtomicBool::new(false), state: Mutex::new(state) });
        let supervisor = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            while !supervisor.stop.load(Ordering::Relaxed) {
                supervisor.reconcile();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Self { shared, thread: Some(thread) }
    }

    /// Reports this phase for all daemons from now on.
    pub(crate) fn set(&self, phase: Phase) {
        self.shared.state.lock().unwrap().phase = phase;
    }

    /// Reports a restart of all daemons: a new incarnation.
    pub(crate) fn restart(&self) {
        self.shared.state.lock().unwrap().incarnation += 1;
    }

    /// Every desired state in order, as `thread percentage/memory in MiB`.
    pub(crate) fn desired_history(&self) -> Vec<String> {
        let text = |number: Option<u64>| number.map_or("all".to_owned(), |number| number.to_string());
        let state = self.shared.state.lock().unwrap();
        let limits = |(_, desired): &(String, Desired)| {
            format!("{}/{}", text(desired.thread_percentage.map(u64::from)), text(desired.memory_mib))
        };
        state.history.iter().map(limits).collect()
    }

    /// The devices of the running daemons, by target.
    pub(crate) fn devices(&self) -> BTreeMap<String, String> {
        let state = self.shared.state.lock().unwrap();
        state.desired.iter().map(|(target, desired)| (target.clone(), desired.device.clone())).collect()
    }
}

impl Shared {
    fn reconcile(&self) {
        let mut state = self.state.lock().unwrap();
        let entries = std::fs::read_dir(&self.mps).into_iter().flatten().flatten();
        let mut seen = Vec::new();
        for entry in entries {
            let (dir, target) = (entry.path(), entry.file_name().into_string().unwrap());
            let Ok(bytes) = std::fs::read(dir.join(DESIRED)) else {
                // A directory that the driver is still creating has no daemon yet.
                if state.desired.remove(&target).is_some() || dir.join(ACTUAL).exists() {
                    let _ = std::fs::remove_dir_all(&dir);
                }
                continue;
            };
            seen.push(target.clone());
            let desired: Desired = serde_json::from_slice(&bytes).unwrap();
            if state.desired.get(&target) != Some(&desired) {
                state.history.push((target.clone(), desired.clone()));
                state.desired.insert(target, desired.clone());
            }
            let actual = Actual {
                format: FORMAT,
                phase: state.phase.clone(),
                desired,
                incarnation: state.incarnation,
                process: None,
                multi_user: true,
            };
            let bytes = serde_json::to_vec(&actual).unwrap();
            if std::fs::read(dir.join(ACTUAL)).ok().as_ref() != Some(&bytes) {
                let part = dir.join("actual.part");
                // The driver may remove the directory at any time.
                let _ = std::fs::write(&part, bytes).and_then(|()| std::fs::rename(part, dir.join(ACTUAL)));
            }
        }
        state.desired.retain(|target, _| seen.contains(target));
    }
}

impl Drop for FakeSupervisor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}
