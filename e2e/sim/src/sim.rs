//! [`Sim`]: one simulator, opened by its root.

use crate::code::Code;
use crate::ledger::{self, Ledger};
use crate::state::{Privilege, Process, State};
use crate::store::{Store, StoreError};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where the state lies below a root; the one path that containers share with the host.
pub(crate) const STATE_DIR: &str = "run/divvy-sim";

/// A simulator: the root of its trees and its state.
#[derive(Debug)]
pub struct Sim {
    root: PathBuf,
    dir: PathBuf,
    store: Store,
}

/// Why the state was not changed or read.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The simulator itself is broken.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The GPU says no.
    #[error("{0}")]
    Refused(#[from] Code),
}

impl From<Failure> for Code {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Store(error) => error.into(),
            Failure::Refused(code) => code,
        }
    }
}

impl Sim {
    /// Opens the simulator whose driver root is `root`. `/` is a container: it
    /// has the state and its own `/dev`, and trees are left to the host.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let root = root.into();
        let dir = root.join(STATE_DIR);
        let render = (root != Path::new("/")).then(|| root.clone());
        let store = Store::open(dir.clone(), render)?;
        Ok(Self { root, dir, store })
    }

    /// Opens the simulator that a file of its driver root belongs to: the nearest
    /// directory above it that has a state.
    pub fn from_library_path(file: &Path) -> Result<Self, StoreError> {
        let file = file.canonicalize().unwrap_or_else(|_| file.to_owned());
        let root = file.ancestors().skip(1).find(|dir| dir.join(STATE_DIR).join("state.json").exists());
        Self::open(root.unwrap_or(Path::new("/")))
    }

    pub(crate) fn create(root: PathBuf, state: &State) -> Result<Self, StoreError> {
        let dir = root.join(STATE_DIR);
        let store = Store::create(dir.clone(), root.clone(), state)?;
        Ok(Self { root, dir, store })
    }

    /// The driver root.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// One of the driver's libraries, by its file name.
    pub fn library(&self, name: &str) -> PathBuf {
        self.root.join(crate::up::LIB_DIR).join(name)
    }

    /// Where the state lies: what a harness binds to `/run/divvy-sim` in containers.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The directory of device nodes.
    pub fn dev(&self) -> PathBuf {
        self.root.join("dev")
    }

    /// Where the trace is written, a JSON line per call.
    pub fn trace_path(&self) -> PathBuf {
        self.dir.join("trace.jsonl")
    }

    /// The state as it is now; cheap while nobody changes it.
    pub fn read(&self) -> Result<Arc<State>, Failure> {
        Ok(self.store.read()?)
    }

    /// The same without the CUDA processes that run: those that remain were made up.
    pub fn written(&self) -> Result<Arc<State>, Failure> {
        Ok(self.store.written()?)
    }

    /// The processes of a GPU: those that were made up, and CUDA processes that run.
    pub fn with_guests(&self, slot: usize, invented: Vec<Process>) -> Vec<Process> {
        let uses = self.ledger().map(|ledger| ledger.uses_of(slot)).unwrap_or_default();
        ledger::with_guests(invented, &uses)
    }

    /// What CUDA processes use; absent where the files are another build's.
    pub fn ledger(&self) -> Option<&Arc<Ledger>> {
        self.store.ledger()
    }

    /// Changes the state and the trees that show it. Nothing changes when `change` refuses.
    pub fn update<T>(&self, change: impl FnOnce(&mut State) -> Result<T, Code>) -> Result<T, Failure> {
        self.store.update(|state| change(state).map_err(Failure::Refused))
    }

    /// Whether this process is root in the eyes of the driver.
    pub fn privileged(&self, state: &State) -> bool {
        match state.host.privilege {
            Privilege::Nobody => false,
            Privilege::Owner => {
                let user = rustix::process::geteuid();
                user.is_root() || rustix::fs::stat(&self.dir).is_ok_and(|stat| stat.st_uid == user.as_raw())
            }
        }
    }
}
