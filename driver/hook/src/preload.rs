//! Merges the preload list of the image with the list of a share.
//!
//! In a container with a share, `/etc/ld.so.preload` is a read-only mount with one line, which
//! hides the file of the image. Programs may need the libraries in that file (an allocator, a
//! profiler). So at `createContainer`, both lists are merge_lists in a host file of this container,
//! which is mounted over the first one, read-only. Appending to the image's file would leave the
//! list writable for the container; a file per claim would mix the lists of several images.

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
/// Largest list that is read: room for 16 paths of the maximum length.
const MAX_FILE_BYTES: u64 = 64 << 10;

/// Why the image's preload list cannot be merge_lists.
#[derive(Debug, thiserror::Error)]
pub enum PreloadError {
    #[error(transparent)]
    Root(#[from] RootError),
    #[error("cannot read /etc/{NAME} of the image")]
    Read(#[source] io::Error),
    #[error("/etc/{NAME} of the image is larger than {MAX_FILE_BYTES} bytes")]
    TooLarge,
    #[error("cannot write {path}")]
    Write {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("cannot mount {path} over /etc/{NAME} of the container")]
    Mount {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// Mounts the merge_lists list over the mounted one, if the image has its own list.
pub fn merge(root: &Root, dir: &Path, container: &ContainerId) -> Result<(), PreloadError> {
    let Some(own) = image_list(root)? else { return Ok(()) };
    let Some(target) = root.at(&list())? else { return Ok(()) };
    let mounted = read(&File::open(by_descriptor(&target)).map_err(PreloadError::Read)?)?;
    let Some(text) = merge_lists(&mounted, &own) else { return Ok(()) };
    let path = dir.join(container.as_str());
    write(dir, &path, &text).map_err(|cause| PreloadError::Write { path: path.clone(), cause })?;
    mount(root, &path, &target)
}

/// The image's own list, if it has one. It is hidden by the mount, so it is read through a clone of
/// the directory's mount, which has no submounts.
fn image_list(root: &Root) -> Result<Option<Vec<u8>>, PreloadError> {
    let Some(etc) = root.at(Path::new(ETC))? else { return Ok(None) };
    let bare = || -> io::Result<Option<File>> {
        let flags =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
        let tree = open_tree(&etc, "", flags)?;
        // A link would lead to the mounted file or to nothing.
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
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(PreloadError::Read)?;
    if bytes.len() as u64 > MAX_FILE_BYTES { Err(PreloadError::TooLarge) } else { Ok(bytes) }
}

/// The mounted list followed by the image's list, or `None` if the image's list has no other
/// library.
fn merge_lists(mounted: &[u8], own: &[u8]) -> Option<Vec<u8>> {
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

/// The libraries of a list as glibc parses it: separated by white space or `:`, with comments from
/// `#` to the end of the line.
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
        // Set the mode explicitly: the runtime's umask could hide the file from the container's
        // users.
        rustix::fs::fchmod(&file, Mode::from_raw_mode(0o444))?;
        file.write_all(text)?;
        fs::rename(&part, path)
    };
    write().inspect_err(|_| {
        // The first error is the one to report.
        let _ = fs::remove_file(&part);
    })
}

/// Mounts the file read-only. No process runs in the container yet, so none sees the writable mount
/// between the two calls.
fn mount(root: &Root, path: &Path, target: &OwnedFd) -> Result<(), PreloadError> {
    let fail = |cause: io::Error| PreloadError::Mount { path: path.to_owned(), cause };
    // By descriptor, so that no link can redirect the mount.
    mount_bind(path, by_descriptor(target)).map_err(|cause| fail(cause.into()))?;
    // The old descriptor now refers to the hidden file below the mount.
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
        let text = merge_lists(mounted.as_bytes(), own.as_bytes());
        assert_eq!(text.map(|text| String::from_utf8(text).unwrap()).as_deref(), expected);
    }

    #[test]
    fn mounted_list_comes_before_that_of_the_image() {
        check("/d.so\n", "/a.so\n", Some("/d.so\n/a.so\n"));
        check("/d.so", "/a.so:/b.so # why\n", Some("/d.so\n/a.so:/b.so # why\n"));
    }

    #[test]
    fn image_list_without_new_names_is_ignored() {
        check("/d.so\n", "", None);
        check("/d.so\n", "# /a.so\n \t:\n", None);
        check("/d.so\n/a.so\n", "/a.so\n", None);
    }
}
