//! Shared by the MPS programs: file names, messages, limits and the log.

use crate::sim::Sim;
use crate::state::{Gpu, State};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Call name for rules: the control daemon handles a command or a client. A hold makes the daemon
/// hang, a fault makes it exit.
pub const CONTROL: &str = "mps-control";
/// Call name for rules: the start of the control daemon.
pub const CONTROL_START: &str = "mps-control-start";
/// Call name for rules: a server executes work of a client. A hold makes the server hang, and
/// GPU_IS_LOST makes it exit. After any other fault the server is in the FAULT state until its
/// clients are gone.
pub const SERVER: &str = "mps-server";
/// Call name for rules: the start of a server.
pub const SERVER_START: &str = "mps-server-start";

/// The daemon's socket in the pipe directory.
pub(super) const SOCKET: &str = "control";
/// Locked while a daemon uses the pipe directory.
pub(super) const LOCK_FILE: &str = "control_lock";
/// File with the daemon's process id.
pub(super) const PID_FILE: &str = "nvidia-cuda-mps-control.pid";
/// Default directories of pipes and logs.
pub(super) const PIPE_DIRECTORY: &str = "/tmp/nvidia-mps";
pub(super) const LOG_DIRECTORY: &str = "/var/log/nvidia-mps";

/// The first message on a connection to the control daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ConnectRequest {
    /// JsonLines of the text protocol follow.
    Commands,
    /// A CUDA process of this user requests a server.
    Client { uid: u32 },
}

/// The daemon's answer to a client.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ConnectReply {
    /// Name of the server's socket in the pipe directory.
    Server {
        socket: String,
    },
    Refused(String),
}

/// The daemon's answer to a command.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    /// Printed as it is.
    pub(super) text: String,
}

/// A request to a server.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Request {
    /// The first request of a client.
    Connect {
        name: String,
        memory_mib: u64,
        wants: Limits,
    },
    /// A client submits work.
    Work,
    Status,
    Clients,
    Get,
    Set(Limits),
    Shutdown {
        force: bool,
    },
    Terminate {
        client: u32,
    },
}

/// The answer of a server.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Reply {
    Connected(Connected),
    Done,
    Status(Status),
    Clients(Vec<Client>),
    Limits(Limits),
    /// A CUDA error: its name and a reason.
    Refused(String),
}

/// Properties of a client after it has connected.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Connected {
    pub(super) pid: u32,
    pub(super) server: u32,
    pub(super) device: String,
    pub(super) memory_mib: u64,
    pub(super) thread_percentage: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) memory_limit_mib: Option<u64>,
}

/// A connected client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Client {
    pub(super) pid: u32,
    pub(super) name: String,
    pub(super) memory_mib: u64,
}

/// Resource limits of a process; none means unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Limits {
    /// Percentage of the threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) threads: Option<f64>,
    /// Device memory in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) memory_mib: Option<u64>,
}

/// State of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Status {
    Initializing,
    Active,
    Fault,
}

impl Status {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Initializing => "INITIALIZING",
            Self::Active => "ACTIVE",
            Self::Fault => "FAULT",
        }
    }
}

impl Limits {
    /// The tighter of both limits: a client cannot exceed its server.
    pub(super) fn tighter(self, other: Self) -> Self {
        let threads = [self.threads, other.threads].into_iter().flatten().reduce(f64::min);
        let memory_mib = [self.memory_mib, other.memory_mib].into_iter().flatten().min();
        Self { threads, memory_mib }
    }

    /// These limits, with those of `other` where none is set.
    pub(super) fn or(self, other: Self) -> Self {
        Self { threads: self.threads.or(other.threads), memory_mib: self.memory_mib.or(other.memory_mib) }
    }
}

/// Parses a percentage of threads: above 0, at most 100.
pub(super) fn parse_percentage(text: &str) -> Option<f64> {
    text.parse().ok().filter(|value| *value > 0.0 && *value <= 100.0)
}

/// Parses a size such as `4G` or `900M`; in MiB.
pub(super) fn parse_memory(text: &str) -> Option<u64> {
    let number = |text: &str| text.parse::<u64>().ok().filter(|value| *value > 0);
    match text.strip_suffix(['G', 'g']) {
        Some(giga) => number(giga)?.checked_mul(1024),
        None => number(text.strip_suffix(['M', 'm'])?),
    }
}

/// Formats memory like the control daemon: from 1 GiB on in whole GiB, rounded down (seen with
/// 595.91).
pub(super) fn format_memory(mib: u64) -> String {
    if mib < 1024 { format!("{mib}M") } else { format!("{}G", mib / 1024) }
}

