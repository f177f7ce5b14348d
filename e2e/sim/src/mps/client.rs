//! A stand-in for a CUDA process: what libcuda does until a context is there, and
//! that it is there until the process ends.
//!
//! With a control daemon at the pipe directory it becomes a client of MPS, held to
//! the limits of its server and its environment. Without one it is a process on
//! the GPU or MIG device that it sees, if the compute mode lets it. Once it runs
//! it says so with one JSON object on a line of its own.

use super::{Connected, Hello, Limits, Lines, Reply, Request, SOCKET, Welcome, device, memory, percentage};
use crate::code::Code;
use crate::sim::{Failure, Sim};
use crate::state::{Process, ProcessKind, State};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How often it gives the GPU something to do.
const WORK: Duration = Duration::from_millis(20);

/// What to stand in for.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) pipe: Option<PathBuf>,
    pub(crate) uid: Option<u32>,
    pub(crate) name: String,
    pub(crate) memory_mib: u64,
    /// GPU or MIG UUID, or index, for a process without MPS.
    pub(crate) device: Option<String>,
    /// Stays after a fatal error, as a process does that nobody restarts.
    pub(crate) stubborn: bool,
    /// Ends by itself.
    pub(crate) time: Option<Duration>,
}

/// Why there is no context, or no longer: an error of CUDA and its reason.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct CudaError(String);

impl CudaError {
    fn new(name: &str, why: impl std::fmt::Display) -> Self {
        Self(format!("{name}: {why}"))
    }
}

/// Runs until its time is over. `sim` opens the simulator of a process without MPS.
pub(crate) fn main(wanted: &Wanted, sim: impl FnOnce() -> anyhow::Result<Sim>) -> anyhow::Result<()> {
    let pipe = wanted.pipe.clone().unwrap_or_else(super::pipe_directory);
    match Lines::connect(&pipe.join(SOCKET)) {
        Ok(control) => Ok(with_mps(wanted, &pipe, control)?),
        // As libcuda: nobody there means without MPS.
        Err(_) => Ok(without_mps(wanted, &sim()?)?),
    }
}

fn with_mps(wanted: &Wanted, pipe: &std::path::Path, mut control: Lines) -> Result<(), CudaError> {
    let lost = |error: std::io::Error| CudaError::new("CUDA_ERROR_MPS_RPC_FAILURE", error);
    let uid = wanted.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
    let socket = match control.ask(&Hello::Client { uid }).map_err(lost)? {
        Welcome::Server { socket } => socket,
        Welcome::Refused(text) => return Err(CudaError(text)),
    };
    let mut server = Lines::connect(&pipe.join(socket)).map_err(lost)?;
    let wants = Limits {
        threads: variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").and_then(|text| percentage(&text)),
        memory_mib: variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").and_then(|text| own_limit(&text)),
    };
    let connect = Request::Connect { name: wanted.name.clone(), memory_mib: wanted.memory_mib, wants };
    match server.ask(&connect).map_err(lost)? {
        Reply::Connected(connected) => announce(&connected),
        Reply::Refused(text) => return Err(CudaError(text)),
        _ => return Err(CudaError::new("CUDA_ERROR_MPS_RPC_FAILURE", "the server did not understand")),
    }
    run(wanted, || match server.ask(&Request::Work) {
        Ok(Reply::Refused(text)) => Err(CudaError(text)),
        Ok(_) => Ok(()),
        Err(error) => Err(lost(error)),
    })
}

/// The limit of the first device in `0=4G,1=2G`.
fn own_limit(text: &str) -> Option<u64> {
    memory(text.split(',').next()?.split_once('=')?.1)
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

fn announce(connected: &Connected) {
    let mut line = serde_json::to_value(connected).unwrap_or_default();
    line["mps"] = true.into();
    say(&line);
}

fn say(line: &serde_json::Value) {
    let mut out = std::io::stdout();
    // Nobody may be listening; it runs all the same.
    drop(writeln!(out, "{line}").and_then(|()| out.flush()));
}

fn without_mps(wanted: &Wanted, sim: &Sim) -> Result<(), CudaError> {
    let unavailable = |error: Failure| match error {
        Failure::Refused(Code::InUse) => CudaError::new(
            "CUDA_ERROR_DEVICE_UNAVAILABLE",
            "the device's compute mode lets no other process in",
        ),
        Failure::Refused(Code::Memory) => {
            CudaError::new("CUDA_ERROR_OUT_OF_MEMORY", "the device has no more")
        }
        error => CudaError::new("CUDA_ERROR_UNKNOWN", error),
    };
    let state = sim.read().map_err(unavailable)?;
    let asked = wanted.device.clone().or_else(|| variable("CUDA_VISIBLE_DEVICES"));
    let (slot, instance) = chosen(sim, &state, asked.as_deref())
        .ok_or_else(|| CudaError::new("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"))?;
    let process = Process {
        pid: std::process::id(),
        name: wanted.name.clone(),
        kind: ProcessKind::Compute,
        instance,
        memory_mib: wanted.memory_mib,
    };
    let alive = sim.enter(slot, process).map_err(unavailable)?;
    let pid = alive.pid;
    let gpu = state.gpus.get(slot).map(|gpu| gpu.uuid.clone());
    say(
        &json!({ "mps": false, "pid": pid, "device": gpu, "instance": instance, "memoryMib": wanted.memory_mib }),
    );
    let ran = run(wanted, || {
        let state = sim.read().map_err(unavailable)?;
        let here = state.gpu(slot).is_ok_and(|gpu| gpu.processes.iter().any(|process| process.pid == pid));
        if here { Ok(()) } else { Err(CudaError::new("CUDA_ERROR_UNKNOWN", "the GPU was reset or is gone")) }
    });
    drop(alive);
    sim.bury().map_err(unavailable)?;
    ran
}

/// The device that is asked for, or the first that this process sees; a MIG device where the mode is on.
fn chosen(sim: &Sim, state: &State, asked: Option<&str>) -> Option<(usize, Option<(u32, u32)>)> {
    let visible = sim.visible();
    let (slot, instance) = match asked {
        Some(asked) => device(state, asked)?,
        None => (*visible.slots(state).first()?, None),
    };
    let gpu = state.gpu(slot).ok().filter(|gpu| visible.gpu(gpu))?;
    if !gpu.mig.current {
        return Some((slot, None));
    }
    gpu.mig_devices()
        .map(|(gi, ci)| (gi.id, ci.id))
        .filter(|(gi, ci)| visible.ci(gpu, *gi, *ci))
        .find(|found| instance.is_none_or(|wanted| wanted == *found))
        .map(|found| (slot, Some(found)))
}

/// Works until the time is over or a piece of work fails.
fn run(wanted: &Wanted, mut work: impl FnMut() -> Result<(), CudaError>) -> Result<(), CudaError> {
    let begin = Instant::now();
    let mut failed = false;
    while wanted.time.is_none_or(|time| begin.elapsed() < time) {
        match work() {
            Err(error) if !wanted.stubborn => return Err(error),
            Err(error) if !failed => {
                eprintln!("divvy-sim: {error}");
                failed = true;
            }
            _ => {}
        }
        std::thread::sleep(WORK);
    }
    Ok(())
}
