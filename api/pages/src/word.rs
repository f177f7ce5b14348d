//! The atomic word of both pages.
//!
//! Every operation is sequentially consistent: the proof of the protocol needs one order of all
//! operations on all words. A weaker order would save about a nanosecond, next to a call into the
//! driver. In the tests of this crate, each operation goes through the explorer, which chooses the
//! process that makes the next step (`explore`). So the explored code is the shipped code.

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

    /// The value that `read` returns for this word.
    #[cfg(test)]
    pub(crate) fn peek(&self, read: &dyn Fn(&AtomicU64) -> u64) -> u64 {
        read(&self.0)
    }

    #[inline]
    pub(crate) fn load(&self) -> u64 {
        #[cfg(test)]
        if let Some(value) = crate::steps::load(&self.0) {
            return value;
        }
        self.0.load(SeqCst)
    }

    #[inline]
    pub(crate) fn store(&self, value: u64) {
        #[cfg(test)]
        if crate::steps::store(&self.0, value) {
            return;
        }
        self.0.store(value, SeqCst);
    }

    /// Sets the word to `new` and returns true if it was `old`.
    #[inline]
    pub(crate) fn swap_if(&self, old: u64, new: u64) -> bool {
        #[cfg(test)]
        if let Some(done) = crate::steps::swap_if(&self.0, old, new) {
            return done;
        }
        self.0.compare_exchange(old, new, SeqCst, SeqCst).is_ok()
    }

    /// Sets the word to the result of `next`, unless that is `None`. Returns the previous word, as
    /// `Err` if it was not changed. The explorer treats this as one step: a lost exchange has no
    /// effect, and a `None` has only read the word.
    #[inline]
    pub(crate) fn change(&self, next: impl Fn(u64) -> Option<u64>) -> Result<u64, u64> {
        #[cfg(test)]
        if let Some(done) = crate::steps::change(&self.0, &next) {
            return done;
        }
        self.0.fetch_update(SeqCst, SeqCst, next)
    }

    /// [`Word::change`] with a function that always has a result.
    #[inline]
    pub(crate) fn update(&self, next: impl Fn(u64) -> u64) -> u64 {
        self.change(|word| Some(next(word))).unwrap_or_else(|word| word)
    }
}

/// The start of an attempt that may be repeated after a wait. The explorer then drops its history;
/// otherwise each number of attempts would be another state.
#[derive(Clone, Copy)]
pub(crate) struct Attempt {
    #[cfg(test)]
    pub(crate) history: usize,
}

impl Attempt {
    pub(crate) fn begin() -> Self {
        Self {
            #[cfg(test)]
            history: crate::steps::history_len(),
        }
    }
}
