//! The state file: read without a lock, changed under one.
//!
//! A change writes the new state to a second file, renders what changes in `/proc`, `/sys` and
//! `/dev`, and exchanges the files. A process that is killed at any point leaves the old or the new
//! state. If it leaves outdated trees, it also leaves the second file, and the next process that
//! finds it renders everything again. There is no fsync: the state need not survive a crash of the
//! machine.

use crate::code::Code;
use crate::energy;
use crate::file_lock::{self, Lock, LockError};
use crate::live_process;
use crate::state::{FORMAT, State};
use crate::tree;
use crate::usage::{self, GpuUsage, ProcessUsage};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::{Arc, RwLock};
use std::time::Duration;

/// Name of the kernel log in the state's directory.
pub(crate) const KERNEL_LOG: &str = "kmsg";

/// Longest time that a change waits for the lock. A change takes milliseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(20);

/// The state of one simulator on disk.
///
/// A reader parses the file once and keeps it open. An open file's inode number is not reused, so
/// one `stat` tells whether the file was replaced. Because a process may fork at any time, no lock
/// is held between calls, no thread is started, and the cache is never waited for.
#[derive(Debug)]
pub struct Store {
    /// Root of the rendered trees; absent inside a container, which has only the state.
    render: Option<PathBuf>,
    dir: PathBuf,
    cache: RwLock<Option<Cached>>,
    /// Absent if the file is of another build or cannot be read.
    usage: Option<Arc<GpuUsage>>,
}

#[derive(Debug, Clone)]
struct Cached {
    state: Arc<State>,
    inode: (u64, u64),
    /// The state with the CUDA processes of the last read.
    with_processes: Option<Arc<StateWithProcesses>>,
    /// Kept open so that its inode number is not reused.
    _file: Arc<File>,
}

#[derive(Debug)]
struct StateWithProcesses {
    gpu_processes: Vec<ProcessUsage>,
    state: Arc<State>,
}

/// The state cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("no simulated GPUs in {dir}; create them with `divvy-sim up`")]
    Absent { dir: PathBuf },
    #[error("cannot {what} {path}")]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot read {path}: not a state file of the simulator")]
    Damaged { path: PathBuf, source: serde_json::Error },
    #[error("{path} has format {found}, but this build reads {FORMAT}; use programs of one build")]
    Format { path: PathBuf, found: u32 },
    #[error("another process has held {path} for {seconds} s")]
    Locked { path: PathBuf, seconds: u64 },
    #[error("cannot render {path}")]
    Render { path: PathBuf, source: io::Error },
}

impl StoreError {
    fn is_denied(&self) -> bool {
        use io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
        match self {
            Self::Io { source, .. } | Self::Render { source, .. } => {
                matches!(source.kind(), PermissionDenied | ReadOnlyFilesystem)
            }
            _ => false,
        }
    }
}

impl From<StoreError> for Code {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Absent { .. } => Self::DriverNotLoaded,
            denied if denied.is_denied() => Self::NoPermission,
            StoreError::Io { .. } | StoreError::Render { .. } => Self::OperatingSystem,
            StoreError::Locked { .. } => Self::Timeout,
            StoreError::Damaged { .. } | StoreError::Format { .. } => Self::Unknown,
        }
    }
}

impl Store {
    /// Opens the store in `dir`. Trees are rendered below `render`.
    pub fn open(dir: PathBuf, render: Option<PathBuf>) -> Result<Self, StoreError> {
        let usage = GpuUsage::open(&dir).ok().map(Arc::new);
        let store = Self { render, dir, cache: RwLock::new(None), usage };
        store.read()?;
        if store.unfinished() {
            // Under the lock, a second file can only be left over from a killed process. A process
            // that may not write reads the state anyway.
            match store.lock().and_then(|_lock| store.finish()) {
                Err(error) if !error.is_denied() => return Err(error),
                _ => {}
            }
        }
        Ok(store)
    }

    /// Writes the first state and renders its trees.
    pub fn create(dir: PathBuf, render: PathBuf, mut state: State) -> Result<Self, StoreError> {
        let mut store = Self { render: Some(render.clone()), dir, cache: RwLock::new(None), usage: None };
        std::fs::create_dir_all(&store.dir)
            .map_err(|source| store.io("create", store.dir.clone(), source))?;
        let _lock = store.lock()?;
        let usage = GpuUsage::create(&store.dir).and_then(|()| GpuUsage::open(&store.dir));
        let usage =
            usage.map_err(|source| store.io("create the usage file in", store.dir.clone(), source))?;
        usage.publish(&state);
        store.usage = Some(Arc::new(usage));
        tree::render(&render, &state).map_err(render_error)?;
        store.write_kernel_log(&mut state)?;
        let new = store.write_new(&state)?;
        store.commit(new)?;
        Ok(store)
    }

