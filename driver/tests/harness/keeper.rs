//! A keeper that obeys at once and runs nothing: it answers wishes by files, as
//! the real one does, and can be told to be ill, to be slow and to be away.

#![allow(dead_code)] // Each test uses a part of it.

use divvy_api::mps::{ACTUAL, Actual, DESIRED, DIRECTORY, Desired, FORMAT, Phase};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Until it is dropped; its daemons' files stay.
pub(crate) struct FakeKeeper {
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
    /// What was wanted last, by target: every change of a wish.
    wishes: Vec<(String, Desired)>,
    last: BTreeMap<String, Desired>,
}

impl FakeKeeper {
    pub(crate) fn start(run_dir: &Path) -> Self {
        let state = State { phase: Phase::Ready, incarnation: 1, wishes: Vec::new(), last: BTreeMap::new() };
        let mps = run_dir.join(DIRECTORY);
        let shared = Arc::new(Shared { mps, stop: AtomicBool::new(false), state: Mutex::new(state) });
        let keeper = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            while !keeper.stop.load(Ordering::Relaxed) {
                keeper.obey();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Self { shared, thread: Some(thread) }
    }

    /// All daemons are like that from now on.
    pub(crate) fn set(&self, phase: Phase) {
        self.shared.state.lock().unwrap().phase = phase;
    }

    /// All daemons were started anew.
    pub(crate) fn restart(&self) {
        self.shared.state.lock().unwrap().incarnation += 1;
    }

    /// What was wanted, in order, as `threads/memory`.
    pub(crate) fn wishes(&self) -> Vec<String> {
        let text = |number: Option<u64>| number.map_or("all".to_owned(), |number| number.to_string());
        let state = self.shared.state.lock().unwrap();
        let wish = |(_, desired): &(String, Desired)| {
            format!("{}/{}", text(desired.thread_percentage.map(u64::from)), text(desired.memory_mib))
        };
        state.wishes.iter().map(wish).collect()
    }

    /// Devices of the daemons that run, by target.
    pub(crate) fn devices(&self) -> BTreeMap<String, String> {
        let state = self.shared.state.lock().unwrap();
        state.last.iter().map(|(target, desired)| (target.clone(), desired.device.clone())).collect()
    }
}

impl Shared {
    fn obey(&self) {
        let mut state = self.state.lock().unwrap();
        let entries = std::fs::read_dir(&self.mps).into_iter().flatten().flatten();
        let mut seen = Vec::new();
        for entry in entries {
            let (dir, target) = (entry.path(), entry.file_name().into_string().unwrap());
            let Ok(bytes) = std::fs::read(dir.join(DESIRED)) else {
                // What is only just being made has no daemon yet.
                if state.last.remove(&target).is_some() || dir.join(ACTUAL).exists() {
                    let _ = std::fs::remove_dir_all(&dir);
                }
                continue;
            };
            seen.push(target.clone());
            let desired: Desired = serde_json::from_slice(&bytes).unwrap();
            if state.last.get(&target) != Some(&desired) {
                state.wishes.push((target.clone(), desired.clone()));
                state.last.insert(target, desired.clone());
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
                // The directory may go at any time.
                let _ = std::fs::write(&part, bytes).and_then(|()| std::fs::rename(part, dir.join(ACTUAL)));
            }
        }
        state.last.retain(|target, _| seen.contains(target));
    }
}

impl Drop for FakeKeeper {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}
