//! A stand-in for a CUDA process, from connecting until the process ends.
//!
//! With a control daemon at the pipe directory it becomes a client of MPS, under the limits of its
//! server and its environment. Otherwise it runs on the GPU or MIG device that it sees, if the
//! compute mode allows it. Once it runs, it prints one JSON object on a line.

use super::protocol::{
    ConnectReply, ConnectRequest, Connected, JsonLines, Limits, Reply, Request, SOCKET, device, parse_memory,
    parse_percentage,
};
use crate::code::Code;
use crate::sim::{Sim, SimError};
use crate::state::{Process, ProcessKind, State};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Interval at which it submits work.
const WORK_INTERVAL: Duration = Duration::from_millis(20);

/// Options of `divvy-sim client`.
#[derive(Clone, Debug)]
pub(crate) struct ClientOptions {
    pub(crate) pipe: Option<PathBuf>,
    pub(crate) uid: Option<u32>,
    pub(crate) name: String,
    pub(crate) memory_mib: u64,
    /// GPU or MIG UUID, or index; for a process without MPS.
    pub(crate) device: Option<String>,
    /// Keeps running after a fatal error, like a process that is not restarted.
    pub(crate) stubborn: bool,
    /// How long it runs; none means forever.
    pub(crate) time: Option<Duration>,
}

/// The CUDA error for which there is no context, and its reason.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct CudaError(String);

impl CudaError {
    fn new(name: &str, reason: impl std::fmt::Display) -> Self {
        Self(format!("{name}: {reason}"))
    }
}

/// Runs until its time is over. `sim` opens the simulator for a process without MPS.
pub(crate) fn main(wanted: &ClientOptions, sim: impl FnOnce() -> anyhow::Result<Sim>) -> anyhow::Result<()> {
    let pipe = wanted.pipe.clone().unwrap_or_else(super::protocol::pipe_directory);
    match JsonLines::connect(&pipe.join(SOCKET)) {
        Ok(control) => Ok(with_mps(wanted, &pipe, control)?),
        // Without a control daemon, libcuda runs without MPS.
        Err(_) => Ok(without_mps(wanted, &sim()?)?),
    }
}

fn with_mps(wanted: &ClientOptions, pipe: &std::path::Path, mut control: JsonLines) -> Result<(), CudaError> {
    let lost = |error: std::io::Error| CudaError::new("CUDA_ERROR_MPS_RPC_FAILURE", error);
    let uid = wanted.uid.unwrap_or_else(|| rustix::process::geteuid().as_raw());
    let socket = match control.request(&ConnectRequest::Client { uid }).map_err(lost)? {
        ConnectReply::Server { socket } => socket,
        ConnectReply::Refused(text) => return Err(CudaError(text)),
    };
    let mut server = JsonLines::connect(&pipe.join(socket)).map_err(lost)?;
    let wants = Limits {
        threads: variable("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE").and_then(|text| parse_percentage(&text)),
        memory_mib: variable("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT").and_then(|text| own_limit(&text)),
    };
    let connect = Request::Connect { name: wanted.name.clone(), memory_mib: wanted.memory_mib, wants };
    match server.request(&connect).map_err(lost)? {
        Reply::Connected(connected) => announce(&connected),
        Reply::Refused(text) => return Err(CudaError(text)),
        _ => return Err(CudaError::new("CUDA_ERROR_MPS_RPC_FAILURE", "unexpected answer from the server")),
    }
    run(wanted, || match server.request(&Request::Work) {
        Ok(Reply::Refused(text)) => Err(CudaError(text)),
        Ok(_) => Ok(()),
        Err(error) => Err(lost(error)),
    })
}

/// The limit of the first device in a list such as `0=4G,1=2G`.
fn own_limit(text: &str) -> Option<u64> {
    parse_memory(text.split(',').next()?.split_once('=')?.1)
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

fn announce(connected: &Connected) {
    let mut line = serde_json::to_value(connected).unwrap_or_default();
    line["mps"] = true.into();
    print_json(&line);
}

fn print_json(line: &serde_json::Value) {
    let mut out = std::io::stdout();
    // Continues if its output is closed.
    drop(writeln!(out, "{line}").and_then(|()| out.flush()));
}

fn without_mps(wanted: &ClientOptions, sim: &Sim) -> Result<(), CudaError> {
    let unavailable = |error: SimError| match error {
        SimError::Refused(Code::InUse) => CudaError::new(
            "CUDA_ERROR_DEVICE_UNAVAILABLE",
            "the device's compute mode allows no other process",
        ),
        SimError::Refused(Code::Memory) => {
            CudaError::new("CUDA_ERROR_OUT_OF_MEMORY", "the device has too little free memory")
        }
        error => CudaError::new("CUDA_ERROR_UNKNOWN", error),
    };
    let state = sim.read().map_err(unavailable)?;
    let asked = wanted.device.clone().or_else(|| variable("CUDA_VISIBLE_DEVICES"));
    let (slot, instance) = choose_device(sim, &state, asked.as_deref())
        .ok_or_else(|| CudaError::new("CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"))?;
    let process = Process {
        pid: std::process::id(),
        name: wanted.name.clone(),
        kind: ProcessKind::Compute,
        instance,
        memory_mib: wanted.memory_mib,
    };
    let alive = sim.attach_process(slot, process).map_err(unavailable)?;
    let pid = alive.pid;
    let gpu = state.gpus.get(slot).map(|gpu| gpu.uuid.clone());
    print_json(&json!({
        "mps": false,
        "pid": pid,
        "device": gpu,
        "instance": instance,
        "memoryMib": wanted.memory_mib,
    }));
    let ran = run(wanted, || {
        let state = sim.read().map_err(unavailable)?;
        let here = state.gpu(slot).is_ok_and(|gpu| gpu.processes.iter().any(|process| process.pid == pid));
        if here { Ok(()) } else { Err(CudaError::new("CUDA_ERROR_UNKNOWN", "the GPU was reset or is gone")) }
    });
    drop(alive);
    sim.remove_dead_processes().map_err(unavailable)?;
    ran
}

/// The requested device, or the first that this process sees; a MIG device if MIG is enabled.
fn choose_device(sim: &Sim, state: &State, asked: Option<&str>) -> Option<(usize, Option<(u32, u32)>)> {
    let visible = sim.visible_devices();
    let (slot, instance) = match asked {
        Some(asked) => device(state, asked)?,
        None => (*visible.slots(state).first()?, None),
    };
    let gpu = state.gpu(slot).ok().filter(|gpu| visible.has_gpu(gpu))?;
    if !gpu.mig.current {
        return Some((slot, None));
    }
    gpu.mig_devices()
        .map(|(gi, ci)| (gi.id, ci.id))
        .filter(|(gi, ci)| visible.has_ci(gpu, *gi, *ci))
        .find(|found| instance.is_none_or(|wanted| wanted == *found))
        .map(|found| (slot, Some(found)))
}

/// Submits work until the time is over or the work fails.
fn run(wanted: &ClientOptions, mut work: impl FnMut() -> Result<(), CudaError>) -> Result<(), CudaError> {
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
        std::thread::sleep(WORK_INTERVAL);
    }
    Ok(())
}
