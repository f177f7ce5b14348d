//! An array of buckets with open addressing.
//!
//! A bucket is four entries in one cache line, which are compared without a branch: an operation as a rule
//! touches that line and guesses nothing. What finds its bucket full lies in the next one that is not. A
//! removal from a full bucket brings back what lies behind it for want of room there, so there are no
//! tombstones and a lookup costs the same after a million frees as before. (Linear probing by single
//! entries has clusters, which a removal walks to their end.)
//!
//! What a caller needs is not inlined: callers are generic and so compiled with the library, to be small; this crate is
//! compiled to be fast.

use super::entry::{Class, Entry};
use super::{NoRoom, hash};

/// Entries that lie in one cache line.
pub(super) const BUCKET: usize = 4;
pub(super) type Bucket = [Entry; BUCKET];
const EMPTY: Entry = Entry { key: 0, value: 0 };

const _: () = assert!(size_of::<Bucket>() == 64);

/// Where an entry lies.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) bucket: usize,
    pub(super) entry: usize,
}

/// The place of an entry.
#[inline(never)]
pub(super) fn find(array: &[Bucket], hash: u64, class: Class, key: u64) -> Option<Place> {
    let mut bucket = home(hash, array.len());
    // Some bucket is not full: the array never is.
    loop {
        let entries = array.get(bucket)?;
        if let Some(entry) = first(entries, |entry| entry.is(class, key)) {
            return Some(Place { bucket, entry });
        }
        if first(entries, Entry::is_empty).is_some() {
            return None;
        }
        bucket = after(bucket, array.len());
    }
}

/// The first entry of a bucket that is so. All are looked at, without a branch for each, which would be guessed wrong, and
/// without a loop, whose instructions keep the processor from what comes after.
#[inline]
fn first(entries: &Bucket, is: impl Fn(&Entry) -> bool) -> Option<usize> {
    let [one, two, three, four] = entries;
    let found =
        u32::from(is(one)) | u32::from(is(two)) << 1 | u32::from(is(three)) << 2 | u32::from(is(four)) << 3;
    (found != 0).then(|| found.trailing_zeros() as usize)
}

/// Puts an entry where it belongs; the one that it displaced.
#[inline(never)]
pub(super) fn put(array: &mut [Bucket], hash: u64, entry: Entry) -> Result<Option<Entry>, NoRoom> {
    let size = array.len();
    let mut bucket = home(hash, size);
    loop {
        let entries = array.get_mut(bucket).ok_or(NoRoom)?;
        let same = first(entries, |other| (other.key == entry.key) & (other.number() == entry.number()));
        let place = same.or_else(|| first(entries, Entry::is_empty));
        if let Some(room) = place.and_then(|place| entries.get_mut(place)) {
            let old = core::mem::replace(room, entry);
            return Ok(same.is_some().then_some(old));
        }
        bucket = after(bucket, size);
    }
}

/// Empties a place.
#[inline(never)]
pub(super) fn remove(array: &mut [Bucket], place: Place) {
    let Some(entries) = array.get_mut(place.bucket) else { return };
    let was_full = first(entries, Entry::is_empty).is_none();
    if let Some(entry) = entries.get_mut(place.entry) {
        *entry = EMPTY;
    }
    if was_full {
        bring_back(array, place);
    }
}

/// Fills a hole in a bucket that was full with an entry behind it that belongs there or before, and the hole that
/// this leaves, if that bucket was full as well.
#[cold]
fn bring_back(array: &mut [Bucket], mut hole: Place) {
    let size = array.len();
    // How many buckets `to` is behind `from`.
    let behind = |from: usize, to: usize| if to >= from { to - from } else { to + size - from };
    let mut bucket = hole.bucket;
    loop {
        bucket = after(bucket, size);
        let Some(entries) = array.get_mut(bucket) else { return };
        let is_full = first(entries, Entry::is_empty).is_none();
        let from = behind(hole.bucket, bucket);
        let moves = |entry: &Entry| !entry.is_empty() && behind(home(hash(entry.key), size), bucket) >= from;
        if let Some(place) = first(entries, moves)
            && let Some(entry) = entries.get_mut(place)
        {
            let entry = core::mem::replace(entry, EMPTY);
            if let Some(room) = array.get_mut(hole.bucket).and_then(|entries| entries.get_mut(hole.entry)) {
                *room = entry;
            }
            hole = Place { bucket, entry: place };
        }
        if !is_full {
            return;
        }
    }
}

/// The next bucket, round at the end.
fn after(bucket: usize, size: usize) -> usize {
    if bucket + 1 < size { bucket + 1 } else { 0 }
}

/// The bucket of so many: by the bits below those that chose the shard, as a
/// fraction of the size. (The upper bits of the product spread addresses at equal distances evenly.)
#[inline]
pub(super) fn home(hash: u64, size: usize) -> usize {
    ((((hash << 3) >> 32) * size as u64) >> 32) as usize
}
