//! What the node writes into the slots of an account page: pure, from one [`Look`].
//!
//! A tenant's page is read as a copy and written with plain writes, never mapped: its
//! processes can cut the file short at any time. Only the node's own line of a slot is
//! written; what follows from it is done by the processes of the share, in the
//! protocol of the page (see [`divvy_pages::charge`]). So nothing of theirs is raced,
//! and an agent that dies in the middle leaves a page that is as true as before.
//!
//! - **Dead.** A slot whose owner lives in no pid namespace of this node any more: peers
//!   can tell that of processes in their own namespace only, the host of all.
//! - **Correction.** What the GPU driver says that a process has, beyond what it was
//!   charged: contexts, modules, whatever the library did not see. It is how far the
//!   driver's figure lies outside of what the charge explains, which is a range: managed
//!   memory is charged whole and may or may not be on the device. No more is taken off
//!   than the estimates of its contexts, whatever the driver says: a charge for memory
//!   that the driver does not show yet must stand.

use super::look::{Device, Look, Share, Slot, is_of};
use super::process::Process;
use divvy_pages::Identity;
use divvy_pages::account::NodeLine;
use std::collections::BTreeMap;

/// A line to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Write {
    /// Of the look's shares, by index.
    pub(super) share: usize,
    pub(super) slot: usize,
    pub(super) line: NodeLine,
    /// The line there speaks of another owner: it must not be mistaken for one of this.
    pub(super) anew: bool,
}

/// The pid namespaces in which the owner of a slot is to be looked for.
pub(super) fn unknown(look: &Look) -> Vec<u64> {
    let mut namespaces: Vec<u64> = taken(look)
        // Who is dead already will not be found.
        .filter(|(_, slot)| slot.is_live() && owner_of(look, slot).is_none())
        .map(|(_, slot)| slot.report.who.namespace)
        .filter(|namespace| *namespace != 0)
        .collect();
    namespaces.sort_unstable();
    namespaces.dedup();
    namespaces
}

fn taken(look: &Look) -> impl Iterator<Item = (usize, &Slot)> {
    look.shares.iter().enumerate().flat_map(|(at, share)| {
        let slots = share.account.as_ref().map(|account| account.slots.as_slice()).unwrap_or_default();
        slots.iter().filter(|slot| slot.is_taken()).map(move |slot| (at, slot))
    })
}

/// The process of a slot, if it is among those that were looked at.
fn owner_of<'a>(look: &'a Look, slot: &Slot) -> Option<&'a Process> {
    look.processes.values().find(|process| is_of(&slot.report, &process.who))
}

/// The lines that must be other than they are. `others` are all processes of the
/// namespaces that [`unknown`] named, by their pid on the host.
pub(super) fn lines(look: &Look, others: &[(u32, Identity)]) -> Vec<Write> {
    let mut corrections = corrections(look);
    let mut writes = Vec::new();
    for (share, slot) in taken(look) {
        let report = &slot.report;
        let known = owner_of(look, slot).map(|process| process.pid);
        let elsewhere = || {
            let is = |who: &Identity| who.namespace == report.who.namespace && is_of(report, who);
            others.iter().find(|(_, who)| is(who)).map(|(pid, _)| *pid)
        };
        let host_pid = known.or_else(elsewhere);
        // Without a namespace or a start there is nothing to prove it by.
        let dead = host_pid.is_none() && report.who.namespace != 0 && report.who.start != 0;
        let same = report.line.about == report.owner;
        let correction = match corrections.remove(&(share, report.index)) {
            Some(correction) => correction,
            // Not measured this time: what was measured last holds.
            None if same => report.line.correction,
            None => 0,
        };
        let host_pid = host_pid.unwrap_or(if same { report.line.host_pid } else { 0 });
        let line = NodeLine { about: report.owner, dead, correction, host_pid };
        if line != report.line {
            writes.push(Write { share, slot: report.index, line, anew: !same });
        }
    }
    writes
}

