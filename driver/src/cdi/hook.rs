//! The OCI hook on the host: a copy of `divvy-hook` below the plugin directory,
//! named by its content. Files of claims name that copy for as long as the
//! claim lives, so an upgrade adds a file and never replaces one.

use super::library;
use std::io;
use std::path::{Path, PathBuf};

/// How containers come to find the GPU driver's libraries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookMode {
    /// This `divvy-hook` binary is installed on the node and run by the runtime
    /// for each container.
    Own(PathBuf),
    /// No code runs: libraries are mounted a second time under their other
    /// names, and found where the image's loader looks into their directory.
    None,
}

impl HookMode {
    /// The hook that lies beside the running executable.
    pub fn beside_executable() -> io::Result<Self> {
        Ok(Self::Own(std::env::current_exe()?.with_file_name("divvy-hook")))
    }
}

/// Why the hook is not in place.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    #[error("hook binary {path} cannot be read; name it with --hook")]
    Read {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("hook cannot be installed as {path}")]
    Install {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// Puts the hook in place and answers where; `None` in the mode without one.
pub fn install(mode: &HookMode, plugin_dir: &Path) -> Result<Option<PathBuf>, HookError> {
    let HookMode::Own(binary) = mode else { return Ok(None) };
    let bytes = std::fs::read(binary).map_err(|cause| HookError::Read { path: binary.clone(), cause })?;
    let path = plugin_dir.join("hook").join(format!("divvy-hook-{}", library::hash(&bytes)));
    library::install(&path, &bytes, 0o755)
        .map_err(|cause| HookError::Install { path: path.clone(), cause })?;
    Ok(Some(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn an_upgrade_adds_a_file_and_leaves_the_old_one() {
        let dir = tempfile::tempdir().unwrap();
        let binary = dir.path().join("divvy-hook");
        let install = |content: &str| {
            std::fs::write(&binary, content).unwrap();
            super::install(&HookMode::Own(binary.clone()), dir.path()).unwrap().unwrap()
        };
        let old = install("one");
        assert_eq!(old, install("one"));
        let new = install("two");
        assert_ne!(old, new);
        assert_eq!(std::fs::read(&old).unwrap(), b"one");
        assert_eq!(std::fs::metadata(&new).unwrap().permissions().mode() & 0o777, 0o755);
    }

    #[test]
    fn a_damaged_copy_is_put_right() {
        let dir = tempfile::tempdir().unwrap();
        let binary = dir.path().join("divvy-hook");
        std::fs::write(&binary, "one").unwrap();
        let mode = HookMode::Own(binary);
        let path = install(&mode, dir.path()).unwrap().unwrap();
        std::fs::write(&path, "on").unwrap();
        install(&mode, dir.path()).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"one");
    }

    #[test]
    fn a_missing_binary_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let text = install(&HookMode::Own("/nonexistent/hook".into()), dir.path()).unwrap_err().to_string();
        assert!(text.contains("/nonexistent/hook"), "{text}");
    }
}
