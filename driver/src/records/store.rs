//! Record files: read, replaced, removed, set aside.
//!
//! Nothing here knows who holds a lock; [`super::Records`] does.

use super::ClaimRecord;
use super::locks::GpuFileError;
use super::wire::{self, DecodeError};
use divvy_api::ClaimUid;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A record that was set aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantined {
    /// Where it lies now.
    pub path: PathBuf,
    pub cause: String,
}

/// Why a record could not be read, written or removed.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("{uid:?} cannot be the UID of a claim")]
    Uid { uid: ClaimUid },
    #[error("record {path} cannot be read")]
    Read {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("record {path} cannot be written")]
    Write {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("record {path} cannot be removed")]
    Remove {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error(transparent)]
    Gpu(#[from] GpuFileError),
}

#[derive(Debug)]
pub(super) struct Store {
    claims: PathBuf,
    quarantine: PathBuf,
    set_aside: AtomicU64,
}

impl Store {
    /// Makes the directories and sweeps what a killed write left.
    pub(super) fn open(state: &Path) -> io::Result<Self> {
        let store = Self {
            claims: state.join("claims"),
            quarantine: state.join("quarantine"),
            set_aside: AtomicU64::new(0),
        };
        for dir in [&store.claims, &store.quarantine] {
            private_dir(dir)?;
        }
        for entry in fs::read_dir(&store.claims)?.flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "part") {
                // The next sweep gets what this one cannot.
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(store)
    }

    /// The claim's record; one that cannot be understood is set aside and counts as none.
    pub(super) fn read(
        &self,
        uid: &ClaimUid,
    ) -> Result<Result<Option<ClaimRecord>, Quarantined>, RecordError> {
        let path = self.path(uid)?;
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Ok(None)),
            Err(cause) => return Err(RecordError::Read { path, cause }),
        };
        let cause = match wire::decode(&bytes) {
            Ok(record) if record.claim.uid == *uid => return Ok(Ok(Some(record))),
            Ok(record) => format!("it is the record of claim {}", record.claim.uid),
            Err(cause @ DecodeError::Format { .. }) => cause.to_string(),
            Err(cause) => format!("damaged: {cause}"),
        };
        Ok(Err(self.set_aside(&path, cause)))
    }

    /// UIDs of all records.
    pub(super) fn list(&self) -> Result<Vec<ClaimUid>, RecordError> {
        let unreadable = |cause| RecordError::Read { path: self.claims.clone(), cause };
        let mut uids = Vec::new();
        for entry in fs::read_dir(&self.claims).map_err(unreadable)? {
            let name = entry.map_err(unreadable)?.file_name();
            if let Some(uid) = name.to_str().and_then(|name| name.strip_suffix(".json")) {
                uids.push(ClaimUid::from(uid));
            }
        }
        uids.sort();
        Ok(uids)
    }

    /// Replaces the record at once: a reader sees the old one or the new one.
    pub(super) fn write(&self, record: &ClaimRecord) -> Result<(), RecordError> {
        let path = self.path(&record.claim.uid)?;
        let written = wire::encode(record).map_err(io::Error::from).and_then(|bytes| {
            match replace(&path, &bytes) {
                // An instance of the driver that starts beside us swept our file away.
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => replace(&path, &bytes),
                result => result,
            }
        });
        written.map_err(|cause| RecordError::Write { path, cause })
    }

    /// Removes the record; one that is not there is fine.
    pub(super) fn remove(&self, uid: &ClaimUid) -> Result<(), RecordError> {
        let path = self.path(uid)?;
        match fs::remove_file(&path) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => Err(RecordError::Remove { path, cause }),
            _ => Ok(()),
        }
    }

    /// How many records were set aside since the start.
    pub(super) fn quarantined(&self) -> u64 {
        self.set_aside.load(Ordering::Relaxed)
    }

    fn path(&self, uid: &ClaimUid) -> Result<PathBuf, RecordError> {
        if !is_file_name(uid.as_str()) {
            return Err(RecordError::Uid { uid: uid.clone() });
        }
        Ok(self.claims.join(format!("{uid}.json")))
    }

    fn set_aside(&self, path: &Path, cause: String) -> Quarantined {
        let count = self.set_aside.fetch_add(1, Ordering::Relaxed);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let free = (0u32..).map(|n| self.quarantine.join(format!("{name}.{n}"))).find(|to| !to.exists());
        let to = free.unwrap_or_else(|| self.quarantine.join(format!("{name}.{count}")));
        match fs::rename(path, &to) {
            Ok(()) => tracing::error!(
                record = %path.display(), moved_to = %to.display(), cause,
                "record set aside; GPU instances that only it explains are left alone"
            ),
            Err(error) => tracing::error!(
                record = %path.display(), cause, %error,
                "record cannot be read and cannot be set aside; it counts as none"
            ),
        }
        Quarantined { path: to, cause }
    }
}

/// Creates a directory that is root's alone.
pub(super) fn private_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Whether a text from outside can name a file: no path, nothing hidden.
pub(super) fn is_file_name(text: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !text.is_empty() && text.len() <= 200 && !text.starts_with('.') && text.chars().all(plain)
}

/// Writes beside, then renames over. The name beside is always the same, so
/// that a killed write leaves one file at most, which the next one reuses.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let part = path.with_extension("part");
    let mut file: File = File::options().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
    let result = file.write_all(bytes).and_then(|()| fs::rename(&part, path));
    if result.is_err() {
        // What is left over would only take space; the first error is the one to tell.
        let _ = fs::remove_file(&part);
    }
    result
}
