//! Memory that the driver reserves on its own terms: stream-ordered pools and graph memory.
//!
//! A pool grows in chunks, keeps freed memory, and releases it at a later synchronisation. So the
//! charge is the size that the driver reports as *reserved*, per pool and per device's graph
//! memory, as of the last call. [`Device::open_pool`] covers the time from before the driver's call
//! until after it, one call at a time per pool; otherwise two threads would both charge the same
//! growth. A graph can use memory of several devices. Their locks are taken in the order of the
//! devices' ordinals.

use crate::process_state::{Device, POOL_LOCKS};
use crate::system::System;
use crate::table::{Class, Entry, EntryAction};
use divvy_pages::sync::AtomicU32;
use divvy_pages::sync::Ordering::*;
use divvy_pages::{Fault, Flags, Refused};

/// A pool, or the graph memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolKind {
    /// A pool, by its handle: `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
    Pool(u64),
    /// The graph memory of the device: `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
    Graph,
}

/// A pool (or the device's graph memory) during a driver call. Dropping it without
/// [`PoolCall::settle`] refunds the reserved growth.
#[derive(Debug)]
pub struct PoolCall<'a, S: System> {
    device: Device<'a, S>,
    kind: PoolKind,
    lock: Option<&'a AtomicU32>,
    /// Bytes charged according to the table.
    charged: u64,
    /// Bytes charged beyond that, for the call in progress.
    reserved_growth: u64,
}

/// How long a thread waits for another thread's call on the same pool.
const LOCK_TIMEOUT_NS: u64 = 1_000_000_000;

impl<'a, S: System> Device<'a, S> {
    /// Locks a pool, or the graph memory, before a call that changes its size.
    pub fn open_pool(&self, kind: PoolKind) -> PoolCall<'a, S> {
        let lock = match kind {
            PoolKind::Pool(handle) => (handle >> 6) as usize % POOL_LOCKS,
            PoolKind::Graph => POOL_LOCKS + self.index as usize,
        };
        let system = &self.process.system;
        // The clock is a system call: only a thread that has to wait reads it.
        let mut start = None;
        let lock = self.local.pool_locks.get(lock);
        let mut held = None;
        // After the timeout the call continues without the lock. Two calls that grow the pool at
        // once are then overcharged for a moment.
        while let Some(word) = lock {
            if word.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
                held = Some(word);
                break;
            }
            system.sleep(0);
            let now = system.now();
            if now.saturating_sub(*start.get_or_insert(now)) > LOCK_TIMEOUT_NS {
                break;
            }
        }
        let (class, key) = self.table_key(kind);
        let entry = self.local.table.get(system, class, key);
        let charged = entry.map_or(0, |entry| entry.bytes());
        PoolCall { device: *self, kind, lock: held, charged, reserved_growth: 0 }
    }

    /// Takes a pending trim request of the node. Returns false if there is none or another thread
    /// of the process has taken it.
    #[inline]
    pub fn take_trim_request(&self) -> bool {
        self.has(Flags::UVM) && self.pages.shares().filter(|share| share.take_trim_request()).count() > 0
    }

    /// Reports to the node how many bytes the pools hold unused.
    pub fn set_idle_pool_bytes(&self, bytes: u64) {
        self.update_slot(|slot| slot.set_idle_pool_bytes(bytes));
    }

    fn table_key(&self, kind: PoolKind) -> (Class, u64) {
        match kind {
            PoolKind::Pool(handle) => (Class::Pool, handle),
            PoolKind::Graph => (Class::Graph, u64::from(self.index)),
        }
    }

    /// Calls `each` with every charged pool of this device, so that the caller can trim it before
    /// it refuses an allocation. The table is swept once per pool, which needs no buffer.
    pub fn pools(&self, mut each: impl FnMut(u64)) {
        let mut last = 0;
        loop {
            let mut next = u64::MAX;
            self.local.table.sweep(&self.process.system, |entry| {
                if entry.class() == Some(Class::Pool)
                    && entry.device() == self.index
                    && entry.bytes() > 0
                    && entry.key > last
                {
                    next = next.min(entry.key);
                }
                false
            });
            if next == u64::MAX {
                return;
            }
            each(next);
            last = next;
        }
    }
}

impl<S: System> PoolCall<'_, S> {
    /// The bytes charged for the pool.
    pub fn charged(&self) -> u64 {
        self.charged
    }

    /// Charges the growth that an allocation of `bytes` needs, given the driver's current reserved
    /// and used sizes. Memory that the driver has released since the last call is refunded first.
    ///
    /// # Errors
    /// [`Refused`] if the growth exceeds the limit.
    pub fn reserve_growth(&mut self, bytes: u64, reserved: u64, used: u64) -> Result<(), Refused> {
        self.refund_released(reserved);
        let need = bytes.saturating_sub(reserved.saturating_sub(used));
        self.device.charge(need)?;
        self.reserved_growth += need;
        Ok(())
    }

    /// Charges the driver's `reserved` size after the call.
    ///
    /// # Errors
    /// [`Refused`] if it exceeds the limit. The caller then undoes the call, trims the pool, settles
    /// again and returns out of memory. Until then the part that fits is charged.
    pub fn settle(mut self, reserved: u64) -> Result<(), Refused> {
        let more = reserved.saturating_sub(self.charged + self.reserved_growth);
        self.device.charge(more)?;
        self.reserved_growth += more;
        self.settle_charge(reserved);
        Ok(())
    }

    /// Charges the driver's `reserved` size after a call that cannot be undone, regardless of the
    /// limit.
    pub fn force_settle(mut self, reserved: u64) {
        self.settle_charge(reserved);
    }

    fn refund_released(&mut self, reserved: u64) {
        if reserved < self.charged {
            self.settle_charge(reserved);
        }
    }

    /// Changes the charge (of the table, plus the reserved growth) to the driver's size. The table
    /// is read again, so the sum is right even if another thread continued without the lock.
    fn settle_charge(&mut self, reserved: u64) {
        let charged = self.record(reserved) + self.reserved_growth;
        self.reserved_growth = 0;
        self.device.uncharge(charged.saturating_sub(reserved));
        self.device.force(reserved.saturating_sub(charged));
    }

    /// Records the size in the table and returns the previous one.
    fn record(&mut self, bytes: u64) -> u64 {
        let Device { process, local, index, .. } = self.device;
        let (class, key) = self.device.table_key(self.kind);
        self.charged = bytes;
        let mut before = 0;
        let found = local.table.change(&process.system, class, key, |entry| {
            before = entry.bytes();
            *entry = entry.with_bytes(bytes);
            EntryAction::Keep
        });
        if found.is_none() && bytes > 0 {
            match local.table.insert(&process.system, Entry::new(class, key, index, bytes, 0)) {
                Ok(old) => before = old.map_or(0, |old| old.bytes()),
                // The bytes stay charged until the process exits, so the charge is never too low.
                Err(_) => process.count_fault(Fault::TableFull),
            }
        }
        before
    }
}

impl<S: System> Drop for PoolCall<'_, S> {
    fn drop(&mut self) {
        self.device.uncharge(self.reserved_growth);
        if let Some(lock) = self.lock {
            lock.store(0, Release);
        }
    }
}
