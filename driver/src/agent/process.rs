//! What the kernel says of a process, read from `/proc/<pid>`.
//!
//! Everything that a tenant can choose is read as a statement of the tenant: a name
//! may hold spaces, brackets and newlines, a cgroup below the container's may have
//! any name. What decides is what only root can choose: which cgroup the container
//! is in, and what is mounted from where.

mod dir;

use super::mounts::{self, Mounts};
use dir::Dir;
use divvy_pages::Identity;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// A process, as the host sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Process {
    /// On the host.
    pub(super) pid: u32,
    /// As it calls itself: for people.
    pub(super) name: String,
    /// As it sees itself: what a slot of an account page must say to be its own.
    pub(super) who: Identity,
    pub(super) cgroups: Cgroups,
    /// What is mounted where it sees the pages of shares.
    pub(super) mounts: Mounts,
}

/// The fields of `/proc/<pid>/stat` that matter here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stat {
    pub(super) name: String,
    /// Has ended and is not buried; all threads of it.
    pub(super) ended: bool,
    /// Field 22: clock ticks since boot.
    pub(super) start: u64,
    /// Field 28: where its stack begins; 0 where the reader may not know.
    pub(super) image: u64,
}

impl Stat {
    /// Reads the line. The name is in brackets and may hold any byte, so that the last bracket ends it.
    pub(super) fn parse(line: &str) -> Option<Self> {
        let (head, tail) = line.rsplit_once(')')?;
        let (_, name) = head.split_once('(')?;
        // The third field is the first here.
        let fields: Vec<&str> = tail.split_ascii_whitespace().collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        // A leader that has ended stays a zombie for as long as other threads run.
        let ended = matches!(*fields.first()?, "Z" | "X") && number(20)? <= 1;
        Some(Self { name: name.to_owned(), ended, start: number(22)?, image: number(28).unwrap_or(0) })
    }

    /// Reads it of a process.
    pub(super) fn read(process: &Path) -> Option<Self> {
        Self::of(&Dir::open(process).ok()?)
    }

    fn of(process: &Dir) -> Option<Self> {
        Self::parse(&process.stat().ok()?)
    }
}

/// In which cgroups, by hierarchy: the lines of `/proc/<pid>/cgroup`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Cgroups(Vec<(String, String)>);

impl Cgroups {
    /// What is no line of that file is left out.
    pub(super) fn parse(text: &str) -> Self {
        let line = |line: &str| {
            let (hierarchy, path) = line.split_once(":/")?;
            Some((hierarchy.to_owned(), format!("/{path}")))
        };
        Self(text.lines().filter_map(line).collect())
    }

    /// Whether these are a container's cgroups or below them. A hierarchy in which the
    /// container has no cgroup of its own says nothing.
    pub(super) fn are_within(&self, container: &Self) -> bool {
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

    /// The directories of those that are a container's own, wherever their hierarchies are mounted.
    pub(super) fn directories(&self, cgroup_root: &Path) -> impl Iterator<Item = PathBuf> {
        self.0.iter().filter_map(move |(hierarchy, path)| {
            let (_, controllers) = hierarchy.split_once(':')?;
            let controllers = controllers.strip_prefix("name=").unwrap_or(controllers);
            let below = path.strip_prefix('/').filter(|below| !below.is_empty() && is_plain(below))?;
            Some(cgroup_root.join(controllers).join(below))
        })
    }

    /// The path in the unified hierarchy; none where there is no cgroup of its own.
    pub(super) fn unified(&self) -> Option<&str> {
        let (_, path) = self.0.iter().find(|(hierarchy, path)| hierarchy == "0:" && path != "/")?;
        is_plain(path).then_some(path)
    }
}

/// Leads down: none of another cgroup namespace, which begins with `..`.
fn is_plain(path: &str) -> bool {
    path.split('/').all(|part| part != "..")
}

/// The directories of so many processes of a GPU stay open, each with two files.
const MOST_OPEN: usize = 16;

/// Processes as an audit found them, for the next: what never changes of one need not be read again.
#[derive(Debug, Default)]
pub(super) struct Known {
    processes: BTreeMap<u32, Process>,
    /// Of [`MOST_OPEN`] of them.
    open: BTreeMap<u32, Dir>,
    /// Those whose mounts, which take longest to read, were the same at two audits: they are good for a third. What
    /// is wrong with them was read twice, then, before anything is done about it.
    settled: BTreeSet<u32>,
    /// That audit reads all mounts.
    reads_mounts: bool,
}

impl Known {
    /// The process, unless it has ended; where it is `enough`, what is known of it.
    pub(super) fn read(&mut self, proc_root: &Path, pid: u32, enough: bool) -> Option<Process> {
        // Of one that is gone nothing is read any more: another one may have its number.
        let kept = self.open.remove(&pid).and_then(|dir| Some((Stat::of(&dir)?, dir)));
        let (stat, dir) = match kept {
            Some(kept) => kept,
            None => {
                let dir = Dir::open(&proc_root.join(pid.to_string())).ok()?;
                (Stat::of(&dir)?, dir)
            }
        };
        let process = self.found(pid, stat, &dir, enough)?;
        if self.open.len() < MOST_OPEN {
            self.open.insert(pid, dir);
        }
        Some(process)
    }

