//! The mapped policy page: the node writes it while processes of the containers read it.
//!
//! It consists of atomic words. The policy is read as a whole from the newest valid copy. The
//! fields that the node changes in place (gate, throttle word, grant, trim request) are one word
//! each.

use super::{COPIES, COPY_BYTES, Policy, PolicyError, SIZE, THROTTLE, check};
use crate::sync::{AtomicU32, Ordering::SeqCst};
use crate::word::Word;

/// Bits of the throttle word: the record limits the rate; the agent limits the rate; all higher
/// bits hold the number of the wakeup request.
const RECORD_LIMITED: u32 = 1;
const AGENT_LIMITED: u32 = 2;
const WAKEUP_SHIFT: u32 = 2;

/// A mapped policy page, which others may write concurrently.
///
/// ```text
///    0  magic, major and minor version, size
///   64  gate (a futex word), throttle word
///   72  stamp, incremented after each change of the policy
///   80  granted rate, end of the grant, time at which the gate opens
///  104  trim request (a futex word), whether usage is unattributed
///  112  number of the quantum (a futex word), whether launches need a quantum
///  128  two words of state that the agent keeps for its successor
///  144  end of the quantum, time until which quanta count
/// 1024  first copy of the record, 1024 bytes
/// 2048  second copy of the record
/// ```
///
/// Everything else is zero and reserved.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct PolicyPage {
    head: [Word; 8],
    gate: AtomicU32,
    throttle: AtomicU32,
    stamp: Word,
    rate: Word,
    until: Word,
    closed_until: Word,
    trim: AtomicU32,
    unattributed: AtomicU32,
    quantum: AtomicU32,
    exclusive: AtomicU32,
    _line: [AtomicU32; 2],
    agent_state: [Word; 2],
    quantum_ends: Word,
    quanta_expire: Word,
    _reserved: [Word; 108],
    copies: [[Word; COPY_BYTES / 8]; 2],
    _tail: [Word; 128],
}

const _: () = assert!(size_of::<PolicyPage>() == SIZE);
const _: () = assert!(core::mem::offset_of!(PolicyPage, gate) == 64);
const _: () = assert!(core::mem::offset_of!(PolicyPage, throttle) == THROTTLE);
const _: () = assert!(core::mem::offset_of!(PolicyPage, agent_state) == 128);
const _: () = assert!(core::mem::offset_of!(PolicyPage, copies) == COPIES[0]);

impl PolicyPage {
    /// The page mapped at `address`; `None` if the address is not aligned to 64 bytes or the
    /// mapping is shorter than [`SIZE`].
    ///
    /// # Safety
    /// `length` bytes at `address` must be mapped readable for all of `'a`, and writable if a
    /// method that writes is called. Others may write them.
    #[allow(unsafe_code)]
    pub unsafe fn at<'a>(address: *const u8, length: usize) -> Option<&'a Self> {
        if address.is_null() || !(address as usize).is_multiple_of(64) || length < SIZE {
            return None;
        }
        // SAFETY: aligned and long enough as checked above, mapped as the caller promises. The page
        // consists of atomics, so concurrent writers are no data race.
        Some(unsafe { &*address.cast::<Self>() })
    }

    /// The newest valid copy, with its generation.
    #[cold]
    pub fn read(&self) -> Result<(u64, Policy), PolicyError> {
        let mut head = [0; 64];
        copy_out(&self.head, &mut head);
        check(&head)?;
        // One copy at a time, to use little of the program's stack.
        let copies = self.copies.iter().filter(|copy| copy[0].load() > 0).filter_map(|copy| {
            let mut space = [0; COPY_BYTES];
            copy_out(copy, &mut space);
            Policy::from_record(&space)
        });
        copies.max_by_key(|(generation, _)| *generation).ok_or(PolicyError::Damaged)
    }

