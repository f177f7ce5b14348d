//! Containers with devices of claims, as the hook registers them, and their cgroups.
//!
//! The hook writes one file for each container, `<run>/containers/<claim UID>/<container id>`, with the
//! cgroups of its first process, and removes it when the container has stopped. While processes are left
//! in those cgroups, the claim is in use, whatever the kubelet says.

use crate::paths::HostPaths;
use divvy_api::ClaimUid;
use divvy_api::text::is_file_name;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// Below the run directory.
const DIRECTORY: &str = "containers";
/// Maximum length of a claim UID or a container id, in bytes. A file name has at most 255.
const MAX_NAME_BYTES: usize = 200;
/// Size limit for the hook's files, which have a few lines. Only root can write them.
const FILE_MAX_BYTES: u64 = 64 << 10;

/// The registered containers of all claims.
#[derive(Clone, Debug)]
pub(crate) struct Containers {
    dir: PathBuf,
    cgroup_root: PathBuf,
}

impl Containers {
    pub(crate) fn new(paths: &HostPaths) -> Self {
        Self { dir: paths.run_dir.join(DIRECTORY), cgroup_root: paths.cgroup_root() }
    }

    /// The directory of a claim. The hook creates it with the first container.
    pub(crate) fn of(&self, claim: &ClaimUid) -> PathBuf {
        self.dir.join(claim.as_str())
    }

    /// A container of the claim in which processes are left.
    pub(crate) fn running(&self, claim: &ClaimUid) -> Option<String> {
        if !is_file_name(claim.as_str(), MAX_NAME_BYTES) {
            return None;
        }
        let is_running = |(_, text): &(String, String)| Cgroups::parse(text).has_processes(&self.cgroup_root);
        registered(&self.of(claim)).into_iter().find(is_running).map(|(id, _)| id)
    }

    /// Forgets the containers of a claim.
    pub(crate) fn forget(&self, claim: &ClaimUid) -> io::Result<()> {
        match fs::remove_dir_all(self.of(claim)) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => Err(cause),
            _ => Ok(()),
        }
    }

    /// The claims with registered containers, and their directories.
    pub(crate) fn claims(&self) -> Vec<(ClaimUid, PathBuf)> {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        entries.filter_map(|entry| Some((entry.file_name().to_str()?.into(), entry.path()))).collect()
    }
}

/// The containers that the hook registered in a directory: id, and the contents of
/// `/proc/<pid>/cgroup` of the first process. Sorted by id.
pub(crate) fn registered(dir: &Path) -> Vec<(String, String)> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let read = |entry: fs::DirEntry| {
        let id = entry.file_name().into_string().ok().filter(|id| is_file_name(id, MAX_NAME_BYTES))?;
        let small = entry.metadata().ok()?.len() <= FILE_MAX_BYTES;
        small.then(|| Some((id, fs::read_to_string(entry.path()).ok()?)))?
    };
    let mut containers: Vec<_> = entries.filter_map(read).collect();
    containers.sort();
    containers
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

    /// Whether processes are left in the container's own cgroups, or below them.
    fn has_processes(&self, cgroup_root: &Path) -> bool {
        self.directories(cgroup_root).any(|dir| {
            // Only the unified hierarchy has this file.
            match fs::read_to_string(dir.join("cgroup.events")) {
                Ok(events) => events.lines().any(|line| line == "populated 1"),
                Err(_) => fs::read(dir.join("cgroup.procs")).is_ok_and(|processes| !processes.is_empty()),
            }
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

#[cfg(test)]
mod tests {
    use super::*;

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

    fn check_use(file: &str, contents: &str, expected: Option<&str>) {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::new(&HostPaths::below(root.path()));
        let claim = "c".into();
        assert_eq!(containers.running(&claim), None, "nothing is registered");
        fs::create_dir_all(containers.of(&claim)).unwrap();
        fs::write(containers.of(&claim).join("one"), "0::/gone\n").unwrap();
        fs::write(containers.of(&claim).join("two"), "4:memory:/pod/two\n0::/pod/two\n").unwrap();
        let cgroup = containers.cgroup_root.join(file);
        fs::create_dir_all(cgroup.parent().unwrap()).unwrap();
        fs::write(cgroup, contents).unwrap();
        assert_eq!(containers.running(&claim).as_deref(), expected, "{file} {contents:?}");
        containers.forget(&claim).unwrap();
        containers.forget(&claim).unwrap();
        assert_eq!(containers.running(&claim), None);
    }

    #[test]
    fn container_with_processes_uses_its_claim() {
        check_use("pod/two/cgroup.events", "populated 1\nfrozen 0\n", Some("two"));
        check_use("pod/two/cgroup.events", "populated 0\nfrozen 0\n", None);
        check_use("pod/other/cgroup.events", "populated 1\nfrozen 0\n", None);
        check_use("memory/pod/two/cgroup.procs", "17\n", Some("two"));
        check_use("memory/pod/two/cgroup.procs", "", None);
    }

    #[test]
    fn claim_uid_with_a_slash_has_no_containers() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::new(&HostPaths::below(root.path()));
        assert_eq!(containers.running(&"../c".into()), None);
    }
}
