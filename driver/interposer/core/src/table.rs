//! Which allocation is how large, so that its free can be given back.
//!
//! Eight shards by the hash of the key, each an array with open addressing and linear
//! probing that is between half and three quarters full. A removal shifts the entries behind it
//! back, so there are no tombstones and a lookup costs the same after a million frees as
//! before. A shard grows into memory of its own, under its lock: the lock is held for the few
//! memory accesses of one operation, by a thread of this process only, and no system call
//! but that of growing is made under it. (A table without locks would have to move entries
//! while others read them, for nothing: the driver serialises allocations itself.)
//!
//! An entry is two words, the key (an address or a handle) and a packed value: with a hundred
//! thousand of them the table still lies in a core's cache, and that is what a lookup costs.

use crate::system::System;
use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering::*};

const SHARDS: usize = 8;
/// Of a shard's first array: with entries of 16 bytes, a page of memory.
const FIRST: u32 = 256;

/// What a key is; the same number may be a key in several classes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Class {
    /// A device pointer. Extra: the number of its context.
    Pointer = 1,
    /// A `CUarray`. Extra: the number of its context.
    Array = 2,
    /// A `CUmipmappedArray`. Extra: the number of its context.
    Mipmap = 3,
    /// A `CUcontext`.
    Context = 4,
    /// A `CUmodule` or `CUlibrary`. Extra: the number of its context.
    Module = 5,
    /// A `CUmemoryPool`.
    Pool = 6,
    /// The graph memory of a device, by its index.
    Graph = 7,
    /// A handle of `cuMemCreate`. Bytes: the number of its object. Extra: references the program holds.
    Handle = 8,
    /// Physical memory by its number. Extra: handles' references and mappings together.
    Object = 9,
    /// A mapped address. Bytes: the number of its object.
    Mapping = 10,
    /// The same address. Bytes: how long the mapping is.
    Length = 11,
}

impl Class {
    const ALL: [Self; 11] = [
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
        Self::Length,
    ];
}

/// One entry. A value of zero is no entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub key: u64,
    /// Bytes (bits 0 to 43), class (44 to 47), device (48 to 52), managed (53), extra (54 to 63).
    value: u64,
}

const BYTES: u64 = (1 << 44) - 1;
const MANAGED: u64 = 1 << 53;
/// The largest extra. As a count it stands for "more than can be counted" and stays: such memory is
/// charged until the process ends, never too little.
pub(crate) const MANY: u64 = (1 << 10) - 1;

impl Entry {
    pub fn new(class: Class, key: u64, device: u32, bytes: u64, extra: u64) -> Self {
        let value = bytes.min(BYTES) | (class as u64) << 44 | u64::from(device & 31) << 48;
        Self { key, value: value | extra.min(MANY) << 54 }
    }

    /// The same, of managed memory.
    #[must_use]
    pub fn managed(self, managed: bool) -> Self {
        Self { value: if managed { self.value | MANAGED } else { self.value & !MANAGED }, ..self }
    }

    pub fn is_managed(&self) -> bool {
        self.value & MANAGED != 0
    }

    fn number(&self) -> u64 {
        self.value >> 44 & 15
    }

    pub fn class(&self) -> Option<Class> {
        Class::ALL.into_iter().find(|class| *class as u64 == self.number())
    }

    fn is(&self, class: Class, key: u64) -> bool {
        self.key == key && self.number() == class as u64
    }

    pub fn device(&self) -> u32 {
        (self.value >> 48) as u32 & 31
    }

    pub fn bytes(&self) -> u64 {
        self.value & BYTES
    }

    /// The same with other bytes.
    #[must_use]
    pub fn with_bytes(self, bytes: u64) -> Self {
        Self { value: self.value & !BYTES | bytes.min(BYTES), ..self }
    }

    pub fn extra(&self) -> u64 {
        self.value >> 54
    }

    fn with_extra(self, extra: u64) -> Self {
        Self { value: self.value & !(MANY << 54) | extra.min(MANY) << 54, ..self }
    }

