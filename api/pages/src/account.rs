//! The account page: the usage of a share, written by its processes.
//!
//! It is one file of [`SIZE`] bytes with the total of the share and a slot per process. No lock
//! protects it; [`crate::charge()`] describes the protocol. **The node maps this file only to wait at
//! the doorbell.** A tenant can truncate the file, and any access to the mapping would then kill the
//! node daemon. The node reads copies ([`Snapshot`]) and writes its own line of a slot
//! ([`NodeLine`]), with plain writes to the file.

use crate::sync::{AtomicI64, AtomicU32, AtomicU64, Ordering::Relaxed, Ordering::SeqCst};
use crate::word::Word;
use crate::{MAJOR, MINOR};
use core::fmt;

/// The size of an account page, in bytes.
pub const SIZE: usize = HEADER + SLOTS * SLOT;
/// Offset of the first slot, in bytes.
pub const HEADER: usize = 4096;
/// The number of slots. A thousand processes may start CUDA at once, but far fewer contexts fit on
/// any device.
pub const SLOTS: usize = 1024;
/// The size of a slot, in bytes.
pub const SLOT: usize = 256;
/// The first eight bytes of an account page.
pub const MAGIC: [u8; 8] = *b"divvyacc";

/// A byte count uses the low 44 bits of its word (up to 16 TiB). The upper 20 bits count changes in
/// the total, and operations in flight in a slot.
const BYTES_MASK: u64 = (1 << 44) - 1;
pub(crate) const ONE_OPERATION: u64 = 1 << 44;

pub(crate) fn bytes(word: u64) -> u64 {
    word & BYTES_MASK
}

pub(crate) fn above(word: u64) -> u64 {
    word >> 44
}

/// `word` with its byte count replaced.
pub(crate) fn with_bytes(word: u64, bytes: u64) -> u64 {
    word & !BYTES_MASK | bytes.min(BYTES_MASK)
}

/// Errors inside the processes of a share. The page counts them for the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// An allocation was refused because the limit was reached.
    Refused,
    /// All slots belonged to living processes.
    NoSlot,
    /// Waiting for other processes of the share timed out.
    TimedOut,
    /// The table of allocations could not grow.
    TableFull,
    /// A process freed more than its slot holds.
    FreeUnderflow,
    /// The GPU driver returned an unexpected result.
    UnknownAnswer,
}

impl Fault {
    /// All, in the order of their counters.
    pub const ALL: [Self; 6] = [
        Self::Refused,
        Self::NoSlot,
        Self::TimedOut,
        Self::TableFull,
        Self::FreeUnderflow,
        Self::UnknownAnswer,
    ];
}

/// The identity of a process image. No two images have the same four values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The PID in the namespace of the process.
    pub pid: u32,
    /// The inode of its PID namespace.
    pub namespace: u64,
    /// Field 22 of `/proc/<pid>/stat`: the start time in clock ticks since boot.
    pub start: u64,
    /// Field 28 of `/proc/<pid>/stat`: the start of its stack, which exec changes. 0 if it is
    /// hidden.
    pub image: u64,
}

/// The state of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    Free,
    /// The owner is filling it in. It does not count yet.
    Claimed,
    Live,
    /// The owner is proven dead. It no longer counts.
    Dead,
}

/// The owner word of a slot: PID (bits 0 to 31), generation (32 to 47), state (48 to 55).
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

    /// Incremented for every new owner.
    pub fn generation(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// The state. Invalid values read as `Claimed`: such a slot counts for nothing and is never
    /// reused.
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

    /// The word of a free slot, for the next owner.
    pub(crate) fn next(self) -> Self {
        Self::new(0, self.generation().wrapping_add(1), SlotState::Free)
    }
}

/// Why a mapping or a file is not an account page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageError {
    /// Shorter than a page, not aligned, or without the magic.
    Foreign,
    /// A major version that this reader does not support.
    Major(u16),
    /// Another number or size of slots than in this version.
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

/// The header of a new page. A file of [`SIZE`] bytes with this header and zeros is a page without
/// charges.
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
        if let Some(space) = head.get_mut(offset..offset + value.len()) {
            space.copy_from_slice(value);
        }
    }
    head
}