/// Corrections by share and slot, of the processes that were measured.
fn corrections(look: &Look) -> BTreeMap<(usize, usize), i64> {
    let mut corrections = BTreeMap::new();
    for usage in &look.uses {
        let (Some(process), Some(bytes)) = (look.processes.get(&usage.pid), usage.bytes) else { continue };
        let slots = of(look, process, usage.device);
        if slots.is_empty() || slots.iter().any(|(_, slot)| !slot.still) {
            continue;
        }
        let sum = |field: fn(&Slot) -> u64| {
            slots.iter().map(|(_, slot)| field(slot)).fold(0_u64, u64::saturating_add)
        };
        let held = sum(|slot| slot.report.held);
        let managed = sum(|slot| slot.report.managed).min(held);
        let context = sum(|slot| slot.report.context).min(held);
        if bytes >= held.saturating_sub(managed) {
            // What goes beyond is put where there is room, and what is over on the last page.
            let mut rest = bytes.saturating_sub(held);
            let last = slots.len() - 1;
            for (at, (share, slot)) in slots.iter().enumerate() {
                let here = if at == last { rest } else { rest.min(room(&look.shares[*share], slot)) };
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

/// What a page has room for besides that slot's correction.
fn room(share: &Share, slot: &Slot) -> u64 {
    let used = share.account.as_ref().map_or(0, |account| account.used);
    let without = used.saturating_sub(u64::try_from(slot.report.line.correction).unwrap_or(0));
    share.policy.memory.limit.saturating_sub(without)
}

/// The slots of a process on the pages of a device, in the order of the pages.
pub(super) fn of<'a>(look: &'a Look, process: &'a Process, device: Device) -> Vec<(usize, &'a Slot)> {
    let shares = look.shares_of(process);
    let here = shares.into_iter().filter(|at| look.shares[*at].device() == device);
    here.flat_map(|at| look.shares[at].slots_of(process).map(move |slot| (at, slot))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::judge::tests::{CONTEXT, Scene};
    use super::*;

    const MIB: u64 = 1 << 20;

    fn written(scene: &Scene) -> Vec<(usize, i64, bool)> {
        let look = scene.look();
        let others: Vec<(u32, Identity)> = scene.elsewhere();
        let writes = lines(&look, &others);
        writes.iter().map(|write| (write.slot, write.line.correction / MIB as i64, write.line.dead)).collect()
    }

    #[test]
    fn what_the_gpu_driver_takes_is_counted() {
        let check = |held: u64, managed: u64, bytes: u64, expected: i64| {
            let mut scene = Scene::share(10_000);
            scene.process(7).has(bytes).slot(7, held + CONTEXT).managed(7, managed);
            assert_eq!(written(&scene), [(0, expected, false)], "{held} {managed} {bytes}");
        };
        // Contexts take as much as estimated, more, less.
        check(1000, 0, 1000 + CONTEXT, 0);
        check(1000, 0, 1200 + CONTEXT, 200);
        check(1000, 0, 1100, 100 - CONTEXT as i64);
        // No more comes off than the estimate.
        check(1000, 0, 10, -(CONTEXT as i64));
        // Managed memory may be on the device or not.
        check(1000, 400, 1000 + CONTEXT, 0);
        check(1000, 400, 700 + CONTEXT, 0);
        check(1000, 400, 500 + CONTEXT, -100);
    }

    #[test]
    fn a_slot_that_changes_while_it_is_measured_keeps_its_correction() {
        let mut scene = Scene::share(10_000);
        scene.process(7).has(5000).slot(7, CONTEXT).moving(7).corrected(7, 33);
        assert_eq!(written(&scene), []);
    }

    #[test]
    fn a_slot_whose_owner_is_nowhere_is_dead() {
        let mut scene = Scene::share(10_000);
        scene.process(7).has(CONTEXT).slot(7, CONTEXT).slot(8, 500);
        assert_eq!(written(&scene), [(0, 0, false), (1, 0, true)]);
        // It lives, but does not use the GPU now.
        scene.process(8);
        scene.only_elsewhere(8);
        assert_eq!(written(&scene), [(0, 0, false), (1, 0, false)]);
    }

    #[test]
    fn nothing_is_written_twice() {
        let mut scene = Scene::share(10_000);
        scene.process(7).has(CONTEXT + 70).slot(7, CONTEXT);
        let look = scene.look();
        let [write] = lines(&look, &[])[..] else { panic!("one line") };
        assert!(write.anew);
        let mut next = look;
        let account = next.shares[0].account.as_mut().expect("a page");
        account.slots[0].report.line = write.line;
        assert_eq!(lines(&next, &[]), []);
    }

    #[test]
    fn what_goes_beyond_is_put_on_the_page_that_has_room() {
        let mut scene = Scene::share(1000);
        scene.second_share(1000).process(7).has(1900).slot(7, 900).slot_on(1, 7, 400);
        let look = scene.look();
        let corrections: Vec<i64> =
            lines(&look, &[]).iter().map(|write| write.line.correction / MIB as i64).collect();
        assert_eq!(corrections, [100, 500]);
    }
}
