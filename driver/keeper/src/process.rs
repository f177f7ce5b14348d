//! Processes of MPS: found by what the kernel says of them, and never mistaken for
//! others that got their numbers.
//!
//! A control daemon and its servers carry the pipe directory in their environment,
//! and no two targets have the same. That is how a new keeper finds what an
//! earlier one started, and how nothing is left behind when a daemon dies without
//! its servers. Numbers alone would lie: a process is its number and its start
//! time, and once found it is held by a file descriptor of the kernel's.

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

/// Bytes of a process's arguments, and of its environment.
const MOST: u64 = 64 << 10;

/// A process that is held: its number cannot become another's while this is there.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) process: Process,
    fd: OwnedFd,
}

impl Held {
    /// The process of that number, if it is there.
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::NotFound)?;
        let fd = pidfd_open(number, PidfdFlags::empty())?;
        // Read after it is held, so it is this process's.
        let start_time = start_time(pid)?;
        Ok(Self { process: Process { pid, start_time }, fd })
    }

    /// Readable when the process has ended.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Whether it ends within that time.
    pub(crate) fn ends_within(&self, time: Duration) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        matches!(poll(&mut fds, Some(&timespec(time))), Ok(1..))
    }

    pub(crate) fn kill(&self) {
        // It may have ended already.
        let _ = pidfd_send_signal(&self.fd, Signal::KILL);
    }
}

/// A process that uses a pipe directory.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) held: Held,
    /// A control daemon, not a server.
    pub(crate) control: bool,
    /// Started with `-M`.
    pub(crate) multi_user: bool,
    /// What it was started for.
    pub(crate) device: String,
}

/// All control daemons and servers of a pipe directory. A control client has no `-f` and is none.
pub(crate) fn of_pipe(pipe: &Path) -> Vec<Found> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid| found(pid, pipe)).collect()
}

fn found(pid: u32, pipe: &Path) -> Option<Found> {
    // Cheapest first: there are thousands of processes on a node.
    let arguments = start_of(&format!("/proc/{pid}/cmdline")).ok()?;
    let arguments: Vec<&[u8]> = arguments.split(|byte| *byte == 0).collect();
    let name = arguments.first()?.rsplit(|byte| *byte == b'/').next()?;
    let control = name == CONTROL;
    if !(name == SERVER
        || (control && arguments.iter().any(|argument| *argument == b"-f" || *argument == b"-d")))
    {
        return None;
    }
    let held = Held::of(pid).ok()?;
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
    Some(Found { held, control, multi_user, device })
}

/// As much of a file as a daemon's would have: any process may say that its arguments are gigabytes long (`prctl(2)`,
/// `PR_SET_MM`).
fn start_of(path: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MOST).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Kills what still uses a pipe directory; false if something is left after that time.
pub(crate) fn sweep(pipe: &Path, time: Duration) -> bool {
    let left = of_pipe(pipe);
    left.iter().for_each(|found| found.held.kill());
    left.iter().all(|found| found.held.ends_within(time))
}

/// Field 22 of `/proc/<pid>/stat`, behind the command, which may hold anything but ends at the last `)`.
fn start_time(pid: u32) -> io::Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields = text.rsplit_once(')').map(|(_, fields)| fields);
    let start = fields.and_then(|fields| fields.split_whitespace().nth(19)?.parse().ok());
    start.ok_or_else(|| io::ErrorKind::InvalidData.into())
}
