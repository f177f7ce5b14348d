//! Wakes whoever waits for files that another process writes: inotify on
//! directories, so that nothing polls. It says that something has changed, never
//! what; the waiter looks at the files, which are the truth.

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use tokio::io::unix::AsyncFd;

/// Entries that come or go; the directory itself that goes.
const ENTRIES: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::ONLYDIR);

/// Directories that are watched, until it is dropped.
pub(crate) struct Changes(AsyncFd<OwnedFd>);

impl Changes {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        // What made it deprecated are types that may answer another number later.
        #[allow(deprecated)]
        Ok(Self(AsyncFd::new(fd)?))
    }

    /// Watches a directory too; one that is watched already is fine. A watch ends
    /// with its directory.
    pub(crate) fn watch(&self, dir: &Path) -> io::Result<()> {
        inotify::add_watch(self.0.get_ref(), dir, ENTRIES.union(WatchFlags::CLOSE_WRITE))?;
        Ok(())
    }

    /// The same, but for what is written to its files: where others may write, they would wake at will.
    pub(crate) fn watch_entries(&self, dir: &Path) -> io::Result<()> {
        inotify::add_watch(self.0.get_ref(), dir, ENTRIES)?;
        Ok(())
    }

    /// Returns when something has changed since the last time; changes that came
    /// meanwhile are one.
    pub(crate) async fn next(&self) -> io::Result<()> {
        let mut heard = false;
        loop {
            let mut ready = self.0.readable().await?;
            let mut events = [0; 4096];
            loop {
                match rustix::io::read(self.0.get_ref(), &mut events) {
                    Ok(_) => heard = true,
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break,
                    Err(cause) => return Err(cause.into()),
                }
            }
            ready.clear_ready();
            if heard {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    #[tokio::test]
    async fn what_happens_in_a_watched_directory_wakes_once() {
        let dir = tempfile::tempdir().unwrap();
        let changes = Changes::new().unwrap();
        assert!(changes.watch(&dir.path().join("absent")).is_err());
        changes.watch(dir.path()).unwrap();
        assert!(changes.next().now_or_never().is_none());
        std::fs::write(dir.path().join("a"), "").unwrap();
        std::fs::write(dir.path().join("b"), "").unwrap();
        changes.next().await.unwrap();
        assert!(changes.next().now_or_never().is_none());
        std::fs::remove_dir_all(dir.path()).unwrap();
        changes.next().await.unwrap();
    }
}
