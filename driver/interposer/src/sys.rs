//! System calls, without libc.
//!
//! If a preloaded library calls libc's `open`, it calls whatever function the program or another
//! preloaded library has defined under that name, and it changes the program's `errno`. So the few
//! calls are made directly. Errors are negative numbers, as the kernel returns them.

use core::arch::asm;
use core::sync::atomic::AtomicU32;

/// An open file descriptor, closed when dropped.
pub(crate) struct File(i32);

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: closes a descriptor that only this value owns.
        unsafe { call(number::CLOSE, self.0 as usize, 0, 0, 0, 0, 0) };
    }
}

/// The result of `statx` for an open file.
pub(crate) struct Facts {
    /// Owner as this process sees it.
    pub(crate) owner: u32,
    pub(crate) regular: bool,
    pub(crate) bytes: usize,
    /// True if the file itself is a mount point. Kernels before 5.8 do not report this; then true.
    pub(crate) mounted: bool,
}

const O_RDWR: usize = 2;
const O_CLOEXEC: usize = 0o2000000;
#[cfg(target_arch = "x86_64")]
const O_DIRECTORY: usize = 0o200000;
#[cfg(target_arch = "x86_64")]
const O_NOFOLLOW: usize = 0o400000;
#[cfg(target_arch = "aarch64")]
const O_DIRECTORY: usize = 0o40000;
#[cfg(target_arch = "aarch64")]
const O_NOFOLLOW: usize = 0o100000;
const AT_FDCWD: usize = -100isize as usize;
const S_IFMT: u32 = 0o170000;
const S_IFREG: u32 = 0o100000;
const ST_RDONLY: u64 = 1;
const AT_EMPTY_PATH: usize = 0x1000;
const STATX_BASIC: usize = 0x7ff;
const STATX_ATTR_MOUNT_ROOT: u64 = 0x2000;
const PROT_READ: usize = 1;
const PROT_WRITE: usize = 2;
const MAP_SHARED: usize = 1;
const RESOLVE_NO_SYMLINKS: usize = 4;

/// Where a relative name is looked up.
#[derive(Clone, Copy)]
pub(crate) enum From<'a> {
    Root,
    Directory(&'a File),
}

/// `name` ends with a zero byte.
fn open(from: From<'_>, name: &[u8], flags: usize) -> Option<File> {
    debug_assert!(name.last() == Some(&0));
    let at = match from {
        From::Root => AT_FDCWD,
        From::Directory(File(fd)) => *fd as usize,
    };
    // SAFETY: the kernel reads a name that ends with zero.
    let fd = unsafe { call(number::OPENAT, at, name.as_ptr() as usize, flags | O_CLOEXEC, 0, 0, 0) };
    (fd >= 0).then(|| File(fd as i32))
}

pub(crate) fn open_directory(from: From<'_>, name: &[u8]) -> Option<File> {
    open(from, name, O_DIRECTORY | O_NOFOLLOW)
}

pub(crate) fn open_to_read(from: From<'_>, name: &[u8]) -> Option<File> {
    open(from, name, O_NOFOLLOW)
}

/// Opens a relative path without following symbolic links. `None` also on kernels before 5.6 and
/// under a system call filter that does not know the call.
#[inline(always)]
pub(crate) fn open_within(directory: &File, path: &[u8]) -> Option<File> {
    debug_assert!(path.last() == Some(&0));
    // struct open_how: flags, mode, resolve.
    let how = [O_CLOEXEC, 0, RESOLVE_NO_SYMLINKS];
    let (name, how) = (path.as_ptr() as usize, how.as_ptr() as usize);
    // SAFETY: the kernel reads a name that ends with zero, and three words.
    let fd = unsafe { call(number::OPENAT2, directory.0 as usize, name, how, 24, 0, 0) };
    (fd >= 0).then(|| File(fd as i32))
}

pub(crate) fn open_to_write(from: From<'_>, name: &[u8]) -> Option<File> {
    open(from, name, O_NOFOLLOW | O_RDWR)
}

impl File {
    /// Returns the number of bytes read; 0 at the end and on any error.
    pub(crate) fn read(&self, into: &mut [u8]) -> usize {
        // SAFETY: the kernel writes at most the buffer's length into it.
        let read =
            unsafe { call(number::READ, self.0 as usize, into.as_mut_ptr() as usize, into.len(), 0, 0, 0) };
        read.max(0) as usize
    }

