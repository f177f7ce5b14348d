//! This process and its peers, as the rules see them: who lives, what time it is, where memory comes from.

use crate::pages;
use crate::sys;
use core::sync::atomic::AtomicU32;
use divvy_interposer_core::alive::{self, Signal, Stat};
use divvy_interposer_core::{AccountPage, Found, Identity, Policy, System};

/// The kernel.
pub(crate) struct Kernel;

impl System for Kernel {
    fn identity(&self) -> Option<Identity> {
        let stat = stat_of(b"self")?;
        let namespace = sys::inode(b"/proc/self/ns/pid\0")?;
        // The pid of the process's own namespace, which a /proc of another one shows differently.
        Some(Identity { pid: sys::process(), namespace, start: stat.start, image: stat.image })
    }

    fn gone(&self, me: &Identity, who: &Identity) -> bool {
        let signal = if sys::exists(who.pid) { Signal::Exists } else { Signal::NoSuchProcess };
        let own_proc = stat_of(b"self").is_some_and(|own| own.pid == me.pid);
        alive::gone(me, who, signal, own_proc, Decimal::of(who.pid).with(stat_of))
    }

    fn now(&self) -> u64 {
        sys::now()
    }

    fn nap(&self, nanoseconds: u64) {
        sys::nap(nanoseconds);
    }

    fn wait(&self, word: &AtomicU32, value: u32, until: u64) {
        sys::wait(word, value, until);
    }

    fn wake(&self, word: &AtomicU32) {
        sys::wake(word);
    }

    fn map(&self, bytes: usize, wiped: bool) -> *mut u8 {
        sys::memory(bytes, if wiped { sys::InChild::Zeros } else { sys::InChild::Nothing })
    }

    unsafe fn unmap(&self, address: *mut u8, bytes: usize) {
        // SAFETY: as the caller says.
        unsafe { sys::forget(address, bytes) };
    }

    fn pages(&self, each: impl FnMut(Found)) {
        pages::each(each);
    }

    fn account(&self, policy: &Policy) -> Option<&'static AccountPage> {
        pages::account(policy)
    }
}

/// What `/proc/<process>/stat` says.
fn stat_of(process: &[u8]) -> Option<Stat> {
    let mut path = [0; 32];
    let mut at = 0;
    for part in [b"/proc/".as_slice(), process, b"/stat"] {
        path.get_mut(at..at + part.len())?.copy_from_slice(part);
        at += part.len();
    }
    let file = sys::open_to_read(sys::From::Root, path.get(..=at)?)?;
    // The fields that count end far before this, whatever the process is called.
    let mut text = [0; 512];
    let read = file.read(&mut text);
    Stat::parse(text.get(..read)?)
}

/// A pid as text.
struct Decimal {
    digits: [u8; 10],
    from: usize,
}

impl Decimal {
    fn of(number: u32) -> Decimal {
        let mut text = Decimal { digits: [0; 10], from: 10 };
        let mut rest = number;
        loop {
            text.from -= 1;
            text.digits[text.from] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 || text.from == 0 {
                return text;
            }
        }
    }

    fn with<T>(&self, read: impl FnOnce(&[u8]) -> T) -> T {
        read(self.digits.get(self.from..).unwrap_or_default())
    }
}
