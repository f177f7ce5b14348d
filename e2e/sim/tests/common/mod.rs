//! Simulators in temporary directories.

#![allow(dead_code)] // each test binary uses its part

use divvy_sim::{Options, Sim, create};
use std::path::PathBuf;
use tempfile::TempDir;

/// A simulator that is removed when dropped.
pub(crate) struct Node {
    pub(crate) dir: TempDir,
    pub(crate) sim: Sim,
}

impl Node {
    /// Creates GPUs as `divvy-sim up --gpus` does.
    pub(crate) fn create(gpus: &str) -> Self {
        Self::create_with(gpus, |_| {})
    }

    /// The same with other options.
    pub(crate) fn create_with(gpus: &str, change: impl FnOnce(&mut Options)) -> Self {
        let dir = TempDir::new().expect("a temporary directory");
        let library = dir.path().join("library.so");
        std::fs::write(&library, "stands for the library").expect("writable");
        let mut options = Options::new(library, PathBuf::from(env!("CARGO_BIN_EXE_divvy-sim")));
        change(&mut options);
        let sim = create(&dir.path().join("node"), gpus, &options).expect("a simulator");
        Self { dir, sim }
    }

    /// Opens the simulator again, as another process does.
    pub(crate) fn reopen(&self) -> Sim {
        Sim::open(self.sim.root()).expect("the same simulator")
    }

    /// Whether a path below the root exists.
    pub(crate) fn has(&self, path: &str) -> bool {
        self.sim.root().join(path).symlink_metadata().is_ok()
    }

    /// Content of a file below the root.
    pub(crate) fn text(&self, path: &str) -> String {
        std::fs::read_to_string(self.sim.root().join(path)).expect("a file")
    }
}
