//! One running control daemon: asked how it is, told other limits, ended.
//!
//! What the control protocol says and does not say (docs.nvidia.com/deploy/mps):
//! defaults are for servers that start later, so a server that runs is told by its
//! number; its clients keep what they had. After a client's fatal error the server
//! is in FAULT, refuses new clients, and is well again by itself when all clients
//! of that time have gone. It is left to that: ending it would not bring a client
//! back and takes away those that are still to write what they know. Only a server
//! in FAULT that has no clients any more is shut down.

use crate::files::Dirs;
use crate::process::{self, Found, Held};
use crate::program::{Program, ProgramError};
use divvy_api::mps::Desired;
use std::process::Child;
use std::time::{Duration, Instant};

/// How long a daemon may take from its start to its first answer.
const READY_WITHIN: Duration = Duration::from_secs(10);
/// How often a daemon that starts is looked at.
const READY_PAUSE: Duration = Duration::from_millis(5);
/// Seconds that `quit` leaves servers, and how long it may take altogether.
const QUIT_SECONDS: u32 = 1;
const QUIT_WITHIN: Duration = Duration::from_secs(3);
/// How long a killed process may take to end: the kernel has to take it off the GPU.
const KILL_WITHIN: Duration = Duration::from_secs(2);
/// More than any device has: no command takes a limit back.
const ALL_MEMORY_MIB: u64 = 1 << 20;
/// A daemon has one server for each user at a time.
const SERVERS: usize = 16;

/// How a daemon is that answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Well,
    Fault { cause: String },
}

/// A control daemon, started by this keeper or an earlier one.
#[derive(Debug)]
pub(crate) struct Daemon {
    pub(crate) held: Held,
    /// The one we started is ours to reap.
    child: Option<Child>,
    pub(crate) multi_user: bool,
    device: String,
    program: Program,
    dirs: Dirs,
    answer_within: Duration,
}

impl Daemon {
    /// Starts one, in the mode that is asked for or the better one it can; returns when it answers.
    pub(crate) fn start(
        program: Program,
        dirs: &Dirs,
        desired: &Desired,
        answer_within: Duration,
    ) -> Result<Self, ProgramError> {
        let start = |multi_user| -> Result<Self, ProgramError> {
            let (child, held) = program.start(&desired.device, multi_user)?;
            let (device, program, dirs) = (desired.device.clone(), program.clone(), dirs.clone());
            let daemon = Self { held, child: Some(child), multi_user, device, program, dirs, answer_within };
            daemon.ready()
        };
        match desired.multi_user {
            Some(false) => start(false),
            Some(true) => start(true).map_err(|error| match error {
                ProgramError::Ended { said } => ProgramError::Ended {
                    said: format!(
                        "{said} (started with -M, which multi-user mode needs; the GPU driver may be too old for it)"
                    ),
                },
                other => other,
            }),
            // It is tried: no version and no help text that could be relied on tells whether -M is there.
            None => start(true).or_else(|error| match error {
                ProgramError::Ended { .. } => start(false),
                other => Err(other),
            }),
        }
    }

    /// Waits for the first answer. One that does not come ends the daemon.
    fn ready(mut self) -> Result<Self, ProgramError> {
        let begin = Instant::now();
        let failed = loop {
            if self.has_ended() {
                break ProgramError::Ended { said: self.program.said_at_start() };
            }
            // Its socket comes before its answers; a client that finds none is a process for nothing.
            if self.dirs.pipe.join("control").exists() {
                match self.ask("get_server_list") {
                    Ok(_) => return Ok(self),
                    Err(error) if begin.elapsed() >= READY_WITHIN => break error,
                    Err(_) => {}
                }
            }
            if begin.elapsed() >= READY_WITHIN {
                break ProgramError::Late { within: READY_WITHIN };
            }
            std::thread::sleep(READY_PAUSE);
        };
        self.kill();
        Err(failed)
    }

    /// Takes over one that runs.
    pub(crate) fn adopt(found: Found, program: Program, dirs: &Dirs, answer_within: Duration) -> Self {
        let Found { held, multi_user, device, .. } = found;
        Self { held, child: None, multi_user, device, program, dirs: dirs.clone(), answer_within }
    }

