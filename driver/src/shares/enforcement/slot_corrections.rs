//! Writes the node's line of each slot, and repairs damaged account pages.
//!
//! The node reads an account page as a copy and writes it with plain writes. It never maps the
//! file, because processes of the share can truncate it at any time. The node writes only its own
//! line of a slot; the processes of the share apply it, in the protocol of the page (see
//! [`divvy_pages::charge`]). An agent that dies between two writes leaves a page that is as valid
//! as before.

use crate::shares::snapshot::page_files::PageFiles;
use crate::shares::snapshot::process::{self, Process};
use crate::shares::snapshot::{Account, AccountError, Device, Share, Slot, Snapshot, belongs_to};
use crate::shares::{ACCOUNT, Shares};
use divvy_pages::account::{self, ATTENTION, BALANCE, NodeLine};
use divvy_pages::{Identity, Owner};
use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A line to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LineWrite {
    /// Index of the share in the snapshot.
    share: usize,
    slot: usize,
    line: NodeLine,
    /// The current line is about another owner, and must not be taken for one about the new owner.
    is_new_owner: bool,
}

/// Finds the owners of all slots, writes the lines that must change, and repairs pages. The next
/// audit retries what fails.
pub(crate) fn apply(snapshot: &Snapshot, shares: &Shares, files: &PageFiles, proc_root: &Path) {
    let unresolved = unresolved_namespaces(snapshot);
    let others = match unresolved.is_empty() {
        true => Vec::new(),
        false => match process::of_namespaces(proc_root, &unresolved) {
            Ok(others) => others,
            Err(cause) => {
                tracing::warn!(%cause, proc_root = %proc_root.display(), "processes cannot be listed");
                return;
            }
        },
    };
    let writes = line_writes(snapshot, &others);
    for (at, share) in snapshot.shares.iter().enumerate() {
        let own: Vec<&LineWrite> = writes.iter().filter(|write| write.share == at).collect();
        let path = shares.of(&share.claim, &share.id).join(ACCOUNT);
        let written = match &share.account {
            Ok(account) => write(files, &path, account, &own),
            Err(AccountError::Corrupt(_)) => reset(files, &path),
            Err(AccountError::Leased | AccountError::Unreadable(_)) => continue,
        };
        if let Err(cause) = written {
            tracing::debug!(path = %path.display(), %cause, "account page not written");
        }
    }
}

/// Restores the header and the length of a corrupt page. Slots that were cut off are empty
/// afterwards, so their processes are unregistered.
fn reset(files: &PageFiles, path: &Path) -> io::Result<()> {
    let (file, _) = files.open(path, true)?;
    file.set_len(account::SIZE as u64)?;
    file.write_all_at(&account::fresh(), 0)
}

fn write(files: &PageFiles, path: &Path, account: &Account, writes: &[&LineWrite]) -> io::Result<()> {
    let is_damaged = account.is_oversized || account.has_forged_balance() || account.is_below_its_slots();
    if !is_damaged && writes.is_empty() {
        return Ok(());
    }
    let (file, _) = files.open(path, true)?;
    if account.is_oversized {
        file.set_len(account::SIZE as u64)?;
    }
    if account.has_forged_balance() {
        file.write_all_at(&0_i64.to_le_bytes(), BALANCE)?;
    }
    for LineWrite { slot, line, is_new_owner, .. } in writes {
        let offset = NodeLine::offset(*slot);
        let bytes = line.encode();
        if *is_new_owner {
            // Readers read word by word. Clear the owner first and write the new one last, so that
            // the values of the old owner are never taken for those of the new one.
            file.write_all_at(&Owner(0).0.to_le_bytes(), offset)?;
            file.write_all_at(bytes.get(8..).unwrap_or_default(), offset + 8)?;
        }
        file.write_all_at(&bytes, offset)?;
    }
    // Written last: it tells the processes of the share to read the lines.
    file.write_all_at(&account.attention.wrapping_add(1).to_le_bytes(), ATTENTION)
}

/// The pid namespaces of slot owners that are not among the processes of the snapshot.
fn unresolved_namespaces(snapshot: &Snapshot) -> Vec<u64> {
    let mut namespaces: Vec<u64> = taken(snapshot)
        // A slot that is already marked dead needs no search.
        .filter(|(_, slot)| slot.is_live() && owner_of(snapshot, slot).is_none())
        .map(|(_, slot)| slot.report.identity.namespace)
        .filter(|namespace| *namespace != 0)
        .collect();
    namespaces.sort_unstable();
    namespaces.dedup();
    namespaces
}

