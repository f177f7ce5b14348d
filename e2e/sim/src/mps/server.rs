//! The program `nvidia-cuda-mps-server`: the process on the GPU that executes its clients' work.
//!
//! Each client is one connection. Its entry in the state has the process id that the kernel reports
//! for the socket. A fatal error of one client affects all: the server enters FAULT, refuses new
//! clients, and recovers when all current clients are gone.

use super::daemon;
use super::protocol::{
    Client, Connected, JsonLines, Limits, Log, Reply, Request, SERVER, SERVER_START, Status, client_limit,
    device, own_sim, pipe_directory,
};
use crate::code::Code;
use crate::control::Call;
use crate::live_process::LiveProcess;
use crate::sim::{Sim, SimError};
use crate::state::{Process, ProcessKind};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

/// Memory in MiB that the server itself uses, as on a real card.
const SERVER_MEMORY_MIB: u64 = 30;

struct Server {
    sim: Sim,
    log: Log,
    slot: usize,
    instance: Option<(u32, u32)>,
    uuid: String,
    limits: Limits,
    status: Status,
    /// Exits when the last client leaves.
    draining: bool,
    clients: Vec<(Client, LiveProcess)>,
    /// The server's own entry in the state.
    _own: LiveProcess,
}

/// Main of the program. The control daemon passes the limits as the only argument and reads one
/// line.
pub(crate) fn main() -> ExitCode {
    let log = Log::new("Server", "server.log");
    match start(log) {
        Ok((server, listener)) => {
            println!("ready");
            serve(&Arc::new(Mutex::new(server)), &listener)
        }
        Err(text) => {
            Log::new("Server", "server.log").line(&format!("MPS server failed to start: {text}"));
            println!("{text}");
            ExitCode::FAILURE
        }
    }
}

fn start(log: Log) -> Result<(Server, UnixListener), String> {
    let argument = std::env::args()
        .nth(1)
        .ok_or("the control daemon starts this program; run nvidia-cuda-mps-control")?;
    let limits = serde_json::from_str(&argument).map_err(|error| error.to_string())?;
    let sim = own_sim().ok_or("this program is not in the root of a GPU driver")?;
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_else(|_| "0".to_owned());
    let state = sim.read().map_err(|error| error.to_string())?;
    let (slot, instance) = device(&state, &visible).ok_or_else(|| format!("no device {visible}"))?;
    let process = Process {
        pid: std::process::id(),
        name: "nvidia-cuda-mps-server".to_owned(),
        kind: ProcessKind::Compute,
        instance,
        memory_mib: SERVER_MEMORY_MIB,
    };
    let own = sim
        .call(Call { name: SERVER_START, gpu: Some(slot), args: &[] }, || {
            Ok(sim.attach_process(slot, process)?)
        })
        .map_err(|code| format!("{visible}: {code}"))?;
    let path = pipe_directory().join(daemon::socket(std::process::id()));
    let bound = || {
        let listener = UnixListener::bind(&path)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666))?;
        Ok(listener)
    };
    let listener = bound().map_err(|error: std::io::Error| format!("{}: {error}", path.display()))?;
    log.line("Server is ready");
    let (status, draining, clients) = (Status::Active, false, Vec::new());
    let server =
        Server { sim, log, slot, instance, uuid: visible, limits, status, draining, clients, _own: own };
    Ok((server, listener))
}

fn serve(server: &Arc<Mutex<Server>>, listener: &UnixListener) -> ExitCode {
    for stream in listener.incoming().flatten() {
        let server = Arc::clone(server);
        // Not joined: a connection ends with its other side or with the server.
        std::thread::spawn(move || connection(&server, &mut JsonLines::new(stream)));
    }
    ExitCode::FAILURE
}

