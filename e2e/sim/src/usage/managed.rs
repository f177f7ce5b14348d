//! Managed memory: how much of it is resident on a partition, and what migration costs.
//!
//! A kernel touches all managed memory of its process. Each page of 2 MiB that is not resident
//! costs a page fault and a transfer, which lengthen the kernel when it is submitted. The least
//! recently used pages are evicted first; memory from cuMemAlloc cannot be evicted and takes
//! precedence. Everything here runs under the partition's lock. The partition's sum is recomputed
//! with each change, so a process that is killed meanwhile leaves a wrong sum only until the next
//! change.

use std::sync::PoisonError;
use std::sync::atomic::Ordering::{Relaxed, Release};

use super::gpu_process::GpuProcess;
use super::gpu_usage::GpuUsage;
use super::layout::{GRANULE_BYTES, MANAGED_PAGE_BYTES, Row, Word};
use super::time::now;

/// Bandwidth of migration: PCIe 4.0 x16, as far as page faults use it.
const BUS_BYTES_PER_SECOND: u64 = 12_000_000_000;
/// Cost of a page fault in ns, without the transfer: the time that the GPU driver takes to handle
/// one.
const PAGE_FAULT_NS: u64 = 20_000;

/// Time to transfer `pages` over the bus, in ns.
const fn transfer_ns(pages: u64) -> u64 {
    (pages as u128 * MANAGED_PAGE_BYTES as u128 * 1_000_000_000 / BUS_BYTES_PER_SECOND as u128) as u64
}

/// Number of pages that hold `bytes`.
const fn pages(bytes: u64) -> u64 {
    bytes.div_ceil(MANAGED_PAGE_BYTES)
}

impl GpuProcess {
    /// Adds `bytes` of managed memory that this process's kernels touch here.
    pub fn add_managed(&self, bytes: u64) {
        self.with_managed(|row| {
            row.managed_total.store(row.managed_total.load(Relaxed) + pages(bytes), Relaxed)
        });
    }

    /// Removes `bytes` of managed memory: freed, or touched on another GPU from now on.
    pub fn remove_managed(&self, bytes: u64) {
        self.with_managed(|row| {
            let managed_total = row.managed_total.load(Relaxed).saturating_sub(pages(bytes));
            row.managed_total.store(managed_total, Relaxed);
            row.managed_resident.store(row.managed_resident.load(Relaxed).min(managed_total), Relaxed);
        });
    }

    /// Migrates `bytes` to the partition, as far as they fit. Returns the transfer time in ns.
    pub fn prefetch(&self, bytes: u64) -> u64 {
        let moved = self.with_managed(|row| {
            let away = row.managed_total.load(Relaxed).saturating_sub(row.managed_resident.load(Relaxed));
            self.usage().make_resident(self.partition_index(), self.row(), away.min(pages(bytes)), now())
        });
        transfer_ns(moved.unwrap_or(0))
    }

    /// Migrates `bytes` from the partition to the host. Returns the transfer time in ns.
    pub fn offload(&self, bytes: u64) -> u64 {
        let moved = self.with_managed(|row| {
            let here = row.managed_resident.load(Relaxed);
            let moved = here.min(pages(bytes));
            row.managed_resident.store(here - moved, Relaxed);
            moved
        });
        transfer_ns(moved.unwrap_or(0))
    }

    /// Runs `change` under the partition's lock, unless the process has detached.
    fn with_managed<T>(&self, change: impl FnOnce(&Row) -> T) -> Option<T> {
        // Checked but not kept locked: charging locks it while holding the partition's lock.
        self.number.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?;
        let _held = self.usage().lock_partition(self.locks(), self.partition_index(), self.row());
        if !self.usage().owns(self.row()) {
            return None;
        }
        let changed = change(self.own());
        self.usage().sum_managed(self.partition_index());
        Some(changed)
    }

    /// Evicts managed pages after memory was charged that cannot be evicted.
    #[inline]
    pub(super) fn evict_for_allocation(&self) {
        if self.partition().managed_resident.load(Relaxed) == 0 {
            return;
        }
        let _held = self.usage().lock_partition(self.locks(), self.partition_index(), self.row());
        self.usage().evict(self.partition_index(), None);
    }
}

