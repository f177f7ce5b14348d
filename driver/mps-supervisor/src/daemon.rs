//! One running control daemon: health checks, changes of its limits, and its shutdown.
//!
//! The control protocol (docs.nvidia.com/deploy/mps) has default limits for future servers; a
//! running server is changed by its PID, and its existing clients keep their limits. After a fatal
//! error of a client, the server is in FAULT and refuses new clients until all its clients have
//! exited. Such a server is not killed: that would restore no client, and it would kill clients
//! that are still saving their state. Only a server in FAULT without clients is shut down.

use crate::files::Dirs;
use crate::process::{self, PipeProcess, ProcessHandle};
use crate::program::{Program, ProgramError};
use divvy_api::mps::Desired;
use std::process::Child;
use std::time::{Duration, Instant};

/// Time from the start of a daemon to its first answer. A slower daemon is killed.
const READY_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a starting daemon is polled.
const READY_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// The grace period that `quit` gives to servers, and the timeout of the whole command.
const QUIT_GRACE_SECONDS: u32 = 1;
const QUIT_TIMEOUT: Duration = Duration::from_secs(3);
/// Time for a killed process to exit: the kernel first removes it from the GPU.
const KILL_TIMEOUT: Duration = Duration::from_secs(2);
/// More memory than any GPU has. The protocol has no command that removes a limit, so this value
/// stands for "no limit".
const UNLIMITED_MEMORY_MIB: u64 = 1 << 20;
/// Most servers that are queried. A real daemon runs one server per user at a time.
const MAX_SERVERS: usize = 16;

/// The health of a daemon that answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Healthy,
    Fault { cause: String },
}

/// A control daemon, started by this supervisor or an earlier one.
#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) handle: ProcessHandle,
    /// The child process, if this supervisor started it and must reap it.
    child: Option<Child>,
    pub(crate) multi_user: bool,
    device: String,
    program: Program,
    dirs: Dirs,
    answer_timeout: Duration,
}

impl Daemon {
    /// Starts a daemon in the requested user mode, and returns when it answers. Without a requested
    /// mode it tries multi-user mode first and then single-user mode.
    pub(crate) fn start(
        program: Program,
        dirs: &Dirs,
        desired: &Desired,
        answer_timeout: Duration,
    ) -> Result<Self, ProgramError> {
        let start = |multi_user| -> Result<Self, ProgramError> {
            let (child, handle) = program.start(&desired.device, multi_user)?;
            let (device, program, dirs) = (desired.device.clone(), program.clone(), dirs.clone());
            let daemon =
                Self { handle, child: Some(child), multi_user, device, program, dirs, answer_timeout };
            daemon.wait_ready()
        };
        match desired.multi_user {
            Some(false) => start(false),
            Some(true) => start(true).map_err(|error| match error {
                ProgramError::Exited { output } => ProgramError::Exited {
                    output: format!(
                        "{output} (multi-user mode needs -M, which this GPU driver may be too old for)"
                    ),
                },
                other => other,
            }),
            // Multi-user mode is tried, because neither a version nor a help text reliably tells
            // whether the program supports -M.
            None => start(true).or_else(|error| match error {
                ProgramError::Exited { .. } => start(false),
                other => Err(other),
            }),
        }
    }

    /// Waits for the first answer. If there is none in time, kills the daemon.
    fn wait_ready(mut self) -> Result<Self, ProgramError> {
        let begin = Instant::now();
        let failed = loop {
            if self.has_exited() {
                break ProgramError::Exited { output: self.program.startup_output() };
            }
            // The daemon creates its socket before it answers. Without the socket, starting a
            // client process is pointless.
            if self.dirs.pipe.join("control").exists() {
                match self.send("get_server_list") {
                    Ok(_) => return Ok(self),
                    Err(error) if begin.elapsed() >= READY_TIMEOUT => break error,
                    Err(_) => {}
                }
            }
            if begin.elapsed() >= READY_TIMEOUT {
                break ProgramError::Timeout { timeout: READY_TIMEOUT };
            }
            std::thread::sleep(READY_POLL_INTERVAL);
        };
        self.kill();
        Err(failed)
    }

    /// Takes over a running daemon.
    pub(crate) fn adopt(found: PipeProcess, program: Program, dirs: &Dirs, answer_timeout: Duration) -> Self {
        let PipeProcess { handle, multi_user, device, .. } = found;
        Self { handle, child: None, multi_user, device, program, dirs: dirs.clone(), answer_timeout }
    }

