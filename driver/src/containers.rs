//! Containers with devices of claims, as the hook registers them.
//!
//! The hook writes one file for each container, `<run>/containers/<claim UID>/<container id>`, with pid
//! and start time of its first process, and removes it when the container has stopped. While that process
//! exists, the claim is in use, whatever the kubelet says.

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
    process_root: PathBuf,
}

impl Containers {
    pub(crate) fn new(paths: &HostPaths) -> Self {
        Self { dir: paths.run_dir.join(DIRECTORY), process_root: paths.process_root.clone() }
    }

    /// The directory of a claim. The hook creates it with the first container.
    pub(crate) fn of(&self, claim: &ClaimUid) -> PathBuf {
        self.dir.join(claim.as_str())
    }

    /// A container of the claim whose first process exists.
    pub(crate) fn running(&self, claim: &ClaimUid) -> Option<String> {
        if !is_file_name(claim.as_str(), MAX_NAME_BYTES) {
            return None;
        }
        registered(&self.of(claim)).into_iter().find(|(_, process)| self.exists(process)).map(|(id, _)| id)
    }

    /// Whether the process exists, given as `<pid> <start time>`.
    fn exists(&self, process: &str) -> bool {
        let Some((pid, start)) = process.trim_end().split_once(' ') else { return false };
        let stat = fs::read_to_string(self.process_root.join(pid).join("stat"));
        stat.is_ok_and(|stat| start_time(&stat) == Some(start))
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

/// The containers that the hook reported in a directory: id, and the contents of the file. Sorted by
/// id.
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

/// Field 22 of `/proc/<pid>/stat`, in clock ticks. The command name before it may contain anything.
fn start_time(stat: &str) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(pid: u32, start: u32, expected: Option<&str>) {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::new(&HostPaths::below(root.path()));
        let process = containers.process_root.join("17");
        fs::create_dir_all(&process).unwrap();
        fs::write(process.join("stat"), format!("17 (a) 1 (b) S {}7788 0\n", "0 ".repeat(18))).unwrap();
        let claim = "c".into();
        assert_eq!(containers.running(&claim), None, "nothing is registered");
        fs::create_dir_all(containers.of(&claim)).unwrap();
        fs::write(containers.of(&claim).join("damaged"), "").unwrap();
        fs::write(containers.of(&claim).join("one"), format!("{pid} {start}\n")).unwrap();
        assert_eq!(containers.running(&claim).as_deref(), expected, "{pid} {start}");
        containers.forget(&claim).unwrap();
        containers.forget(&claim).unwrap();
        assert_eq!(containers.running(&claim), None);
    }

    #[test]
    fn container_uses_its_claim_while_its_process_exists() {
        check(17, 7788, Some("one"));
        check(17, 7789, None);
        check(18, 7788, None);
    }

    #[test]
    fn claim_uid_with_a_slash_has_no_containers() {
        let root = tempfile::tempdir().unwrap();
        let containers = Containers::new(&HostPaths::below(root.path()));
        assert_eq!(containers.running(&"../c".into()), None);
    }
}
