//! MPS: stand-ins for the control daemon, its servers, and the part of libcuda
//! that talks to them.
//!
//! - [`control`]: the program `nvidia-cuda-mps-control`, as daemon (`-d`, `-f`) and as the client that reads commands of
//!   the version 2 text protocol on stdin; [`daemon`] is what the daemon does.
//! - [`server`]: the program `nvidia-cuda-mps-server`, started by the daemon: one at a time, for the user of the client
//!   that asks, or for all users in multi-user mode.
//! - [`client`]: `divvy-sim client`, which does towards the pipe directory what libcuda does.
//!
//! What is simulated is who may connect, when, with which limits, and what everybody sees of it: processes in the
//! state, logs, statuses, errors. Between themselves the stand-ins speak lines of JSON over sockets in the pipe
//! directory, which nobody else is meant to speak.
//!
//! Rules reach them by these names: [`CONTROL`] is each command and each client that the daemon handles (held: it hangs;
//! at fault: it dies), [`SERVER`] each piece of a client's work (held: the server hangs; GPU_IS_LOST: it dies; any other
//! fault: a client has made a fatal error, and the server is in FAULT until its clients are gone), [`CONTROL_START`] and
//! [`SERVER_START`] their starts.
//!
//! Sources: docs.nvidia.com/deploy/mps (architecture, tools and interface reference) of releases 570 to 590.

mod client;
mod control;
mod daemon;
mod server;

pub(crate) use client::{Wanted, main as client_main};
pub(crate) use control::main as control_main;
pub(crate) use server::main as server_main;

use crate::sim::Sim;
use crate::state::{Gpu, State};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// See the module.
pub const CONTROL: &str = "mps-control";
/// See the module.
pub const CONTROL_START: &str = "mps-control-start";
/// See the module.
pub const SERVER: &str = "mps-server";
/// See the module.
pub const SERVER_START: &str = "mps-server-start";

/// The daemon's socket in the pipe directory.
const SOCKET: &str = "control";
/// Locked while a daemon uses the pipe directory.
const LOCK_FILE: &str = "control_lock";
/// Holds the daemon's process id.
const PID_FILE: &str = "nvidia-cuda-mps-control.pid";
/// Where pipes and logs are unless the environment says otherwise.
const PIPE_DIRECTORY: &str = "/tmp/nvidia-mps";
const LOG_DIRECTORY: &str = "/var/log/nvidia-mps";

/// The first line of whoever connects to the control daemon.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Hello {
    /// Lines of the text protocol follow.
    Commands,
    /// A CUDA process of that user wants a server.
    Client { uid: u32 },
}

/// The daemon's answer to a client, at last.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Welcome {
    /// Name of the server's socket in the pipe directory.
    Server {
        socket: String,
    },
    Refused(String),
}

/// The daemon's answer to a command.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    /// Printed as it is.
    text: String,
}

/// What a server is asked.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Request {
    /// By a client, first.
    Connect {
        name: String,
        memory_mib: u64,
        wants: Limits,
    },
    /// By a client, while it runs.
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

/// What a server answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Reply {
    Connected(Connected),
    Done,
    Status(Status),
    Clients(Vec<Client>),
    Limits(Limits),
    /// An error of CUDA, as its name and a reason.
    Refused(String),
}

/// What a client has got.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Connected {
    pid: u32,
    server: u32,
    device: String,
    memory_mib: u64,
    thread_percentage: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_limit_mib: Option<u64>,
}

/// A client as its server knows it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Client {
    pid: u32,
    name: String,
    memory_mib: u64,
}

/// What a process may use; none means all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Limits {
    /// Per cent of the threads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    threads: Option<f64>,
    /// MiB of device memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    memory_mib: Option<u64>,
}

/// How a server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Status {
    Initializing,
    Active,
    Fault,
}

impl Status {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Initializing => "INITIALIZING",
            Self::Active => "ACTIVE",
            Self::Fault => "FAULT",
        }
    }
}

impl Limits {
    /// The tighter of both: a client cannot exceed its server.
    fn tighter(self, other: Self) -> Self {
        let threads = [self.threads, other.threads].into_iter().flatten().reduce(f64::min);
        let memory_mib = [self.memory_mib, other.memory_mib].into_iter().flatten().min();
        Self { threads, memory_mib }
    }

    /// What is given, else what was before.
    fn or(self, other: Self) -> Self {
        Self { threads: self.threads.or(other.threads), memory_mib: self.memory_mib.or(other.memory_mib) }
    }
}

/// A percentage of threads above 0 and up to 100.
fn percentage(text: &str) -> Option<f64> {
    text.parse().ok().filter(|value| *value > 0.0 && *value <= 100.0)
}

/// `4G` or `900M`, in MiB.
fn memory(text: &str) -> Option<u64> {
    let number = |text: &str| text.parse::<u64>().ok().filter(|value| *value > 0);
    match text.strip_suffix(['G', 'g']) {
        Some(giga) => number(giga)?.checked_mul(1024),
        None => number(text.strip_suffix(['M', 'm'])?),
    }
}

