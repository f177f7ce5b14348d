//! The library that enforces the limits of shares, installed on the host.
//!
//! Each file is stored under a hash of its contents, as the hook is. CDI files refer to it for the
//! life of a claim, so an upgrade adds files and never replaces one. Paths in the container are fixed,
//! so one container may have claims from before and after an upgrade. The files are below the plugin
//! directory and not in /run, which is often mounted `noexec`.

use sha2::{Digest, Sha256};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Path of the library in a container.
pub const IN_CONTAINER: &str = "/run/divvy/lib/libdivvy.so";
/// Directory in a container for the GPU driver's libraries that shims replace.
pub const REAL: &str = "/run/divvy/lib/real";
/// The sonames of the GPU driver that programs load. There is a shim for each of them.
pub const SHIMMED_LIBRARIES: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];
/// Below the plugin directory: one directory for each version of a file, named by its hash.
pub const DIRECTORY: &str = "lib";
const LIBRARY: &str = "libdivvy.so";
const LIST: &str = "ld.so.preload";
/// Subdirectory of the source directory with the shims.
const SHIMS: &str = "shim";

/// Why the library could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    #[error("library {path} cannot be read; set its directory with --library-dir, or turn shares off")]
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

/// The installed files.
///
/// ```text
/// <plugin directory>/lib/<hash>/libdivvy.so     and the two shims
/// <plugin directory>/lib/<hash>/ld.so.preload   one line: the path of libdivvy.so in a container
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Preloaded into every program of a container.
    pub preloaded: PathBuf,
    /// Mounted at `/etc/ld.so.preload`.
    pub list: PathBuf,
    /// Mounted in place of the GPU driver's libraries, in the order of [`SHIMMED_LIBRARIES`].
    pub shims: [PathBuf; 2],
}

impl Library {
    /// Installs the files from the directory `from`.
    pub fn install(from: &Path, plugin_dir: &Path) -> Result<Self, LibraryError> {
        let to = plugin_dir.join(DIRECTORY);
        let file = |dir: &str, name: &str| {
            let path = from.join(dir).join(name);
            let bytes = std::fs::read(&path).map_err(|cause| LibraryError::Read { path, cause })?;
            place(&to, name, &bytes)
        };
        let [cuda, nvml] = SHIMMED_LIBRARIES;
        Ok(Self {
            preloaded: file("", LIBRARY)?,
            list: place(&to, LIST, format!("{IN_CONTAINER}\n").as_bytes())?,
            shims: [file(SHIMS, cuda)?, file(SHIMS, nvml)?],
        })
    }

    /// Whether all files still exist.
    pub fn exists(&self) -> bool {
        self.files().all(|path| path.exists())
    }

    fn files(&self) -> impl Iterator<Item = &PathBuf> {
        [&self.preloaded, &self.list].into_iter().chain(&self.shims)
    }

    /// The directories of other versions, with their hashes.
    pub(super) fn other_versions(&self, plugin_dir: &Path) -> Vec<(String, PathBuf)> {
        let entries = std::fs::read_dir(plugin_dir.join(DIRECTORY)).into_iter().flatten().flatten();
        let is_current = |dir: &Path| self.files().any(|file| file.parent() == Some(dir));
        let version = |entry: std::fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            let is_hash = name.len() == HASH_DIGITS && name.bytes().all(|byte| byte.is_ascii_hexdigit());
            (is_hash && !is_current(&entry.path())).then(|| (name, entry.path()))
        };
        entries.filter_map(version).collect()
    }
}

/// Installs bytes as `<to>/<hash>/<name>`, unless the file exists.
fn place(to: &Path, name: &str, bytes: &[u8]) -> Result<PathBuf, LibraryError> {
    let path = to.join(hash(bytes)).join(name);
    install(&path, bytes, 0o555).map_err(|cause| LibraryError::Install { path: path.clone(), cause })?;
    Ok(path)
}

const HASH_DIGITS: usize = 16;

/// The hash that identifies contents: 16 hexadecimal digits.
pub(super) fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().take(HASH_DIGITS / 2).map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a file atomically and creates its directory. A file with the same bytes is left alone.
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

    /// A directory with stand-in files for the libraries.
    pub(crate) fn library(dir: &Path) -> PathBuf {
        let from = dir.join("library");
        std::fs::create_dir_all(from.join(SHIMS)).unwrap();
        std::fs::write(from.join(LIBRARY), LIBRARY).unwrap();
        for name in SHIMMED_LIBRARIES {
            std::fs::write(from.join(SHIMS).join(name), name).unwrap();
        }
        from
    }

    #[test]
    fn upgrade_adds_files_and_keeps_the_old_ones() {
        let dir = tempfile::tempdir().unwrap();
        let from = library(dir.path());
        let old = Library::install(&from, dir.path()).unwrap();
        assert_eq!(old, Library::install(&from, dir.path()).unwrap());
        assert_eq!(std::fs::read_to_string(&old.list).unwrap(), "/run/divvy/lib/libdivvy.so\n");
        std::fs::write(from.join(LIBRARY), "new").unwrap();
        let new = Library::install(&from, dir.path()).unwrap();
        assert_ne!(old.preloaded, new.preloaded);
        assert_eq!((&old.list, &old.shims), (&new.list, &new.shims), "unchanged files stay");
        assert!(old.exists() && new.exists());
        assert_eq!(std::fs::read_to_string(&old.preloaded).unwrap(), LIBRARY);
        assert_eq!(new.preloaded.metadata().unwrap().permissions().mode() & 0o777, 0o555);
    }

    #[test]
    fn missing_library_is_reported_with_its_flag() {
        let text = Library::install(Path::new("/nonexistent"), Path::new("/")).unwrap_err().to_string();
        assert!(text.contains("/nonexistent/libdivvy.so") && text.contains("--library-dir"), "{text}");
    }
}
