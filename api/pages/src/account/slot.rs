//! What one process of a share says of itself, and what the node says of it: 256 bytes of the account page.
//!
//! Two cache lines are the process's own to write, memory and compute; the third is the node's ([`NodeLine`]), and of the last, the
//! process's again, all but two words are reserved.

use super::node::NodeLine;
use super::{BYTES, Identity, Owner, SLOT, bytes};
use crate::sync::{AtomicU32, AtomicU64, Ordering::Relaxed};
use crate::word::Word;

/// The most GPU time, in nanoseconds, that a share is charged for what a dead process of it was measured to have had and
/// had not paid, and for what nobody measured. The first is long for long kernels only; of a process that lives for
/// longer than the second the node knows by NVML what it had.
const OWED: u64 = 10_000_000_000;
const UNMEASURED: u64 = 1_000_000_000;

/// What one process holds.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Slot {
    pub(crate) owner: Word,
    /// Bytes charged, and the operations in flight.
    pub(crate) held: Word,
    start: Word,
    namespace: Word,
    image: Word,
    /// Of the bytes held: for contexts, as estimated.
    context: Word,
    /// Of the bytes held: managed memory, which need not be on the device.
    managed: Word,
    _memory: Word,
    charged: AtomicU64,
    waited: AtomicU64,
    /// What measured launches took, and what they would have taken had each been as fast as the fastest of its kernel.
    measured: AtomicU64,
    least: AtomicU64,
    /// Open sessions of the video engines.
    encoders: AtomicU32,
    decoders: AtomicU32,
    /// Bytes that pools keep and do not use.
    idle: AtomicU64,
    /// GPU time that was measured and not paid yet, and since when work may run that was neither.
    owed: AtomicU64,
    unmeasured: AtomicU64,
    pub(crate) node: [Word; 8],
    /// Of what measured launches counted as: those of kernels longer than a time slice.
    long: AtomicU64,
    /// What they took and did not count as, where it may have been the kernel's own.
    spared: AtomicU64,
    _reserved: [Word; 6],
}

const _: () = assert!(size_of::<Slot>() == SLOT);
const _: () = assert!(core::mem::offset_of!(Slot, node) == 128);

impl Slot {
    pub fn owner(&self) -> Owner {
        Owner(self.owner.load())
    }

    /// Who the owner says it is.
    pub fn identity(&self) -> Identity {
        Identity {
            pid: self.owner().pid(),
            namespace: self.namespace.load(),
            start: self.start.load(),
            image: self.image.load(),
        }
    }

    pub(crate) fn introduce(&self, who: &Identity) {
        self.held.store(0);
        self.context.store(0);
        self.managed.store(0);
        self.charged.store(0, Relaxed);
        self.waited.store(0, Relaxed);
        self.measured.store(0, Relaxed);
        self.least.store(0, Relaxed);
        self.long.store(0, Relaxed);
        self.spared.store(0, Relaxed);
        self.encoders.store(0, Relaxed);
        self.decoders.store(0, Relaxed);
        self.idle.store(0, Relaxed);
        self.owed.store(0, Relaxed);
        self.unmeasured.store(0, Relaxed);
        self.start.store(who.start);
        self.namespace.store(who.namespace);
        self.image.store(who.image);
    }

    /// Adds to what of the bytes held is for contexts and for managed memory.
    pub fn note(&self, context: i64, managed: i64) {
        for (word, more) in [(&self.context, context), (&self.managed, managed)] {
            if more != 0 {
                word.update(|sum| sum.saturating_add_signed(more));
            }
        }
    }

    pub(crate) fn managed(&self) -> u64 {
        self.managed.load()
    }

    /// Adds to the GPU time that the process has charged, and to the time that its launches
    /// have waited for more; both in nanoseconds, for the node to see.
    pub fn worked(&self, charged: i64, waited: u64) {
        self.charged.fetch_add(charged as u64, Relaxed);
        self.waited.fetch_add(waited, Relaxed);
    }

    /// Adds what measured launches took, and what they would have at their fastest, in nanoseconds: far more
    /// for long is what a device looks like that has to fetch memory before it works. And what of what they were charged is for
    /// kernels longer than a time slice, which look longer than they are where others work; and what shorter ones took and
    /// were not charged, where nobody can tell whether others did.
    pub fn measured(&self, [took, least, long, spared]: [u64; 4]) {
        self.measured.fetch_add(took, Relaxed);
        self.least.fetch_add(least, Relaxed);
        self.long.fetch_add(long, Relaxed);
        self.spared.fetch_add(spared, Relaxed);
    }

    /// Says how many nanoseconds of GPU time were measured and are to be paid with later launches: what the share is
    /// charged if there are none, as the process dies.
    pub fn owes(&self, nanoseconds: u64) {
        self.owed.store(nanoseconds, Relaxed);
    }

    /// Says since when, in nanoseconds of the monotonic clock, work may run that is not measured and takes longer than was
    /// charged for it; 0: there is none. If the process dies the share is charged from then on.
    pub fn unmeasured(&self, since: u64) {
        self.unmeasured.store(since, Relaxed);
    }

    /// What the share is to be charged if the owner has just died, in nanoseconds of GPU time; `now` of the monotonic clock.
    pub(crate) fn unpaid(&self, now: u64) -> u64 {
        let unmeasured = match self.unmeasured.load(Relaxed) {
            0 => 0,
            since => now.saturating_sub(since).min(UNMEASURED),
        };
        self.owed.load(Relaxed).min(OWED) + unmeasured
    }

    /// The node has said that its owner is dead.
    pub fn is_told_dead(&self) -> bool {
        let line = self.line();
        line.dead && line.about == self.owner()
    }

    /// Open sessions of the encoder and the decoder.
    pub fn sessions(&self) -> [&AtomicU32; 2] {
        [&self.encoders, &self.decoders]
    }

    /// Says how many bytes pools keep and do not use.
    pub fn note_idle(&self, bytes: u64) {
        self.idle.store(bytes, Relaxed);
    }

    /// What the slot counts for: the bytes charged, corrected by what the node measured.
    pub fn weighs(&self) -> u64 {
        weighs(self.owner.load(), self.held.load(), self.line())
    }

    /// The owner's pid on the host, where the node has found it; otherwise 0.
    pub fn host_pid(&self) -> u32 {
        let line = self.line();
        if line.about.0 == self.owner.load() { line.host_pid } else { 0 }
    }

    pub(crate) fn line(&self) -> NodeLine {
        let [about, flags, correction, host_pid, ..] = &self.node;
        NodeLine {
            about: Owner(about.load()),
            dead: flags.load() & 1 == 1,
            correction: correction.load() as i64,
            host_pid: host_pid.load() as u32,
        }
    }
}

pub(crate) fn weighs(owner: u64, held: u64, line: NodeLine) -> u64 {
    let correction = if line.about.0 == owner { line.correction } else { 0 };
    bytes(held).saturating_add_signed(correction).min(BYTES)
}
