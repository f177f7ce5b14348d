//! What a test does to calls: latency, faults, holds and a trace.
//!
//! Every entry point of the simulated library runs its effect inside
//! [`Sim::call`]. Rules live in the state file, so they reach every process at
//! once; while there are none, the hook costs the look at the file that the call
//! needs anyway. Rules count matching calls under the file's lock, so "the third
//! call" is the third of the node, whichever process makes it.
//!
//! A call passes in this order: latency, holds before, faults before, the effect,
//! faults after (the effect has happened, its answer is replaced), holds after.

use crate::code::Code;
use crate::sim::Sim;
use crate::state::State;
use rustix::fs::{FlockOperation, Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::time::{Duration, Instant, SystemTime};

/// How often a held call looks whether it may go on.
const HOLD_POLL: Duration = Duration::from_millis(2);
/// A process waits at most this long for the resource manager's lock.
const RM_LOCK_WAIT: Duration = Duration::from_secs(600);

/// One call of the library, as rules and the trace see it.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// `nvmlDeviceCreateGpuInstanceWithPlacement`.
    pub name: &'a str,
    /// Slot of the GPU it is about.
    pub gpu: Option<usize>,
    /// What the trace shows of its arguments.
    pub args: &'a [u64],
}

/// All rules.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Control {
    /// Calls are written to the trace.
    pub trace: bool,
    pub latencies: Vec<Latency>,
    pub faults: Vec<Fault>,
    pub holds: Vec<Hold>,
    /// Calls that are blocked now; those of dead processes stay until they are [`prune`]d.
    pub held: Vec<Held>,
}

/// Which calls a rule is about.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pattern {
    /// A name, or its beginning and a `*`.
    pub call: String,
    /// Slot; absent means any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<usize>,
}

/// Calls that take a while.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    pub pattern: Pattern,
    pub ms: u64,
    /// Waits and works under one lock of the node, as the resource manager does.
    pub global_lock: bool,
}

/// Calls that fail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    pub pattern: Pattern,
    /// Only the call of that number from now, counted from 1; absent means all.
    pub nth: Option<u64>,
    pub when: When,
    pub code: Code,
    /// Matching calls so far.
    pub seen: u64,
}

/// Calls that block until released.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    pub pattern: Pattern,
    pub nth: Option<u64>,
    pub when: When,
    pub seen: u64,
    /// Tells this rule from a later one like it.
    pub id: u64,
}

/// On which side of the effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum When {
    Before,
    After,
}

/// A call that is blocked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Held {
    pub pid: u32,
    pub tid: u32,
    pub call: String,
    pub gpu: Option<usize>,
    pub when: When,
    /// The rule that blocks it.
    pub hold: u64,
}

/// A line of the trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceLine {
    /// Microseconds since 1970 at its begin.
    pub t_us: u64,
    pub pid: u32,
    pub call: String,
    pub gpu: Option<usize>,
    pub args: Vec<u64>,
    pub code: Code,
    /// Microseconds it took.
    pub us: u64,
}

impl Pattern {
    /// Any GPU.
    pub fn new(call: impl Into<String>) -> Self {
        Self { call: call.into(), gpu: None }
    }

    /// Whether it is about that call.
    pub fn matches(&self, call: &Call<'_>) -> bool {
        let name = match self.call.strip_suffix('*') {
            Some(begin) => call.name.starts_with(begin),
            None => call.name == self.call,
        };
        name && (self.gpu.is_none() || self.gpu == call.gpu)
    }
}

impl Control {
    fn idle(&self) -> bool {
        !self.trace && self.latencies.is_empty() && self.faults.is_empty() && self.holds.is_empty()
    }

    fn latency(&self, call: &Call<'_>) -> Option<&Latency> {
        self.latencies.iter().find(|latency| latency.pattern.matches(call))
    }

    fn faulty(&self, call: &Call<'_>, when: When) -> bool {
        self.faults.iter().any(|fault| fault.when == when && fault.pattern.matches(call))
    }

    fn holding(&self, call: &Call<'_>, when: When) -> bool {
        self.holds.iter().any(|hold| hold.when == when && hold.pattern.matches(call))
    }

    /// Counts the call on all faults of that side; the first that strikes.
    fn strike(&mut self, call: &Call<'_>, when: When) -> Option<Code> {
        let mut code = None;
        for fault in self.faults.iter_mut().filter(|fault| fault.when == when && fault.pattern.matches(call))
        {
            fault.seen += 1;
            if fault.nth.is_none_or(|nth| nth == fault.seen) {
                code = code.or(Some(fault.code));
            }
        }
        self.faults.retain(|fault| fault.nth.is_none_or(|nth| fault.seen < nth));
        code
    }

