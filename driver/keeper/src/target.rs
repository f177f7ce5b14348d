//! One target: from what is wanted and what runs, what is done next.
//!
//! The thread sleeps until its files change, its daemon ends or a check is due,
//! and then takes one [`step`](Target::step). A step looks at everything afresh,
//! so it does not matter what woke it, or which keeper did the step before.

use crate::args::Args;
use crate::daemon::{Daemon, Health};
use crate::files::Dirs;
use crate::process::{self, Found};
use crate::program::{Program, ProgramError};
use crate::watch::Watch;
use crate::{Threads, log};
use divvy_api::mps::{Actual, Desired, FORMAT, Phase};
use std::path::Path;
use std::sync::PoisonError;
use std::time::{Duration, Instant};

/// A daemon in FAULT is looked at more often: its clients wait for it to be well again.
const FAULT_CHECK: Duration = Duration::from_secs(1);
/// What a server writes into its log makes a check due, but not more often than this.
const HINT_PAUSE: Duration = Duration::from_secs(1);
/// First pause before another start; it doubles up to the longest.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// A daemon that ran so long has not failed to start.
const SETTLED: Duration = Duration::from_secs(60);
/// A directory without a wish in which nothing ever ran is somebody's in the making.
const MAKING: Duration = Duration::from_secs(3);
/// What could not be done is tried again after that.
const AGAIN: Duration = Duration::from_secs(5);
/// How long servers may take to end when they are killed at the start.
const SWEEP_WITHIN: Duration = Duration::from_secs(2);

/// What comes after a step.
enum Next {
    Wait(Duration),
    Gone,
}

struct Target<'k> {
    args: &'k Args,
    name: &'k str,
    dirs: Dirs,
    daemon: Option<Running>,
    /// The last wish that was understood: it holds while the file cannot be.
    wanted: Option<Desired>,
    /// Which start of the daemon the last one was.
    incarnation: u64,
    written: Option<Actual>,
    /// Starts that failed in a row.
    failures: u32,
    start_at: Instant,
    /// The complaint that was logged last.
    complained: String,
    born: Instant,
    /// A directory that could not be removed is left alone until then.
    leave_at: Instant,
}

/// A daemon and what is known of it.
struct Running {
    daemon: Daemon,
    /// What it was told last, if it took it.
    told: Option<Desired>,
    since: Instant,
    checked: Instant,
    check_at: Instant,
}

/// Looks after a target until its directory is gone.
pub(crate) fn supervise(args: &Args, name: &str, dir: &Path, threads: &Threads) {
    let mut target = Target::new(args, name, dir);
    loop {
        let time = match Watch::new() {
            Err(error) => {
                target.complain(&format!("cannot watch its directory: {error}"));
                match target.step() {
                    Next::Wait(time) => time.min(AGAIN),
                    Next::Gone => Duration::ZERO,
                }
            }
            Ok(watch) => {
                // Watched before it is looked at, so that no change falls between.
                let gone = watch.entries(dir).is_err() && !dir.exists();
                let _ = watch.entries(&target.dirs.log);
                watch.writing(&target.dirs.log.join("server.log"));
                match target.step() {
                    Next::Gone => Duration::ZERO,
                    Next::Wait(_) if gone => Duration::ZERO,
                    Next::Wait(time) => {
                        let process = target.daemon.as_ref().map(|running| running.daemon.held.fd());
                        if watch.wait(process, time).is_err() {
                            std::thread::sleep(HINT_PAUSE);
                        }
                        target.hint();
                        continue;
                    }
                }
            }
        };
        if time > Duration::ZERO {
            std::thread::sleep(time);
            continue;
        }
        // Held over the last look: a directory of this name that is made now is seen when this thread is forgotten.
        let mut threads = threads.lock().unwrap_or_else(PoisonError::into_inner);
        if target.leave() {
            threads.remove(name);
            return;
        }
    }
}

impl<'k> Target<'k> {
    /// What the keeper before left: its daemon, if that runs, and its count of starts.
    fn new(args: &'k Args, name: &'k str, dir: &Path) -> Self {
        let now = Instant::now();
        let mut target = Self {
            args,
            name,
            dirs: Dirs::new(dir),
            daemon: None,
            wanted: None,
            incarnation: 0,
            written: None,
            failures: 0,
            start_at: now,
            complained: String::new(),
            born: now,
            leave_at: now,
        };
        let actual = target.dirs.actual().unwrap_or_else(|error| {
            target.complain(&error.to_string());
            None
        });
        target.incarnation = actual.as_ref().map_or(0, |actual| actual.incarnation);
        let (controls, servers): (Vec<Found>, Vec<Found>) =
            process::of_pipe(&target.dirs.pipe).into_iter().partition(|found| found.control);
        match (controls.into_iter().next(), Program::find(&args.driver_root, &target.dirs)) {
            (Some(found), Ok(program)) => target.adopt(found, program, actual),
            (Some(_), Err(error)) => target.complain(&error.to_string()),
            (None, _) if !servers.is_empty() => {
                target.log("its control daemon ended while no keeper ran; ending its servers");
                process::sweep(&target.dirs.pipe, SWEEP_WITHIN);
            }
            (None, _) => {}
        }
        target
    }

