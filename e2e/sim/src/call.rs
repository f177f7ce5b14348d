//! [`Sim::call`]: runs one call of the library under the rules of [`crate::control`].

use crate::code::Code;
use crate::control::{BlockedCall, Call, TraceLine, When};
use crate::sim::Sim;
use crate::state::State;
use rustix::fs::{Mode, OFlags};
use std::io::Write;
use std::time::{Duration, Instant, SystemTime};

/// How often a blocked call checks whether its hold was released.
const HOLD_POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Longest time that a call waits for the simulated resource manager's lock.
const RM_LOCK_TIMEOUT: Duration = Duration::from_secs(600);

impl Sim {
    /// Runs one call of the library under the rules: latency, holds and faults before the effect,
    /// the effect, then faults and holds after it. A fault after the effect replaces only the
    /// answer.
    pub fn call<T>(&self, call: Call<'_>, effect: impl FnOnce() -> Result<T, Code>) -> Result<T, Code> {
        // The trace includes the time to read what others changed.
        let begin = Instant::now();
        let state = self.read_stored()?;
        if state.control.has_no_rules() {
            return effect();
        }
        let result = self.call_with_rules(&state, &call, effect);
        if state.control.trace {
            self.write_trace(&call, begin, result.as_ref().err().copied().unwrap_or(Code::Success));
        }
        result
    }

    fn call_with_rules<T>(
        &self,
        state: &State,
        call: &Call<'_>,
        effect: impl FnOnce() -> Result<T, Code>,
    ) -> Result<T, Code> {
        let control = &state.control;
        let latency = control.latency_for(call);
        let _lock = match latency {
            Some(latency) if latency.global_lock => Some(self.rm_lock()?),
            _ => None,
        };
        if let Some(latency) = latency {
            std::thread::sleep(Duration::from_millis(latency.ms));
        }
        if control.may_hold(call, When::Before) {
            self.hold(call, When::Before);
        }
        if control.may_fail(call, When::Before)
            && let Some(code) = self.fault_code(call, When::Before)
        {
            return Err(code);
        }
        let result = effect();
        if control.may_fail(call, When::After)
            && let Some(code) = self.fault_code(call, When::After)
        {
            return Err(code);
        }
        if control.may_hold(call, When::After) {
            self.hold(call, When::After);
        }
        result
    }

    fn fault_code(&self, call: &Call<'_>, when: When) -> Option<Code> {
        self.update(|state| Ok(state.control.take_fault(call, when))).ok().flatten()
    }

    /// Blocks while a hold matches. Holds do not apply to a process that cannot write the state.
    fn hold(&self, call: &Call<'_>, when: When) {
        let (pid, tid) =
            (std::process::id(), rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned());
        let enter = self.update(|state| {
            let Some(hold) = state.control.take_hold(call, when) else { return Ok(None) };
            let held = BlockedCall { pid, tid, call: call.name.to_owned(), gpu: call.gpu, when, hold };
            state.control.held.push(held);
            Ok(Some(hold))
        });
        let Ok(Some(id)) = enter else { return };
        // The wait has no timeout of its own: it ends when the rule or the simulator is removed.
        while self.read_stored().is_ok_and(|state| state.control.holds.iter().any(|hold| hold.id == id)) {
            std::thread::sleep(HOLD_POLL_INTERVAL);
        }
        // Fails only if the simulator was removed meanwhile.
        drop(self.update(|state| {
            state.control.held.retain(|held| (held.pid, held.tid) != (pid, tid));
            Ok(())
        }));
    }

    fn rm_lock(&self) -> Result<impl Drop + use<>, Code> {
        let path = self.dir().join("rm.lock");
        crate::file_lock::lock(&path, RM_LOCK_TIMEOUT).map_err(|_| Code::Timeout)
    }

    /// Appends a line to the trace, if this process may write it.
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
            // Each line is one write, so lines of several processes do not interleave.
            drop(std::fs::File::from(file).write_all(&text));
        }
    }
}

/// Whole microseconds.
fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
