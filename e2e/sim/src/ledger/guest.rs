//! A process on a part: coming, using memory, leaving, and what others do when it has died.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::cgroup::Known;
use super::locks::{self, Locks};
use super::map::{Intent, Ledger, NUMBER_BITS, Part, Place, ROWS, Row, Word, later, next};
use super::{GRANULE, PAGE};

/// Taking and burying rows, one thread of this process at a time: the rows' locks are the process's.
static ROWS_OF_THIS_PROCESS: Mutex<()> = Mutex::new(());

/// What a process uses of one part. It ends with the process, or when dropped.
#[derive(Debug)]
pub struct Guest {
    ledger: Arc<Ledger>,
    locks: Locks,
    row: usize,
    part: usize,
    /// One change at a time; the number of the last, or none once it has left.
    pub(super) number: Mutex<Option<u32>>,
    /// Limits of cgroups, as this process last read them.
    pub(super) known: Mutex<Known>,
}

/// Why a process cannot use a GPU.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    #[error("no such GPU or instance, or it does not work")]
    Absent,
    #[error("{ROWS} processes use the simulated GPUs already")]
    Full,
    #[error("this process may not write the simulator's files")]
    Denied,
    #[error("cannot open the locks of the simulated GPUs")]
    Io(#[from] io::Error),
}

impl Guest {
    /// Enters this process as a user of that GPU or instance.
    pub fn enter(ledger: &Arc<Ledger>, place: Place) -> Result<Self, EnterError> {
        let index = place.part().ok_or(EnterError::Absent)?;
        let map = ledger.get();
        let part = map.parts.get(index).ok_or(EnterError::Absent)?;
        if part.flags.load(Ordering::Acquire) & Ledger::HERE == 0 {
            return Err(EnterError::Absent);
        }
        let locks = ledger.locks()?;
        let row = ledger.take_any(locks, |own| Self::introduce(own, index, part, place))?;
        let number = Mutex::new(Some(map.rows[row].number.load(Ordering::Relaxed) as u32));
        Ok(Self { ledger: Arc::clone(ledger), locks, row, part: index, number, known: Mutex::default() })
    }

    /// Says in its row who it is.
    fn introduce(own: &Row, index: usize, part: &Part, place: Place) {
        own.part.store(index as u32, Ordering::Relaxed);
        own.ci.store(place.instance.map_or(0, |(_, ci)| ci), Ordering::Relaxed);
        own.epoch.store(part.epoch.load(Ordering::Relaxed), Ordering::Relaxed);
        let mut name = [0; 16];
        let comm = std::fs::read("/proc/self/comm").unwrap_or_default();
        name.iter_mut()
            .zip(comm.iter().take(15).filter(|byte| **byte != b'\n'))
            .for_each(|(to, from)| *to = *from);
        let (begin, end) = name.split_at(8);
        for (word, bytes) in own.name.iter().zip([begin, end]) {
            word.store(
                bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
                Ordering::Relaxed,
            );
        }
        own.work.forget();
    }

    /// Uses as many bytes more, rounded up to granules; false, and nothing is changed, if the part has not got them
    /// or the process's cgroup may not have them.
    pub fn charge(&self, bytes: u64) -> bool {
        let charge = || self.change_within(bytes.div_ceil(GRANULE));
        // What the dead have left is free.
        let charged = charge() || (!self.ledger.uses().is_empty() && charge());
        if charged {
            self.make_room();
        }
        charged
    }

    /// Uses as many bytes less, rounded up to granules; they were charged before.
    pub fn refund(&self, bytes: u64) {
        // Only what is beyond the limit is refused.
        let _ = self.change(-granules(bytes));
    }

    /// Whether the GPU or instance is still what it was when the process came.
    pub fn works(&self) -> bool {
        let part = self.part();
        let same = part.epoch.load(Ordering::Relaxed) == self.own().epoch.load(Ordering::Relaxed);
        same && part.flags.load(Ordering::Relaxed) & Ledger::HERE != 0
    }

    /// Bytes that are free on the part, and bytes that it has, to this process.
    pub fn memory(&self) -> (u64, u64) {
        let part = self.part();
        let used = Word::unpack(part.word.load(Ordering::Acquire)).used;
        let free = part.limit.load(Ordering::Relaxed).saturating_sub(used.into()) * GRANULE;
        let free = free.saturating_sub(part.managed.load(Ordering::Relaxed) * PAGE);
        self.memory_within(free, part.total.load(Ordering::Relaxed) * GRANULE)
    }

    /// Bytes that this process uses of the part, managed memory left out.
    pub fn used(&self) -> u64 {
        self.own().used.load(Ordering::Relaxed) * GRANULE
    }

    /// Number of the process, different from those of all others that live.
    pub fn owner(&self) -> u64 {
        self.ledger.get().owners[self.row].load(Ordering::Relaxed)
    }

    pub(super) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub(super) const fn locks(&self) -> Locks {
        self.locks
    }

    pub(super) const fn row(&self) -> usize {
        self.row
    }

    pub(super) const fn part_index(&self) -> usize {
        self.part
    }

    pub(super) fn own(&self) -> &Row {
        &self.ledger.get().rows[self.row]
    }

    pub(super) fn part(&self) -> &Part {
        &self.ledger.get().parts[self.part]
    }

    pub(super) fn change(&self, granules: i64) -> bool {
        let mut number = self.number.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(last) = &mut *number else { return false };
        *last = next((*last).into());
        self.ledger.change(self.row, self.part, granules, *last)
    }

