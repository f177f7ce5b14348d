//! A process on a partition: it attaches, charges and refunds memory, and detaches. Other processes
//! reclaim its row after it has died.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::gpu_usage::GpuUsage;
use super::layout::{
    GRANULE_BYTES, Intent, MANAGED_PAGE_BYTES, NUMBER_BITS, Partition, Place, ROWS, Row, Word, is_later,
    next_number,
};
use super::locks::{self, Locks};
use crate::state::CgroupLimit;

/// Held while rows are claimed or reclaimed. The rows' file locks belong to the process, so they
/// cannot exclude its other threads.
static ROWS_OF_THIS_PROCESS: Mutex<()> = Mutex::new(());

/// This process's registration on one partition. It ends with the process, or when dropped.
#[derive(Debug)]
pub struct GpuProcess {
    usage: Arc<GpuUsage>,
    locks: Locks,
    row: usize,
    partition: usize,
    /// Number of this row's last change, or none after detaching. Locked during a change.
    pub(super) number: Mutex<Option<u32>>,
    /// Cgroup limits, as this process last read them.
    pub(super) known: Mutex<LimitCache>,
}

/// The cgroup limits of a partition, as of one generation of the state.
#[derive(Debug, Default)]
pub(super) struct LimitCache {
    pub(super) generation: u64,
    pub(super) limits: Vec<CgroupLimit>,
}

/// The reason why a process cannot use a GPU.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    #[error("the GPU or instance does not exist or does not work")]
    Absent,
    #[error("{ROWS} processes already use the simulated GPUs")]
    Full,
    #[error("this process may not write the simulator's files")]
    Denied,
    #[error("cannot open the locks of the simulated GPUs")]
    Io(#[from] io::Error),
}

impl GpuProcess {
    /// Registers this process on a GPU or instance.
    pub fn attach(usage: &Arc<GpuUsage>, place: Place) -> Result<Self, AttachError> {
        let index = place.partition().ok_or(AttachError::Absent)?;
        let map = usage.get();
        let partition = map.partitions.get(index).ok_or(AttachError::Absent)?;
        if partition.flags.load(Ordering::Acquire) & GpuUsage::PRESENT == 0 {
            return Err(AttachError::Absent);
        }
        let locks = usage.locks()?;
        let row = usage.claim_row(locks, |own| Self::describe(own, index, partition, place))?;
        let number = Mutex::new(Some(map.rows[row].number.load(Ordering::Relaxed) as u32));
        Ok(Self { usage: Arc::clone(usage), locks, row, partition: index, number, known: Mutex::default() })
    }

    /// Writes the identity of this process to its row.
    fn describe(own: &Row, index: usize, partition: &Partition, place: Place) {
        own.partition.store(index as u32, Ordering::Relaxed);
        own.ci.store(place.instance.map_or(0, |(_, ci)| ci), Ordering::Relaxed);
        own.epoch.store(partition.epoch.load(Ordering::Relaxed), Ordering::Relaxed);
        let mut name = [0; 16];
        let comm = std::fs::read("/proc/self/comm").unwrap_or_default();
        name.iter_mut()
            .zip(comm.iter().take(15).filter(|byte| **byte != b'\n'))
            .for_each(|(to, from)| *to = *from);
        let (begin, end) = name.split_at(8);
        for (word, bytes) in own.name.iter().zip([begin, end]) {
            word.store(
                bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
                Ordering::Relaxed,
            );
        }
        own.work.forget();
    }

    /// Charges `bytes`, rounded up to granules. Returns false and changes nothing if the partition
    /// has too little free memory or a cgroup limit forbids it.
    pub fn charge(&self, bytes: u64) -> bool {
        let charge = || self.change_within_limits(bytes.div_ceil(GRANULE_BYTES));
        // Listing the processes reclaims the memory of dead ones; the second attempt can use it.
        let charged = charge() || (!self.usage.processes().is_empty() && charge());
        if charged {
            self.evict_for_allocation();
        }
        charged
    }

    /// Refunds `bytes`, rounded up to granules. They must have been charged before.
    pub fn refund(&self, bytes: u64) {
        // A change can only be refused for exceeding the limit, which a refund never does.
        let _ = self.change(-granules(bytes));
    }

