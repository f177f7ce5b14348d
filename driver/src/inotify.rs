//! Notification about files that another process writes, through inotify on directories.
//!
//! The notification says only that something changed; the caller then reads the files.

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use tokio::io::unix::AsyncFd;

/// Entries are created, moved or deleted, or the directory itself is deleted.
const ENTRIES: WatchFlags = WatchFlags::CREATE
    .union(WatchFlags::MOVED_TO)
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::DELETE)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::ONLYDIR);

/// A set of watched directories; the watches end when it is dropped.
pub(crate) struct DirWatcher(AsyncFd<OwnedFd>);

impl DirWatcher {
    pub(crate) fn new() -> io::Result<Self> {
        let fd = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        // Deprecated because future types may return another descriptor each time; OwnedFd does not.
        #[allow(deprecated)]
        Ok(Self(AsyncFd::new(fd)?))
    }

    /// Adds a directory; adding it again has no effect. The watch ends with the directory.
    pub(crate) fn watch(&self, dir: &Path) -> io::Result<()> {
        inotify::add_watch(self.0.get_ref(), dir, ENTRIES.union(WatchFlags::CLOSE_WRITE))?;
        Ok(())
    }

    /// The same without writes to files: for directories where others may write and wake at will.
    pub(crate) fn watch_entries(&self, dir: &Path) -> io::Result<()> {
        inotify::add_watch(self.0.get_ref(), dir, ENTRIES)?;
        Ok(())
    }

    /// Returns after a change since the last call; several changes count as one.
    pub(crate) async fn next(&self) -> io::Result<()> {
        let mut changed = false;
        loop {
            let mut ready = self.0.readable().await?;
            let mut events = [0; 4096];
            loop {
                match rustix::io::read(self.0.get_ref(), &mut events) {
                    Ok(_) => changed = true,
                    Err(Errno::INTR) => {}
                    Err(Errno::AGAIN) => break,
                    Err(cause) => return Err(cause.into()),
                }
            }
            ready.clear_ready();
            if changed {
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
    async fn changes_in_a_watched_directory_wake_once() {
        let dir = tempfile::tempdir().unwrap();
        let watcher = DirWatcher::new().unwrap();
        assert!(watcher.watch(&dir.path().join("absent")).is_err());
        watcher.watch(dir.path()).unwrap();
        assert!(watcher.next().now_or_never().is_none());
        std::fs::write(dir.path().join("a"), "").unwrap();
        std::fs::write(dir.path().join("b"), "").unwrap();
        watcher.next().await.unwrap();
        assert!(watcher.next().now_or_never().is_none());
        std::fs::remove_dir_all(dir.path()).unwrap();
        watcher.next().await.unwrap();
    }
}
