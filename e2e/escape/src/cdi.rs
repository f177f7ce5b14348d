//! What the driver's CDI files have mounted into a container: each share is prepared by the driver's own code, and what it
//! wrote is put together as a container runtime does it.
//!
//! A runtime goes through the devices of a container in their order, each claim's common part before its first device. Where
//! two mounts have one path in the container, the later stays (`InjectDevices` and `ContainerEdits.Apply` of
//! tags.cncf.io/container-device-interface). Programs look for the simulated GPU driver where it lies outside, below its own
//! root, so what the files have in the container's own directories is mounted there.

use crate::node::{Node, Share};
use crate::watch;
use anyhow::{Context, Result};
use divvy_api::sharing::Injection;
use divvy_api::{ClaimUid, DeviceName};
use divvy_driver::cdi::{Cdi, ClaimDevice, DeviceNodes, HookMode};
use divvy_driver::paths::HostPaths;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A share as the driver has prepared it.
#[derive(Clone, Debug)]
pub struct Prepared {
    pub share: Share,
    /// Where the libraries lay that the driver had then: `libdivvy.so` and those in `shim/`.
    pub libraries: PathBuf,
    pub injection: Injection,
}

/// A file of the host in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) host: PathBuf,
    pub(crate) container: PathBuf,
    /// Of the mount alone, with commas between.
    pub(crate) options: String,
}

/// What a container with these shares has mounted, one mount at each path.
pub(crate) fn mounts(node: &Node, shares: &[Prepared]) -> Result<Vec<Mount>> {
    let files: Vec<Value> = shares.iter().map(|share| file(node, share)).collect::<Result<_>>()?;
    let all = applied(&files).into_iter().map(|mount| read(node, mount));
    all.collect::<Option<_>>().context("a CDI file with a mount that is none")
}

/// The mounts of a container with the first device of each of these files, as a runtime makes them.
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
    // What lies deeper comes later.
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
