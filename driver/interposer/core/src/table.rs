//! The table of allocations and their sizes, so that a free can refund its charge.
//!
//! The table has eight shards by the hash of the key. Each is an array of buckets (`buckets`),
//! filled between two fifths and five eighths. A shard grows into memory of its own under its lock.
//! The lock is held for a few memory accesses of one thread of this process; the only system call
//! under it is the mapping of a larger array. A lock-free table would have to move entries while
//! others read them, without benefit: the driver serialises allocations itself.

mod buckets;
mod entry;

use crate::system::System;
use buckets::{BUCKET, Bucket, Position, hash, home_bucket, put};
use divvy_pages::sync::{self, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};

pub use buckets::TableFull;
pub(crate) use entry::EXTRA_MAX;
pub use entry::{Class, Entry, EntryAction};

const SHARDS: usize = 8;
/// Entries in a shard's first array: at 16 bytes each, one memory page.
const FIRST_SIZE: u32 = 256;

/// Number of pending frees per shard; with them a shard fills one cache line.
const PENDING_MARKS: usize = 5;
/// Bits of a pending key above those of any address: its class, and whether it was overtaken.
const CLASS_SHIFT: u32 = 56;
const OVERTAKEN: u64 = 1 << 63;

/// The table of a process. Zeros are an empty table.
#[derive(Debug)]
pub struct Table {
    shards: [Shard; SHARDS],
    stride: FreeStride,
}

/// Predicts the key of the next free. Programs free allocations in the order in which they made
/// them, and the driver places these side by side. So the next entry can be prefetched.
#[derive(Debug, Default)]
#[repr(align(64))]
struct FreeStride {
    last: AtomicU64,
    step: AtomicU64,
}

impl FreeStride {
    /// Returns the predicted next key after a free of `key`, if the last two steps between keys
    /// were equal. A race between two threads only makes the prediction wrong.
    #[inline]
    fn next(&self, key: u64) -> Option<u64> {
        let step = key.wrapping_sub(self.last.load(Relaxed));
        self.last.store(key, Relaxed);
        if step == self.step.load(Relaxed) {
            return Some(key.wrapping_add(step));
        }
        self.step.store(step, Relaxed);
        None
    }
}

#[derive(Debug)]
#[repr(align(64))]
struct Shard {
    lock: AtomicU32,
    /// Entries in the array; 0 before the first insert.
    size: AtomicU32,
    count: AtomicU32,
    entries: AtomicPtr<Bucket>,
    /// Keys that the driver is freeing ([`crate::free`]); 0 is a free mark. A mark belongs to the
    /// thread that set it. The holder of the lock only sets the bit [`OVERTAKEN`].
    marks: [AtomicU64; PENDING_MARKS],
}

const _: () = assert!(size_of::<Shard>() == 64);

/// Why a key could not be marked as pending.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkError {
    /// The mark is in use by another key.
    InUse,
    /// The same key is already pending: the program frees it twice, and the driver will refuse one
    /// call.
    SameKey,
}

/// A key marked as pending. Dropping it clears the mark.
#[derive(Debug)]
pub(crate) struct PendingKey<'a> {
    at: &'a AtomicU64,
    class: Class,
    key: u64,
}

impl Drop for PendingKey<'_> {
    fn drop(&mut self) {
        self.at.store(0, Release);
    }
}

impl Table {
    #[cfg(test)]
    pub(crate) fn empty() -> Self {
        Self {
            shards: core::array::from_fn(|_| Shard {
                lock: AtomicU32::new(0),
                size: AtomicU32::new(0),
                count: AtomicU32::new(0),
                entries: AtomicPtr::new(core::ptr::null_mut()),
                marks: Default::default(),
            }),
            stride: FreeStride::default(),
        }
    }

    /// Inserts an entry. Returns the entry that it replaced, if the key existed.
    pub fn insert(&self, system: &impl System, entry: Entry) -> Result<Option<Entry>, TableFull> {
        let hash = hash(entry.key);
        self.shard(hash).lock(system).insert(system, hash, entry)
    }

    /// Like [`Table::insert`], but first offers the existing entry of the key to `merge`. If
    /// `merge` returns true, it has taken the new entry in, and nothing is inserted.
    #[inline(never)]
    pub fn merge(
        &self,
        system: &impl System,
        class: Class,
        entry: Entry,
        merge: &dyn Fn(&mut Entry) -> bool,
    ) -> Result<Option<Entry>, TableFull> {
        let hash = hash(entry.key);
        let mut locked = self.shard(hash).lock(system);
        if let Some(position) = locked.find(hash, class, entry.key)
            && locked.entry(position).is_some_and(merge)
        {
            return Ok(None);
        }
        locked.insert(system, hash, entry)
    }

