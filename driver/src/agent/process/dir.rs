//! The directory of a process, open: what is read below it is that process's, or fails when it is gone, whoever has its
//! number by then. Source: pidfd_send_signal(2), which takes such a directory for the process.
//!
//! The files that each look reads stay open with it, as to find and open one takes longer than to read it. None of
//! them keeps anything of the process's that matters to others: one of its mounts would keep these.

use super::super::mounts;
use rustix::fs::{CWD, Mode, OFlags, openat, readlinkat};
use rustix::io::pread;
use std::cell::OnceCell;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;

/// What such a file holds, as a rule.
const USUAL: usize = 4096;

#[derive(Debug)]
pub(super) struct Dir {
    dir: OwnedFd,
    stat: OnceCell<OwnedFd>,
    cgroup: OnceCell<OwnedFd>,
}

impl Dir {
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let dir = openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { dir, stat: OnceCell::new(), cgroup: OnceCell::new() })
    }

    pub(super) fn stat(&self) -> io::Result<String> {
        self.anew(&self.stat, "stat")
    }

    pub(super) fn cgroup(&self) -> io::Result<String> {
        self.anew(&self.cgroup, "cgroup")
    }

    /// A file of it, whose bytes need not be text, as far as anybody looks.
    pub(super) fn text(&self, name: &str) -> io::Result<String> {
        let mut bytes = Vec::with_capacity(USUAL);
        File::from(self.file(name)?).take(mounts::LARGEST as u64).read_to_end(&mut bytes)?;
        Ok(text(bytes))
    }

    /// Where a link of it leads, if that is text.
    pub(super) fn link(&self, name: &str) -> io::Result<Option<String>> {
        Ok(readlinkat(&self.dir, name, Vec::new())?.into_string().ok())
    }

    fn file(&self, name: &str) -> io::Result<OwnedFd> {
        Ok(openat(&self.dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// A file that the kernel writes as a whole for who reads it from its begin: who is given less than there was room for has
    /// all of it. Source: `single_open` of the kernel's `fs/seq_file.c`.
    fn anew(&self, kept: &OnceCell<OwnedFd>, name: &str) -> io::Result<String> {
        let file = match kept.get() {
            Some(file) => file,
            None => {
                let file = self.file(name)?;
                kept.get_or_init(|| file)
            }
        };
        let mut bytes = vec![0; USUAL];
        let mut length = 0;
        loop {
            length += pread(file, bytes.get_mut(length..).unwrap_or_default(), length as u64)?;
            if length < bytes.len() || length >= mounts::LARGEST {
                bytes.truncate(length);
                return Ok(text(bytes));
            }
            bytes.resize(2 * length, 0);
        }
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn what_is_kept_open_is_read_as_it_is_now_and_whole() {
        let root = tempfile::tempdir().unwrap();
        let write = |text: &str| fs::write(root.path().join("cgroup"), text).unwrap();
        let dir = Dir::open(root.path()).unwrap();
        assert_eq!(dir.cgroup().unwrap_err().kind(), io::ErrorKind::NotFound);
        for length in [USUAL - 1, USUAL, 3 * USUAL, 7, 0] {
            let said = "x".repeat(length);
            write(&said);
            assert_eq!(dir.cgroup().unwrap(), said);
        }
        write(&"x".repeat(2 * mounts::LARGEST));
        assert!(dir.cgroup().unwrap().len() >= mounts::LARGEST);
    }

    #[test]
    fn of_a_process_that_is_gone_nothing_is_read() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let dir = Dir::open(&Path::new("/proc").join(child.id().to_string())).unwrap();
        assert!(dir.stat().unwrap().contains("(sleep)") && !dir.cgroup().unwrap().is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(dir.stat().is_err() && dir.text("stat").is_err());
    }
}