fn taken(snapshot: &Snapshot) -> impl Iterator<Item = (usize, &Slot)> {
    snapshot.shares.iter().enumerate().flat_map(|(at, share)| {
        let slots = share.account.as_ref().map(|account| account.slots.as_slice()).unwrap_or_default();
        slots.iter().filter(|slot| slot.is_taken()).map(move |slot| (at, slot))
    })
}

/// The owner of a slot, if it is among the processes of the snapshot.
fn owner_of<'a>(snapshot: &'a Snapshot, slot: &Slot) -> Option<&'a Process> {
    snapshot.processes.values().find(|process| belongs_to(&slot.report, &process.identity))
}

/// The lines that must change. `others` are all processes of the [`unresolved_namespaces`], with
/// their host pids.
///
/// A line has two statements:
/// - *Dead*: the owner runs in no pid namespace of this node. Processes of the share can tell that
///   only for their own namespace; the host sees all.
/// - *Correction*: see [`corrections`].
fn line_writes(snapshot: &Snapshot, others: &[(u32, Identity)]) -> Vec<LineWrite> {
    let mut corrections = corrections(snapshot);
    let mut writes = Vec::new();
    for (share, slot) in taken(snapshot) {
        let report = &slot.report;
        let known = owner_of(snapshot, slot).map(|process| process.pid);
        let elsewhere = || {
            let is_owner = |identity: &Identity| {
                identity.namespace == report.identity.namespace && belongs_to(report, identity)
            };
            others.iter().find(|(_, identity)| is_owner(identity)).map(|(pid, _)| *pid)
        };
        let host_pid = known.or_else(elsewhere);
        // Without a namespace and a start time the owner cannot be proven dead.
        let dead = host_pid.is_none() && report.identity.namespace != 0 && report.identity.start != 0;
        let same = report.node_line.owner == report.owner;
        let correction = match corrections.remove(&(share, report.index)) {
            Some(correction) => correction,
            // Not measured this time: the last measurement holds.
            None if same => report.node_line.correction,
            None => 0,
        };
        let host_pid = host_pid.unwrap_or(if same { report.node_line.host_pid } else { 0 });
        let line = NodeLine { owner: report.owner, dead, correction, host_pid };
        if line != report.node_line {
            writes.push(LineWrite { share, slot: report.index, line, is_new_owner: !same });
        }
    }
    writes
}

/// Corrections in bytes, by share and slot, of the processes that were measured.
///
/// A correction is the memory that NVML reports beyond the charge: contexts, modules and
/// allocations that the library did not see. The charge explains a range, because managed memory is
/// charged in full and may or may not be on the device. The correction is the distance of NVML's
/// figure from that range. A negative correction is at most the estimate of the contexts, because a
/// charge for memory that NVML does not show yet must stand.
fn corrections(snapshot: &Snapshot) -> BTreeMap<(usize, usize), i64> {
    let mut corrections = BTreeMap::new();
    for usage in &snapshot.uses {
        let (Some(process), Some(bytes)) = (snapshot.processes.get(&usage.pid), usage.bytes) else {
            continue;
        };
        let slots = slots_of(snapshot, process, usage.device);
        if slots.is_empty() || slots.iter().any(|(_, slot)| !slot.is_stable) {
            continue;
        }
        let sum = |field: fn(&Slot) -> u64| {
            slots.iter().map(|(_, slot)| field(slot)).fold(0_u64, u64::saturating_add)
        };
        let held = sum(|slot| slot.report.held);
        let managed = sum(|slot| slot.report.managed).min(held);
        let context = sum(|slot| slot.report.context).min(held);
        if bytes >= held.saturating_sub(managed) {
            // The excess fills pages that have room; the last page gets the rest.
            let mut rest = bytes.saturating_sub(held);
            let last = slots.len() - 1;
            for (at, (share, slot)) in slots.iter().enumerate() {
                let here = if at == last { rest } else { rest.min(room(&snapshot.shares[*share], slot)) };
                corrections.insert((*share, slot.report.index), i64::try_from(here).unwrap_or(i64::MAX));
                rest -= here;
            }
        } else {
            let mut rest = (held - managed - bytes).min(context);
            for (share, slot) in &slots {
                let here = rest.min(slot.report.context).min(slot.report.held);
                corrections.insert((*share, slot.report.index), -i64::try_from(here).unwrap_or(0));
                rest -= here;
            }
        }
    }
    corrections
}