fn connection(server: &Mutex<Server>, lines: &mut JsonLines) {
    let lock = || server.lock().unwrap_or_else(PoisonError::into_inner);
    let mut client = None;
    while let Ok(request) = lines.receive() {
        let reply = match request {
            Request::Connect { name, memory_mib, wants } => match lines.peer() {
                Ok(pid) => {
                    let reply = lock().connect(Client { pid, name, memory_mib }, wants);
                    if let Reply::Connected(connected) = &reply {
                        client = Some(connected.pid);
                    }
                    reply
                }
                Err(error) => Reply::Refused(format!("CUDA_ERROR_MPS_CONNECTION_FAILED: {error}")),
            },
            Request::Work => lock().work(client),
            Request::Status => Reply::Status(lock().status),
            Request::Clients => {
                Reply::Clients(lock().clients.iter().map(|(client, _)| client.clone()).collect())
            }
            Request::Get => Reply::Limits(lock().limits),
            Request::Set(limits) => {
                let mut server = lock();
                server.limits = limits.or(server.limits);
                Reply::Done
            }
            Request::Shutdown { force } => {
                let mut server = lock();
                server.draining = true;
                if force || server.clients.is_empty() {
                    server.exit();
                }
                Reply::Done
            }
            Request::Terminate { client } => {
                lock().remove_client(client);
                Reply::Done
            }
        };
        if lines.send(&reply).is_err() {
            break;
        }
    }
    if let Some(pid) = client {
        lock().remove_client(pid);
    }
}

impl Server {
    /// Accepts a client if the server's state, its limits and the GPU allow it.
    fn connect(&mut self, client: Client, wants: Limits) -> Reply {
        let refused = |error: &str, reason: &str| Reply::Refused(format!("{error}: {reason}"));
        if self.status == Status::Fault || self.draining {
            return refused("CUDA_ERROR_MPS_SERVER_NOT_READY", "the MPS server accepts no clients now");
        }
        let limits = wants.tighter(self.limits);
        if limits.memory_mib.is_some_and(|limit| client.memory_mib > limit) {
            return refused(
                "CUDA_ERROR_OUT_OF_MEMORY",
                "the client needs more than its limit of pinned device memory",
            );
        }
        let most = self.sim.read().map_or(0, |state| client_limit(&state, self.slot, self.instance));
        if self.clients.len() >= most {
            return refused("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", &format!("{most} clients are connected"));
        }
        let process = Process {
            pid: client.pid,
            name: client.name.clone(),
            kind: ProcessKind::Mps,
            instance: self.instance,
            memory_mib: client.memory_mib,
        };
        match self.sim.attach_process(self.slot, process) {
            Ok(alive) => {
                self.log.line(&format!("New client {} connected", alive.pid));
                let connected = Connected {
                    pid: alive.pid,
                    server: std::process::id(),
                    device: self.uuid.clone(),
                    memory_mib: client.memory_mib,
                    thread_percentage: limits.threads.unwrap_or(100.0),
                    memory_limit_mib: limits.memory_mib,
                };
                self.clients.push((Client { pid: alive.pid, ..client }, alive));
                Reply::Connected(connected)
            }
            Err(SimError::Refused(Code::Memory)) => {
                refused("CUDA_ERROR_OUT_OF_MEMORY", "the device has too little free memory")
            }
            Err(failure) => refused("CUDA_ERROR_MPS_CONNECTION_FAILED", &failure.to_string()),
        }
    }

    /// Executes work of a client under the simulator's rules.
    fn work(&mut self, client: Option<u32>) -> Reply {
        let Some(pid) = client.filter(|pid| self.clients.iter().any(|(client, _)| client.pid == *pid)) else {
            return Reply::Refused("CUDA_ERROR_MPS_CLIENT_TERMINATED: this client was terminated".to_owned());
        };
        if self.status == Status::Active {
            let call = Call { name: SERVER, gpu: Some(self.slot), args: &[pid.into()] };
            match self.sim.call(call, || Ok(())) {
                Ok(()) => return Reply::Done,
                Err(Code::GpuIsLost) => std::process::exit(1),
                Err(_) => {
                    self.log.line("Server is handling a fatal GPU error.");
                    self.status = Status::Fault;
                }
            }
        }
        Reply::Refused("CUDA_ERROR_LAUNCH_FAILED: a client of the MPS server made a fatal error".to_owned())
    }

    /// Removes a client.
    fn remove_client(&mut self, pid: u32) {
        let before = self.clients.len();
        self.clients.retain(|(client, _)| client.pid != pid);
        if self.clients.len() == before {
            return;
        }
        self.log.line(&format!("Client {pid} disconnected"));
        // Removes the client's entry at once instead of with the next change of the state.
        drop(self.sim.remove_dead_processes());
        if self.clients.is_empty() {
            if self.draining {
                self.exit();
            }
            if self.status == Status::Fault {
                self.log.line("Server is ready");
                self.status = Status::Active;
            }
        }
    }

    fn exit(&mut self) -> ! {
        self.log.line("Server exits");
        std::process::exit(0);
    }
}
