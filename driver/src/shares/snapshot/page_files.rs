//! A cache of open page files.
//!
//! The root of a container can take a lease on a mounted page (`F_SETLEASE`). A process that opens
//! the file then waits until the lease is released, or for 45 seconds
//! (`/proc/sys/fs/lease-break-time`), and so would the audit of every share on the node. Pages are
//! therefore opened without blocking and kept open: no process can take a lease on a file that
//! another process has open. Source: fcntl(2), "Leases".

use crate::shares;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Open files by path. The key is the path as bytes, which compares faster than path components.
#[derive(Debug, Default)]
pub(crate) struct PageFiles(Mutex<BTreeMap<OsString, OpenFile>>);

#[derive(Debug)]
struct OpenFile {
    file: Arc<File>,
    /// It was used since the last call of [`PageFiles::close_removed`].
    is_used: bool,
}

impl PageFiles {
    /// Opens the file at this path, or returns the cached one as long as it has a name. A page is
    /// only ever unlinked or replaced, never renamed, so a cached file with a name is still the
    /// file at this path.
    ///
    /// # Errors
    /// `WouldBlock` if a process holds a lease on the file. The kernel asks that process to release it.
    pub(crate) fn open(&self, path: &Path, write: bool) -> io::Result<(Arc<File>, Metadata)> {
        let mut all = self.all();
        if let Some(open) = all.get_mut(path.as_os_str())
            && let Some(meta) = linked(&open.file)
        {
            open.is_used = true;
            return Ok((Arc::clone(&open.file), meta));
        }
        let file = Arc::new(shares::open(path, write)?);
        let meta = file.metadata()?;
        all.insert(path.into(), OpenFile { file: Arc::clone(&file), is_used: true });
        Ok((file, meta))
    }

    /// The cached file without a check of the path, for callers that have just opened it.
    pub(crate) fn cached(&self, path: &Path) -> Option<Arc<File>> {
        self.all().get(path.as_os_str()).map(|open| Arc::clone(&open.file))
    }

    /// Closes files that were removed. Files used since the last call are not checked: they had a name then.
    pub(crate) fn close_removed(&self) {
        self.all().retain(|_, open| std::mem::take(&mut open.is_used) || linked(&open.file).is_some());
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<OsString, OpenFile>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The metadata of a file that still has a name.
fn linked(file: &File) -> Option<Metadata> {
    file.metadata().ok().filter(|meta| meta.nlink() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn recreated_page_is_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("account");
        let files = PageFiles::default();
        assert_eq!(files.open(&path, true).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(&path, "first").unwrap();
        let (first, _) = files.open(&path, true).unwrap();
        assert!(Arc::ptr_eq(&first, &files.open(&path, true).unwrap().0), "kept open");
        fs::remove_file(&path).unwrap();
        fs::write(&path, "other").unwrap();
        let (other, meta) = files.open(&path, true).unwrap();
        assert_eq!(meta.ino(), path.metadata().unwrap().ino());
        fs::remove_file(&path).unwrap();
        files.close_removed();
        files.close_removed();
        assert_eq!(Arc::strong_count(&other), 1, "closed");
    }
}
