//! A lock that stays usable after a fork.
//!
//! After a fork, the child has only the thread that forked. An ordinary lock that another thread
//! held would stay locked forever. This one stores the id of the process that holds it, and a child
//! takes over locks of its parent. That is safe because the holder does not run in the child, and
//! because the protected values are changed by single assignments.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};

const FREE: u32 = 0;

pub(crate) struct ForkLock<T> {
    holder: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: `with` gives only one thread at a time access to the value.
unsafe impl<T: Send> Sync for ForkLock<T> {}

impl<T> ForkLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { holder: AtomicU32::new(FREE), value: UnsafeCell::new(value) }
    }

    /// Runs `body` under the lock. It must be short and must not lock again.
    pub(crate) fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
        let me = std::process::id();
        loop {
            match self.holder.compare_exchange(FREE, me, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                Err(holder) if holder != me => {
                    // The parent process held the lock at the fork; its thread does not exist here.
                    if self.holder.compare_exchange(holder, me, Ordering::Acquire, Ordering::Relaxed).is_ok()
                    {
                        break;
                    }
                }
                Err(_) => std::thread::yield_now(),
            }
        }
        let _held = Held(&self.holder);
        // SAFETY: `holder` was set above, so no other thread has access until `_held` is dropped.
        body(unsafe { &mut *self.value.get() })
    }
}

/// Releases the lock when dropped, also after a panic.
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
    fn lock_excludes_other_threads() {
        let lock = ForkLock::new(0_u32);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..1000).for_each(|_| lock.with(|count| *count += 1)));
            }
        });
        assert_eq!(lock.with(|count| *count), 4000);
    }

    #[test]
    fn lock_held_by_another_process_is_taken_over() {
        let lock = ForkLock::new(7);
        lock.holder.store(u32::MAX, Ordering::Relaxed);
        assert_eq!(lock.with(|value| *value), 7);
    }

    #[test]
    fn panic_releases_the_lock() {
        let lock = ForkLock::new(());
        let panicked =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lock.with(|()| panic!("inside"))));
        assert!(panicked.is_err());
        lock.with(|()| ());
    }
}