/// Whether a page has a valid header.
///
/// # Errors
/// The magic, the major version or the layout differs.
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
///
/// ```text
///    0  magic, major and minor version, size, number of slots, size of a slot
///   64  total: bytes and a change counter
///  128  compute: balance, last refill, time up to which work is charged, sum of charges
///  192  doorbell, a futex word
///  256  how many slots were ever in use
///  320  attention counter: the node increments it after it wrote node lines
///  384  eight fault counters, each on its own cache line
/// 4096  1024 slots of 256 bytes
/// ```
///
/// The file is sparse: 16 slots use one page of memory.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct AccountPage {
    head: [Word; 8],
    pub(crate) total: Line,
    balance: AtomicI64,
    refilled_at: AtomicU64,
    charged_until: AtomicU64,
    charged_ns: AtomicU64,
    _compute: [Word; 4],
    doorbell: AtomicU32,
    _doorbell: [AtomicU32; 15],
    pub(crate) used_slots: Line,
    attention: Line,
    faults: [Counter; 8],
    _reserved: [Word; (HEADER - 384 - 8 * 64) / 8],
    pub(crate) slots: [Slot; SLOTS],
}

/// A word on its own cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Line {
    pub(crate) word: Word,
    _rest: [Word; 7],
}

/// A statistics counter on its own cache line. It takes no part in the protocol.
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
    /// The page mapped at `address`.
    ///
    /// # Safety
    /// `length` bytes at `address` must be mapped readable and writable for all of `'a`. Others may
    /// write them.
    #[allow(unsafe_code)]
    pub unsafe fn at<'a>(address: *mut u8, length: usize) -> Result<&'a Self, PageError> {
        if address.is_null() || !(address as usize).is_multiple_of(64) || length < SIZE {
            return Err(PageError::Foreign);
        }
        // SAFETY: aligned and long enough as checked above, mapped as the caller promises. The page
        // consists of atomics, so concurrent writers are no data race.
        let page = unsafe { &*address.cast::<Self>() };
        let mut head = [0; 64];
        for (word, space) in page.head.iter().zip(head.chunks_mut(8)) {
            space.copy_from_slice(&word.load().to_le_bytes());
        }
        check(&head).map(|()| page)
    }

    /// The bytes charged by all processes of the share.
    pub fn used(&self) -> u64 {
        bytes(self.total.word.load())
    }

    /// The attention counter. After it changed, call [`AccountPage::reconcile`] to apply the node
    /// lines.
    pub fn attention(&self) -> u64 {
        self.attention.word.load()
    }

    /// The balance of compute time, in nanoseconds.
    pub fn balance(&self) -> &AtomicI64 {
        &self.balance
    }

    /// Time of the last refill, in nanoseconds of the monotonic clock.
    pub fn refilled_at(&self) -> &AtomicU64 {
        &self.refilled_at
    }

    /// Charges work that ran from `begin` to `end`, in nanoseconds of the monotonic clock, and returns
    /// the nanoseconds that no process of the share was charged for before. So several processes
    /// are charged the union of their time, because the GPU serves one of them at a time.
    pub fn charge_interval(&self, begin: u64, end: u64) -> u64 {
        // A time far ahead is invalid.
        let is_valid = |until: u64| until < end.saturating_add(MAX_UNPAID_NS);
        let charged = |until: u64| (until < end || !is_valid(until)).then_some(end);
        let more = match self.charged_until.fetch_update(Relaxed, Relaxed, charged) {
            Ok(until) if is_valid(until) => end.saturating_sub(until.max(begin)),
            Ok(_) => end.saturating_sub(begin),
            Err(_) => 0,
        };
        self.charged_ns.fetch_add(more, Relaxed);
        more
    }

    /// The doorbell, a futex word. Processes ring it when the share becomes active and when it is
    /// first throttled.
    pub fn doorbell(&self) -> &AtomicU32 {
        &self.doorbell
    }

    pub fn count_fault(&self, fault: Fault) {
        if let Some(line) = self.faults.get(fault as usize) {
            line.count.fetch_add(1, Relaxed);
        }
    }

    /// The value of a fault counter.
    pub fn fault_count(&self, fault: Fault) -> u64 {
        self.faults.get(fault as usize).map_or(0, |line| line.count.load(Relaxed))
    }

    /// The slots that were ever in use.
    pub fn slots(&self) -> &[Slot] {
        let used_slots = usize::try_from(self.used_slots.word.load()).unwrap_or(SLOTS);
        self.slots.get(..used_slots).unwrap_or(&self.slots)
    }

    pub(crate) fn slot(&self, index: u16) -> Option<&Slot> {
        self.slots.get(usize::from(index))
    }
}

