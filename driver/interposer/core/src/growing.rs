//! Memory that the driver reserves as it sees fit: stream-ordered pools and graph memory.
//!
//! The single allocation says little there. A pool grows in chunks, keeps what was freed, and
//! gives it back at a synchronisation that nobody announces. So what is charged is what the
//! driver says it has *reserved*, per pool and per device's graphs, as of the last call.
//!
//! [`Device::grow`] is open from before the driver's call until after it, and one at a time
//! per pool: else two threads would each see the other's growth as their own, and the sum of
//! what is charged would be wrong for a moment, too low or too high. The driver has a lock
//! there itself, so nobody waits longer for it. A graph may need memory of several devices: each has
//! a lock of its own, and they are opened in the order of the devices' ordinals.

use crate::device::Device;
use crate::ledger::DEVICES;
use crate::system::System;
use crate::table::{Class, Entry, Then};
use divvy_pages::sync::AtomicU32;
use divvy_pages::sync::Ordering::*;
use divvy_pages::{Fault, Flags, Full};

/// What grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grown {
    /// A pool, by its handle: `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
    Pool(u64),
    /// The graph memory of the device: `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
    Graph,
}

/// A pool (or the device's graph memory) while a call on it is made. Dropped without
/// [`Growing::settle`], what was asked for is given back.
#[derive(Debug)]
pub struct Growing<'a, S: System> {
    device: Device<'a, S>,
    what: Grown,
    lock: Option<&'a AtomicU32>,
    /// What is charged for it by the table.
    charged: u64,
    /// What is charged beyond, for the call being made.
    asked: u64,
}

/// How long a thread waits for another's call on the same pool, in nanoseconds.
const PATIENCE: u64 = 1_000_000_000;

/// How many locks pools have together.
const POOLS: usize = 16;
/// Behind those, one for the graphs of each device.
pub(crate) const LOCKS: usize = POOLS + DEVICES;

impl<'a, S: System> Device<'a, S> {
    /// Opens what is about to grow or shrink.
    pub fn grow(&self, what: Grown) -> Growing<'a, S> {
        let lock = match what {
            Grown::Pool(handle) => (handle >> 6) as usize % POOLS,
            Grown::Graph => POOLS + self.index as usize,
        };
        let system = &self.ledger.system;
        // Asked for only by who has to wait: the clock is a system call.
        let mut start = None;
        let lock = self.local.locks.get(lock);
        let mut held = None;
        // After the deadline it goes on without: two that grow at once are charged too much for a moment.
        while let Some(word) = lock {
            if word.compare_exchange(0, 1, Acquire, Relaxed).is_ok() {
                held = Some(word);
                break;
            }
            system.nap(0);
            let now = system.now();
            if now.saturating_sub(*start.get_or_insert(now)) > PATIENCE {
                break;
            }
        }
        let (class, key) = self.place(what);
        let entry = self.local.table.get(system, class, key);
        let charged = entry.map_or(0, |entry| entry.bytes());
        Growing { device: *self, what, lock: held, charged, asked: 0 }
    }

    /// Whether the node wishes what pools keep for nothing given back, and nobody of this process has begun to.
    #[inline]
    pub fn take_wish(&self) -> bool {
        self.has(Flags::UVM) && self.places.places().filter(|place| place.take_wish()).count() > 0
    }

    /// Tells the node how many bytes pools keep for nothing.
    pub fn note_idle(&self, bytes: u64) {
        self.tell(|slot| slot.note_idle(bytes));
    }

    fn place(&self, what: Grown) -> (Class, u64) {
        match what {
            Grown::Pool(handle) => (Class::Pool, handle),
            Grown::Graph => (Class::Graph, u64::from(self.index)),
        }
    }

    /// Calls with every pool of this device that is charged, for a caller who wants to trim or settle
    /// them before it refuses. The table is gone through once for each, so that no list of them need be of any length.
    pub fn pools(&self, mut each: impl FnMut(u64)) {
        let mut last = 0;
        loop {
            let mut next = u64::MAX;
            self.local.table.sweep(&self.ledger.system, |entry| {
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

impl<S: System> Growing<'_, S> {
    /// Bytes that are charged for it.
    pub fn charged(&self) -> u64 {
        self.charged
    }

    /// Before an allocation of `bytes`: charges the growth that it will need, going by what the driver says
    /// is reserved and used now. What the driver gave back since the last call is given back first.
    pub fn ask(&mut self, bytes: u64, reserved: u64, used: u64) -> Result<(), Full> {
        self.lower(reserved);
        let need = bytes.saturating_sub(reserved.saturating_sub(used));
        self.device.charge(need)?;
        self.asked += need;
        Ok(())
    }

    /// After the call: the driver has `reserved` bytes, and so many are charged. `Err`: that does not fit. The
    /// caller undoes the call, trims, settles again and answers out of memory; until then what fits is charged.
    pub fn settle(mut self, reserved: u64) -> Result<(), Full> {
        let more = reserved.saturating_sub(self.charged + self.asked);
        self.device.charge(more)?;
        self.asked += more;
        self.balance(reserved);
        Ok(())
    }

    /// After a call that cannot be undone: charged whatever the limit says.
    pub fn settle_anyway(mut self, reserved: u64) {
        self.balance(reserved);
    }

    fn lower(&mut self, reserved: u64) {
        if reserved < self.charged {
            self.balance(reserved);
        }
    }

    /// Makes what is charged (by the table, and what was asked for beyond) what the driver has. By
    /// the table as it is now: that is right even if somebody went on without the lock.
    fn balance(&mut self, reserved: u64) {
        let charged = self.record(reserved) + self.asked;
        self.asked = 0;
        self.device.uncharge(charged.saturating_sub(reserved));
        self.device.force(reserved.saturating_sub(charged));
    }

    /// What the table said before.
    fn record(&mut self, bytes: u64) -> u64 {
        let Device { ledger, local, index, .. } = self.device;
        let (class, key) = self.device.place(self.what);
        self.charged = bytes;
        let mut before = 0;
        let known = local.table.change(&ledger.system, class, key, |entry| {
            before = entry.bytes();
            *entry = entry.with_bytes(bytes);
            Then::Keep
        });
        if known.is_none() && bytes > 0 {
            match local.table.insert(&ledger.system, Entry::new(class, key, index, bytes, 0)) {
                Ok(old) => before = old.map_or(0, |old| old.bytes()),
                // Charged until the process ends, never too little.
                Err(_) => ledger.fault(Fault::NoTable),
            }
        }
        before
    }
}

impl<S: System> Drop for Growing<'_, S> {
    fn drop(&mut self) {
        self.device.uncharge(self.asked);
        if let Some(lock) = self.lock {
            lock.store(0, Release);
        }
    }
}
