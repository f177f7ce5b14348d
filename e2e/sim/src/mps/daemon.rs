//! The MPS control daemon: starts servers, assigns clients to them, and handles the commands of the
//! version 2 text protocol.
//!
//! Everything runs under one lock, so a command that hangs makes the daemon hang, as with the real
//! one. Only a client that waits for another user's server waits without the lock.

use super::protocol::{
    Answer, CONTROL, CONTROL_START, Client, ConnectReply, ConnectRequest, JsonLines, LOCK_FILE, Limits, Log,
    PID_FILE, Reply, Request, SOCKET, Status, device, format_memory, own_sim, parse_memory, parse_percentage,
    pipe_directory,
};
use crate::control::Call;
use crate::file_lock::TRY_LOCK;
use crate::sim::Sim;
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Interval at which a waiting client checks for a server.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The user of the shared server in multi-user mode.
const ROOT_UID: u32 = 0;

struct Daemon {
    sim: Sim,
    pipe: PathBuf,
    log: Log,
    multi_user: bool,
    /// The server that is active; at most one.
    server: Option<Server>,
    threads: Option<f64>,
    /// Default memory limits in MiB, by the device's name in the command.
    memory: BTreeMap<String, u64>,
    /// `quit` was given: new clients are refused.
    quitting: bool,
}

struct Server {
    uid: u32,
    process: Child,
}

impl Server {
    fn socket(&self) -> String {
        socket(self.process.id())
    }
}

/// Name of a server's socket in the pipe directory.
pub(super) fn socket(pid: u32) -> String {
    format!("server-{pid}")
}

/// Runs the daemon until `quit`.
pub(super) fn run(multi_user: bool) -> ExitCode {
    match start(multi_user) {
        Ok((daemon, listener)) => serve(daemon, &listener),
        Err(text) => {
            eprintln!("{text}");
            ExitCode::FAILURE
        }
    }
}

fn start(multi_user: bool) -> Result<(Daemon, UnixListener), String> {
    let sim = own_sim().ok_or("this program is not in the root of a GPU driver")?;
    let pipe = pipe_directory();
    let log = Log::new("Control", "control.log");
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC;
    let lock = rustix::fs::open(pipe.join(LOCK_FILE), flags, Mode::from_raw_mode(0o644))
        .map_err(|error| format!("cannot use the pipe directory {}: {error}", pipe.display()))?;
    rustix::fs::flock(&lock, TRY_LOCK)
        .map_err(|_| "An instance of this daemon is already running".to_owned())?;
    // The lock is held until the process ends.
    std::mem::forget(lock);
    sim.call(Call { name: CONTROL_START, gpu: gpu(&sim), args: &[] }, || Ok(()))
        .map_err(|code| format!("cannot start: {code}"))?;
    let path = pipe.join(SOCKET);
    drop(std::fs::remove_file(&path));
    let listener =
        UnixListener::bind(&path).map_err(|error| format!("cannot bind {}: {error}", path.display()))?;
    let ready = || {
        // Clients of all users may connect.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666))?;
        std::fs::write(pipe.join(PID_FILE), std::process::id().to_string())
    };
    ready().map_err(|error| format!("cannot use the pipe directory {}: {error}", pipe.display()))?;
    log.line(&format!("Starting control daemon using socket {}", path.display()));
    let (server, threads, memory) = (None, None, BTreeMap::new());
    Ok((Daemon { sim, pipe, log, multi_user, server, threads, memory, quitting: false }, listener))
}

/// Slot of the GPU that the daemon serves.
fn gpu(sim: &Sim) -> Option<usize> {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_else(|_| "0".to_owned());
    device(&*sim.read().ok()?, &visible).map(|(slot, _)| slot)
}

fn serve(daemon: Daemon, listener: &UnixListener) -> ExitCode {
    let daemon = Arc::new(Mutex::new(daemon));
    for stream in listener.incoming().flatten() {
        let daemon = Arc::clone(&daemon);
        // Not joined: a connection ends with its other side or with the daemon.
        std::thread::spawn(move || connection(&daemon, stream));
    }
    ExitCode::FAILURE
}

/// Serves one connection. An error only ends this connection.
fn connection(daemon: &Mutex<Daemon>, stream: UnixStream) {
    let mut lines = JsonLines::new(stream);
    let mut handle = || -> std::io::Result<()> {
        match lines.receive()? {
            ConnectRequest::Client { uid } => {
                let reply = assign_server(daemon, uid);
                lines.send(&reply)
            }
            ConnectRequest::Commands => loop {
                let line: String = lines.receive()?;
                let (text, quit) = lock(daemon).command(&line);
                lines.send(&Answer { text })?;
                if quit {
                    std::process::exit(0);
                }
            },
        }
    };
    drop(handle());
}