    /// Counts the call on all holds of that side; the first that blocks it.
    fn block(&mut self, call: &Call<'_>, when: When) -> Option<u64> {
        let mut id = None;
        for hold in self.holds.iter_mut().filter(|hold| hold.when == when && hold.pattern.matches(call)) {
            hold.seen += 1;
            if hold.nth.is_none_or(|nth| nth == hold.seen) {
                id = id.or(Some(hold.id));
            }
        }
        id
    }
}

/// Forgets blocked calls whose process is gone.
pub fn prune(state: &mut State) {
    state.control.held.retain(alive);
}

/// Whether the blocked call's thread is still there.
pub fn alive(held: &Held) -> bool {
    std::path::Path::new(&format!("/proc/{}/task/{}", held.pid, held.tid)).exists()
}

impl Sim {
    /// Runs one call of the library under the rules.
    pub fn call<T>(&self, call: Call<'_>, effect: impl FnOnce() -> Result<T, Code>) -> Result<T, Code> {
        // Reading what others changed is a part of the call.
        let begin = Instant::now();
        let state = self.written()?;
        if state.control.idle() {
            return effect();
        }
        let result = self.ruled(&state, &call, effect);
        if state.control.trace {
            self.write_trace(&call, begin, result.as_ref().err().copied().unwrap_or(Code::Success));
        }
        result
    }

    fn ruled<T>(
        &self,
        state: &State,
        call: &Call<'_>,
        effect: impl FnOnce() -> Result<T, Code>,
    ) -> Result<T, Code> {
        let control = &state.control;
        let latency = control.latency(call);
        let _lock = match latency {
            Some(latency) if latency.global_lock => Some(self.rm_lock()?),
            _ => None,
        };
        if let Some(latency) = latency {
            std::thread::sleep(Duration::from_millis(latency.ms));
        }
        if control.holding(call, When::Before) {
            self.hold(call, When::Before);
        }
        if control.faulty(call, When::Before)
            && let Some(code) = self.struck(call, When::Before)
        {
            return Err(code);
        }
        let result = effect();
        if control.faulty(call, When::After)
            && let Some(code) = self.struck(call, When::After)
        {
            return Err(code);
        }
        if control.holding(call, When::After) {
            self.hold(call, When::After);
        }
        result
    }

    fn struck(&self, call: &Call<'_>, when: When) -> Option<Code> {
        self.update(|state| Ok(state.control.strike(call, when))).ok().flatten()
    }

    /// Blocks while a hold says so. A process that may not write the state is not held.
    fn hold(&self, call: &Call<'_>, when: When) {
        let (pid, tid) =
            (std::process::id(), rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned());
        let enter = self.update(|state| {
            let Some(hold) = state.control.block(call, when) else { return Ok(None) };
            let held = Held { pid, tid, call: call.name.to_owned(), gpu: call.gpu, when, hold };
            state.control.held.push(held);
            Ok(Some(hold))
        });
        let Ok(Some(id)) = enter else { return };
        // The wait ends with the rule or with the simulator; a test's deadline is its own.
        while self.written().is_ok_and(|state| state.control.holds.iter().any(|hold| hold.id == id)) {
            std::thread::sleep(HOLD_POLL);
        }
        // Without the simulator there is nobody left to tell.
        drop(self.update(|state| {
            state.control.held.retain(|held| (held.pid, held.tid) != (pid, tid));
            Ok(())
        }));
    }

    fn rm_lock(&self) -> Result<impl Drop + use<>, Code> {
        let path = self.dir().join("rm.lock");
        crate::store::lock(&path, RM_LOCK_WAIT).map_err(|_| Code::Timeout)
    }

    /// Appends to the trace; a process that may not is not traced.
    fn write_trace(&self, call: &Call<'_>, begin: Instant, code: Code) {
        let us = micros(begin.elapsed());
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, micros);
        let line = TraceLine {
            t_us: now.saturating_sub(us),
            pid: std::process::id(),
            call: call.name.to_owned(),
            gpu: call.gpu,
            args: call.args.to_vec(),
            code,
            us,
        };
        let Ok(mut text) = serde_json::to_vec(&line) else { return };
        text.push(b'\n');
        let flags = OFlags::APPEND | OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
        if let Ok(file) = rustix::fs::open(self.trace_path(), flags, Mode::from_raw_mode(0o644)) {
            // One write of one line: lines of several processes do not mix.
            drop(std::fs::File::from(file).write_all(&text));
        }
    }
}

/// Whole microseconds.
fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Shared by every lock of the simulator.
pub(crate) const LOCK: FlockOperation = FlockOperation::NonBlockingLockExclusive;
