//! What a process may see: GPUs and instances whose device nodes are in its `/dev`.
//!
//! Presence is existence. On the host everything is there; a container has the
//! nodes that its CDI devices named. A GPU instance is visible with the GPU's
//! node and its own capability node, a compute instance with its own as well.

use crate::sim::Sim;
use crate::state::{Gpu, State};
use rustix::fs::{Access, AtFlags, CWD};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Capability that lets a process create and destroy instances.
pub const CAP_CONFIG: u32 = 1;
/// Capability that lets a process see all instances' processes and memory.
pub const CAP_MONITOR: u32 = 2;

/// Minor of the capability of a GPU instance, by the GPU's minor.
pub const fn cap_gi(gpu: u32, gi: u32) -> u32 {
    3 + 135 * gpu + 9 * gi
}

/// Minor of the capability of a compute instance.
pub const fn cap_ci(gpu: u32, gi: u32, ci: u32) -> u32 {
    cap_gi(gpu, gi) + 1 + ci
}

/// The nodes of a `/dev`, read at once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Visible {
    /// `/dev/nvidiactl` is there; without it there is no driver to talk to.
    pub ctl: bool,
    gpus: BTreeSet<u32>,
    caps: BTreeSet<u32>,
    dir: PathBuf,
}

impl Visible {
    /// Reads the nodes in `dev`.
    pub fn read(dev: &Path) -> Self {
        let mut visible = Self { dir: dev.join("nvidia-caps"), ..Self::default() };
        for_names(dev, |name| match name.strip_prefix("nvidia") {
            Some("ctl") => visible.ctl = true,
            Some(minor) => visible.gpus.extend(minor.parse::<u32>()),
            None => {}
        });
        for_names(&dev.join("nvidia-caps"), |name| {
            visible.caps.extend(name.strip_prefix("nvidia-cap").and_then(|minor| minor.parse::<u32>().ok()));
        });
        visible
    }

    /// Whether the GPU's node is there.
    pub fn gpu(&self, gpu: &Gpu) -> bool {
        self.gpus.contains(&gpu.minor)
    }

    /// Whether the GPU instance's nodes are there.
    pub fn gi(&self, gpu: &Gpu, gi: u32) -> bool {
        self.gpu(gpu) && self.caps.contains(&cap_gi(gpu.minor, gi))
    }

    /// Whether the compute instance's nodes are there.
    pub fn ci(&self, gpu: &Gpu, gi: u32, ci: u32) -> bool {
        self.gi(gpu, gi) && self.caps.contains(&cap_ci(gpu.minor, gi, ci))
    }

    /// Whether instances may be created and destroyed without being root.
    pub fn config(&self) -> bool {
        self.may_use(CAP_CONFIG)
    }

    /// Whether other instances' use may be seen without being root.
    pub fn monitor(&self) -> bool {
        self.may_use(CAP_MONITOR)
    }

    /// These two are not for everybody who sees them.
    fn may_use(&self, cap: u32) -> bool {
        let node = self.dir.join(format!("nvidia-cap{cap}"));
        self.caps.contains(&cap) && rustix::fs::accessat(CWD, node, Access::READ_OK, AtFlags::EACCESS).is_ok()
    }

    /// Slots of the GPUs that are listed and visible, by index.
    pub fn slots(&self, state: &State) -> Vec<usize> {
        state.listed().filter(|(_, gpu)| self.gpu(gpu)).map(|(slot, _)| slot).collect()
    }
}

impl Sim {
    /// What this process may see now.
    pub fn visible(&self) -> Visible {
        Visible::read(&self.dev())
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