    fn adopt(&mut self, found: Found, program: Program, actual: Option<Actual>) {
        let process = found.held.process;
        let known = actual.filter(|actual| actual.process == Some(process));
        if known.is_none() {
            // Nobody wrote of it: a start that the keeper before did not live to tell.
            self.incarnation += 1;
        }
        self.log(&format!("takes over the daemon that runs, process {}", process.pid));
        // Limits are in force where it said so; else they are set again, which harms nobody.
        let told = known.as_ref().filter(|actual| matches!(actual.phase, Phase::Ready | Phase::Fault { .. }));
        let told = told.map(|actual| actual.desired.clone());
        self.wanted = known.as_ref().map(|actual| actual.desired.clone());
        self.written = known;
        let now = Instant::now();
        let daemon = Daemon::adopt(found, program, &self.dirs, self.args.answer_within);
        self.daemon = Some(Running { daemon, told, since: now, checked: now, check_at: now });
    }

    /// Something was written or has changed: a check is due soon.
    fn hint(&mut self) {
        if let Some(running) = &mut self.daemon {
            running.check_at = running.check_at.min(running.checked + HINT_PAUSE);
        }
    }

    fn step(&mut self) -> Next {
        let wanted = match self.dirs.desired() {
            Ok(None) => return self.end(),
            Ok(Some(desired)) => desired,
            Err(error) => {
                self.complain(&format!("{error}; left as it is"));
                match &self.wanted {
                    Some(wanted) => wanted.clone(),
                    None => return Next::Wait(self.args.check_every),
                }
            }
        };
        if self.wanted.as_ref() != Some(&wanted) {
            // Somebody waits for this one: it is not held up by what failed before.
            self.wanted = Some(wanted.clone());
            (self.failures, self.start_at) = (0, Instant::now());
        }
        self.look_after(&wanted);
        if self.daemon.is_none() {
            let now = Instant::now();
            if now < self.start_at {
                return Next::Wait(self.start_at - now);
            }
            self.start(&wanted);
        }
        let now = Instant::now();
        let at = self.daemon.as_ref().map_or(self.start_at, |running| running.check_at);
        Next::Wait(at.saturating_duration_since(now))
    }

    /// Sees to a daemon that runs: lost, of another kind, with other limits, or due for a check.
    fn look_after(&mut self, wanted: &Desired) {
        let Some(mut running) = self.daemon.take() else { return };
        if running.daemon.has_ended() {
            running.daemon.kill();
            return self.failed(
                wanted,
                &running,
                "the control daemon ended; containers that used it must restart",
            );
        }
        if !running.daemon.can_be(wanted) {
            self.log("another device or user mode is wanted; starting anew");
            running.daemon.end();
            return;
        }
        if running.told.as_ref() != Some(wanted) {
            match running.daemon.set(wanted, running.told.as_ref()) {
                Ok(()) => {
                    self.log(&format!("limits in force: {}", limits(wanted)));
                    running.told = Some(wanted.clone());
                    running.check_at = Instant::now();
                }
                Err(error) => {
                    // A daemon that refuses a limit, or that nobody can ask, runs on for those who have theirs.
                    if matches!(error, ProgramError::Refused { .. } | ProgramError::Start(_)) {
                        self.write(Phase::Down { cause: error.to_string() }, wanted, Some(&running));
                        running.check_at = Instant::now() + AGAIN;
                        self.daemon = Some(running);
                    } else {
                        running.daemon.kill();
                        self.failed(wanted, &running, &format!("{error}; starting it anew"));
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
                        Health::Well => (Phase::Ready, self.args.check_every),
                        Health::Fault { cause } => (Phase::Fault { cause }, FAULT_CHECK),
                    };
                    running.check_at = now + after;
                    if running.since.elapsed() >= SETTLED {
                        self.failures = 0;
                    }
                    self.write(phase, wanted, Some(&running));
                }
                // That says nothing of the daemon: the driver's files may be away while it is replaced.
                Err(error @ ProgramError::Start(_)) => {
                    self.log(&format!("not known whether it is well: {error}"));
                    running.check_at = now + AGAIN;
                }
                Err(error) => {
                    running.daemon.kill();
                    let cause = format!("{error}; killed, containers that used it must restart");
                    return self.failed(wanted, &running, &cause);
                }
            }
        }
        self.daemon = Some(running);
    }

