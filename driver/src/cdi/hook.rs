//! The OCI hook on the host: a copy of `divvy-hook` below the plugin directory, named by a hash of its
//! contents. CDI files refer to it for the life of a claim, so an upgrade adds a file and never
//! replaces one.

use super::library;
use std::io;
use std::path::{Path, PathBuf};

/// How containers find the GPU driver's libraries.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookMode {
    /// This `divvy-hook` binary is installed on the node, and the runtime runs it for each container.
    Own(PathBuf),
    /// No hook: libraries are mounted a second time under their other names. Programs find them if
    /// the image's loader searches that directory.
    None,
}

impl HookMode {
    /// The hook next to the running executable.
    pub fn beside_executable() -> io::Result<Self> {
        Ok(Self::Own(std::env::current_exe()?.with_file_name("divvy-hook")))
    }
}

/// Why the hook could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    #[error("hook binary {path} cannot be read; set it with --hook")]
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

/// Installs the hook and returns its path; `None` in the mode without a hook.
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
    fn upgrade_adds_a_file_and_keeps_the_old_one() {
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
    fn damaged_copy_is_replaced() {
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
    fn missing_binary_is_named_in_the_error() {
        let dir = tempfile::tempdir().unwrap();
        let text = install(&HookMode::Own("/nonexistent/hook".into()), dir.path()).unwrap_err().to_string();
        assert!(text.contains("/nonexistent/hook"), "{text}");
    }
}
