//! The files of pages, kept open.
//!
//! The root of a container can take a lease on a page that it has mounted (`F_SETLEASE`):
//! whoever opens the file then waits until the lease is given back, or for 45 seconds
//! (`/proc/sys/fs/lease-break-time`), and all shares of the node would wait with it. So
//! no page is opened in a way that waits, and one that is open is kept so: nobody gets a
//! lease on a file that somebody else has open. Source: fcntl(2), "Leases".

use crate::shares;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Those that are open, by path.
#[derive(Debug, Default)]
pub(super) struct Files(Mutex<BTreeMap<PathBuf, Arc<File>>>);

impl Files {
    /// The file that is at that path now: the one that was, as long as it has a name, as nobody gives a page another one
    /// but who replaces it. `WouldBlock`: somebody has a lease on it, and is being told to give it back.
    pub(super) fn get(&self, path: &Path, write: bool) -> io::Result<Arc<File>> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = open.get(path).filter(|known| is_there(known)) {
            return Ok(Arc::clone(known));
        }
        let file = Arc::new(shares::open(path, write)?);
        open.insert(path.to_owned(), Arc::clone(&file));
        Ok(file)
    }

    /// Lets go of pages that were removed.
    pub(super) fn sweep(&self) {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, known| is_there(known));
    }
}

/// Its path leads to it still.
fn is_there(file: &File) -> bool {
    file.metadata().is_ok_and(|meta| meta.nlink() > 0)
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
        let first = files.get(&path, true).unwrap();
        assert!(Arc::ptr_eq(&first, &files.get(&path, true).unwrap()), "kept open");
        fs::remove_file(&path).unwrap();
        fs::write(&path, "other").unwrap();
        let other = files.get(&path, true).unwrap();
        assert_eq!(other.metadata().unwrap().ino(), path.metadata().unwrap().ino());
        fs::remove_file(&path).unwrap();
        files.sweep();
        assert_eq!(Arc::strong_count(&other), 1, "let go of");
    }
}