    pub fn remove(&self, system: &impl System, class: Class, key: u64) -> Option<Entry> {
        let hash = hash(key);
        self.shard(hash).lock(system).take(hash, class, key)
    }

    /// Marks a key before the driver frees it, and prefetches its entry and the predicted next one.
    #[inline]
    pub(crate) fn mark_pending(&self, class: Class, key: u64) -> Result<PendingKey<'_>, MarkError> {
        let hash = hash(key);
        let shard = self.shard(hash);
        let at = shard.mark(hash).ok_or(MarkError::InUse)?;
        let word = pending_mark(class as u64, key).ok_or(MarkError::InUse)?;
        shard.prefetch_entry(hash);
        if let Some(next) = self.stride.next(key) {
            let hash = buckets::hash(next);
            self.shard(hash).prefetch_entry(hash);
        }
        match at.compare_exchange(0, word, AcqRel, Relaxed) {
            Ok(_) => Ok(PendingKey { at, class, key }),
            Err(other) => Err(if other == word { MarkError::SameKey } else { MarkError::InUse }),
        }
    }

    /// Removes the entry after the driver has freed it, unless an insert has overtaken the free.
    #[inline]
    pub(crate) fn remove_pending(&self, system: &impl System, pending: PendingKey<'_>) -> Option<Entry> {
        let hash = hash(pending.key);
        let mut locked = self.shard(hash).lock(system);
        if pending.at.load(Relaxed) & OVERTAKEN != 0 {
            return None;
        }
        locked.take(hash, pending.class, pending.key)
    }

    /// Returns a copy of an entry.
    pub fn get(&self, system: &impl System, class: Class, key: u64) -> Option<Entry> {
        let hash = hash(key);
        let mut locked = self.shard(hash).lock(system);
        let position = locked.find(hash, class, key)?;
        locked.entry(position).copied()
    }

    /// Changes an entry in place and returns its new value. `change` must keep key and class.
    pub fn change(
        &self,
        system: &impl System,
        class: Class,
        key: u64,
        change: impl FnOnce(&mut Entry) -> EntryAction,
    ) -> Option<Entry> {
        let hash = hash(key);
        let mut locked = self.shard(hash).lock(system);
        let position = locked.find(hash, class, key)?;
        let entry = locked.entry(position)?;
        let then = change(entry);
        let changed = *entry;
        if then == EntryAction::Remove {
            locked.remove(position);
        }
        Some(changed)
    }

    /// Visits every entry and removes those for which `gone` returns true. Removals can cause other
    /// entries to be visited twice. `gone` must not use the table.
    pub fn sweep(&self, system: &impl System, mut gone: impl FnMut(&Entry) -> bool) {
        for shard in &self.shards {
            let mut locked = shard.lock(system);
            let mut number = 0;
            let position = |number| Position { bucket: number / BUCKET, entry: number % BUCKET };
            // A removal moves an entry to this place, or one from the front to the end: neither is
            // missed.
            while let Some(entry) = locked.entry(position(number)).copied() {
                if entry.value != 0 && gone(&entry) {
                    locked.remove(position(number));
                } else {
                    number += 1;
                }
            }
        }
    }

    fn shard(&self, hash: u64) -> &Shard {
        // The upper three bits select one of eight shards.
        &self.shards[(hash >> 61) as usize % SHARDS]
    }
}

/// The mark of a pending key; `None` if the key is not an address.
fn pending_mark(class: u64, key: u64) -> Option<u64> {
    (key >> CLASS_SHIFT == 0).then_some(key | class << CLASS_SHIFT)
}

#[allow(unsafe_code)]
#[inline]
fn prefetch(bucket: *const Bucket) {
    // SAFETY: a prefetch has no effect on memory, whatever the address is.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(bucket.cast());
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{}]", in(reg) bucket, options(nostack, preserves_flags, readonly));
    }
}

impl Shard {
    /// The mark that a key uses.
    #[inline]
    fn mark(&self, hash: u64) -> Option<&AtomicU64> {
        self.marks.get((hash >> 32) as usize % PENDING_MARKS)
    }

