//! The atomic word that both pages are made of.
//!
//! Every operation is sequentially consistent. The protocol's argument is about one
//! order of all operations on all words, and what a weaker order would save is a
//! nanosecond beside a call into the driver.
//!
//! In this crate's own tests each operation first asks the explorer, which decides
//! which process makes its step next (`explore`): the code that is explored is the
//! code that ships.

use crate::sync::{AtomicU64, Ordering::SeqCst};

/// One 64-bit word of a page.
#[derive(Debug, Default)]
#[repr(transparent)]
pub(crate) struct Word(AtomicU64);

impl Word {
    #[cfg(test)]
    pub(crate) const fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    /// What `read` says of it.
    #[cfg(test)]
    pub(crate) fn peek(&self, read: &dyn Fn(&AtomicU64) -> u64) -> u64 {
        read(&self.0)
    }

    #[inline]
    pub(crate) fn load(&self) -> u64 {
        #[cfg(test)]
        if let Some(value) = crate::explore::load(&self.0) {
            return value;
        }
        self.0.load(SeqCst)
    }

    #[inline]
    pub(crate) fn store(&self, value: u64) {
        #[cfg(test)]
        if crate::explore::store(&self.0, value) {
            return;
        }
        self.0.store(value, SeqCst);
    }

    /// True where the word was `old` and is now `new`.
    #[inline]
    pub(crate) fn swap_if(&self, old: u64, new: u64) -> bool {
        #[cfg(test)]
        if let Some(done) = crate::explore::swap_if(&self.0, old, new) {
            return done;
        }
        self.0.compare_exchange(old, new, SeqCst, SeqCst).is_ok()
    }

    /// Makes the word what `next` makes of it, unless that is `None`: the word before, or as it was seen
    /// when there was nothing to make of it. To the explorer this is one step, since a turn of
    /// the loop that loses has no effect and one that gives up has read the word once.
    #[inline]
    pub(crate) fn change(&self, next: impl Fn(u64) -> Option<u64>) -> Result<u64, u64> {
        #[cfg(test)]
        if let Some(done) = crate::explore::change(&self.0, &next) {
            return done;
        }
        self.0.fetch_update(SeqCst, SeqCst, next)
    }

    /// [`Word::change`] by a rule that always has an answer.
    #[inline]
    pub(crate) fn update(&self, next: impl Fn(u64) -> u64) -> u64 {
        self.change(|word| Some(next(word))).unwrap_or_else(|word| word)
    }
}

/// Where an attempt began that may be made again after a wait, as if it had not been made before.
/// The explorer uses that: otherwise every number of attempts would be a state of its own.
#[derive(Clone, Copy)]
pub(crate) struct Attempt {
    #[cfg(test)]
    pub(crate) history: usize,
}

impl Attempt {
    pub(crate) fn begin() -> Self {
        Self {
            #[cfg(test)]
            history: crate::explore::now(),
        }
    }
}
