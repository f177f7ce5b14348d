//! The operating system, as the rules need it: identities, clock, waits and memory.

use crate::pages;
use crate::sys;
use core::sync::atomic::AtomicU32;
use divvy_interposer_core::liveness::{self, Signal, Stat};
use divvy_interposer_core::{AccountPage, Identity, MountedPolicy, Policy, System};

/// The kernel.
pub(crate) struct Kernel;

impl System for Kernel {
    fn identity(&self) -> Option<Identity> {
        let stat = stat_of(b"self")?;
        let namespace = sys::inode(b"/proc/self/ns/pid\0")?;
        // The pid in the process's own namespace; a `/proc` of another namespace shows another one.
        Some(Identity { pid: sys::pid(), namespace, start: stat.start, image: stat.image })
    }

    fn gone(&self, me: &Identity, peer: &Identity) -> bool {
        let signal = if sys::exists(peer.pid) { Signal::Exists } else { Signal::NoSuchProcess };
        let own_proc = stat_of(b"self").is_some_and(|own| own.pid == me.pid);
        liveness::gone(me, peer, signal, own_proc, Decimal::of(peer.pid).with(stat_of))
    }

    fn now(&self) -> u64 {
        sys::now()
    }

    fn sleep(&self, nanoseconds: u64) {
        sys::sleep(nanoseconds);
    }

    fn wait(&self, word: &AtomicU32, value: u32, until: u64) {
        sys::wait(word, value, until);
    }

    fn wake(&self, word: &AtomicU32) {
        sys::wake(word);
    }

    fn map(&self, bytes: usize, wiped: bool) -> *mut u8 {
        sys::map_private(bytes, if wiped { sys::InChild::Zeros } else { sys::InChild::Nothing })
    }

    unsafe fn unmap(&self, address: *mut u8, bytes: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { sys::unmap(address, bytes) };
    }

    fn pages(&self, each: impl FnMut(MountedPolicy)) {
        pages::for_each_policy(each);
    }

    fn print(&self, line: &[u8]) {
        sys::print(line);
    }

    fn account(&self, policy: &Policy) -> Option<&'static AccountPage> {
        pages::account(policy)
    }
}

/// Reads `/proc/<process>/stat`.
fn stat_of(process: &[u8]) -> Option<Stat> {
    let mut path = [0; 32];
    let mut at = 0;
    for part in [b"/proc/".as_slice(), process, b"/stat"] {
        path.get_mut(at..at + part.len())?.copy_from_slice(part);
        at += part.len();
    }
    let file = sys::open_to_read(sys::From::Root, path.get(..=at)?)?;
    // The relevant fields fit, whatever the process is called.
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