/// The first device in `CUDA_VISIBLE_DEVICES`: the GPU's slot, and GPU and compute instance of a
/// MIG device.
pub(super) fn device(state: &State, visible: &str) -> Option<(usize, Option<(u32, u32)>)> {
    let first = visible.split(',').next()?.trim();
    if let Ok(index) = first.parse() {
        return Some((state.slot_of_index(index)?, None));
    }
    let named = |(slot, gpu): (usize, &Gpu)| {
        if gpu.uuid == first {
            return Some((slot, None));
        }
        gpu.mig_devices().find(|(_, ci)| ci.uuid == first).map(|(gi, ci)| (slot, Some((gi.id, ci.id))))
    };
    state.listed().find_map(named)
}

/// Maximum number of clients of a server: 48, or 60 from CUDA 13.1 on; for a MIG device in
/// proportion to its compute slices.
pub(super) fn client_limit(state: &State, slot: usize, instance: Option<(u32, u32)>) -> usize {
    let whole = if state.cuda > (13, 0) { 60 } else { 48 };
    let Some((gi, ci)) = instance else { return whole };
    let slices = || {
        let gpu = state.gpus.get(slot)?;
        let size = gpu.gi(gi)?.ci(ci)?.placement.size as usize;
        Some(whole * size / gpu.model().mig.as_ref()?.compute_slices as usize)
    };
    slices().unwrap_or(0).max(1)
}

/// The directory in the environment variable, or the default.
pub(super) fn env_directory(variable: &str, usual: &str) -> PathBuf {
    std::env::var_os(variable).map_or_else(|| usual.into(), PathBuf::from)
}

pub(super) fn pipe_directory() -> PathBuf {
    env_directory("CUDA_MPS_PIPE_DIRECTORY", PIPE_DIRECTORY)
}

/// The simulator whose driver root contains this program.
pub(super) fn own_sim() -> Option<Sim> {
    Sim::from_library_path(&std::env::current_exe().ok()?).ok()
}

/// A log file in the format of the real ones.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) path: PathBuf,
    pub(super) component: &'static str,
}

impl Log {
    pub(super) fn new(component: &'static str, file: &str) -> Self {
        Self { path: env_directory("CUDA_MPS_LOG_DIRECTORY", LOG_DIRECTORY).join(file), component }
    }

    /// Appends a line. Ignores errors.
    pub(super) fn line(&self, text: &str) {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let line = format!(
            "[{}.{:03} {} {:5}] {text}\n",
            now.as_secs(),
            now.subsec_millis(),
            self.component,
            std::process::id()
        );
        if let Ok(mut file) = std::fs::File::options().append(true).create(true).open(&self.path) {
            drop(file.write_all(line.as_bytes()));
        }
    }
}

/// A connection for lines of JSON.
#[derive(Debug)]
pub(super) struct JsonLines {
    pub(super) read: BufReader<UnixStream>,
}

impl JsonLines {
    pub(super) fn new(stream: UnixStream) -> Self {
        Self { read: BufReader::new(stream) }
    }

    pub(super) fn connect(path: &Path) -> io::Result<Self> {
        Ok(Self::new(UnixStream::connect(path)?))
    }

    pub(super) fn send<T: Serialize>(&mut self, message: &T) -> io::Result<()> {
        let mut text = serde_json::to_vec(message)?;
        text.push(b'\n');
        self.read.get_mut().write_all(&text)
    }

    /// The next message. Fails if the other side has closed the connection.
    pub(super) fn receive<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let mut line = String::new();
        if self.read.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }

    pub(super) fn request<T: DeserializeOwned>(&mut self, message: &impl Serialize) -> io::Result<T> {
        self.send(message)?;
        self.receive()
    }

    /// Process id of the other side, in this process's namespace.
    pub(super) fn peer(&self) -> io::Result<u32> {
        let credentials = rustix::net::sockopt::socket_peercred(self.read.get_ref())?;
        Ok(credentials.pid.as_raw_nonzero().get().cast_unsigned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_have_the_format_of_the_manual() {
        assert_eq!(["25", "0.5", "100"].map(parse_percentage), [Some(25.0), Some(0.5), Some(100.0)]);
        assert_eq!(["0", "101", "-1", "NaN", "half"].map(parse_percentage), [None; 5]);
        assert_eq!(["4G", "900M"].map(parse_memory), [Some(4096), Some(900)]);
        assert_eq!(["0M", "4", "G", "-1G", "1.5G", "99999999999999999999G"].map(parse_memory), [None; 6]);
        assert_eq!([900, 1024, 1044, 8192].map(format_memory), ["900M", "1G", "1G", "8G"]);
    }

    #[test]
    fn client_never_exceeds_its_server() {
        let limits = |threads, memory_mib| Limits { threads, memory_mib };
        let check = |client, server, expected| assert_eq!(Limits::tighter(client, server), expected);
        check(Limits::default(), limits(Some(25.0), Some(100)), limits(Some(25.0), Some(100)));
        check(limits(Some(50.0), Some(50)), limits(Some(25.0), Some(100)), limits(Some(25.0), Some(50)));
        check(limits(Some(10.0), None), Limits::default(), limits(Some(10.0), None));
    }
}
