//! A free, from before the driver's call until after it.
//!
//! What is freed was made long ago as a rule, and its entry has left the caches. The driver has as much to fetch
//! for its own part, so the entry is asked for before the call and used after it, when it is there: it stays in
//! the table meanwhile. But the driver may give the same address to another thread before the first is back, and that
//! one's entry must not be taken for the old one. So a key whose memory is being freed is written down beside the
//! lock of its shard; who makes an entry of that key has then overtaken the free, and gives back the old
//! entry's bytes as it displaces it ([`crate::table::Table::insert`]).
//!
//! Where there is no room to write that down, the entry is taken out before the call ([`Ledger::take`]).

use crate::ledger::{Ledger, Local, Taken};
use crate::system::System;
use crate::table::{Busy, Class, Leave};

/// What is allocated while the driver frees it. Dropped, it stays: the driver did not free it.
#[derive(Debug)]
#[must_use = "dropping it keeps the entry"]
pub struct Freeing<'a, S: System> {
    ledger: &'a Ledger<S>,
    local: &'a Local,
    leave: Option<Leave<'a>>,
    taken: Option<Taken<'a, S>>,
}

impl<S: System> Ledger<S> {
    /// Before the driver is asked to free what has this key, whether that is charged or not. `None`: whatever it
    /// answers, nothing is to be given back.
    #[inline]
    pub fn freeing(&self, class: Class, key: u64) -> Option<Freeing<'_, S>> {
        let local = self.local()?;
        let (leave, taken) = match local.table.leave(class, key) {
            Ok(leave) => (Some(leave), None),
            Err(Busy::Full) => (None, self.take(class, key)),
            Err(Busy::Same) => return None,
        };
        Some(Freeing { ledger: self, local, leave, taken })
    }
}

impl<S: System> Freeing<'_, S> {
    /// The driver freed it: its bytes are given back.
    #[inline]
    pub fn freed(mut self) {
        if let Some(leave) = self.leave.take()
            && let Some(entry) = self.local.table.left(&self.ledger.system, leave)
        {
            self.ledger.uncharge(self.local, &entry);
        }
        if let Some(taken) = self.taken.take() {
            taken.freed();
        }
    }
}
