//! The claims that containers of this node use, according to the kubelet and to mounts.
//!
//! Neither source is enough. The kubelet forgets a pod that was deleted by force while its
//! containers still run, and it lists no init containers. Mounts exist only while a container runs.
//! Every container with a device of a claim mounts the claim's CDI file
//! ([`crate::cdi::claim_file_name`]); a share also mounts its pages, and most mount metadata.

use crate::cdi;
use crate::shares;
use divvy_api::names::CDI_KIND;
use divvy_api::{ClaimRef, ClaimUid};
use futures::future::BoxFuture;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Why the kubelet's view is not known.
#[derive(Debug, thiserror::Error)]
pub enum ViewError {
    #[error("the kubelet does not list its containers on {socket}")]
    Call {
        socket: PathBuf,
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("the kubelet did not list its containers on {socket} within {within:?}")]
    Deadline { socket: PathBuf, within: Duration },
}

/// The kubelet's own view of the node.
pub trait KubeletView: Send + Sync {
    /// Asks the kubelet. The future ends within a deadline.
    fn list(&self) -> BoxFuture<'_, Result<Listed, ViewError>>;
}

/// An answer of the kubelet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listed {
    /// Claims of containers, without those that have only devices of other drivers.
    pub claims: Vec<ListedClaim>,
    /// Namespace and name of each pod.
    pub pods: BTreeSet<(String, String)>,
    /// Whether any claim is listed, of any driver. A kubelet that does not report claims lists none.
    pub reports_claims: bool,
}

/// A claim of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedClaim {
    pub namespace: String,
    pub name: String,
    /// CDI ids of this driver's devices. Empty until the kubelet has prepared the claim.
    pub cdi_ids: Vec<String>,
}

impl ListedClaim {
    /// Whether a CDI id names the claim with this UID.
    pub fn has_device_of(&self, claim: &ClaimUid) -> bool {
        let is_of_claim = |id: &String| {
            let name = id.strip_prefix(CDI_KIND).and_then(|name| name.strip_prefix('='));
            let rest = name.and_then(|name| name.strip_prefix(claim.as_str()));
            rest.is_some_and(|rest| rest.starts_with('-'))
        };
        self.cdi_ids.iter().any(is_of_claim)
    }
}

/// The owner of files that containers mount.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Owner {
    Claim(ClaimUid),
    /// A version of the library for shares, by its hash.
    Library(String),
}

impl std::fmt::Display for Owner {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Claim(uid) => write!(out, "claim {uid}"),
            Self::Library(hash) => write!(out, "library {hash}"),
        }
    }
}

/// A sign that containers use something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// The kubelet lists the claim.
    Listed,
    /// This process has files of the owner mounted.
    Mounted { pid: u32 },
}

/// Both views at one time.
#[derive(Clone, Debug, Default)]
pub struct Uses {
    pub listed: Listed,
    /// A process for each owner with mounted files.
    pub mounted: BTreeMap<Owner, u32>,
}

impl Uses {
    /// Whether a container uses the claim or may use it. A claim of the same name with another UID
    /// has other CDI ids; without ids, the name alone counts.
    pub fn of_claim(&self, claim: &ClaimRef) -> Option<Use> {
        let named = |listed: &&ListedClaim| {
            listed.cdi_ids.is_empty() && listed.namespace == claim.namespace && listed.name == claim.name
        };
        let listed = self.listed.claims.iter().find(named).map(|_| Use::Listed);
        listed.or_else(|| self.of_owner(&Owner::Claim(claim.uid.clone())))
    }

    /// Whether a container uses files of the owner.
    pub fn of_owner(&self, owner: &Owner) -> Option<Use> {
        let is_listed = |uid: &ClaimUid| self.listed.claims.iter().any(|listed| listed.has_device_of(uid));
        match owner {
            Owner::Claim(uid) if is_listed(uid) => Some(Use::Listed),
            owner => self.mounted.get(owner).map(|pid| Use::Mounted { pid: *pid }),
        }
    }
}

/// Why the mounts of the node's processes are not known.
#[derive(Debug, thiserror::Error)]
pub enum ScanError {
    #[error("{path} cannot be read")]
    Read {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("the mounts of all processes were not read within {within:?}")]
    Deadline { within: Duration },
}

