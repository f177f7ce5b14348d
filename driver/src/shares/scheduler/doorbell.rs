//! Waiting for shares to ring.
//!
//! The doorbell is a word of the account page, on which `futex_waitv` (Linux 5.16) waits, for all
//! shares at once. For that the page must be mapped, and a tenant can truncate its file: an access
//! to the mapping would then kill the process. So this code never reads the mapping. The kernel
//! does, and answers `EFAULT`; the word itself is read from the file.

use divvy_pages::account::{BALANCE, DOORBELL, HEADER};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::ClockId;
use rustix::thread::futex::{self, Wait, WaitFlags, WaitPtr, WaitvFlags};
use rustix::time::Timespec;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

/// Of futex(2): `FUTEX_WAITV_MAX`, less one for our own word.
pub(crate) const MOST: usize = 127;
/// If the kernel cannot wait for several words, or for these, they are read again after this time.
const LOOK: Duration = Duration::from_millis(1);

/// The report of a share about its launches at this moment; tenants write it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WakeEvent {
    /// Nanoseconds of GPU time.
    pub(crate) balance: i64,
    /// Time of the last refill by the monotonic clock, in nanoseconds.
    pub(crate) refilled: u64,
    pub(crate) doorbell: u32,
}

impl WakeEvent {
    pub(crate) fn read(account: &File) -> io::Result<Self> {
        let mut bytes = [0; (DOORBELL - BALANCE) as usize + 4];
        account.read_exact_at(&mut bytes, BALANCE)?;
        let word = |at: usize| bytes.get(at..at + 8).and_then(|word| word.try_into().ok());
        Ok(Self {
            balance: word(0).map_or(0, i64::from_le_bytes),
            refilled: word(8).map_or(0, u64::from_le_bytes),
            doorbell: bytes.last_chunk().map_or(0, |word| u32::from_le_bytes(*word)),
        })
    }
}

/// The doorbell of an account page, to wait at.
#[derive(Debug)]
pub(crate) struct Door {
    address: ptr::NonNull<u8>,
}

// SAFETY: an address that is never read.
#[allow(unsafe_code)]
unsafe impl Send for Door {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Sync for Door {}

#[allow(unsafe_code)]
impl Door {
    pub(crate) fn of(account: &File) -> io::Result<Self> {
        // Writable although it is never written: the kernel asks for such a page first, and without
        // one searches again at each wait. Source: `get_futex_key` in `kernel/futex/core.c`. So the
        // file must be open for writing.
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice replaces no other mapping, and
        // only the kernel reads it.
        let address = unsafe { mmap(ptr::null_mut(), HEADER, access, MapFlags::SHARED, account, 0)? };
        ptr::NonNull::new(address.cast())
            .map(|address| Self { address })
            .ok_or_else(|| io::ErrorKind::Other.into())
    }
}

#[allow(unsafe_code)]
impl Drop for Door {
    fn drop(&mut self) {
        // SAFETY: what `of` mapped, once.
        let _ = unsafe { munmap(self.address.as_ptr().cast(), HEADER) };
    }
}

/// The shares that may have rung.
#[derive(Debug)]
pub(crate) enum WakeReason {
    Nobody,
    /// This one; of others that have too, the next wait tells.
    One(Arc<Door>),
    Anybody,
}

impl WakeReason {
    pub(crate) fn may_be(&self, door: &Arc<Door>) -> bool {
        match self {
            Self::Nobody => false,
            Self::One(rang) => Arc::ptr_eq(rang, door),
            Self::Anybody => true,
        }
    }

    /// This one and no other.
    pub(crate) fn is(&self, door: &Arc<Door>) -> bool {
        matches!(self, Self::One(rang) if Arc::ptr_eq(rang, door))
    }

    pub(crate) fn is_anybody(&self) -> bool {
        matches!(self, Self::Anybody)
    }
}

/// Waits until a door's doorbell is not what is said beside it, until `own` is not `value`, or
/// until that time of the monotonic clock in nanoseconds. May come back earlier, and does where the
/// file of a door was cut short.
pub(crate) fn wait(own: &AtomicU32, value: u32, doors: &[(Arc<Door>, u32)], until: u64) -> WakeReason {
    let waiter = |address: *mut u8, value: u32, flags: WaitFlags| {
        let mut wait = Wait::new();
        (wait.val, wait.uaddr, wait.flags) = (value.into(), WaitPtr::new(address.cast()), flags);
        wait
    };
    let mut waiters = Vec::with_capacity(1 + doors.len());
    waiters.push(waiter(own.as_ptr().cast(), value, WaitFlags::SIZE_U32 | WaitFlags::PRIVATE));
    for (door, doorbell) in doors.iter().take(MOST) {
        let word = door.address.as_ptr().wrapping_add(DOORBELL as usize);
        waiters.push(waiter(word, *doorbell, WaitFlags::SIZE_U32));
    }
    let time = Timespec {
        tv_sec: i64::try_from(until / 1_000_000_000).unwrap_or(i64::MAX),
        tv_nsec: (until % 1_000_000_000) as i64,
    };
    match futex::waitv(&waiters, WaitvFlags::empty(), Some(&time), ClockId::Monotonic) {
        // Our own word is the first.
        Ok(at) => at
            .checked_sub(1)
            .and_then(|at| doors.get(at))
            .map_or(WakeReason::Nobody, |(door, _)| WakeReason::One(door.clone())),
        Err(Errno::TIMEDOUT) => WakeReason::Nobody,
        // One had rung before, and which is not said.
        Err(Errno::AGAIN | Errno::INTR) => WakeReason::Anybody,
        Err(_) => {
            std::thread::sleep(if doors.is_empty() { LOOK * 10 } else { LOOK });
            WakeReason::Anybody
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use divvy_pages::account;
    use std::os::unix::fs::FileExt;

    /// A wait that does not end makes the test hang.
    const LONG: Duration = Duration::from_secs(3600);

    fn until(time: Duration) -> u64 {
        let now = rustix::time::clock_gettime(ClockId::Monotonic);
        (Duration::new(now.tv_sec.unsigned_abs(), now.tv_nsec as u32) + time).as_nanos() as u64
    }

    fn account() -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(account::SIZE as u64).unwrap();
        file
    }

    #[test]
    fn wake_event_is_read_from_the_page() {
        let file = account();
        file.write_all_at(&(-5_i64).to_le_bytes(), 128).unwrap();
        file.write_all_at(&7_u64.to_le_bytes(), 136).unwrap();
        file.write_all_at(&9_u32.to_le_bytes(), 192).unwrap();
        assert_eq!(WakeEvent::read(&file).unwrap(), WakeEvent { balance: -5, refilled: 7, doorbell: 9 });
        file.set_len(190).unwrap();
        assert!(WakeEvent::read(&file).is_err());
    }

    #[test]
    fn wait_ends_on_a_doorbell_or_a_truncated_page() {
        let (own, file) = (AtomicU32::new(3), account());
        let door = Arc::new(Door::of(&file).unwrap());
        file.write_all_at(&1_u32.to_le_bytes(), DOORBELL).unwrap();
        wait(&own, 3, &[(door.clone(), 0)], until(LONG));
        wait(&own, 2, &[(door.clone(), 1)], until(LONG));
        wait(&own, 3, &[(door.clone(), 1)], until(Duration::ZERO));
        file.set_len(0).unwrap();
        wait(&own, 3, &[(door, 1)], until(LONG));
    }
}