/// Locks the daemon and applies the simulator's rules: on a fault, the daemon exits.
fn lock(daemon: &Mutex<Daemon>) -> MutexGuard<'_, Daemon> {
    let daemon = daemon.lock().unwrap_or_else(PoisonError::into_inner);
    if daemon.sim.call(Call { name: CONTROL, gpu: gpu(&daemon.sim), args: &[] }, || Ok(())).is_err() {
        std::process::exit(1);
    }
    daemon
}

/// Finds or starts the server for a client of a user. Waits while another user's server has
/// clients.
fn assign_server(daemon: &Mutex<Daemon>, uid: u32) -> ConnectReply {
    let mut guard = lock(daemon);
    loop {
        match guard.server_for(uid) {
            Ok(Some(socket)) => return ConnectReply::Server { socket },
            Ok(None) => {}
            Err(text) => return ConnectReply::Refused(text),
        }
        drop(guard);
        std::thread::sleep(POLL_INTERVAL);
        guard = daemon.lock().unwrap_or_else(PoisonError::into_inner);
    }
}

impl Daemon {
    /// The socket of the server for clients of that user; none while another user's server is
    /// active.
    fn server_for(&mut self, uid: u32) -> Result<Option<String>, String> {
        if self.quitting {
            return Err("CUDA_ERROR_MPS_CONNECTION_FAILED: the control daemon is shutting down".to_owned());
        }
        let uid = if self.multi_user { ROOT_UID } else { uid };
        self.reap_server();
        match &self.server {
            Some(server) if server.uid == uid => Ok(Some(server.socket())),
            Some(_) => {
                // The real daemon tells the other server to exit when its clients are done.
                self.request_server(&Request::Shutdown { force: false }).ok();
                self.reap_server();
                Ok(None)
            }
            None => {
                self.start_server(uid)?;
                Ok(self.server.as_ref().map(Server::socket))
            }
        }
    }

    /// Removes a server that has exited.
    fn reap_server(&mut self) {
        if let Some(server) = &mut self.server
            && matches!(server.process.try_wait(), Ok(Some(_)) | Err(_))
        {
            let (pid, socket) = (server.process.id(), server.socket());
            drop(std::fs::remove_file(self.pipe.join(socket)));
            self.log.line(&format!("Server {pid} exited"));
            self.server = None;
        }
    }

    fn start_server(&mut self, uid: u32) -> Result<(), String> {
        let failed = |reason: &str| {
            format!("CUDA_ERROR_MPS_CONNECTION_FAILED: the MPS server did not start: {reason}")
        };
        let control = std::env::current_exe().unwrap_or_default();
        let mut command = Command::new(control.with_file_name("nvidia-cuda-mps-server"));
        let limits = Limits { threads: self.threads, memory_mib: self.memory.values().next().copied() };
        command.arg(serde_json::to_string(&limits).unwrap_or_default());
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        self.log.line(&format!("Starting new server for user {uid}"));
        let mut process = command.spawn().map_err(|error| failed(&error.to_string()))?;
        // The server prints one line: that it is ready, or why it failed.
        let mut answer = String::new();
        if let Some(out) = process.stdout.take() {
            drop(BufReader::new(out).read_line(&mut answer));
        }
        if answer.trim() != "ready" {
            drop(process.wait());
            self.log.line(&format!("Server {} failed to start: {}", process.id(), answer.trim()));
            return Err(failed(answer.trim()));
        }
        self.log.line(&format!("Server {} is ready", process.id()));
        self.server = Some(Server { uid, process });
        Ok(())
    }

    fn request_server(&self, request: &Request) -> std::io::Result<Reply> {
        let server = self.server.as_ref().ok_or(std::io::ErrorKind::NotFound)?;
        JsonLines::connect(&self.pipe.join(server.socket()))?.request(request)
    }

    /// Runs a command. Returns the text to print, and whether the daemon exits.
    fn command(&mut self, line: &str) -> (String, bool) {
        self.log.line(&format!("Cmd:{line}"));
        self.reap_server();
        let words: Vec<&str> = line.split_whitespace().collect();
        if let ["quit", rest @ ..] = words.as_slice() {
            let wait = match rest {
                [] => None,
                ["-t", seconds] => seconds.parse().ok().map(Duration::from_secs),
                _ => return (format!("Invalid arguments: {line}\n"), false),
            };
            return (self.quit(wait), true);
        }
        let text = self.answer(&words).unwrap_or_else(|text| format!("{text}\n"));
        (text, false)
    }