    /// Writes `policy` as the next generation and returns its number. There must be one writer at a
    /// time: the caller holds a lock.
    ///
    /// # Errors
    /// The page holds no valid policy.
    pub fn replace(&self, policy: &Policy) -> Result<u64, PolicyError> {
        let (newest, _) = self.read()?;
        let generation = newest.saturating_add(1);
        let record = policy.record(generation);
        // The copy that does not hold the newest generation.
        let older = self.copies.iter().find(|copy| copy[0].load() != newest).ok_or(PolicyError::Damaged)?;
        for (word, bytes) in older.iter().zip(record.chunks(8)) {
            word.store(bytes.try_into().map_or(0, u64::from_le_bytes));
        }
        let is_limited = u32::from(policy.compute.is_limited());
        // The bits of the agent are kept. A share that loses its limit while it has a grant stays
        // throttled until the agent ends that. Otherwise it could queue a thousand launches at once
        // and be in debt for all of them.
        let is_granted = self.until.load() > 0;
        let limited = |word| {
            let keep = is_granted && is_limited == 0 && word & RECORD_LIMITED != 0;
            Some(word & !RECORD_LIMITED | is_limited | if keep { AGENT_LIMITED } else { 0 })
        };
        let _ = self.throttle.fetch_update(SeqCst, SeqCst, limited);
        self.stamp.update(|stamp| stamp.wrapping_add(1));
        Ok(generation)
    }

    /// Changes whenever the policy changes: one load tells that it did not.
    pub fn stamp(&self) -> u64 {
        self.stamp.load()
    }

    /// The gate, a futex word: 0 is open, 1 closed, 2 draining.
    pub fn gate(&self) -> &AtomicU32 {
        &self.gate
    }

    /// The address of gate and throttle word as one 64-bit word. It is zero if a launch may go
    /// straight to the driver, so the most frequent call checks only this.
    pub fn launch_word(&self) -> *const u64 {
        (&raw const self.gate).cast()
    }

    /// Whether launches are throttled: by the record, or because the agent divides the time of the
    /// device.
    pub fn is_rate_limited(&self) -> bool {
        self.throttle.load(SeqCst) & (RECORD_LIMITED | AGENT_LIMITED) != 0
    }

    /// The whole throttle word. While it is unchanged, [`PolicyPage::is_rate_limited`] and
    /// [`PolicyPage::wakeup_request`] are too.
    pub fn throttle_word(&self) -> u32 {
        self.throttle.load(SeqCst)
    }

    /// For the agent: sets whether launches are throttled even if the record sets no limit.
    pub fn set_agent_limited(&self, is_divided: bool) {
        let divided = |word| Some(word & !AGENT_LIMITED | if is_divided { AGENT_LIMITED } else { 0 });
        let _ = self.throttle.fetch_update(SeqCst, SeqCst, divided);
    }

    /// For the agent: whether it throttles launches.
    pub fn is_agent_limited(&self) -> bool {
        self.throttle.load(SeqCst) & AGENT_LIMITED != 0
    }

    /// The number of the current wakeup request; 0 if there is none. A process that launches and
    /// has not answered this number rings the doorbell of the account page, once.
    pub fn wakeup_request(&self) -> u32 {
        self.throttle.load(SeqCst) >> WAKEUP_SHIFT
    }

    /// For the agent: requests a wakeup at the next launch, with a new number, or withdraws the
    /// request.
    pub fn request_wakeup(&self, is_asked: bool, number: u32) {
        let number = if is_asked { number.wrapping_shl(WAKEUP_SHIFT).max(1 << WAKEUP_SHIFT) } else { 0 };
        let asked = |word| Some(word & (RECORD_LIMITED | AGENT_LIMITED) | number);
        let _ = self.throttle.fetch_update(SeqCst, SeqCst, asked);
    }

    /// When the gate opens, in nanoseconds of the monotonic clock. It is open then whatever the
    /// word says, since a node daemon that has exited cannot open it.
    pub fn gate_closed_until(&self) -> u64 {
        self.closed_until.load()
    }

    /// For the agent: closes the gate until that time, or opens it if `until` is 0. The caller must
    /// wake the waiters at the futex [`PolicyPage::gate`].
    pub fn close_gate_until(&self, until: u64) {
        self.closed_until.store(until);
        self.gate.store(u32::from(until > 0), SeqCst);
    }

    /// A futex word. The node changes it to request that unused pool memory is released.
    pub fn trim(&self) -> &AtomicU32 {
        &self.trim
    }