    /// Reads directory entries as `linux_dirent64` records. Returns the number of bytes; 0 at the
    /// end and on any error.
    pub(crate) fn entries(&self, into: &mut [u8]) -> usize {
        // SAFETY: the kernel writes at most the buffer's length into it.
        let read = unsafe {
            call(number::GETDENTS64, self.0 as usize, into.as_mut_ptr() as usize, into.len(), 0, 0, 0)
        };
        read.max(0) as usize
    }

    #[cold]
    pub(crate) fn facts(&self) -> Option<Facts> {
        let mut statx = [0u64; 32];
        // SAFETY: the kernel reads an empty name and writes 256 bytes into as many.
        let failed = unsafe {
            let (empty, into) = (c"".as_ptr() as usize, statx.as_mut_ptr() as usize);
            call(number::STATX, self.0 as usize, empty, AT_EMPTY_PATH, STATX_BASIC, into, 0)
        };
        if failed < 0 {
            return None;
        }
        // struct statx: mask, blksize: 4 each, attributes: 8, nlink, uid, gid: 4 each, mode: 2, 2
        // spare, ino, size, blocks, attributes_mask: 8 each.
        let attributes = statx[1] | !statx[7];
        Some(Facts {
            owner: (statx[2] >> 32) as u32,
            regular: (statx[3] >> 32) as u32 & S_IFMT == S_IFREG,
            bytes: statx[5] as usize,
            mounted: attributes & STATX_ATTR_MOUNT_ROOT != 0,
        })
    }

    /// Returns true if the file was opened through a read-only mount, whatever its mode.
    pub(crate) fn is_read_only(&self) -> bool {
        let mut statfs = [0u64; 32];
        // SAFETY: the kernel writes 120 bytes into 256.
        let failed =
            unsafe { call(number::FSTATFS, self.0 as usize, statfs.as_mut_ptr() as usize, 0, 0, 0, 0) };
        // f_flags, the eleventh word of struct statfs.
        failed >= 0 && statfs[10] & ST_RDONLY != 0
    }

    /// Maps the file's first `bytes` for as long as the process lives.
    pub(crate) fn map(&self, bytes: usize, writable: bool) -> Option<*mut u8> {
        let protection = if writable { PROT_READ | PROT_WRITE } else { PROT_READ };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { call(number::MMAP, 0, bytes, protection, MAP_SHARED, self.0 as usize, 0) };
        (at > 0).then_some(at as *mut u8)
    }
}

/// Returns the inode that `name` refers to. `name` ends with a zero byte.
pub(crate) fn inode(name: &[u8]) -> Option<u64> {
    debug_assert!(name.last() == Some(&0));
    let mut statx = [0u64; 32];
    // SAFETY: the kernel reads a name that ends with zero and writes 256 bytes into as many.
    let failed = unsafe {
        call(number::STATX, AT_FDCWD, name.as_ptr() as usize, 0, STATX_BASIC, statx.as_mut_ptr() as usize, 0)
    };
    (failed >= 0).then_some(statx[4])
}

pub(crate) fn pid() -> u32 {
    // SAFETY: takes no arguments.
    unsafe { call(number::GETPID, 0, 0, 0, 0, 0, 0) as u32 }
}

/// Returns true if a process with this pid exists in this namespace, as far as a signal can tell.
pub(crate) fn exists(pid: u32) -> bool {
    const ESRCH: isize = -3;
    // SAFETY: signal 0 is not delivered.
    unsafe { call(number::KILL, pid as usize, 0, 0, 0, 0, 0) != ESRCH }
}

/// The monotonic clock, in nanoseconds.
pub(crate) fn now() -> u64 {
    const CLOCK_MONOTONIC: usize = 1;
    clock(CLOCK_MONOTONIC)
}

/// The system clock, in nanoseconds since 1970.
pub(crate) fn realtime() -> u64 {
    const CLOCK_REALTIME: usize = 0;
    clock(CLOCK_REALTIME)
}

fn clock(which: usize) -> u64 {
    let mut time = [0u64; 2];
    // SAFETY: the kernel writes a timespec of two words.
    unsafe { call(number::CLOCK_GETTIME, which, time.as_mut_ptr() as usize, 0, 0, 0, 0) };
    time[0].wrapping_mul(1_000_000_000).wrapping_add(time[1])
}