    fn answer(&mut self, words: &[&str]) -> Result<String, String> {
        let wrong = || format!("Invalid arguments: {}", words.join(" "));
        match words {
            [] => Ok(String::new()),
            ["get_server_list"] => {
                Ok(self.server.as_ref().map_or(String::new(), |s| format!("{}\n", s.process.id())))
            }
            ["get_server_status", pid] => match self.request_named_server(pid, &Request::Status)? {
                Reply::Status(status) => Ok(format!("{}\n", status.as_str())),
                _ => Ok(format!("{}\n", Status::Initializing.as_str())),
            },
            ["get_client_list", pid] => {
                Ok(self.clients(pid)?.iter().map(|client| format!("{}\n", client.pid)).collect())
            }
            ["ps"] => {
                let mut text =
                    format!("{:<8} {:<8} {:<12} {:<10} COMMAND\n", "PID", "SERVER", "DEVICE", "MEMORY");
                let Some(pid) = self.server.as_ref().map(|server| server.process.id().to_string()) else {
                    return Ok(text);
                };
                let gpu = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
                for Client { pid: client, name, memory_mib } in self.clients(&pid)? {
                    let gpu = gpu.get(..12).unwrap_or(&gpu);
                    text.push_str(&format!("{client:<8} {pid:<8} {gpu:<12} {memory_mib:<10} {name}\n"));
                }
                Ok(text)
            }
            ["start_server", "-uid", uid] => {
                let uid = uid.parse().map_err(|_| wrong())?;
                match self.server_for(uid)? {
                    Some(_) => Ok(String::new()),
                    None => Err("Another user's server is active".to_owned()),
                }
            }
            ["shutdown_server", pid, rest @ ..] if matches!(rest, [] | ["-f"]) => {
                self.request_named_server(pid, &Request::Shutdown { force: !rest.is_empty() })?;
                Ok(String::new())
            }
            ["terminate_client", server, client] => {
                let client = client.parse().map_err(|_| wrong())?;
                self.request_named_server(server, &Request::Terminate { client })?;
                Ok(String::new())
            }
            ["set_default_active_thread_percentage", value] => {
                let value = parse_percentage(value).ok_or_else(wrong)?;
                self.threads = Some(value);
                Ok(format!("{value:.1}\n"))
            }
            ["get_default_active_thread_percentage"] => Ok(format!("{:.1}\n", self.threads.unwrap_or(100.0))),
            ["set_active_thread_percentage", pid, value] => {
                let value = parse_percentage(value).ok_or_else(wrong)?;
                self.request_named_server(
                    pid,
                    &Request::Set(Limits { threads: Some(value), memory_mib: None }),
                )?;
                Ok(format!("{value:.1}\n"))
            }
            ["get_active_thread_percentage", pid] => {
                Ok(format!("{:.1}\n", self.limits(pid)?.threads.unwrap_or(100.0)))
            }
            ["set_default_device_pinned_mem_limit", gpu, value] => {
                self.memory = BTreeMap::from([((*gpu).to_owned(), parse_memory(value).ok_or_else(wrong)?)]);
                Ok(String::new())
            }
            ["get_default_device_pinned_mem_limit", gpu] => {
                Ok(self.memory.get(*gpu).map_or(String::new(), |mib| format!("{}\n", format_memory(*mib))))
            }
            ["set_device_pinned_mem_limit", pid, _gpu, value] => {
                let mib = parse_memory(value).ok_or_else(wrong)?;
                self.request_named_server(
                    pid,
                    &Request::Set(Limits { threads: None, memory_mib: Some(mib) }),
                )?;
                Ok(String::new())
            }
            ["get_device_pinned_mem_limit", pid, _gpu] => Ok(self
                .limits(pid)?
                .memory_mib
                .map_or(String::new(), |mib| format!("{}\n", format_memory(mib)))),
            _ => Err(format!("Unknown command: {}", words.join(" "))),
        }
    }

    fn request_named_server(&self, pid: &str, request: &Request) -> Result<Reply, String> {
        let named = self.server.as_ref().is_some_and(|server| server.process.id().to_string() == pid);
        let missing = || format!("Server {pid} not found");
        if named { self.request_server(request).map_err(|_| missing()) } else { Err(missing()) }
    }

    fn clients(&self, pid: &str) -> Result<Vec<Client>, String> {
        match self.request_named_server(pid, &Request::Clients)? {
            Reply::Clients(clients) => Ok(clients),
            _ => Ok(Vec::new()),
        }
    }

    fn limits(&self, pid: &str) -> Result<Limits, String> {
        match self.request_named_server(pid, &Request::Get)? {
            Reply::Limits(limits) => Ok(limits),
            _ => Ok(Limits::default()),
        }
    }

    /// Waits until the server's clients are done, for at most `wait`, then stops the server.
    fn quit(&mut self, wait: Option<Duration>) -> String {
        self.quitting = true;
        let begin = Instant::now();
        while self.server.is_some() {
            let force = wait.is_some_and(|wait| begin.elapsed() >= wait);
            self.request_server(&Request::Shutdown { force }).ok();
            std::thread::sleep(POLL_INTERVAL);
            self.reap_server();
        }
        for name in [SOCKET, PID_FILE] {
            drop(std::fs::remove_file(self.pipe.join(name)));
        }
        self.log.line("Exit");
        String::new()
    }
}
