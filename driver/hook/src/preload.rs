//! What an image wants preloaded itself, kept beside what a share brings.
//!
//! `/etc/ld.so.preload` of a container with a share is a read-only mount with one
//! line, and the file of the image lies hidden below it. Where that file names
//! libraries (an allocator, a profiler), programs of the image may not work
//! without them. So at `createContainer`, in the container's mount namespace and
//! before its root is entered, the two are put together in a file of the host
//! that is this container's alone, and that is mounted over the first, read-only
//! as well. To append to the image's own file instead would leave the list
//! writable for the container's root; to have a file for each claim would give
//! one image's list to another.
//!
//! A mount is looked below through a copy of the directory's own mount, which
//! has nothing of what is mounted on it.

use crate::root::{Root, RootError};
use crate::state::ContainerId;
use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::mount::{MountFlags, OpenTreeFlags, mount_bind, mount_remount, open_tree};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const ETC: &str = "/etc";
const NAME: &str = "ld.so.preload";
/// A path has 4096 bytes at most; no image has so many of them.
const LARGEST: u64 = 64 << 10;

/// Why a container does not get what its image wants preloaded.
#[derive(Debug, thiserror::Error)]
pub enum PreloadError {
    #[error(transparent)]
    Root(#[from] RootError),
    #[error("/etc/{NAME} of the image cannot be read")]
    Read(#[source] io::Error),
    #[error("/etc/{NAME} of the image is larger than {LARGEST} bytes")]
    TooLarge,
    #[error("{path} cannot be written")]
    Write {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{path} cannot be mounted over /etc/{NAME} of the container")]
    Mount {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// Mounts both lists over the mounted one, where the image has one of its own.
pub fn keep(root: &Root, dir: &Path, container: &ContainerId) -> Result<(), PreloadError> {
    let Some(own) = below(root)? else { return Ok(()) };
    let Some(target) = root.at(&list())? else { return Ok(()) };
    let mounted = read(&File::open(by_descriptor(&target)).map_err(PreloadError::Read)?)?;
    let Some(text) = merged(&mounted, &own) else { return Ok(()) };
    let path = dir.join(container.as_str());
    write(dir, &path, &text).map_err(|cause| PreloadError::Write { path: path.clone(), cause })?;
    mount(root, &path, &target)
}

/// The image's own list; nothing where it has none.
fn below(root: &Root) -> Result<Option<Vec<u8>>, PreloadError> {
    let Some(etc) = root.at(Path::new(ETC))? else { return Ok(None) };
    let bare = || -> io::Result<Option<File>> {
        let flags =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let tree = open_tree(&etc, "", flags)?;
        // A link leads to what is mounted, or nowhere.
        let kind = match rustix::fs::statat(&tree, NAME, AtFlags::SYMLINK_NOFOLLOW) {
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => return Ok(None),
            stat => FileType::from_raw_mode(stat?.st_mode),
        };
        if kind != FileType::RegularFile {
            return Ok(None);
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        Ok(Some(File::from(rustix::fs::openat(&tree, NAME, flags, Mode::empty())?)))
    };
    match bare().map_err(PreloadError::Read)? {
        None => Ok(None),
        Some(file) => read(&file).map(Some),
    }
}

fn read(file: &File) -> Result<Vec<u8>, PreloadError> {
    let mut bytes = Vec::new();
    file.take(LARGEST + 1).read_to_end(&mut bytes).map_err(PreloadError::Read)?;
    if bytes.len() as u64 > LARGEST { Err(PreloadError::TooLarge) } else { Ok(bytes) }
}

/// What is mounted comes first, then the image's list as it stands; nothing if
/// the image's list has no library that is not mounted already.
fn merged(mounted: &[u8], own: &[u8]) -> Option<Vec<u8>> {
    let have = names(mounted);
    if names(own).iter().all(|name| have.contains(name)) {
        return None;
    }
    let mut text = mounted.to_vec();
    if !text.ends_with(b"\n") {
        text.push(b'\n');
    }
    text.extend(own);
    Some(text)
}

/// The libraries of a list, as glibc reads it: separated by white space or `:`,
/// and comments from `#` to the end of the line.
fn names(list: &[u8]) -> Vec<&[u8]> {
    let lines = list.split(|byte| *byte == b'\n');
    let code = lines.map(|line| line.split(|byte| *byte == b'#').next().unwrap_or_default());
    code.flat_map(|line| line.split(|byte| byte.is_ascii_whitespace() || *byte == b':'))
        .filter(|name| !name.is_empty())
        .collect()
}

fn write(dir: &Path, path: &Path, text: &[u8]) -> io::Result<()> {
    let part = dir.join(format!(".part.{}", std::process::id()));
    let write = || -> io::Result<()> {
        let mut file = File::options().write(true).create_new(true).mode(0o444).open(&part)?;
        // The umask is the runtime's and must not hide the file from the container's users.
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o444))?;
        file.write_all(text)?;
        fs::rename(&part, path)
    };
    write().inspect_err(|_| {
        // The first error is the one to tell.
        let _ = fs::remove_file(&part);
    })
}

/// Mounts it read-only. Nothing runs in the container yet, so nobody sees it
/// between the two calls.
fn mount(root: &Root, path: &Path, target: &OwnedFd) -> Result<(), PreloadError> {
    let fail = |cause: io::Error| PreloadError::Mount { path: path.to_owned(), cause };
    // By its descriptor: no link can lead elsewhere any more.
    mount_bind(path, by_descriptor(target)).map_err(|cause| fail(cause.into()))?;
    // The other descriptor is of what lies below now.
    let target = root.at(&list())?.ok_or_else(|| fail(io::ErrorKind::NotFound.into()))?;
    let flags =
        MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount_remount(by_descriptor(&target), flags, "").map_err(|cause| fail(cause.into()))
}

fn by_descriptor(fd: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", fd.as_raw_fd())
}

fn list() -> PathBuf {
    Path::new(ETC).join(NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(mounted: &str, own: &str, expected: Option<&str>) {
        let text = merged(mounted.as_bytes(), own.as_bytes());
        assert_eq!(text.map(|text| String::from_utf8(text).unwrap()).as_deref(), expected);
    }

    #[test]
    fn both_lists_hold_and_the_mounted_one_comes_first() {
        check("/d.so\n", "/a.so\n", Some("/d.so\n/a.so\n"));
        check("/d.so", "/a.so:/b.so # why\n", Some("/d.so\n/a.so:/b.so # why\n"));
    }

    #[test]
    fn a_list_that_names_nothing_new_is_left_alone() {
        check("/d.so\n", "", None);
        check("/d.so\n", "# /a.so\n \t:\n", None);
        check("/d.so\n/a.so\n", "/a.so\n", None);
    }
}
