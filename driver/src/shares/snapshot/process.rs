//! The state of a process, read from `/proc/<pid>`.
//!
//! A container chooses much of it: the command name may hold spaces, brackets and newlines, and a
//! cgroup below that of the container may have any name. Decisions rest only on what root alone can
//! choose: which cgroup the container is in, and where its mounts come from.

use super::mounts::{self, Mounts};
use divvy_pages::Identity;
use rustix::fs::{CWD, Mode, OFlags, openat, readlinkat};
use rustix::io::pread;
use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// A process as the host sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    /// The pid on the host.
    pub(crate) pid: u32,
    /// The command name, which the process chooses itself. For messages only.
    pub(crate) name: String,
    /// The process as it sees itself. The slot of an account page must hold the same identity.
    pub(crate) identity: Identity,
    pub(crate) cgroups: Cgroups,
    /// The mounts at the places where the process finds the pages of shares.
    pub(crate) mounts: Mounts,
}

/// The fields of `/proc/<pid>/stat` that the agent uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    pub(crate) name: String,
    /// All threads exited, and the parent has not waited for the process yet.
    pub(crate) is_zombie: bool,
    /// Field 22: clock ticks since boot.
    pub(crate) start: u64,
    /// Field 28: the start of its stack; 0 if the reader lacks permission.
    pub(crate) image: u64,
}

impl Stat {
    /// Parses the line. The command name is in brackets and may hold any byte, so the last bracket ends it.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let (head, tail) = line.rsplit_once(')')?;
        let (_, name) = head.split_once('(')?;
        // `fields` starts with field 3.
        let fields: Vec<&str> = tail.split_ascii_whitespace().collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        // A thread group leader that exited stays a zombie while other threads run.
        let is_zombie = matches!(*fields.first()?, "Z" | "X") && number(20)? <= 1;
        Some(Self { name: name.to_owned(), is_zombie, start: number(22)?, image: number(28).unwrap_or(0) })
    }

    /// Reads it from a directory such as `/proc/<pid>`.
    pub(crate) fn read(process: &Path) -> Option<Self> {
        Self::of(&ProcDir::open(process).ok()?)
    }

    fn of(process: &ProcDir) -> Option<Self> {
        Self::parse(&process.stat().ok()?)
    }
}

/// The cgroups of a process, by hierarchy: the lines of `/proc/<pid>/cgroup`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cgroups(Vec<(String, String)>);

impl Cgroups {
    /// Skips lines that do not have the format of that file.
    pub(crate) fn parse(text: &str) -> Self {
        let line = |line: &str| {
            let (hierarchy, path) = line.split_once(":/")?;
            Some((hierarchy.to_owned(), format!("/{path}")))
        };
        Self(text.lines().filter_map(line).collect())
    }

    /// Whether these are the container's cgroups or below them. A hierarchy in which the container
    /// has no cgroup of its own is ignored.
    pub(crate) fn are_within(&self, container: &Self) -> bool {
        let mut own = container.0.iter().filter(|(_, path)| path != "/").peekable();
        own.peek().is_some()
            && own.all(|(hierarchy, of)| {
                let mine = self.0.iter().find(|(name, _)| name == hierarchy);
                mine.is_some_and(|(_, path)| {
                    path.strip_prefix(of.as_str())
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
                })
            })
    }

    /// The directories of the container's own cgroups, one for each hierarchy.
    pub(crate) fn directories(&self, cgroup_root: &Path) -> impl Iterator<Item = PathBuf> {
        self.0.iter().filter_map(move |(hierarchy, path)| {
            let (_, controllers) = hierarchy.split_once(':')?;
            let controllers = controllers.strip_prefix("name=").unwrap_or(controllers);
            let below = path.strip_prefix('/').filter(|below| !below.is_empty() && is_plain(below))?;
            Some(cgroup_root.join(controllers).join(below))
        })
    }

    /// The path in the unified hierarchy; `None` if the container has no cgroup of its own there.
    pub(crate) fn unified(&self) -> Option<&str> {
        let (_, path) = self.0.iter().find(|(hierarchy, path)| hierarchy == "0:" && path != "/")?;
        is_plain(path).then_some(path)
    }
}

/// Whether a path only leads down. The path of a cgroup in another cgroup namespace starts with `..`.
fn is_plain(path: &str) -> bool {
    path.split('/').all(|part| part != "..")
}

/// An open directory `/proc/<pid>`. Reads fail once the process is gone, even if its pid was reused. Source:
/// pidfd_send_signal(2), which accepts such a directory as the process.
///
/// The files that every audit reads stay open too, because opening a file takes longer than reading
/// it. None of them pins a resource of the process. An open file of its mounts would, so that one
/// is not kept.
#[derive(Debug)]
struct ProcDir {
    dir: OwnedFd,
    stat: OnceCell<OwnedFd>,
    cgroup: OnceCell<OwnedFd>,
}

