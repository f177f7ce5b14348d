//! The time slice of a GPU: how long one process runs before the next one.
//!
//! NVML cannot set it, so the GPU driver's `nvidia-smi compute-policy` does. It cannot be read back
//! cheaply. The program runs from the driver root and gets its library through `LD_PRELOAD`. A
//! library search path would also select the host's C library, which does not fit the loader in the
//! pod's image. A chroot would need /proc and /dev in the driver root, and more privileges.

use crate::gpu;
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

/// Time for `nvidia-smi`, which takes one or two seconds on a node with many GPUs.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(15);
const PROGRAM: &str = "nvidia-smi";
/// Directories below the driver root where distributions, driver containers and managed Kubernetes
/// install it.
const DIRECTORIES: [&str; 5] =
    ["usr/bin", "bin", "usr/local/nvidia/bin", "home/kubernetes/bin/nvidia/bin", "run/current-system/sw/bin"];

/// Why the time slice was not set.
#[derive(Debug, thiserror::Error)]
pub enum TimesliceError {
    #[error("no {PROGRAM} below {root}; is the GPU driver installed there?")]
    NoProgram { root: PathBuf },
    #[error("cannot start {program}")]
    Start {
        program: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{program} did not finish within {within:?} and was killed")]
    Timeout { program: PathBuf, within: Duration },
    #[error("{program} failed with {status}: {output}")]
    Failed { program: PathBuf, status: ExitStatus, output: String },
}

impl TimesliceError {
    /// Whether the time slice may have changed nevertheless.
    pub fn may_have_taken_effect(&self) -> bool {
        match self {
            Self::NoProgram { .. } | Self::Start { .. } => false,
            Self::Timeout { .. } | Self::Failed { .. } => true,
        }
    }
}

/// Sets the time slice of a GPU; `not_after` is the deadline.
pub async fn set(
    paths: &HostPaths,
    gpu: &GpuUuid,
    interval: Interval,
    not_after: Option<Instant>,
) -> Result<(), TimesliceError> {
    let root = paths.local_path(&paths.driver_root);
    let found = find(&root).ok_or_else(|| TimesliceError::NoProgram { root: paths.driver_root.clone() })?;
    let program = || paths.host_path(&found);
    let within = not_after
        .map_or(PROGRAM_TIMEOUT, |when| PROGRAM_TIMEOUT.min(when.saturating_duration_since(Instant::now())));
    let mut command = Command::new(&found);
    command
        .args(["compute-policy", "-i", gpu.as_str(), &format!("--set-timeslice={}", interval.number())])
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    if let Some(library) = gpu::library::path(&root) {
        command.env("LD_PRELOAD", library);
    }
    let child = command.spawn().map_err(|cause| TimesliceError::Start { program: program(), cause })?;
    let deadline = tokio::time::Instant::now() + within;
    // At the deadline the child is dropped and thereby killed.
    let output = match timeout_at(deadline, child.wait_with_output()).await {
        Err(_) => return Err(TimesliceError::Timeout { program: program(), within }),
        Ok(Err(cause)) => return Err(TimesliceError::Start { program: program(), cause }),
        Ok(Ok(output)) => output,
    };
    if output.status.success() {
        return Ok(());
    }
    // Errors are printed on either stream.
    let last = |bytes: &[u8]| {
        let text = String::from_utf8_lossy(bytes);
        text.lines().rfind(|line| !line.trim().is_empty()).map(|line| line.trim().to_owned())
    };
    let printed = last(&output.stderr).or_else(|| last(&output.stdout)).unwrap_or_default();
    Err(TimesliceError::Failed { program: program(), status: output.status, output: printed })
}

/// The real path of the program, with links resolved inside the root.
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
            // A child writes the file: executing it fails while this process has it open for writing.
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
    async fn nvidia_smi_of_the_driver_root_is_run_and_its_error_reported() {
        check(r#"test "$*" = "compute-policy -i GPU-a --set-timeslice=2""#, AMPLE, Ok(())).await;
        check("echo Unable >&2; exit 3", AMPLE, Err("exit status: 3: Unable")).await;
        check("echo Not Supported; exit 3", AMPLE, Err("exit status: 3: Not Supported")).await;
        check("", AMPLE, Err("no nvidia-smi below")).await;
        check("exec sleep 600", Duration::from_millis(100), Err("did not finish within")).await;
    }
}
