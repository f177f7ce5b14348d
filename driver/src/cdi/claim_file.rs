//! The CDI files of claims: one file per claim, replaced atomically.
//!
//! A file holds the claim's devices ([`nodes`]), the GPU driver's files that every container needs
//! ([`files`]), and a hook that makes them findable. A share adds its pages and the library that
//! enforces its limits ([`library`]). Paths in the container are those on the host without the
//! driver root. The contents depend only on the claim, the hardware and the GPU driver, so writing
//! a file again gives the same bytes and ids.

use crate::cdi::document::{self, Device, DeviceNode, Document, Edits, Hook, Mount};
use crate::cdi::files::{self, MountedFile};
use crate::cdi::files::{DriverFiles, Fingerprint};
use crate::cdi::hook;
use crate::cdi::hook::HookMode;
use crate::cdi::library;
use crate::cdi::library::{IN_CONTAINER, Library, REAL, SHIMMED_LIBRARIES};
use crate::cdi::metadata;
use crate::cdi::nodes;
use crate::cdi::nodes::{CommonNodes, DeviceNodes, Majors};
use crate::containers::Containers;
use crate::gpu::sharing::MpsLimits;
use crate::paths::HostPaths;
use crate::shares;
use crate::shares::Shares;
use divvy_api::mps::CONTAINER_PIPE;
use divvy_api::sharing::Injection;
use divvy_api::{AllocatedClaim, ClaimRef, ClaimUid, DeviceName, RequestName, ShareId};
use divvy_model::Inventory;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// A fully qualified CDI device, `gpu.divvy.dev/claim=<uid>-<device>`. A shared device ends in
/// `-<shareID>`, because a claim may hold two shares of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CdiId(String);

impl CdiId {
    /// The id of a claim's device, the same for every prepare and after a restart.
    pub fn new(claim: &ClaimUid, device: &DeviceName, share: Option<&ShareId>) -> Self {
        Self(format!("{}={}", divvy_api::names::CDI_KIND, device_name(claim, device, share)))
    }

    /// The id in the form that the kubelet expects.
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

/// A device of a claim and its hardware.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClaimDevice {
    pub request: RequestName,
    pub device: DeviceName,
    pub share: Option<ShareId>,
    pub nodes: DeviceNodes,
    pub mps: Option<MpsClient>,
    /// For a share: how the library gets into the container.
    pub injection: Option<Injection>,
}

/// Configuration that makes the processes of a container clients of an MPS control daemon.
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
    /// Source directory of the library for shares.
    library_dir: PathBuf,
    library: Mutex<Option<Library>>,
    /// Edits common to all claims, with the state of the files that they were made from.
    common: Mutex<Option<Common>>,
}

/// Why containers on this node cannot get GPUs.
#[derive(Debug, thiserror::Error)]
pub enum ReadinessError {
    #[error("CDI directory {path} cannot be written; create it, or choose another with --cdi-dir")]
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
    #[error("claim {claim}, device {device}: its device nodes cannot be determined")]
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
    /// Creates the writer; nothing is read or written yet.
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

    /// The library for shares, installed on the host if necessary.
    pub fn library(&self) -> Result<Library, library::LibraryError> {
        let mut known = self.shared.library.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = known.as_ref().filter(|library| library.exists()) {
            return Ok(library.clone());
        }
        let library = Library::install(&self.shared.library_dir, &self.shared.paths.plugin_dir())?;
        *known = Some(library.clone());
        Ok(library)
    }

    /// Checks that a claim could be written now: the directory is writable, the driver's files and the
    /// hook exist, and the device nodes exist or can be created. May block while `nvidia-modprobe` runs.
    pub fn check(&self) -> Result<(), ReadinessError> {
        let dir = &self.shared.paths.cdi_dir;
        rustix::fs::access(dir, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)
            .map_err(|cause| ReadinessError::Directory { path: dir.clone(), cause: cause.into() })?;
        self.check_common()?;
        nodes::ensure_gpus(&self.shared.paths)?;
        Ok(())
    }

    /// Writes the claim's file and returns the ids of its devices, in the given order. May block while
    /// `nvidia-modprobe` runs.
    pub fn write_claim(&self, claim: &ClaimUid, devices: &[ClaimDevice]) -> Result<Vec<CdiId>, CdiError> {
        self.write_file(claim, devices, &self.render(claim, devices)?)
    }