/// Memory as the control daemon shows it: whole GiB from one GiB on (seen with 595.91), rounded down.
fn shown(mib: u64) -> String {
    if mib < 1024 { format!("{mib}M") } else { format!("{}G", mib / 1024) }
}

/// What `CUDA_VISIBLE_DEVICES` names first: the GPU's slot, and GPU and compute instance of a MIG device.
fn device(state: &State, visible: &str) -> Option<(usize, Option<(u32, u32)>)> {
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

/// How many clients a server takes: 48, 60 from CUDA 13.1 on, in proportion to the compute slices of a MIG device.
fn client_limit(state: &State, slot: usize, instance: Option<(u32, u32)>) -> usize {
    let whole = if state.cuda > (13, 0) { 60 } else { 48 };
    let Some((gi, ci)) = instance else { return whole };
    let slices = || {
        let gpu = state.gpus.get(slot)?;
        let size = gpu.gi(gi)?.ci(ci)?.placement.size as usize;
        Some(whole * size / gpu.model().mig.as_ref()?.compute_slices as usize)
    };
    slices().unwrap_or(0).max(1)
}

/// The directory that the environment names, or the usual one.
fn directory(variable: &str, usual: &str) -> PathBuf {
    std::env::var_os(variable).map_or_else(|| usual.into(), PathBuf::from)
}

fn pipe_directory() -> PathBuf {
    directory("CUDA_MPS_PIPE_DIRECTORY", PIPE_DIRECTORY)
}

/// The simulator whose driver root holds this program.
fn own_sim() -> Option<Sim> {
    Sim::from_library_path(&std::env::current_exe().ok()?).ok()
}

/// A log in the log directory, in the format of the real ones.
#[derive(Debug)]
struct Log {
    path: PathBuf,
    who: &'static str,
}

impl Log {
    fn new(who: &'static str, file: &str) -> Self {
        Self { path: directory("CUDA_MPS_LOG_DIRECTORY", LOG_DIRECTORY).join(file), who }
    }

    /// Appends a line. A log that cannot be written stops nobody.
    fn line(&self, text: &str) {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let line = format!(
            "[{}.{:03} {} {:5}] {text}\n",
            now.as_secs(),
            now.subsec_millis(),
            self.who,
            std::process::id()
        );
        if let Ok(mut file) = std::fs::File::options().append(true).create(true).open(&self.path) {
            drop(file.write_all(line.as_bytes()));
        }
    }
}

/// A connection that speaks lines of JSON.
#[derive(Debug)]
struct Lines {
    read: BufReader<UnixStream>,
}

impl Lines {
    fn new(stream: UnixStream) -> Self {
        Self { read: BufReader::new(stream) }
    }

    fn connect(path: &Path) -> io::Result<Self> {
        Ok(Self::new(UnixStream::connect(path)?))
    }

    fn send<T: Serialize>(&mut self, message: &T) -> io::Result<()> {
        let mut text = serde_json::to_vec(message)?;
        text.push(b'\n');
        self.read.get_mut().write_all(&text)
    }

    /// The next message; an error also where the other side has gone.
    fn receive<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let mut line = String::new();
        if self.read.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(serde_json::from_str(&line)?)
    }

    fn ask<T: DeserializeOwned>(&mut self, message: &impl Serialize) -> io::Result<T> {
        self.send(message)?;
        self.receive()
    }

    /// The process at the other side, as this one sees it.
    fn peer(&self) -> io::Result<u32> {
        let credentials = rustix::net::sockopt::socket_peercred(self.read.get_ref())?;
        Ok(credentials.pid.as_raw_nonzero().get().cast_unsigned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_the_manual_writes_them() {
        assert_eq!(["25", "0.5", "100"].map(percentage), [Some(25.0), Some(0.5), Some(100.0)]);
        assert_eq!(["0", "101", "-1", "NaN", "half"].map(percentage), [None; 5]);
        assert_eq!(["4G", "900M"].map(memory), [Some(4096), Some(900)]);
        assert_eq!(["0M", "4", "G", "-1G", "1.5G", "99999999999999999999G"].map(memory), [None; 6]);
        assert_eq!([900, 1024, 1044, 8192].map(shown), ["900M", "1G", "1G", "8G"]);
    }

    #[test]
    fn a_client_never_exceeds_its_server() {
        let limits = |threads, memory_mib| Limits { threads, memory_mib };
        let check = |client, server, expected| assert_eq!(Limits::tighter(client, server), expected);
        check(Limits::default(), limits(Some(25.0), Some(100)), limits(Some(25.0), Some(100)));
        check(limits(Some(50.0), Some(50)), limits(Some(25.0), Some(100)), limits(Some(25.0), Some(50)));
        check(limits(Some(10.0), None), Limits::default(), limits(Some(10.0), None));
    }
}