/// Time limit of a scan. A container with 200 processes and 7,000 mounts takes about 6 s on two cores.
pub const SCAN_TIMEOUT: Duration = Duration::from_secs(60);

/// The wanted owners of which a process on the host has files mounted, each with one such process.
/// Blocks for milliseconds on a usual node, at most for [`SCAN_TIMEOUT`].
///
/// Processes of one mount namespace are not skipped, because each sees only what is below its root.
pub fn mounted(process_root: &Path, wanted: &BTreeSet<Owner>) -> Result<BTreeMap<Owner, u32>, ScanError> {
    let begun = Instant::now();
    let mut found = BTreeMap::new();
    if wanted.is_empty() {
        return Ok(found);
    }
    for (pid, dir) in numbered(process_root)? {
        if begun.elapsed() > SCAN_TIMEOUT {
            return Err(ScanError::Deadline { within: SCAN_TIMEOUT });
        }
        if scan(&dir, pid, wanted, &mut found)? {
            continue;
        }
        // The first thread has ended; others may still run.
        for (_, thread) in numbered(&dir.join("task"))? {
            scan(&thread, pid, wanted, &mut found)?;
        }
    }
    Ok(found)
}

/// The entries of a directory that are numbers: processes or threads. Empty if it is gone.
fn numbered(dir: &Path) -> Result<Vec<(u32, PathBuf)>, ScanError> {
    let entries = match fs::read_dir(dir) {
        Err(cause) if is_gone(&cause) => return Ok(Vec::new()),
        entries => entries.map_err(|cause| ScanError::Read { path: dir.to_owned(), cause })?,
    };
    let number = |entry: fs::DirEntry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path()));
    Ok(entries.flatten().filter_map(number).collect())
}

/// Adds what one process or thread has mounted; returns false if it has ended.
fn scan(
    dir: &Path,
    pid: u32,
    wanted: &BTreeSet<Owner>,
    found: &mut BTreeMap<Owner, u32>,
) -> Result<bool, ScanError> {
    let path = dir.join("mountinfo");
    let failed = |cause| ScanError::Read { path: path.clone(), cause };
    let mut mounts = match File::open(&path) {
        Err(cause) if is_gone(&cause) => return Ok(false),
        file => BufReader::new(file.map_err(failed)?),
    };
    // Line by line: a container may have 100,000 mounts, with arbitrary bytes in their names.
    let mut line = Vec::new();
    loop {
        line.clear();
        match mounts.read_until(b'\n', &mut line) {
            Ok(0) => return Ok(true),
            Err(cause) if is_gone(&cause) => return Ok(false),
            read => read.map_err(failed)?,
        };
        // The fourth field is the path of the mount's root within its file system.
        let Some(root) = line.split(|byte| *byte == b' ').nth(3) else { continue };
        for owner in owners(&String::from_utf8_lossy(root)).filter(|owner| wanted.contains(owner)) {
            found.entry(owner).or_insert(pid);
        }
    }
}

/// Whether a process ended before or while its file was read. A zombie answers with EINVAL.
fn is_gone(cause: &io::Error) -> bool {
    use rustix::io::Errno;
    let code = cause.raw_os_error();
    [Errno::NOENT, Errno::SRCH, Errno::INVAL].iter().any(|errno| code == Some(errno.raw_os_error()))
}

