//! The charge protocol in every interleaving and with every kill.

use super::*;
use crate::account::SlotState;
use crate::explore::{Act, End, ExploredPeers, Last, answers, explore, identity, page};

/// Operations of a process, in order.
#[derive(Clone, Copy, Debug)]
enum Op {
    Charge(u64),
    /// On one of its pages only.
    ChargeOn(usize, u64),
    Free(u64),
}
use Op::{Charge, ChargeOn, Free};

/// A process: its mounted pages, the bytes that it holds at the start (on its first page), and its
/// operations.
struct Plan {
    pages: &'static [usize],
    holds: u64,
    /// The process registers its slots itself.
    new: bool,
    does: &'static [Op],
}

/// Checks for all interleavings and kills that no page exceeds its limit. The results must match some
/// order of whole operations, one at a time. Afterwards exactly the bytes that living processes do
/// not hold can be charged.
fn check(limits: &[u64], kills: u32, plans: &[Plan]) {
    check_with_drift(limits, 0, kills, plans);
}

/// The same, with `drift` bytes in the total of the first page that no slot accounts for.
fn check_with_drift(limits: &[u64], drift: u64, kills: u32, plans: &[Plan]) {
    let pages: Vec<_> = limits.iter().map(|_| page()).collect();
    let slots_of = |plan: &Plan, pid: u32| -> Vec<SlotRef<'_>> {
        let slot_ref = |index: &usize| {
            let slot = pages[*index].register(&identity(pid), &ExploredPeers).expect("there are slots");
            SlotRef { page: pages[*index], slot, limit: limits[*index] }
        };
        plan.pages.iter().map(slot_ref).collect()
    };
    let acts: Vec<Act<'_>> = plans
        .iter()
        .zip(1..)
        .map(|(plan, pid)| -> Act<'_> {
            let ready = (!plan.new).then(|| slots_of(plan, pid));
            ready.iter().for_each(|slots| force_charge(&slots[..1], plan.holds));
            Box::new(move || {
                let slots = ready.clone().unwrap_or_else(|| slots_of(plan, pid));
                let did = |act: &Op| match *act {
                    Charge(bytes) => charge(&slots, bytes, &ExploredPeers).is_ok(),
                    ChargeOn(page, bytes) => charge(&slots[page..=page], bytes, &ExploredPeers).is_ok(),
                    Free(bytes) => {
                        uncharge(&slots, bytes);
                        true
                    }
                };
                answers(plan.does.iter().map(did))
            })
        })
        .collect();
    pages[0].total.word.update(|total| total + drift);
    explore(
        &acts,
        kills,
        &|read| {
            for (page, limit) in pages.iter().zip(limits) {
                assert!(bytes(page.total.word.peek(read)) <= *limit, "beyond the limit");
            }
        },
        &|last| {
            assert!(explained(limits, plans, last), "no order explains {:?}", last.ends);
            let dead = |pid: usize| last.ends[pid - 1] == End::Killed;
            last.run(|| {
                for (page, limit) in pages.iter().zip(limits) {
                    let slot = page.register(&identity(99), &ExploredPeers).expect("there are slots");
                    let slot_ref = [SlotRef { page, slot, limit: *limit }];
                    let living = page.slots().iter().filter(|slot| {
                        let pid = slot.owner().pid() as usize;
                        slot.owner().state() == SlotState::Live && (pid == 99 || !dead(pid))
                    });
                    let held: u64 = living.map(|slot| bytes(slot.held.load())).sum();
                    assert!(charge(&slot_ref, limit - held, &ExploredPeers).is_ok(), "{:?}", last.ends);
                    assert!(charge(&slot_ref, 1, &ExploredPeers).is_err(), "{:?}", last.ends);
                }
            });
        },
    );
}

/// True if some order of whole operations, one at a time, gives these results. A killed process may
/// have done any number of its operations, and its memory is released at any time after that.
fn explained(limits: &[u64], plans: &[Plan], last: &Last) -> bool {
    let start: Vec<Vec<u64>> = plans
        .iter()
        .map(|plan| {
            let mut held = vec![0; limits.len()];
            held[plan.pages[0]] = plan.holds;
            held
        })
        .collect();
    order(limits, plans, &last.ends, &mut vec![0; plans.len()], start)
}

fn order(limits: &[u64], plans: &[Plan], ends: &[End], done: &mut Vec<usize>, held: Vec<Vec<u64>>) -> bool {
    let finished = |index: usize| done[index] >= plans[index].does.len() || ends[index] == End::Killed;
    if (0..plans.len()).all(finished) {
        return true;
    }
    for (index, plan) in plans.iter().enumerate() {
        let dead = usize::MAX;
        if done[index] == dead {
            continue;
        }
        let before = done[index];
        if ends[index] == End::Killed {
            let mut gone = held.clone();
            gone[index].fill(0);
            done[index] = dead;
            if order(limits, plans, ends, done, gone) {
                return true;
            }
            done[index] = before;
        }
        let Some(act) = plan.does.get(before) else { continue };
        let mut next = held.clone();
        let answer = apply(limits, plan, index, *act, &mut next);
        let is_reported_dead = match ends[index] {
            End::Result(answers) => answers >> before & 1 == 1,
            End::Killed => answer,
        };
        if answer == is_reported_dead {
            done[index] += 1;
            if order(limits, plans, ends, done, next) {
                return true;
            }
            done[index] = before;
        }
    }
    false
}