    /// Whether the GPU or instance has not been reset, destroyed or lost since the process
    /// attached.
    pub fn is_valid(&self) -> bool {
        let partition = self.partition();
        let same = partition.epoch.load(Ordering::Relaxed) == self.own().epoch.load(Ordering::Relaxed);
        same && partition.flags.load(Ordering::Relaxed) & GpuUsage::PRESENT != 0
    }

    /// Free and total bytes of the partition, as this process sees them.
    pub fn memory_info(&self) -> (u64, u64) {
        let partition = self.partition();
        let used = Word::unpack(partition.word.load(Ordering::Acquire)).used;
        let free = partition.limit.load(Ordering::Relaxed).saturating_sub(used.into()) * GRANULE_BYTES;
        let free =
            free.saturating_sub(partition.managed_resident.load(Ordering::Relaxed) * MANAGED_PAGE_BYTES);
        self.memory_within_limits(free, partition.total.load(Ordering::Relaxed) * GRANULE_BYTES)
    }

    /// Bytes that this process uses on the partition, without managed memory.
    pub fn used(&self) -> u64 {
        self.own().used.load(Ordering::Relaxed) * GRANULE_BYTES
    }

    /// Identifies the process among all that are alive, see [`locks::token`].
    pub fn token(&self) -> u64 {
        self.usage.get().owners[self.row].load(Ordering::Relaxed)
    }

    pub(super) fn usage(&self) -> &GpuUsage {
        &self.usage
    }

    pub(super) const fn locks(&self) -> Locks {
        self.locks
    }

    pub(super) const fn row(&self) -> usize {
        self.row
    }

    pub(super) const fn partition_index(&self) -> usize {
        self.partition
    }

    pub(super) fn own(&self) -> &Row {
        &self.usage.get().rows[self.row]
    }

    pub(super) fn partition(&self) -> &Partition {
        &self.usage.get().partitions[self.partition]
    }

    pub(super) fn change(&self, granules: i64) -> bool {
        let mut number = self.number.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(last) = &mut *number else { return false };
        *last = next_number((*last).into());
        self.usage.change(self.row, self.partition, granules, *last)
    }

    /// Detaches from the partition: all charges are refunded, and later charges fail.
    pub fn detach(&self) {
        let mut number = self.number.lock().unwrap_or_else(PoisonError::into_inner);
        if number.take().is_none() {
            return;
        }
        self.usage.release_row(self.locks, self.row);
    }
}

impl Drop for GpuProcess {
    fn drop(&mut self) {
        self.detach();
    }
}

impl GpuUsage {
    /// Claims a row for this process and lets `describe` fill it in before another thread can claim
    /// one.
    pub(super) fn claim_row(&self, locks: Locks, describe: impl FnOnce(&Row)) -> Result<usize, AttachError> {
        if !self.writable {
            return Err(AttachError::Denied);
        }
        let _alone = ROWS_OF_THIS_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        let row = (0..ROWS).find(|row| self.try_claim(locks, *row)).ok_or(AttachError::Full)?;
        self.raise_high_water(row);
        describe(&self.get().rows[row]);
        Ok(row)
    }

    /// Whether this process owns the row.
    pub(super) fn owns(&self, row: usize) -> bool {
        self.get().owners[row].load(Ordering::Acquire) == locks::token()
    }

    /// Releases a row and everything that it uses.
    pub(super) fn release_row(&self, locks: Locks, row: usize) {
        let _alone = ROWS_OF_THIS_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        // After a fork, the child has a copy of its parent's rows but does not own them.
        if self.owns(row) {
            self.reclaim(row);
            locks.drop(row);
        }
    }

