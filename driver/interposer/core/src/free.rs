//! Freeing an allocation: from before the driver's call until after it.
//!
//! The entry stays in the table during the driver's call, and its cache line is prefetched
//! meanwhile: the entry of an old allocation has usually left the caches. The driver may give the
//! same address to another thread before this call returns. So the key is marked as pending beside
//! the lock of its shard. An insert of the same key overtakes the free and refunds the old entry
//! ([`crate::table::Table::insert`]). If no mark is available, the entry is removed before the
//! call.

use crate::process_state::{LocalState, ProcessState};
use crate::system::System;
use crate::table::{Class, Entry, MarkError, PendingKey};

/// An allocation while the driver frees it. Dropping it keeps the entry: the driver did not free
/// it.
#[derive(Debug)]
#[must_use = "dropping it keeps the entry"]
pub struct PendingFree<'a, S: System> {
    process: &'a ProcessState<S>,
    local: &'a LocalState,
    pending: Option<PendingKey<'a>>,
    taken: Option<TakenEntry<'a, S>>,
}

impl<S: System> ProcessState<S> {
    /// Starts a free before the driver's call, whether the key is charged or not. `None` if another
    /// thread is freeing the same key: then this thread must not refund anything.
    #[inline]
    pub fn begin_free(&self, class: Class, key: u64) -> Option<PendingFree<'_, S>> {
        let local = self.local()?;
        let (pending, taken) = match local.table.mark_pending(class, key) {
            Ok(pending) => (Some(pending), None),
            Err(MarkError::InUse) => (None, self.take(class, key)),
            Err(MarkError::SameKey) => return None,
        };
        Some(PendingFree { process: self, local, pending, taken })
    }

    /// Removes an entry from the table before the driver's call, because the driver may give the
    /// same address to another thread at once. `None` if nothing is charged for it.
    pub fn take(&self, class: Class, key: u64) -> Option<TakenEntry<'_, S>> {
        let local = self.local()?;
        let entry = local.table.remove(&self.system, class, key)?;
        Some(TakenEntry { process: self, local, entry: Some(entry) })
    }
}

impl<S: System> PendingFree<'_, S> {
    /// Refunds the bytes after the driver has freed the allocation.
    #[inline]
    pub fn commit(mut self) {
        if let Some(pending) = self.pending.take()
            && let Some(entry) = self.local.table.remove_pending(&self.process.system, pending)
        {
            self.process.uncharge(self.local, &entry);
        }
        if let Some(taken) = self.taken.take() {
            taken.commit();
        }
    }
}

/// An entry that was removed from the table during the driver's call. Dropping it puts the entry
/// back: the driver did not free the allocation.
#[derive(Debug)]
pub struct TakenEntry<'a, S: System> {
    process: &'a ProcessState<S>,
    local: &'a LocalState,
    entry: Option<Entry>,
}

impl<S: System> TakenEntry<'_, S> {
    /// Refunds the bytes after the driver has freed the allocation.
    pub fn commit(self) {
        self.commit_except(0);
    }

    /// Refunds all but `bytes`, after a call that left these allocated. They stay charged, because
    /// no call reports when the driver frees them.
    pub fn commit_except(mut self, bytes: u64) {
        if let Some(entry) = self.entry.take() {
            let freed = entry.bytes().saturating_sub(bytes);
            self.process.uncharge(self.local, &entry.with_bytes(freed));
        }
    }

    /// Discards an entry that carried no charge.
    pub fn discard(mut self) {
        self.entry = None;
    }
}

impl<S: System> Drop for TakenEntry<'_, S> {
    fn drop(&mut self) {
        if let Some(entry) = self.entry.take() {
            // The table had room a moment ago. If it is full now, the bytes stay charged until the
            // process exits.
            let _ = self.local.table.insert(&self.process.system, entry);
        }
    }
}