    /// Whether the agent that grants cannot attribute GPU usage to this share. Then the library
    /// charges all measured time, because the agent could not correct what is left out.
    pub fn is_unattributed(&self) -> bool {
        self.unattributed.load(SeqCst) != 0
    }

    /// For the agent: sets whether usage is unattributed.
    pub fn set_unattributed(&self, is_doubted: bool) {
        self.unattributed.store(is_doubted.into(), SeqCst);
    }

    /// The granted rate, in nanoseconds of GPU time per second; `None` means the rate of the
    /// record. `now` is the monotonic clock in nanoseconds. Grants expire, because they depend on
    /// the other shares, and a node daemon that has exited cannot update them. See
    /// [`UNBOUNDED`](super::UNBOUNDED).
    pub fn granted(&self, now: u64) -> Option<u64> {
        (now < self.until.load()).then(|| self.rate.load())
    }

    /// Grants a rate until that time. There must be one writer.
    pub fn grant(&self, rate: u64, until: u64) {
        self.rate.store(rate);
        self.until.store(until);
    }

    /// The number of the quantum in which the share may launch, a futex word; 0 if it may not.
    pub fn quantum(&self) -> &AtomicU32 {
        &self.quantum
    }

    /// Whether launches need a quantum.
    pub fn is_exclusive(&self) -> bool {
        self.exclusive.load(SeqCst) != 0
    }

    /// When the quantum ends, in nanoseconds of the monotonic clock; 0 while no other share waits.
    pub fn quantum_ends(&self) -> u64 {
        self.quantum_ends.load()
    }

    /// Until when quanta count, in nanoseconds of the monotonic clock. A node daemon that has exited
    /// grants none, so after that time the share launches by its own token bucket.
    pub fn quanta_expire(&self) -> u64 {
        self.quanta_expire.load()
    }

    /// For the agent: sets whether launches need a quantum.
    pub fn set_exclusive(&self, is_exclusive: bool) {
        self.exclusive.store(is_exclusive.into(), SeqCst);
    }

    /// For the agent: extends the time until which quanta count.
    pub fn set_quanta_expire(&self, until: u64) {
        self.quanta_expire.store(until);
    }

    /// For the agent: grants a quantum with a new number, or none if `number` is 0. The caller must
    /// wake the waiters at the futex [`PolicyPage::quantum`].
    pub fn grant_quantum(&self, number: u32, ends: u64) {
        self.quantum_ends.store(ends);
        self.quantum.store(number, SeqCst);
    }

    /// For the agent: changes when the current quantum ends.
    pub fn end_quantum_at(&self, ends: u64) {
        self.quantum_ends.store(ends);
    }

    /// For the agent: stores state for its successor, in its own format. It is zero in a new page,
    /// and containers do not use it.
    pub fn set_agent_state(&self, words: [u64; 2]) {
        self.agent_state.iter().zip(words).for_each(|(state, word)| state.store(word));
    }

    pub fn agent_state(&self) -> [u64; 2] {
        self.agent_state.each_ref().map(Word::load)
    }
}

