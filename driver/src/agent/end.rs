//! Ends a process, and surely no other.
//!
//! A number can go to another process between the look and the blow. So the process is
//! taken hold of first (a pidfd stays with its process), then looked at again, and only
//! then struck: by its start, which no two processes of one number share.

use super::finding::Suspect;
use super::process::Stat;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::io;
use std::path::Path;

/// How that went.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ended {
    Killed,
    /// It had ended already, and its number may be another's by now.
    Gone,
}

/// Why a process runs on.
#[derive(Debug, thiserror::Error)]
#[error("process {pid} cannot be ended; the node daemon must be root and in the host's PID namespace")]
pub(super) struct EndError {
    pid: u32,
    #[source]
    cause: io::Error,
}

/// SIGKILL to the process that was looked at.
pub(super) fn end(proc_root: &Path, suspect: &Suspect) -> Result<Ended, EndError> {
    let failed = |cause: rustix::io::Errno| EndError { pid: suspect.pid, cause: cause.into() };
    let Some(pid) = i32::try_from(suspect.pid).ok().and_then(Pid::from_raw) else { return Ok(Ended::Gone) };
    let held = match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(held) => held,
        Err(rustix::io::Errno::SRCH) => return Ok(Ended::Gone),
        Err(cause) => return Err(failed(cause)),
    };
    let is_same = Stat::read(&proc_root.join(suspect.pid.to_string()))
        .is_some_and(|stat| stat.start == suspect.start && !stat.ended);
    if !is_same {
        return Ok(Ended::Gone);
    }
    match pidfd_send_signal(held, Signal::KILL) {
        Ok(()) => Ok(Ended::Killed),
        Err(rustix::io::Errno::SRCH) => Ok(Ended::Gone),
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
    fn only_the_process_that_was_looked_at_is_ended() {
        let (mut child, suspect) = sleeper();
        let successor = Suspect { start: suspect.start + 1, ..suspect.clone() };
        assert_eq!(end(Path::new("/proc"), &successor).expect("looked"), Ended::Gone);
        assert!(child.try_wait().expect("waited").is_none(), "another of that number is left alone");
        assert_eq!(end(Path::new("/proc"), &suspect).expect("ended"), Ended::Killed);
        assert_eq!(child.wait().expect("waited").signal(), Some(9));
        assert_eq!(end(Path::new("/proc"), &suspect).expect("looked"), Ended::Gone);
    }
}
