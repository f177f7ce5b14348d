//! Reports a container to the node daemon, in `DIR/<container id>`, until it has stopped.
//!
//! A claim whose container runs is not released: one file holds pid and start time of the container's
//! first process. Limits of shares are set per cgroup: another file holds `/proc/<pid>/cgroup`. Both are
//! known only after the claim was prepared, so this runs at `createRuntime`. No process of the image runs
//! then, and the hook is in the host's namespaces. (At `createContainer`, a cgroup namespace would hide
//! the path.) At `poststop` the file is removed.

use crate::state::State;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Bytes read of a file of the process. They have a line, or one per hierarchy.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Why a container cannot be reported.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    #[error(
        "the OCI state of container {id} has no process id; the runtime must run this hook at createRuntime"
    )]
    NoProcess { id: String },
    #[error("cannot read {path}")]
    Read {
        path: PathBuf,
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

/// Reports the container's cgroups, or removes the report if the container has stopped.
pub fn cgroups(dir: &Path, state: &State) -> Result<(), ReportError> {
    report(dir, state, "cgroup", |text| Some(text.to_owned()))
}

/// Reports `<pid> <start time>` of the container's first process, or removes the report if the container
/// has stopped.
pub fn process(dir: &Path, state: &State) -> Result<(), ReportError> {
    report(dir, state, "stat", |stat| {
        // Field 22. The command name before it may contain anything.
        let start = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?;
        Some(format!("{} {start}\n", state.pid))
    })
}

/// Reports what `select` finds in a file of the container's first process.
fn report(
    dir: &Path,
    state: &State,
    file: &str,
    select: impl FnOnce(&str) -> Option<String>,
) -> Result<(), ReportError> {
    let path = dir.join(state.id.as_str());
    let fail = |cause| ReportError::Write { path: path.clone(), cause };
    if state.status == "stopped" {
        return match fs::remove_file(&path) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => Err(fail(cause)),
            _ => Ok(()),
        };
    }
    let pid = state.pid;
    if pid == 0 {
        return Err(ReportError::NoProcess { id: state.id.as_str().to_owned() });
    }
    let source = Path::new("/proc").join(pid.to_string()).join(file);
    let unread = |cause| ReportError::Read { path: source.clone(), cause };
    let mut text = String::new();
    fs::File::open(&source)
        .and_then(|file| file.take(MAX_FILE_BYTES).read_to_string(&mut text))
        .map_err(unread)?;
    let text = select(&text).ok_or_else(|| unread(io::ErrorKind::InvalidData.into()))?;
    // Write to a hidden name first, so that readers see only complete files.
    let part = dir.join(format!(".{}.{}", state.id.as_str(), std::process::id()));
    let write = || -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        let mut file = fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
        file.write_all(text.as_bytes())?;
        fs::rename(&part, &path)
    };
    write().map_err(|cause| {
        // The first error is the one to report.
        let _ = fs::remove_file(&part);
        fail(cause)
    })
}
