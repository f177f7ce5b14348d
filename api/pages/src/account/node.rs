//! The account page as the node has it: a file of which it reads copies, and of which it
//! writes its own line in each slot.

use super::{Fault, HEADER, Identity, Owner, PageError, SLOT, SLOTS, SlotState, above, bytes, check, weighs};

/// What the node says of the owner of a slot: one line of 64 bytes that only it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeLine {
    /// The owner word that it speaks of; of any other owner it says nothing.
    pub about: Owner,
    /// The owner is dead. The node says so of processes in any namespace.
    pub dead: bool,
    /// What the process takes beyond what it charged, in bytes (less, where negative): the
    /// driver's own measure of it, minus what it holds without managed memory.
    pub correction: i64,
    /// The owner's pid on the host; 0: not found.
    pub host_pid: u32,
}

impl NodeLine {
    /// Where in the file the line of a slot is.
    pub const fn offset(slot: usize) -> u64 {
        (HEADER + slot * SLOT + 128) as u64
    }

    /// The line as it stands in the file.
    pub fn encode(&self) -> [u8; 64] {
        let words = [self.about.0, u64::from(self.dead), self.correction as u64, u64::from(self.host_pid)];
        let mut line = [0; 64];
        for (room, word) in line.chunks_mut(8).zip(words) {
            room.copy_from_slice(&word.to_le_bytes());
        }
        line
    }
}

/// Where in the file the balance is: eight bytes, for the node to put a forged one right.
pub const BALANCE: u64 = 128;
/// Where in the file the doorbell is: four bytes, a futex that nobody maps who does not launch but to wait at it.
pub const DOORBELL: u64 = 192;
/// Where in the file the attention word is: eight bytes that the node changes last.
pub const ATTENTION: u64 = 320;

/// A copy of a page, as the node read it from the file.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot<'a>(&'a [u8]);

/// What a snapshot says of one slot that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotReport {
    pub index: usize,
    pub owner: Owner,
    pub who: Identity,
    /// Bytes charged.
    pub held: u64,
    /// Operations in the middle of which the snapshot caught the owner.
    pub in_flight: u64,
    /// Of the bytes held: for contexts, as estimated.
    pub context: u64,
    /// Of the bytes held: managed memory.
    pub managed: u64,
    /// GPU time that it has charged, in nanoseconds.
    pub charged_ns: u64,
    /// How long its launches have waited for GPU time, in nanoseconds, all threads together.
    pub waited_ns: u64,
    /// What measured launches took, and what they would have taken at their fastest, in nanoseconds.
    pub measured_ns: u64,
    pub least_ns: u64,
    /// What of the charged time is for kernels longer than a time slice, in nanoseconds.
    pub long_ns: u64,
    /// What shorter ones took and were not charged though it may have been their own, in nanoseconds.
    pub spared_ns: u64,
    /// Open sessions of the video engines.
    pub encoders: u32,
    pub decoders: u32,
    /// Bytes that pools keep and do not use.
    pub idle: u64,
    /// What the node said last.
    pub line: NodeLine,
}

impl SlotReport {
    /// What the slot counts for: the bytes charged with the node's correction.
    pub fn weighs(&self) -> u64 {
        weighs(self.owner.0, self.held, self.line)
    }
}

impl<'a> Snapshot<'a> {
    /// A page read from its file: all of it, or as far as [`Snapshot::length`] says.
    /// Slots beyond the end of a shorter copy read as free.
    pub fn new(page: &'a [u8]) -> Result<Self, PageError> {
        check(page)?;
        if page.len() < HEADER { Err(PageError::Foreign) } else { Ok(Self(page)) }
    }

    /// How much of the file has to be read, going by its header.
    pub fn length(header: &[u8]) -> usize {
        let high = usize::try_from(word(header, 256)).unwrap_or(SLOTS);
        HEADER + high.min(SLOTS) * SLOT
    }

    /// The bytes charged, by the page's own word.
    pub fn used(&self) -> u64 {
        bytes(word(self.0, 64))
    }

    /// How often the total changed, modulo 2^20: a later snapshot with the same count saw no change.
    pub fn changes(&self) -> u64 {
        above(word(self.0, 64))
    }

    /// The balance of compute time, in nanoseconds.
    pub fn balance(&self) -> i64 {
        word(self.0, BALANCE as usize) as i64
    }

    /// When the balance was last refilled, in nanoseconds of the monotonic clock: by who launches.
    pub fn refilled(&self) -> u64 {
        word(self.0, BALANCE as usize + 8)
    }

    pub fn attention(&self) -> u64 {
        word(self.0, ATTENTION as usize)
    }

    pub fn counted(&self, fault: Fault) -> u64 {
        word(self.0, 384 + fault as usize * 64)
    }

    /// All slots but the free ones.
    pub fn slots(&self) -> impl Iterator<Item = SlotReport> + '_ {
        self.0.get(HEADER..).unwrap_or_default().chunks_exact(SLOT).take(SLOTS).enumerate().filter_map(
            |(index, slot)| {
                let owner = Owner(word(slot, 0));
                let held = word(slot, 8);
                (owner.state() != SlotState::Free).then(|| SlotReport {
                    index,
                    owner,
                    who: Identity {
                        pid: owner.pid(),
                        start: word(slot, 16),
                        namespace: word(slot, 24),
                        image: word(slot, 32),
                    },
                    held: bytes(held),
                    in_flight: above(held),
                    context: word(slot, 40),
                    managed: word(slot, 48),
                    charged_ns: word(slot, 64),
                    waited_ns: word(slot, 72),
                    measured_ns: word(slot, 80),
                    least_ns: word(slot, 88),
                    long_ns: word(slot, 192),
                    spared_ns: word(slot, 200),
                    encoders: word(slot, 96) as u32,
                    decoders: (word(slot, 96) >> 32) as u32,
                    idle: word(slot, 104),
                    line: NodeLine {
                        about: Owner(word(slot, 128)),
                        dead: word(slot, 136) & 1 == 1,
                        correction: word(slot, 144) as i64,
                        host_pid: word(slot, 152) as u32,
                    },
                })
            },
        )
    }

    /// What the living processes hold by their slots. On an honest page in which nothing
    /// is in flight, nobody died and nothing was corrected since, this is [`Snapshot::used`].
    pub fn sum(&self) -> u64 {
        self.slots()
            .filter(|slot| slot.owner.state() == SlotState::Live)
            .fold(0_u64, |sum, slot| sum.saturating_add(slot.weighs()))
    }
}

/// The word at an offset; zero beyond the end.
fn word(bytes: &[u8], offset: usize) -> u64 {
    bytes.get(offset..offset + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}