    /// A daemon was lost: the first start after it is at once, later ones wait longer and longer.
    fn failed(&mut self, wanted: &Desired, lost: &Running, cause: &str) {
        let pause = match self.failures {
            0 => Duration::ZERO,
            failures => (FIRST_PAUSE * 2u32.saturating_pow(failures.min(10) - 1)).min(LONGEST_PAUSE),
        };
        self.failures += 1;
        self.start_at = Instant::now() + pause;
        let process = lost.daemon.held.process;
        self.log(&format!("process {}: {cause}", process.pid));
        self.write(Phase::Down { cause: cause.to_owned() }, wanted, None);
    }

    fn start(&mut self, wanted: &Desired) {
        self.write(Phase::Starting, wanted, None);
        // What a daemon left that nobody knows would hold the pipe and the GPU.
        process::sweep(&self.dirs.pipe, SWEEP_WITHIN);
        self.incarnation += 1;
        let started = Program::find(&self.args.driver_root, &self.dirs)
            .and_then(|program| Daemon::start(program, &self.dirs, wanted, self.args.answer_within));
        match started {
            Ok(daemon) => {
                let users = if daemon.multi_user { "all users at once" } else { "one user at a time" };
                let pid = daemon.held.process.pid;
                self.log(&format!("started for {}, process {pid}, {users}", wanted.device));
                let now = Instant::now();
                // As it is from the start: without limits.
                let told = Desired { thread_percentage: None, memory_mib: None, ..wanted.clone() };
                let running = Running { daemon, told: Some(told), since: now, checked: now, check_at: now };
                // Told at once that it runs, so that a keeper that dies now leaves the right count of starts.
                self.write(Phase::Starting, wanted, Some(&running));
                self.daemon = Some(running);
                self.look_after(wanted);
            }
            Err(error) => {
                let pause = (FIRST_PAUSE * 2u32.saturating_pow(self.failures.min(10))).min(LONGEST_PAUSE);
                self.failures += 1;
                self.start_at = Instant::now() + pause;
                self.complain(&error.to_string());
                self.write(Phase::Down { cause: error.to_string() }, wanted, None);
            }
        }
    }

    /// Nothing is wanted here any more.
    fn end(&mut self) -> Next {
        self.wanted = None;
        if let Some(running) = self.daemon.take() {
            let pid = running.daemon.held.process.pid;
            let gone = running.daemon.end();
            self.log(&format!("ended, process {pid}"));
            if !gone {
                self.complain("a process of it has been killed and does not end");
                return Next::Wait(AGAIN);
            }
        } else if !self.dirs.used() && self.born.elapsed() < MAKING {
            return Next::Wait(MAKING - self.born.elapsed());
        }
        if !process::sweep(&self.dirs.pipe, SWEEP_WITHIN) {
            self.complain("a process of it has been killed and does not end");
            return Next::Wait(AGAIN);
        }
        match self.leave_at.checked_duration_since(Instant::now()) {
            Some(time) if time > Duration::ZERO => Next::Wait(time),
            _ => Next::Gone,
        }
    }

    /// Removes the directory; false if it is wanted again or cannot be removed.
    fn leave(&mut self) -> bool {
        if self.dirs.desired().is_ok_and(|desired| desired.is_none()) {
            match self.dirs.remove() {
                Ok(()) => return true,
                Err(error) => self.complain(&format!("its directory stays: {error}")),
            }
        }
        self.written = None;
        self.leave_at = Instant::now() + AGAIN;
        !self.dirs.dir.exists()
    }

    /// Writes what there is, if that is another than before.
    fn write(&mut self, phase: Phase, wanted: &Desired, running: Option<&Running>) {
        let actual = Actual {
            format: FORMAT,
            phase,
            desired: wanted.clone(),
            incarnation: self.incarnation,
            process: running.map(|running| running.daemon.held.process),
            multi_user: running.is_some_and(|running| running.daemon.multi_user),
        };
        if self.written.as_ref() == Some(&actual) {
            return;
        }
        let before = self.written.as_ref().map(|written| &written.phase);
        if matches!(actual.phase, Phase::Ready | Phase::Fault { .. }) && before != Some(&actual.phase) {
            self.complained.clear();
            self.log(&actual.phase.to_string());
        }
        match self.dirs.write_actual(&actual) {
            Ok(()) => self.written = Some(actual),
            Err(error) => self.complain(&format!("cannot write what it is: {error}")),
        }
    }

    fn log(&self, text: &str) {
        log(self.name, text);
    }

    /// Logs a complaint once, until another comes.
    fn complain(&mut self, text: &str) {
        if self.complained != text {
            self.log(text);
            text.clone_into(&mut self.complained);
        }
    }
}

fn limits(desired: &Desired) -> String {
    let threads = desired.thread_percentage.map_or("all".to_owned(), |threads| format!("{threads} %"));
    let memory = desired.memory_mib.map_or("all".to_owned(), |mib| format!("{mib} MiB"));
    format!("threads {threads}, memory {memory}")
}
