//! Rules that tests set for calls: latency, faults, holds and a trace.
//!
//! Every entry point of the simulated library runs its effect inside
//! [`Sim::call`](crate::Sim::call), which applies them. The rules are part of the state file, so
//! they reach every process at once. They count matching calls on the whole node: the third call is
//! the third of all processes.

use crate::code::Code;
use serde::{Deserialize, Serialize};

/// One call of the library.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// Name of the function, such as `nvmlDeviceCreateGpuInstanceWithPlacement`.
    pub name: &'a str,
    /// Slot of the GPU that the call names.
    pub gpu: Option<usize>,
    /// Arguments that the trace shows.
    pub args: &'a [u64],
}

/// All rules.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Control {
    /// Whether calls are written to the trace.
    pub trace: bool,
    pub latencies: Vec<Latency>,
    pub faults: Vec<Fault>,
    pub holds: Vec<Hold>,
    /// Calls that are blocked now. Those of dead processes stay until the next release.
    pub held: Vec<BlockedCall>,
}

/// The calls that a rule applies to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pattern {
    /// A name, or a prefix and `*`.
    pub call: String,
    /// Slot of the GPU; absent means any GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<usize>,
}

/// Delays calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    pub pattern: Pattern,
    pub ms: u64,
    /// Whether all matching calls of the node run one at a time, as under the resource manager's
    /// lock.
    pub global_lock: bool,
}

/// Makes calls fail.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    pub pattern: Pattern,
    /// Only the call with this number, counted from 1 when the rule was set; absent means all
    /// calls.
    pub nth: Option<u64>,
    pub when: When,
    pub code: Code,
    /// Matching calls so far.
    pub seen: u64,
}

/// Blocks calls until they are released.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    pub pattern: Pattern,
    pub nth: Option<u64>,
    pub when: When,
    pub seen: u64,
    /// Distinguishes this rule from a later equal one.
    pub id: u64,
}

/// Before or after the effect of the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum When {
    Before,
    After,
}

/// A call that is blocked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockedCall {
    pub pid: u32,
    pub tid: u32,
    pub call: String,
    pub gpu: Option<usize>,
    pub when: When,
    /// Id of the hold that blocks it.
    pub hold: u64,
}

/// A line of the trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceLine {
    /// Start of the call, in microseconds since the Unix epoch.
    pub t_us: u64,
    pub pid: u32,
    pub call: String,
    pub gpu: Option<usize>,
    pub args: Vec<u64>,
    pub code: Code,
    /// Duration in microseconds.
    pub us: u64,
}

impl Pattern {
    /// A pattern for any GPU.
    pub fn new(call: impl Into<String>) -> Self {
        Self { call: call.into(), gpu: None }
    }

    /// Whether the pattern matches the call.
    pub fn matches(&self, call: &Call<'_>) -> bool {
        let name = match self.call.strip_suffix('*') {
            Some(begin) => call.name.starts_with(begin),
            None => call.name == self.call,
        };
        name && (self.gpu.is_none() || self.gpu == call.gpu)
    }
}

impl Control {
    pub(crate) fn has_no_rules(&self) -> bool {
        !self.trace && self.latencies.is_empty() && self.faults.is_empty() && self.holds.is_empty()
    }

    pub(crate) fn latency_for(&self, call: &Call<'_>) -> Option<&Latency> {
        self.latencies.iter().find(|latency| latency.pattern.matches(call))
    }

    pub(crate) fn may_fail(&self, call: &Call<'_>, when: When) -> bool {
        self.faults.iter().any(|fault| fault.when == when && fault.pattern.matches(call))
    }

    pub(crate) fn may_hold(&self, call: &Call<'_>, when: When) -> bool {
        self.holds.iter().any(|hold| hold.when == when && hold.pattern.matches(call))
    }

    /// Counts the call on all matching faults and returns the code of the first that fires.
    pub(crate) fn take_fault(&mut self, call: &Call<'_>, when: When) -> Option<Code> {
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

    /// Counts the call on all matching holds and returns the id of the first that blocks it.
    pub(crate) fn take_hold(&mut self, call: &Call<'_>, when: When) -> Option<u64> {
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

/// Whether the thread of the blocked call still exists.
pub fn is_alive(held: &BlockedCall) -> bool {
    std::path::Path::new(&format!("/proc/{}/task/{}", held.pid, held.tid)).exists()
}