fn copy_out(words: &[Word], bytes: &mut [u8]) {
    for (word, space) in words.iter().zip(bytes.as_chunks_mut().0) {
        *space = word.load().to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::super::take;
    use super::super::tests::sample;
    use super::*;
    use crate::Compute;

    /// A page as a writer has it mapped.
    fn mapped(bytes: [u8; SIZE]) -> Box<PolicyPage> {
        let words = |start: usize| -> u64 { take(&bytes, start).map_or(0, u64::from_le_bytes) };
        Box::new(PolicyPage {
            head: core::array::from_fn(|i| Word::new(words(i * 8))),
            gate: AtomicU32::new(0),
            throttle: AtomicU32::new(words(64).wrapping_shr(32) as u32),
            stamp: Word::new(words(72)),
            rate: Word::new(words(80)),
            until: Word::new(words(88)),
            closed_until: Word::new(words(96)),
            trim: AtomicU32::new(0),
            unattributed: AtomicU32::new(0),
            quantum: AtomicU32::new(0),
            exclusive: AtomicU32::new(0),
            _line: Default::default(),
            agent_state: Default::default(),
            quantum_ends: Word::default(),
            quanta_expire: Word::default(),
            _reserved: core::array::from_fn(|_| Word::default()),
            copies: core::array::from_fn(|c| core::array::from_fn(|i| Word::new(words(COPIES[c] + i * 8)))),
            _tail: core::array::from_fn(|_| Word::default()),
        })
    }

    #[test]
    fn newest_valid_copy_is_read() {
        let page = mapped(sample().encode());
        let mut lower = sample();
        for generation in 2..6 {
            lower.memory.limit -= 1 << 20;
            let stamp = page.stamp();
            assert_eq!(page.replace(&lower), Ok(generation));
            assert_ne!(page.stamp(), stamp);
            assert_eq!(page.read(), Ok((generation, lower)));
            assert!(page.is_rate_limited());
        }
        lower.compute = Compute { cores: 0, ceiling: 0, ..lower.compute };
        assert_eq!(page.replace(&lower), Ok(6));
        assert!(!page.is_rate_limited());
        // A writer died while it wrote generation 7, so generation 6 stays valid.
        let dying = page.copies.iter().find(|copy| copy[0].load() != 6).expect("two copies");
        dying[0].store(7);
        dying[20].store(0x1234);
        assert_eq!(page.read(), Ok((6, lower)));
        // The next writer reuses that copy.
        assert_eq!(page.replace(&sample()), Ok(7));
        assert_eq!(page.read(), Ok((7, sample())));
        assert!(page.is_rate_limited());
    }

    #[test]
    fn share_without_limit_stays_throttled_by_agent() {
        let page = mapped(sample().encode());
        page.grant(5, 7);
        let unlimited = Policy { compute: Compute::default(), ..sample() };
        assert_eq!(page.replace(&unlimited), Ok(2));
        assert_eq!((page.is_rate_limited(), page.is_agent_limited()), (true, true));
        page.set_agent_limited(false);
        assert_eq!(page.replace(&unlimited), Ok(3));
        assert_eq!((page.is_rate_limited(), page.is_agent_limited()), (false, false));
    }

    #[test]
    fn agent_bits_survive_a_policy_change() {
        let page = mapped(sample().encode());
        let unlimited = Policy { compute: Compute::default(), ..sample() };
        assert_eq!(page.replace(&unlimited), Ok(2));
        assert_eq!((page.is_rate_limited(), page.wakeup_request()), (false, 0));
        page.set_agent_limited(true);
        page.request_wakeup(true, 7);
        assert_eq!(page.replace(&unlimited), Ok(3));
        assert_eq!((page.is_rate_limited(), page.wakeup_request()), (true, 7));
        page.set_agent_limited(false);
        assert_eq!((page.is_rate_limited(), page.wakeup_request()), (false, 7));
        page.request_wakeup(true, 0);
        assert_ne!(page.wakeup_request(), 0, "0 means no request");
        page.request_wakeup(false, 9);
        assert_eq!(page.wakeup_request(), 0);
        page.close_gate_until(5);
        assert_eq!((page.gate().load(SeqCst), page.gate_closed_until()), (1, 5));
        page.close_gate_until(0);
        assert_eq!((page.gate().load(SeqCst), page.gate_closed_until()), (0, 0));
    }

    #[test]
    fn quantum_is_granted_and_ended() {
        let page = mapped(sample().encode());
        assert_eq!((page.is_exclusive(), page.quantum().load(SeqCst), page.quantum_ends()), (false, 0, 0));
        page.set_exclusive(true);
        page.grant_quantum(7, 100);
        page.set_quanta_expire(900);
        page.end_quantum_at(50);
        assert_eq!((page.is_exclusive(), page.quantum().load(SeqCst)), (true, 7));
        assert_eq!((page.quantum_ends(), page.quanta_expire()), (50, 900));
    }

    #[test]
    fn grant_expires() {
        let page = mapped(sample().encode());
        assert_eq!(page.granted(0), None);
        page.grant(500, 1000);
        assert_eq!([page.granted(999), page.granted(1000)], [Some(500), None]);
    }
}
