//! Access to a container's root from the host; all file access of the hook goes through here.
//!
//! Every path is opened by `openat2` with `RESOLVE_IN_ROOT`, so `/` and `..` refer to the
//! container's root. `RESOLVE_NO_MAGICLINKS` keeps `/proc/*/fd` from leading out, and
//! `RESOLVE_NO_XDEV` keeps volumes, which may be host directories, from being written. The last
//! path component is created, replaced or removed relative to an open directory, so links there are
//! never followed.

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

/// Attempts of a path resolution that concurrent renames disturb.
const MAX_RESOLVE_ATTEMPTS: u32 = 64;

/// A directory or file of the container cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{action} {path} in the container")]
pub struct RootError {
    action: &'static str,
    path: PathBuf,
    #[source]
    cause: io::Error,
}

impl RootError {
    fn new(action: &'static str, path: &Path, cause: impl Into<io::Error>) -> Self {
        Self { action, path: path.to_owned(), cause: cause.into() }
    }

    /// Whether the path leads to another mount.
    pub fn is_volume(&self) -> bool {
        self.cause.kind() == io::ErrorKind::CrossesDevices
    }
}

/// The container's root.
#[derive(Debug)]
pub struct Root {
    fd: OwnedFd,
}

/// A directory inside the root.
#[derive(Debug)]
pub struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

impl Root {
    /// Opens the root by its path on the host, which the runtime chose.
    pub fn open(path: &Path) -> Result<Self, RootError> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(CWD, path, flags, Mode::empty());
        Ok(Self { fd: fd.map_err(|cause| RootError::new("opening", path, cause))? })
    }

    fn resolve(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV;
        self.resolve_by(path, flags, resolve)
    }

    fn resolve_by(&self, path: &Path, flags: OFlags, resolve: ResolveFlags) -> rustix::io::Result<OwnedFd> {
        for _ in 1..MAX_RESOLVE_ATTEMPTS {
            match rustix::fs::openat2(&self.fd, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                result => return result,
            }
        }
        Err(Errno::AGAIN)
    }

    /// Opens an existing path on any mount, to read it or to mount over it, never to write it.
    /// `None` if there is no such path.
    pub fn at(&self, path: &Path) -> Result<Option<OwnedFd>, RootError> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        match self.resolve_by(path, OFlags::PATH, resolve) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::NOENT) => Ok(None),
            Err(cause) => Err(RootError::new("opening", path, cause)),
        }
    }

    /// Whether the path exists.
    pub fn exists(&self, path: &Path) -> bool {
        self.resolve(path, OFlags::PATH).is_ok()
    }

    /// Opens a directory. Missing directories are created.
    pub fn dir(&self, path: &Path) -> Result<Dir, RootError> {
        let open = |path: &Path| self.resolve(path, OFlags::PATH | OFlags::DIRECTORY);
        let fail = |path: &Path, cause| RootError::new("opening directory", path, cause);
        match open(path) {
            Ok(fd) => return Ok(Dir { fd, path: path.to_owned() }),
            Err(Errno::NOENT) => {}
            Err(cause) => return Err(fail(path, cause)),
        }
        let mut fd = open(Path::new("/")).map_err(|cause| fail(path, cause))?;
        let mut here = PathBuf::from("/");
        for part in path.components() {
            let Component::Normal(name) = part else { continue };
            here.push(name);
            fd = match open(&here) {
                Err(Errno::NOENT) => {
                    // A dangling link at this name makes this fail, and it is not removed.
                    rustix::fs::mkdirat(&fd, name, Mode::from_raw_mode(0o755))
                        .map_err(|cause| RootError::new("creating directory", &here, cause))?;
                    open(&here)
                }
                result => result,
            }
            .map_err(|cause| fail(&here, cause))?;
        }
        Ok(Dir { fd, path: path.to_owned() })
    }

    /// The content of a regular file of at most `max_bytes`; `None` if there is no such file.
    pub fn read(&self, path: &Path, max_bytes: u64) -> Result<Option<Vec<u8>>, RootError> {
        let fail = |cause: io::Error| RootError::new("reading", path, cause);
        let regular = |fd: &OwnedFd| -> io::Result<bool> {
            Ok(FileType::from_raw_mode(rustix::fs::fstat(fd)?.st_mode) == FileType::RegularFile)
        };
        // Check the type before opening: opening a device can have side effects.
        match self.resolve(path, OFlags::PATH) {
            Err(Errno::NOENT) => return Ok(None),
            Err(cause) => return Err(fail(cause.into())),
            Ok(fd) if !regular(&fd).map_err(fail)? => return Ok(None),
            Ok(_) => {}
        }
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let fd = self.resolve(path, flags).map_err(|cause| fail(cause.into()))?;
        if !regular(&fd).map_err(fail)? {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        File::from(fd).take(max_bytes + 1).read_to_end(&mut bytes).map_err(fail)?;
        Ok((bytes.len() as u64 <= max_bytes).then_some(bytes))
    }
}

impl Dir {
    /// Creates a link. It replaces any existing entry except a directory or a mount.
    pub fn link(&self, name: &str, target: &str) -> Result<(), RootError> {
        let fail = |cause| RootError::new("linking", &self.path.join(name), cause);
        match rustix::fs::readlinkat(&self.fd, name, Vec::new()) {
            Ok(have) if have.to_bytes() == target.as_bytes() => return Ok(()),
            Ok(_) | Err(Errno::INVAL) => match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
                Ok(()) => {}
                // A mount of this claim or another is the library itself.
                Err(Errno::BUSY) => return Ok(()),
                Err(cause) => return Err(fail(cause)),
            },
            Err(Errno::NOENT) => {}
            Err(cause) => return Err(fail(cause)),
        }
        rustix::fs::symlinkat(target, &self.fd, name).map_err(fail)
    }

    /// Replaces an entry other than a directory by a file, atomically.
    pub fn replace(&self, name: &str, bytes: &[u8]) -> Result<(), RootError> {
        let part = format!(".divvy-{name}.{}", std::process::id());
        let write = || -> io::Result<()> {
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let fd = rustix::fs::openat(&self.fd, &part, flags, Mode::from_raw_mode(0o644))?;
            // Set the mode explicitly: the runtime's umask could hide the file from the container's
            // users.
            rustix::fs::fchmod(&fd, Mode::from_raw_mode(0o644))?;
            File::from(fd).write_all(bytes)?;
            Ok(rustix::fs::renameat(&self.fd, &part, &self.fd, name)?)
        };
        write().map_err(|cause| {
            // The first error is the one to report.
            let _ = rustix::fs::unlinkat(&self.fd, &part, AtFlags::empty());
            RootError::new("writing", &self.path.join(name), cause)
        })
    }
}
