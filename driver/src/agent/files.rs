//! The files of pages, kept open.
//!
//! The root of a container can take a lease on a page that it has mounted (`F_SETLEASE`):
//! whoever opens the file then waits until the lease is given back, or for 45 seconds
//! (`/proc/sys/fs/lease-break-time`), and all shares of the node would wait with it. So
//! no page is opened in a way that waits, and one that is open is kept so: nobody gets a
//! lease on a file that somebody else has open. Source: fcntl(2), "Leases".

use crate::shares;
use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Those that are open, by path.
#[derive(Debug, Default)]
pub(super) struct Files(Mutex<BTreeMap<PathBuf, Open>>);

/// Device and inode of a file are nobody else's while it is open.
#[derive(Debug)]
struct Open {
    file: Arc<File>,
    is: (u64, u64),
}

impl Files {
    /// The file that is at that path now. `WouldBlock`: somebody has a lease on it, and is
    /// being told to give it back.
    pub(super) fn get(&self, path: &Path, write: bool) -> io::Result<Arc<File>> {
        let now = identity(&path.metadata()?);
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = open.get(path).filter(|known| known.is == now) {
            return Ok(Arc::clone(&known.file));
        }
        let file = Arc::new(shares::open(path, write)?);
        let is = identity(&file.metadata()?);
        open.insert(path.to_owned(), Open { file: Arc::clone(&file), is });
        Ok(file)
    }

    /// Lets go of pages that were removed.
    pub(super) fn sweep(&self) {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|_, known| known.file.metadata().is_ok_and(|meta| meta.nlink() > 0));
    }
}

fn identity(of: &Metadata) -> (u64, u64) {
    (of.dev(), of.ino())
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
        assert_eq!(identity(&other.metadata().unwrap()), identity(&path.metadata().unwrap()));
        fs::remove_file(&path).unwrap();
        files.sweep();
        assert_eq!(Arc::strong_count(&other), 1, "let go of");
    }
}
