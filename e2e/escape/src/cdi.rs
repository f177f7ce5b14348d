//! The mounts that the driver's CDI files describe. The driver's own code prepares each share and
//! writes the file; this module merges the files as a container runtime does.
//!
//! A runtime applies the devices of a container in their order, and each claim's common edits
//! before its first device. If two mounts have the same path in the container, the later one stays
//! (`InjectDevices` and `ContainerEdits.Apply` of tags.cncf.io/container-device-interface).
//! Programs find the simulated GPU driver below its own root, so mounts of the container's library
//! directories are placed there.

use crate::node::{Node, Share};
use crate::watch;
use anyhow::{Context, Result};
use divvy_api::sharing::Injection;
use divvy_api::{ClaimUid, DeviceName};
use divvy_driver::cdi::{Cdi, ClaimDevice, DeviceNodes, HookMode};
use divvy_driver::paths::HostPaths;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A share after its preparation by the driver.
#[derive(Clone, Debug)]
pub struct Prepared {
    pub share: Share,
    /// The directory of the driver's libraries at that time: `libdivvy.so` and those in `shim/`.
    pub libraries: PathBuf,
    pub injection: Injection,
}

/// A file of the host that is mounted into a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) host: PathBuf,
    pub(crate) container: PathBuf,
    /// Comma-separated mount options, without `bind` and propagation.
    pub(crate) options: String,
}

/// The mounts of a container with these shares, one mount per path.
pub(crate) fn mounts(node: &Node, shares: &[Prepared]) -> Result<Vec<Mount>> {
    let files: Vec<Value> = shares.iter().map(|share| file(node, share)).collect::<Result<_>>()?;
    let all = applied(&files).into_iter().map(|mount| read(node, mount));
    all.collect::<Option<_>>().context("a CDI file contains an invalid mount")
}

/// The mounts of a container with the first device of each of these files, merged as by a runtime.
pub fn applied(files: &[Value]) -> Vec<&Value> {
    const PATH: &str = "containerPath";
    let mut all: Vec<&Value> = Vec::new();
    let lists = files.iter().flat_map(|file| {
        ["/containerEdits/mounts", "/devices/0/containerEdits/mounts"].map(|list| file.pointer(list))
    });
    for mount in lists.flatten().filter_map(Value::as_array).flatten() {
        all.retain(|have| have[PATH] != mount[PATH]);
        all.push(mount);
    }
    // Parent directories come before the paths below them.
    all.sort_by_key(|mount| mount[PATH].as_str().map_or(0, |path| path.matches('/').count()));
    all
}

/// The CDI file that the driver writes for a claim with that share.
pub fn file(node: &Node, prepared: &Prepared) -> Result<Value> {
    let root = node.sim.root();
    let paths = HostPaths { proc_root: root.join("proc"), ..watch::paths(root, node.path()) };
    std::fs::create_dir_all(&paths.cdi_dir)?;
    let cdi = Cdi::new(&paths, HookMode::None, &prepared.libraries);
    let claim = ClaimUid::from(prepared.share.claim.clone());
    let device = ClaimDevice {
        request: "share".into(),
        device: DeviceName::from("gpu-0".to_owned()),
        share: Some(prepared.share.id.clone().into()),
        nodes: DeviceNodes::Gpu { minor: 0 },
        mps: None,
        injection: Some(prepared.injection),
    };
    cdi.write_claim(&claim, &[device])?;
    let file = paths.cdi_dir.join(format!("{}-claim_{claim}.json", divvy_api::names::DRIVER));
    Ok(serde_json::from_slice(&std::fs::read(file)?)?)
}

fn read(node: &Node, mount: &Value) -> Option<Mount> {
    let container = Path::new(mount["containerPath"].as_str()?);
    let is_divvys = ["/run", "/etc"].iter().any(|top| container.starts_with(top));
    let container = match is_divvys {
        true => container.to_owned(),
        false => node.sim.root().join(container.strip_prefix("/").ok()?),
    };
    let options = mount["options"].as_array()?.iter().filter_map(Value::as_str);
    let own: Vec<&str> = options.filter(|option| !matches!(*option, "bind" | "rbind" | "rprivate")).collect();
    Some(Mount { host: mount["hostPath"].as_str()?.into(), container, options: own.join(",") })
}
