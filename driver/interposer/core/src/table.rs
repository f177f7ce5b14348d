//! Which allocation is how large, so that its free can be given back.
//!
//! Eight shards by the hash of the key, each an array of buckets ([`buckets`]) that is between two fifths and
//! five eighths full. A shard grows into memory of its own, under its lock: the lock is held for the few
//! memory accesses of one operation, by a thread of this process only, and no system call
//! but that of growing is made under it. (A table without locks would have to move entries
//! while others read them, for nothing: the driver serialises allocations itself.)

mod buckets;
mod entry;

use crate::system::System;
use buckets::{BUCKET, Bucket, Place, home, put};
use divvy_pages::sync::{self, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};

pub(crate) use entry::MANY;
pub use entry::{Class, Entry};

const SHARDS: usize = 8;
/// Of a shard's first array: with entries of 16 bytes, a page of memory.
const FIRST: u32 = 256;

/// The table could not grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom;

/// How many keys of a shard can be written down as being freed: a shard is a cache line.
const LEAVES: usize = 5;
/// Bits of a key that is being freed, above those of any address: its class, and that it was overtaken.
const CLASS: u32 = 56;
const OVERTAKEN: u64 = 1 << 63;

/// The table of a process. Zeros are an empty one.
#[derive(Debug)]
pub struct Table {
    shards: [Shard; SHARDS],
    course: Course,
}

/// How the keys that are freed follow each other. Programs free what they have in the order in which they made it,
/// and the driver makes it side by side: then the entry of the next free is known before the program asks for it.
#[derive(Debug, Default)]
#[repr(align(64))]
struct Course {
    last: AtomicU64,
    step: AtomicU64,
}

impl Course {
    /// After a free of this key: the key of the next, if it is as far from this as this is from the last, and that from the one
    /// before. Of two threads each may find the other's: then what is guessed is wrong, and nothing else is.
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
    /// Of the array; 0 before the first entry.
    size: AtomicU32,
    count: AtomicU32,
    entries: AtomicPtr<Bucket>,
    /// What the driver frees at this moment, see [`crate::freeing`]; 0: nothing. A word belongs to who made it
    /// other than 0; who holds the lock only adds that it was overtaken.
    leaves: [AtomicU64; LEAVES],
}

const _: () = assert!(size_of::<Shard>() == 64);

/// Why a key could not be written down as being freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Busy {
    /// There is no room for it now.
    Full,
    /// It is already: a program frees something twice, and one of the two will be refused.
    Same,
}

/// A key that is written down as being freed. Dropped, it is no more.
#[derive(Debug)]
pub(crate) struct Leave<'a> {
    at: &'a AtomicU64,
    class: Class,
    key: u64,
}

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.at.store(0, Release);
    }
}

