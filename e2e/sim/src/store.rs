//! The state file: read by everybody, changed under one lock.
//!
//! A change takes the lock, edits a copy, writes it to a new file, renders what it
//! changes in `/proc`, `/sys` and `/dev`, swaps the new file for the old one and
//! removes that. A process killed at any point leaves the old state or the new
//! one. It may leave the trees behind or ahead of the state, and then it leaves
//! the second file too: whoever finds one renders everything again. There is no
//! fsync: the state need not outlive the machine.
//!
//! A reader parses the file once and keeps it open. While it is open its inode
//! number cannot be used again, so one `stat` tells whether the file of that
//! name is still the one parsed. No lock is held between calls, no thread is
//! started, and the cache is only ever tried, never waited for: a process may
//! fork at any time.

use crate::alive;
use crate::code::Code;
use crate::control::LOCK;
use crate::ledger::{self, Ledger, Use};
use crate::state::{FORMAT, State};
use crate::tree;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

/// Nobody needs the lock for longer.
const LOCK_WAIT: Duration = Duration::from_secs(20);
/// First pause between two tries for the lock; it doubles up to [`LOCK_PAUSE_MAX`].
const LOCK_PAUSE: Duration = Duration::from_micros(20);
const LOCK_PAUSE_MAX: Duration = Duration::from_millis(1);

/// The state of one simulator on disk.
#[derive(Debug)]
pub struct Store {
    /// Root of the rendered trees; absent inside a container, which has only the state.
    render: Option<PathBuf>,
    dir: PathBuf,
    cache: RwLock<Option<Cached>>,
    /// Absent where the simulator's files are of another build, or cannot be read.
    ledger: Option<Arc<Ledger>>,
}

#[derive(Debug, Clone)]
struct Cached {
    state: Arc<State>,
    inode: (u64, u64),
    /// The same with the CUDA processes that ran when it was last asked for.
    shown: Option<Arc<Shown>>,
    /// Kept open so that its inode is not used again.
    _file: Arc<File>,
}

#[derive(Debug)]
struct Shown {
    uses: Vec<Use>,
    state: Arc<State>,
}