    /// Counts one more in the extra.
    pub(crate) fn hold(&mut self) {
        *self = self.with_extra(self.extra() + 1);
    }

    /// Counts so many less in the extra; what is to become of the entry.
    pub(crate) fn let_go(&mut self, count: u64) -> Then {
        if self.extra() < MANY {
            *self = self.with_extra(self.extra().saturating_sub(count));
        }
        if self.extra() == 0 { Then::Remove } else { Then::Keep }
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
    /// Of the array; 0 before the first entry.
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
        // The index of an array of eight is three bits.
        &self.shards[(hash >> 61) as usize % SHARDS]
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
        let mut place = home(hash, array.len());
        // There is an empty entry: the array is never full.
        loop {
            let entry = array.get(place)?;
            if entry.value == 0 {
                return None;
            }
            if entry.is(class, key) {
                return Some(place);
            }
            place = after(place, array.len());
        }
    }

    fn insert(&mut self, system: &impl System, hash: u64, entry: Entry) -> Result<Option<Entry>, NoRoom> {
        let count = self.shard.count.load(Relaxed);
        if (count + 1) * 4 > self.shard.size.load(Relaxed) * 3 {
            self.grow(system)?;
        }
        let array = self.array();
        let mut place = home(hash, array.len());
        loop {
            let size = array.len();
            let room = array.get_mut(place).ok_or(NoRoom)?;
            if room.value == 0 {
                *room = entry;
                self.shard.count.store(count + 1, Relaxed);
                return Ok(None);
            }
            if room.key == entry.key && room.number() == entry.number() {
                return Ok(Some(core::mem::replace(room, entry)));
            }
            place = after(place, size);
        }
    }

    /// Empties a place and moves back what was pushed behind it.
    fn remove(&mut self, place: usize) {
        let array = self.array();
        let size = array.len();
        // How many places `to` is behind `from`.
        let behind = |from: usize, to: usize| if to >= from { to - from } else { to + size - from };
        let (mut hole, mut next) = (place, place);
        loop {
            next = after(next, size);
            let Some(entry) = array.get(next).copied().filter(|entry| entry.value != 0) else { break };
            // It may move back to the hole unless its home lies behind that.
            if behind(home(hash(entry.key), size), next) >= behind(hole, next) {
                if let Some(room) = array.get_mut(hole) {
                    *room = entry;
                }
                hole = next;
            }
        }
        if let Some(room) = array.get_mut(hole) {
            *room = Entry { key: 0, value: 0 };
        }
        let count = self.shard.count.load(Relaxed);
        self.shard.count.store(count.saturating_sub(1), Relaxed);
    }

    #[cold]
    fn grow(&mut self, system: &impl System) -> Result<(), NoRoom> {
        let old_size = self.shard.size.load(Relaxed);
        let size = (old_size + old_size / 2).max(FIRST);
        let bytes = (size as usize) * size_of::<Entry>();
        let mapped = system.map(bytes, false).cast::<Entry>();
        if mapped.is_null() || !mapped.is_aligned() {
            return Err(NoRoom);
        }
        // SAFETY: a fresh mapping of that many entries that nobody else knows; zeros are valid entries.
        #[allow(unsafe_code)]
        let new = unsafe { core::slice::from_raw_parts_mut(mapped, size as usize) };
        for entry in self.array().iter().filter(|entry| entry.value != 0) {
            let mut place = home(hash(entry.key), new.len());
            while new.get(place).is_some_and(|room| room.value != 0) {
                place = after(place, new.len());
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

/// The next place, round at the end.
fn after(place: usize, size: usize) -> usize {
    if place + 1 < size { place + 1 } else { 0 }
}

/// Where an entry would lie in an array of so many: by the bits below those that chose the shard, as a
/// fraction of the size. (The upper bits of the product spread addresses at equal distances evenly.)
fn home(hash: u64, size: usize) -> usize {
    ((((hash << 3) >> 32) * size as u64) >> 32) as usize
}