/// A process's part in a quantum of its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuantumState {
    /// It has work in flight.
    Working,
    /// It has none.
    Drained,
    /// It has none, and a launch waits for the next quantum.
    Waiting,
}

impl QuantumState {
    /// The word of a slot: the number of the quantum, and the state above it. It is nonzero, so a
    /// process whose library knows no quanta is told apart.
    fn with(self, number: u32) -> u64 {
        let state = match self {
            Self::Drained => 1,
            Self::Working => 2,
            Self::Waiting => 3,
        };
        u64::from(number) | state << 32
    }

    /// `None` for a library without quanta, or an unknown state.
    fn of(word: u64) -> Option<(Self, u32)> {
        let state = match word >> 32 {
            1 => Self::Drained,
            2 => Self::Working,
            3 => Self::Waiting,
            _ => return None,
        };
        Some((state, word as u32))
    }
}

/// Most GPU time, in nanoseconds, that a share is charged after a process died: for measured but
/// unpaid time, and for unmeasured time. Unpaid time exceeds the second only for long kernels. For
/// a process that lives longer than a second, NVML measures the rest.
const MAX_UNPAID_NS: u64 = 10_000_000_000;
const MAX_UNMEASURED_NS: u64 = 1_000_000_000;

/// The slot of one process: 256 bytes in four cache lines.
///
/// The process writes the first line (memory) and the second (compute). The node writes the third
/// ([`NodeLine`]). The process also writes the first two words of the fourth (since version 1.3);
/// the rest is reserved.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Slot {
    pub(crate) owner: Word,
    /// Charged bytes and the number of operations in flight.
    pub(crate) held: Word,
    start: Word,
    namespace: Word,
    image: Word,
    /// Charged bytes that are for contexts, as estimated.
    context: Word,
    /// Charged bytes that are managed memory, which need not be on the device.
    managed: Word,
    _memory: Word,
    charged: AtomicU64,
    waited: AtomicU64,
    /// Duration of measured launches, and their duration at each kernel's fastest run, in
    /// nanoseconds.
    measured: AtomicU64,
    least: AtomicU64,
    /// Open sessions of the video engines.
    encoders: AtomicU32,
    decoders: AtomicU32,
    /// Bytes that memory pools reserve but do not use.
    idle: AtomicU64,
    /// Measured but unpaid GPU time in nanoseconds, and the time since when unmeasured work may
    /// run.
    owed: AtomicU64,
    unmeasured: AtomicU64,
    pub(crate) node: [Word; 8],
    /// Charged time of kernels longer than a time slice, in nanoseconds.
    long: AtomicU64,
    /// Time of shorter kernels that was not charged although it may have been their own.
    spared: AtomicU64,
    /// The process's part in a quantum; see [`QuantumState`].
    quantum: AtomicU64,
    _reserved: [Word; 5],
}

const _: () = assert!(size_of::<Slot>() == SLOT);
const _: () = assert!(core::mem::offset_of!(Slot, node) == 128);

impl Slot {
    pub fn owner(&self) -> Owner {
        Owner(self.owner.load())
    }

    /// The identity that the owner wrote.
    pub fn identity(&self) -> Identity {
        Identity {
            pid: self.owner().pid(),
            namespace: self.namespace.load(),
            start: self.start.load(),
            image: self.image.load(),
        }
    }

    pub(crate) fn init(&self, identity: &Identity) {
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
        self.quantum.store(QuantumState::Drained.with(0), Relaxed);
        self.start.store(identity.start);
        self.namespace.store(identity.namespace);
        self.image.store(identity.image);
    }

