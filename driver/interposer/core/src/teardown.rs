//! Destroying a context, which frees everything that was allocated in it.
//!
//! The driver may reuse the context's handle for another thread before the destroy call returns. So
//! the context is quarantined before the call: its entry leaves the table, its number is detached
//! from the handle, and its events are not queried. A new context with the same handle gets its own
//! entry and number.

use crate::free::TakenEntry;
use crate::process_state::{LocalState, ProcessState};
use crate::quanta::Pipeline;
use crate::system::System;
use crate::table::Class;
use crate::throttle::Throttle;
use divvy_pages::sync::Ordering::*;

/// Flag in the handle of a quarantined context; no address of a program has this bit.
const QUARANTINED: u64 = 1 << 63;

/// A context during a call that may destroy it. Dropping it restores the context.
#[derive(Debug)]
#[must_use = "dropping it keeps the context"]
pub struct PendingTeardown<'a, S: System> {
    process: &'a ProcessState<S>,
    local: &'a LocalState,
    /// 0 if there is nothing to restore.
    context: u64,
    taken: Option<TakenEntry<'a, S>>,
}

impl<S: System> ProcessState<S> {
    /// Quarantines a context before a call that may destroy it.
    pub fn begin_teardown(&self, context: u64) -> Option<PendingTeardown<'_, S>> {
        let local = self.local().filter(|_| context != 0)?;
        let taken = self.take(Class::Context, context);
        local.rename_context(context, context | QUARANTINED);
        let nap = || self.system.sleep(50_000);
        local.throttles().for_each(|throttle| throttle.pause_context(context, nap));
        local.pipelines().for_each(|pipeline| pipeline.pause_context(context, nap));
        Some(PendingTeardown { process: self, local, context, taken })
    }
}

impl LocalState {
    /// The throttles of the process's devices.
    fn throttles(&self) -> impl Iterator<Item = &Throttle> {
        self.throttles.iter().zip(self.devices()).map(|(throttle, _)| throttle)
    }

    /// The pipelines of the process's devices.
    fn pipelines(&self) -> impl Iterator<Item = &Pipeline> {
        self.pipelines.iter().zip(self.devices()).map(|(pipeline, _)| pipeline)
    }

    fn rename_context(&self, from: u64, to: u64) {
        for entry in &self.contexts {
            let _ = entry.compare_exchange(from, to, AcqRel, Relaxed);
        }
    }
}

impl<S: System> PendingTeardown<'_, S> {
    /// Uses events again; those of the context are lost if it is gone.
    fn resume(&self, is_gone: bool) {
        let nap = || self.process.system.sleep(50_000);
        self.local.throttles().for_each(|throttle| throttle.resume_context(is_gone));
        self.local.pipelines().for_each(|pipeline| pipeline.resume_context(is_gone, nap));
    }

    /// Refunds the context and everything allocated in it, after the driver has destroyed it.
    pub fn commit(mut self) {
        self.resume(true);
        if let Some(taken) = self.taken.take() {
            taken.commit();
        }
        for (entry, number) in self.local.contexts.iter().zip(1..) {
            if entry.load(Acquire) != self.context | QUARANTINED {
                continue;
            }
            self.local.table.sweep(&self.process.system, |entry| {
                let in_context = matches!(
                    entry.class(),
                    Some(Class::Pointer | Class::Substitute | Class::Array | Class::Mipmap | Class::Module)
                );
                let gone = in_context && entry.extra() == number;
                if gone {
                    self.process.uncharge(self.local, entry);
                }
                gone
            });
            entry.store(0, Release);
        }
        self.context = 0;
    }
}

impl<S: System> Drop for PendingTeardown<'_, S> {
    fn drop(&mut self) {
        if self.context != 0 {
            self.local.rename_context(self.context | QUARANTINED, self.context);
            self.resume(false);
        }
    }
}
