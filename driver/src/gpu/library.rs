//! Finds the NVML library of a driver root, and detects when its file is replaced.

use crate::paths::open_inside;
use rustix::fs::OFlags;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Directories below the driver root where distributions, driver containers and managed Kubernetes
/// install it.
const DIRECTORIES: [&str; 8] = [
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib64",
    "lib",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
];

/// A file on disk, by its real path. An upgrade changes the name, and a re-installation changes the
/// identity: device, inode, size and modification time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LibraryFile {
    pub(super) path: PathBuf,
    identity: (u64, u64, u64, i64, i64),
}

/// The path of the library in this process, if the GPU driver is installed.
pub(crate) fn path(driver_root: &Path) -> Option<PathBuf> {
    Some(find(driver_root)?.path)
}

/// The library, if the GPU driver is installed. Links are resolved inside the driver root, because in
/// a pod the root is mounted at another path than the links assume.
pub(super) fn find(driver_root: &Path) -> Option<LibraryFile> {
    let root = File::open(driver_root).ok()?;
    DIRECTORIES.iter().find_map(|dir| {
        let link = Path::new(dir).join("libnvidia-ml.so.1");
        let (file, path) = open_inside(&root, &link, OFlags::PATH).ok()?;
        let meta = file.metadata().ok().filter(|meta| meta.is_file())?;
        let identity = (meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec());
        Some(LibraryFile { path, identity })
    })
}
