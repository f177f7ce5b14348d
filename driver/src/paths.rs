//! Paths on the host that the driver reads or writes, all set by flags. A node with a containerised
//! GPU driver, a test and the simulator differ only in these paths.
//!
//! All paths are the host's: they go into CDI files and messages. In a pod most of them are mounted
//! at the same path. The GPU driver's root may be `/`, so it and the dev root are mounted below
//! [`HostPaths::host_prefix`]; [`HostPaths::local_path`] and [`HostPaths::host_path`] convert
//! between the two.

use rustix::fs::{Mode, OFlags, ResolveFlags};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Absolute paths on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPaths {
    /// The kubelet's `--root-dir`, `/var/lib/kubelet`.
    pub kubelet_root: PathBuf,
    /// Directory for the CDI files of claims, `/var/run/cdi`.
    pub cdi_dir: PathBuf,
    /// Root of the GPU driver's libraries and binaries, `/` or `/run/nvidia/driver`.
    pub driver_root: PathBuf,
    /// The root with the `dev` directory of the device nodes, usually `/` or the driver root.
    pub dev_root: PathBuf,
    /// Path of the host's root in this process: `/`, or `/host` in a pod.
    pub host_prefix: PathBuf,
    /// The `/proc` in which the GPU driver's files are read, `/proc`.
    pub proc_root: PathBuf,
    /// The `/proc` in which the host's processes are read, `/proc`. Must be of the host's PID namespace.
    pub process_root: PathBuf,
    /// The `/sys` that is read, `/sys`.
    pub sys_root: PathBuf,
    /// Records, GPU numbers and locks. On disk; by default below the plugin directory.
    pub state_dir: PathBuf,
    /// State that may be lost in a reboot: MPS sockets and shared memory, share pages. `/run/divvy`.
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

    /// `<kubelet root>/pod-resources`: where the kubelet serves its list of containers.
    pub fn pod_resources_dir(&self) -> PathBuf {
        self.kubelet_root.join("pod-resources")
    }

    /// The host's path of a device node.
    pub fn dev(&self, node: &str) -> PathBuf {
        self.dev_root.join(Path::new(node).strip_prefix("/").unwrap_or(Path::new(node)))
    }

    /// The path in this process for a host path below the driver root or the dev root.
    pub fn local_path(&self, host: &Path) -> PathBuf {
        self.host_prefix.join(host.strip_prefix("/").unwrap_or(host))
    }

    /// The host's path for a path in this process: the reverse of [`HostPaths::local_path`].
    pub fn host_path(&self, local: &Path) -> PathBuf {
        match local.strip_prefix(&self.host_prefix) {
            Ok(rest) => Path::new("/").join(rest),
            Err(_) => local.to_owned(),
        }
    }
}

/// Opens `path` below a directory, and returns the file and its real path in this process. Links are
/// resolved inside the directory: an absolute link in a driver image means a file of that image.
pub(crate) fn open_inside(root: &File, path: &Path, flags: OFlags) -> std::io::Result<(File, PathBuf)> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let file = File::from(rustix::fs::openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)?);
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    let real = std::fs::read_link(format!("/proc/self/fd/{fd}"))?;
    Ok((file, real))
}

#[cfg(test)]
impl HostPaths {
    /// All paths below one directory, for tests.
    pub(crate) fn below(root: &Path) -> Self {
        Self {
            kubelet_root: root.join("kubelet"),
            cdi_dir: root.join("cdi"),
            driver_root: root.join("driver"),
            dev_root: root.join("driver"),
            host_prefix: PathBuf::from("/"),
            proc_root: root.join("proc"),
            process_root: root.join("proc"),
            sys_root: root.join("sys"),
            state_dir: root.join("state"),
            run_dir: root.join("run"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(prefix: &str, host: &str, local: &str) {
        let paths = HostPaths { host_prefix: prefix.into(), ..HostPaths::below(Path::new("/")) };
        assert_eq!(paths.local_path(Path::new(host)), Path::new(local));
        assert_eq!(paths.host_path(Path::new(local)), Path::new(host), "reverse conversion");
    }

    #[test]
    fn host_path_is_mounted_below_the_prefix() {
        check("/", "/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi");
        check("/host", "/usr/bin/nvidia-smi", "/host/usr/bin/nvidia-smi");
        check("/host", "/run/nvidia/driver", "/host/run/nvidia/driver");
        check("/host", "/", "/host");
    }
}
