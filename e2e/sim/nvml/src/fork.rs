//! A lock that a fork cannot leave behind locked.
//!
//! A child of a process with threads has only the thread that forked. A lock that another thread held at that moment
//! would stay locked in the child for ever; this one knows the process that holds it, and a child takes over what its
//! parent held. That is sound because the holder never runs in the child, and harmless because what is locked is
//! changed in single assignments.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};

const FREE: u32 = 0;

pub(crate) struct ForkLock<T> {
    holder: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: `with` lets one thread at a time at the value.
unsafe impl<T: Send> Sync for ForkLock<T> {}

impl<T> ForkLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { holder: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Runs `body` alone. It must be short, and must not lock again.
    pub(crate) fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        let me = std::process::id();
        loop {
            match self.holder.compare_exchange(FREE, me, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                Err(holder) if holder != me => {
                    // Held by the process this one was forked from: its thread does not exist here.
                    if self.holder.compare_exchange(holder, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
                    {
                        break;
                    }
                }
                Err(_) => std::thread::yield_now(),
            }
        }
        let _held = Held(&self.holder);
        // SAFETY: `holder` was taken above, so no other thread is inside until `_held` is dropped.
        body(unsafe { &mut *self.value.get() })
    }
}

/// Frees the lock, also when the body panics.
struct Held<'l>(&'l AtomicU32);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.store(FREE, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_at_a_time_is_inside() {
        let lock = ForkLock::new(0_u32);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| lock.with(|count| *count += 1)));
            }
        });
        assert_eq!(lock.with(|count| *count), 4000);
    }

    #[test]
    fn what_another_process_held_is_taken_over() {
        let lock = ForkLock::new(7);
        lock.holder.store(u32::MAX, Ordering::Relaxed);
        assert_eq!(lock.with(|value| *value), 7);
    }

    #[test]
    fn a_panic_inside_frees_it() {
        let lock = ForkLock::new(());
        let panicked =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lock.with(|()| panic!("inside"))));
        assert!(panicked.is_err());
        lock.with(|()| ());
    }
}
