//! One lock per GPU, within this process and between processes.
//!
//! Within the process an async mutex queues fairly; between processes `flock` on
//! `<state>/gpus/<GPU UUID>` excludes. Several GPUs are locked in the order of their UUIDs, so two
//! claims cannot deadlock. The file also holds state that is agreed on under the lock: a
//! generation, which is bumped before a record of the GPU changes, and whether Divvy enabled MIG
//! mode. It is one line of fixed length, written at once: `divvy 1 00000000000000000042 mig=ours`.

use super::store::{MAX_NAME_BYTES, private_dir};
use divvy_api::GpuUuid;
use divvy_api::text::is_file_name;
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

/// Why the lock file of a GPU cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("GPU lock file {path} cannot be used")]
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

/// State of this process for a GPU, accessible only under the GPU's lock.
#[derive(Debug, Default)]
struct Slot {
    /// Kept open, so that locking and unlocking are one system call each.
    file: Option<Arc<File>>,
    /// The generation for which the index of this GPU is correct.
    indexed_at: Option<u64>,
    /// The task that waits to disable MIG mode.
    mig_off_task: Option<tokio::task::AbortHandle>,
}

/// Locked GPUs; unlocked when dropped.
#[derive(Debug)]
pub struct Locked {
    gpus: Vec<LockedGpu>,
}

/// One locked GPU.
#[derive(Debug)]
pub struct LockedGpu {
    uuid: GpuUuid,
    path: PathBuf,
    file: Arc<File>,
    line: Line,
    /// Whether Divvy had enabled MIG mode when the lock was taken.
    was_ours: bool,
    /// Whether the generation was bumped since the lock was taken.
    bumped: bool,
    slot: OwnedMutexGuard<Slot>,
}

/// The content of the lock file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Line {
    generation: u64,
    mig_ours: bool,
}

impl Locks {
    /// Opens the locks under the state directory.
    pub fn open(state: &Path) -> io::Result<Self> {
        let dir = state.join("gpus");
        private_dir(&dir)?;
        Ok(Self { dir, gpus: StdMutex::default() })
    }

    /// Locks all these GPUs, or none; fails after `within`.
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
                bumped: false,
                slot,
            });
        }
        Ok(locked)
    }

    /// The current generation of a GPU, read without the lock; only a hint.
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
        match is_file_name(gpu.as_str(), MAX_NAME_BYTES) {
            true => Ok(path),
            false => Err(GpuFileError { path, cause: io::ErrorKind::InvalidFilename.into() }),
        }
    }
}

impl Locked {
    /// The locked GPUs in the order of UUIDs.
    pub fn gpus(&self) -> &[LockedGpu] {
        &self.gpus
    }

    /// The locked GPUs, mutable.
    pub fn gpus_mut(&mut self) -> &mut [LockedGpu] {
        &mut self.gpus
    }

    /// One of the locked GPUs.
    pub fn gpu(&mut self, uuid: &GpuUuid) -> Option<&mut LockedGpu> {
        self.gpus.iter_mut().find(|gpu| gpu.uuid == *uuid)
    }

    /// Whether all these GPUs are locked.
    pub fn covers(&self, gpus: &BTreeSet<GpuUuid>) -> bool {
        gpus.iter().all(|uuid| self.gpus.iter().any(|gpu| gpu.uuid == *uuid))
    }
}

impl LockedGpu {
    /// The UUID of the GPU.
    pub fn uuid(&self) -> &GpuUuid {
        &self.uuid
    }

    /// Whether MIG mode is on because Divvy enabled it.
    pub fn mig_is_ours(&self) -> bool {
        self.line.mig_ours
    }

    /// Whether that was already so when the lock was taken.
    pub fn mig_was_ours(&self) -> bool {
        self.was_ours
    }

    /// Stores whether Divvy enabled MIG mode. Called before it is enabled and after it is disabled.
    pub fn set_mig_ours(&mut self, ours: bool) -> Result<(), GpuFileError> {
        if self.line.mig_ours == ours {
            return Ok(());
        }
        self.write(Line { mig_ours: ours, ..self.line })
    }

    /// Sets the task that will disable MIG mode, and aborts the earlier one.
    pub fn set_mig_off_task(&mut self, task: Option<tokio::task::AbortHandle>) {
        // The task sleeps or waits for the lock held here, so it has changed nothing.
        if let Some(last) = std::mem::replace(&mut self.slot.mig_off_task, task) {
            last.abort();
        }
    }

    /// Forgets the task, which is about to disable MIG mode.
    pub fn clear_mig_off_task(&mut self) {
        self.slot.mig_off_task = None;
    }

    pub(super) fn is_indexed(&self) -> bool {
        self.slot.indexed_at == Some(self.line.generation)
    }

    pub(super) fn set_indexed(&mut self) {
        self.slot.indexed_at = Some(self.line.generation);
    }

    /// Invalidates the index of other processes for this GPU. Once per lock is enough: the others
    /// read the generation only after this lock is released.
    pub(super) fn bump_generation(&mut self) -> Result<(), GpuFileError> {
        if self.bumped {
            return Ok(());
        }
        self.write(Line { generation: self.line.generation.wrapping_add(1), ..self.line })?;
        self.bumped = true;
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
        // Unlocking a locked file cannot fail, and closing it would unlock it too.
        let _ = rustix::fs::flock(&self.file, FlockOperation::Unlock);
    }
}

impl Line {
    fn text(self) -> String {
        format!("divvy 1 {:020} mig={}\n", self.generation, if self.mig_ours { "ours" } else { "rest" })
    }

    /// A new or damaged file counts as a GPU with MIG mode off: after a power failure the hardware
    /// is in that state too. Every process then indexes the GPU again.
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

/// Locks the file without blocking the runtime: a thread waits while another process has the lock. If
/// the caller stops waiting, the thread drops the file and so releases the lock.
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
        // If the receiver is gone, the file closes here and releases the lock.
        drop(done.send(result));
    })?;
    locked.await.unwrap_or_else(|_| Err(io::ErrorKind::Interrupted.into()))
}

#[cfg(test)]
mod tests;
