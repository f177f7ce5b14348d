//! The library that keeps the limits of shares, on the host.
//!
//! ```text
//! <plugin directory>/lib/<hash>/libdivvy.so       and the two that stand in for the GPU driver's
//! <plugin directory>/lib/<hash>/ld.so.preload     one line: where a container sees the first
//! ```
//!
//! Each file lies under the hash of its content, as the hook does: files of claims
//! name it for as long as the claim lives, so an upgrade adds a file and never
//! replaces one. Containers see all of them at paths that never change, so one of
//! them may hold claims that were prepared before an upgrade and after it. On disk
//! and not in the run directory: /run is often mounted `noexec`.

use sha2::{Digest, Sha256};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Where a container sees the library.
pub const IN_CONTAINER: &str = "/run/divvy/lib/libdivvy.so";
/// Where a container sees the GPU driver's own libraries that another stands in for.
pub const REAL: &str = "/run/divvy/lib/real";
/// What programs ask the loader for, of all that the GPU driver brings; a library of
/// that name stands in for each.
pub const STOOD_IN: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];
const LIBRARY: &str = "libdivvy.so";
const LIST: &str = "ld.so.preload";
/// Below the directory that the libraries come from.
const SHIMS: &str = "shim";

/// Why containers with a share cannot have the library.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    #[error("library {path} cannot be read; name its directory with --library-dir, or turn shares off")]
    Read {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("library cannot be installed as {path}")]
    Install {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// The files on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Preloaded into every program of a container.
    pub preloaded: PathBuf,
    /// What is mounted at `/etc/ld.so.preload`.
    pub list: PathBuf,
    /// What is mounted in the place of the GPU driver's libraries, as in [`STOOD_IN`].
    pub stand_ins: [PathBuf; 2],
}

impl Library {
    /// Puts the files of a directory in place.
    pub fn install(from: &Path, plugin_dir: &Path) -> Result<Self, LibraryError> {
        let to = plugin_dir.join("lib");
        let file = |dir: &str, name: &str| {
            let path = from.join(dir).join(name);
            let bytes = std::fs::read(&path).map_err(|cause| LibraryError::Read { path, cause })?;
            place(&to, name, &bytes)
        };
        let [cuda, nvml] = STOOD_IN;
        Ok(Self {
            preloaded: file("", LIBRARY)?,
            list: place(&to, LIST, format!("{IN_CONTAINER}\n").as_bytes())?,
            stand_ins: [file(SHIMS, cuda)?, file(SHIMS, nvml)?],
        })
    }

    /// Whether all files are still where they were put.
    pub fn is_there(&self) -> bool {
        [&self.preloaded, &self.list].into_iter().chain(&self.stand_ins).all(|path| path.exists())
    }
}

/// Puts bytes at `<to>/<hash>/<name>`, unless they are there.
fn place(to: &Path, name: &str, bytes: &[u8]) -> Result<PathBuf, LibraryError> {
    let path = to.join(hash(bytes)).join(name);
    install(&path, bytes, 0o555).map_err(|cause| LibraryError::Install { path: path.clone(), cause })?;
    Ok(path)
}

/// The name by which a content is known: 16 hexadecimal digits.
pub(super) fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// Puts a file in place at once, with its directory; one that has the bytes is left alone.
pub(super) fn install(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    if std::fs::read(path).is_ok_and(|have| have == bytes) {
        return Ok(());
    }
    let part = path.with_added_extension(format!("{}.part", std::process::id()));
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    std::fs::write(&part, bytes)
        .and_then(|()| std::fs::set_permissions(&part, std::fs::Permissions::from_mode(mode)))
        .and_then(|()| std::fs::rename(&part, path))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A directory with files that have the names of the libraries.
    pub(crate) fn library(dir: &Path) -> PathBuf {
        let from = dir.join("library");
        std::fs::create_dir_all(from.join(SHIMS)).unwrap();
        std::fs::write(from.join(LIBRARY), LIBRARY).unwrap();
        for name in STOOD_IN {
            std::fs::write(from.join(SHIMS).join(name), name).unwrap();
        }
        from
    }

    #[test]
    fn an_upgrade_adds_files_and_leaves_the_old_ones() {
        let dir = tempfile::tempdir().unwrap();
        let from = library(dir.path());
        let old = Library::install(&from, dir.path()).unwrap();
        assert_eq!(old, Library::install(&from, dir.path()).unwrap());
        assert_eq!(std::fs::read_to_string(&old.list).unwrap(), "/run/divvy/lib/libdivvy.so\n");
        std::fs::write(from.join(LIBRARY), "new").unwrap();
        let new = Library::install(&from, dir.path()).unwrap();
        assert_ne!(old.preloaded, new.preloaded);
        assert_eq!((&old.list, &old.stand_ins), (&new.list, &new.stand_ins), "what is the same stays");
        assert!(old.is_there() && new.is_there());
        assert_eq!(std::fs::read_to_string(&old.preloaded).unwrap(), LIBRARY);
        assert_eq!(new.preloaded.metadata().unwrap().permissions().mode() & 0o777, 0o555);
    }

    #[test]
    fn a_missing_library_is_named_with_its_flag() {
        let text = Library::install(Path::new("/nonexistent"), Path::new("/")).unwrap_err().to_string();
        assert!(text.contains("/nonexistent/libdivvy.so") && text.contains("--library-dir"), "{text}");
    }
}