    /// Whether the daemon can satisfy `desired` without a restart.
    pub(crate) fn satisfies(&self, desired: &Desired) -> bool {
        self.device == desired.device && desired.multi_user.is_none_or(|wanted| wanted == self.multi_user)
    }

    /// Whether the daemon process has exited. If so, reaps it.
    pub(crate) fn has_exited(&mut self) -> bool {
        let ended = self.handle.wait_exit(Duration::ZERO);
        if ended && let Some(child) = &mut self.child {
            // The process has exited, so this returns at once.
            let _ = child.wait();
        }
        ended
    }

    fn send(&self, commands: &str) -> Result<String, ProgramError> {
        self.program.send(commands, self.answer_timeout)
    }

    /// Applies the limits that differ from `applied`: to future servers and to the running ones.
    pub(crate) fn apply_limits(
        &self,
        desired: &Desired,
        applied: Option<&Desired>,
    ) -> Result<(), ProgramError> {
        let threads = desired.thread_percentage.unwrap_or(100);
        let memory = desired.memory_mib.unwrap_or(UNLIMITED_MEMORY_MIB);
        let new_threads =
            applied.is_none_or(|applied| applied.thread_percentage != desired.thread_percentage);
        let new_memory = applied.is_none_or(|applied| applied.memory_mib != desired.memory_mib);
        if new_threads {
            self.send_setting(&format!("set_default_active_thread_percentage {threads}"))?;
        }
        if new_memory {
            self.send_setting(&format!("set_default_device_pinned_mem_limit 0 {memory}M"))?;
        }
        for server in self.servers()? {
            if new_threads {
                self.send_setting(&format!("set_active_thread_percentage {server} {threads}"))?;
            }
            if new_memory {
                self.send_setting(&format!("set_device_pinned_mem_limit {server} 0 {memory}M"))?;
            }
        }
        Ok(())
    }

    /// Sends a command whose answer is empty or the number that it set. Any other answer is a
    /// refusal: the program still exits with success, but clients would run without the limit.
    fn send_setting(&self, command: &str) -> Result<(), ProgramError> {
        let answer = self.send(command)?;
        match answer.lines().map(str::trim).find(|line| !line.is_empty() && line.parse::<f64>().is_err()) {
            None => Ok(()),
            Some(line) => Err(ProgramError::Refused { command: command.to_owned(), answer: line.to_owned() }),
        }
    }

    /// PIDs of the servers, at most [`MAX_SERVERS`]. Each one costs a query, and a container that
    /// impersonates the daemon may answer anything.
    fn servers(&self) -> Result<Vec<u32>, ProgramError> {
        let mut servers = parse_pids(&self.send("get_server_list")?);
        servers.truncate(MAX_SERVERS);
        Ok(servers)
    }

    /// Queries the health of all servers.
    ///
    /// # Errors
    /// The daemon does not answer or cannot be queried.
    pub(crate) fn health(&self) -> Result<Health, ProgramError> {
        for server in self.servers()? {
            let status = self.send(&format!("get_server_status {server}"))?;
            if status.trim() != "FAULT" {
                continue;
            }
            let clients = parse_pids(&self.send(&format!("get_client_list {server}"))?).len();
            if clients == 0 {
                self.send(&format!("shutdown_server {server} -f"))?;
                continue;
            }
            let cause = format!(
                "MPS server {server} had a fatal error; its {clients} clients are lost: \
                 restart their containers"
            );
            return Ok(Health::Fault { cause });
        }
        Ok(Health::Healthy)
    }

    /// Stops the daemon and its servers, first with `quit` and then with SIGKILL. False if a
    /// process of it still runs.
    pub(crate) fn stop(mut self) -> bool {
        // The answer does not matter: the processes are checked below.
        let _ = self.program.send(&format!("quit -t {QUIT_GRACE_SECONDS}"), QUIT_TIMEOUT);
        self.handle.wait_exit(KILL_TIMEOUT / 4);
        self.kill()
    }

    /// Kills the daemon and its servers. False if a process of it still runs.
    pub(crate) fn kill(&mut self) -> bool {
        self.handle.kill();
        let ended = self.handle.wait_exit(KILL_TIMEOUT);
        self.has_exited();
        process::kill_pipe_processes(&self.dirs.pipe, KILL_TIMEOUT) && ended
    }
}

/// The parse_pids in an answer, one per line.
fn parse_pids(answer: &str) -> Vec<u32> {
    answer.lines().filter_map(|line| line.trim().parse().ok()).collect()
}