/// Sleeps; 0 yields the processor.
pub(crate) fn sleep(nanoseconds: u64) {
    let time = [nanoseconds / 1_000_000_000, nanoseconds % 1_000_000_000];
    // SAFETY: the kernel reads a timespec of two words.
    unsafe {
        match nanoseconds {
            0 => call(number::SCHED_YIELD, 0, 0, 0, 0, 0, 0),
            _ => call(number::NANOSLEEP, time.as_ptr() as usize, 0, 0, 0, 0, 0),
        }
    };
}

/// Sleeps while `word` equals `value`, at most until the monotonic clock reaches `until`.
pub(crate) fn wait(word: &AtomicU32, value: u32, until: u64) {
    // Not FUTEX_PRIVATE_FLAG: the node wakes waiters. The bitset variant takes an absolute time.
    const FUTEX_WAIT_BITSET: usize = 9;
    let time = [until / 1_000_000_000, until % 1_000_000_000];
    let word = core::ptr::from_ref(word) as usize;
    // SAFETY: the kernel reads the word and a timespec of two words.
    unsafe {
        call(
            number::FUTEX,
            word,
            FUTEX_WAIT_BITSET,
            value as usize,
            time.as_ptr() as usize,
            0,
            u32::MAX as usize,
        )
    };
}

/// Wakes all waiters of the word, in any process.
pub(crate) fn wake(word: &AtomicU32) {
    const FUTEX_WAKE: usize = 1;
    let word = core::ptr::from_ref(word) as usize;
    // SAFETY: the kernel uses the word only as a key for waiters.
    unsafe { call(number::FUTEX, word, FUTEX_WAKE, i32::MAX as usize, 0, 0, 0) };
}

/// Blocks all signals in the calling thread. Returns the previous mask.
pub(crate) fn block_signals() -> u64 {
    set_signals(u64::MAX)
}

/// Sets the signal mask of the calling thread. Returns the previous mask.
pub(crate) fn set_signals(mask: u64) -> u64 {
    const SIG_SETMASK: usize = 2;
    let mut before = 0u64;
    // SAFETY: the kernel reads a set of 64 signals, and writes one.
    unsafe {
        let (new, old) = (&raw const mask as usize, &raw mut before as usize);
        call(number::RT_SIGPROCMASK, SIG_SETMASK, new, old, size_of::<u64>(), 0, 0);
    }
    before
}

/// Content of a mapping in a forked child.
#[derive(Clone, Copy)]
pub(crate) enum InChild {
    Nothing,
    Zeros,
}

/// Maps private zeroed memory. Null on failure.
pub(crate) fn map_private(bytes: usize, child: InChild) -> *mut u8 {
    const MAP_PRIVATE_ANONYMOUS: usize = 0x22;
    let advice = match child {
        InChild::Nothing => 10, // MADV_DONTFORK
        InChild::Zeros => 18,   // MADV_WIPEONFORK
    };
    // SAFETY: a new mapping at an address of the kernel's choice, and advice about it.
    unsafe {
        let at = call(number::MMAP, 0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE_ANONYMOUS, usize::MAX, 0);
        if at <= 0 || call(number::MADVISE, at as usize, bytes, advice, 0, 0, 0) < 0 {
            return core::ptr::null_mut();
        }
        at as *mut u8
    }
}

/// # Safety
/// `address` and `bytes` come from one call of [`map_private`], and nothing refers to the memory.
pub(crate) unsafe fn unmap(address: *mut u8, bytes: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { call(number::MUNMAP, address as usize, bytes, 0, 0, 0, 0) };
}

/// Sleeps until a signal comes.
#[cfg(panic = "abort")]
pub(crate) fn pause() {
    // SAFETY: ppoll without descriptors and without a time limit.
    unsafe { call(number::PPOLL, 0, 0, 0, 0, 0, 0) };
}

