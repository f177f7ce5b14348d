//! Puts a claim's document together: what all claims have in common, found once
//! and kept until the GPU driver's files or nodes change, and the claim's devices.

use super::document::{Device, DeviceNode, Document, Edits, Hook, Mount};
use super::files::{DriverFiles, Shared as SharedFile, Stamp};
use super::nodes::{CommonNodes, Majors};
use super::{Cdi, CdiError, ClaimDevice, MpsClient, ReadinessError, hook, metadata};
use divvy_api::mps::CONTAINER_PIPE;
use divvy_api::{ClaimUid, DeviceName, ShareId};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};

const MOUNT_OPTIONS: &[&str] = &["ro", "nosuid", "nodev", "rbind", "rprivate"];
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
}

impl Common {
    /// Whether nothing has changed since.
    fn holds(&self, proc_root: &Path, nodes: &CommonNodes) -> bool {
        self.nodes == *nodes
            && self.stamp.holds(proc_root)
            && self.hook.as_ref().is_none_or(|path| path.exists())
    }
}

impl Cdi {
    /// The common edits, found again if anything they stand on has changed.
    pub(super) fn common(&self) -> Result<(Arc<Edits>, Majors), ReadinessError> {
        let paths = &self.shared.paths;
        let (nodes, majors) = CommonNodes::find(paths)?;
        let mut cached = self.shared.common.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(common) = cached.as_ref().filter(|common| common.holds(&paths.proc_root, &nodes)) {
            return Ok((common.edits.clone(), majors));
        }
        let stamp = Stamp::take(&paths.seen(&paths.driver_root), &paths.proc_root);
        let files = DriverFiles::find(paths, &stamp)?;
        let hook = hook::install(&self.shared.hook, &paths.plugin_dir())?;
        let edits = Arc::new(edits(&files, &nodes, hook.as_deref()));
        *cached = Some(Common { stamp, nodes, hook, edits: edits.clone() });
        Ok((edits, majors))
    }

    /// The same, if nothing has changed and nobody is just finding it out.
    fn known_common(&self) -> Option<(Arc<Edits>, Majors)> {
        let paths = &self.shared.paths;
        let (nodes, majors) = CommonNodes::known(paths)?;
        let cached = self.shared.common.try_lock().ok()?;
        let common = cached.as_ref().filter(|common| common.holds(&paths.proc_root, &nodes))?;
        Some((common.edits.clone(), majors))
    }

    /// The bytes of a claim's file.
    pub(super) fn render(&self, claim: &ClaimUid, devices: &[ClaimDevice]) -> Result<Vec<u8>, CdiError> {
        let (common, majors) =
            self.common().map_err(|cause| CdiError::NotReady { claim: claim.clone(), cause })?;
        let nodes = |of: &ClaimDevice| {
            let fail = |cause| CdiError::Nodes { claim: claim.clone(), device: of.device.clone(), cause };
            of.nodes.nodes(&self.shared.paths, &majors).map_err(fail)
        };
        let nodes = devices.iter().map(nodes).collect::<Result<_, _>>()?;
        self.document(claim, devices, nodes, &common)
    }

    /// The same, if it takes a look and nothing more: nothing to be found below
    /// the driver root, no module to be loaded, no node to be made.
    pub(super) fn render_at_once(
        &self,
        claim: &ClaimUid,
        devices: &[ClaimDevice],
    ) -> Option<Result<Vec<u8>, CdiError>> {
        let (common, majors) = self.known_common()?;
        let nodes = |of: &ClaimDevice| of.nodes.known(&self.shared.paths, &majors).ok();
        let nodes = devices.iter().map(nodes).collect::<Option<_>>()?;
        Some(self.document(claim, devices, nodes, &common))
    }

    fn document(
        &self,
        claim: &ClaimUid,
        devices: &[ClaimDevice],
        nodes: Vec<Vec<DeviceNode>>,
        common: &Edits,
    ) -> Result<Vec<u8>, CdiError> {
        let mut rendered: Vec<Device> = Vec::with_capacity(devices.len());
        // Once for each request, with its first device.
        let mut files = metadata::mounts(&self.metadata_dir(), claim);
        for (ClaimDevice { request, device, share, mps, .. }, nodes) in devices.iter().zip(nodes) {
            let name = device_name(claim, device, share.as_ref());
            // One device twice, once with adminAccess: one entry with all the nodes.
            match rendered.iter_mut().find(|have| have.name == name) {
                None => {
                    let edits = mps.as_ref().map(client_edits).unwrap_or_default();
                    let mut container_edits = Edits { device_nodes: nodes, ..edits };
                    container_edits.mounts.extend(files.remove(request.as_str()));
                    rendered.push(Device { name, container_edits });
                }
                Some(have) => {
                    have.container_edits.mounts.extend(files.remove(request.as_str()));
                    let have = &mut have.container_edits.device_nodes;
                    let new: Vec<_> = nodes.into_iter().filter(|node| !have.contains(node)).collect();
                    have.extend(new);
                }
            }
        }
        serde_json::to_vec(&Document::new(&rendered, common)).map_err(|cause| CdiError::Write {
            claim: claim.clone(),
            path: self.file(claim),
            cause: cause.into(),
        })
    }
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
