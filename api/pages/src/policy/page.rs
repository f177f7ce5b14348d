//! The policy page as those have it who map it: the node, which writes it, and the
//! processes of the container, which read it at the same time.
//!
//! All of it is atomic words. The policy is read as a whole from the newest whole copy;
//! what the node changes in place (gate, whether launches are paced, grant, wishes) is one word
//! each.

use super::{COPIES, PACED, Policy, PolicyError, ROOM, SIZE, check};
use crate::sync::{AtomicU32, Ordering::SeqCst};
use crate::word::Word;

/// Bits of the word that says whether launches are paced: by the record; by the agent; and from here on the number of
/// the agent's call.
const LIMITED: u32 = 1;
const DIVIDED: u32 = 2;
const CALL: u32 = 2;

/// A policy page in memory that others may write at the same time.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct PolicyPage {
    head: [Word; 8],
    gate: AtomicU32,
    paced: AtomicU32,
    stamp: Word,
    rate: Word,
    until: Word,
    closed_until: Word,
    trim: AtomicU32,
    doubted: AtomicU32,
    _line: [AtomicU32; 4],
    kept: [Word; 2],
    _reserved: [Word; 110],
    copies: [[Word; ROOM / 8]; 2],
    _tail: [Word; 128],
}

const _: () = assert!(size_of::<PolicyPage>() == SIZE);
const _: () = assert!(core::mem::offset_of!(PolicyPage, gate) == 64);
const _: () = assert!(core::mem::offset_of!(PolicyPage, paced) == PACED);
const _: () = assert!(core::mem::offset_of!(PolicyPage, kept) == 128);
const _: () = assert!(core::mem::offset_of!(PolicyPage, copies) == COPIES[0]);

impl PolicyPage {
    /// The page that is mapped at `address`; `None` where the address is not aligned to
    /// 64 bytes or the mapping is shorter than [`SIZE`].
    ///
    /// # Safety
    /// `length` bytes at `address` are mapped readable for all of `'a`, and whoever
    /// calls [`PolicyPage::replace`] has them writable. Others may write them.
    #[allow(unsafe_code)]
    pub unsafe fn at<'a>(address: *const u8, length: usize) -> Option<&'a Self> {
        if address.is_null() || !(address as usize).is_multiple_of(64) || length < SIZE {
            return None;
        }
        // SAFETY: aligned and long enough as checked, mapped as the caller promises;
        // the page is atomics throughout, so concurrent writers are no data race.
        Some(unsafe { &*address.cast::<Self>() })
    }

    /// The newest whole copy, with its generation.
    #[cold]
    pub fn read(&self) -> Result<(u64, Policy), PolicyError> {
        let mut head = [0; 64];
        copy_out(&self.head, &mut head);
        check(&head)?;
        // One after the other: a program's stack is not ours to make deep.
        let copies = self.copies.iter().filter(|copy| copy[0].load() > 0).filter_map(|copy| {
            let mut room = [0; ROOM];
            copy_out(copy, &mut room);
            Policy::from_record(&room)
        });
        copies.max_by_key(|(generation, _)| *generation).ok_or(PolicyError::Damaged)
    }

    /// Makes `policy` the newest, as the generation after the one that is there.
    /// For the one writer of the page: who replaces holds a lock against other writers.
    pub fn replace(&self, policy: &Policy) -> Result<u64, PolicyError> {
        let (newest, _) = self.read()?;
        let generation = newest.saturating_add(1);
        let record = policy.record(generation);
        // The copy that does not hold the newest one.
        let older = self.copies.iter().find(|copy| copy[0].load() != newest).ok_or(PolicyError::Damaged)?;
        for (word, bytes) in older.iter().zip(record.chunks(8)) {
            word.store(bytes.try_into().map_or(0, u64::from_le_bytes));
        }
        let is_limited = u32::from(policy.compute.is_limited());
        // What the agent says there stays; and what it has granted is paced until it says that it need not be. A share whose
        // limit is taken away would queue a thousand launches before the agent has looked, and owe them all a moment later.
        let is_granted = self.until.load() > 0;
        let limited = |word| {
            let is_kept = is_granted && is_limited == 0 && word & LIMITED != 0;
            Some(word & !LIMITED | is_limited | if is_kept { DIVIDED } else { 0 })
        };
        let _ = self.paced.fetch_update(SeqCst, SeqCst, limited);
        self.stamp.update(|stamp| stamp.wrapping_add(1));
        Ok(generation)
    }

