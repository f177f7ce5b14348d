//! Collects a snapshot from files. NVML is queried between the two copies of each account page.
//!
//! Only root can create directories of pages, so a path below them can be trusted. The contents of
//! an account page cannot: the file is read with a size limit and never mapped.

use super::mounts::Page;
use super::page_files::PageFiles;
use super::process::{Cgroups, Process, ProcessCache};
use super::{Account, AccountError, ProcessMemory, Share, ShareKey, Slot, Snapshot};
use crate::shares::{ACCOUNT, POLICY, Shares};
use divvy_api::{ClaimUid, ShareId};
use divvy_pages::account::{self, HEADER};
use divvy_pages::{Flags, Memory, PageError, Policy};
use rustix::fs::{major, minor};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A share on the host, with the first copy of its account page.
#[derive(Debug)]
pub(crate) struct FoundShare {
    claim: ClaimUid,
    id: ShareId,
    dir: PathBuf,
    pub(crate) policy: Policy,
    page: Page,
    /// The pages of all shares of the node.
    node_pages: Arc<[Page]>,
    first: Result<PageCopy, AccountError>,
    containers: Vec<(String, Cgroups)>,
}

/// Finds all shares whose policy is wanted. Pages that are being created or removed are skipped.
pub(crate) fn find_shares(
    shares: &Shares,
    files: &PageFiles,
    mut is_wanted: impl FnMut(&Policy) -> bool,
) -> Vec<FoundShare> {
    files.close_removed();
    let (mut all, mut node_pages) = (Vec::new(), Vec::new());
    for (claim, id) in shares.all() {
        let dir = shares.of(&claim, &id);
        let path = dir.join(POLICY);
        let read = read_policy(files, &path).map(|(page, meta)| (Policy::decode(&page), meta));
        let (policy, meta) = match read {
            Ok((Ok((_, policy)), meta)) => (policy, meta),
            Ok((Err(why), _)) => {
                // Only root writes it, so another version of the driver did.
                tracing::debug!(%claim, share = %id, %why, "policy page not decoded");
                continue;
            }
            Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {
                tracing::warn!(%claim, share = %id, "share not audited: its policy page is leased");
                continue;
            }
            Err(_) => continue,
        };
        let device = (major(meta.dev()), minor(meta.dev()));
        let page = Page { device, share: format!("{claim}/{id}") };
        node_pages.push(page.clone());
        if !is_wanted(&policy) {
            continue;
        }
        let cgroups = shares.cgroups(&claim, &id).into_iter();
        let containers = cgroups.map(|(id, text)| (id, Cgroups::parse(&text))).collect();
        let Some(first) = copy(files, &dir.join(ACCOUNT)) else { continue };
        let node_pages = Arc::default();
        all.push(FoundShare { first, claim, id, dir, policy, page, node_pages, containers });
    }
    let node_pages: Arc<[Page]> = node_pages.into();
    all.iter_mut().for_each(|found| found.node_pages = Arc::clone(&node_pages));
    all.sort_by(|one, other| (&one.id, &one.claim).cmp(&(&other.id, &other.claim)));
    all
}

/// A copy of the used part of an account page.
#[derive(Debug)]
struct PageCopy {
    page: Vec<u8>,
    is_oversized: bool,
}

fn read_policy(files: &PageFiles, path: &Path) -> io::Result<([u8; divvy_pages::policy::SIZE], Metadata)> {
    let (file, meta) = files.open(path, false)?;
    let mut page = [0; divvy_pages::policy::SIZE];
    file.read_exact_at(&mut page, 0)?;
    Ok((page, meta))
}

/// Copies an account page; `None` if the file does not exist.
fn copy(files: &PageFiles, path: &Path) -> Option<Result<PageCopy, AccountError>> {
    match read(files, path) {
        Ok(copy) => Some(match account::check(&copy.page) {
            Ok(()) => Ok(copy),
            // The version cannot differ: the policy page, which only root writes, has the version
            // of this driver.
            Err(why) => Err(AccountError::Corrupt(why)),
        }),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => None,
        Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => {
            Some(Err(AccountError::Corrupt(PageError::Foreign)))
        }
        Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => Some(Err(AccountError::Leased)),
        Err(cause) => Some(Err(AccountError::Unreadable(cause.to_string()))),
    }
}