/// One operation by the rules: whole to the first page with enough free bytes, else split in order;
/// freed from the last page.
fn apply(limits: &[u64], plan: &Plan, index: usize, act: Op, held: &mut [Vec<u64>]) -> bool {
    let free =
        |held: &[Vec<u64>], page: usize| limits[page] - held.iter().map(|held| held[page]).sum::<u64>();
    match act {
        ChargeOn(at, bytes) => {
            let page = plan.pages[at];
            let fits = free(held, page) >= bytes;
            held[index][page] += if fits { bytes } else { 0 };
            return fits;
        }
        Charge(bytes) => {
            if let Some(page) = plan.pages.iter().find(|page| free(held, **page) >= bytes) {
                held[index][*page] += bytes;
                return true;
            }
            if plan.pages.iter().map(|page| free(held, *page)).sum::<u64>() < bytes {
                return false;
            }
            let mut rest = bytes;
            for page in plan.pages {
                let taken = free(held, *page).min(rest);
                held[index][*page] += taken;
                rest -= taken;
            }
        }
        Free(bytes) => {
            let mut rest = bytes;
            for page in plan.pages.iter().rev() {
                let given = held[index][*page].min(rest);
                held[index][*page] -= given;
                rest -= given;
            }
        }
    }
    true
}

const ONE_PAGE: &[usize] = &[0];
const BOTH: &[usize] = &[0, 1];

fn plan(pages: &'static [usize], holds: u64, does: &'static [Op]) -> Plan {
    Plan { pages, holds, new: false, does }
}

fn new(pages: &'static [usize], does: &'static [Op]) -> Plan {
    Plan { pages, holds: 0, new: true, does }
}

#[test]
fn one_of_two_racers_is_charged() {
    let race = [plan(ONE_PAGE, 0, &[Charge(6)]), plan(ONE_PAGE, 0, &[Charge(6)])];
    check(&[10], 0, &race);
    check(&[10], 1, &race);
}

#[test]
fn two_fitting_requests_are_both_charged() {
    check(&[10], 1, &[plan(ONE_PAGE, 0, &[Charge(6)]), plan(ONE_PAGE, 0, &[Charge(4)])]);
}

#[test]
fn refusal_is_correct_during_concurrent_frees() {
    check(&[10], 1, &[plan(ONE_PAGE, 10, &[Free(6)]), plan(ONE_PAGE, 0, &[Charge(6), Charge(4)])]);
}

#[test]
fn one_of_two_split_racers_is_charged() {
    let race = [plan(BOTH, 0, &[Charge(6)]), plan(BOTH, 0, &[Charge(6)])];
    check(&[5, 5], 0, &race);
    check(&[5, 5], 1, &race);
}

#[test]
fn split_next_to_a_process_with_one_page() {
    const FIRST: &[usize] = &[0];
    const SECOND: &[usize] = &[1];
    for other in [FIRST, SECOND] {
        check(&[5, 5], 1, &[plan(BOTH, 0, &[Charge(6)]), plan(other, 0, &[Charge(5)])]);
        check(&[5, 5], 1, &[plan(BOTH, 0, &[Charge(6)]), plan(other, 0, &[Charge(4)])]);
        check(&[5, 5], 1, &[plan(BOTH, 0, &[Charge(8)]), plan(other, 3, &[Free(3), Charge(2)])]);
    }
    check(
        &[5, 5],
        0,
        &[plan(BOTH, 0, &[Charge(6)]), plan(FIRST, 0, &[Charge(5)]), plan(SECOND, 0, &[Charge(5)])],
    );
}

#[test]
fn split_is_not_refused_for_bytes_that_move() {
    // Four bytes move from one page to the other, so six bytes are free at every moment.
    let moves = [plan(BOTH, 4, &[Free(4), ChargeOn(1, 4)]), plan(BOTH, 0, &[Charge(6)])];
    check(&[5, 5], 1, &moves);
}

#[test]
fn unaccounted_bytes_cause_no_refusal() {
    // While one process walks the slots, five bytes move from a slot it has seen to one that it has
    // not seen yet.
    let moves =
        [plan(ONE_PAGE, 5, &[Free(5)]), plan(ONE_PAGE, 0, &[Charge(5)]), plan(ONE_PAGE, 0, &[Charge(5)])];
    check_with_drift(&[10], 5, 0, &moves);
}

#[test]
fn three_processes_with_one_killed() {
    let race =
        [plan(ONE_PAGE, 0, &[Charge(6)]), plan(ONE_PAGE, 4, &[Free(4)]), plan(ONE_PAGE, 0, &[Charge(7)])];
    check(&[10], 1, &race);
    check(
        &[5, 5],
        0,
        &[plan(BOTH, 0, &[Charge(6)]), plan(BOTH, 0, &[Charge(6)]), plan(BOTH, 0, &[Charge(4)])],
    );
}

#[test]
fn bytes_of_dead_processes_are_reclaimed() {
    let race = [plan(ONE_PAGE, 8, &[]), plan(ONE_PAGE, 0, &[Charge(6)]), plan(ONE_PAGE, 0, &[Charge(4)])];
    check(&[10], 1, &race);
    check(&[10], 2, &race);
}

#[test]
fn new_processes_race_for_slots_and_bytes() {
    check(&[10], 1, &[new(ONE_PAGE, &[Charge(6)]), new(ONE_PAGE, &[Charge(6)])]);
}

#[test]
fn slot_of_a_dead_process_is_reused_once() {
    // One process dies with memory; another needs it and frees the slot; a new process may take
    // that slot at once.
    let race = [plan(ONE_PAGE, 8, &[]), plan(ONE_PAGE, 0, &[Charge(6)]), new(ONE_PAGE, &[Charge(4)])];
    check(&[10], 1, &race);
}

mod calls;
mod fixed;
