//! Managed memory: how much of it is on a part, and what it takes to bring the rest there.
//!
//! Pages of 2 MiB. A kernel touches all managed memory that its process has for the part; what is not there is a miss
//! each, and makes the kernel longer by the time of a fault and of the page's way over the bus. What has to make room
//! is what was touched longest ago, whosever it is; memory that was allocated, which cannot move, comes first.
//!
//! All pages of a process are touched at once, so between them there is no order: a row has a number of pages, those of
//! them that are there, and when they were last touched, and that is the whole list of the least recently used. (It
//! is kind to those who thrash. A kernel that reads more than fits from the first page to the last has each fetched
//! page put out again before it comes back to it; here what is there counts before the rest is fetched.) A
//! miss is paid for by the launch as it is submitted.
//!
//! Everything here is under the part's lock. The part's sum is made anew with each change, so a process that is killed
//! at it leaves none that is wrong for long.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::{Relaxed, Release};

use super::GRANULE;
use super::engine::now;
use super::guest::Guest;
use super::map::{Ledger, Row, Word};

/// What moves.
pub const PAGE: u64 = 2 << 20;
/// Bytes a second over the bus: 16 lanes of the fourth generation, as far as faults use them.
const BUS: u64 = 12_000_000_000;
/// A fault besides its page's way, in ns: what the GPU driver takes for one.
const FAULT: u64 = 20_000;

/// The way of so many pages over the bus, in ns.
const fn way(pages: u64) -> u64 {
    (pages as u128 * PAGE as u128 * 1_000_000_000 / BUS as u128) as u64
}

/// Pages that hold so many bytes.
const fn pages(bytes: u64) -> u64 {
    bytes.div_ceil(PAGE)
}

impl Guest {
    /// The process has so many bytes of managed memory more that its kernels here touch.
    pub fn manage(&self, bytes: u64) {
        self.with_managed(|row| row.manages.store(row.manages.load(Relaxed) + pages(bytes), Relaxed));
    }

    /// So many bytes less: freed, or touched elsewhere from now on.
    pub fn unmanage(&self, bytes: u64) {
        self.with_managed(|row| {
            let manages = row.manages.load(Relaxed).saturating_sub(pages(bytes));
            row.manages.store(manages, Relaxed);
            row.managed.store(row.managed.load(Relaxed).min(manages), Relaxed);
        });
    }

    /// Brings so many bytes here, as far as the part can hold them: how long that takes on the bus, in ns.
    pub fn bring(&self, bytes: u64) -> u64 {
        let moved = self.with_managed(|row| {
            let away = row.manages.load(Relaxed).saturating_sub(row.managed.load(Relaxed));
            self.ledger().fetch(self.part_index(), self.row(), away.min(pages(bytes)), now())
        });
        way(moved.unwrap_or(0))
    }

    /// Takes so many bytes from here: how long that takes on the bus, in ns.
    pub fn put_out(&self, bytes: u64) -> u64 {
        let moved = self.with_managed(|row| {
            let here = row.managed.load(Relaxed);
            let moved = here.min(pages(bytes));
            row.managed.store(here - moved, Relaxed);
            moved
        });
        way(moved.unwrap_or(0))
    }

    /// Under the part's lock, as long as the guest has not left.
    fn with_managed<T>(&self, change: impl FnOnce(&Row) -> T) -> Option<T> {
        // Asked, not kept: who charges takes it under the part's lock.
        self.number.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?;
        let _held = self.ledger().hold(self.locks(), self.part_index(), self.row());
        if !self.ledger().owns(self.row()) {
            return None;
        }
        let changed = change(self.own());
        self.ledger().count_managed(self.part_index());
        Some(changed)
    }

    /// After memory was allocated that cannot move: what has to make room for it does.
    #[inline]
    pub(super) fn make_room(&self) {
        if self.part().managed.load(Relaxed) == 0 {
            return;
        }
        let _held = self.ledger().hold(self.locks(), self.part_index(), self.row());
        self.ledger().evict(self.part_index(), None);
    }
}

impl Ledger {
    /// A kernel of the row touches what its process manages: by how much longer it runs for that, in ns. The part's
    /// lock is held.
    pub(super) fn touch(&self, part: usize, at: usize, time: u64) -> u64 {
        let row = &self.get().rows[at];
        let misses = row.manages.load(Relaxed).saturating_sub(row.managed.load(Relaxed));
        if misses == 0 {
            row.touched.store(time, Relaxed);
            return 0;
        }
        self.fetch(part, at, misses, time);
        way(misses) + misses * FAULT
    }

    /// Brings pages of the row to the part: how many of them stay.
    fn fetch(&self, part: usize, at: usize, count: u64, time: u64) -> u64 {
        let row = &self.get().rows[at];
        let before = row.managed.load(Relaxed);
        row.touched.store(time, Relaxed);
        row.managed.store(before + count, Relaxed);
        self.evict(part, Some(at));
        row.managed.load(Relaxed).saturating_sub(before)
    }

    /// Makes room on a part that has more than it can hold: first of the rows that were touched longest ago, of the one
    /// that is being touched last of all.
    fn evict(&self, part: usize, touching: Option<usize>) {
        let (map, here) = (self.get(), &self.get().parts[part]);
        let used = u64::from(Word::unpack(here.word.load(Relaxed)).used);
        let room = here.limit.load(Relaxed).saturating_sub(used) * GRANULE / PAGE;
        let mut rows: Vec<(usize, u64)> = self.managing(part).collect();
        let mut excess = rows.iter().map(|(_, count)| count).sum::<u64>().saturating_sub(room);
        rows.sort_by_key(|(at, _)| (Some(*at) == touching, map.rows[*at].touched.load(Relaxed)));
        for (at, count) in rows {
            let out = excess.min(count);
            map.rows[at].managed.store(count - out, Relaxed);
            excess -= out;
        }
        self.count_managed(part);
    }

    /// Rows with pages on a part, and how many.
    fn managing(&self, part: usize) -> impl Iterator<Item = (usize, u64)> {
        (0..self.high()).filter_map(move |at| {
            let (owner, row) = (self.get().owners[at].load(Relaxed), &self.get().rows[at]);
            let count = row.managed.load(Relaxed);
            let is_here = owner != 0 && row.part.load(Relaxed) as usize == part && count > 0;
            is_here.then_some((at, count))
        })
    }

    fn count_managed(&self, part: usize) {
        let sum = self.managing(part).map(|(_, count)| count).sum();
        self.get().parts[part].managed.store(sum, Relaxed);
    }

    /// A row manages nothing any more. The part's lock is held.
    pub(super) fn forget_managed(&self, part: usize, at: usize) {
        let row = &self.get().rows[at];
        if row.manages.swap(0, Relaxed) != 0 || row.managed.load(Relaxed) != 0 {
            row.managed.store(0, Release);
            self.count_managed(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_takes_as_long_as_its_bytes_on_the_bus() {
        assert_eq!(way(1), 174_762);
        assert_eq!(way(6000), 1_048_576_000);
        assert_eq!([pages(0), pages(1), pages(PAGE), pages(PAGE + 1)], [0, 1, 1, 2]);
    }
}