    /// Changes whenever the policy was replaced: one load tells that nothing is new.
    pub fn stamp(&self) -> u64 {
        self.stamp.load()
    }

    /// The gate of compute time, a futex word: 0 open, 1 closed, 2 drain.
    pub fn gate(&self) -> &AtomicU32 {
        &self.gate
    }

    /// Where gate and pace lie as one 64-bit word, which is zero where a launch may go
    /// straight to the driver: all that the most frequent of all calls has to look at.
    pub fn at_launch(&self) -> *const u64 {
        (&raw const self.gate).cast()
    }

    /// Whether launches are paced: by the record, or while the node divides the device's time.
    pub fn is_paced(&self) -> bool {
        self.paced.load(SeqCst) & (LIMITED | DIVIDED) != 0
    }

    /// All of the word that [`PolicyPage::is_paced`] and [`PolicyPage::call`] are of: who has seen it before has
    /// nothing new to learn from it.
    pub fn pace_word(&self) -> u32 {
        self.paced.load(SeqCst)
    }

    /// For the agent: whether launches are paced though the record limits nothing.
    pub fn divide(&self, is_divided: bool) {
        let divided = |word| Some(word & !DIVIDED | if is_divided { DIVIDED } else { 0 });
        let _ = self.paced.fetch_update(SeqCst, SeqCst, divided);
    }

    /// For the agent: whether the page says so.
    pub fn is_divided(&self) -> bool {
        self.paced.load(SeqCst) & DIVIDED != 0
    }

    /// A number that the agent raises when it wants to hear of the next launch: a process that launches and has
    /// not answered this number rings the account page's doorbell, once. 0: nobody asks.
    pub fn call(&self) -> u32 {
        self.paced.load(SeqCst) >> CALL
    }

    /// For the agent: asks anew (`true`), or has launches go straight to the driver again.
    pub fn ask(&self, is_asked: bool, number: u32) {
        let number = if is_asked { number.wrapping_shl(CALL).max(1 << CALL) } else { 0 };
        let asked = |word| Some(word & (LIMITED | DIVIDED) | number);
        let _ = self.paced.fetch_update(SeqCst, SeqCst, asked);
    }

    /// Until when the gate is closed, in nanoseconds of the monotonic clock: then it is open whatever it says,
    /// since a node that is gone opens none.
    pub fn closed_until(&self) -> u64 {
        self.closed_until.load()
    }

    /// For the agent: closes the gate until then, or, with 0, opens it. Who waits there has to be woken by the caller
    /// ([`PolicyPage::gate`] is the futex).
    pub fn close(&self, until: u64) {
        self.closed_until.store(until);
        self.gate.store(u32::from(until > 0), SeqCst);
    }

    /// A futex word that the node changes when it wants what pools keep without use given back.
    pub fn trim(&self) -> &AtomicU32 {
        &self.trim
    }

    /// Whether the agent that grants does not see what the share has of the device: then all counts that launches were
    /// measured to take, as nobody would make up for what is left out.
    pub fn is_doubted(&self) -> bool {
        self.doubted.load(SeqCst) != 0
    }

    /// For the agent: whether that is so.
    pub fn doubt(&self, is_doubted: bool) {
        self.doubted.store(is_doubted.into(), SeqCst);
    }

    /// The present grant of compute time, in nanoseconds of GPU time a second; `None`: by the record.
    /// A grant is for a while (`now` is of the monotonic clock, in nanoseconds): it goes by who else works,
    /// and a node that is gone does not see that change. See [`UNBOUNDED`](super::UNBOUNDED).
    pub fn granted(&self, now: u64) -> Option<u64> {
        (now < self.until.load()).then(|| self.rate.load())
    }

    /// Grants so much until then. For the one writer of the page.
    pub fn grant(&self, rate: u64, until: u64) {
        self.rate.store(rate);
        self.until.store(until);
    }

    /// For the agent: what the agent after it is to know of the share, in its own terms; zeros in a page to which none
    /// has written. No reader in a container goes by it.
    pub fn keep(&self, words: [u64; 2]) {
        self.kept.iter().zip(words).for_each(|(kept, word)| kept.store(word));
    }