    /// Claims the row if it is free or its owner has died.
    fn try_claim(&self, locks: Locks, row: usize) -> bool {
        let owner = &self.get().owners[row];
        let (before, token) = (owner.load(Ordering::Acquire), locks::token());
        // Two libraries in one process share the file lock, but both can see the owner's token.
        if before == token || !locks.take(row) {
            return false;
        }
        if before != 0 {
            self.reclaim(row);
        }
        // If another library in this process claimed the row first, it holds the lock rightfully.
        owner.compare_exchange(0, token, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Reclaims the row of a dead process. Returns false if the process is alive or another process
    /// is already reclaiming the row.
    pub(super) fn remove_dead(&self, locks: Locks, row: usize) -> bool {
        // Not waited for: a fork can leave the mutex locked forever, and reclaiming can happen
        // later.
        let Ok(_alone) = ROWS_OF_THIS_PROCESS.try_lock() else { return false };
        let owner = self.get().owners[row].load(Ordering::Acquire);
        if owner == 0 || owner == locks::token() || !locks.take(row) {
            return false;
        }
        self.reclaim(row);
        locks.drop(row);
        true
    }

    /// Refunds what the row uses and frees it. The caller holds the row's lock. If the caller is
    /// killed at any point, another process can repeat this.
    fn reclaim(&self, at: usize) {
        let map = self.get();
        let row = &map.rows[at];
        let index = row.partition.load(Ordering::Relaxed) as usize;
        if let Some(partition) = map.partitions.get(index) {
            self.discard_work(index, at);
            if let Some(intent) = Intent::unpack(row.intent.load(Ordering::Acquire)) {
                let word = Word::unpack(partition.word.load(Ordering::Acquire));
                let last = word.row == at && word.number == intent.number;
                if last || row.applied.load(Ordering::Acquire) == u64::from(intent.number) {
                    row.used.store(intent.used.into(), Ordering::Release);
                }
                row.intent.store(0, Ordering::Release);
            }
            let used = row.used.load(Ordering::Acquire);
            if used != 0 {
                let number = next_number(row.number.load(Ordering::Acquire));
                let _ = self.change(at, index, -(used as i64), number);
            }
        }
        row.limits.iter().for_each(|number| number.store(0, Ordering::Relaxed));
        map.owners[at].store(0, Ordering::Release);
    }

    /// Changes the memory that a row uses. Returns false if the partition has too little. Only one
    /// change of a row may be in progress.
    fn change(&self, at: usize, index: usize, granules: i64, number: u32) -> bool {
        let map = self.get();
        let (row, partition) = (&map.rows[at], &map.partitions[index]);
        let Some(used) = add(row.used.load(Ordering::Relaxed), granules) else { return false };
        row.number.store(number.into(), Ordering::Relaxed);
        row.intent.store(Intent { used, number }.pack(), Ordering::Release);
        let mut seen = partition.word.load(Ordering::Acquire);
        loop {
            let before = Word::unpack(seen);
            let fits =
                |sum: &u32| granules <= 0 || u64::from(*sum) <= partition.limit.load(Ordering::Relaxed);
            let Some(sum) = add(before.used.into(), granules).filter(fits) else {
                row.intent.store(0, Ordering::Release);
                return false;
            };
            if before.row != at && before.number != 0 {
                mark_applied(&map.rows[before.row].applied, before.number);
            }
            let after = Word { used: sum, row: at, number }.pack();
            match partition.word.compare_exchange_weak(seen, after, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        row.used.store(used.into(), Ordering::Release);
        row.applied.store(number.into(), Ordering::Release);
        row.intent.store(0, Ordering::Release);
        true
    }
}

fn granules(bytes: u64) -> i64 {
    i64::try_from(bytes.div_ceil(GRANULE_BYTES)).unwrap_or(i64::MAX)
}

/// Records that a change was applied, unless a later one is already recorded.
fn mark_applied(made: &AtomicU64, number: u32) {
    const _: () = assert!(NUMBER_BITS < 32);
    let newer = |known: u64| is_later(number, known as u32).then_some(u64::from(number));
    // Fails if a later change is already recorded; then there is nothing to do.
    let _ = made.fetch_update(Ordering::AcqRel, Ordering::Acquire, newer);
}

/// Adds to a number of granules. The result is at least 0, even after too large a refund.
fn add(used: u64, granules: i64) -> Option<u32> {
    let used = i64::try_from(used).ok()?;
    u32::try_from(used.checked_add(granules)?.max(0)).ok()
}