    /// The same without slow operations; `None` if one would be needed, and then nothing is written.
    pub fn write_claim_nonblocking(
        &self,
        claim: &ClaimUid,
        devices: &[ClaimDevice],
    ) -> Option<Result<Vec<CdiId>, CdiError>> {
        let json = self.render_nonblocking(claim, devices)?;
        Some(json.and_then(|json| self.write_file(claim, devices, &json)))
    }

    fn write_file(
        &self,
        claim: &ClaimUid,
        devices: &[ClaimDevice],
        json: &[u8],
    ) -> Result<Vec<CdiId>, CdiError> {
        let path = self.file(claim);
        replace(&path, json).map_err(|cause| CdiError::Write { claim: claim.clone(), path, cause })?;
        Ok(devices.iter().map(|of| CdiId::new(claim, &of.device, of.share.as_ref())).collect())
    }

    /// Writes the device metadata that programs in the container can read. The claim's CDI file must
    /// be written after it, to mount it.
    pub fn write_metadata(&self, claim: &AllocatedClaim, inventory: &Inventory) {
        if let Err(cause) = metadata::write(&self.metadata_dir(), claim, inventory) {
            let claim = &claim.claim;
            tracing::warn!(%claim, %cause, "cannot write device metadata; containers of the claim get none");
        }
    }

    fn metadata_dir(&self) -> PathBuf {
        self.shared.paths.state_dir.join(metadata::DIRECTORY)
    }

    /// The claim's files in the CDI directory, finished or not, of all claims.
    pub fn claim_files(&self) -> Vec<(ClaimUid, PathBuf)> {
        let claim = |(name, path): (String, PathBuf)| Some((claim_of_file(&name)?, path));
        entries(&self.shared.paths.cdi_dir).filter_map(claim).collect()
    }

    /// The directories of device metadata, of all claims.
    pub fn claim_metadata(&self) -> Vec<(ClaimUid, PathBuf)> {
        entries(&self.metadata_dir()).map(|(name, path)| (ClaimUid::from(name), path)).collect()
    }

    /// The claim that has metadata under this UID.
    pub fn described_claim(&self, claim: &ClaimUid) -> Option<ClaimRef> {
        metadata::claim_ref(&self.metadata_dir(), claim)
    }

    /// Versions of the library that are not current and that no claim's file names, with their
    /// directories. Empty if the current version is not known.
    pub fn unused_libraries(&self) -> Vec<(String, PathBuf)> {
        let Ok(library) = self.library() else { return Vec::new() };
        let mut versions = library.other_versions(&self.shared.paths.plugin_dir());
        for (_, path) in self.claim_files() {
            match std::fs::read_to_string(&path) {
                Ok(json) => {
                    versions.retain(|(hash, _)| !json.contains(&format!("/{}/{hash}/", library::DIRECTORY)))
                }
                // It may name any of them.
                Err(_) => return Vec::new(),
            }
        }
        versions
    }

    /// Removes the claim's file and keeps everything that it is made from, so that it can be written
    /// again. Returns whether there was a file.
    pub fn withhold_claim(&self, claim: &ClaimUid) -> Result<bool, CdiError> {
        let path = self.file(claim);
        let existed = path.exists();
        self.remove_file(claim)?;
        Ok(existed)
    }

    /// Whether the claim's file exists and names exactly these GPUs, by minor.
    pub fn claim_names_gpus(&self, claim: &ClaimUid, minors: &BTreeSet<u32>) -> bool {
        let read = std::fs::read(self.file(claim)).ok();
        read.and_then(|json| document::gpu_minors(&json)).is_some_and(|named| named == *minors)
    }

    /// Removes the claim's file and the temporary file of an interrupted write; succeeds if there is
    /// none.
    pub fn remove_claim(&self, claim: &ClaimUid) -> Result<(), CdiError> {
        self.remove_file(claim)?;
        if let Err(cause) = Containers::new(&self.shared.paths).forget(claim) {
            // The next start removes them.
            tracing::warn!(%claim, %cause, "registered containers of the claim not forgotten");
        }
        // After the file that mounts it.
        let path = self.metadata_dir();
        metadata::remove(&path, claim).map_err(|cause| CdiError::Remove { claim: claim.clone(), path, cause })
    }