    /// Adds to the charged bytes that are for contexts and that are managed memory.
    pub fn add_memory_use(&self, context: i64, managed: i64) {
        for (word, more) in [(&self.context, context), (&self.managed, managed)] {
            if more != 0 {
                word.update(|sum| sum.saturating_add_signed(more));
            }
        }
    }

    pub(crate) fn managed(&self) -> u64 {
        self.managed.load()
    }

    /// Adds to the charged GPU time and to the throttled time, both in nanoseconds.
    pub fn add_gpu_time(&self, charged: i64, waited: u64) {
        self.charged.fetch_add(charged as u64, Relaxed);
        self.waited.fetch_add(waited, Relaxed);
    }

    /// Adds measurements of launches, in nanoseconds: the measured duration, the duration at each
    /// kernel's fastest run, the charged time of long kernels, and the uncharged time of short
    /// ones. If the first exceeds the second for long, the device has to page in memory. Long
    /// kernels, which exceed a time slice, look longer than they are next to other processes. Short
    /// kernels are undercharged if others may have run meanwhile.
    pub fn add_measured(&self, [took, least, long, spared]: [u64; 4]) {
        self.measured.fetch_add(took, Relaxed);
        self.least.fetch_add(least, Relaxed);
        self.long.fetch_add(long, Relaxed);
        self.spared.fetch_add(spared, Relaxed);
    }

    /// Sets the measured GPU time, in nanoseconds, that later launches will pay. The share is
    /// charged for it if the process dies.
    pub fn set_unpaid(&self, nanoseconds: u64) {
        self.owed.store(nanoseconds, Relaxed);
    }

    /// Sets the time, in nanoseconds of the monotonic clock, since when work runs that is not
    /// measured and may exceed its charge; 0 if there is none. If the process dies, the share is
    /// charged from that time on.
    pub fn set_unmeasured_since(&self, since: u64) {
        self.unmeasured.store(since, Relaxed);
    }

    /// Sets the process's part in a quantum. Ordered with reads of the policy page: a process that
    /// says that it works and then still finds its quantum there is waited for.
    pub fn set_quantum(&self, state: QuantumState, number: u32) {
        self.quantum.store(state.with(number), SeqCst);
    }

    /// GPU time to charge to the share if the owner just died: measured but unpaid nanoseconds, and
    /// the begin and end of unmeasured work. `now` is the monotonic clock in nanoseconds.
    pub(crate) fn unpaid(&self, now: u64) -> (u64, (u64, u64)) {
        let unmeasured = match self.unmeasured.load(Relaxed) {
            0 => (now, now),
            since => (since, now.min(since.saturating_add(MAX_UNMEASURED_NS))),
        };
        (self.owed.load(Relaxed).min(MAX_UNPAID_NS), unmeasured)
    }

    /// The node reported that the owner is dead.
    pub fn is_declared_dead(&self) -> bool {
        let line = self.line();
        line.dead && line.owner == self.owner()
    }

    /// Open sessions of the encoder and of the decoder.
    pub fn codec_sessions(&self) -> [&AtomicU32; 2] {
        [&self.encoders, &self.decoders]
    }

    /// Sets the bytes that memory pools reserve but do not use.
    pub fn set_idle_pool_bytes(&self, bytes: u64) {
        self.idle.store(bytes, Relaxed);
    }

    /// The bytes for which the slot counts: the charge plus the correction of the node.
    pub fn effective_bytes(&self) -> u64 {
        effective_bytes(self.owner.load(), self.held.load(), self.line())
    }

    /// The owner's PID on the host; 0 if the node has not found it.
    pub fn host_pid(&self) -> u32 {
        let line = self.line();
        if line.owner.0 == self.owner.load() { line.host_pid } else { 0 }
    }

    pub(crate) fn line(&self) -> NodeLine {
        let [owner, flags, correction, host_pid, ..] = &self.node;
        NodeLine {
            owner: Owner(owner.load()),
            dead: flags.load() & 1 == 1,
            correction: correction.load() as i64,
            host_pid: host_pid.load() as u32,
        }
    }
}

pub(crate) fn effective_bytes(owner: u64, held: u64, line: NodeLine) -> u64 {
    let correction = if line.owner.0 == owner { line.correction } else { 0 };
    bytes(held).saturating_add_signed(correction).min(BYTES_MASK)
}

