//! The operating system's interface, so that tests can replace it.

use divvy_pages::sync::AtomicU32;
use divvy_pages::{AccountPage, Identity, Policy, PolicyPage};

/// A policy page that is mounted in the container.
#[derive(Clone, Copy, Debug)]
pub enum MountedPolicy {
    Trusted(&'static PolicyPage),
    /// Not trusted: not owned by root, not on a read-only mount, or not a valid page.
    Untrusted,
}

/// The operating system. All methods are called rarely, except [`System::sleep`] while a process
/// waits for another.
pub trait System: Sync {
    /// Identifies this process ([`crate::liveness`] parses `/proc/self/stat`). `None` if that is
    /// not possible: then nothing can be charged.
    fn identity(&self) -> Option<Identity>;

    /// Returns true only if `peer` is proven dead; see [`crate::liveness::gone`].
    fn gone(&self, me: &Identity, peer: &Identity) -> bool;

    /// The monotonic clock, in nanoseconds.
    fn now(&self) -> u64;

    /// Sleeps for about this many nanoseconds; 0 yields the processor.
    fn sleep(&self, nanoseconds: u64);

    /// Sleeps while `word` equals `value`, until a wake or until [`System::now`] reaches `until`.
    /// May return early. The word may be on a page that this process cannot write.
    fn wait(&self, word: &AtomicU32, value: u32, until: u64);

    /// Wakes all waiters of the word, in this process and in others.
    fn wake(&self, word: &AtomicU32);

    /// Maps `bytes` of private zeroed memory, aligned to 64 bytes. A forked child does not have it
    /// (`MADV_DONTFORK`), or finds it zeroed if `wiped` (`MADV_WIPEONFORK`). Null on failure.
    fn map(&self, bytes: usize, wiped: bool) -> *mut u8;

    /// Unmaps memory of [`System::map`].
    ///
    /// # Safety
    /// `address` and `bytes` come from one call of [`System::map`], and nothing refers to the
    /// memory.
    #[allow(unsafe_code)]
    unsafe fn unmap(&self, address: *mut u8, bytes: usize);

    /// Calls `each` with every policy page that is mounted in the container, in any order.
    fn pages(&self, each: impl FnMut(MountedPolicy));

    /// Prints a line on the program's standard error, or drops it if that would block the program, end
    /// it, or write to one of its files.
    fn print(&self, line: &[u8]);

    /// Returns the account page of the share with this policy. `None` if it is missing or not
    /// trusted.
    fn account(&self, policy: &Policy) -> Option<&'static AccountPage>;
}