fn read(files: &PageFiles, path: &Path) -> io::Result<PageCopy> {
    let (file, meta) = files.open(path, true)?;
    let is_oversized = meta.len() > account::SIZE as u64;
    let mut page = vec![0; HEADER];
    file.read_exact_at(&mut page, 0)?;
    page.resize(account::Snapshot::length(&page).clamp(HEADER, account::SIZE), 0);
    file.read_exact_at(page.get_mut(HEADER..).unwrap_or_default(), HEADER as u64)?;
    Ok(PageCopy { page, is_oversized })
}

impl FoundShare {
    pub(crate) fn key(&self) -> ShareKey {
        (self.claim.clone(), self.id.clone())
    }

    /// The first copy of the account page, unless it cannot be used.
    pub(crate) fn account(&self) -> Option<account::Snapshot<'_>> {
        self.first.as_ref().ok().and_then(|first| account::Snapshot::new(&first.page).ok())
    }

    /// Reads the account page again; `None` if the share was released meanwhile.
    fn complete(self, files: &PageFiles) -> Option<Share> {
        let account = match (self.first, copy(files, &self.dir.join(ACCOUNT))?) {
            (Ok(first), Ok(second)) => account_of(&first, &second),
            (_, Err(why)) | (Err(why), _) => Err(why),
        };
        let Self { claim, id, policy, page, containers, .. } = self;
        Some(Share { claim, id, policy, page, account, containers })
    }
}

/// The account of the second copy, with what changed since the first one.
fn account_of(first: &PageCopy, second: &PageCopy) -> Result<Account, AccountError> {
    let is_oversized = second.is_oversized;
    let first = account::Snapshot::new(&first.page).map_err(AccountError::Corrupt)?;
    let second = account::Snapshot::new(&second.page).map_err(AccountError::Corrupt)?;
    let earlier: BTreeMap<usize, _> = first.slots().map(|slot| (slot.index, slot)).collect();
    let slots: Vec<Slot> = second
        .slots()
        .map(|report| {
            let same = earlier
                .get(&report.index)
                .is_some_and(|before| (before.owner, before.held) == (report.owner, report.held));
            Slot { report, is_stable: same && report.in_flight == 0 }
        })
        .collect();
    let gone = earlier.keys().any(|index| slots.iter().all(|slot| slot.report.index != *index));
    let is_stable =
        first.total_changes() == second.total_changes() && !gone && slots.iter().all(|slot| slot.is_stable);
    Ok(Account {
        used: second.used(),
        balance: second.balance(),
        refilled: second.refilled_at(),
        attention: second.attention(),
        charged_ns: second.charged_ns(),
        is_oversized,
        is_stable,
        slots,
    })
}

/// Completes the snapshot after NVML was queried: reads the account pages again, then the
/// processes. With `reuse`, cached processes are not read again.
pub(crate) fn take_snapshot(
    found: Vec<FoundShare>,
    files: &PageFiles,
    uses: Vec<ProcessMemory>,
    cache: &mut ProcessCache,
    reuse: bool,
    proc_root: &Path,
    cgroup_root: &Path,
) -> Snapshot {
    let node_pages = found.first().map(|found| Arc::clone(&found.node_pages)).unwrap_or_default();
    let shares: Vec<Share> = found.into_iter().filter_map(|found| found.complete(files)).collect();
    let mut processes: BTreeMap<u32, Process> = BTreeMap::new();
    let leaders = shares
        .iter()
        .flat_map(|share| &share.containers)
        .filter_map(|(_, cgroups)| leader(cgroup_root, cgroups));
    // The node wrote the host pid of each owner into its slot, so the owner need not be searched for.
    let owners = shares
        .iter()
        .filter_map(|share| share.account.as_ref().ok())
        .flat_map(|account| &account.slots)
        .map(|slot| slot.report.node_line.host_pid);
    let pids = uses.iter().map(|usage| usage.pid).chain(leaders).chain(owners).filter(|pid| *pid != 0);
    for pid in pids {
        if !processes.contains_key(&pid)
            && let Some(process) = cache.read(proc_root, pid, reuse)
        {
            processes.insert(pid, process);
        }
    }
    Snapshot { shares, node_pages, uses, processes, ..Snapshot::default() }
}

