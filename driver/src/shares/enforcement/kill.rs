//! Kills a process without the risk of hitting another one that reused its pid.
//!
//! The process is opened first, because a pidfd stays with its process. Then its start time is
//! checked, which no two processes with the same pid share. Only then is it killed.

use crate::shares::snapshot::finding::Suspect;
use crate::shares::snapshot::process::Stat;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io;
use std::path::Path;

/// The result of an attempt to kill a process.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Killed,
    /// It exited before, and its pid may belong to another process now.
    Gone,
}

/// The process could not be killed.
#[derive(Debug, thiserror::Error)]
#[error("cannot kill process {pid}: the node daemon must run as root in the host's PID namespace")]
pub(super) struct KillError {
    pid: u32,
    #[source]
    cause: io::Error,
}

/// Sends SIGKILL to the process that was audited.
pub(super) fn kill(proc_root: &Path, suspect: &Suspect) -> Result<Outcome, KillError> {
    let failed = |cause: rustix::io::Errno| KillError { pid: suspect.pid, cause: cause.into() };
    let Some(pid) = i32::try_from(suspect.pid).ok().and_then(Pid::from_raw) else {
        return Ok(Outcome::Gone);
    };
    let handle = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(handle) => handle,
        Err(rustix::io::Errno::SRCH) => return Ok(Outcome::Gone),
        Err(cause) => return Err(failed(cause)),
    };
    let is_same = Stat::read(&proc_root.join(suspect.pid.to_string()))
        .is_some_and(|stat| stat.start == suspect.start && !stat.is_zombie);
    if !is_same {
        return Ok(Outcome::Gone);
    }
    match pidfd_send_signal(handle, Signal::KILL) {
        Ok(()) => Ok(Outcome::Killed),
        Err(rustix::io::Errno::SRCH) => Ok(Outcome::Gone),
        Err(cause) => Err(failed(cause)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Child, Command};

    fn sleeper() -> (Child, Suspect) {
        let child = Command::new("sleep").arg("600").spawn().expect("sleep");
        let pid = child.id();
        let stat = Stat::read(&Path::new("/proc").join(pid.to_string())).expect("it runs");
        (child, Suspect { pid, start: stat.start, name: stat.name })
    }

    #[test]
    fn a_process_with_a_reused_pid_is_not_killed() {
        let (mut child, suspect) = sleeper();
        let successor = Suspect { start: suspect.start + 1, ..suspect.clone() };
        assert_eq!(kill(Path::new("/proc"), &successor).expect("checked"), Outcome::Gone);
        assert!(
            child.try_wait().expect("waited").is_none(),
            "a process with another start time is not killed"
        );
        assert_eq!(kill(Path::new("/proc"), &suspect).expect("killed"), Outcome::Killed);
        assert_eq!(child.wait().expect("waited").signal(), Some(9));
        assert_eq!(kill(Path::new("/proc"), &suspect).expect("checked"), Outcome::Gone);
    }
}
