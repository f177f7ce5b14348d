//! One lock per GPU, within this process and between processes.
//!
//! Inside the process an async mutex queues fairly; between processes there is
//! `flock` on `<state>/gpus/<GPU UUID>`. The file is tried first; only while
//! another process has it does a thread wait, so nothing polls and the runtime
//! is never blocked. Claims on several GPUs lock in the order of UUIDs, the
//! same order for everybody, so two of them cannot wait for each other.
//!
//! The file also holds what must be agreed upon under the lock: a generation,
//! moved on before any record of the GPU changes, and whether MIG mode is on
//! because we turned it on. It is one line of fixed length, written at once:
//! `divvy 1 00000000000000000042 mig=ours`.

use super::store::{is_file_name, private_dir};
use divvy_api::GpuUuid;
use rustix::fs::FlockOperation;
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;
use tokio::sync::{Mutex, OwnedMutexGuard, oneshot};
use tokio::time::{Instant, timeout_at};

/// Why a GPU could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    #[error("{gpu} was busy with other claims for {within:?}")]
    Busy { gpu: GpuUuid, within: Duration },
    #[error(transparent)]
    File(#[from] GpuFileError),
}

/// Why the file of a GPU in the state directory is of no use.
#[derive(Debug, thiserror::Error)]
#[error("GPU file {path} cannot be used")]
pub struct GpuFileError {
    path: PathBuf,
    #[source]
    cause: io::Error,
}

/// The locks of all GPUs.
#[derive(Debug)]
pub struct Locks {
    dir: PathBuf,
    gpus: StdMutex<HashMap<GpuUuid, Arc<Mutex<Slot>>>>,
}

/// What this process keeps for a GPU, reachable under its lock only.
#[derive(Debug, Default)]
struct Slot {
    /// Kept open: a lock and its release are one system call each.
    file: Option<Arc<File>>,
    /// The generation at which the index of this GPU was last right.
    indexed_at: Option<u64>,
    /// Ends the wait for MIG mode to be turned off.
    mode_off: Option<tokio::task::AbortHandle>,
}

/// Locked GPUs, until it is dropped.
#[derive(Debug)]
pub struct Locked {
    gpus: Vec<LockedGpu>,
}

/// One of them.
#[derive(Debug)]
pub struct LockedGpu {
    uuid: GpuUuid,
    path: PathBuf,
    file: Arc<File>,
    line: Line,
    /// Whether MIG mode was ours when the lock was taken.
    was_ours: bool,
    /// Whether the generation was moved on since the lock was taken.
    moved: bool,
    slot: OwnedMutexGuard<Slot>,
}

/// The content of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Line {
    generation: u64,
    mig_ours: bool,
}

impl Locks {
    /// Locks under the state directory.
    pub fn open(state: &Path) -> io::Result<Self> {
        let dir = state.join("gpus");
        private_dir(&dir)?;
        Ok(Self { dir, gpus: StdMutex::default() })
    }

    /// Locks all of them, or none.
    pub async fn lock(&self, gpus: &BTreeSet<GpuUuid>, within: Duration) -> Result<Locked, LockError> {
        let deadline = Instant::now() + within;
        let mut locked = Locked { gpus: Vec::with_capacity(gpus.len()) };
        for gpu in gpus {
            let busy = || LockError::Busy { gpu: gpu.clone(), within };
            let slot = self.slot(gpu);
            let mut slot = timeout_at(deadline, slot.lock_owned()).await.map_err(|_| busy())?;
            let path = self.path(gpu)?;
            let file = match timeout_at(deadline, lock_file(&path, slot.file.take())).await {
                Err(_) => return Err(busy()),
                Ok(Err(cause)) => return Err(GpuFileError { path, cause }.into()),
                Ok(Ok(file)) => file,
            };
            slot.file = Some(file.clone());
            let line = Line::read(&file).map_err(|cause| GpuFileError { path: path.clone(), cause })?;
            locked.gpus.push(LockedGpu {
                uuid: gpu.clone(),
                path,
                file,
                line,
                was_ours: line.mig_ours,
                moved: false,
                slot,
            });
        }
        Ok(locked)
    }

    /// The generation of a GPU as it is now, without the lock: a hint.
    pub(super) fn peek(&self, gpu: &GpuUuid) -> Option<u64> {
        let file = File::open(self.path(gpu).ok()?).ok()?;
        Some(Line::read(&file).ok()?.generation)
    }

    fn slot(&self, gpu: &GpuUuid) -> Arc<Mutex<Slot>> {
        let mut gpus = self.gpus.lock().unwrap_or_else(PoisonError::into_inner);
        gpus.entry(gpu.clone()).or_default().clone()
    }

    fn path(&self, gpu: &GpuUuid) -> Result<PathBuf, GpuFileError> {
        let path = self.dir.join(gpu.as_str());
        match is_file_name(gpu.as_str()) {
            true => Ok(path),
            false => Err(GpuFileError { path, cause: io::ErrorKind::InvalidFilename.into() }),
        }
    }
}

impl Locked {
    /// All of them, in the order of UUIDs.
    pub fn gpus(&self) -> &[LockedGpu] {
        &self.gpus
    }