/// The state cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("no simulated GPUs in {dir}; `divvy-sim up` makes them")]
    Absent { dir: PathBuf },
    #[error("cannot {what} {path}")]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot read {path}: not a state of this simulator")]
    Damaged { path: PathBuf, source: serde_json::Error },
    #[error("{path} has format {found}, this simulator reads {FORMAT}; use the programs of one build")]
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
    /// The store in `dir`; trees are rendered below `render`.
    pub fn open(dir: PathBuf, render: Option<PathBuf>) -> Result<Self, StoreError> {
        let ledger = Ledger::open(&dir).ok().map(Arc::new);
        let store = Self { render, dir, cache: RwLock::new(None), ledger };
        store.read()?;
        if store.unfinished() {
            // With the lock, a second file is left over and not in the making. A
            // process that may not write reads all the same.
            match store.lock().and_then(|_lock| store.finish()) {
                Err(error) if !error.is_denied() => return Err(error),
                _ => {}
            }
        }
        Ok(store)
    }

    /// Writes the first state and renders it.
    pub fn create(dir: PathBuf, render: PathBuf, state: &State) -> Result<Self, StoreError> {
        let mut store = Self { render: Some(render.clone()), dir, cache: RwLock::new(None), ledger: None };
        std::fs::create_dir_all(&store.dir)
            .map_err(|source| store.io("create", store.dir.clone(), source))?;
        let _lock = store.lock()?;
        let ledger = Ledger::create(&store.dir).and_then(|()| Ledger::open(&store.dir));
        let ledger = ledger.map_err(|source| store.io("create the ledger in", store.dir.clone(), source))?;
        ledger.publish(state);
        store.ledger = Some(Arc::new(ledger));
        tree::render(&render, state).map_err(render_error)?;
        let new = store.write_new(state)?;
        store.commit(new)?;
        Ok(store)
    }

    /// The state as it is now, with the CUDA processes that run.
    pub fn read(&self) -> Result<Arc<State>, StoreError> {
        let current = self.current()?;
        let uses = self.uses();
        if uses.is_empty() {
            return Ok(current.state);
        }
        if let Some(shown) = current.shown.as_ref().filter(|shown| shown.uses == uses) {
            return Ok(Arc::clone(&shown.state));
        }
        let mut state = State::clone(&current.state);
        let _added = ledger::show(&mut state, &uses);
        let state = Arc::new(state);
        let shown = Arc::new(Shown { uses, state: Arc::clone(&state) });
        if let Ok(mut cache) = self.cache.try_write()
            && let Some(cached) = cache.as_mut().filter(|cached| cached.inode == current.inode)
        {
            cached.shown = Some(shown);
        }
        Ok(state)
    }

    /// The same without them.
    pub fn written(&self) -> Result<Arc<State>, StoreError> {
        Ok(self.current()?.state)
    }

    /// What CUDA processes use.
    pub fn ledger(&self) -> Option<&Arc<Ledger>> {
        self.ledger.as_ref()
    }

    fn uses(&self) -> Vec<Use> {
        self.ledger.as_ref().map(|ledger| ledger.uses()).unwrap_or_default()
    }

    /// Changes the state; nothing is written when `change` fails or changes nothing.
    pub fn update<T, E: From<StoreError>>(
        &self,
        change: impl FnOnce(&mut State) -> Result<T, E>,
    ) -> Result<T, E> {
        let _lock = self.lock()?;
        self.finish()?;
        let before = self.current()?.state;
        let mut after = State::clone(&before);
        let dead = alive::dead(&self.dir);
        alive::take_out(&mut after, &dead);
        let added = ledger::show(&mut after, &self.uses());
        let result = change(&mut after)?;
        ledger::hide(&mut after, &added);
        if after != *before {
            self.replace(&before, after)?;
        }
        for (_, path) in dead {
            self.remove(path)?;
        }
        Ok(result)
    }

    /// Makes `after` the state; the lock is held.
    fn replace(&self, before: &State, mut after: State) -> Result<(), StoreError> {
        after.generation += 1;
        let new = self.write_new(&after)?;
        let edits = tree::changes(before, &after);
        match &self.render {
            _ if edits.is_empty() => {}
            Some(root) => edits.apply(root).map_err(render_error)?,
            // A container has not got the trees; the next process that has renders them.
            None => self.ask_for_trees()?,
        }
        self.commit(new)?;
        if let Some(ledger) = &self.ledger {
            ledger.publish(&after);
        }
        Ok(())
    }

    fn current(&self) -> Result<Cached, StoreError> {
        let path = self.state_path();
        let stat = rustix::fs::stat(&path).map_err(|errno| self.read_error(path.clone(), errno.into()))?;
        let inode = (stat.st_dev, stat.st_ino);
        // Tried, not waited for: after a fork the lock's owner may not exist here.
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
            shown: None,
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
            shown: None,
            _file: Arc::new(file),
        })
    }

    /// Makes the second file the state.
    fn commit(&self, new: Cached) -> Result<(), StoreError> {
        let (from, to) = (self.new_path(), self.state_path());
        // Swapped where there is an old one: some file systems flush a file that replaces another.
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

    /// Somebody died in the midst of a change, or changed the state from a container.
    fn unfinished(&self) -> bool {
        self.render.is_some() && (self.new_path().exists() || self.stale_path().exists())
    }

    /// Renders everything again if need be; the lock is held.
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
        lock(&self.dir.join("lock"), LOCK_WAIT)
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

/// A file lock; the kernel takes it from a process that dies.
#[derive(Debug)]
pub(crate) struct Lock(OwnedFd);

/// Takes the lock, waiting at most that long.
pub(crate) fn lock(path: &Path, wait: Duration) -> Result<Lock, StoreError> {
    let error = |what, errno: Errno| StoreError::Io { what, path: path.to_owned(), source: errno.into() };
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    let file =
        rustix::fs::open(path, flags, Mode::from_raw_mode(0o644)).map_err(|errno| error("open", errno))?;
    let (begin, mut pause) = (Instant::now(), LOCK_PAUSE);
    loop {
        match rustix::fs::flock(&file, LOCK) {
            Ok(()) => return Ok(Lock(file)),
            Err(Errno::WOULDBLOCK | Errno::INTR) => {}
            Err(errno) => return Err(error("lock", errno)),
        }
        if begin.elapsed() > wait {
            return Err(StoreError::Locked { path: path.to_owned(), seconds: wait.as_secs() });
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(LOCK_PAUSE_MAX);
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Said aloud and not left to close: a child forked meanwhile has the same lock.
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}
