//! What is kept in mind of handles of which the driver tells too little: whose memory a pool has, and what the memory nodes
//! of an executable graph need.
//!
//! Neither is a charge. But without knowing it nothing can be charged before the driver is asked, so there
//! is no limit to their number but that of the table, and where that has no room the handle is not to be given to the
//! program.

use crate::ledger::{Ledger, Taken};
use crate::system::System;
use crate::table::{Class, Entry, NoRoom};
use divvy_pages::{Fault, Full};

/// With a graph: it needs so much less. Neither this nor [`key`]'s are bits of an address of a program.
pub const LESS: u64 = 1 << 63;

/// A graph on the device with that ordinal.
fn key(graph: u64, device: i32) -> u64 {
    graph & !LESS | (device as u64) << 56
}

impl<S: System> Ledger<S> {
    /// A pool was made of memory of the device with that ordinal; `None`: of the host's.
    pub fn pool_is_of(&self, pool: u64, device: Option<i32>) -> Result<(), Full> {
        let owner = device.map_or(0, |device| device as u64 + 1);
        self.know(Entry::new(Class::Owner, pool, 0, 0, owner), |_| None)
    }

    /// What [`Ledger::pool_is_of`] said of it.
    pub fn owner_of(&self, pool: u64) -> Option<Option<i32>> {
        let entry = self.local()?.table.get(&self.system, Class::Owner, pool)?;
        Some(entry.extra().checked_sub(1).map(|device| device as i32))
    }

    /// An executable graph needs so much more of the device with that ordinal, or, with [`LESS`], so much less.
    pub fn graph_needs(&self, graph: u64, device: i32, bytes: u64) -> Result<(), Full> {
        let less = graph & LESS != 0;
        let first = if less { 0 } else { bytes };
        self.know(Entry::new(Class::Need, key(graph, device), 0, first, 0), |known| {
            let sum = if less { known.saturating_sub(bytes) } else { known.saturating_add(bytes) };
            Some(sum)
        })
    }

    /// What an executable graph needs of the device with that ordinal, if it has memory nodes there.
    pub fn need_of(&self, graph: u64, device: i32) -> Option<u64> {
        let entry = self.local()?.table.get(&self.system, Class::Need, key(graph, device))?;
        Some(entry.bytes())
    }

    /// Before a call that may end a pool.
    pub fn pool_ends(&self, pool: u64) -> Option<Taken<'_, S>> {
        self.take(Class::Owner, pool)
    }

    /// Before a call that may end an executable graph: what it needs of the device with that ordinal.
    pub fn graph_ends(&self, graph: u64, device: i32) -> Option<Taken<'_, S>> {
        self.take(Class::Need, key(graph, device))
    }

    /// Of what is known already, `sum` makes what is to be known; or else the last one counts.
    fn know(&self, entry: Entry, sum: impl Fn(u64) -> Option<u64>) -> Result<(), Full> {
        let (local, class) = (self.local().ok_or(Full)?, entry.class().ok_or(Full)?);
        let add = |known: &mut Entry| {
            let sum = sum(known.bytes());
            if let Some(sum) = sum {
                *known = known.with_bytes(sum);
            }
            sum.is_some()
        };
        local.table.merge(&self.system, class, entry, &add).map(drop).map_err(|NoRoom| {
            self.fault(Fault::NoTable);
            Full
        })
    }
}