    fn found(&self, pid: u32, stat: Stat, dir: &Dir, enough: bool) -> Option<Process> {
        if stat.ended {
            return None;
        }
        let known = self.processes.get(&pid).filter(|known| known.who.start == stat.start);
        if let Some(known) = known.filter(|known| enough && known.who.image == stat.image) {
            return Some(known.clone());
        }
        let who = match known {
            // Its pid namespace is the one that it was born in.
            Some(known) => Identity { image: stat.image, ..known.who },
            None => identity(dir, &stat, namespace(dir).ok()??).ok()??,
        };
        let mounts = match known.filter(|_| !self.reads_mounts && self.settled.contains(&pid)) {
            Some(known) => known.mounts.clone(),
            None => mounts::parse(&dir.text("mountinfo").unwrap_or_default()),
        };
        // Last: it cannot be read of a process that is gone, whose mounts are none.
        let cgroups = Cgroups::parse(&dir.cgroup().ok()?);
        Some(Process { pid, name: stat.name, who, cgroups, mounts })
    }

    /// For the audit after one that found these.
    pub(super) fn after(self, processes: BTreeMap<u32, Process>) -> Self {
        let is_settled = |process: &&Process| {
            let before = self.processes.get(&process.pid);
            before.is_some_and(|before| {
                (before.who.start, &before.mounts) == (process.who.start, &process.mounts)
            })
        };
        let settled = processes.values().filter(is_settled).map(|process| process.pid).collect();
        let mut open = self.open;
        open.retain(|pid, _| processes.contains_key(pid));
        Self { processes, open, settled, reads_mounts: !self.reads_mounts }
    }
}

/// Who a process of that namespace is.
fn identity(dir: &Dir, stat: &Stat, namespace: u64) -> io::Result<Option<Identity>> {
    let pid = own_pid(&dir.text("status")?);
    Ok(pid.map(|pid| Identity { pid, namespace, start: stat.start, image: stat.image }))
}

/// The pid in the innermost namespace: the last of the line `NSpid`.
fn own_pid(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_ascii_whitespace().last()?.parse().ok()
}

/// The inode of the pid namespace, of a link such as `pid:[4026531836]`.
fn namespace(dir: &Dir) -> io::Result<Option<u64>> {
    let link = dir.link("ns/pid")?;
    Ok(link.and_then(|link| link.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()))
}

/// All processes of some pid namespaces, by their pid on the host: those that have
/// not ended. Another namespace costs no more than reading a link. Who is not found
/// counts as dead, so that a process is left out only where it has just ended or is
/// not this user's to look at; any other failure is one of the whole search.
pub(super) fn of_namespaces(proc_root: &Path, wanted: &[u64]) -> io::Result<Vec<(u32, Identity)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(proc_root)? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let read = || {
            let dir = Dir::open(&entry.path())?;
            match namespace(&dir)? {
                Some(namespace) if wanted.contains(&namespace) => {
                    match Stat::parse(&dir.stat()?).filter(|stat| !stat.ended) {
                        Some(stat) => identity(&dir, &stat, namespace),
                        None => Ok(None),
                    }
                }
                _ => Ok(None),
            }
        };
        match read() {
            Ok(known) => found.extend(known.map(|who| (pid, who))),
            Err(cause) if is_away(&cause) => {}
            Err(cause) => return Err(cause),
        }
    }
    Ok(found)
}

