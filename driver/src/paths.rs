//! Every place on the host that the driver reads or writes, chosen by flags.
//!
//! The product knows no other way to another world: a node whose GPU driver
//! lives in a container image, a test in a temporary directory and the
//! simulator differ in these paths alone.

use std::path::{Path, PathBuf};

/// Host paths, absolute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPaths {
    /// The kubelet's `--root-dir`, `/var/lib/kubelet`.
    pub kubelet_root: PathBuf,
    /// Where CDI files of claims are written, `/var/run/cdi`.
    pub cdi_dir: PathBuf,
    /// Root of the GPU driver's libraries and binaries, `/` or `/run/nvidia/driver`.
    pub driver_root: PathBuf,
    /// The root whose `dev` holds the device nodes, usually `/` or the driver root.
    pub dev_root: PathBuf,
    /// Where `/proc` is seen, `/proc`.
    pub proc_root: PathBuf,
    /// Where `/sys` is seen, `/sys`.
    pub sys_root: PathBuf,
    /// Records, GPU numbers and locks; on disk, by default below the plugin directory.
    pub state_dir: PathBuf,
    /// What a reboot may take: sockets and shared memory of MPS, `/run/divvy`.
    pub run_dir: PathBuf,
}

impl HostPaths {
    /// `<kubelet root>/plugins/gpu.divvy.dev`: the service socket and the default state.
    pub fn plugin_dir(&self) -> PathBuf {
        self.kubelet_root.join("plugins").join(divvy_api::names::DRIVER)
    }

    /// `<kubelet root>/plugins_registry`: where the kubelet looks for registration sockets.
    pub fn registry_dir(&self) -> PathBuf {
        self.kubelet_root.join("plugins_registry")
    }

    /// Path of a device node as it is seen in a container, below the dev root.
    pub fn dev(&self, node: &str) -> PathBuf {
        self.dev_root.join(Path::new(node).strip_prefix("/").unwrap_or(Path::new(node)))
    }
}
