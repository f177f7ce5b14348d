//! Reconciles one target: compares the desired state with the running daemon and acts on the
//! difference.
//!
//! The thread sleeps until a file of the target changes, its daemon exits or a check is due. Then
//! it takes one [`step`](Target::step). A step reads the whole state again, so the reason for the
//! wakeup does not matter, nor which supervisor took the previous step.

use crate::args::Args;
use crate::daemon::{Daemon, Health};
use crate::files::Dirs;
use crate::process::{self, PipeProcess};
use crate::program::{Program, ProgramError};
use crate::watch::Watch;
use divvy_api::mps::{Actual, Desired, FORMAT, Phase};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Check interval of a daemon in FAULT. It is short because pods wait for the daemon to recover.
const FAULT_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// A write to a server log triggers a check, but checks are at least this far apart.
const MIN_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Pause before a restart: it starts at the minimum and doubles up to the maximum.
const MIN_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// A daemon that ran this long counts as stable, which resets the back-off.
const STABLE_AFTER: Duration = Duration::from_secs(60);
/// How long a directory without `desired.json` is kept if no daemon ran there: divvy-node may be
/// about to write the file.
const SETUP_GRACE: Duration = Duration::from_secs(3);
/// Time until a failed operation is retried.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);
/// Time for leftover servers to exit after they are killed.
const SWEEP_TIMEOUT: Duration = Duration::from_secs(2);

/// The next action of the thread after a step.
enum Next {
    Wait(Duration),
    Done,
}

struct Target<'a> {
    args: &'a Args,
    name: &'a str,
    dirs: Dirs,
    daemon: Option<Running>,
    /// The last valid desired state. It stays in use while the file is invalid.
    desired: Option<Desired>,
    /// The number of the last start of the daemon.
    incarnation: u64,
    last_written: Option<Actual>,
    /// Consecutive failed starts.
    failures: u32,
    start_at: Instant,
    /// The message that was logged last, to log a repeated one only once.
    last_logged: String,
    created_at: Instant,
    /// A directory that could not be removed is retried at this time.
    remove_at: Instant,
}

/// A running daemon and its bookkeeping.
struct Running {
    daemon: Daemon,
    /// The limits that the daemon has accepted.
    applied: Option<Desired>,
    since: Instant,
    checked: Instant,
    check_at: Instant,
}

/// Supervises a target until its directory is removed.
pub(crate) fn supervise(args: &Args, name: &str, dir: &Path, threads: &Threads) {
    let mut target = Target::new(args, name, dir);
    loop {
        let time = match Watch::new() {
            Err(error) => {
                target.log_once(&format!("cannot watch the directory: {error}"));
                match target.step() {
                    Next::Wait(time) => time.min(RETRY_INTERVAL),
                    Next::Done => Duration::ZERO,
                }
            }
            Ok(watch) => {
                // Watch before the step reads the state, so that no change is missed.
                let is_gone = watch.entries(dir).is_err() && !dir.exists();
                let _ = watch.entries(&target.dirs.log);
                watch.writing(&target.dirs.log.join("server.log"));
                match target.step() {
                    Next::Done => Duration::ZERO,
                    Next::Wait(_) if is_gone => Duration::ZERO,
                    Next::Wait(time) => {
                        let process = target.daemon.as_ref().map(|running| running.daemon.handle.fd());
                        if watch.wait(process, time).is_err() {
                            std::thread::sleep(MIN_CHECK_INTERVAL);
                        }
                        target.schedule_check();
                        continue;
                    }
                }
            }
        };
        if time > Duration::ZERO {
            std::thread::sleep(time);
            continue;
        }
        // The lock is held during the last check. If a directory of this name is created meanwhile,
        // the main loop sees it after this thread is removed from the map.
        let mut threads = threads.lock().unwrap_or_else(PoisonError::into_inner);
        if target.remove_dir() {
            threads.remove(name);
            return;
        }
    }
}

