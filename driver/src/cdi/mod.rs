//! CDI: how a prepared claim reaches a container.
//!
//! One file per claim, written at once by a rename, holds the claim's devices
//! ([`nodes`]), the GPU driver's files that every container needs ([`files`])
//! and one hook that makes them findable; a share brings its pages and the library
//! that keeps its limits ([`library`]). Paths on the host are those below the
//! driver root, paths in the container are the same without it, so an
//! unmodified image sees the layout that the GPU driver was made for.
//!
//! A file's content depends on the claim, the hardware and the GPU driver
//! alone; writing it twice gives the same bytes and the same ids. What does not
//! depend on the claim is found once and kept until the driver's files change.

pub mod document;
pub mod elf;
pub mod files;
pub mod hook;
pub mod library;
mod metadata;
pub mod nodes;
mod spec;

pub use hook::HookMode;
pub use library::Library;
pub use nodes::DeviceNodes;

use crate::paths::HostPaths;
use crate::sharing::MpsLimits;
use divvy_api::sharing::Injection;
use divvy_api::{AllocatedClaim, ClaimUid, DeviceName, RequestName, ShareId};
use divvy_model::Inventory;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// A fully qualified CDI device, `gpu.divvy.dev/claim=<uid>-<device>`, with
/// `-<shareID>` behind it where the claim shares the device: it may hold two shares.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CdiId(String);

impl CdiId {
    /// The id of a device of a claim: the same for every prepare, before and after a restart.
    pub fn new(claim: &ClaimUid, device: &DeviceName, share: Option<&ShareId>) -> Self {
        Self(format!("{}={}", divvy_api::names::CDI_KIND, spec::device_name(claim, device, share)))
    }

    /// As the kubelet wants it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<CdiId> for String {
    fn from(id: CdiId) -> Self {
        id.0
    }
}

impl std::fmt::Display for CdiId {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

/// A device of a claim and what of the hardware it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimDevice {
    pub request: RequestName,
    pub device: DeviceName,
    pub share: Option<ShareId>,
    pub nodes: DeviceNodes,
    pub mps: Option<MpsClient>,
    /// Of a share, how its limits come into a container.
    pub injection: Option<Injection>,
}

/// What makes processes of a container clients of an MPS control daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MpsClient {
    /// The daemon's directory on the host.
    pub dir: PathBuf,
    pub limits: MpsLimits,
}

/// Writes and removes the CDI files of claims. A clone shares the cache.
#[derive(Clone, Debug)]
pub struct Cdi {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    paths: HostPaths,
    hook: HookMode,
    /// Where the library for shares comes from.
    library_dir: PathBuf,
    library: Mutex<Option<Library>>,
    /// Edits common to all claims, with the state of the files they were made of.
    common: Mutex<Option<spec::Common>>,
}

