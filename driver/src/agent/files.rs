//! The files of pages, kept open.
//!
//! The root of a container can take a lease on a page that it has mounted (`F_SETLEASE`):
//! whoever opens the file then waits until the lease is given back, or for 45 seconds
//! (`/proc/sys/fs/lease-break-time`), and all shares of the node would wait with it. So
//! no page is opened in a way that waits, and one that is open is kept so: nobody gets a
//! lease on a file that somebody else has open. Source: fcntl(2), "Leases".

use crate::shares;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Those that are open, by path: as bytes, which compare faster than names one by one.
#[derive(Debug, Default)]
pub(super) struct Files(Mutex<BTreeMap<OsString, Open>>);

#[derive(Debug)]
struct Open {
    file: Arc<File>,
    /// Somebody has got it since the last sweep.
    is_wanted: bool,
}

impl Files {
    /// The file that is at that path now: the one that was, as long as it has a name, as nobody gives a page another one
    /// but who replaces it. `WouldBlock`: somebody has a lease on it, and is being told to give it back.
    pub(super) fn get(&self, path: &Path, write: bool) -> io::Result<(Arc<File>, Metadata)> {
        let mut all = self.all();
        if let Some(open) = all.get_mut(path.as_os_str())
            && let Some(meta) = named(&open.file)
        {
            open.is_wanted = true;
            return Ok((Arc::clone(&open.file), meta));
        }
        let file = Arc::new(shares::open(path, write)?);
        let meta = file.metadata()?;
        all.insert(path.into(), Open { file: Arc::clone(&file), is_wanted: true });
        Ok((file, meta))
    }

    /// The file that was at that path when somebody got it last: for who has just done so.
    pub(super) fn known(&self, path: &Path) -> Option<Arc<File>> {
        self.all().get(path.as_os_str()).map(|open| Arc::clone(&open.file))
    }

    /// Lets go of pages that were removed. Those that somebody has got since this was last asked had a name then.
    pub(super) fn sweep(&self) {
        self.all().retain(|_, open| std::mem::take(&mut open.is_wanted) || named(&open.file).is_some());
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<OsString, Open>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a file is that has a name still.
fn named(file: &File) -> Option<Metadata> {
    file.metadata().ok().filter(|meta| meta.nlink() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_page_that_was_made_anew_is_not_taken_for_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("account");
        let files = Files::default();
        assert_eq!(files.get(&path, true).unwrap_err().kind(), io::ErrorKind::NotFound);
        fs::write(&path, "first").unwrap();
        let (first, _) = files.get(&path, true).unwrap();
        assert!(Arc::ptr_eq(&first, &files.get(&path, true).unwrap().0), "kept open");
        fs::remove_file(&path).unwrap();
        fs::write(&path, "other").unwrap();
        let (other, meta) = files.get(&path, true).unwrap();
        assert_eq!(meta.ino(), path.metadata().unwrap().ino());
        fs::remove_file(&path).unwrap();
        files.sweep();
        files.sweep();
        assert_eq!(Arc::strong_count(&other), 1, "let go of");
    }
}
