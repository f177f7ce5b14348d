//! The cgroups of a container with a share, told to the driver.
//!
//! ```text
//! DIR/<container id>      what /proc/<pid>/cgroup says of the container's first process
//! ```
//!
//! Limits that the GPU driver itself keeps are set for a cgroup, and the driver
//! knows by its cgroup which claim a process belongs to; but the container's own
//! cgroup is made after the claim is prepared. So this runs at `createRuntime`,
//! the one stage that has all of it: the cgroup is there, the process is in it,
//! nothing of the image runs yet, and the hook is still outside, in the host's
//! namespaces. At `createContainer` it would be inside, where a cgroup namespace
//! hides the path. At `poststop` the file goes again.

use crate::state::State;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// One line for each hierarchy; there are at most a dozen.
const LARGEST: u64 = 64 << 10;

/// Why the driver is not told.
#[derive(Debug, thiserror::Error)]
pub enum CgroupsError {
    #[error("the runtime names no process of container {id}")]
    NoProcess { id: String },
    #[error("cgroups of process {pid} cannot be read")]
    Read {
        pid: u32,
        #[source]
        cause: io::Error,
    },
    #[error("{path} cannot be written")]
    Write {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// Writes the container's file, or removes it once the container has stopped.
pub fn keep(dir: &Path, state: &State) -> Result<(), CgroupsError> {
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
        .and_then(|file| file.take(LARGEST).read_to_end(&mut text))
        .map_err(|cause| CgroupsError::Read { pid, cause })?;
    // Hidden until it is whole.
    let part = dir.join(format!(".{}.{}", state.id.as_str(), std::process::id()));
    let write = || -> io::Result<()> {
        let mut file = fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
        file.write_all(&text)?;
        fs::rename(&part, &path)
    };
    write().map_err(|cause| {
        // The first error is the one to tell.
        let _ = fs::remove_file(&part);
        fail(cause)
    })
}
