//! Every place on the host that the driver reads or writes, chosen by flags.
//!
//! The product knows no other way to another world: a node whose GPU driver
//! lives in a container image, a test in a temporary directory and the
//! simulator differ in these paths alone.
//!
//! Every path here is the host's: it is what goes into CDI files, where the
//! container runtime reads it, and what people are told. A daemon that runs in
//! a pod has most of them mounted at the same place; the GPU driver's root
//! cannot be (it may be `/`), so it and the dev root are looked at below
//! [`HostPaths::host_prefix`]: [`HostPaths::seen`] leads there, [`HostPaths::on_host`] back.

use rustix::fs::{Mode, OFlags, ResolveFlags};
use std::fs::File;
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
    /// Where this process sees the host's root: `/`, or `/host` in a pod.
    pub host_prefix: PathBuf,
    /// Where the GPU driver's part of `/proc` is seen, `/proc`.
    pub proc_root: PathBuf,
    /// Where the host's processes are seen, `/proc`: only of the host's PID namespace.
    pub process_root: PathBuf,
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

    /// Where this process finds a path of the driver root or the dev root, to
    /// read it or to run it.
    pub fn seen(&self, host: &Path) -> PathBuf {
        self.host_prefix.join(host.strip_prefix("/").unwrap_or(host))
    }

    /// The host's path of what this process sees: the way back from [`HostPaths::seen`].
    pub fn on_host(&self, seen: &Path) -> PathBuf {
        match seen.strip_prefix(&self.host_prefix) {
            Ok(rest) => Path::new("/").join(rest),
            Err(_) => seen.to_owned(),
        }
    }
}

/// Opens something below a directory, every link resolved inside that
/// directory: an absolute link of a driver image means a file of that image.
/// Answers it with its real path as this process sees it.
pub(crate) fn open_inside(root: &File, path: &Path, flags: OFlags) -> std::io::Result<(File, PathBuf)> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let file = File::from(rustix::fs::openat2(root, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)?);
    let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
    let real = std::fs::read_link(format!("/proc/self/fd/{fd}"))?;
    Ok((file, real))
}

#[cfg(test)]
impl HostPaths {
    /// Everything below one directory, for tests.
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

    fn check(prefix: &str, host: &str, seen: &str) {
        let paths = HostPaths { host_prefix: prefix.into(), ..HostPaths::below(Path::new("/")) };
        assert_eq!(paths.seen(Path::new(host)), Path::new(seen));
        assert_eq!(paths.on_host(Path::new(seen)), Path::new(host), "and back");
    }

    #[test]
    fn a_path_of_the_host_is_seen_below_the_prefix() {
        check("/", "/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi");
        check("/host", "/usr/bin/nvidia-smi", "/host/usr/bin/nvidia-smi");
        check("/host", "/run/nvidia/driver", "/host/run/nvidia/driver");
        check("/host", "/", "/host");
    }
}
