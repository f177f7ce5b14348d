//! The NVML library of a driver root, and whether it is still the same file.

use crate::paths::open_inside;
use rustix::fs::OFlags;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Where distributions, driver containers and managed nodes install it, below the driver root.
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

/// A file on disk, by its real path. An upgrade gives it another name, a
/// re-installation another identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LibraryFile {
    pub(super) path: PathBuf,
    identity: (u64, u64, u64, i64, i64),
}

/// The library, if the GPU driver is installed. Links are resolved inside the
/// driver root, which in a pod is not where they were made.
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