impl GpuUsage {
    /// A kernel of the row touches all managed memory of its process. Returns the time by which
    /// that lengthens the kernel, in ns. The caller holds the partition's lock.
    pub(super) fn fault_in(&self, partition: usize, at: usize, time: u64) -> u64 {
        let row = &self.get().rows[at];
        let misses = row.managed_total.load(Relaxed).saturating_sub(row.managed_resident.load(Relaxed));
        if misses == 0 {
            row.last_touch.store(time, Relaxed);
            return 0;
        }
        self.make_resident(partition, at, misses, time);
        transfer_ns(misses) + misses * PAGE_FAULT_NS
    }

    /// Makes `count` more pages of the row resident. Returns how many of them stay.
    fn make_resident(&self, partition: usize, at: usize, count: u64, time: u64) -> u64 {
        let row = &self.get().rows[at];
        let before = row.managed_resident.load(Relaxed);
        row.last_touch.store(time, Relaxed);
        row.managed_resident.store(before + count, Relaxed);
        self.evict(partition, Some(at));
        row.managed_resident.load(Relaxed).saturating_sub(before)
    }

    /// Evicts pages if the partition has more than fit: least recently used rows first, the row
    /// that is being touched last.
    ///
    /// All pages of a process are touched at once, so a row only needs page counts and one time.
    /// This favours processes that thrash. On a real GPU, a kernel that reads more than fits evicts
    /// each fetched page before it reads it again, whereas here the resident pages count as hits.
    fn evict(&self, partition: usize, touching: Option<usize>) {
        let (map, here) = (self.get(), &self.get().partitions[partition]);
        let used = u64::from(Word::unpack(here.word.load(Relaxed)).used);
        let room = here.limit.load(Relaxed).saturating_sub(used) * GRANULE_BYTES / MANAGED_PAGE_BYTES;
        let mut rows: Vec<(usize, u64)> = self.rows_with_managed(partition).collect();
        let mut excess = rows.iter().map(|(_, count)| count).sum::<u64>().saturating_sub(room);
        rows.sort_by_key(|(at, _)| (Some(*at) == touching, map.rows[*at].last_touch.load(Relaxed)));
        for (at, count) in rows {
            let out = excess.min(count);
            map.rows[at].managed_resident.store(count - out, Relaxed);
            excess -= out;
        }
        self.sum_managed(partition);
    }

    /// Rows with resident pages on a partition, and their number of pages.
    fn rows_with_managed(&self, partition: usize) -> impl Iterator<Item = (usize, u64)> {
        (0..self.high_water()).filter_map(move |at| {
            let (owner, row) = (self.get().owners[at].load(Relaxed), &self.get().rows[at]);
            let count = row.managed_resident.load(Relaxed);
            let is_here = owner != 0 && row.partition.load(Relaxed) as usize == partition && count > 0;
            is_here.then_some((at, count))
        })
    }

    fn sum_managed(&self, partition: usize) {
        let sum = self.rows_with_managed(partition).map(|(_, count)| count).sum();
        self.get().partitions[partition].managed_resident.store(sum, Relaxed);
    }

    /// Drops all managed memory of a row. The caller holds the partition's lock.
    pub(super) fn forget_managed(&self, partition: usize, at: usize) {
        let row = &self.get().rows[at];
        if row.managed_total.swap(0, Relaxed) != 0 || row.managed_resident.load(Relaxed) != 0 {
            row.managed_resident.store(0, Release);
            self.sum_managed(partition);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_transfer_time_follows_the_bandwidth() {
        assert_eq!(transfer_ns(1), 174_762);
        assert_eq!(transfer_ns(6000), 1_048_576_000);
        assert_eq!(
            [pages(0), pages(1), pages(MANAGED_PAGE_BYTES), pages(MANAGED_PAGE_BYTES + 1)],
            [0, 1, 1, 2]
        );
    }
}
