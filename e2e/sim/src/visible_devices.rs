//! The GPUs and instances that a process can see: those with device nodes in its `/dev`.
//!
//! On the host all of them are visible; a container has the nodes of its CDI devices. A GPU
//! instance needs the GPU's node and its own capability node, a compute instance also its own
//! capability node.

use crate::state::{Gpu, State};
use rustix::fs::{Access, AtFlags, CWD};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Minor of the capability to create and destroy instances.
pub const CAP_CONFIG: u32 = 1;
/// Minor of the capability to see the processes and memory of all instances.
pub const CAP_MONITOR: u32 = 2;

/// Minor of a GPU instance's capability; `gpu` is the GPU's minor.
pub const fn cap_gi(gpu: u32, gi: u32) -> u32 {
    3 + 135 * gpu + 9 * gi
}

/// Minor of a compute instance's capability; `gpu` is the GPU's minor.
pub const fn cap_ci(gpu: u32, gi: u32, ci: u32) -> u32 {
    cap_gi(gpu, gi) + 1 + ci
}

/// The device nodes of a `/dev` at one point in time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VisibleDevices {
    /// Whether `/dev/nvidiactl` exists. Without it, the driver cannot be reached.
    pub has_ctl: bool,
    gpus: BTreeSet<u32>,
    caps: BTreeSet<u32>,
    dir: PathBuf,
}

impl VisibleDevices {
    /// Reads the device nodes in `dev`.
    pub fn read(dev: &Path) -> Self {
        let mut visible = Self { dir: dev.join("nvidia-caps"), ..Self::default() };
        for_names(dev, |name| match name.strip_prefix("nvidia") {
            Some("ctl") => visible.has_ctl = true,
            Some(minor) => visible.gpus.extend(minor.parse::<u32>()),
            None => {}
        });
        for_names(&dev.join("nvidia-caps"), |name| {
            visible.caps.extend(name.strip_prefix("nvidia-cap").and_then(|minor| minor.parse::<u32>().ok()));
        });
        visible
    }

    /// Whether the GPU's node exists.
    pub fn has_gpu(&self, gpu: &Gpu) -> bool {
        self.gpus.contains(&gpu.minor)
    }

    /// Whether the GPU instance's nodes exist.
    pub fn has_gi(&self, gpu: &Gpu, gi: u32) -> bool {
        self.has_gpu(gpu) && self.caps.contains(&cap_gi(gpu.minor, gi))
    }

    /// Whether the compute instance's nodes exist.
    pub fn has_ci(&self, gpu: &Gpu, gi: u32, ci: u32) -> bool {
        self.has_gi(gpu, gi) && self.caps.contains(&cap_ci(gpu.minor, gi, ci))
    }

    /// Whether a process that is not root may create and destroy instances.
    pub fn can_configure_mig(&self) -> bool {
        self.may_use(CAP_CONFIG)
    }

    /// Whether a process that is not root may see the use of all instances.
    pub fn can_monitor_mig(&self) -> bool {
        self.may_use(CAP_MONITOR)
    }

    /// These two capability nodes exist for every process, but their mode restricts who may use
    /// them.
    fn may_use(&self, cap: u32) -> bool {
        let node = self.dir.join(format!("nvidia-cap{cap}"));
        self.caps.contains(&cap) && rustix::fs::accessat(CWD, node, Access::READ_OK, AtFlags::EACCESS).is_ok()
    }

    /// Slots of the GPUs that are listed and visible, in index order.
    pub fn slots(&self, state: &State) -> Vec<usize> {
        state.listed().filter(|(_, gpu)| self.has_gpu(gpu)).map(|(slot, _)| slot).collect()
    }
}

fn for_names(dir: &Path, mut each: impl FnMut(&str)) {
    let Ok(entries) = std::fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        if let Some(name) = entry.file_name().to_str() {
            each(name);
        }
    }
}
