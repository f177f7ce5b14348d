//! Which allocation is how large, so that its free can be given back.
//!
//! Sixteen shards by the hash of the key, each an array with open addressing and linear
//! probing that is at most three quarters full. A removal shifts the entries behind it
//! back, so there are no tombstones and a lookup costs the same after a million frees as
//! before. A shard doubles in memory of its own, under its lock: the lock is held for the few
//! memory accesses of one operation, by a thread of this process only, and no system call
//! but that of growing is made under it. (A table without locks would have to move entries
//! while others read them, for nothing: the driver serialises allocations itself.)
//!
//! An entry is three words: the key (an address or a handle), a packed value, and a word
//! whose meaning the class gives.

use crate::system::System;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering::*};

const SHARDS: usize = 16;
/// Of a shard's first array: with the entries of 24 bytes, three pages of memory at most.
const FIRST: u32 = 128;

/// What a key is; the same number may be a key in several classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Class {
    /// A device pointer. Extra: the context.
    Pointer = 1,
    /// A `CUarray`. Extra: the context.
    Array = 2,
    /// A `CUmipmappedArray`. Extra: the context.
    Mipmap = 3,
    /// A `CUcontext`.
    Context = 4,
    /// A `CUmodule` or `CUlibrary`. Extra: the context.
    Module = 5,
    /// A `CUmemoryPool`.
    Pool = 6,
    /// The graph memory of a device, by its index.
    Graph = 7,
    /// A handle of `cuMemCreate`. Bytes: the number of its object. Extra: references the program holds.
    Handle = 8,
    /// Physical memory by its number. Extra: handles' references and mappings together.
    Object = 9,
    /// A mapped address. Bytes: the number of its object. Extra: the length.
    Mapping = 10,
}

impl Class {
    const ALL: [Self; 10] = [
        Self::Pointer,
        Self::Array,
        Self::Mipmap,
        Self::Context,
        Self::Module,
        Self::Pool,
        Self::Graph,
        Self::Handle,
        Self::Object,
        Self::Mapping,
    ];
}

/// One entry. A value of zero is no entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: u64,
    /// Bytes (bits 0 to 43), device (44 to 49), class (50 to 53), managed (54).
    value: u64,
    pub extra: u64,
}

const BYTES: u64 = (1 << 44) - 1;

impl Entry {
    pub fn new(class: Class, key: u64, device: u32, bytes: u64, extra: u64) -> Self {
        Self { key, value: bytes.min(BYTES) | u64::from(device & 63) << 44 | (class as u64) << 50, extra }
    }

    /// The same, of managed memory.
    #[must_use]
    pub fn managed(self, managed: bool) -> Self {
        Self { value: self.value & !(1 << 54) | u64::from(managed) << 54, ..self }
    }

    pub fn is_managed(&self) -> bool {
        self.value >> 54 & 1 == 1
    }

    pub fn class(&self) -> Option<Class> {
        Class::ALL.into_iter().find(|class| *class as u64 == self.value >> 50 & 15)
    }

    fn is(&self, class: Class, key: u64) -> bool {
        self.key == key && self.value >> 50 & 15 == class as u64
    }

    pub fn device(&self) -> u32 {
        (self.value >> 44) as u32 & 63
    }

    pub fn bytes(&self) -> u64 {
        self.value & BYTES
    }

    /// The same with other bytes.
    #[must_use]
    pub fn with_bytes(self, bytes: u64) -> Self {
        Self { value: self.value & !BYTES | bytes.min(BYTES), ..self }
    }
}

/// The table could not grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoRoom;

/// The table of a process. Zeros are an empty one.
#[derive(Debug)]
pub struct Table {
    shards: [Shard; SHARDS],
}

#[derive(Debug)]
#[repr(align(64))]
struct Shard {
    lock: AtomicU32,
    /// Of the array; a power of two, or 0 before the first entry.
    size: AtomicU32,
    count: AtomicU32,
    entries: AtomicPtr<Entry>,
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
            }),
        }
    }

    /// Adds an entry; the one it displaced, where the key was there already.
    pub fn insert(&self, system: &impl System, entry: Entry) -> Result<Option<Entry>, NoRoom> {
        let hash = hash(entry.key);
        self.shard(hash).open(system).insert(system, hash, entry)
    }

    pub fn remove(&self, system: &impl System, class: Class, key: u64) -> Option<Entry> {
        let hash = hash(key);
        let mut open = self.shard(hash).open(system);
        let place = open.find(hash, class, key)?;
        let entry = open.array().get(place).copied();
        open.remove(place);
        entry
    }

    /// A copy of an entry.
    pub fn get(&self, system: &impl System, class: Class, key: u64) -> Option<Entry> {
        let hash = hash(key);
        let mut open = self.shard(hash).open(system);
        let place = open.find(hash, class, key)?;
        open.array().get(place).copied()
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
        let entry = open.array().get_mut(place)?;
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
            let mut place = 0;
            // A removal moves an entry to here, or one from the front to the end: neither is missed.
            while let Some(entry) = open.array().get(place).copied() {
                if entry.value != 0 && gone(&entry) {
                    open.remove(place);
                } else {
                    place += 1;
                }
            }
        }
    }

    fn shard(&self, hash: u64) -> &Shard {
        // The index of an array of sixteen is four bits.
        &self.shards[(hash >> 60) as usize % SHARDS]
    }
}

