//! Removing a directory in which tenants have written, as clients of an MPS daemon do.
//!
//! They may nest directories deeper than a stack, and than files may be open at once, so nothing here goes down: what
//! is in a subdirectory is moved up into the directory that is to go, until there are only empty ones. All of it goes by
//! descriptors, as a client that still runs may put a symbolic link in a directory's place at any moment. And it ends
//! though a client goes on writing: what is left is for the next time. A crate of its own, as the node daemon removes
//! such directories too, where no keeper is left to.

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, openat, renameat, unlinkat};
use rustix::io::Errno;
use std::ffi::CStr;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

/// It is given up after that time.
const WITHIN: Duration = Duration::from_secs(10);

/// Removes a directory with all that is in it. An error leaves what is left of it; it may be called again.
///
/// # Errors
/// Of the kernel, for the first name that does not go; [`io::ErrorKind::TimedOut`] where somebody still writes there.
pub fn remove(dir: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let top = openat(CWD, dir, flags, Mode::empty())?;
    let (by, mut moved) = (Instant::now() + WITHIN, 0);
    loop {
        let mut is_empty = true;
        each(&top, by, |name| {
            is_empty = false;
            match unlinkat(&top, name, AtFlags::empty()) {
                Err(Errno::ISDIR) => {}
                Err(Errno::NOENT) => return Ok(()),
                removed => return Ok(removed?),
            }
            let below = match openat(&top, name, flags, Mode::empty()) {
                // It is something else by now, and goes in the next round.
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(()),
                below => below?,
            };
            each(&below, by, |inner| {
                moved += 1;
                match renameat(&below, inner, &top, format!(".{moved}")) {
                    // Something of that name is there already: the next round has another name.
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

/// Everything that is in a directory, by name.
fn each(dir: &OwnedFd, by: Instant, mut act: impl FnMut(&CStr) -> io::Result<()>) -> io::Result<()> {
    for entry in Dir::read_from(dir)? {
        if Instant::now() > by {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "somebody still writes there"));
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
    use super::*;
    use rustix::fs::mkdirat;

    #[test]
    fn a_tree_deeper_than_any_stack_goes_and_nothing_that_it_points_to() {
        let dir = tempfile::tempdir().unwrap();
        let (tree, kept) = (dir.path().join("tree"), dir.path().join("kept"));
        fs::create_dir_all(tree.join("a/b")).unwrap();
        fs::create_dir(&kept).unwrap();
        fs::write(kept.join("file"), "").unwrap();
        fs::write(tree.join("a/file"), "").unwrap();
        // The names that it gives to others.
        fs::write(tree.join(".1"), "").unwrap();
        fs::create_dir_all(tree.join(".2/x")).unwrap();
        std::os::unix::fs::symlink(&kept, tree.join("a/b/link")).unwrap();
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let mut at = openat(CWD, &tree, flags, Mode::empty()).unwrap();
        for _ in 0..5000 {
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