    /// Ends it: what it used is given back, and nothing can be charged any more.
    pub fn leave(&self) {
        let mut number = self.number.lock().unwrap_or_else(PoisonError::into_inner);
        if number.take().is_none() {
            return;
        }
        self.ledger.give(self.locks, self.row);
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Ledger {
    /// A row for this process, and what is to be written in it before another thread may take one.
    pub(super) fn take_any(&self, locks: Locks, introduce: impl FnOnce(&Row)) -> Result<usize, EnterError> {
        if !self.writable {
            return Err(EnterError::Denied);
        }
        let _alone = ROWS_OF_THIS_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        let row = (0..ROWS).find(|row| self.take(locks, *row)).ok_or(EnterError::Full)?;
        self.raise(row);
        introduce(&self.get().rows[row]);
        Ok(row)
    }

    /// Whether a row is this process's.
    pub(super) fn owns(&self, row: usize) -> bool {
        self.get().owners[row].load(Ordering::Acquire) == locks::token()
    }

    /// Gives a row back with all that it uses.
    pub(super) fn give(&self, locks: Locks, row: usize) {
        let _alone = ROWS_OF_THIS_PROCESS.lock().unwrap_or_else(PoisonError::into_inner);
        // A child after a fork has its parent's rows in its memory, and no right to them.
        if self.owns(row) {
            self.clear(row);
            locks.drop(row);
        }
    }

    /// Makes the row this process's, if nobody has it or who had it has died.
    fn take(&self, locks: Locks, row: usize) -> bool {
        let owner = &self.get().owners[row];
        let (before, token) = (owner.load(Ordering::Acquire), locks::token());
        // The lock cannot tell two libraries in one process from each other; the owner can.
        if before == token || !locks.take(row) {
            return false;
        }
        if before != 0 {
            self.clear(row);
        }
        // Another library in this process may have been faster: then the lock is rightly held.
        owner.compare_exchange(0, token, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Takes out a guest that has died; false if it has not, or another process is about it.
    pub(super) fn bury(&self, locks: Locks, row: usize) -> bool {
        // Tried, not waited for: a fork may leave it locked, and there is time.
        let Ok(_alone) = ROWS_OF_THIS_PROCESS.try_lock() else { return false };
        let owner = self.get().owners[row].load(Ordering::Acquire);
        if owner == 0 || owner == locks::token() || !locks.take(row) {
            return false;
        }
        self.clear(row);
        locks.drop(row);
        true
    }

    /// Gives back what the row uses and frees it. Its lock is held; killed anywhere, it can be done again.
    fn clear(&self, at: usize) {
        let map = self.get();
        let row = &map.rows[at];
        let index = row.part.load(Ordering::Relaxed) as usize;
        if let Some(part) = map.parts.get(index) {
            self.drop_work(index, at);
            if let Some(intent) = Intent::unpack(row.intent.load(Ordering::Acquire)) {
                let word = Word::unpack(part.word.load(Ordering::Acquire));
                let last = word.row == at && word.number == intent.number;
                if last || row.made.load(Ordering::Acquire) == u64::from(intent.number) {
                    row.used.store(intent.used.into(), Ordering::Release);
                }
                row.intent.store(0, Ordering::Release);
            }
            let used = row.used.load(Ordering::Acquire);
            if used != 0 {
                let number = next(row.number.load(Ordering::Acquire));
                let _ = self.change(at, index, -(used as i64), number);
            }
        }
        row.limits.iter().for_each(|number| number.store(0, Ordering::Relaxed));
        map.owners[at].store(0, Ordering::Release);
    }

    /// Changes what a row uses; false if that is more than the part has. One at a time for each row.
    fn change(&self, at: usize, index: usize, granules: i64, number: u32) -> bool {
        let map = self.get();
        let (row, part) = (&map.rows[at], &map.parts[index]);
        let Some(used) = add(row.used.load(Ordering::Relaxed), granules) else { return false };
        row.number.store(number.into(), Ordering::Relaxed);
        row.intent.store(Intent { used, number }.pack(), Ordering::Release);
        let mut seen = part.word.load(Ordering::Acquire);
        loop {
            let before = Word::unpack(seen);
            let fits = |sum: &u32| granules <= 0 || u64::from(*sum) <= part.limit.load(Ordering::Relaxed);
            let Some(sum) = add(before.used.into(), granules).filter(fits) else {
                row.intent.store(0, Ordering::Release);
                return false;
            };
            if before.row != at && before.number != 0 {
                note(&map.rows[before.row].made, before.number);
            }
            let after = Word { used: sum, row: at, number }.pack();
            match part.word.compare_exchange_weak(seen, after, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(now) => seen = now,
            }
        }
        row.used.store(used.into(), Ordering::Release);
        row.made.store(number.into(), Ordering::Release);
        row.intent.store(0, Ordering::Release);
        true
    }
}

fn granules(bytes: u64) -> i64 {
    i64::try_from(bytes.div_ceil(GRANULE)).unwrap_or(i64::MAX)
}

/// Notes that a change was made, unless a later one has been noted.
fn note(made: &AtomicU64, number: u32) {
    const _: () = assert!(NUMBER_BITS < 32);
    let newer = |known: u64| later(number, known as u32).then_some(u64::from(number));
    // Refused when a later one is known: nothing to do then.
    let _ = made.fetch_update(Ordering::AcqRel, Ordering::Acquire, newer);
}

/// A sum of granules that is not below zero; giving back too much leaves none.
fn add(used: u64, granules: i64) -> Option<u32> {
    let used = i64::try_from(used).ok()?;
    u32::try_from(used.checked_add(granules)?.max(0)).ok()
}