/// What becomes of an entry that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    Keep,
    Remove,
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
                leaves: Default::default(),
            }),
            course: Course::default(),
        }
    }

    /// Adds an entry; the one it displaced, where the key was there already.
    pub fn insert(&self, system: &impl System, entry: Entry) -> Result<Option<Entry>, NoRoom> {
        let hash = hash(entry.key);
        self.shard(hash).open(system).insert(system, hash, entry)
    }

    /// As [`Table::insert`] of an entry of that class, unless `merge` says that the one of its key has it in it now.
    #[inline(never)]
    pub fn merge(
        &self,
        system: &impl System,
        class: Class,
        entry: Entry,
        merge: &dyn Fn(&mut Entry) -> bool,
    ) -> Result<Option<Entry>, NoRoom> {
        let hash = hash(entry.key);
        let mut open = self.shard(hash).open(system);
        if let Some(place) = open.find(hash, class, entry.key)
            && open.at(place).is_some_and(merge)
        {
            return Ok(None);
        }
        open.insert(system, hash, entry)
    }

    pub fn remove(&self, system: &impl System, class: Class, key: u64) -> Option<Entry> {
        let hash = hash(key);
        self.shard(hash).open(system).take(hash, class, key)
    }

    /// Writes down that the driver is about to free what has this key, and has its entry fetched, and that of the next.
    #[inline]
    pub(crate) fn leave(&self, class: Class, key: u64) -> Result<Leave<'_>, Busy> {
        let hash = hash(key);
        let shard = self.shard(hash);
        let at = shard.leave(hash).ok_or(Busy::Full)?;
        let word = leaves(class as u64, key).ok_or(Busy::Full)?;
        shard.fetch(hash);
        if let Some(next) = self.course.next(key) {
            let hash = self::hash(next);
            self.shard(hash).fetch(hash);
        }
        match at.compare_exchange(0, word, AcqRel, Relaxed) {
            Ok(_) => Ok(Leave { at, class, key }),
            Err(other) => Err(if other == word { Busy::Same } else { Busy::Full }),
        }
    }

    /// The driver has freed it: takes out the entry, unless another has taken its place.
    #[inline]
    pub(crate) fn left(&self, system: &impl System, leave: Leave<'_>) -> Option<Entry> {
        let hash = hash(leave.key);
        let mut open = self.shard(hash).open(system);
        if leave.at.load(Relaxed) & OVERTAKEN != 0 {
            return None;
        }
        open.take(hash, leave.class, leave.key)
    }

    /// A copy of an entry.
    pub fn get(&self, system: &impl System, class: Class, key: u64) -> Option<Entry> {
        let hash = hash(key);
        let mut open = self.shard(hash).open(system);
        let place = open.find(hash, class, key)?;
        open.at(place).copied()
    }

    /// Changes an entry in place; what `change` makes of it, and what it was when it was done.
    /// `change` keeps key and class.
    pub fn change(
        &self,
        system: &impl System,
        class: Class,
        key: u64,
        change: impl FnOnce(&mut Entry) -> Then,
    ) -> Option<Entry> {
        let hash = hash(key);
        let mut open = self.shard(hash).open(system);
        let place = open.find(hash, class, key)?;
        let entry = open.at(place)?;
        let then = change(entry);
        let after = *entry;
        if then == Then::Remove {
            open.remove(place);
        }
        Some(after)
    }

    /// Looks at every entry and removes those for which `gone` is true. One that is kept may be looked at
    /// twice, where others were removed. `gone` must not use the table.
    pub fn sweep(&self, system: &impl System, mut gone: impl FnMut(&Entry) -> bool) {
        for shard in &self.shards {
            let mut open = shard.open(system);
            let mut number = 0;
            let place = |number| Place { bucket: number / BUCKET, entry: number % BUCKET };
            // A removal moves an entry to here, or one from the front to the end: neither is missed.
            while let Some(entry) = open.at(place(number)).copied() {
                if entry.value != 0 && gone(&entry) {
                    open.remove(place(number));
                } else {
                    number += 1;
                }
            }
        }
    }

    fn shard(&self, hash: u64) -> &Shard {
        // The index of an array of eight is three bits.
        &self.shards[(hash >> 61) as usize % SHARDS]
    }
}

/// Fibonacci hashing: addresses differ in their middle bits, the product in its upper ones.
fn hash(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// How it is written down that a key is being freed; `None` for what is no address.
fn leaves(class: u64, key: u64) -> Option<u64> {
    (key >> CLASS == 0).then_some(key | class << CLASS)
}

#[allow(unsafe_code)]
#[inline]
fn prefetch(bucket: *const Bucket) {
    // SAFETY: reads nothing, whatever the address is.
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
    /// Where a key would be written down.
    #[inline]
    fn leave(&self, hash: u64) -> Option<&AtomicU64> {
        self.leaves.get((hash >> 32) as usize % LEAVES)
    }

    /// Has the bucket where an entry would lie come into the cache. Not the one behind it, where few lie: where a program
    /// holds so much that the table has left the caches, what is fetched for nothing costs more than it spares.
    /// Without the lock: at worst it is no bucket any more.
    #[inline]
    fn fetch(&self, hash: u64) {
        let place = home(hash, self.size.load(Relaxed) as usize / BUCKET);
        prefetch(self.entries.load(Relaxed).wrapping_add(place));
    }

    #[inline]
    fn open(&self, system: &impl System) -> Open<'_> {
        let mut spins = 0_u32;
        while self.lock.compare_exchange_weak(0, 1, Acquire, Relaxed).is_err() {
            spins = spins.saturating_add(1);
            if spins < 100 {
                sync::spin_loop();
            } else {
                // The holder is a thread that was put to sleep in the middle.
                system.nap(0);
            }
        }
        Open { shard: self }
    }
}