/// Fibonacci hashing: addresses differ in their middle bits, the product in its upper ones.
fn hash(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

impl Shard {
    fn open(&self, system: &impl System) -> Open<'_> {
        let mut spins = 0_u32;
        while self.lock.compare_exchange_weak(0, 1, Acquire, Relaxed).is_err() {
            spins = spins.saturating_add(1);
            if spins < 100 {
                core::hint::spin_loop();
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
    fn array(&mut self) -> &mut [Entry] {
        let entries = self.shard.entries.load(Relaxed);
        let size = self.shard.size.load(Relaxed) as usize;
        if entries.is_null() {
            return &mut [];
        }
        // SAFETY: `grow` stored both together, a mapping of that many entries; the lock is held, so
        // nobody else has a reference, and zeros are valid entries.
        unsafe { core::slice::from_raw_parts_mut(entries, size) }
    }

    fn find(&mut self, hash: u64, class: Class, key: u64) -> Option<usize> {
        let array = self.array();
        let mask = array.len().wrapping_sub(1);
        let mut place = home(hash, mask);
        // There is an empty entry: the array is never full.
        loop {
            let entry = array.get(place)?;
            if entry.value == 0 {
                return None;
            }
            if entry.is(class, key) {
                return Some(place);
            }
            place = (place + 1) & mask;
        }
    }

    fn insert(&mut self, system: &impl System, hash: u64, entry: Entry) -> Result<Option<Entry>, NoRoom> {
        let count = self.shard.count.load(Relaxed);
        if (count + 1) * 4 > self.shard.size.load(Relaxed) * 3 {
            self.grow(system)?;
        }
        let array = self.array();
        let mask = array.len().wrapping_sub(1);
        let mut place = home(hash, mask);
        loop {
            let room = array.get_mut(place).ok_or(NoRoom)?;
            if room.value == 0 {
                *room = entry;
                self.shard.count.store(count + 1, Relaxed);
                return Ok(None);
            }
            if entry.class().is_some_and(|class| room.is(class, entry.key)) {
                return Ok(Some(core::mem::replace(room, entry)));
            }
            place = (place + 1) & mask;
        }
    }

    /// Empties a place and moves back what was pushed behind it.
    fn remove(&mut self, place: usize) {
        let array = self.array();
        let mask = array.len().wrapping_sub(1);
        let (mut hole, mut next) = (place, place);
        loop {
            next = (next + 1) & mask;
            let Some(entry) = array.get(next).copied().filter(|entry| entry.value != 0) else { break };
            // How far the entry is from its home, and how far the hole is from the entry.
            let pushed = next.wrapping_sub(home(hash(entry.key), mask)) & mask;
            let back = next.wrapping_sub(hole) & mask;
            if pushed >= back {
                if let Some(room) = array.get_mut(hole) {
                    *room = entry;
                }
                hole = next;
            }
        }
        if let Some(room) = array.get_mut(hole) {
            *room = Entry { key: 0, value: 0, extra: 0 };
        }
        let count = self.shard.count.load(Relaxed);
        self.shard.count.store(count.saturating_sub(1), Relaxed);
    }

    #[cold]
    fn grow(&mut self, system: &impl System) -> Result<(), NoRoom> {
        let old_size = self.shard.size.load(Relaxed);
        let size = (old_size * 2).max(FIRST);
        let bytes = (size as usize) * size_of::<Entry>();
        let mapped = system.map(bytes, false).cast::<Entry>();
        if mapped.is_null() || !mapped.is_aligned() {
            return Err(NoRoom);
        }
        // SAFETY: a fresh mapping of that many entries that nobody else knows; zeros are valid entries.
        #[allow(unsafe_code)]
        let new = unsafe { core::slice::from_raw_parts_mut(mapped, size as usize) };
        let mask = new.len().wrapping_sub(1);
        for entry in self.array().iter().filter(|entry| entry.value != 0) {
            let mut place = home(hash(entry.key), mask);
            while new.get(place).is_some_and(|room| room.value != 0) {
                place = (place + 1) & mask;
            }
            if let Some(room) = new.get_mut(place) {
                *room = *entry;
            }
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

/// Where an entry would lie in an array of `mask + 1`: the bits below those that chose the shard. The upper
/// bits of the product spread addresses at equal distances evenly, the lower ones do not.
fn home(hash: u64, mask: usize) -> usize {
    ((hash << 4) >> (64 - mask.count_ones().clamp(1, 63))) as usize & mask
}
