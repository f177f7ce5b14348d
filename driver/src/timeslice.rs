//! The time slice of a GPU: how long one process runs before the next has its
//! turn. NVML has no call for it, so the GPU driver's own `nvidia-smi
//! compute-policy` sets it; nothing cheap reads it back.
//!
//! The program comes from the driver root and gets its one library by
//! `LD_PRELOAD`: a search path would lead it to the host's C library as well,
//! which does not fit the loader of a pod's image. It is not run under chroot: a
//! driver root that is an image has no /proc and no /dev of its own, and chroot
//! would take privileges that nothing else here needs.

use crate::gpus;
use crate::paths::{HostPaths, open_inside};
use divvy_api::GpuUuid;
use divvy_api::sharing::Interval;
use rustix::fs::OFlags;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};
use tokio::process::Command;
use tokio::time::timeout_at;

/// How long `nvidia-smi` may take; on a node with many GPUs it takes a second or two.
const WITHIN: Duration = Duration::from_secs(15);
const PROGRAM: &str = "nvidia-smi";
/// Where distributions, driver containers and managed nodes install it, below the driver root.
const DIRECTORIES: [&str; 5] =
    ["usr/bin", "bin", "usr/local/nvidia/bin", "home/kubernetes/bin/nvidia/bin", "run/current-system/sw/bin"];

/// Why the time slice is not set.
#[derive(Debug, thiserror::Error)]
pub enum TimesliceError {
    #[error("no {PROGRAM} below {root}; is the GPU driver installed there?")]
    NoProgram { root: PathBuf },
    #[error("{program} cannot be started")]
    Start {
        program: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{program} did not end within {within:?} and was killed")]
    Late { program: PathBuf, within: Duration },
    #[error("{program} failed with {status}: {said}")]
    Failed { program: PathBuf, status: ExitStatus, said: String },
}

impl TimesliceError {
    /// Whether the time slice may have changed all the same.
    pub fn may_have_taken_effect(&self) -> bool {
        match self {
            Self::NoProgram { .. } | Self::Start { .. } => false,
            Self::Late { .. } | Self::Failed { .. } => true,
        }
    }
}

/// Sets it, by `not_after` at the latest.
pub async fn set(
    paths: &HostPaths,
    gpu: &GpuUuid,
    interval: Interval,
    not_after: Option<Instant>,
) -> Result<(), TimesliceError> {
    let root = paths.seen(&paths.driver_root);
    let found = find(&root).ok_or_else(|| TimesliceError::NoProgram { root: paths.driver_root.clone() })?;
    let program = || paths.on_host(&found);
    let within = not_after.map_or(WITHIN, |when| WITHIN.min(when.saturating_duration_since(Instant::now())));
    let mut command = Command::new(&found);
    command
        .args(["compute-policy", "-i", gpu.as_str(), &format!("--set-timeslice={}", interval.number())])
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    if let Some(library) = gpus::library(&root) {
        command.env("LD_PRELOAD", library);
    }
    let child = command.spawn().map_err(|cause| TimesliceError::Start { program: program(), cause })?;
    let deadline = tokio::time::Instant::now() + within;
    // At the deadline the child is dropped and so killed.
    let output = match timeout_at(deadline, child.wait_with_output()).await {
        Err(_) => return Err(TimesliceError::Late { program: program(), within }),
        Ok(Err(cause)) => return Err(TimesliceError::Start { program: program(), cause }),
        Ok(Ok(output)) => output,
    };
    if output.status.success() {
        return Ok(());
    }
    // It complains on either of the two.
    let last = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        text.lines().rfind(|line| !line.trim().is_empty()).map(|line| line.trim().to_owned())
    };
    let said = last(&output.stderr).or_else(|| last(&output.stdout)).unwrap_or_default();
    Err(TimesliceError::Failed { program: program(), status: output.status, said })
}

/// The program by its real path, every link resolved inside the root.
fn find(root: &Path) -> Option<PathBuf> {
    let opened = File::open(root).ok()?;
    DIRECTORIES.iter().find_map(|dir| {
        let (file, real) = open_inside(&opened, &Path::new(dir).join(PROGRAM), OFlags::PATH).ok()?;
        file.metadata().ok()?.is_file().then_some(real)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const AMPLE: Duration = Duration::from_secs(30);

    async fn check(script: &str, within: Duration, expected: Result<(), &str>) {
        let dir = tempfile::tempdir().unwrap();
        let paths = HostPaths::below(dir.path());
        let bin = paths.driver_root.join("usr/bin");
        std::fs::create_dir_all(&bin).unwrap();
        let program = bin.join(PROGRAM);
        if !script.is_empty() {
            // Written by a child, so that no file open for writing here is executed.
            let text = format!("#!/bin/sh\n{script}\n");
            let made = std::process::Command::new("sh")
                .args(["-c", "printf '%s' \"$1\" > \"$2\" && chmod 755 \"$2\"", "sh", &text])
                .arg(&program)
                .status();
            assert!(made.unwrap().success());
            assert_eq!(program.metadata().unwrap().permissions().mode() & 0o777, 0o755);
        }
        let found = set(&paths, &"GPU-a".into(), Interval::Medium, Some(Instant::now() + within)).await;
        match (found, expected) {
            (Ok(()), Ok(())) => {}
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (found, _) => panic!("{found:?} instead of {expected:?}"),
        }
    }

    #[tokio::test]
    async fn the_program_of_the_driver_root_is_asked_and_quoted() {
        check(r#"test "$*" = "compute-policy -i GPU-a --set-timeslice=2""#, AMPLE, Ok(())).await;
        check("echo Unable >&2; exit 3", AMPLE, Err("exit status: 3: Unable")).await;
        check("echo Not Supported; exit 3", AMPLE, Err("exit status: 3: Not Supported")).await;
        check("", AMPLE, Err("no nvidia-smi below")).await;
        check("exec sleep 600", Duration::from_millis(100), Err("did not end within")).await;
    }
}