/// A shard whose lock is held.
struct Open<'a> {
    shard: &'a Shard,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.shard.lock.store(0, Release);
    }
}

impl Open<'_> {
    #[allow(unsafe_code)]
    #[inline]
    fn array(&mut self) -> &mut [Bucket] {
        let entries = self.shard.entries.load(Relaxed);
        sync::alone(&self.shard.entries);
        let size = self.shard.size.load(Relaxed) as usize;
        if entries.is_null() {
            return &mut [];
        }
        // SAFETY: `grow` stored both together, a mapping of that many entries; the lock is held, so
        // nobody else has a reference, and zeros are valid entries.
        unsafe { core::slice::from_raw_parts_mut(entries, size / BUCKET) }
    }

    #[inline]
    fn at(&mut self, place: Place) -> Option<&mut Entry> {
        self.array().get_mut(place.bucket)?.get_mut(place.entry)
    }

    #[inline]
    fn take(&mut self, hash: u64, class: Class, key: u64) -> Option<Entry> {
        let place = self.find(hash, class, key)?;
        let entry = self.at(place).copied();
        self.remove(place);
        entry
    }

    #[inline]
    fn find(&mut self, hash: u64, class: Class, key: u64) -> Option<Place> {
        buckets::find(self.array(), hash, class, key)
    }

    #[inline]
    fn insert(&mut self, system: &impl System, hash: u64, entry: Entry) -> Result<Option<Entry>, NoRoom> {
        let count = self.shard.count.load(Relaxed);
        if (count + 1) * 8 > self.shard.size.load(Relaxed) * 5 {
            self.grow(system)?;
        }
        // Whoever frees what had this key has nothing to do with it any more.
        if let Some(leave) = self.shard.leave(hash)
            && let word = leave.load(Relaxed)
            && Some(word) == leaves(entry.number(), entry.key)
        {
            let _ = leave.compare_exchange(word, word | OVERTAKEN, Relaxed, Relaxed);
        }
        let old = put(self.array(), hash, entry)?;
        if old.is_none() {
            self.shard.count.store(count + 1, Relaxed);
        }
        Ok(old)
    }

    #[inline]
    fn remove(&mut self, place: Place) {
        buckets::remove(self.array(), place);
        let count = self.shard.count.load(Relaxed);
        self.shard.count.store(count.saturating_sub(1), Relaxed);
    }

    #[cold]
    fn grow(&mut self, system: &impl System) -> Result<(), NoRoom> {
        let old_size = self.shard.size.load(Relaxed);
        let size = (old_size + old_size / 2).max(FIRST).next_multiple_of(BUCKET as u32);
        let bytes = (size as usize) * size_of::<Entry>();
        let mapped = system.map(bytes, false).cast::<Bucket>();
        if mapped.is_null() || !mapped.is_aligned() {
            return Err(NoRoom);
        }
        // SAFETY: a fresh mapping of that many entries that nobody else knows; zeros are valid entries.
        #[allow(unsafe_code)]
        let new = unsafe { core::slice::from_raw_parts_mut(mapped, size as usize / BUCKET) };
        for entry in self.array().as_flattened().iter().filter(|entry| !entry.is_empty()) {
            put(new, hash(entry.key), *entry)?;
        }
        let old = self.shard.entries.swap(mapped, Relaxed);
        self.shard.size.store(size, Relaxed);
        if !old.is_null() {
            // SAFETY: what an earlier call mapped with that size; the lock is held and `array` gives the new one.
            #[allow(unsafe_code)]
            unsafe {
                system.unmap(old.cast(), old_size as usize * size_of::<Entry>())
            };
        }
        Ok(())
    }
}
