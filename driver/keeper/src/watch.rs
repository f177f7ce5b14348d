//! Waiting for files and processes: it is told that something has changed, never
//! what, and looks itself.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

/// Files and directories that are watched.
pub(crate) struct Watch(OwnedFd);

impl Watch {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self(inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?))
    }

    /// One that watches a directory's entries come and go.
    pub(crate) fn of_entries(dir: &Path) -> io::Result<Self> {
        let watch = Self::new()?;
        watch.entries(dir)?;
        Ok(watch)
    }

    /// Entries of a directory come, go or are replaced, or it goes itself. Once more for the same directory is fine.
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

    /// A file is written. One that is not there is not watched.
    pub(crate) fn writing(&self, file: &Path) {
        // It is a hint; without it the change is seen at the next check.
        let _ = inotify::add_watch(&self.0, file, WatchFlags::MODIFY);
    }

    /// Returns when something has changed, the process has ended or the time is over.
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

/// For the kernel.
pub(crate) fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(time.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}
