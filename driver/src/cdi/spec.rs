//! Puts a claim's document together: what all claims have in common, found once
//! and kept until the GPU driver's files or nodes change, and the claim's devices.
//!
//! What a share brings stands with its device and not with the document, because
//! another container of the pod may have only a whole GPU of the same claim, and
//! into that nothing is injected.

use super::document::{Device, DeviceNode, Document, Edits, Hook, Mount};
use super::files::{DriverFiles, Shared as SharedFile, Stamp};
use super::library::{IN_CONTAINER, Library, REAL, STOOD_IN};
use super::nodes::{CommonNodes, Majors};
use super::{Cdi, CdiError, ClaimDevice, MpsClient, ReadinessError, hook, metadata};
use crate::shares::{self, Shares};
use divvy_api::mps::CONTAINER_PIPE;
use divvy_api::sharing::Injection;
use divvy_api::{ClaimUid, DeviceName, ShareId};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

const MOUNT_OPTIONS: &[&str] = &["ro", "nosuid", "nodev", "rbind", "rprivate"];
/// What is only read, byte by byte.
const DATA_OPTIONS: &[&str] = &["ro", "nosuid", "nodev", "noexec", "bind", "rprivate"];
/// Where processes of one share write.
const ACCOUNT_OPTIONS: &[&str] = &["rw", "nosuid", "nodev", "noexec", "bind", "rprivate"];
/// Where clients of one MPS daemon write.
const SHARED_OPTIONS: &[&str] = &["rw", "nosuid", "nodev", "noexec", "rbind", "rprivate"];
/// Seconds for the runtime; the hook gives up earlier by itself.
const HOOK_TIMEOUT: u32 = 15;

/// Edits that every claim has, and what they were made of.
#[derive(Clone, Debug)]
pub(super) struct Common {
    stamp: Stamp,
    nodes: CommonNodes,
    hook: Option<PathBuf>,
    edits: Arc<Edits>,
    stood_in: Arc<[StoodIn]>,
}

/// A library of the GPU driver that another may stand in for.
#[derive(Clone, Debug)]
struct StoodIn {
    /// Which of [`STOOD_IN`].
    at: usize,
    host: PathBuf,
    /// Every name by which a container has it, but links that the hook makes.
    names: Vec<PathBuf>,
}

/// What the documents of claims are made of beside the claims.
struct Parts {
    common: Arc<Edits>,
    majors: Majors,
    hook: Option<PathBuf>,
    stood_in: Arc<[StoodIn]>,
}

impl Common {
    /// Whether nothing has changed since.
    fn holds(&self, proc_root: &Path, nodes: &CommonNodes) -> bool {
        self.nodes == *nodes
            && self.stamp.holds(proc_root)
            && self.hook.as_ref().is_none_or(|path| path.exists())
    }

    fn parts(&self, majors: Majors) -> Parts {
        let Self { edits, hook, stood_in, .. } = self;
        Parts { common: edits.clone(), majors, hook: hook.clone(), stood_in: stood_in.clone() }
    }
}

impl Cdi {
    /// Whether the common edits can be made now.
    pub(super) fn check_common(&self) -> Result<(), ReadinessError> {
        self.common().map(|_| ())
    }

    /// The common edits, found again if anything they stand on has changed.
    fn common(&self) -> Result<Parts, ReadinessError> {
        let paths = &self.shared.paths;
        let (nodes, majors) = CommonNodes::find(paths)?;
        let mut cached = self.shared.common.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(common) = cached.as_ref().filter(|common| common.holds(&paths.proc_root, &nodes)) {
            return Ok(common.parts(majors));
        }
        let stamp = Stamp::take(&paths.seen(&paths.driver_root), &paths.proc_root);
        let files = DriverFiles::find(paths, &stamp)?;
        let hook = hook::install(&self.shared.hook, &paths.plugin_dir())?;
        let edits = Arc::new(edits(&files, &nodes, hook.as_deref()));
        let stood_in = stood_in(&files, hook.as_deref());
        let common = Common { stamp, nodes, hook, edits, stood_in };
        let parts = common.parts(majors);
        *cached = Some(common);
        Ok(parts)
    }

    /// The same, if nothing has changed and nobody is just finding it out.
    fn known_common(&self) -> Option<Parts> {
        let paths = &self.shared.paths;
        let (nodes, majors) = CommonNodes::known(paths)?;
        let cached = self.shared.common.try_lock().ok()?;
        let common = cached.as_ref().filter(|common| common.holds(&paths.proc_root, &nodes))?;
        Some(common.parts(majors))
    }

