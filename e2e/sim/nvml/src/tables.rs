//! Tables that the calls of a process share: event sets and GPM samples.

use std::collections::BTreeMap;

use divvy_sim::State;
use divvy_sim::code::Code;
use divvy_sim::state::Event;

use crate::argument::Outcome;

/// The event sets of this process, by handle.
///
/// A set stores the number of the newest event at each registration and the number of the last
/// delivered event. So it delivers no event twice, and none from before its registration.
#[derive(Default)]
pub(crate) struct EventSets {
    pub(crate) last: u64,
    pub(crate) sets: BTreeMap<u64, EventSet>,
    pub(crate) system: BTreeMap<u64, u64>,
}

#[derive(Default)]
pub(crate) struct EventSet {
    /// By GPU slot.
    pub(crate) registered: BTreeMap<usize, Registration>,
    /// Number of the last delivered event.
    pub(crate) delivered: u64,
}

pub(crate) struct Registration {
    pub(crate) mask: u64,
    /// Number of the newest event at registration.
    pub(crate) since: u64,
}

impl EventSets {
    pub(crate) fn next_number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The next event that the set has not delivered.
    pub(crate) fn next_event(&mut self, handle: u64, state: &State) -> Outcome<Option<Event>> {
        let set = self.sets.get_mut(&handle).ok_or(Code::InvalidArgument)?;
        let wanted = |event: &&Event| {
            event.seq > set.delivered
                && set.registered.get(&event.slot).is_some_and(|registration| {
                    event.seq > registration.since && registration.mask & event.kind.mask() != 0
                })
        };
        let found = state.events.queue.iter().find(wanted).cloned();
        set.delivered = found.as_ref().map_or(state.events.last.max(set.delivered), |event| event.seq);
        Ok(found)
    }

    /// Whether the driver knows that all GPUs of the set are lost, so that no further event can
    /// come.
    pub(crate) fn all_gpus_lost(&self, handle: u64, state: &State) -> bool {
        self.sets.get(&handle).is_some_and(|set| {
            let gone = |slot: &usize| {
                state.gpus.get(*slot).is_none_or(|gpu| gpu.missing || (gpu.lost && !gpu.loss.silent))
            };
            !set.registered.is_empty() && set.registered.keys().all(gone)
        })
    }
}

/// The GPM samples of this process, by handle; none until taken.
#[derive(Default)]
pub(crate) struct GpmSamples {
    pub(crate) last: u64,
    pub(crate) samples: BTreeMap<u64, Option<GpmSample>>,
}

/// A sample of a GPU's busy time.
#[derive(Clone, Copy)]
pub(crate) struct GpmSample {
    /// Monotonic time, and busy time until then, in ns.
    pub(crate) at: u64,
    pub(crate) busy_ns: u64,
    /// Time of the changes between processes, which is part of the busy time, in ns.
    pub(crate) switch_ns: u64,
    /// Fixed utilisation in percent for processes that were added by hand.
    pub(crate) manual_percent: f64,
}

impl GpmSample {
    /// Utilisation of graphics since `first`, in percent.
    pub(crate) fn busy_since(self, first: Self) -> f64 {
        self.percent_since(first, |sample| sample.busy_ns)
    }

    /// Utilisation of multiprocessors since `first`, in percent. No multiprocessor works while the
    /// GPU changes between processes.
    pub(crate) fn active_since(self, first: Self) -> f64 {
        self.percent_since(first, |sample| sample.busy_ns.saturating_sub(sample.switch_ns))
    }

    fn percent_since(self, first: Self, total: impl Fn(Self) -> u64) -> f64 {
        let time = self.at.saturating_sub(first.at);
        let gained = total(self).saturating_sub(total(first));
        let share = if time == 0 { 0.0 } else { gained as f64 / time as f64 * 100.0 };
        share.min(100.0).max(first.manual_percent.midpoint(self.manual_percent))
    }
}