fn is_away(cause: &io::Error) -> bool {
    matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied)
        || cause.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_stat_line_is_read_whatever_the_process_calls_itself() {
        let check = |name: &str, state: &str, threads: u32, ended: bool| {
            let line = format!(
                "41 ({name}) {state} 1 41 41 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 {threads} 0 7788 1 1 1 1 1 9900 0"
            );
            let expected = Stat { name: name.to_owned(), ended, start: 7788, image: 9900 };
            assert_eq!(Stat::parse(&line), Some(expected), "{line}");
        };
        check("python3", "S", 1, false);
        check(") Z 1 (\n", "R", 4, false);
        check("python3", "Z", 1, true);
        check("python3", "Z", 2, false);
        assert_eq!(Stat::parse("41 (x) S 1"), None);
    }

    #[test]
    fn a_process_is_of_the_container_whose_cgroups_it_is_in_or_below() {
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
        // Without a cgroup of its own nothing tells the container from the host.
        check("0::/\n", "0::/\n", false);
        check("0::/c\n", "", false);
    }

    #[test]
    fn the_unified_path_leads_nowhere_else() {
        let check = |text: &str, expected: Option<&str>| assert_eq!(Cgroups::parse(text).unified(), expected);
        check("4:memory:/m\n0::/kubepods/c1\n", Some("/kubepods/c1"));
        check("0::/\n", None);
        check("0::/../c1\n", None);
        check("4:memory:/m\n", None);
    }

    #[test]
    fn this_process_is_read_as_it_sees_itself() {
        let pid = std::process::id();
        let process = Known::default().read(Path::new("/proc"), pid, false).expect("this process");
        let stat = Stat::read(Path::new("/proc/self")).expect("its line");
        assert_eq!((process.pid, process.who.start), (pid, stat.start));
        let all = of_namespaces(Path::new("/proc"), &[process.who.namespace]).expect("listed");
        assert!(all.contains(&(pid, process.who)));
    }

    #[test]
    fn mounts_that_stay_the_same_are_read_every_other_time_and_others_each_time() {
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
        let mut known = Known::default();
        let mut check = |point: &str| {
            let process = known.read(root.path(), 41, false).unwrap();
            assert_eq!((process.who.pid, process.who.namespace), (1, 4_026_531_836));
            assert_eq!(
                process.mounts,
                mounts::parse(&format!("30 1 8:1 / {point} ro - ext4 /dev/sda1 ro\n"))
            );
            known = std::mem::take(&mut known).after([(41, process)].into());
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
        // Where what is known is enough, it is read of another process only.
        let mut check = |start: u64, point: &str, known_point: &str| {
            is(start, point);
            let process = known.read(root.path(), 41, true).unwrap();
            let mounts = format!("30 1 8:1 / {known_point} ro - ext4 /dev/sda1 ro\n");
            assert_eq!(process.mounts, mounts::parse(&mounts), "since {start}");
        };
        check(7799, "/run/divvy", "/run");
        check(7800, "/run/divvy", "/run/divvy");
    }

    proptest! {
        #[test]
        fn nothing_that_proc_says_makes_it_panic(text in "[0-9() ZRS:/.\\n]{0,80}") {
            let _ = Stat::parse(&text);
            let _ = Cgroups::parse(&text).unified();
            let _ = own_pid(&text);
        }
    }
}