/// Why no claim can be given to a container on this node.
#[derive(Debug, thiserror::Error)]
pub enum ReadinessError {
    #[error("CDI directory {path} cannot be written; create it, or name another with --cdi-dir")]
    Directory {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error(transparent)]
    Files(#[from] files::FilesError),
    #[error(transparent)]
    Hook(#[from] hook::HookError),
    #[error(transparent)]
    Library(#[from] library::LibraryError),
    #[error(transparent)]
    Nodes(#[from] nodes::NodesError),
}

/// Why the CDI file of a claim was not written or removed.
#[derive(Debug, thiserror::Error)]
pub enum CdiError {
    #[error("claim {claim}: CDI file {path} cannot be written")]
    Write {
        claim: ClaimUid,
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("claim {claim}: CDI file {path} cannot be removed")]
    Remove {
        claim: ClaimUid,
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("claim {claim}, device {device}: no device nodes for it")]
    Nodes {
        claim: ClaimUid,
        device: DeviceName,
        #[source]
        cause: nodes::NodesError,
    },
    #[error("claim {claim}: the node is not ready for containers with GPUs")]
    NotReady {
        claim: ClaimUid,
        #[source]
        cause: ReadinessError,
    },
}

impl Cdi {
    /// Nothing is read or written yet.
    pub fn new(paths: &HostPaths, hook: HookMode, library_dir: &Path) -> Self {
        let shared = Shared {
            paths: paths.clone(),
            hook,
            library_dir: library_dir.to_owned(),
            library: Mutex::default(),
            common: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The node's paths.
    pub fn paths(&self) -> &HostPaths {
        &self.shared.paths
    }

    /// The library for shares, put in place where it is not.
    pub fn library(&self) -> Result<Library, library::LibraryError> {
        let mut known = self.shared.library.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = known.as_ref().filter(|library| library.is_there()) {
            return Ok(library.clone());
        }
        let library = Library::install(&self.shared.library_dir, &self.shared.paths.plugin_dir())?;
        *known = Some(library.clone());
        Ok(library)
    }

    /// Whether a claim could be written now: the directory can be written, the
    /// driver's files and the hook are there, the device nodes are or could be made.
    /// Blocks for as long as `nvidia-modprobe` may take.
    pub fn check(&self) -> Result<(), ReadinessError> {
        let dir = &self.shared.paths.cdi_dir;
        rustix::fs::access(dir, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)
            .map_err(|cause| ReadinessError::Directory { path: dir.clone(), cause: cause.into() })?;
        self.check_common()?;
        nodes::ensure_gpus(&self.shared.paths)?;
        Ok(())
    }

    /// Writes the claim's file and answers the ids of its devices, in the order given.
    pub fn write_claim(&self, claim: &ClaimUid, devices: &[ClaimDevice]) -> Result<Vec<CdiId>, CdiError> {
        self.put(claim, devices, &self.render(claim, devices)?)
    }

    /// The same, if it takes a look and a write and nothing that may be slow;
    /// else none, and nothing is written.
    pub fn write_claim_at_once(
        &self,
        claim: &ClaimUid,
        devices: &[ClaimDevice],
    ) -> Option<Result<Vec<CdiId>, CdiError>> {
        let json = self.render_at_once(claim, devices)?;
        Some(json.and_then(|json| self.put(claim, devices, &json)))
    }

    fn put(&self, claim: &ClaimUid, devices: &[ClaimDevice], json: &[u8]) -> Result<Vec<CdiId>, CdiError> {
        let path = self.file(claim);
        replace(&path, json).map_err(|cause| CdiError::Write { claim: claim.clone(), path, cause })?;
        Ok(devices.iter().map(|of| CdiId::new(claim, &of.device, of.share.as_ref())).collect())
    }

    /// Writes what programs in the container can read of the claim's devices; the
    /// claim's file written after it shows it to them.
    pub fn write_metadata(&self, claim: &AllocatedClaim, inventory: &Inventory) {
        if let Err(cause) = metadata::write(&self.metadata_dir(), claim, inventory) {
            tracing::warn!(claim = %claim.claim, %cause, "its containers get no device metadata");
        }
    }

    fn metadata_dir(&self) -> PathBuf {
        self.shared.paths.state_dir.join("metadata")
    }

    /// Removes the claim's file, and what a write that was killed left of it;
    /// what is not there is fine.
    pub fn remove_claim(&self, claim: &ClaimUid) -> Result<(), CdiError> {
        let file = self.file(claim);
        for path in [unfinished(&file), file] {
            match std::fs::remove_file(&path) {
                // Where no directory is, no file is.
                Err(cause)
                    if !matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
                {
                    return Err(CdiError::Remove { claim: claim.clone(), path, cause });
                }
                _ => {}
            }
        }
        // After the file that names it.
        let path = self.metadata_dir();
        metadata::remove(&path, claim).map_err(|cause| CdiError::Remove { claim: claim.clone(), path, cause })
    }

    /// Whether the claim's file holds exactly what [`Self::write_claim`] would write now.
    /// Blocks for as long as `nvidia-modprobe` may take.
    pub fn claim_is_written(&self, claim: &ClaimUid, devices: &[ClaimDevice]) -> bool {
        self.render(claim, devices).is_ok_and(|json| self.holds(claim, &json))
    }

    /// The same, if it takes a look and nothing that may be slow; else none.
    pub fn claim_is_written_at_once(&self, claim: &ClaimUid, devices: &[ClaimDevice]) -> Option<bool> {
        let json = self.render_at_once(claim, devices)?;
        Some(json.is_ok_and(|json| self.holds(claim, &json)))
    }

    fn holds(&self, claim: &ClaimUid, json: &[u8]) -> bool {
        std::fs::read(self.file(claim)).is_ok_and(|have| have == json)
    }

    /// `<CDI directory>/gpu.divvy.dev-claim_<uid>.json`.
    fn file(&self, claim: &ClaimUid) -> PathBuf {
        self.shared.paths.cdi_dir.join(format!("{}-claim_{claim}.json", divvy_api::names::DRIVER))
    }
}

/// Where a file is written before it is put at `path`. The runtime reads every
/// .json and .yaml file; this one is neither.
fn unfinished(path: &Path) -> PathBuf {
    path.with_extension("part")
}

/// Puts `bytes` at `path` at once: a reader sees the old file or the new one.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let part = unfinished(path);
    let result = std::fs::write(&part, bytes).and_then(|()| std::fs::rename(&part, path));
    if result.is_err() {
        // What is left over would only take space; the first error is the one to tell.
        let _ = std::fs::remove_file(&part);
    }
    result
}

#[cfg(test)]
mod tests;
