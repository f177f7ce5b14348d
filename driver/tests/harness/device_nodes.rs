//! The device nodes in the CDI files of claims: each names the GPU of its claim, and no node is in the
//! files of two claims that cannot share it.

use crate::harness::TestNode;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// One device of a CDI file.
#[derive(Debug)]
struct CdiDevice {
    claim: String,
    /// Number in the device's name, which is the slot of the GPU in the simulator.
    gpu: usize,
    mode: Mode,
    /// Minors of `/dev/nvidia<minor>`.
    minors: BTreeSet<u32>,
    /// Paths below `/dev/nvidia-caps`.
    capabilities: BTreeSet<String>,
}

/// The mode of a device, parsed from its name. It decides which claims may have the same nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Whole,
    Timeslice,
    Mps,
    MemoryShare,
    Instance,
    ShareOfInstance,
}

impl Mode {
    /// `rest` is the name after `gpu-<number>`.
    fn parse(rest: &str) -> Self {
        let fields: Vec<&str> = rest.split('-').skip(1).collect();
        match fields[..] {
            [] => Self::Whole,
            ["timeslice", ..] => Self::Timeslice,
            ["mps", ..] => Self::Mps,
            ["mig", _, _, _] => Self::Instance,
            ["mig", ..] => Self::ShareOfInstance,
            _ => Self::MemoryShare,
        }
    }

    fn is_instance(self) -> bool {
        matches!(self, Self::Instance | Self::ShareOfInstance)
    }
}

impl CdiDevice {
    fn parse(claim: &str, device: &Value) -> Option<Self> {
        let name = device["name"].as_str()?.strip_prefix(claim)?.strip_prefix("-gpu-")?;
        let (number, rest) = name.split_at(name.find('-').unwrap_or(name.len()));
        let nodes = device["containerEdits"]["deviceNodes"].as_array().into_iter().flatten();
        let paths: Vec<&str> =
            nodes.filter_map(|node| node["hostPath"].as_str().or(node["path"].as_str())).collect();
        let minor = |path: &&str| path.rsplit_once("/dev/nvidia")?.1.parse().ok();
        Some(Self {
            claim: claim.to_owned(),
            gpu: number.parse().ok()?,
            mode: Mode::parse(rest),
            minors: paths.iter().filter_map(minor).collect(),
            capabilities: paths
                .iter()
                .filter(|path| path.contains("nvidia-caps"))
                .map(|path| (*path).into())
                .collect(),
        })
    }

    /// A node that both devices have although one of them excludes the other.
    fn conflicting_node(&self, other: &Self) -> Option<String> {
        let same_mode = self.mode == other.mode || (self.mode.is_instance() && other.mode.is_instance());
        if self.mode == Mode::Whole || !same_mode {
            return self.minors.intersection(&other.minors).next().map(|minor| format!("/dev/nvidia{minor}"));
        }
        let shares_instance = self.mode == Mode::ShareOfInstance && other.mode == Mode::ShareOfInstance;
        let mut common = self.capabilities.intersection(&other.capabilities);
        common.next().filter(|_| !shares_instance).cloned()
    }
}

/// A wrong or doubly used device node in the CDI files, or `None`. Claims with admin access share the
/// nodes of others; `is_admin` selects them by UID.
///
/// Files of an earlier boot are wrong until the daemon has recovered, so this must not be called before
/// the daemon has answered a call.
pub(crate) fn wrong_device_node(node: &TestNode, is_admin: impl Fn(&str) -> bool) -> Option<String> {
    let mut devices: Vec<CdiDevice> = Vec::new();
    for entry in std::fs::read_dir(node.cdi_dir()).into_iter().flatten().flatten() {
        match claim_devices(&entry.path()) {
            Ok(found) => devices.extend(found),
            Err(cause) => return Some(cause),
        }
    }
    let state = node.sim.read().unwrap();
    for device in &devices {
        let minor = state.gpus.get(device.gpu).filter(|gpu| !gpu.missing).map(|gpu| gpu.minor);
        if device.minors != minor.into_iter().collect() {
            let gpu = device.gpu;
            return Some(format!("CDI file has {device:?}, but the minor of gpu-{gpu} is {minor:?}"));
        }
    }
    // With admin access, a claim has the nodes of all instances of its GPU.
    devices.retain(|device| !is_admin(&device.claim));
    for device in &devices {
        let has_capabilities = !device.capabilities.is_empty();
        if device.mode.is_instance() != has_capabilities {
            return Some(format!("CDI file has wrong capabilities: {device:?}"));
        }
    }
    for (at, one) in devices.iter().enumerate() {
        for two in devices[at + 1..].iter().filter(|two| two.claim != one.claim) {
            if let Some(path) = one.conflicting_node(two) {
                return Some(format!("{path} is in the CDI files of two claims: {one:?} and {two:?}"));
            }
        }
    }
    None
}

/// The devices of a claim's file; empty for other files, and for a file that was just removed.
fn claim_devices(path: &Path) -> Result<Vec<CdiDevice>, String> {
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    let claim = name.strip_prefix("gpu.divvy.dev-claim_").and_then(|name| name.strip_suffix(".json"));
    let (Some(claim), Ok(json)) = (claim, std::fs::read(path)) else { return Ok(Vec::new()) };
    let document: Value = serde_json::from_slice(&json).map_err(|error| format!("{name}: {error}"))?;
    let devices = document["devices"].as_array().into_iter().flatten();
    let parse = |device| {
        CdiDevice::parse(claim, device).ok_or_else(|| format!("{name} has an unknown device: {device}"))
    };
    devices.map(parse).collect()
}

/// Appends the files of debts that are left to `found`.
pub(crate) fn find_debts(node: &TestNode, found: &mut Vec<String>) {
    let mut dirs = vec![node.state_dir().join("debts")];
    while let Some(dir) = dirs.pop() {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.path().is_dir() {
                dirs.push(entry.path());
            } else {
                found.push(format!("debt is left: {}", entry.path().display()));
            }
        }
    }
}