/// A report of the node about the owner of a slot: 64 bytes that only the node writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeLine {
    /// The owner word that the line is about. It is ignored for any other owner.
    pub owner: Owner,
    /// The owner is dead. The node can tell this for processes in any PID namespace.
    pub dead: bool,
    /// Bytes that the process uses beyond its charge; negative if it uses less. It is the driver's
    /// measurement minus the charged bytes without managed memory.
    pub correction: i64,
    /// The owner's PID on the host; 0 if it was not found.
    pub host_pid: u32,
}

impl NodeLine {
    /// Offset of the line of a slot in the file, in bytes.
    pub const fn offset(slot: usize) -> u64 {
        (HEADER + slot * SLOT + 128) as u64
    }

    /// The line in its file format.
    pub fn encode(&self) -> [u8; 64] {
        let words = [self.owner.0, u64::from(self.dead), self.correction as u64, u64::from(self.host_pid)];
        let mut line = [0; 64];
        for (space, word) in line.chunks_mut(8).zip(words) {
            space.copy_from_slice(&word.to_le_bytes());
        }
        line
    }
}

/// Offset of the balance: eight bytes. The node overwrites a forged balance.
pub const BALANCE: u64 = 128;
/// Offset of the doorbell: a four-byte futex word. The node maps it only to wait there.
pub const DOORBELL: u64 = 192;
/// Offset of the attention counter: eight bytes, which the node writes last.
pub const ATTENTION: u64 = 320;

/// A copy of a page that the node read from the file.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot<'a>(&'a [u8]);

/// The content of a slot that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotReport {
    pub index: usize,
    pub owner: Owner,
    pub identity: Identity,
    /// Bytes charged.
    pub held: u64,
    /// Operations of the owner that were in flight when the copy was made.
    pub in_flight: u64,
    /// Charged bytes that are for contexts, as estimated.
    pub context: u64,
    /// Charged bytes that are managed memory.
    pub managed: u64,
    /// GPU time charged by the process, in nanoseconds.
    pub charged_ns: u64,
    /// Time for which its launches were throttled, in nanoseconds, summed over all threads.
    pub waited_ns: u64,
    /// Duration of measured launches, and their duration at each kernel's fastest run, in
    /// nanoseconds.
    pub measured_ns: u64,
    pub fastest_ns: u64,
    /// Charged time that is for kernels longer than a time slice, in nanoseconds.
    pub long_kernel_ns: u64,
    /// Time of shorter kernels that was not charged although it may have been their own, in
    /// nanoseconds.
    pub undercharged_ns: u64,
    /// The process's part in a quantum, and its number. `None` if its library knows no quanta.
    pub quantum: Option<(QuantumState, u32)>,
    /// Open sessions of the video engines.
    pub encoders: u32,
    pub decoders: u32,
    /// Bytes that memory pools reserve but do not use.
    pub idle_pool_bytes: u64,
    /// The last line that the node wrote.
    pub node_line: NodeLine,
}

impl SlotReport {
    /// The bytes for which the slot counts: the charge plus the correction of the node.
    pub fn effective_bytes(&self) -> u64 {
        effective_bytes(self.owner.0, self.held, self.node_line)
    }
}

impl<'a> Snapshot<'a> {
    /// A page read from its file, with at least the [`Snapshot::length`] first bytes. Slots beyond
    /// the end of a shorter copy count as free.
    ///
    /// # Errors
    /// The bytes have no valid header.
    pub fn new(page: &'a [u8]) -> Result<Self, PageError> {
        check(page)?;
        if page.len() < HEADER { Err(PageError::Foreign) } else { Ok(Self(page)) }
    }

    /// How many bytes of the file must be read, according to its header.
    pub fn length(header: &[u8]) -> usize {
        let used_slots = usize::try_from(word(header, 256)).unwrap_or(SLOTS);
        HEADER + used_slots.min(SLOTS) * SLOT
    }

    /// The bytes charged, according to the total.
    pub fn used(&self) -> u64 {
        bytes(word(self.0, 64))
    }

    /// Number of changes of the total, modulo 2^20. Two copies with the same number had no change
    /// in between.
    pub fn total_changes(&self) -> u64 {
        above(word(self.0, 64))
    }