/// Containers with the directory of their cgroup and their memory limit in bytes: the sum of the
/// limits of all pages that they see. Shares of MIG instances are left out, because GPU drivers
/// limit whole GPUs only.
pub(crate) fn container_limits(found: &[FoundShare], cgroup_root: &Path) -> Vec<(String, PathBuf, u64)> {
    let mut limits: BTreeMap<String, (PathBuf, u64)> = BTreeMap::new();
    // A container with an observe-only share gets no limit, even if it has other shares.
    let observes = |share: &&FoundShare| share.policy.flags.has(Flags::OBSERVE_ONLY);
    let observed: BTreeSet<&String> =
        found.iter().filter(observes).flat_map(|share| &share.containers).map(|(id, _)| id).collect();
    for share in found.iter().filter(|share| share.policy.mig.is_none()) {
        for (id, cgroups) in share.containers.iter().filter(|(id, _)| !observed.contains(id)) {
            let Some(dir) = unified(cgroup_root, cgroups).filter(|dir| dir.exists()) else { continue };
            let (_, limit) = limits.entry(id.clone()).or_insert((dir, 0));
            // These limits do not count managed memory, and memory that cannot move is not over-committed.
            let Memory { limit: all, soft, .. } = share.policy.memory;
            let fixed = if share.policy.flags.has(Flags::UVM) && soft > 0 { all.min(soft) } else { all };
            *limit = limit.saturating_add(fixed);
        }
    }
    limits.into_iter().map(|(id, (dir, limit))| (id, dir, limit)).collect()
}

/// The first running process of a container.
fn leader(cgroup_root: &Path, cgroups: &Cgroups) -> Option<u32> {
    let listed = cgroups
        .directories(cgroup_root)
        .find_map(|dir| std::fs::read_to_string(dir.join("cgroup.procs")).ok())?;
    listed.lines().filter_map(|line| line.parse().ok()).min()
}

/// The directory of a cgroup of the unified hierarchy; `None` on nodes with other hierarchies.
fn unified(cgroup_root: &Path, cgroups: &Cgroups) -> Option<PathBuf> {
    let is_only = cgroup_root.join("cgroup.controllers").exists();
    let path = cgroups.unified()?.strip_prefix('/')?;
    is_only.then(|| cgroup_root.join(path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::snapshot::fixture::share;

    #[test]
    fn containers_with_an_observe_only_share_get_no_limit() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("cgroup.controllers"), "memory").unwrap();
        let found = |number: usize, flags: Flags, containers: &[&str]| {
            let share = share(number, 1000);
            let container = |id: &&str| {
                std::fs::create_dir_all(root.path().join(id)).unwrap();
                ((*id).to_owned(), Cgroups::parse(&format!("0::/{id}\n")))
            };
            FoundShare {
                claim: share.claim,
                id: share.id,
                dir: PathBuf::new(),
                policy: Policy { flags, ..share.policy },
                page: share.page,
                node_pages: Arc::default(),
                first: Err(AccountError::Leased),
                containers: containers.iter().map(container).collect(),
            }
        };
        let all = [
            found(0, Flags::default(), &["one", "both", "mixed"]),
            found(1, Flags::default(), &["both"]),
            found(2, Flags::OBSERVE_ONLY, &["mixed", "observed"]),
        ];
        let limits: Vec<(String, u64)> =
            container_limits(&all, root.path()).into_iter().map(|(id, _, limit)| (id, limit >> 20)).collect();
        assert_eq!(limits, [("both".to_owned(), 2000), ("one".to_owned(), 1000)]);
    }
}
