//! What the ledger needs of the operating system, so that tests can stand in for it.

use crate::ledger::Found;
use divvy_pages::sync::AtomicU32;
use divvy_pages::{AccountPage, Identity, Policy};

/// The system around a process. All of it is called seldom, apart from [`System::nap`]
/// while a process waits for another.
pub trait System: Sync {
    /// Who this process is ([`crate::alive`] reads the fields from `/proc/self/stat`).
    /// `None` where that cannot be told: nothing can be charged then.
    fn identity(&self) -> Option<Identity>;

    /// True only with proof; see [`crate::alive::gone`], which is to decide.
    fn gone(&self, me: &Identity, who: &Identity) -> bool;

    /// The monotonic clock, in nanoseconds.
    fn now(&self) -> u64;

    /// Gives the processor away for about so many nanoseconds; 0: yields.
    fn nap(&self, nanoseconds: u64);

    /// Sleeps while `word` is `value`, until somebody wakes its waiters or [`System::now`] is `until`. May
    /// come back earlier. The word may lie on a page that this process cannot write.
    fn wait(&self, word: &AtomicU32, value: u32, until: u64);

    /// Wakes all who wait for that word to change, in this process and in others.
    fn wake(&self, word: &AtomicU32);

    /// So many bytes of private memory, zeroed and aligned to 64 bytes, which a child of fork does
    /// not have (`MADV_DONTFORK`), or finds zeroed where `wiped` (`MADV_WIPEONFORK`).
    /// Null where there is none.
    fn map(&self, bytes: usize, wiped: bool) -> *mut u8;

    /// Gives back what [`System::map`] gave.
    ///
    /// # Safety
    /// `address` and `bytes` are of one call of [`System::map`], and nothing refers to them.
    #[allow(unsafe_code)]
    unsafe fn unmap(&self, address: *mut u8, bytes: usize);

    /// Names every policy page that the container has mounted, in any order.
    fn pages(&self, each: impl FnMut(Found));

    /// The account page of the share with that policy; `None` where it is not there, or not one to trust.
    fn account(&self, policy: &Policy) -> Option<&'static AccountPage>;
}