    /// The balance of compute time, in nanoseconds.
    pub fn balance(&self) -> i64 {
        word(self.0, BALANCE as usize) as i64
    }

    /// The doorbell.
    pub fn doorbell(&self) -> u32 {
        word(self.0, DOORBELL as usize) as u32
    }

    /// GPU time that the share was charged under exclusive quanta, in nanoseconds.
    pub fn charged_ns(&self) -> u64 {
        word(self.0, BALANCE as usize + 24)
    }

    /// Time of the last refill by a process, in nanoseconds of the monotonic clock.
    pub fn refilled_at(&self) -> u64 {
        word(self.0, BALANCE as usize + 8)
    }

    pub fn attention(&self) -> u64 {
        word(self.0, ATTENTION as usize)
    }

    pub fn fault_count(&self, fault: Fault) -> u64 {
        word(self.0, 384 + fault as usize * 64)
    }

    /// All slots except free ones.
    pub fn slots(&self) -> impl Iterator<Item = SlotReport> + '_ {
        self.0.get(HEADER..).unwrap_or_default().chunks_exact(SLOT).take(SLOTS).enumerate().filter_map(
            |(index, slot)| {
                let owner = Owner(word(slot, 0));
                let held = word(slot, 8);
                (owner.state() != SlotState::Free).then(|| SlotReport {
                    index,
                    owner,
                    identity: Identity {
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
                    fastest_ns: word(slot, 88),
                    long_kernel_ns: word(slot, 192),
                    undercharged_ns: word(slot, 200),
                    quantum: QuantumState::of(word(slot, 208)),
                    encoders: word(slot, 96) as u32,
                    decoders: (word(slot, 96) >> 32) as u32,
                    idle_pool_bytes: word(slot, 104),
                    node_line: NodeLine {
                        owner: Owner(word(slot, 128)),
                        dead: word(slot, 136) & 1 == 1,
                        correction: word(slot, 144) as i64,
                        host_pid: word(slot, 152) as u32,
                    },
                })
            },
        )
    }

    /// The sum over the slots of living processes. It equals [`Snapshot::used`] on an honest page
    /// without operations in flight, unreported deaths or new corrections.
    pub fn live_sum(&self) -> u64 {
        self.slots()
            .filter(|slot| slot.owner.state() == SlotState::Live)
            .fold(0_u64, |sum, slot| sum.saturating_add(slot.effective_bytes()))
    }
}

/// The word at an offset; 0 beyond the end.
fn word(bytes: &[u8], offset: usize) -> u64 {
    bytes.get(offset..offset + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_account_page_matches_the_golden_file() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/account-1.4.hex");
        crate::golden::check(path, &fresh());
    }

    #[test]
    fn processes_are_charged_the_union_of_their_time() {
        let mut bytes = vec![0_u64; SIZE / 8 + 8];
        let at = bytes.as_mut_ptr().cast::<u8>();
        let at = at.wrapping_add(at.align_offset(64));
        let page = {
            // SAFETY: `SIZE` bytes from `at` are in the vector.
            #[allow(unsafe_code)]
            unsafe {
                core::ptr::copy_nonoverlapping(fresh().as_ptr(), at, 64);
                AccountPage::at(at, SIZE)
            }
        };
        let page = page.expect("a page");
        let charge = |(begin, end)| page.charge_interval(begin, end);
        let intervals = [(10, 20), (15, 30), (12, 18), (30, 30), (40, 50)];
        assert_eq!(intervals.map(charge), [10, 10, 0, 0, 10]);
        page.charged_until.store(u64::MAX, Relaxed);
        assert_eq!([(45, 60), (50, 70)].map(charge), [15, 10], "an invalid time");
    }

    #[test]
    fn any_minor_is_accepted_and_other_majors_are_not() {
        let page = |offset: usize, number: u16| {
            let mut page = fresh();
            page[offset..offset + 2].copy_from_slice(&number.to_le_bytes());
            check(&page)
        };
        assert_eq!([0, 1, 2, MINOR + 1].map(|minor| page(10, minor)), [Ok(()); 4]);
        assert_eq!(page(8, 2), Err(PageError::Major(2)));
    }
}