    /// Whether it can be what is wanted without another start.
    pub(crate) fn can_be(&self, desired: &Desired) -> bool {
        self.device == desired.device && desired.multi_user.is_none_or(|wanted| wanted == self.multi_user)
    }

    /// Whether the process has ended; reaps it.
    pub(crate) fn has_ended(&mut self) -> bool {
        let ended = self.held.ends_within(Duration::ZERO);
        if ended && let Some(child) = &mut self.child {
            // It has ended, so this does not wait.
            let _ = child.wait();
        }
        ended
    }

    fn ask(&self, commands: &str) -> Result<String, ProgramError> {
        self.program.ask(commands, self.answer_within)
    }

    /// Puts limits in force, for servers to come and the one that runs: all that are not as it was told before.
    pub(crate) fn set(&self, desired: &Desired, told: Option<&Desired>) -> Result<(), ProgramError> {
        let threads = desired.thread_percentage.unwrap_or(100);
        let memory = desired.memory_mib.unwrap_or(ALL_MEMORY_MIB);
        let new_threads = told.is_none_or(|told| told.thread_percentage != desired.thread_percentage);
        let new_memory = told.is_none_or(|told| told.memory_mib != desired.memory_mib);
        if new_threads {
            self.tell(&format!("set_default_active_thread_percentage {threads}"))?;
        }
        if new_memory {
            self.tell(&format!("set_default_device_pinned_mem_limit 0 {memory}M"))?;
        }
        for server in self.servers()? {
            if new_threads {
                self.tell(&format!("set_active_thread_percentage {server} {threads}"))?;
            }
            if new_memory {
                self.tell(&format!("set_device_pinned_mem_limit {server} 0 {memory}M"))?;
            }
        }
        Ok(())
    }

    /// A command that answers nothing or the number it has set. Anything else is a refusal: with it a client would run
    /// without its limit, and the program ends well all the same.
    fn tell(&self, command: &str) -> Result<(), ProgramError> {
        let answer = self.ask(command)?;
        match answer.lines().map(str::trim).find(|line| !line.is_empty() && line.parse::<f64>().is_err()) {
            None => Ok(()),
            Some(said) => Err(ProgramError::Refused { command: command.to_owned(), said: said.to_owned() }),
        }
    }

    /// The first of them: each is asked for itself, and a container that puts itself in the daemon's place may answer
    /// anything.
    fn servers(&self) -> Result<Vec<u32>, ProgramError> {
        let mut servers = numbers(&self.ask("get_server_list")?);
        servers.truncate(SERVERS);
        Ok(servers)
    }

    /// How it is; an error where it does not answer.
    pub(crate) fn health(&self) -> Result<Health, ProgramError> {
        for server in self.servers()? {
            let status = self.ask(&format!("get_server_status {server}"))?;
            if status.trim() != "FAULT" {
                continue;
            }
            let clients = numbers(&self.ask(&format!("get_client_list {server}"))?).len();
            if clients == 0 {
                self.ask(&format!("shutdown_server {server} -f"))?;
                continue;
            }
            let cause = format!(
                "MPS server {server} had a fatal error; its {clients} clients are lost and their containers must restart"
            );
            return Ok(Health::Fault { cause });
        }
        Ok(Health::Well)
    }

    /// Ends it and its servers, kindly first. False if something of it is left.
    pub(crate) fn end(mut self) -> bool {
        // Whatever is answered, its end is seen to below.
        let _ = self.program.ask(&format!("quit -t {QUIT_SECONDS}"), QUIT_WITHIN);
        self.held.ends_within(KILL_WITHIN / 4);
        self.kill()
    }

    /// Kills it and its servers. False if something of it is left.
    pub(crate) fn kill(&mut self) -> bool {
        self.held.kill();
        let ended = self.held.ends_within(KILL_WITHIN);
        self.has_ended();
        process::sweep(&self.dirs.pipe, KILL_WITHIN) && ended
    }
}

/// The numbers in an answer, one a line.
fn numbers(answer: &str) -> Vec<u32> {
    answer.lines().filter_map(|line| line.trim().parse().ok()).collect()
}