    /// The current state with the CUDA processes that run now.
    pub fn read(&self) -> Result<Arc<State>, StoreError> {
        let current = self.current()?;
        let gpu_processes = self.processes();
        if gpu_processes.is_empty() {
            return Ok(current.state);
        }
        if let Some(with_processes) = current
            .with_processes
            .as_ref()
            .filter(|with_processes| with_processes.gpu_processes == gpu_processes)
        {
            return Ok(Arc::clone(&with_processes.state));
        }
        let mut state = State::clone(&current.state);
        let _added = usage::show(&mut state, &gpu_processes);
        let state = Arc::new(state);
        let with_processes = Arc::new(StateWithProcesses { gpu_processes, state: Arc::clone(&state) });
        if let Ok(mut cache) = self.cache.try_write()
            && let Some(cached) = cache.as_mut().filter(|cached| cached.inode == current.inode)
        {
            cached.with_processes = Some(with_processes);
        }
        Ok(state)
    }

    /// The current state without CUDA processes that run now.
    pub fn read_stored(&self) -> Result<Arc<State>, StoreError> {
        Ok(self.current()?.state)
    }

    /// GPU usage of CUDA processes.
    pub fn usage(&self) -> Option<&Arc<GpuUsage>> {
        self.usage.as_ref()
    }

    fn processes(&self) -> Vec<ProcessUsage> {
        self.usage.as_ref().map(|usage| usage.processes()).unwrap_or_default()
    }

    /// Changes the state. Nothing is written if `change` fails or changes nothing.
    pub fn update<T, E: From<StoreError>>(
        &self,
        change: impl FnOnce(&mut State) -> Result<T, E>,
    ) -> Result<T, E> {
        let _lock = self.lock()?;
        self.finish()?;
        let before = self.current()?.state;
        let mut after = State::clone(&before);
        let dead = live_process::dead(&self.dir);
        live_process::remove_entries(&mut after, &dead);
        let added = usage::show(&mut after, &self.processes());
        let result = change(&mut after)?;
        usage::hide(&mut after, &added);
        if after != *before {
            self.replace(&before, after)?;
        }
        for (_, path) in dead {
            self.remove(path)?;
        }
        Ok(result)
    }

    /// Replaces the state by `after`. The caller holds the lock.
    fn replace(&self, before: &State, mut after: State) -> Result<(), StoreError> {
        after.generation += 1;
        if !after.kernel_log.is_written() {
            self.write_kernel_log(&mut after)?;
        }
        energy::account(before, &mut after);
        let new = self.write_new(&after)?;
        let edits = tree::changes(before, &after);
        match &self.render {
            _ if edits.is_empty() => {}
            Some(root) => {
                if tree::replaces_module(before, &after) {
                    tree::retire_module(root, &self.dir).map_err(render_error)?;
                }
                edits.apply(root).map_err(render_error)?;
            }
            // A container has no trees; the next process that has them renders them.
            None => self.ask_for_trees()?,
        }
        self.commit(new)?;
        if let Some(usage) = &self.usage {
            usage.publish(&after);
        }
        Ok(())
    }

    /// A process that is killed before the commit leaves lines of a change that did not happen.
    fn write_kernel_log(&self, state: &mut State) -> Result<(), StoreError> {
        let path = self.dir.join(KERNEL_LOG);
        state.kernel_log.write(&path).map_err(|source| self.io("write", path, source))
    }

    fn current(&self) -> Result<Cached, StoreError> {
        let path = self.state_path();
        let stat = rustix::fs::stat(&path).map_err(|errno| self.read_error(path.clone(), errno.into()))?;
        let inode = (stat.st_dev, stat.st_ino);
        // Not waited for: after a fork, the thread that holds the lock may not exist in this
        // process.
        for _ in 0..64 {
            if let Ok(cache) = self.cache.try_read() {
                match &*cache {
                    Some(cached) if cached.inode == inode => return Ok(cached.clone()),
                    _ => break,
                }
            }
            std::hint::spin_loop();
        }
        let fresh = self.load(path)?;
        self.remember(fresh.clone());
        Ok(fresh)
    }