impl<'a> Target<'a> {
    /// Restores the state from an earlier supervisor: its running daemon and its start count.
    fn new(args: &'a Args, name: &'a str, dir: &Path) -> Self {
        let now = Instant::now();
        let mut target = Self {
            args,
            name,
            dirs: Dirs::new(dir),
            daemon: None,
            desired: None,
            incarnation: 0,
            last_written: None,
            failures: 0,
            start_at: now,
            last_logged: String::new(),
            created_at: now,
            remove_at: now,
        };
        let actual = target.dirs.actual().unwrap_or_else(|error| {
            target.log_once(&error.to_string());
            None
        });
        target.incarnation = actual.as_ref().map_or(0, |actual| actual.incarnation);
        let (controls, servers): (Vec<PipeProcess>, Vec<PipeProcess>) =
            process::pipe_processes(&target.dirs.pipe).into_iter().partition(|found| found.is_control);
        match (controls.into_iter().next(), Program::find(&args.driver_root, &target.dirs)) {
            (Some(found), Ok(program)) => target.adopt(found, program, actual),
            (Some(_), Err(error)) => target.log_once(&error.to_string()),
            (None, _) if !servers.is_empty() => {
                target.log("the control daemon exited while no supervisor ran; killing its servers");
                process::kill_pipe_processes(&target.dirs.pipe, SWEEP_TIMEOUT);
            }
            (None, _) => {}
        }
        target
    }

    fn adopt(&mut self, found: PipeProcess, program: Program, actual: Option<Actual>) {
        let process = found.handle.process;
        let known = actual.filter(|actual| actual.process == Some(process));
        if known.is_none() {
            // No file describes this daemon: the earlier supervisor died right after it started it.
            self.incarnation += 1;
        }
        self.log(&format!("adopted the running daemon, process {}", process.pid));
        // The limits are applied if the state file says so. Otherwise they are set again, which is
        // harmless.
        let applied =
            known.as_ref().filter(|actual| matches!(actual.phase, Phase::Ready | Phase::Fault { .. }));
        let applied = applied.map(|actual| actual.desired.clone());
        self.desired = known.as_ref().map(|actual| actual.desired.clone());
        self.last_written = known;
        let now = Instant::now();
        let daemon = Daemon::adopt(found, program, &self.dirs, self.args.answer_timeout);
        self.daemon = Some(Running { daemon, applied, since: now, checked: now, check_at: now });
    }

    /// Makes a health check due soon, after a file changed.
    fn schedule_check(&mut self) {
        if let Some(running) = &mut self.daemon {
            running.check_at = running.check_at.min(running.checked + MIN_CHECK_INTERVAL);
        }
    }

    fn step(&mut self) -> Next {
        let desired = match self.dirs.desired() {
            Ok(None) => return self.stop(),
            Ok(Some(desired)) => desired,
            Err(error) => {
                self.log_once(&format!("{error}; ignored, the daemon keeps its settings"));
                match &self.desired {
                    Some(desired) => desired.clone(),
                    None => return Next::Wait(self.args.check_interval),
                }
            }
        };
        if self.desired.as_ref() != Some(&desired) {
            // A new desired state has a waiter, so the back-off of earlier failures does not delay
            // it.
            self.desired = Some(desired.clone());
            (self.failures, self.start_at) = (0, Instant::now());
        }
        self.reconcile_daemon(&desired);
        if self.daemon.is_none() {
            let now = Instant::now();
            if now < self.start_at {
                return Next::Wait(self.start_at - now);
            }
            self.start(&desired);
        }
        let now = Instant::now();
        let at = self.daemon.as_ref().map_or(self.start_at, |running| running.check_at);
        Next::Wait(at.saturating_duration_since(now))
    }