/// Size of the first read of a file. Most files are smaller.
const READ_BYTES: usize = 4096;

impl ProcDir {
    fn open(path: &Path) -> io::Result<Self> {
        let dir = openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { dir, stat: OnceCell::new(), cgroup: OnceCell::new() })
    }

    fn stat(&self) -> io::Result<String> {
        self.read_kept(&self.stat, "stat")
    }

    fn cgroup(&self) -> io::Result<String> {
        self.read_kept(&self.cgroup, "cgroup")
    }

    /// Reads a file, up to [`mounts::MOUNTINFO_MAX_BYTES`]. Invalid UTF-8 is replaced.
    fn text(&self, name: &str) -> io::Result<String> {
        let mut bytes = Vec::with_capacity(READ_BYTES);
        File::from(self.file(name)?).take(mounts::MOUNTINFO_MAX_BYTES as u64).read_to_end(&mut bytes)?;
        Ok(text(bytes))
    }

    /// Reads a symbolic link; `None` if the target is not UTF-8.
    fn link(&self, name: &str) -> io::Result<Option<String>> {
        Ok(readlinkat(&self.dir, name, Vec::new())?.into_string().ok())
    }

    fn file(&self, name: &str) -> io::Result<OwnedFd> {
        Ok(openat(&self.dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
    }

    /// Reads a file through a descriptor that stays open. The kernel generates such a file as a
    /// whole when it is read from offset 0, so a short read has all of it. Source: `single_open` in
    /// the kernel's `fs/seq_file.c`.
    fn read_kept(&self, kept: &OnceCell<OwnedFd>, name: &str) -> io::Result<String> {
        let file = match kept.get() {
            Some(file) => file,
            None => {
                let file = self.file(name)?;
                kept.get_or_init(|| file)
            }
        };
        let mut bytes = vec![0; READ_BYTES];
        let mut length = 0;
        loop {
            length += pread(file, bytes.get_mut(length..).unwrap_or_default(), length as u64)?;
            if length < bytes.len() || length >= mounts::MOUNTINFO_MAX_BYTES {
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

/// The `/proc` directories of at most this many processes per GPU stay open, with two files each.
const OPEN_DIRS_MAX: usize = 16;

/// The processes of the last audit. Properties that never change are not read again.
#[derive(Debug, Default)]
pub(crate) struct ProcessCache {
    processes: BTreeMap<u32, Process>,
    /// Of at most [`OPEN_DIRS_MAX`] of them.
    open: BTreeMap<u32, ProcDir>,
    /// Processes whose mounts were equal in two audits. The next audit reuses these mounts, because
    /// they take longest to read. A finding about mounts is thus based on two reads before the
    /// agent acts on it.
    settled: BTreeSet<u32>,
    /// The next audit reads all mounts.
    reads_mounts: bool,
}

impl ProcessCache {
    /// Reads a process; `None` if it exited. With `reuse`, a cached process with the same start and
    /// image is returned as it is.
    pub(crate) fn read(&mut self, proc_root: &Path, pid: u32, reuse: bool) -> Option<Process> {
        // Reads through the directory of a process that is gone fail, and then the pid may belong
        // to another process.
        let kept = self.open.remove(&pid).and_then(|dir| Some((Stat::of(&dir)?, dir)));
        let (stat, dir) = match kept {
            Some(kept) => kept,
            None => {
                let dir = ProcDir::open(&proc_root.join(pid.to_string())).ok()?;
                (Stat::of(&dir)?, dir)
            }
        };
        let process = self.complete(pid, stat, &dir, reuse)?;
        if self.open.len() < OPEN_DIRS_MAX {
            self.open.insert(pid, dir);
        }
        Some(process)
    }

    fn complete(&self, pid: u32, stat: Stat, dir: &ProcDir, reuse: bool) -> Option<Process> {
        if stat.is_zombie {
            return None;
        }
        let known = self.processes.get(&pid).filter(|known| known.identity.start == stat.start);
        if let Some(known) = known.filter(|known| reuse && known.identity.image == stat.image) {
            return Some(known.clone());
        }
        let identity = match known {
            // A process never changes its own pid namespace.
            Some(known) => Identity { image: stat.image, ..known.identity },
            None => identity(dir, &stat, namespace(dir).ok()??).ok()??,
        };
        let mounts = match known.filter(|_| !self.reads_mounts && self.settled.contains(&pid)) {
            Some(known) => known.mounts.clone(),
            None => mounts::parse(&dir.text("mountinfo").unwrap_or_default()),
        };
        // Read last: this fails if the process exited meanwhile, in which case its mounts were read as empty.
        let cgroups = Cgroups::parse(&dir.cgroup().ok()?);
        Some(Process { pid, name: stat.name, identity, cgroups, mounts })
    }

    /// The cache for the next audit, after one that found these processes.
    pub(crate) fn next(self, processes: BTreeMap<u32, Process>) -> Self {
        let is_settled = |process: &&Process| {
            let before = self.processes.get(&process.pid);
            before.is_some_and(|before| {
                (before.identity.start, &before.mounts) == (process.identity.start, &process.mounts)
            })
        };
        let settled = processes.values().filter(is_settled).map(|process| process.pid).collect();
        let mut open = self.open;
        open.retain(|pid, _| processes.contains_key(pid));
        Self { processes, open, settled, reads_mounts: !self.reads_mounts }
    }
}

/// The identity of a process in that pid namespace.
fn identity(dir: &ProcDir, stat: &Stat, namespace: u64) -> io::Result<Option<Identity>> {
    let pid = own_pid(&dir.text("status")?);
    Ok(pid.map(|pid| Identity { pid, namespace, start: stat.start, image: stat.image }))
}

/// The pid in the innermost namespace: the last number of the line `NSpid`.
fn own_pid(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().last()?.parse().ok()
}

/// The inode of the pid namespace, from a link such as `pid:[4026531836]`.
fn namespace(dir: &ProcDir) -> io::Result<Option<u64>> {
    let link = dir.link("ns/pid")?;
    Ok(link.and_then(|link| link.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()))
}

/// All running processes of some pid namespaces, with their pids on the host. A process of another
/// namespace costs one `readlink`.
///
/// # Errors
/// The caller treats a missing process as dead. A process is therefore skipped only if it has just
/// exited or belongs to another user; any other failure fails the whole search.
pub(crate) fn of_namespaces(proc_root: &Path, wanted: &[u64]) -> io::Result<Vec<(u32, Identity)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(proc_root)? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let read = || {
            let dir = ProcDir::open(&entry.path())?;
            match namespace(&dir)? {
                Some(namespace) if wanted.contains(&namespace) => {
                    match Stat::parse(&dir.stat()?).filter(|stat| !stat.is_zombie) {
                        Some(stat) => identity(&dir, &stat, namespace),
                        None => Ok(None),
                    }
                }
                _ => Ok(None),
            }
        };
        match read() {
            Ok(known) => found.extend(known.map(|identity| (pid, identity))),
            Err(cause) if is_gone(&cause) => {}
            Err(cause) => return Err(cause),
        }
    }
    Ok(found)
}

/// Whether the process exited or is hidden from this user.
fn is_gone(cause: &io::Error) -> bool {
    matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied)
        || cause.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn stat_line_is_parsed_with_any_command_name() {
        let check = |name: &str, state: &str, threads: u32, is_zombie: bool| {
            let line = format!(
                "41 ({name}) {state} 1 41 41 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 {threads} 0 7788 1 1 1 1 1 \
                 9900 0"
            );
            let expected = Stat { name: name.to_owned(), is_zombie, start: 7788, image: 9900 };
            assert_eq!(Stat::parse(&line), Some(expected), "{line}");
        };
        check("python3", "S", 1, false);
        check(") Z 1 (\n", "R", 4, false);
        check("python3", "Z", 1, true);
        check("python3", "Z", 2, false);
        assert_eq!(Stat::parse("41 (x) S 1"), None);
    }

    #[test]
    fn process_belongs_to_the_container_of_its_cgroups() {
        let check = |process: &str, container: &str, expected: bool| {
            let within = Cgroups::parse(process).are_within(&Cgroups::parse(container));
            assert_eq!(within, expected, "{process:?} {container:?}");
        };
        check("0::/kubepods/pod1/c1\n", "0::/kubepods/pod1/c1\n", true);
        check("0::/kubepods/pod1/c1/own\n", "0::/kubepods/pod1/c1\n", true);
        check("0::/kubepods/pod1/c10\n", "0::/kubepods/pod1/c1\n", false);
        check("0::/kubepods/pod1\n", "0::/kubepods/pod1/c1\n", false);
        check("0::/other/kubepods/pod1/c1\n", "0::/kubepods/pod1/c1\n", false);
        check("4:memory:/p/c1\n1:cpu:/\n", "4:memory:/p/c1\n1:cpu:/\n", true);
        check("4:memory:/p/c1\n3:pids:/p/c2\n", "4:memory:/p/c1\n3:pids:/p/c1\n", false);
        // A container without a cgroup of its own cannot be told apart from the host.
        check("0::/\n", "0::/\n", false);
        check("0::/c\n", "", false);
    }

    #[test]
    fn unified_path_stays_below_the_root() {
        let check = |text: &str, expected: Option<&str>| assert_eq!(Cgroups::parse(text).unified(), expected);
        check("4:memory:/m\n0::/kubepods/c1\n", Some("/kubepods/c1"));
        check("0::/\n", None);
        check("0::/../c1\n", None);
        check("4:memory:/m\n", None);
    }

    #[test]
    fn own_process_is_read() {
        let pid = std::process::id();
        let process = ProcessCache::default().read(Path::new("/proc"), pid, false).expect("this process");
        let stat = Stat::read(Path::new("/proc/self")).expect("its line");
        assert_eq!((process.pid, process.identity.start), (pid, stat.start));
        let all = of_namespaces(Path::new("/proc"), &[process.identity.namespace]).expect("listed");
        assert!(all.contains(&(pid, process.identity)));
    }

    #[test]
    fn unchanged_mounts_are_read_every_other_time() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("41");
        fs::create_dir_all(dir.join("ns")).unwrap();
        std::os::unix::fs::symlink("pid:[4026531836]", dir.join("ns/pid")).unwrap();
        fs::write(dir.join("status"), "NSpid:\t41\t1\n").unwrap();
        fs::write(dir.join("cgroup"), "0::/c\n").unwrap();
        let is = |start: u64, point: &str| {
            let stat =
                format!("41 (x) S 1 41 41 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 {start} 1 1 1 1 1 9900 0");
            fs::write(dir.join("stat"), stat).unwrap();
            fs::write(dir.join("mountinfo"), format!("30 1 8:1 / {point} ro - ext4 /dev/sda1 ro\n")).unwrap();
        };
        let mut known = ProcessCache::default();
        let mut check = |point: &str| {
            let process = known.read(root.path(), 41, false).unwrap();
            assert_eq!((process.identity.pid, process.identity.namespace), (1, 4_026_531_836));
            assert_eq!(
                process.mounts,
                mounts::parse(&format!("30 1 8:1 / {point} ro - ext4 /dev/sda1 ro\n"))
            );
            known = std::mem::take(&mut known).next([(41, process)].into());
        };
        is(7788, "/");
        check("/");
        is(7788, "/run");
        check("/run");
        is(7788, "/run/divvy");
        check("/run/divvy");
        check("/run/divvy");
        is(7788, "/");
        check("/run/divvy");
        for _ in 0..3 {
            check("/");
        }
        is(7799, "/run");
        check("/run");
        // With reuse, only another process is read.
        let mut check = |start: u64, point: &str, known_point: &str| {
            is(start, point);
            let process = known.read(root.path(), 41, true).unwrap();
            let mounts = format!("30 1 8:1 / {known_point} ro - ext4 /dev/sda1 ro\n");
            assert_eq!(process.mounts, mounts::parse(&mounts), "since {start}");
        };
        check(7799, "/run/divvy", "/run");
        check(7800, "/run/divvy", "/run/divvy");
    }

    #[test]
    fn kept_files_are_read_completely_and_up_to_date() {
        let root = tempfile::tempdir().unwrap();
        let write = |text: &str| fs::write(root.path().join("cgroup"), text).unwrap();
        let dir = ProcDir::open(root.path()).unwrap();
        assert_eq!(dir.cgroup().unwrap_err().kind(), io::ErrorKind::NotFound);
        for length in [READ_BYTES - 1, READ_BYTES, 3 * READ_BYTES, 7, 0] {
            let text = "x".repeat(length);
            write(&text);
            assert_eq!(dir.cgroup().unwrap(), text);
        }
        write(&"x".repeat(2 * mounts::MOUNTINFO_MAX_BYTES));
        assert!(dir.cgroup().unwrap().len() >= mounts::MOUNTINFO_MAX_BYTES);
    }

    #[test]
    fn reads_of_an_exited_process_fail() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let dir = ProcDir::open(&Path::new("/proc").join(child.id().to_string())).unwrap();
        assert!(dir.stat().unwrap().contains("(sleep)") && !dir.cgroup().unwrap().is_empty());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(dir.stat().is_err() && dir.text("stat").is_err());
    }

    proptest! {
        #[test]
        fn parsers_never_panic(text in "[0-9() ZRS:/.\\n]{0,80}") {
            let _ = Stat::parse(&text);
            let _ = Cgroups::parse(&text).unified();
            let _ = own_pid(&text);
        }
    }
}
