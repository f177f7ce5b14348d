//! Record files: read, write, remove, quarantine. Callers hold the GPU locks ([`super::Records`]).

use super::debts::Debt;
use super::locks::GpuFileError;
use super::record::ClaimRecord;
use super::wire::{self, DecodeError};
use divvy_api::text::is_file_name;
use divvy_api::{ClaimUid, GpuUuid};
use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Longest UID, in bytes. Leaves space for suffixes: file systems allow names of 255 bytes (NAME_MAX).
pub(super) const MAX_NAME_BYTES: usize = 200;

/// A quarantined record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quarantined {
    /// Its path in quarantine.
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

impl RecordError {
    /// Whether the file is certainly no record.
    pub(super) fn is_no_record(&self) -> bool {
        match self {
            Self::Uid { .. } => true,
            Self::Read { cause, .. } => cause.kind() == io::ErrorKind::IsADirectory,
            _ => false,
        }
    }
}

#[derive(Debug)]
pub(super) struct Store {
    claims: PathBuf,
    quarantine: PathBuf,
    quarantined: AtomicU64,
    pub(super) debts: DebtFiles,
}

impl Store {
    /// Creates the directories and removes temporary files of interrupted writes.
    pub(super) fn open(state: &Path) -> io::Result<Self> {
        let store = Self {
            claims: state.join("claims"),
            quarantine: state.join("quarantine"),
            quarantined: AtomicU64::new(0),
            debts: DebtFiles::open(state)?,
        };
        for dir in [&store.claims, &store.quarantine] {
            private_dir(dir)?;
        }
        for entry in fs::read_dir(&store.claims)?.flatten() {
            if entry.path().extension().is_some_and(|extension| extension == "part") {
                // If this fails, the next start tries again.
                let _ = fs::remove_file(entry.path());
            }
        }
        Ok(store)
    }

    /// The claim's record. A record that cannot be decoded is quarantined and counts as absent.
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
            Err(cause @ DecodeError::Format { .. }) => {
                self.keep_debts(&bytes, &cause.to_string());
                cause.to_string()
            }
            Err(cause) => format!("damaged: {cause}"),
        };
        Ok(Err(self.move_to_quarantine(&path, cause)))
    }

    /// Writes what a record of a newer format says about the hardware as debts, before the record is
    /// quarantined: its claim may be in use.
    fn keep_debts(&self, bytes: &[u8], cause: &str) {
        let Some((claim, held, undo, epoch)) = wire::decode_newer(bytes) else { return };
        for debt in Debt::of_claim(&claim, &[], &held, &undo, &epoch, cause) {
            if let Err(error) = self.debts.add(&debt) {
                let error = &error as &dyn std::error::Error;
                let gpu = &debt.gpu;
                tracing::error!(%claim, %gpu, error, "cannot write the debt of a quarantined record");
            }
        }
    }

    /// UIDs of all records, sorted.
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

    /// Replaces the record atomically: a reader sees the old one or the new one.
    pub(super) fn write(&self, record: &ClaimRecord) -> Result<(), RecordError> {
        let path = self.path(&record.claim.uid)?;
        let written = wire::encode(record).map_err(io::Error::from).and_then(|bytes| {
            match replace(&path, &bytes) {
                // Another instance of the driver that just started removed the temporary file.
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => replace(&path, &bytes),
                result => result,
            }
        });
        written.map_err(|cause| RecordError::Write { path, cause })
    }

    /// Removes the record; succeeds if there is none.
    pub(super) fn remove(&self, uid: &ClaimUid) -> Result<(), RecordError> {
        let path = self.path(uid)?;
        match fs::remove_file(&path) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => Err(RecordError::Remove { path, cause }),
            _ => Ok(()),
        }
    }

    /// Number of records that were quarantined since the start.
    pub(super) fn quarantined(&self) -> u64 {
        self.quarantined.load(Ordering::Relaxed)
    }

    fn path(&self, uid: &ClaimUid) -> Result<PathBuf, RecordError> {
        if !is_file_name(uid.as_str(), MAX_NAME_BYTES) {
            return Err(RecordError::Uid { uid: uid.clone() });
        }
        Ok(self.claims.join(format!("{uid}.json")))
    }

    fn move_to_quarantine(&self, path: &Path, cause: String) -> Quarantined {
        let count = self.quarantined.fetch_add(1, Ordering::Relaxed);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let free = (0u32..).map(|n| self.quarantine.join(format!("{name}.{n}"))).find(|to| !to.exists());
        let to = free.unwrap_or_else(|| self.quarantine.join(format!("{name}.{count}")));
        match fs::rename(path, &to) {
            Ok(()) => tracing::error!(
                record = %path.display(), moved_to = %to.display(), cause,
                "record quarantined; GPU instances that only this record names are left alone"
            ),
            Err(error) => tracing::error!(
                record = %path.display(), cause, %error,
                "record cannot be decoded and cannot be moved to quarantine; treated as absent"
            ),
        }
        Quarantined { path: to, cause }
    }
}