/// Writes a line to the standard error of the program if that is a pipe or a terminal which takes it
/// at once. Otherwise the write could block the program, raise SIGPIPE, or corrupt a file or
/// connection that the program opened as descriptor 2.
pub(crate) fn print(line: &[u8]) {
    const STDERR: usize = 2;
    const S_IFIFO: u32 = 0o010000;
    const S_IFCHR: u32 = 0o020000;
    const POLLOUT: i16 = 4;
    #[repr(C)]
    struct PollFd {
        fd: i32,
        events: i16,
        revents: i16,
    }
    let mut statx = [0u64; 32];
    let mut poll = PollFd { fd: STDERR as i32, events: POLLOUT, revents: 0 };
    let no_wait = [0u64; 2];
    // SAFETY: the kernel reads an empty name, a timespec and the line, and writes 256 bytes and one
    // pollfd.
    unsafe {
        let (empty, into) = (c"".as_ptr() as usize, statx.as_mut_ptr() as usize);
        if call(number::STATX, STDERR, empty, AT_EMPTY_PATH, STATX_BASIC, into, 0) < 0 {
            return;
        }
        let kind = (statx[3] >> 32) as u32 & S_IFMT;
        let is_stream = kind == S_IFIFO || kind == S_IFCHR;
        let (fds, timeout) = (&raw mut poll as usize, no_wait.as_ptr() as usize);
        let is_ready = || call(number::PPOLL, fds, 1, timeout, 0, 0, 0) == 1;
        // Not if the reader is gone: that is reported as POLLERR as well.
        if is_stream && is_ready() && poll.revents == POLLOUT {
            call(number::WRITE, STDERR, line.as_ptr() as usize, line.len(), 0, 0, 0);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod number {
    pub(super) const READ: usize = 0;
    pub(super) const WRITE: usize = 1;
    pub(super) const CLOSE: usize = 3;
    pub(super) const MMAP: usize = 9;
    pub(super) const MUNMAP: usize = 11;
    pub(super) const RT_SIGPROCMASK: usize = 14;
    pub(super) const SCHED_YIELD: usize = 24;
    pub(super) const MADVISE: usize = 28;
    pub(super) const NANOSLEEP: usize = 35;
    pub(super) const GETPID: usize = 39;
    pub(super) const KILL: usize = 62;
    pub(super) const FSTATFS: usize = 138;
    pub(super) const FUTEX: usize = 202;
    pub(super) const GETDENTS64: usize = 217;
    pub(super) const CLOCK_GETTIME: usize = 228;
    pub(super) const OPENAT: usize = 257;
    pub(super) const STATX: usize = 332;
    pub(super) const OPENAT2: usize = 437;
    pub(super) const PPOLL: usize = 271;
}

#[cfg(target_arch = "aarch64")]
mod number {
    pub(super) const FSTATFS: usize = 44;
    pub(super) const OPENAT: usize = 56;
    pub(super) const CLOSE: usize = 57;
    pub(super) const GETDENTS64: usize = 61;
    pub(super) const READ: usize = 63;
    pub(super) const WRITE: usize = 64;
    pub(super) const PPOLL: usize = 73;
    pub(super) const FUTEX: usize = 98;
    pub(super) const NANOSLEEP: usize = 101;
    pub(super) const CLOCK_GETTIME: usize = 113;
    pub(super) const SCHED_YIELD: usize = 124;
    pub(super) const RT_SIGPROCMASK: usize = 135;
    pub(super) const KILL: usize = 129;
    pub(super) const GETPID: usize = 172;
    pub(super) const MUNMAP: usize = 215;
    pub(super) const MMAP: usize = 222;
    pub(super) const MADVISE: usize = 233;
    pub(super) const STATX: usize = 291;
    pub(super) const OPENAT2: usize = 437;
}

/// # Safety
/// The arguments meet the requirements of the system call.
#[cfg(target_arch = "x86_64")]
unsafe fn call(number: usize, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    let answer;
    // SAFETY: the kernel's calling convention; the caller guarantees the arguments.
    unsafe {
        asm!("syscall", inlateout("rax") number => answer, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
             in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    answer
}

/// # Safety
/// The arguments meet the requirements of the system call.
#[cfg(target_arch = "aarch64")]
unsafe fn call(number: usize, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> isize {
    let answer;
    // SAFETY: the kernel's calling convention; the caller guarantees the arguments.
    unsafe {
        asm!("svc 0", in("x8") number, inlateout("x0") a => answer, in("x1") b, in("x2") c, in("x3") d,
             in("x4") e, in("x5") f, options(nostack));
    }
    answer
}