    /// Handles a running daemon: it may have exited, need a restart or new limits, or be due for a
    /// check.
    fn reconcile_daemon(&mut self, desired: &Desired) {
        let Some(mut running) = self.daemon.take() else { return };
        if running.daemon.has_exited() {
            running.daemon.kill();
            return self.record_loss(
                desired,
                &running,
                "the control daemon exited; containers that used it must restart",
            );
        }
        if !running.daemon.satisfies(desired) {
            self.log("the device or user mode has changed; restarting the daemon");
            running.daemon.stop();
            return;
        }
        if running.applied.as_ref() != Some(desired) {
            match running.daemon.apply_limits(desired, running.applied.as_ref()) {
                Ok(()) => {
                    self.log(&format!("limits applied: {}", limits(desired)));
                    running.applied = Some(desired.clone());
                    running.check_at = Instant::now();
                }
                Err(error) => {
                    // A daemon that rejects a limit, or that cannot be queried, keeps running for
                    // its existing clients.
                    if matches!(error, ProgramError::Refused { .. } | ProgramError::Start(_)) {
                        self.write(Phase::Down { cause: error.to_string() }, desired, Some(&running));
                        running.check_at = Instant::now() + RETRY_INTERVAL;
                        self.daemon = Some(running);
                    } else {
                        running.daemon.kill();
                        self.record_loss(desired, &running, &format!("{error}; restarting it"));
                    }
                    return;
                }
            }
        }
        let now = Instant::now();
        if now >= running.check_at {
            match running.daemon.health() {
                Ok(health) => {
                    running.checked = now;
                    let (phase, after) = match health {
                        Health::Healthy => (Phase::Ready, self.args.check_interval),
                        Health::Fault { cause } => (Phase::Fault { cause }, FAULT_CHECK_INTERVAL),
                    };
                    running.check_at = now + after;
                    if running.since.elapsed() >= STABLE_AFTER {
                        self.failures = 0;
                    }
                    self.write(phase, desired, Some(&running));
                }
                // This says nothing about the daemon: the driver's files may be missing during a
                // driver upgrade.
                Err(error @ ProgramError::Start(_)) => {
                    self.log(&format!("health check failed to run: {error}"));
                    running.check_at = now + RETRY_INTERVAL;
                }
                Err(error) => {
                    running.daemon.kill();
                    let cause = format!("{error}; killed it, containers that used it must restart");
                    return self.record_loss(desired, &running, &cause);
                }
            }
        }
        self.daemon = Some(running);
    }

    /// Records that a daemon was lost. The first restart is immediate; later ones back off.
    fn record_loss(&mut self, desired: &Desired, lost: &Running, cause: &str) {
        let pause = match self.failures {
            0 => Duration::ZERO,
            failures => (MIN_BACKOFF * 2u32.saturating_pow(failures.min(10) - 1)).min(MAX_BACKOFF),
        };
        self.failures += 1;
        self.start_at = Instant::now() + pause;
        let process = lost.daemon.handle.process;
        self.log(&format!("process {}: {cause}", process.pid));
        self.write(Phase::Down { cause: cause.to_owned() }, desired, None);
    }

    fn start(&mut self, desired: &Desired) {
        self.write(Phase::Starting, desired, None);
        // Unknown leftovers of a daemon would block the pipe and the GPU.
        process::kill_pipe_processes(&self.dirs.pipe, SWEEP_TIMEOUT);
        self.incarnation += 1;
        let started = Program::find(&self.args.driver_root, &self.dirs)
            .and_then(|program| Daemon::start(program, &self.dirs, desired, self.args.answer_timeout));
        match started {
            Ok(daemon) => {
                let users = if daemon.multi_user { "all users at once" } else { "one user at a time" };
                let pid = daemon.handle.process.pid;
                self.log(&format!("started for {}, process {pid}, {users}", desired.device));
                let now = Instant::now();
                // A new daemon has no limits.
                let applied = Desired { thread_percentage: None, memory_mib: None, ..desired.clone() };
                let running =
                    Running { daemon, applied: Some(applied), since: now, checked: now, check_at: now };
                // Write the state now, so that the start count is right even if the supervisor dies
                // next.
                self.write(Phase::Starting, desired, Some(&running));
                self.daemon = Some(running);
                self.reconcile_daemon(desired);
            }
            Err(error) => {
                let pause = (MIN_BACKOFF * 2u32.saturating_pow(self.failures.min(10))).min(MAX_BACKOFF);
                self.failures += 1;
                self.start_at = Instant::now() + pause;
                self.log_once(&error.to_string());
                self.write(Phase::Down { cause: error.to_string() }, desired, None);
            }
        }
    }

