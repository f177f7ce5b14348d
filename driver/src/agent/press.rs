//! Looks at shares that may hold more memory than their GPUs have, and does what [`super::pressure`] decides.
//!
//! Four times a second, and more often while it is to be seen what it brings that one works alone, from the pages alone: an audit is
//! too seldom, as who thrashes gets nothing done.

use super::pressure::{self, Memory, Said, Why};
use super::{Sources, gather};
use divvy_pages::GpuUuid;
use std::collections::BTreeMap;
use std::time::Duration;

/// Between two looks.
pub(super) const PAUSE: Duration = Duration::from_millis(250);
const SOON: Duration = Duration::from_millis(100);

/// The GPUs whose shares may hold more than there is, and what is remembered of them.
#[derive(Debug, Default)]
pub(super) struct Pressed {
    /// There is such a share, by the last audit.
    pub(super) is_any: bool,
    pub(super) gpus: BTreeMap<GpuUuid, Memory>,
}

impl Pressed {
    /// Until the next look.
    pub(super) fn pause(&self) -> Duration {
        let now = now();
        if self.gpus.values().any(|memory| memory.is_urgent(now)) { SOON } else { PAUSE }
    }
}

/// Shares of a GPU.
#[derive(Default)]
struct Held {
    /// Bytes of the GPU, and what of them shares hold that over-commit nothing.
    physical: u64,
    others: u64,
    all: Vec<Said>,
}

impl Sources {
    pub(super) fn press(&self, mut before: BTreeMap<GpuUuid, Memory>) -> BTreeMap<GpuUuid, Memory> {
        let mut by_gpu: BTreeMap<_, Held> = BTreeMap::new();
        for found in gather::found(&self.shares, &self.files, |policy| self.locks.has(policy.gpu)) {
            let held = by_gpu.entry(found.policy.gpu).or_default();
            held.physical = held.physical.max(found.policy.memory.physical);
            match found.presses() {
                Some(said) => held.all.push(said),
                None => held.others = held.others.saturating_add(found.used()),
            }
        }
        let now = now();
        let look = |(gpu, Held { physical, others, all }): (GpuUuid, Held)| {
            let memory = before.remove(&gpu).unwrap_or_default();
            let before = memory.turns();
            let (decided, memory) = pressure::decide(physical.saturating_sub(others), &all, memory, now);
            for (claim, share) in &decided.trims {
                if let Err(cause) = self.shares.trim(claim, share) {
                    tracing::debug!(%claim, %share, %cause, "share not asked for what its pools keep");
                }
            }
            let after = decided.why;
            if before != after {
                let quantum_ms = decided.quantum / 1_000_000;
                match (before, after) {
                    (_, Some(Why::Thrash)) => {
                        tracing::info!(%gpu, quantum_ms, "shares push each other's memory out: they take turns")
                    }
                    (Some(Why::Thrash), _) => tracing::info!(%gpu, "shares work side by side again"),
                    (_, Some(Why::Trial)) => {
                        tracing::debug!(%gpu, "shares hold more than there is: one works alone for a moment")
                    }
                    (_, None) => tracing::debug!(%gpu, "one has worked alone"),
                }
            }
            if before.is_some() || after.is_some() {
                self.bell.turns(gpu, decided.turns, decided.quantum);
            }
            (gpu, memory)
        };
        by_gpu.into_iter().filter(|(_, held)| !held.all.is_empty()).map(look).collect()
    }
}

/// The monotonic clock, in nanoseconds.
fn now() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let since = Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0));
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
