//! The account page: what a share does use.
//!
//! One file of [`SIZE`] bytes that all processes of the share write: the total of the
//! share, and a slot for every process with what that process holds. A slot never
//! moves and has one owner; the owner word says who, by a generation that tells one
//! owner from the next. Nothing here is a lock.
//!
//! | offset | what |
//! |---|---|
//! | 0 | magic, major and minor version, size, slots, size of a slot |
//! | 64 | total: bytes and a count of its changes |
//! | 128 | compute: balance in nanoseconds, time of the last refill |
//! | 192 | doorbell, a futex word |
//! | 256 | how many slots were ever in use |
//! | 320 | attention: the node changes it when it wrote a verdict into a slot |
//! | 384 | eight fault counters, each on a cache line |
//! | 4096 | 1024 slots of 256 bytes |
//!
//! A slot is four cache lines: memory (the process writes it), compute (the process; the last two words since 1.3),
//! the node's line, reserved. The file is sparse: 16 slots cost a page of memory.
//! 1024 slots, because a thousand processes may start CUDA at once, though far fewer
//! contexts fit into any device.
//!
//! **Who stands outside never maps this file**: a tenant can truncate it, and touching
//! the mapping would then kill the toucher. The node reads a copy ([`Snapshot`]) and
//! writes only its own line of a slot ([`NodeLine`]), a plain write at
//! [`NodeLine::offset`]. What follows from that line is done by the processes of the share.

mod node;
mod slot;

use crate::sync::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed};
use crate::word::Word;
use crate::{MAJOR, MINOR};
use core::fmt;
pub use node::{ATTENTION, BALANCE, DOORBELL, NodeLine, SlotReport, Snapshot};
pub use slot::Slot;
pub(crate) use slot::weighs;

/// The length of an account page, in bytes.
pub const SIZE: usize = HEADER + SLOTS * SLOT;
/// Where the slots begin.
pub const HEADER: usize = 4096;
/// How many processes can be registered at once.
pub const SLOTS: usize = 1024;
/// The size of a slot, in bytes.
pub const SLOT: usize = 256;
/// The first eight bytes of an account page.
pub const MAGIC: [u8; 8] = *b"divvyacc";

/// A sum of bytes fills the low 44 bits of its word (16 TiB); above it a total counts
/// its changes, and a slot the operations that are in flight.
const BYTES: u64 = (1 << 44) - 1;
pub(crate) const ONE: u64 = 1 << 44;

pub(crate) fn bytes(word: u64) -> u64 {
    word & BYTES
}

pub(crate) fn above(word: u64) -> u64 {
    word >> 44
}

/// `word` with other bytes.
pub(crate) fn with_bytes(word: u64, bytes: u64) -> u64 {
    word & !BYTES | bytes.min(BYTES)
}

/// What went wrong inside a process of the share; counted for the node to see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An allocation was refused for want of room.
    Refused,
    /// All slots were taken by living processes.
    NoSlot,
    /// A wait for other processes of the share ended by its deadline.
    Waited,
    /// The table of allocations could not grow.
    NoTable,
    /// A free of more than the process held.
    Unheld,
    /// The driver gave an answer that the rules do not know.
    Driver,
}

impl Fault {
    /// All, in the order of their counters.
    pub const ALL: [Self; 6] =
        [Self::Refused, Self::NoSlot, Self::Waited, Self::NoTable, Self::Unheld, Self::Driver];
}

/// Who a process is. All four together are never the same for two images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// In its own namespace.
    pub pid: u32,
    /// The inode of its pid namespace.
    pub namespace: u64,
    /// Field 22 of `/proc/<pid>/stat`: clock ticks since boot.
    pub start: u64,
    /// Field 28 of `/proc/<pid>/stat`, the start of its stack: exec changes it. 0 where it is hidden.
    pub image: u64,
}

/// What a slot is to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    Free,
    /// Its owner is filling it in; it counts for nothing yet.
    Claimed,
    Live,
    /// Its owner is proven dead; it counts for nothing any more.
    Dead,
}

/// The owner word of a slot: pid (bits 0 to 31), generation (32 to 47), state (48 to 55).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner(pub u64);

impl Owner {
    pub(crate) fn new(pid: u32, generation: u16, state: SlotState) -> Self {
        let state = match state {
            SlotState::Free => 0,
            SlotState::Claimed => 1,
            SlotState::Live => 2,
            SlotState::Dead => 3,
        };
        Self(u64::from(pid) | u64::from(generation) << 32 | state << 48)
    }

    pub fn pid(self) -> u32 {
        self.0 as u32
    }

    /// Goes up by one with every owner.
    pub fn generation(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// What no writer of ours leaves there reads as `Claimed`: counted for nothing, given to nobody.
    pub fn state(self) -> SlotState {
        match self.0 >> 48 {
            0 => SlotState::Free,
            2 => SlotState::Live,
            3 => SlotState::Dead,
            _ => SlotState::Claimed,
        }
    }

    pub(crate) fn becomes(self, state: SlotState) -> Self {
        Self::new(self.pid(), self.generation(), state)
    }

    /// Free for the next owner.
    pub(crate) fn next(self) -> Self {
        Self::new(0, self.generation().wrapping_add(1), SlotState::Free)
    }
}

/// Why a mapping or a file is no account page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageError {
    /// Shorter than a page, not aligned, or without the magic.
    Foreign,
    /// A major version that this reader does not know.
    Major(u16),
    /// Another number or size of slots than the version has.
    Shape,
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign => f.write_str("the file is not an account page, or was truncated"),
            Self::Major(major) => {
                write!(f, "the account page has layout version {major}, this reads {MAJOR}")
            }
            Self::Shape => f.write_str("the account page has slots of another shape"),
        }
    }
}