    pub fn kept(&self) -> [u64; 2] {
        self.kept.each_ref().map(Word::load)
    }
}

fn copy_out(words: &[Word], bytes: &mut [u8]) {
    for (word, room) in words.iter().zip(bytes.as_chunks_mut().0) {
        *room = word.load().to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::super::take;
    use super::super::tests::sample;
    use super::*;
    use crate::Compute;

    /// A page that may be replaced, as a writer has it mapped.
    fn mapped(bytes: [u8; SIZE]) -> Box<PolicyPage> {
        let words = |start: usize| -> u64 { take(&bytes, start).map_or(0, u64::from_le_bytes) };
        Box::new(PolicyPage {
            head: core::array::from_fn(|i| Word::new(words(i * 8))),
            gate: AtomicU32::new(0),
            paced: AtomicU32::new(words(64).wrapping_shr(32) as u32),
            stamp: Word::new(words(72)),
            rate: Word::new(words(80)),
            until: Word::new(words(88)),
            closed_until: Word::new(words(96)),
            trim: AtomicU32::new(0),
            doubted: AtomicU32::new(0),
            _line: Default::default(),
            kept: Default::default(),
            _reserved: core::array::from_fn(|_| Word::default()),
            copies: core::array::from_fn(|c| core::array::from_fn(|i| Word::new(words(COPIES[c] + i * 8)))),
            _tail: core::array::from_fn(|_| Word::default()),
        })
    }

    #[test]
    fn the_newest_whole_copy_counts() {
        let page = mapped(sample().encode());
        let mut lower = sample();
        for generation in 2..6 {
            lower.memory.limit -= 1 << 20;
            let stamp = page.stamp();
            assert_eq!(page.replace(&lower), Ok(generation));
            assert_ne!(page.stamp(), stamp);
            assert_eq!(page.read(), Ok((generation, lower)));
            assert!(page.is_paced());
        }
        lower.compute = Compute { cores: 0, ceiling: 0, ..lower.compute };
        assert_eq!(page.replace(&lower), Ok(6));
        assert!(!page.is_paced());
        // A writer that died in the middle of generation 7: the one before it stands.
        let dying = page.copies.iter().find(|copy| copy[0].load() != 6).expect("two copies");
        dying[0].store(7);
        dying[20].store(0x1234);
        assert_eq!(page.read(), Ok((6, lower)));
        // The next writer fills that same copy again.
        assert_eq!(page.replace(&sample()), Ok(7));
        assert_eq!(page.read(), Ok((7, sample())));
        assert!(page.is_paced());
    }

    #[test]
    fn a_share_that_loses_its_limit_is_paced_until_the_agent_says_otherwise() {
        let page = mapped(sample().encode());
        page.grant(5, 7);
        let unlimited = Policy { compute: Compute::default(), ..sample() };
        assert_eq!(page.replace(&unlimited), Ok(2));
        assert_eq!((page.is_paced(), page.is_divided()), (true, true));
        page.divide(false);
        assert_eq!(page.replace(&unlimited), Ok(3));
        assert_eq!((page.is_paced(), page.is_divided()), (false, false));
    }

    #[test]
    fn what_the_agent_says_outlives_another_policy() {
        let page = mapped(sample().encode());
        let unlimited = Policy { compute: Compute::default(), ..sample() };
        assert_eq!(page.replace(&unlimited), Ok(2));
        assert_eq!((page.is_paced(), page.call()), (false, 0));
        page.divide(true);
        page.ask(true, 7);
        assert_eq!(page.replace(&unlimited), Ok(3));
        assert_eq!((page.is_paced(), page.call()), (true, 7));
        page.divide(false);
        assert_eq!((page.is_paced(), page.call()), (false, 7));
        page.ask(true, 0);
        assert_ne!(page.call(), 0, "0 is nobody's");
        page.ask(false, 9);
        assert_eq!(page.call(), 0);
        page.close(5);
        assert_eq!((page.gate().load(SeqCst), page.closed_until()), (1, 5));
        page.close(0);
        assert_eq!((page.gate().load(SeqCst), page.closed_until()), (0, 0));
    }

    #[test]
    fn a_grant_ends() {
        let page = mapped(sample().encode());
        assert_eq!(page.granted(0), None);
        page.grant(500, 1000);
        assert_eq!([page.granted(999), page.granted(1000)], [Some(500), None]);
    }
}