/// Creates a directory that only root can access.
pub(super) fn private_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(dir)
}

/// Writes to a temporary file, then renames it. The temporary name is always the same, so an
/// interrupted write leaves at most one file, which the next write overwrites.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let part = path.with_extension("part");
    let mut file: File = File::options().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
    let result = file.write_all(bytes).and_then(|()| fs::rename(&part, path));
    if result.is_err() {
        // A left-over file would only take space; the first error is the one to report.
        let _ = fs::remove_file(&part);
    }
    result
}

/// The files of debts.
#[derive(Debug)]
pub(super) struct DebtFiles {
    dir: PathBuf,
}

impl DebtFiles {
    pub(super) fn open(state: &Path) -> io::Result<Self> {
        let dir = state.join("debts");
        private_dir(&dir)?;
        Ok(Self { dir })
    }

    /// The debts of a GPU, by claim. A file that cannot be decoded is skipped and logged.
    pub(super) fn of(&self, gpu: &GpuUuid) -> Vec<Debt> {
        if !is_file_name(gpu.as_str(), MAX_NAME_BYTES) {
            return Vec::new();
        }
        let mut debts = Vec::new();
        for path in
            fs::read_dir(self.dir.join(gpu.as_str())).into_iter().flatten().flatten().map(|it| it.path())
        {
            if path.extension().is_none_or(|extension| extension != "json") {
                continue;
            }
            match fs::read(&path)
                .map_err(|cause| cause.to_string())
                .and_then(|bytes| wire::decode_debt(&bytes).map_err(|cause| cause.to_string()))
            {
                Ok(debt) if debt.gpu == *gpu => debts.push(debt),
                Ok(debt) => {
                    tracing::error!(path = %path.display(), gpu = %debt.gpu, "debt of another GPU ignored");
                }
                Err(cause) => tracing::error!(path = %path.display(), cause, "debt cannot be read; ignored"),
            }
        }
        debts.sort_by(|one, other| one.claim.uid.cmp(&other.claim.uid));
        debts
    }

    /// The GPUs that have debts.
    pub(super) fn gpus(&self) -> Vec<GpuUuid> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| Some(GpuUuid::from(entry.file_name().to_str()?))).collect()
    }

    /// Adds a debt. The steps of an earlier debt of the claim stay.
    pub(super) fn add(&self, debt: &Debt) -> Result<(), RecordError> {
        let (dir, path) = self.path(&debt.gpu, &debt.claim.uid)?;
        let mut all = debt.clone();
        if let Some(before) = self.of(&debt.gpu).into_iter().find(|before| before.claim.uid == debt.claim.uid)
        {
            let new = all.undo.iter().filter(|undo| !before.undo.contains(undo)).cloned().collect::<Vec<_>>();
            all = Debt { undo: before.undo.into_iter().chain(new).collect(), ..all };
        }
        let written = private_dir(&dir).and_then(|()| replace(&path, &wire::encode_debt(&all)?));
        written.map_err(|cause| RecordError::Write { path, cause })
    }

    /// Removes the debt of a claim; succeeds if there is none.
    pub(super) fn remove(&self, gpu: &GpuUuid, claim: &ClaimUid) -> Result<(), RecordError> {
        let (dir, path) = self.path(gpu, claim)?;
        match fs::remove_file(&path) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => Err(RecordError::Remove { path, cause }),
            _ => {
                // Fails while other claims have debts on the GPU.
                let _ = fs::remove_dir(&dir);
                Ok(())
            }
        }
    }

    fn path(&self, gpu: &GpuUuid, claim: &ClaimUid) -> Result<(PathBuf, PathBuf), RecordError> {
        if !is_file_name(claim.as_str(), MAX_NAME_BYTES) || !is_file_name(gpu.as_str(), MAX_NAME_BYTES) {
            return Err(RecordError::Uid { uid: claim.clone() });
        }
        let dir = self.dir.join(gpu.as_str());
        let path = dir.join(format!("{claim}.json"));
        Ok((dir, path))
    }
}