impl core::error::Error for PageError {}

/// The header of a fresh page. The rest of the file is zeros: a file of [`SIZE`] bytes
/// that begins with this is an account page on which nothing is charged.
pub fn fresh() -> [u8; 64] {
    let mut head = [0; 64];
    let fields: [(usize, &[u8]); 6] = [
        (0, &MAGIC),
        (8, &MAJOR.to_le_bytes()),
        (10, &MINOR.to_le_bytes()),
        (12, &(SIZE as u32).to_le_bytes()),
        (16, &(SLOTS as u32).to_le_bytes()),
        (20, &(SLOT as u32).to_le_bytes()),
    ];
    for (offset, value) in fields {
        if let Some(room) = head.get_mut(offset..offset + value.len()) {
            room.copy_from_slice(value);
        }
    }
    head
}

/// Whether a page begins as [`fresh`] leaves it, whatever is charged on it.
pub fn check(page: &[u8]) -> Result<(), PageError> {
    let field = |offset: usize| {
        let bytes = page.get(offset..offset + 4).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u32::from_le_bytes).ok_or(PageError::Foreign)
    };
    if page.get(..8) != Some(MAGIC.as_slice()) {
        return Err(PageError::Foreign);
    }
    let major = field(8)? as u16;
    if major != MAJOR {
        return Err(PageError::Major(major));
    }
    let shape = [SIZE as u32, SLOTS as u32, SLOT as u32];
    if [field(12)?, field(16)?, field(20)?] != shape { Err(PageError::Shape) } else { Ok(()) }
}

/// An account page that all processes of the share have mapped.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct AccountPage {
    head: [Word; 8],
    pub(crate) total: Line,
    balance: AtomicI64,
    refilled: AtomicU64,
    _compute: [Word; 6],
    doorbell: AtomicU32,
    _doorbell: [AtomicU32; 15],
    pub(crate) high: Line,
    attention: Line,
    faults: [Counter; 8],
    _reserved: [Word; (HEADER - 384 - 8 * 64) / 8],
    pub(crate) slots: [Slot; SLOTS],
}

/// A word that has a cache line to itself.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Line {
    pub(crate) word: Word,
    _rest: [Word; 7],
}

/// A counter that has a cache line to itself, and no part in any protocol.
#[derive(Debug)]
#[repr(C, align(64))]
struct Counter {
    count: AtomicU64,
    _rest: [AtomicU64; 7],
}

const _: () = assert!(size_of::<AccountPage>() == SIZE);
const _: () = assert!(core::mem::offset_of!(AccountPage, slots) == HEADER);
const _: () = assert!(core::mem::offset_of!(AccountPage, doorbell) == DOORBELL as usize);
const _: () = assert!(core::mem::offset_of!(AccountPage, faults) == 384);

impl AccountPage {
    /// The page that is mapped at `address`.
    ///
    /// # Safety
    /// `length` bytes at `address` are mapped readable and writable for all of `'a`.
    /// Others may write them.
    #[allow(unsafe_code)]
    pub unsafe fn at<'a>(address: *mut u8, length: usize) -> Result<&'a Self, PageError> {
        if address.is_null() || !(address as usize).is_multiple_of(64) || length < SIZE {
            return Err(PageError::Foreign);
        }
        // SAFETY: aligned and long enough as checked, mapped as the caller promises;
        // the page is atomics throughout, so concurrent writers are no data race.
        let page = unsafe { &*address.cast::<Self>() };
        let mut head = [0; 64];
        for (word, room) in page.head.iter().zip(head.chunks_mut(8)) {
            room.copy_from_slice(&word.load().to_le_bytes());
        }
        check(&head).map(|()| page)
    }

    /// The bytes charged, by all processes of the share.
    pub fn used(&self) -> u64 {
        bytes(self.total.word.load())
    }

    /// Changes whenever the node wrote a verdict or a correction: worth a [`AccountPage::tidy`].
    pub fn attention(&self) -> u64 {
        self.attention.word.load()
    }

    /// The balance of compute time, in nanoseconds.
    pub fn balance(&self) -> &AtomicI64 {
        &self.balance
    }

    /// When the balance was last refilled, in nanoseconds of the monotonic clock.
    pub fn refilled(&self) -> &AtomicU64 {
        &self.refilled
    }

    /// Rung when the share begins to work and when it is first held up: a futex word.
    pub fn doorbell(&self) -> &AtomicU32 {
        &self.doorbell
    }

    pub fn count(&self, fault: Fault) {
        if let Some(line) = self.faults.get(fault as usize) {
            line.count.fetch_add(1, Relaxed);
        }
    }

    /// How often a fault was counted.
    pub fn counted(&self, fault: Fault) -> u64 {
        self.faults.get(fault as usize).map_or(0, |line| line.count.load(Relaxed))
    }

    /// The slots that were ever in use.
    pub fn slots(&self) -> &[Slot] {
        let high = usize::try_from(self.high.word.load()).unwrap_or(SLOTS);
        self.slots.get(..high).unwrap_or(&self.slots)
    }

    pub(crate) fn slot(&self, index: u16) -> Option<&Slot> {
        self.slots.get(usize::from(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bytes_of_a_fresh_page_are_those_of_the_golden() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/account-1.3.hex");
        crate::golden::check(path, &fresh());
    }

    #[test]
    fn a_page_of_any_minor_is_taken_and_of_another_major_is_not() {
        let page = |offset: usize, number: u16| {
            let mut page = fresh();
            page[offset..offset + 2].copy_from_slice(&number.to_le_bytes());
            check(&page)
        };
        assert_eq!([0, 1, 2, MINOR + 1].map(|minor| page(10, minor)), [Ok(()); 4]);
        assert_eq!(page(8, 2), Err(PageError::Major(2)));
    }
}
