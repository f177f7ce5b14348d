//! Removes a directory in which tenants can write, such as that of an MPS daemon with clients.
//!
//! Tenants may nest directories deeper than a stack or the open file limit allows. So nothing here
//! recurses: the entries of a subdirectory are moved up into the top directory until it is empty.
//! All operations use directory descriptors, because a running client may replace a directory by a
//! symbolic link at any moment. The removal stops after a deadline, as a client may keep writing;
//! the caller retries later.

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, openat, renameat, unlinkat};
use rustix::io::Errno;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// Deadline of one removal.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Removes a directory with all its contents. After an error the rest remains, and the call can be
/// repeated.
///
/// # Errors
/// The error of the first entry that cannot be removed, or [`io::ErrorKind::TimedOut`] if a process
/// keeps writing into the directory.
pub fn remove(dir: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = openat(CWD, dir, flags, Mode::empty())?;
    let (deadline, mut moved) = (Instant::now() + TIMEOUT, 0);
    loop {
        let mut is_empty = true;
        for_each_entry(&top, deadline, |name| {
            is_empty = false;
            match unlinkat(&top, name, AtFlags::empty()) {
                Err(Errno::ISDIR) => {}
                Err(Errno::NOENT) => return Ok(()),
                removed => return Ok(removed?),
            }
            let below = match openat(&top, name, flags, Mode::empty()) {
                // The entry was replaced meanwhile; the next round removes it.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
                below => below?,
            };
            for_each_entry(&below, deadline, |inner| {
                moved += 1;
                match renameat(&below, inner, &top, format!(".{moved}")) {
                    // The name is taken already; the next round uses another one.
                    Err(Errno::NOENT | Errno::EXIST | Errno::NOTEMPTY | Errno::ISDIR | Errno::NOTDIR) => {
                        Ok(())
                    }
                    moved => Ok(moved?),
                }
            })?;
            match unlinkat(&top, name, AtFlags::REMOVEDIR) {
                Err(Errno::NOENT | Errno::NOTEMPTY | Errno::NOTDIR) => Ok(()),
                removed => Ok(removed?),
            }
        })?;
        if is_empty {
            return fs::remove_dir(dir);
        }
    }
}

/// Calls `act` with the name of each entry of a directory.
fn for_each_entry(
    dir: &OwnedFd,
    deadline: Instant,
    mut act: impl FnMut(&CStr) -> io::Result<()>,
) -> io::Result<()> {
    for entry in Dir::read_from(dir)? {
        if Instant::now() > deadline {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "a process keeps writing into the directory",
            ));
        }
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            act(name)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // A test may panic.

    use super::*;
    use rustix::fs::mkdirat;

    #[test]
    fn deep_tree_is_removed_and_link_targets_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (tree, kept) = (dir.path().join("tree"), dir.path().join("kept"));
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), "").unwrap();
        fs::write(tree.join("a/file"), "").unwrap();
        // Names that the removal itself uses for moved entries.
        fs::write(tree.join(".1"), "").unwrap();
        fs::create_dir_all(tree.join(".2/x")).unwrap();
        std::os::unix::fs::symlink(&kept, tree.join("a/b/link")).unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let mut at = openat(CWD, &tree, flags, Mode::empty()).unwrap();
        for _ in 0..2000 {
            mkdirat(&at, "deep", Mode::RWXU).unwrap();
            at = openat(&at, "deep", flags, Mode::empty()).unwrap();
        }
        let small = std::thread::Builder::new().stack_size(256 * 1024);
        small.spawn(move || remove(&tree)).unwrap().join().unwrap().unwrap();
        assert!(!dir.path().join("tree").exists());
        assert!(kept.join("file").exists());
        assert_eq!(remove(&dir.path().join("tree")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
