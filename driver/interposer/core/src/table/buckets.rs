//! An array of buckets with open addressing.
//!
//! A bucket is four entries in one cache line, compared without branches: an operation usually
//! touches only that line. If a bucket is full, its entries spill to the next one. A removal from a
//! full bucket brings spilled entries back, so there are no tombstones, and lookups stay fast after
//! many frees. Linear probing by single entries would form clusters that every removal has to walk.
//! The functions are not inlined: callers are generic and compiled for size, this crate for speed.

use super::entry::{Class, Entry};

/// Entries per cache line.
pub(super) const BUCKET: usize = 4;
pub(super) type Bucket = [Entry; BUCKET];
const EMPTY: Entry = Entry { key: 0, value: 0 };

const _: () = assert!(size_of::<Bucket>() == 64);

/// The table could not grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableFull;

/// The position of an entry.
#[derive(Clone, Copy)]
pub(super) struct Position {
    pub(super) bucket: usize,
    pub(super) entry: usize,
}

/// Finds an entry.
#[inline(never)]
pub(super) fn find(array: &[Bucket], hash: u64, class: Class, key: u64) -> Option<Position> {
    let mut bucket = home_bucket(hash, array.len());
    // Terminates because the array is never full.
    loop {
        let entries = array.get(bucket)?;
        if let Some(entry) = first(entries, |entry| entry.matches(class, key)) {
            return Some(Position { bucket, entry });
        }
        if first(entries, Entry::is_empty).is_some() {
            return None;
        }
        bucket = next_bucket(bucket, array.len());
    }
}

/// The first entry of a bucket for which `is` returns true. All four are tested, without branches
/// that would be mispredicted and without a loop that would delay the following instructions.
#[inline]
fn first(entries: &Bucket, is: impl Fn(&Entry) -> bool) -> Option<usize> {
    let [one, two, three, four] = entries;
    let found =
        u32::from(is(one)) | u32::from(is(two)) << 1 | u32::from(is(three)) << 2 | u32::from(is(four)) << 3;
    (found != 0).then(|| found.trailing_zeros() as usize)
}

/// Inserts an entry and returns the one that it replaced.
#[inline(never)]
pub(super) fn put(array: &mut [Bucket], hash: u64, entry: Entry) -> Result<Option<Entry>, TableFull> {
    let size = array.len();
    let mut bucket = home_bucket(hash, size);
    loop {
        let entries = array.get_mut(bucket).ok_or(TableFull)?;
        let same = first(entries, |other| (other.key == entry.key) & (other.number() == entry.number()));
        let position = same.or_else(|| first(entries, Entry::is_empty));
        if let Some(room) = position.and_then(|position| entries.get_mut(position)) {
            let old = core::mem::replace(room, entry);
            return Ok(same.is_some().then_some(old));
        }
        bucket = next_bucket(bucket, size);
    }
}

/// Removes an entry.
#[inline(never)]
pub(super) fn remove(array: &mut [Bucket], position: Position) {
    let Some(entries) = array.get_mut(position.bucket) else { return };
    let was_full = first(entries, Entry::is_empty).is_none();
    if let Some(entry) = entries.get_mut(position.entry) {
        *entry = EMPTY;
    }
    if was_full {
        refill_hole(array, position);
    }
}

/// Fills the hole in a formerly full bucket with an entry that has spilled past it, and then the
/// hole that this leaves if that bucket was full as well.
#[cold]
fn refill_hole(array: &mut [Bucket], mut hole: Position) {
    let size = array.len();
    // Number of buckets from `from` to `to`, with wraparound.
    let behind = |from: usize, to: usize| if to >= from { to - from } else { to + size - from };
    let mut bucket = hole.bucket;
    loop {
        bucket = next_bucket(bucket, size);
        let Some(entries) = array.get_mut(bucket) else { return };
        let is_full = first(entries, Entry::is_empty).is_none();
        let from = behind(hole.bucket, bucket);
        let moves =
            |entry: &Entry| !entry.is_empty() && behind(home_bucket(hash(entry.key), size), bucket) >= from;
        if let Some(position) = first(entries, moves)
            && let Some(entry) = entries.get_mut(position)
        {
            let entry = core::mem::replace(entry, EMPTY);
            if let Some(room) = array.get_mut(hole.bucket).and_then(|entries| entries.get_mut(hole.entry)) {
                *room = entry;
            }
            hole = Position { bucket, entry: position };
        }
        if !is_full {
            return;
        }
    }
}

/// The next bucket, with wraparound.
fn next_bucket(bucket: usize, size: usize) -> usize {
    if bucket + 1 < size { bucket + 1 } else { 0 }
}

/// The home bucket of a hash: the bits below those of the shard, as a fraction of the size. The
/// upper bits of the product spread equidistant addresses evenly.
#[inline]
pub(super) fn home_bucket(hash: u64, size: usize) -> usize {
    ((((hash << 3) >> 32) * size as u64) >> 32) as usize
}

/// Fibonacci hashing: addresses differ in their middle bits, the product in its upper bits.
pub(super) fn hash(key: u64) -> u64 {
    key.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