/// The bytes below the limit of a page, not counting the current correction of this slot.
fn room(share: &Share, slot: &Slot) -> u64 {
    let used = share.account.as_ref().map_or(0, |account| account.used);
    let without = used.saturating_sub(u64::try_from(slot.report.node_line.correction).unwrap_or(0));
    share.policy.memory.limit.saturating_sub(without)
}

/// The slots of a process on the pages of a device, in the order of the pages.
pub(super) fn slots_of<'a>(
    snapshot: &'a Snapshot,
    process: &'a Process,
    device: Device,
) -> Vec<(usize, &'a Slot)> {
    let shares = snapshot.shares_of(process);
    let here = shares.into_iter().filter(|at| snapshot.shares[*at].device() == device);
    here.flat_map(|at| snapshot.shares[at].slots_of(process).map(move |slot| (at, slot))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shares::snapshot::fixture::{CONTEXT, Fixture};

    const MIB: u64 = 1 << 20;

    fn written(fixture: &Fixture) -> Vec<(usize, i64, bool)> {
        let snapshot = fixture.snapshot();
        let others: Vec<(u32, Identity)> = fixture.elsewhere();
        let writes = line_writes(&snapshot, &others);
        writes.iter().map(|write| (write.slot, write.line.correction / MIB as i64, write.line.dead)).collect()
    }

    #[test]
    fn driver_memory_is_corrected() {
        let check = |held: u64, managed: u64, bytes: u64, expected: i64| {
            let mut fixture = Fixture::share(10_000);
            fixture.process(7).has(bytes).slot(7, held + CONTEXT).managed(7, managed);
            assert_eq!(written(&fixture), [(0, expected, false)], "{held} {managed} {bytes}");
        };
        // Contexts as large as estimated, larger, smaller.
        check(1000, 0, 1000 + CONTEXT, 0);
        check(1000, 0, 1200 + CONTEXT, 200);
        check(1000, 0, 1100, 100 - CONTEXT as i64);
        // A negative correction is at most the estimate.
        check(1000, 0, 10, -(CONTEXT as i64));
        // Managed memory may be on the device or on the host.
        check(1000, 400, 1000 + CONTEXT, 0);
        check(1000, 400, 700 + CONTEXT, 0);
        check(1000, 400, 500 + CONTEXT, -100);
    }

    #[test]
    fn changing_slot_keeps_its_correction() {
        let mut fixture = Fixture::share(10_000);
        fixture.process(7).has(5000).slot(7, CONTEXT).moving(7).corrected(7, 33);
        assert_eq!(written(&fixture), []);
    }

    #[test]
    fn slot_without_a_running_owner_is_dead() {
        let mut fixture = Fixture::share(10_000);
        fixture.process(7).has(CONTEXT).slot(7, CONTEXT).slot(8, 500);
        assert_eq!(written(&fixture), [(0, 0, false), (1, 0, true)]);
        // The owner runs but does not use the GPU.
        fixture.process(8);
        fixture.only_elsewhere(8);
        assert_eq!(written(&fixture), [(0, 0, false), (1, 0, false)]);
    }

    #[test]
    fn unchanged_lines_are_not_written() {
        let mut fixture = Fixture::share(10_000);
        fixture.process(7).has(CONTEXT + 70).slot(7, CONTEXT);
        let snapshot = fixture.snapshot();
        let [write] = line_writes(&snapshot, &[])[..] else { panic!("one line") };
        assert!(write.is_new_owner);
        let mut next = snapshot;
        let account = next.shares[0].account.as_mut().expect("a page");
        account.slots[0].report.node_line = write.line;
        assert_eq!(line_writes(&next, &[]), []);
    }

    #[test]
    fn excess_goes_to_the_page_with_room() {
        let mut fixture = Fixture::share(1000);
        fixture.second_share(1000).process(7).has(1900).slot(7, 900).slot_on(1, 7, 400);
        let snapshot = fixture.snapshot();
        let corrections: Vec<i64> =
            line_writes(&snapshot, &[]).iter().map(|write| write.line.correction / MIB as i64).collect();
        assert_eq!(corrections, [100, 500]);
    }
}