    fn load(&self, path: PathBuf) -> Result<Cached, StoreError> {
        let mut file = File::open(&path).map_err(|source| self.read_error(path.clone(), source))?;
        let stat = rustix::fs::fstat(&file).map_err(|errno| self.io("read", path.clone(), errno.into()))?;
        let mut text = Vec::new();
        file.read_to_end(&mut text).map_err(|source| self.io("read", path.clone(), source))?;
        let state: State = serde_json::from_slice(&text)
            .map_err(|source| StoreError::Damaged { path: path.clone(), source })?;
        if state.format != FORMAT {
            return Err(StoreError::Format { path, found: state.format });
        }
        Ok(Cached {
            state: Arc::new(state),
            inode: (stat.st_dev, stat.st_ino),
            with_processes: None,
            _file: Arc::new(file),
        })
    }

    fn remember(&self, fresh: Cached) {
        if let Ok(mut cache) = self.cache.try_write() {
            *cache = Some(fresh);
        }
    }

    /// Writes the second file.
    fn write_new(&self, state: &State) -> Result<Cached, StoreError> {
        let path = self.new_path();
        let error = |source| self.io("write", path.clone(), source);
        let text = serde_json::to_vec(state).map_err(|source| error(source.into()))?;
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true);
        let mut file = options.open(&path).map_err(error)?;
        file.write_all(&text).map_err(error)?;
        let stat = rustix::fs::fstat(&file).map_err(|errno| error(errno.into()))?;
        Ok(Cached {
            state: Arc::new(state.clone()),
            inode: (stat.st_dev, stat.st_ino),
            with_processes: None,
            _file: Arc::new(file),
        })
    }

    /// Makes the second file the state.
    fn commit(&self, new: Cached) -> Result<(), StoreError> {
        let (from, to) = (self.new_path(), self.state_path());
        // Exchanged instead of replaced, because some file systems flush a file that replaces
        // another.
        match rustix::fs::renameat_with(CWD, &from, CWD, &to, RenameFlags::EXCHANGE) {
            Ok(()) => self.remove(from)?,
            Err(Errno::NOENT | Errno::INVAL | Errno::NOSYS) => {
                std::fs::rename(&from, &to).map_err(|source| self.io("replace", to, source))?;
            }
            Err(errno) => return Err(self.io("replace", to, errno.into())),
        }
        self.remember(new);
        Ok(())
    }

    /// Whether a process died in the middle of a change, or a container changed the state.
    fn unfinished(&self) -> bool {
        self.render.is_some() && (self.new_path().exists() || self.stale_path().exists())
    }

    /// Renders everything again if the trees may be outdated. The caller holds the lock.
    fn finish(&self) -> Result<(), StoreError> {
        let Some(root) = self.render.as_ref().filter(|_| self.unfinished()) else { return Ok(()) };
        tree::render(root, &self.current()?.state).map_err(render_error)?;
        self.remove(self.new_path())?;
        self.remove(self.stale_path())
    }

    fn ask_for_trees(&self) -> Result<(), StoreError> {
        let path = self.stale_path();
        File::create(&path).map(drop).map_err(|source| self.io("create", path, source))
    }

    fn remove(&self, path: PathBuf) -> Result<(), StoreError> {
        match std::fs::remove_file(&path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => Err(self.io("remove", path, source)),
            _ => Ok(()),
        }
    }

    fn lock(&self) -> Result<Lock, StoreError> {
        let path = self.dir.join("lock");
        file_lock::lock(&path, LOCK_TIMEOUT).map_err(|error| match error {
            LockError::Io(what, errno) => self.io(what, path, errno.into()),
            LockError::Held => StoreError::Locked { path, seconds: LOCK_TIMEOUT.as_secs() },
        })
    }

    fn state_path(&self) -> PathBuf {
        self.dir.join("state.json")
    }

    fn new_path(&self) -> PathBuf {
        self.dir.join("state.json.new")
    }

    fn stale_path(&self) -> PathBuf {
        self.dir.join("trees-are-stale")
    }

    fn read_error(&self, path: PathBuf, source: io::Error) -> StoreError {
        if source.kind() == io::ErrorKind::NotFound {
            return StoreError::Absent { dir: self.dir.clone() };
        }
        self.io("read", path, source)
    }

    fn io(&self, what: &'static str, path: PathBuf, source: io::Error) -> StoreError {
        StoreError::Io { what, path, source }
    }
}

fn render_error(failure: tree::RenderError) -> StoreError {
    StoreError::Render { path: failure.path, source: failure.source }
}
