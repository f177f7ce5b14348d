//! The end of a context, which is the end of everything that was allocated in it.
//!
//! As soon as a context is destroyed, the driver may give its handle to one that another thread
//! makes, and that thread may be back sooner. So the context is set aside before the call that may
//! end it: its entry leaves the table, its number is no handle's, and its events are not looked at.
//! What comes under the same handle meanwhile has an entry and a number of its own.

use crate::ledger::{Ledger, Local, Taken};
use crate::pace::Pace;
use crate::system::System;
use crate::table::Class;
use divvy_pages::sync::Ordering::*;

/// Marks the handle of a context that is set aside; no address of a program has this bit.
const ASIDE: u64 = 1 << 63;

/// A context while a call that may end it is made. Dropped, it lives on.
#[derive(Debug)]
#[must_use = "dropping it keeps the context"]
pub struct Leaving<'a, S: System> {
    ledger: &'a Ledger<S>,
    local: &'a Local,
    /// 0 where there is nothing to bring back.
    context: u64,
    taken: Option<Taken<'a, S>>,
}

impl<S: System> Ledger<S> {
    /// Before a call that may end a context.
    pub fn context_leaves(&self, context: u64) -> Option<Leaving<'_, S>> {
        let local = self.local().filter(|_| context != 0)?;
        let taken = self.take(Class::Context, context);
        local.rename(context, context | ASIDE);
        local.paces().for_each(|pace| pace.leaves(context, || self.system.nap(50_000)));
        Some(Leaving { ledger: self, local, context, taken })
    }
}

impl Local {
    /// Of the devices that there are.
    fn paces(&self) -> impl Iterator<Item = &Pace> {
        self.paces.iter().zip(self.devices()).map(|(pace, _)| pace)
    }

    fn rename(&self, from: u64, to: u64) {
        for place in &self.contexts {
            let _ = place.compare_exchange(from, to, AcqRel, Relaxed);
        }
    }
}

impl<S: System> Leaving<'_, S> {
    /// The context is gone, and with it everything that was allocated in it.
    pub fn gone(mut self) {
        self.local.paces().for_each(|pace| pace.left(true));
        if let Some(taken) = self.taken.take() {
            taken.freed();
        }
        for (place, number) in self.local.contexts.iter().zip(1..) {
            if place.load(Acquire) != self.context | ASIDE {
                continue;
            }
            self.local.table.sweep(&self.ledger.system, |entry| {
                let in_context = matches!(
                    entry.class(),
                    Some(Class::Pointer | Class::StandIn | Class::Array | Class::Mipmap | Class::Module)
                );
                let gone = in_context && entry.extra() == number;
                if gone {
                    self.ledger.uncharge(self.local, entry);
                }
                gone
            });
            place.store(0, Release);
        }
        self.context = 0;
    }
}

impl<S: System> Drop for Leaving<'_, S> {
    fn drop(&mut self) {
        if self.context != 0 {
            self.local.rename(self.context | ASIDE, self.context);
            self.local.paces().for_each(|pace| pace.left(false));
        }
    }
}