    fn remove_file(&self, claim: &ClaimUid) -> Result<(), CdiError> {
        let file = self.file(claim);
        for path in [unfinished(&file), file] {
            match std::fs::remove_file(&path) {
                // A missing directory has no files.
                Err(cause)
                    if !matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
                {
                    return Err(CdiError::Remove { claim: claim.clone(), path, cause });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Whether the claim's file has exactly the contents that [`Self::write_claim`] would write. May
    /// block while `nvidia-modprobe` runs.
    pub fn claim_is_written(&self, claim: &ClaimUid, devices: &[ClaimDevice]) -> bool {
        self.render(claim, devices).is_ok_and(|json| self.file_equals(claim, &json))
    }

    /// The same without slow operations; `None` if one would be needed.
    pub fn claim_is_written_nonblocking(&self, claim: &ClaimUid, devices: &[ClaimDevice]) -> Option<bool> {
        let json = self.render_nonblocking(claim, devices)?;
        Some(json.is_ok_and(|json| self.file_equals(claim, &json)))
    }

    fn file_equals(&self, claim: &ClaimUid, json: &[u8]) -> bool {
        std::fs::read(self.file(claim)).is_ok_and(|have| have == json)
    }

    /// `<CDI directory>/gpu.divvy.dev-claim_<uid>.json`.
    fn file(&self, claim: &ClaimUid) -> PathBuf {
        self.shared.paths.cdi_dir.join(claim_file_name(claim))
    }
}

/// The name of a claim's file in the CDI directory.
pub fn claim_file_name(claim: &ClaimUid) -> String {
    format!("{}-claim_{claim}.json", divvy_api::names::DRIVER)
}

/// The claim to which a file of that name in the CDI directory belongs; `None` for other files.
pub fn claim_of_file(name: &str) -> Option<ClaimUid> {
    let claim = name.strip_prefix(divvy_api::names::DRIVER)?.strip_prefix("-claim_")?;
    let claim = claim.strip_suffix(".json").or_else(|| claim.strip_suffix(".part"))?;
    Some(claim.into())
}

/// Names and paths in a directory; empty if it cannot be read.
fn entries(dir: &Path) -> impl Iterator<Item = (String, PathBuf)> + use<> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
}

/// Path of the temporary file for `path`. The runtime reads every .json and .yaml file, so it has
/// another extension.
fn unfinished(path: &Path) -> PathBuf {
    path.with_extension("part")
}

/// Writes `bytes` to `path` atomically: a reader sees the old file or the new one.
pub(super) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let part = unfinished(path);
    let result = std::fs::write(&part, bytes).and_then(|()| std::fs::rename(&part, path));
    if result.is_err() {
        // A left-over file would only take space; the first error is the one to report.
        let _ = std::fs::remove_file(&part);
    }
    result
}

/// Directory in containers with the CDI files of their claims. It is not below `/run/divvy`, where the
/// share audit accepts only pages and the library.
const CLAIMS_IN_CONTAINER: &str = "/run/divvy-claims";
const MOUNT_OPTIONS: &[&str] = &["ro", "nosuid", "nodev", "rbind", "rprivate"];
/// Options for files that are only read.
const DATA_OPTIONS: &[&str] = &["ro", "nosuid", "nodev", "noexec", "bind", "rprivate"];
/// Options for account pages, which processes of one share write.
const ACCOUNT_OPTIONS: &[&str] = &["rw", "nosuid", "nodev", "noexec", "bind", "rprivate"];
/// Options for directories that clients of one MPS daemon write.
const SHARED_OPTIONS: &[&str] = &["rw", "nosuid", "nodev", "noexec", "rbind", "rprivate"];
/// Timeout of the runtime for a hook, in seconds. The hook itself stops earlier.
const HOOK_TIMEOUT_SECONDS: u32 = 15;

/// Edits that every claim has, and the state that they were made from.
#[derive(Clone, Debug)]
struct Common {
    fingerprint: Fingerprint,
    nodes: CommonNodes,
    hook: Option<PathBuf>,
    edits: Arc<Edits>,
    shimmed: Arc<[ShimmedLibrary]>,
}

/// A library of the GPU driver that a shim can replace.
#[derive(Clone, Debug)]
struct ShimmedLibrary {
    /// Index in [`SHIMMED_LIBRARIES`].
    at: usize,
    host: PathBuf,
    /// All paths of the library in a container, except links that the hook creates.
    names: Vec<PathBuf>,
}

/// Inputs of a CDI document besides the claim.
struct Parts {
    common: Arc<Edits>,
    majors: Majors,
    hook: Option<PathBuf>,
    shimmed: Arc<[ShimmedLibrary]>,
}

impl Parts {
    /// A call of the hook with an option and its directory.
    fn hook_with(&self, stage: &'static str, option: &str, dir: &Path) -> Option<Hook> {
        let path = text(self.hook.as_deref()?);
        let args = ["divvy-hook", option, &text(dir)].map(str::to_owned).to_vec();
        Some(Hook { hook_name: stage, path, args, timeout: HOOK_TIMEOUT_SECONDS })
    }

    /// The hooks that report a container in the directory, and that remove the report.
    fn report(&self, option: &str, dir: &Path) -> impl Iterator<Item = Hook> {
        ["createRuntime", "poststop"].into_iter().filter_map(move |stage| self.hook_with(stage, option, dir))
    }
}

impl Common {
    /// Whether the state is unchanged.
    fn is_current(&self, proc_root: &Path, nodes: &CommonNodes) -> bool {
        self.nodes == *nodes
            && self.fingerprint.is_current(proc_root)
            && self.hook.as_ref().is_none_or(|path| path.exists())
    }

    fn parts(&self, majors: Majors) -> Parts {
        let Self { edits, hook, shimmed, .. } = self;
        Parts { common: edits.clone(), majors, hook: hook.clone(), shimmed: shimmed.clone() }
    }
}

impl Cdi {
    /// Checks that the common edits can be made now.
    fn check_common(&self) -> Result<(), ReadinessError> {
        self.common().map(|_| ())
    }

    /// The common edits, made again if the files or nodes changed.
    fn common(&self) -> Result<Parts, ReadinessError> {
        let paths = &self.shared.paths;
        let (nodes, majors) = CommonNodes::find(paths)?;
        let mut cached = self.shared.common.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(common) = cached.as_ref().filter(|common| common.is_current(&paths.proc_root, &nodes)) {
            return Ok(common.parts(majors));
        }
        let fingerprint = Fingerprint::take(&paths.local_path(&paths.driver_root), &paths.proc_root);
        let files = DriverFiles::find(paths, &fingerprint)?;
        let hook = hook::install(&self.shared.hook, &paths.plugin_dir())?;
        let edits = Arc::new(edits(&files, &nodes, hook.as_deref()));
        let shimmed = shimmed(&files, hook.as_deref());
        let common = Common { fingerprint, nodes, hook, edits, shimmed };
        let parts = common.parts(majors);
        *cached = Some(common);
        Ok(parts)
    }

    /// The cached common edits, if nothing changed and no other thread is making them.
    fn cached_common(&self) -> Option<Parts> {
        let paths = &self.shared.paths;
        let (nodes, majors) = CommonNodes::find_existing(paths)?;
        let cached = self.shared.common.try_lock().ok()?;
        let common = cached.as_ref().filter(|common| common.is_current(&paths.proc_root, &nodes))?;
        Some(common.parts(majors))
    }

    /// The contents of a claim's file.
    fn render(&self, claim: &ClaimUid, devices: &[ClaimDevice]) -> Result<Vec<u8>, CdiError> {
        let parts = self.common().map_err(|cause| CdiError::NotReady { claim: claim.clone(), cause })?;
        let nodes = |of: &ClaimDevice| {
            let fail = |cause| CdiError::Nodes { claim: claim.clone(), device: of.device.clone(), cause };
            of.nodes.nodes(&self.shared.paths, &parts.majors).map_err(fail)
        };
        let nodes = devices.iter().map(nodes).collect::<Result<_, _>>()?;
        self.document(claim, devices, nodes, &parts)
    }

    /// The same without slow operations: no search below the driver root, no module to load and no
    /// node to create. `None` if one would be needed.
    fn render_nonblocking(
        &self,
        claim: &ClaimUid,
        devices: &[ClaimDevice],
    ) -> Option<Result<Vec<u8>, CdiError>> {
        let parts = self.cached_common()?;
        let nodes = |of: &ClaimDevice| of.nodes.existing(&self.shared.paths, &parts.majors).ok();
        let nodes = devices.iter().map(nodes).collect::<Option<_>>()?;
        Some(self.document(claim, devices, nodes, &parts))
    }

    fn document(
        &self,
        claim: &ClaimUid,
        devices: &[ClaimDevice],
        nodes: Vec<Vec<DeviceNode>>,
        parts: &Parts,
    ) -> Result<Vec<u8>, CdiError> {
        let shares = devices.iter().any(|device| device.injection.is_some());
        let library = shares.then(|| self.library()).transpose().map_err(|cause| {
            let cause = ReadinessError::Library(cause);
            CdiError::NotReady { claim: claim.clone(), cause }
        })?;
        let mut rendered: Vec<Device> = Vec::with_capacity(devices.len());
        // Each file is mounted once, with the first device of its request.
        let mut files = metadata::mounts(&self.metadata_dir(), claim);
        for (of, nodes) in devices.iter().zip(nodes) {
            let ClaimDevice { request, device, share, mps, .. } = of;
            let name = device_name(claim, device, share.as_ref());
            let mut edits = match (mps, share, of.injection, &library) {
                (Some(client), ..) => client_edits(client),
                (None, Some(share), Some(injection), Some(library)) => {
                    self.share_edits(claim, share, injection, library, parts)
                }
                _ => Edits::default(),
            };
            edits.mounts.extend(files.remove(request.as_str()));
            // A device may occur twice, once with adminAccess, which adds only nodes. Both become one entry.
            match rendered.iter_mut().find(|have| have.name == name) {
                None => {
                    rendered.push(Device { name, container_edits: Edits { device_nodes: nodes, ..edits } })
                }
                Some(Device { container_edits: have, .. }) => {
                    let new: Vec<_> =
                        nodes.into_iter().filter(|node| !have.device_nodes.contains(node)).collect();
                    have.device_nodes.extend(new);
                    have.env.extend(edits.env);
                    have.mounts.extend(edits.mounts);
                    have.hooks.extend(edits.hooks);
                }
            }
        }
        let own = self.own_edits(claim, parts);
        serde_json::to_vec(&Document::new(&rendered, &parts.common, &own)).map_err(|cause| CdiError::Write {
            claim: claim.clone(),
            path: self.file(claim),
            cause: cause.into(),
        })
    }

    /// Two signs that a container uses the claim: the container is registered, and it mounts the claim's
    /// file itself. No other mount exists in every mode and for certain: a container cannot
    /// start with a device of the claim without this file.
    fn own_edits(&self, claim: &ClaimUid, parts: &Parts) -> Edits {
        let mount = Mount {
            host_path: text(&self.file(claim)),
            container_path: format!("{CLAIMS_IN_CONTAINER}/{claim}.json"),
            options: DATA_OPTIONS,
        };
        let registered = Containers::new(&self.shared.paths).of(claim);
        let hooks = parts.report("--process", &registered).collect();
        Edits { mounts: vec![mount], hooks, ..Edits::default() }
    }
}

impl Cdi {
    /// The mounts and hooks of a share: its pages and the library. They belong to the device and not
    /// to the document, because another container of the pod may use only a whole GPU of the claim.
    fn share_edits(
        &self,
        claim: &ClaimUid,
        share: &ShareId,
        injection: Injection,
        library: &Library,
        parts: &Parts,
    ) -> Edits {
        let shares = Shares::new(&self.shared.paths);
        let dir = shares.of(claim, share);
        let mount = |host: &Path, container: &Path, options| Mount {
            host_path: text(host),
            container_path: text(container),
            options,
        };
        let inside = Path::new(shares::IN_CONTAINER).join(claim.as_str()).join(share.as_str());
        let page = |name: &str, options| mount(&dir.join(name), &inside.join(name), options);
        let mut mounts = vec![page(shares::POLICY, DATA_OPTIONS), page(shares::ACCOUNT, ACCOUNT_OPTIONS)];
        match injection {
            Injection::Preload => mounts.extend([
                mount(&library.preloaded, Path::new(IN_CONTAINER), MOUNT_OPTIONS),
                mount(&library.list, Path::new("/etc/ld.so.preload"), DATA_OPTIONS),
            ]),
            Injection::Shim => {
                for ShimmedLibrary { at, host, names } in parts.shimmed.iter() {
                    let shim = &library.shims[*at];
                    mounts.push(mount(host, &Path::new(REAL).join(SHIMMED_LIBRARIES[*at]), MOUNT_OPTIONS));
                    mounts.extend(names.iter().map(|name| mount(shim, name, MOUNT_OPTIONS)));
                }
            }
        }
        let list = (injection == Injection::Preload)
            .then(|| parts.hook_with("createContainer", "--preload", &dir.join(shares::PRELOAD)));
        let hooks = parts.report("--cgroups", &dir.join(shares::CGROUPS)).chain(list.flatten()).collect();
        Edits { mounts, hooks, ..Edits::default() }
    }
}

/// The libraries of the GPU driver that shims can replace.
fn shimmed(files: &DriverFiles, hook: Option<&Path>) -> Arc<[ShimmedLibrary]> {
    let linked = if hook.is_some() { Vec::new() } else { other_names(files) };
    let known = |library: &files::Library| {
        let at = SHIMMED_LIBRARIES.iter().position(|name| library.soname.as_deref() == Some(name))?;
        let MountedFile { host, container } = library.file.clone();
        // The soname, and the name of the file.
        let mut names = vec![container.with_file_name(SHIMMED_LIBRARIES[at]), container];
        for (_, link) in linked.iter().filter(|(file, _)| *file == host) {
            if !names.contains(link) {
                names.push(link.clone());
            }
        }
        Some(ShimmedLibrary { at, host, names })
    };
    files.libraries.iter().filter_map(known).collect()
}

/// The part of a CDI id after the `=`.
fn device_name(claim: &ClaimUid, device: &DeviceName, share: Option<&ShareId>) -> String {
    match share {
        None => format!("{claim}-{device}"),
        Some(share) => format!("{claim}-{device}-{share}"),
    }
}

/// The variables that libcuda reads, and the directories that clients share with the server. In a
/// container the device has ordinal 0.
fn client_edits(client: &MpsClient) -> Edits {
    let mut env = vec![format!("CUDA_MPS_PIPE_DIRECTORY={CONTAINER_PIPE}")];
    if let Some(threads) = client.limits.threads {
        env.push(format!("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={threads}"));
    }
    if let Some(memory) = client.limits.memory_mib {
        env.push(format!("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0={memory}M"));
    }
    let mount = |host: &str, container: &str| Mount {
        host_path: text(&client.dir.join(host)),
        container_path: container.to_owned(),
        options: SHARED_OPTIONS,
    };
    let mounts = vec![mount("pipe", CONTAINER_PIPE), mount("shm", "/dev/shm")];
    Edits { env, mounts, ..Edits::default() }
}

fn edits(files: &DriverFiles, nodes: &CommonNodes, hook: Option<&Path>) -> Edits {
    let mut mounts: Vec<Mount> = Vec::new();
    let mut mount = |host: &Path, container: &Path| {
        mounts.push(Mount { host_path: text(host), container_path: text(container), options: MOUNT_OPTIONS });
    };
    for MountedFile { host, container } in
        files.libraries.iter().map(|library| &library.file).chain(&files.others)
    {
        mount(host, container);
    }
    let hooks = match hook {
        Some(path) => vec![Hook {
            hook_name: "createContainer",
            path: text(path),
            args: hook_args(files),
            timeout: HOOK_TIMEOUT_SECONDS,
        }],
        None => {
            for (host, container) in other_names(files) {
                mount(host, &container);
            }
            Vec::new()
        }
    };
    // `void` tells an installed NVIDIA container runtime to leave the container alone.
    Edits { env: vec!["NVIDIA_VISIBLE_DEVICES=void".to_owned()], device_nodes: nodes.nodes(), mounts, hooks }
}

/// `--library PATH[=SONAME]` for each library and `--link PATH=TARGET` for each link.
fn hook_args(files: &DriverFiles) -> Vec<String> {
    let mut args = vec!["divvy-hook".to_owned()];
    for library in &files.libraries {
        let Some(soname) = &library.soname else { continue };
        args.extend(["--library".to_owned(), format!("{}={soname}", text(&library.file.container))]);
    }
    for link in &files.links {
        args.extend(["--link".to_owned(), format!("{}={}", text(&link.path), link.target)]);
    }
    args
}

/// Files and the additional paths that the hook would create as links.
fn other_names(files: &DriverFiles) -> Vec<(&Path, PathBuf)> {
    let mut names: Vec<(&Path, PathBuf)> = Vec::new();
    for library in &files.libraries {
        let Some(soname) = &library.soname else { continue };
        let path = library.file.container.with_file_name(soname);
        if path != library.file.container {
            names.push((&library.file.host, path));
        }
    }
    for link in &files.links {
        let target = link.path.with_file_name(&link.target);
        let named = names.iter().find(|(_, path)| *path == target).map(|(host, _)| *host);
        let direct = files.libraries.iter().find(|library| library.file.container == target);
        if let Some(host) = named.or(direct.map(|library| library.file.host.as_path())) {
            names.push((host, link.path.clone()));
        }
    }
    names
}

/// Paths come from directory listings, which are limited to UTF-8 names, and from flags.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;
