//! The NVML library of a driver root, and whether it is still the same file.

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

/// The library, if the GPU driver is installed.
pub(super) fn find(driver_root: &Path) -> Option<LibraryFile> {
    DIRECTORIES.iter().find_map(|dir| {
        let path = driver_root.join(dir).join("libnvidia-ml.so.1").canonicalize().ok()?;
        let meta = std::fs::metadata(&path).ok().filter(|meta| meta.is_file())?;
        let identity = (meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec());
        Some(LibraryFile { path, identity })
    })
}
