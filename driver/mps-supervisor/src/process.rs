//! Finds the MPS processes of a target in /proc and holds them by pidfd.
//!
//! A control daemon and its servers have the pipe directory in their environment, and each target
//! has its own. So a new supervisor finds the daemons of an earlier one, and also servers whose
//! daemon died. PIDs are reused, so a process is identified by PID and start time; once it is
//! found, a pidfd refers to it.

use crate::watch::timespec;
use divvy_api::mps::Process;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

const CONTROL: &[u8] = b"nvidia-cuda-mps-control";
const SERVER: &[u8] = b"nvidia-cuda-mps-server";
/// The environment variable that names the pipe directory.
pub(crate) const PIPE: &str = "CUDA_MPS_PIPE_DIRECTORY";
/// The environment variable that names the device.
pub(crate) const DEVICE: &str = "CUDA_VISIBLE_DEVICES";

/// Bytes read of the arguments and of the environment of a process, far more than MPS uses.
const MAX_PROC_FILE_BYTES: u64 = 64 << 10;

/// A process and its pidfd, which refers to this process even after the PID is reused.
#[derive(Debug)]
pub(crate) struct ProcessHandle {
    pub(crate) process: Process,
    fd: OwnedFd,
}

impl ProcessHandle {
    /// Opens a pidfd for the process.
    ///
    /// # Errors
    /// `NotFound` or `ESRCH` if there is no such process.
    pub(crate) fn open(pid: u32) -> io::Result<Self> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
        let fd = pidfd_open(number, PidfdFlags::empty())?;
        // Read after the pidfd is open, so the start time belongs to this process.
        let start_time = start_time(pid)?;
        Ok(Self { process: Process { pid, start_time }, fd })
    }

    /// Becomes readable when the process exits.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Waits up to `time` for the process to exit; true if it has exited.
    pub(crate) fn wait_exit(&self, time: Duration) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&timespec(time))), Ok(1..))
    }

    pub(crate) fn kill(&self) {
        // An error means that it has exited already.
        let _ = pidfd_send_signal(&self.fd, Signal::KILL);
    }
}

/// A process that uses a pipe directory.
#[derive(Debug)]
pub(crate) struct PipeProcess {
    pub(crate) handle: ProcessHandle,
    /// True for a control daemon, false for a server.
    pub(crate) is_control: bool,
    /// Started with `-M`.
    pub(crate) multi_user: bool,
    /// The value of `CUDA_VISIBLE_DEVICES` at its start.
    pub(crate) device: String,
}

/// All control daemons and servers that use a pipe directory. Control clients are left out: they
/// run the same program as the daemon, but without `-f` or `-d`.
pub(crate) fn pipe_processes(pipe: &Path) -> Vec<PipeProcess> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid| found(pid, pipe)).collect()
}

fn found(pid: u32, pipe: &Path) -> Option<PipeProcess> {
    // The cheapest check comes first: a node runs thousands of processes.
    let arguments = start_of(&format!("/proc/{pid}/cmdline")).ok()?;
    let arguments: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
    let name = arguments.first()?.rsplit(|byte| *byte == b'/').next()?;
    let is_control = name == CONTROL;
    if !(name == SERVER
        || (is_control && arguments.iter().any(|argument| *argument == b"-f" || *argument == b"-d")))
    {
        return None;
    }
    let handle = ProcessHandle::open(pid).ok()?;
    let environment = start_of(&format!("/proc/{pid}/environ")).ok()?;
    let variable = |name: &str| {
        let mut entries = environment.split(|byte| *byte == 0);
        entries.find_map(|entry| entry.strip_prefix(name.as_bytes())?.strip_prefix(b"="))
    };
    if variable(PIPE)? != pipe.as_os_str().as_bytes() {
        return None;
    }
    let device = String::from_utf8_lossy(variable(DEVICE).unwrap_or_default()).into_owned();
    let multi_user = arguments.iter().any(|argument| *argument == b"-M");
    Some(PipeProcess { handle, is_control, multi_user, device })
}

/// The start of a file. It is cut at [`MAX_PROC_FILE_BYTES`] because any process may claim gigabytes of
/// arguments (`prctl(2)`, `PR_SET_MM`).
fn start_of(path: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_PROC_FILE_BYTES).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Kills all processes that use a pipe directory; false if one still runs after `time`.
pub(crate) fn kill_pipe_processes(pipe: &Path, time: Duration) -> bool {
    let left = pipe_processes(pipe);
    left.iter().for_each(|found| found.handle.kill());
    left.iter().all(|found| found.handle.wait_exit(time))
}

/// Field 22 of `/proc/<pid>/stat`, in clock ticks since boot. The command name before it may contain
/// any bytes, but it ends at the last `)`.
fn start_time(pid: u32) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = text.rsplit_once(')').map(|(_, fields)| fields);
    let start = fields.and_then(|fields| fields.split_whitespace().nth(19)?.parse().ok());
    start.ok_or_else(|| io::ErrorKind::InvalidData.into())
}
