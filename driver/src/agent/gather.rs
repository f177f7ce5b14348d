//! Reads what an audit goes by, and writes the node's lines. Files only; NVML is asked
//! in between ([`super::Agent`]).
//!
//! The directories of pages are root's alone, so a path below them is what it says it
//! is. The account page itself is whatever the tenant has made of it: it is read with a
//! bound and never mapped.

use super::files::Files;
use super::lines::{self, Write};
use super::look::{Account, AccountError, Look, Share, Slot};
use super::mounts::Page;
use super::pressure::{self, Said};
use super::process::{self, Cgroups, Known, Process};
use crate::shares::{ACCOUNT, POLICY, Shares};
use divvy_api::{ClaimUid, ShareId};
use divvy_pages::account::{self, ATTENTION, BALANCE, HEADER, NodeLine, Snapshot};
use divvy_pages::{Fault, Flags, Memory, Owner, PageError, Policy, SlotState};
use rustix::fs::{major, minor};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A share as it is found on the host, with a first copy of its account page.
#[derive(Debug)]
pub(super) struct Found {
    claim: ClaimUid,
    id: ShareId,
    dir: PathBuf,
    pub(super) policy: Policy,
    page: Page,
    first: Result<Raw, AccountError>,
    containers: Vec<(String, Cgroups)>,
}

/// The pages of shares; nothing but its policy page is read of one that is not wanted for what that says. A page that is
/// just being made or removed is left out.
pub(super) fn found(
    shares: &Shares,
    files: &Files,
    mut is_wanted: impl FnMut(&Policy) -> bool,
) -> Vec<Found> {
    files.sweep();
    let mut all = Vec::new();
    for (claim, id) in shares.all() {
        let dir = shares.of(&claim, &id);
        let path = dir.join(POLICY);
        let read = read_policy(files, &path).map(|(page, meta)| (Policy::decode(&page), meta));
        let (policy, meta) = match read {
            Ok((Ok((_, policy)), meta)) => (policy, meta),
            Ok((Err(why), _)) => {
                // Root's alone to write: another version of the driver has written it.
                tracing::debug!(%claim, share = %id, %why, "policy page not read");
                continue;
            }
            Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {
                tracing::warn!(%claim, share = %id, "somebody has a lease on the policy page; not audited until it is broken");
                continue;
            }
            Err(_) => continue,
        };
        if !is_wanted(&policy) {
            continue;
        }
        let device = (major(meta.dev()), minor(meta.dev()));
        let page = Page { device, share: format!("{claim}/{id}") };
        let cgroups = shares.cgroups(&claim, &id).into_iter();
        let containers = cgroups.map(|(id, text)| (id, Cgroups::parse(&text))).collect();
        let Some(first) = copy(files, &dir.join(ACCOUNT)) else { continue };
        all.push(Found { first, claim, id, dir, policy, page, containers });
    }
    all.sort_by(|one, other| (&one.id, &one.claim).cmp(&(&other.id, &other.claim)));
    all
}

/// A copy of an account page, as far as it is in use.
#[derive(Debug)]
struct Raw {
    page: Vec<u8>,
    is_long: bool,
}

fn read_policy(files: &Files, path: &Path) -> io::Result<([u8; divvy_pages::policy::SIZE], Metadata)> {
    let (file, meta) = files.get(path, false)?;
    let mut page = [0; divvy_pages::policy::SIZE];
    file.read_exact_at(&mut page, 0)?;
    Ok((page, meta))
}