/// The owners whose files lie at the path. A deleted file has `//deleted` after its path.
fn owners(root: &str) -> impl Iterator<Item = Owner> {
    let pairs = root.split('/').zip(root.split('/').skip(1));
    pairs.filter_map(|(dir, name)| match dir {
        shares::DIRECTORY | cdi::METADATA => Some(Owner::Claim(name.into())),
        cdi::LIBRARIES => Some(Owner::Library(name.to_owned())),
        _ => cdi::claim_of_file(name).map(Owner::Claim),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claim(uid: &str) -> Owner {
        Owner::Claim(uid.into())
    }

    fn check_owners(root: &str, expected: &[Owner]) {
        assert_eq!(owners(root).collect::<Vec<_>>(), expected, "{root}");
    }

    #[test]
    fn owner_is_recognised_by_the_path_of_its_file() {
        check_owners("/divvy/shares/c/s/policy", &[claim("c")]);
        check_owners("/x/state/metadata/c/r.json", &[claim("c")]);
        check_owners("/x/state/metadata/c/resourceclaims/n/r/metadata.json", &[claim("c")]);
        check_owners("/cdi/gpu.divvy.dev-claim_c.json", &[claim("c")]);
        check_owners("/cdi/gpu.divvy.dev-claim_c.json//deleted", &[claim("c")]);
        let library = Owner::Library("0123456789abcdef".to_owned());
        check_owners("/plugins/gpu.divvy.dev/lib/0123456789abcdef/libdivvy.so", &[library]);
        check_owners("/cdi/other.example.com-claim_c.json", &[]);
        check_owners("/", &[]);
    }

    fn process(dir: &Path, path: &str, mounts: &str) {
        fs::create_dir_all(dir.join(path)).unwrap();
        fs::write(dir.join(path).join("mountinfo"), mounts).unwrap();
    }

    fn wanted(owners: &[Owner]) -> BTreeSet<Owner> {
        owners.iter().cloned().collect()
    }

    #[test]
    fn mounts_of_all_processes_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let mount = "63 43 0:25 /divvy/shares/c/s/policy /run/divvy/c/s/policy ro - tmpfs tmpfs rw\n";
        process(dir.path(), "17", "1 0 0:1 / / rw - ext4 /dev/sda /shares/d/\n");
        process(dir.path(), "18", mount);
        // A process whose first thread has ended.
        process(dir.path(), "19/task/20", "63 43 0:25 /cdi/gpu.divvy.dev-claim_e.json /x ro - tmpfs t rw\n");
        process(dir.path(), "self", "63 43 0:25 /divvy/shares/d/s/policy /x ro - tmpfs tmpfs rw\n");
        let found = mounted(dir.path(), &wanted(&[claim("c"), claim("d"), claim("e")])).unwrap();
        assert_eq!(found, BTreeMap::from([(claim("c"), 18), (claim("e"), 19)]));
        assert_eq!(mounted(dir.path(), &wanted(&[])).unwrap(), BTreeMap::new());
    }

    #[test]
    fn unreadable_mounts_are_an_error() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("17/mountinfo")).unwrap();
        let error = mounted(dir.path(), &wanted(&[claim("c")])).unwrap_err();
        assert!(error.to_string().contains("17/mountinfo"), "{error}");
    }

    fn check(cdi_ids: &[&str], name: &str, expected: Option<Use>) {
        let listed = ListedClaim {
            namespace: "ns".to_owned(),
            name: name.to_owned(),
            cdi_ids: cdi_ids.iter().map(|id| (*id).to_owned()).collect(),
        };
        let uses = Uses { listed: Listed { claims: vec![listed], ..Listed::default() }, ..Uses::default() };
        let held = ClaimRef { namespace: "ns".to_owned(), name: "c".to_owned(), uid: "old".into() };
        assert_eq!(uses.of_claim(&held), expected, "{cdi_ids:?} {name}");
    }

    #[test]
    fn listed_claim_is_matched_by_its_cdi_ids_first() {
        check(&["gpu.divvy.dev/claim=old-gpu-0"], "c", Some(Use::Listed));
        check(&["gpu.divvy.dev/claim=old-gpu-0"], "renamed", Some(Use::Listed));
        check(&["gpu.divvy.dev/claim=new-gpu-0"], "c", None);
        check(&["gpu.divvy.dev/claim=older-gpu-0"], "c", None);
        check(&["other.example.com/claim=old-gpu-0"], "renamed", None);
        check(&[], "c", Some(Use::Listed));
        check(&[], "other", None);
    }

    #[test]
    fn mount_counts_although_the_kubelet_lists_nothing() {
        let mounted = BTreeMap::from([(claim("old"), 7)]);
        let uses = Uses { mounted, ..Uses::default() };
        let held = |uid: &str| ClaimRef { namespace: "ns".to_owned(), name: "c".to_owned(), uid: uid.into() };
        assert_eq!(uses.of_claim(&held("old")), Some(Use::Mounted { pid: 7 }));
        assert_eq!(uses.of_claim(&held("new")), None);
    }
}
