//! Waiting for file changes and for the exit of a process. A wakeup does not say what changed: the
//! caller reads the current state.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// An inotify instance and the files and directories it watches.
pub(crate) struct Watch(OwnedFd);

impl Watch {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?))
    }

    /// An instance that watches the entries of one directory, see [`Watch::entries`].
    pub(crate) fn of_entries(dir: &Path) -> io::Result<Self> {
        let watch = Self::new()?;
        watch.entries(dir)?;
        Ok(watch)
    }

    /// Watches for entries that are created, deleted or replaced in a directory, and for its own
    /// removal. The same directory may be added again.
    pub(crate) fn entries(&self, dir: &Path) -> io::Result<()> {
        let flags = WatchFlags::CREATE
            | WatchFlags::MOVED_TO
            | WatchFlags::MOVED_FROM
            | WatchFlags::DELETE
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF
            | WatchFlags::ONLYDIR;
        inotify::add_watch(&self.0, dir, flags)?;
        Ok(())
    }

    /// Watches for writes to a file. A missing file is not watched.
    pub(crate) fn writing(&self, file: &Path) {
        // This is only a hint: without it the next health check notices the change.
        let _ = inotify::add_watch(&self.0, file, WatchFlags::MODIFY);
    }

    /// Returns when something changed, the process exited or `time` is over.
    pub(crate) fn wait(&self, process: Option<BorrowedFd<'_>>, time: Duration) -> io::Result<()> {
        let own = PollFd::new(&self.0, PollFlags::IN);
        let mut fds = vec![own];
        fds.extend(process.map(|process| PollFd::from_borrowed_fd(process, PollFlags::IN)));
        match poll(&mut fds, Some(&timespec(time))) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let mut events = [0; 4096];
        loop {
            match rustix::io::read(&self.0, &mut events) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// A duration in the kernel's format.
pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}
