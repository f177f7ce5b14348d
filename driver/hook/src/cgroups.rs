//! Reports the cgroups of a container to the node daemon, in `DIR/<container id>`.
//!
//! The file holds /proc/<pid>/cgroup of the container's first process. A claim with processes is not
//! released, and limits of shares are set per cgroup. But the cgroup is created after the claim is
//! prepared. So this runs at `createRuntime`: by then the cgroup exists, and no process of the image
//! runs. The hook is still in the host's namespaces. (At `createContainer`, a cgroup namespace would
//! hide the path.) At `poststop` the file is removed.

use crate::state::State;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Bytes read of /proc/<pid>/cgroup. It has one line per hierarchy, at most a dozen.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Why the cgroups cannot be reported.
#[derive(Debug, thiserror::Error)]
pub enum CgroupsError {
    #[error(
        "the OCI state of container {id} has no process id; the runtime must run this hook at createRuntime"
    )]
    NoProcess { id: String },
    #[error("cannot read the cgroups of process {pid}")]
    Read {
        pid: u32,
        #[source]
        cause: io::Error,
    },
    #[error("cannot write {path}")]
    Write {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// Writes the container's file, or removes it if the container has stopped.
pub fn report(dir: &Path, state: &State) -> Result<(), CgroupsError> {
    let path = dir.join(state.id.as_str());
    let fail = |cause| CgroupsError::Write { path: path.clone(), cause };
    if state.status == "stopped" {
        return match fs::remove_file(&path) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => Err(fail(cause)),
            _ => Ok(()),
        };
    }
    let pid = state.pid;
    if pid == 0 {
        return Err(CgroupsError::NoProcess { id: state.id.as_str().to_owned() });
    }
    let mut text = Vec::new();
    fs::File::open(format!("/proc/{pid}/cgroup"))
        .and_then(|file| file.take(MAX_FILE_BYTES).read_to_end(&mut text))
        .map_err(|cause| CgroupsError::Read { pid, cause })?;
    // Write to a hidden name first, so that readers see only complete files.
    let part = dir.join(format!(".{}.{}", state.id.as_str(), std::process::id()));
    let write = || -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let mut file = fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
        file.write_all(&text)?;
        fs::rename(&part, &path)
    };
    write().map_err(|cause| {
        // The first error is the one to report.
        let _ = fs::remove_file(&part);
        fail(cause)
    })
}