    /// Stops the daemon, because the target is no longer desired.
    fn stop(&mut self) -> Next {
        self.desired = None;
        if let Some(running) = self.daemon.take() {
            let pid = running.daemon.handle.process.pid;
            let gone = running.daemon.stop();
            self.log(&format!("stopped, process {pid}"));
            if !gone {
                self.log_once("a killed process does not exit");
                return Next::Wait(RETRY_INTERVAL);
            }
        } else if !self.dirs.had_daemon() && self.created_at.elapsed() < SETUP_GRACE {
            return Next::Wait(SETUP_GRACE - self.created_at.elapsed());
        }
        if !process::kill_pipe_processes(&self.dirs.pipe, SWEEP_TIMEOUT) {
            self.log_once("a killed process does not exit");
            return Next::Wait(RETRY_INTERVAL);
        }
        match self.remove_at.checked_duration_since(Instant::now()) {
            Some(time) if time > Duration::ZERO => Next::Wait(time),
            _ => Next::Done,
        }
    }

    /// Removes the directory. False if the target is desired again or the directory cannot be
    /// removed.
    fn remove_dir(&mut self) -> bool {
        if self.dirs.desired().is_ok_and(|desired| desired.is_none()) {
            match self.dirs.remove() {
                Ok(()) => return true,
                Err(error) => self.log_once(&format!("cannot remove the directory: {error}")),
            }
        }
        self.last_written = None;
        self.remove_at = Instant::now() + RETRY_INTERVAL;
        !self.dirs.dir.exists()
    }

    /// Writes the actual state if it changed.
    fn write(&mut self, phase: Phase, desired: &Desired, running: Option<&Running>) {
        let actual = Actual {
            format: FORMAT,
            phase,
            desired: desired.clone(),
            incarnation: self.incarnation,
            process: running.map(|running| running.daemon.handle.process),
            multi_user: running.is_some_and(|running| running.daemon.multi_user),
        };
        if self.last_written.as_ref() == Some(&actual) {
            return;
        }
        let before = self.last_written.as_ref().map(|last_written| &last_written.phase);
        if matches!(actual.phase, Phase::Ready | Phase::Fault { .. }) && before != Some(&actual.phase) {
            self.last_logged.clear();
            self.log(&actual.phase.to_string());
        }
        match self.dirs.write_actual(&actual) {
            Ok(()) => self.last_written = Some(actual),
            Err(error) => self.log_once(&format!("cannot write the state: {error}")),
        }
    }

    fn log(&self, text: &str) {
        log(self.name, text);
    }

    /// Logs a message, unless it equals the last one.
    fn log_once(&mut self, text: &str) {
        if self.last_logged != text {
            self.log(text);
            text.clone_into(&mut self.last_logged);
        }
    }
}

fn limits(desired: &Desired) -> String {
    let threads = desired.thread_percentage.map_or("all".to_owned(), |threads| format!("{threads} %"));
    let memory = desired.memory_mib.map_or("all".to_owned(), |mib| format!("{mib} MiB"));
    format!("threads {threads}, memory {memory}")
}

/// The supervising threads by the name of their directory. A thread holds the lock while it removes
/// its directory, so that the main loop sees a new directory of that name without a thread.
pub(crate) type Threads = Arc<Mutex<HashMap<String, JoinHandle<()>>>>;

/// Writes a line to stderr. The collector of the log adds the time.
pub(crate) fn log(target: &str, text: &str) {
    eprintln!("{target}: {text}");
}