/// A copy; none where there is no page.
fn copy(files: &Files, path: &Path) -> Option<Result<Raw, AccountError>> {
    match read(files, path) {
        Ok(copy) => Some(match account::check(&copy.page) {
            Ok(()) => Ok(copy),
            // Of another version it cannot be: the policy page, which only root writes, is of this one.
            Err(why) => Err(AccountError::Spoiled(why)),
        }),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => None,
        Err(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => {
            Some(Err(AccountError::Spoiled(PageError::Foreign)))
        }
        Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => Some(Err(AccountError::Leased)),
        Err(cause) => Some(Err(AccountError::Unreadable(cause.to_string()))),
    }
}

fn read(files: &Files, path: &Path) -> io::Result<Raw> {
    let (file, meta) = files.get(path, true)?;
    let is_long = meta.len() > account::SIZE as u64;
    let mut page = vec![0; HEADER];
    file.read_exact_at(&mut page, 0)?;
    page.resize(Snapshot::length(&page).clamp(HEADER, account::SIZE), 0);
    file.read_exact_at(page.get_mut(HEADER..).unwrap_or_default(), HEADER as u64)?;
    Ok(Raw { page, is_long })
}

/// Whether it may hold more than it has of its GPU.
pub(super) fn presses(policy: &Policy) -> bool {
    policy.flags.has(Flags::UVM) && policy.mig.is_none()
}

impl Found {
    pub(super) fn key(&self) -> (ClaimUid, ShareId) {
        (self.claim.clone(), self.id.clone())
    }

    /// Bytes that the share says it holds.
    pub(super) fn used(&self) -> u64 {
        let page = self.first.as_ref().ok().and_then(|first| Snapshot::new(&first.page).ok());
        page.map_or(0, |page| page.used())
    }

    /// What the share says, where it may hold more than it has of its GPU.
    pub(super) fn presses(&self) -> Option<Said> {
        let Self { policy, first, .. } = self;
        let page = first.as_ref().ok().filter(|_| presses(policy))?;
        let page = Snapshot::new(&page.page).ok()?;
        let mut said = Said {
            key: self.key(),
            is_high: policy.compute.priority > 0,
            used: page.used(),
            managed: 0,
            took: 0,
            least: 0,
            works: page.refilled(),
            refused: page.counted(Fault::Refused),
        };
        // Tenants write these words: whatever they say is a number.
        for slot in page.slots().filter(|slot| slot.owner.state() == SlotState::Live) {
            let add = |sum: &mut u64, more: u64| *sum = sum.wrapping_add(more);
            said.managed = said.managed.saturating_add(slot.managed);
            add(&mut said.took, slot.measured_ns);
            add(&mut said.least, slot.least_ns);
            add(&mut said.works, slot.charged_ns);
            add(&mut said.works, slot.measured_ns);
        }
        said.managed = pressure::managed(said.managed, said.used, policy.memory.soft);
        Some(said)
    }

    /// The share with what changed since the first copy; none where it was released since.
    fn again(self, files: &Files) -> Option<Share> {
        let account = match (self.first, copy(files, &self.dir.join(ACCOUNT))?) {
            (Ok(first), Ok(second)) => account_of(&first, &second),
            (_, Err(why)) | (Err(why), _) => Err(why),
        };
        let Self { claim, id, policy, page, containers, .. } = self;
        Some(Share { claim, id, policy, page, account, containers })
    }
}

fn account_of(first: &Raw, second: &Raw) -> Result<Account, AccountError> {
    let is_long = second.is_long;
    let first = Snapshot::new(&first.page).map_err(AccountError::Spoiled)?;
    let second = Snapshot::new(&second.page).map_err(AccountError::Spoiled)?;
    let earlier: BTreeMap<usize, _> = first.slots().map(|slot| (slot.index, slot)).collect();
    let slots: Vec<Slot> = second
        .slots()
        .map(|report| {
            let same = earlier
                .get(&report.index)
                .is_some_and(|before| (before.owner, before.held) == (report.owner, report.held));
            Slot { report, still: same && report.in_flight == 0 }
        })
        .collect();
    let gone = earlier.keys().any(|index| slots.iter().all(|slot| slot.report.index != *index));
    let still = first.changes() == second.changes() && !gone && slots.iter().all(|slot| slot.still);
    Ok(Account {
        used: second.used(),
        balance: second.balance(),
        refilled: second.refilled(),
        attention: second.attention(),
        is_long,
        still,
        slots,
    })
}

/// Reads the accounts again and the processes, which completes the look that NVML's
/// list of processes began. A look that only `corrects` takes of a process what is known already.
pub(super) fn look(
    found: Vec<Found>,
    files: &Files,
    uses: Vec<super::look::Use>,
    known: &mut Known,
    corrects: bool,
    proc_root: &Path,
    cgroup_root: &Path,
) -> Look {
    let shares: Vec<Share> = found.into_iter().filter_map(|found| found.again(files)).collect();
    let mut processes: BTreeMap<u32, Process> = BTreeMap::new();
    let leaders = shares
        .iter()
        .flat_map(|share| &share.containers)
        .filter_map(|(_, cgroups)| leader(cgroup_root, cgroups));
    // What the line of a slot says of its owner saves the search for it.
    let owners = shares
        .iter()
        .filter_map(|share| share.account.as_ref().ok())
        .flat_map(|account| &account.slots)
        .map(|slot| slot.report.line.host_pid);
    let pids = uses.iter().map(|usage| usage.pid).chain(leaders).chain(owners).filter(|pid| *pid != 0);
    for pid in pids {
        if !processes.contains_key(&pid)
            && let Some(process) = known.read(proc_root, pid, corrects)
        {
            processes.insert(pid, process);
        }
    }
    Look { shares, uses, processes, ..Look::default() }
}

/// Containers with the directory of their cgroup and what they may have of the GPU: the
/// limits of all pages that they see. Not of instances: GPU drivers limit whole GPUs.
pub(super) fn limits(found: &[Found], cgroup_root: &Path) -> Vec<(String, PathBuf, u64)> {
    let mut limits: BTreeMap<String, (PathBuf, u64)> = BTreeMap::new();
    // Who only observes refuses nothing to anybody, beside other shares neither.
    let observes = |share: &&Found| share.policy.flags.has(Flags::OBSERVE_ONLY);
    let observed: BTreeSet<&String> =
        found.iter().filter(observes).flat_map(|share| &share.containers).map(|(id, _)| id).collect();
    for share in found.iter().filter(|share| share.policy.mig.is_none()) {
        for (id, cgroups) in share.containers.iter().filter(|(id, _)| !observed.contains(id)) {
            let Some(dir) = unified(cgroup_root, cgroups).filter(|dir| dir.exists()) else { continue };
            let (_, limit) = limits.entry(id.clone()).or_insert((dir, 0));
            // Managed memory these limits leave out, and what cannot move is not over-committed.
            let Memory { limit: all, soft, .. } = share.policy.memory;
            let holds = if share.policy.flags.has(Flags::UVM) && soft > 0 { all.min(soft) } else { all };
            *limit = limit.saturating_add(holds);
        }
    }
    limits.into_iter().map(|(id, (dir, limit))| (id, dir, limit)).collect()
}

/// The first process of a container that is still there.
fn leader(cgroup_root: &Path, cgroups: &Cgroups) -> Option<u32> {
    let listed = cgroups
        .directories(cgroup_root)
        .find_map(|dir| std::fs::read_to_string(dir.join("cgroup.procs")).ok())?;
    listed.lines().filter_map(|line| line.parse().ok()).min()
}

/// The directory of a cgroup of the unified hierarchy, where it is the only one.
fn unified(cgroup_root: &Path, cgroups: &Cgroups) -> Option<PathBuf> {
    let is_only = cgroup_root.join("cgroup.controllers").exists();
    let path = cgroups.unified()?.strip_prefix('/')?;
    is_only.then(|| cgroup_root.join(path))
}

/// Finds owners of slots among all processes, writes the lines that must change, and makes
/// pages of what is none. What fails is tried again at the next audit.
pub(super) fn repair(look: &Look, shares: &Shares, files: &Files, proc_root: &Path) {
    let unknown = lines::unknown(look);
    let others = match unknown.is_empty() {
        true => Vec::new(),
        false => match process::of_namespaces(proc_root, &unknown) {
            Ok(others) => others,
            Err(cause) => {
                tracing::warn!(%cause, proc_root = %proc_root.display(), "processes cannot be listed");
                return;
            }
        },
    };
    let writes = lines::lines(look, &others);
    for (at, share) in look.shares.iter().enumerate() {
        let mine: Vec<&Write> = writes.iter().filter(|write| write.share == at).collect();
        let path = shares.of(&share.claim, &share.id).join(ACCOUNT);
        let put = match &share.account {
            Ok(account) => write(files, &path, account, &mine),
            Err(AccountError::Spoiled(_)) => mend(files, &path),
            Err(AccountError::Leased | AccountError::Unreadable(_)) => continue,
        };
        if let Err(cause) = put {
            tracing::debug!(path = %path.display(), %cause, "account page not written");
        }
    }
}

/// Makes a page again of a file that is none: its head and its length. Slots that were cut off
/// are empty, so that processes that had them are not registered.
fn mend(files: &Files, path: &Path) -> io::Result<()> {
    let (file, _) = files.get(path, true)?;
    file.set_len(account::SIZE as u64)?;
    file.write_all_at(&account::fresh(), 0)
}

fn write(files: &Files, path: &Path, account: &Account, writes: &[&Write]) -> io::Result<()> {
    if !account.is_long && !account.is_rich() && !account.is_below_its_slots() && writes.is_empty() {
        return Ok(());
    }
    let (file, _) = files.get(path, true)?;
    if account.is_long {
        file.set_len(account::SIZE as u64)?;
    }
    if account.is_rich() {
        file.write_all_at(&0_i64.to_le_bytes(), BALANCE)?;
    }
    for Write { slot, line, anew, .. } in writes {
        let offset = NodeLine::offset(*slot);
        let bytes = line.encode();
        if *anew {
            // Words are read one by one. Of nobody first, and of the new owner last, so
            // that what was said of another is never taken for said of this one.
            file.write_all_at(&Owner(0).0.to_le_bytes(), offset)?;
            file.write_all_at(bytes.get(8..).unwrap_or_default(), offset + 8)?;
        }
        file.write_all_at(&bytes, offset)?;
    }
    // Last, for the processes of the share to see.
    file.write_all_at(&account.attention.wrapping_add(1).to_le_bytes(), ATTENTION)
}

#[cfg(test)]
mod tests {
    use super::super::judge::tests::share;
    use super::*;

    #[test]
    fn a_container_of_which_a_share_is_only_observed_is_held_to_nothing() {
        let root = tempfile::tempdir().unwrap();
        std::fs::write(root.path().join("cgroup.controllers"), "memory").unwrap();
        let found = |number: usize, flags: Flags, containers: &[&str]| {
            let share = share(number, 1000);
            let container = |id: &&str| {
                std::fs::create_dir_all(root.path().join(id)).unwrap();
                ((*id).to_owned(), Cgroups::parse(&format!("0::/{id}\n")))
            };
            Found {
                claim: share.claim,
                id: share.id,
                dir: PathBuf::new(),
                policy: Policy { flags, ..share.policy },
                page: share.page,
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
            limits(&all, root.path()).into_iter().map(|(id, _, limit)| (id, limit >> 20)).collect();
        assert_eq!(limits, [("both".to_owned(), 2000), ("one".to_owned(), 1000)]);
    }
}