    /// All of them, to be changed.
    pub fn gpus_mut(&mut self) -> &mut [LockedGpu] {
        &mut self.gpus
    }

    /// One of them.
    pub fn gpu(&mut self, uuid: &GpuUuid) -> Option<&mut LockedGpu> {
        self.gpus.iter_mut().find(|gpu| gpu.uuid == *uuid)
    }

    /// Whether it covers all of these.
    pub fn covers(&self, gpus: &BTreeSet<GpuUuid>) -> bool {
        gpus.iter().all(|uuid| self.gpus.iter().any(|gpu| gpu.uuid == *uuid))
    }
}

impl LockedGpu {
    /// Which GPU.
    pub fn uuid(&self) -> &GpuUuid {
        &self.uuid
    }

    /// Whether MIG mode is on because we turned it on.
    pub fn mig_is_ours(&self) -> bool {
        self.line.mig_ours
    }

    /// Whether that was so already when the lock was taken.
    pub fn mig_was_ours(&self) -> bool {
        self.was_ours
    }

    /// Remembers who turned MIG mode on: before we do, and after it is off.
    pub fn set_mig_ours(&mut self, ours: bool) -> Result<(), GpuFileError> {
        if self.line.mig_ours == ours {
            return Ok(());
        }
        self.write(Line { mig_ours: ours, ..self.line })
    }

    /// Puts the task that will turn MIG mode off in place of the last one, which is ended.
    pub fn set_mode_off(&mut self, task: Option<tokio::task::AbortHandle>) {
        // It sleeps or waits for the lock that we hold: it has changed nothing.
        if let Some(last) = std::mem::replace(&mut self.slot.mode_off, task) {
            last.abort();
        }
    }

    /// Lets go of the task that has just run.
    pub fn mode_off_ran(&mut self) {
        self.slot.mode_off = None;
    }

    pub(super) fn is_indexed(&self) -> bool {
        self.slot.indexed_at == Some(self.line.generation)
    }

    pub(super) fn set_indexed(&mut self) {
        self.slot.indexed_at = Some(self.line.generation);
    }

    /// Tells other processes that their index of this GPU is out of date; once
    /// per lock is enough, since they look only after it is released.
    pub(super) fn move_on(&mut self) -> Result<(), GpuFileError> {
        if self.moved {
            return Ok(());
        }
        self.write(Line { generation: self.line.generation.wrapping_add(1), ..self.line })?;
        self.moved = true;
        self.slot.indexed_at = Some(self.line.generation);
        Ok(())
    }

    fn write(&mut self, line: Line) -> Result<(), GpuFileError> {
        self.file
            .write_all_at(line.text().as_bytes(), 0)
            .map_err(|cause| GpuFileError { path: self.path.clone(), cause })?;
        self.line = line;
        Ok(())
    }
}

impl Drop for LockedGpu {
    fn drop(&mut self) {
        // Cannot fail on a file that is locked; closing it would unlock as well.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

impl Line {
    fn text(self) -> String {
        format!("divvy 1 {:020} mig={}\n", self.generation, if self.mig_ours { "ours" } else { "rest" })
    }

    /// A new file, or one that the power took half of, is a GPU at rest: the
    /// hardware forgot as well. Every process then indexes it anew.
    fn read(file: &File) -> io::Result<Self> {
        let mut bytes = [0; 64];
        let length = file.read_at(&mut bytes, 0)?;
        Ok(std::str::from_utf8(&bytes[..length])
            .ok()
            .and_then(Self::parse)
            .unwrap_or(Self { generation: 0, mig_ours: false }))
    }

    fn parse(text: &str) -> Option<Self> {
        let mut words = text.strip_suffix('\n')?.split(' ');
        let (Some("divvy"), Some("1")) = (words.next(), words.next()) else { return None };
        let generation = words.next()?.parse().ok()?;
        match (words.next()?, words.next()) {
            ("mig=ours", None) => Some(Self { generation, mig_ours: true }),
            ("mig=rest", None) => Some(Self { generation, mig_ours: false }),
            _ => None,
        }
    }
}

/// Locks the file; while another process has it, a thread waits. If nobody
/// waits for the thread any more, what it gets is dropped and so released.
async fn lock_file(path: &Path, open: Option<Arc<File>>) -> io::Result<Arc<File>> {
    let file = match open {
        Some(file) => file,
        None => Arc::new(
            File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?,
        ),
    };
    match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => return Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => {}
        Err(cause) => return Err(cause.into()),
    }
    let (done, locked) = oneshot::channel();
    std::thread::Builder::new().name("gpu-lock".into()).stack_size(64 << 10).spawn(move || {
        let result = loop {
            match rustix::fs::flock(&file, FlockOperation::LockExclusive) {
                Err(rustix::io::Errno::INTR) => {}
                Err(cause) => break Err(cause.into()),
                Ok(()) => break Ok(file),
            }
        };
        // Nobody there: the file closes here, and the lock with it.
        drop(done.send(result));
    })?;
    locked.await.unwrap_or_else(|_| Err(io::ErrorKind::Interrupted.into()))
}

#[cfg(test)]
mod tests;
