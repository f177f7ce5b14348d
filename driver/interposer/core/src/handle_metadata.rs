//! Metadata of pools and executable graphs that the driver does not report.
//!
//! It records which device's memory a pool has, and how much memory the nodes of an executable
//! graph need. Entries are not charges, but charging needs them before the driver's call. Their
//! number is limited only by the table. If the table is full, the program must not get the handle.

use crate::free::TakenEntry;
use crate::process_state::ProcessState;
use crate::system::System;
use crate::table::{Class, Entry, TableFull};
use divvy_pages::{Fault, Refused};

/// Flag in a graph handle: subtract the bytes instead of adding them. Neither this bit nor the bits
/// that `key` sets occur in an address of a program.
pub const SUBTRACT: u64 = 1 << 63;

/// The table key of a graph on a device.
fn key(graph: u64, device: i32) -> u64 {
    graph & !SUBTRACT | (device as u64) << 56
}

impl<S: System> ProcessState<S> {
    /// Records that a new pool has memory of the device with this ordinal, or `None` for host
    /// memory.
    pub fn set_pool_owner(&self, pool: u64, device: Option<i32>) -> Result<(), Refused> {
        let owner = device.map_or(0, |device| device as u64 + 1);
        self.merge_entry(Entry::new(Class::PoolOwner, pool, 0, 0, owner), |_| None)
    }

    /// Returns the owner that [`ProcessState::set_pool_owner`] recorded.
    pub fn pool_owner(&self, pool: u64) -> Option<Option<i32>> {
        let entry = self.local()?.table.get(&self.system, Class::PoolOwner, pool)?;
        Some(entry.extra().checked_sub(1).map(|device| device as i32))
    }

    /// Adds `bytes` to the memory that an executable graph needs on a device, or subtracts them if
    /// the handle has the flag [`SUBTRACT`].
    pub fn add_graph_need(&self, graph: u64, device: i32, bytes: u64) -> Result<(), Refused> {
        let subtract = graph & SUBTRACT != 0;
        let first = if subtract { 0 } else { bytes };
        self.merge_entry(Entry::new(Class::GraphNeed, key(graph, device), 0, first, 0), |known| {
            let sum = if subtract { known.saturating_sub(bytes) } else { known.saturating_add(bytes) };
            Some(sum)
        })
    }

    /// Returns the bytes that an executable graph needs on a device, if it has memory nodes there.
    pub fn graph_need(&self, graph: u64, device: i32) -> Option<u64> {
        let entry = self.local()?.table.get(&self.system, Class::GraphNeed, key(graph, device))?;
        Some(entry.bytes())
    }

    /// Removes a pool's owner before a call that may destroy the pool.
    pub fn take_pool_owner(&self, pool: u64) -> Option<TakenEntry<'_, S>> {
        self.take(Class::PoolOwner, pool)
    }

    /// Removes what an executable graph needs on a device, before a call that may destroy the
    /// graph.
    pub fn take_graph_need(&self, graph: u64, device: i32) -> Option<TakenEntry<'_, S>> {
        self.take(Class::GraphNeed, key(graph, device))
    }

    /// Merges an entry into the table. `sum` computes the new bytes from the old ones; if it
    /// returns `None`, the new entry replaces the old one.
    fn merge_entry(&self, entry: Entry, sum: impl Fn(u64) -> Option<u64>) -> Result<(), Refused> {
        let (local, class) = (self.local().ok_or(Refused)?, entry.class().ok_or(Refused)?);
        let add = |known: &mut Entry| {
            let sum = sum(known.bytes());
            if let Some(sum) = sum {
                *known = known.with_bytes(sum);
            }
            sum.is_some()
        };
        local.table.merge(&self.system, class, entry, &add).map(drop).map_err(|TableFull| {
            self.count_fault(Fault::TableFull);
            Refused
        })
    }
}