    /// The bytes of a claim's file.
    pub(super) fn render(&self, claim: &ClaimUid, devices: &[ClaimDevice]) -> Result<Vec<u8>, CdiError> {
        let parts = self.common().map_err(|cause| CdiError::NotReady { claim: claim.clone(), cause })?;
        let nodes = |of: &ClaimDevice| {
            let fail = |cause| CdiError::Nodes { claim: claim.clone(), device: of.device.clone(), cause };
            of.nodes.nodes(&self.shared.paths, &parts.majors).map_err(fail)
        };
        let nodes = devices.iter().map(nodes).collect::<Result<_, _>>()?;
        self.document(claim, devices, nodes, &parts)
    }

    /// The same, if it takes a look and nothing more: nothing to be found below
    /// the driver root, no module to be loaded, no node to be made.
    pub(super) fn render_at_once(
        &self,
        claim: &ClaimUid,
        devices: &[ClaimDevice],
    ) -> Option<Result<Vec<u8>, CdiError>> {
        let parts = self.known_common()?;
        let nodes = |of: &ClaimDevice| of.nodes.known(&self.shared.paths, &parts.majors).ok();
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
        // Once for each request, with its first device.
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
            // One device twice, once with adminAccess, to which nothing is added but nodes: one entry with all there is.
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
        serde_json::to_vec(&Document::new(&rendered, &parts.common)).map_err(|cause| CdiError::Write {
            claim: claim.clone(),
            path: self.file(claim),
            cause: cause.into(),
        })
    }
}

impl Cdi {
    /// The pages of a share and the library that goes by them.
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
                for StoodIn { at, host, names } in parts.stood_in.iter() {
                    let stands_in = &library.stand_ins[*at];
                    mounts.push(mount(host, &Path::new(REAL).join(STOOD_IN[*at]), MOUNT_OPTIONS));
                    mounts.extend(names.iter().map(|name| mount(stands_in, name, MOUNT_OPTIONS)));
                }
            }
        }
        let hook = |stage, option: &str, dir: &Path| {
            let path = text(parts.hook.as_deref()?);
            let args = ["divvy-hook", option, &text(dir)].map(str::to_owned).to_vec();
            Some(Hook { hook_name: stage, path, args, timeout: HOOK_TIMEOUT })
        };
        let cgroups = dir.join(shares::CGROUPS);
        let list = (injection == Injection::Preload)
            .then(|| hook("createContainer", "--preload", &dir.join(shares::PRELOAD)));
        let hooks = [hook("createRuntime", "--cgroups", &cgroups), hook("poststop", "--cgroups", &cgroups)];
        let hooks = hooks.into_iter().chain(list).flatten().collect();
        Edits { mounts, hooks, ..Edits::default() }
    }
}

/// The libraries of the GPU driver that others may stand in for.
fn stood_in(files: &DriverFiles, hook: Option<&Path>) -> Arc<[StoodIn]> {
    let linked = if hook.is_some() { Vec::new() } else { other_names(files) };
    let known = |library: &super::files::Library| {
        let at = STOOD_IN.iter().position(|name| library.soname.as_deref() == Some(name))?;
        let SharedFile { host, container } = library.file.clone();
        // The name that programs ask for, and that of the file.
        let mut names = vec![container.with_file_name(STOOD_IN[at]), container];
        for (_, link) in linked.iter().filter(|(file, _)| *file == host) {
            if !names.contains(link) {
                names.push(link.clone());
            }
        }
        Some(StoodIn { at, host, names })
    };
    files.libraries.iter().filter_map(known).collect()
}

/// What stands behind the `=` of a CDI id.
pub(super) fn device_name(claim: &ClaimUid, device: &DeviceName, share: Option<&ShareId>) -> String {
    match share {
        None => format!("{claim}-{device}"),
        Some(share) => format!("{claim}-{device}-{share}"),
    }
}

/// The variables that libcuda reads and the directories that it shares with its
/// server. In a container the device is ordinal 0.
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
    for SharedFile { host, container } in
        files.libraries.iter().map(|library| &library.file).chain(&files.others)
    {
        mount(host, container);
    }
    let hooks = match hook {
        Some(path) => vec![Hook {
            hook_name: "createContainer",
            path: text(path),
            args: hook_args(files),
            timeout: HOOK_TIMEOUT,
        }],
        None => {
            for (host, container) in other_names(files) {
                mount(host, &container);
            }
            Vec::new()
        }
    };
    // `void` tells an NVIDIA container runtime that may be installed to stay away.
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

/// Files once more under the names that the hook would have made as links.
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

/// Paths come from directory listings that keep only names that are text, and
/// from flags.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
