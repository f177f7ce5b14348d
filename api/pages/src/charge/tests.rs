//! The protocol of charging, in every interleaving and with every kill.

use super::*;
use crate::account::SlotState;
use crate::explore::{Act, End as Ended, Last, Watchers, answers, explore, page, who};

/// What a process does, one after the other.
#[derive(Clone, Copy, Debug)]
enum Do {
    Charge(u64),
    /// On one of its pages only, as if it had no other.
    ChargeOn(usize, u64),
    Free(u64),
}
use Do::{Charge, ChargeOn, Free};

/// A process: the pages it has mounted, what it holds at the start (on its first page), and what it does.
struct Plan {
    pages: &'static [usize],
    holds: u64,
    /// It takes its slots itself.
    new: bool,
    does: &'static [Do],
}

/// Checks that however the plans interleave, and whichever are killed: no page exceeds its limit; what
/// everyone was answered is what some order of whole operations one at a time would have
/// answered; and afterwards, just what the living do not hold can be charged.
fn check(limits: &[u64], kills: u32, plans: &[Plan]) {
    check_with_drift(limits, 0, kills, plans);
}

/// The same with so many bytes in the total of the first page that no slot explains.
fn check_with_drift(limits: &[u64], drift: u64, kills: u32, plans: &[Plan]) {
    let pages: Vec<_> = limits.iter().map(|_| page()).collect();
    let seats_of = |plan: &Plan, pid: u32| -> Vec<Seat<'_>> {
        let seat = |index: &usize| {
            let slot = pages[*index].register(&who(pid), &Watchers).expect("there are slots");
            Seat { page: pages[*index], slot, limit: limits[*index] }
        };
        plan.pages.iter().map(seat).collect()
    };
    let acts: Vec<Act<'_>> = plans
        .iter()
        .zip(1..)
        .map(|(plan, pid)| -> Act<'_> {
            let ready = (!plan.new).then(|| seats_of(plan, pid));
            ready.iter().for_each(|seats| force(&seats[..1], plan.holds));
            Box::new(move || {
                let seats = ready.clone().unwrap_or_else(|| seats_of(plan, pid));
                let did = |act: &Do| match *act {
                    Charge(bytes) => charge(&seats, bytes, &Watchers).is_ok(),
                    ChargeOn(page, bytes) => charge(&seats[page..=page], bytes, &Watchers).is_ok(),
                    Free(bytes) => {
                        uncharge(&seats, bytes);
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
            let dead = |pid: usize| last.ends[pid - 1] == Ended::Killed;
            last.run(|| {
                for (page, limit) in pages.iter().zip(limits) {
                    let slot = page.register(&who(99), &Watchers).expect("there are slots");
                    let seat = [Seat { page, slot, limit: *limit }];
                    let living = page.slots().iter().filter(|slot| {
                        let pid = slot.owner().pid() as usize;
                        slot.owner().state() == SlotState::Live && (pid == 99 || !dead(pid))
                    });
                    let held: u64 = living.map(|slot| bytes(slot.held.load())).sum();
                    assert!(charge(&seat, limit - held, &Watchers).is_ok(), "{:?}", last.ends);
                    assert!(charge(&seat, 1, &Watchers).is_err(), "{:?}", last.ends);
                }
            });
        },
    );
}

/// True where some order of whole operations, one at a time, gives the answers. A killed process may have
/// done any number of its operations, and its memory goes at any time after.
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

fn order(limits: &[u64], plans: &[Plan], ends: &[Ended], done: &mut Vec<usize>, held: Vec<Vec<u64>>) -> bool {
    let finished = |index: usize| done[index] >= plans[index].does.len() || ends[index] == Ended::Killed;
    if (0..plans.len()).all(finished) {
        return true;
    }
    for (index, plan) in plans.iter().enumerate() {
        let dead = usize::MAX;
        if done[index] == dead {
            continue;
        }
        let before = done[index];
        if ends[index] == Ended::Killed {
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
        let told = match ends[index] {
            Ended::Result(answers) => answers >> before & 1 == 1,
            Ended::Killed => answer,
        };
        if answer == told {
            done[index] += 1;
            if order(limits, plans, ends, done, next) {
                return true;
            }
            done[index] = before;
        }
    }
    false
}

/// One operation by the rules: whole to the first page with room, else split in order; freed from the last.
fn apply(limits: &[u64], plan: &Plan, index: usize, act: Do, held: &mut [Vec<u64>]) -> bool {
    let room =
        |held: &[Vec<u64>], page: usize| limits[page] - held.iter().map(|held| held[page]).sum::<u64>();
    match act {
        ChargeOn(at, bytes) => {
            let page = plan.pages[at];
            let fits = room(held, page) >= bytes;
            held[index][page] += if fits { bytes } else { 0 };
            return fits;
        }
        Charge(bytes) => {
            if let Some(page) = plan.pages.iter().find(|page| room(held, **page) >= bytes) {
                held[index][*page] += bytes;
                return true;
            }
            if plan.pages.iter().map(|page| room(held, *page)).sum::<u64>() < bytes {
                return false;
            }
            let mut rest = bytes;
            for page in plan.pages {
                let taken = room(held, *page).min(rest);
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

fn plan(pages: &'static [usize], holds: u64, does: &'static [Do]) -> Plan {
    Plan { pages, holds, new: false, does }
}

fn new(pages: &'static [usize], does: &'static [Do]) -> Plan {
    Plan { pages, holds: 0, new: true, does }
}

#[test]
fn of_two_that_do_not_fit_together_one_gets_it() {
    let race = [plan(ONE_PAGE, 0, &[Charge(6)]), plan(ONE_PAGE, 0, &[Charge(6)])];
    check(&[10], 0, &race);
    check(&[10], 1, &race);
}

#[test]
fn two_that_fit_together_both_get_it() {
    check(&[10], 1, &[plan(ONE_PAGE, 0, &[Charge(6)]), plan(ONE_PAGE, 0, &[Charge(4)])]);
}

#[test]
fn a_refusal_is_true_at_some_moment_while_others_free() {
    check(&[10], 1, &[plan(ONE_PAGE, 10, &[Free(6)]), plan(ONE_PAGE, 0, &[Charge(6), Charge(4)])]);
}

#[test]
fn of_two_that_would_both_be_split_one_gets_it() {
    let race = [plan(BOTH, 0, &[Charge(6)]), plan(BOTH, 0, &[Charge(6)])];
    check(&[5, 5], 0, &race);
    check(&[5, 5], 1, &race);
}

#[test]
fn a_split_beside_one_who_has_one_of_the_pages_only() {
    const FIRST: &[usize] = &[0];
    const SECOND: &[usize] = &[1];
    for neighbour in [FIRST, SECOND] {
        check(&[5, 5], 1, &[plan(BOTH, 0, &[Charge(6)]), plan(neighbour, 0, &[Charge(5)])]);
        check(&[5, 5], 1, &[plan(BOTH, 0, &[Charge(6)]), plan(neighbour, 0, &[Charge(4)])]);
        check(&[5, 5], 1, &[plan(BOTH, 0, &[Charge(8)]), plan(neighbour, 3, &[Free(3), Charge(2)])]);
    }
    check(
        &[5, 5],
        0,
        &[plan(BOTH, 0, &[Charge(6)]), plan(FIRST, 0, &[Charge(5)]), plan(SECOND, 0, &[Charge(5)])],
    );
}

#[test]
fn a_split_is_not_refused_for_room_that_only_moves() {
    // Four bytes that move from one page to the other: at every moment six are free.
    let moves = [plan(BOTH, 4, &[Free(4), ChargeOn(1, 4)]), plan(BOTH, 0, &[Charge(6)])];
    check(&[5, 5], 1, &moves);
}

#[test]
fn bytes_that_no_slot_explains_are_never_a_reason_to_refuse() {
    // While one looks, five bytes move from a slot it has seen to one that it has not seen yet.
    let moves =
        [plan(ONE_PAGE, 5, &[Free(5)]), plan(ONE_PAGE, 0, &[Charge(5)]), plan(ONE_PAGE, 0, &[Charge(5)])];
    check_with_drift(&[10], 5, 0, &moves);
}

#[test]
fn three_at_once_with_one_killed() {
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
fn the_room_of_the_dead_is_found_by_whoever_needs_it() {
    let race = [plan(ONE_PAGE, 8, &[]), plan(ONE_PAGE, 0, &[Charge(6)]), plan(ONE_PAGE, 0, &[Charge(4)])];
    check(&[10], 1, &race);
    check(&[10], 2, &race);
}

#[test]
fn newcomers_race_for_slots_and_for_room() {
    check(&[10], 1, &[new(ONE_PAGE, &[Charge(6)]), new(ONE_PAGE, &[Charge(6)])]);
}

#[test]
fn a_slot_of_the_dead_goes_to_one_newcomer() {
    // One dies with memory; one who needs its room frees its slot; a newcomer may get that slot at once.
    let race = [plan(ONE_PAGE, 8, &[]), plan(ONE_PAGE, 0, &[Charge(6)]), new(ONE_PAGE, &[Charge(4)])];
    check(&[10], 1, &race);
}

mod calls;