    /// Prefetches an entry's home bucket. The next bucket is not prefetched: few entries are there,
    /// and if the table is larger than the caches, a needless fetch costs more than it saves. Runs
    /// without the lock; at worst the address is stale.
    #[inline]
    fn prefetch_entry(&self, hash: u64) {
        let position = home_bucket(hash, self.size.load(Relaxed) as usize / BUCKET);
        prefetch(self.entries.load(Relaxed).wrapping_add(position));
    }

    #[inline]
    fn lock(&self, system: &impl System) -> LockedShard<'_> {
        let mut spins = 0_u32;
        while self.lock.compare_exchange_weak(0, 1, Acquire, Relaxed).is_err() {
            spins = spins.saturating_add(1);
            if spins < 100 {
                sync::spin_loop();
            } else {
                // The holder was preempted.
                system.sleep(0);
            }
        }
        LockedShard { shard: self }
    }
}

/// A locked shard.
struct LockedShard<'a> {
    shard: &'a Shard,
}

impl Drop for LockedShard<'_> {
    fn drop(&mut self) {
        self.shard.lock.store(0, Release);
    }
}

impl LockedShard<'_> {
    #[allow(unsafe_code)]
    #[inline]
    fn array(&mut self) -> &mut [Bucket] {
        let entries = self.shard.entries.load(Relaxed);
        sync::assert_exclusive(&self.shard.entries);
        let size = self.shard.size.load(Relaxed) as usize;
        if entries.is_null() {
            return &mut [];
        }
        // SAFETY: `grow` stored both together, a mapping of that many entries. The lock is held, so
        // there is no other reference, and zeros are valid entries.
        unsafe { core::slice::from_raw_parts_mut(entries, size / BUCKET) }
    }

    #[inline]
    fn entry(&mut self, position: Position) -> Option<&mut Entry> {
        self.array().get_mut(position.bucket)?.get_mut(position.entry)
    }

    #[inline]
    fn take(&mut self, hash: u64, class: Class, key: u64) -> Option<Entry> {
        let position = self.find(hash, class, key)?;
        let entry = self.entry(position).copied();
        self.remove(position);
        entry
    }

    #[inline]
    fn find(&mut self, hash: u64, class: Class, key: u64) -> Option<Position> {
        buckets::find(self.array(), hash, class, key)
    }

    #[inline]
    fn insert(&mut self, system: &impl System, hash: u64, entry: Entry) -> Result<Option<Entry>, TableFull> {
        let count = self.shard.count.load(Relaxed);
        if (count + 1) * 8 > self.shard.size.load(Relaxed) * 5 {
            self.grow(system)?;
        }
        // A pending free of the same key refers to the old entry.
        if let Some(mark) = self.shard.mark(hash)
            && let word = mark.load(Relaxed)
            && Some(word) == pending_mark(entry.number(), entry.key)
        {
            let _ = mark.compare_exchange(word, word | OVERTAKEN, Relaxed, Relaxed);
        }
        let old = put(self.array(), hash, entry)?;
        if old.is_none() {
            self.shard.count.store(count + 1, Relaxed);
        }
        Ok(old)
    }

    #[inline]
    fn remove(&mut self, position: Position) {
        buckets::remove(self.array(), position);
        let count = self.shard.count.load(Relaxed);
        self.shard.count.store(count.saturating_sub(1), Relaxed);
    }

    #[cold]
    fn grow(&mut self, system: &impl System) -> Result<(), TableFull> {
        let old_size = self.shard.size.load(Relaxed);
        let size = (old_size + old_size / 2).max(FIRST_SIZE).next_multiple_of(BUCKET as u32);
        let bytes = (size as usize) * size_of::<Entry>();
        let mapped = system.map(bytes, false).cast::<Bucket>();
        if mapped.is_null() || !mapped.is_aligned() {
            return Err(TableFull);
        }
        // SAFETY: a fresh mapping of that many entries without other references; zeros are valid
        // entries.
        #[allow(unsafe_code)]
        let new = unsafe { core::slice::from_raw_parts_mut(mapped, size as usize / BUCKET) };
        for entry in self.array().as_flattened().iter().filter(|entry| !entry.is_empty()) {
            put(new, hash(entry.key), *entry)?;
        }
        let old = self.shard.entries.swap(mapped, Relaxed);
        self.shard.size.store(size, Relaxed);
        if !old.is_null() {
            // SAFETY: mapped by an earlier call with that size; the lock is held and `array`
            // returns the new one.
            #[allow(unsafe_code)]
            unsafe {
                system.unmap(old.cast(), old_size as usize * size_of::<Entry>())
            };
        }
        Ok(())
    }
}
