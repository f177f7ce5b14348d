//! The protocol of charging, in every interleaving and with every kill.

use super::*;
use crate::account::{NodeLine, PageError, SLOTS, Snapshot};
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

/// Peers of whom nobody is known to be dead, and who are not waited for.
struct Strangers;

impl Peers for Strangers {
    fn gone(&self, _who: &Identity) -> bool {
        false
    }

    fn pause(&self, _round: u32) -> bool {
        false
    }

    fn now(&self) -> u64 {
        0
    }
}

/// Two processes on one page of ten bytes, of which the first holds six.
fn two() -> [Seat<'static>; 2] {
    let page = page();
    let seats = [1, 2].map(|pid| {
        let slot = page.register(&who(pid), &Strangers).expect("there are slots");
        Seat { page, slot, limit: 10 }
    });
    charge(&seats[..1], 6, &Strangers).expect("it fits");
    seats
}

/// What the node writes into the line of a slot.
fn say(seat: &Seat<'_>, line: NodeLine) {
    let slot = seat.page.slot(seat.slot).expect("a slot");
    for (word, bytes) in slot.node.iter().zip(line.encode().chunks(8)) {
        word.store(u64::from_le_bytes(bytes.try_into().expect("eight bytes")));
    }
}

#[test]
fn the_nodes_verdict_counts_for_the_owner_it_names_only() {
    let [first, second] = two();
    let owner = first.page.slots()[0].owner();
    let verdict = NodeLine { about: owner, dead: true, correction: 0, host_pid: 4711 };
    say(&first, NodeLine { about: Owner(owner.0 + (1 << 32)), ..verdict });
    assert_eq!(charge(&[second], 5, &Strangers), Err(Full));
    say(&first, verdict);
    assert_eq!(first.page.slots()[0].host_pid(), 4711);
    assert_eq!(charge(&[second], 10, &Strangers), Ok(()));
    assert_eq!(first.page.slots()[0].owner().state(), SlotState::Free);
    let next = first.page.register(&who(3), &Strangers).expect("there are slots");
    assert_eq!(next, first.slot);
    assert_eq!((first.page.slots()[0].host_pid(), first.page.slots()[0].weighs()), (0, 0));
}

#[test]
fn what_the_node_measured_counts_like_a_charge() {
    let [first, second] = two();
    let about = first.page.slots()[0].owner();
    let measured = |correction| say(&first, NodeLine { about, dead: false, correction, host_pid: 0 });
    measured(3);
    assert!(first.page.tidy(None, &Strangers));
    assert_eq!(first.page.used(), 9);
    assert_eq!(charge(&[second], 2, &Strangers), Err(Full));
    measured(-2);
    assert_eq!(charge(&[second], 6, &Strangers), Ok(()));
    assert_eq!(first.page.used(), 10);
    // More than there is: the share is full, and what is held can still be given back.
    measured(1 << 40);
    assert_eq!(charge(&[first], 1, &Strangers), Err(Full));
    uncharge(&[second], 6);
    assert_eq!(second.page.slots()[1].weighs(), 0);
}

#[test]
fn one_who_was_stopped_in_the_middle_costs_others_their_patience_and_not_more() {
    let [first, second] = two();
    first.page.slot(first.slot).expect("a slot").begin();
    assert_eq!(charge(&[second], 4, &Strangers), Ok(()));
    assert_eq!(charge(&[second], 1, &Strangers), Err(Full));
    assert_eq!(second.page.counted(Fault::Waited), 1);
}

#[test]
fn exec_gives_up_what_the_image_before_it_held() {
    let [first, second] = two();
    let again = Identity { image: 2, ..who(1) };
    let slot = first.page.register(&again, &Strangers).expect("there are slots");
    assert_ne!(slot, first.slot);
    assert_eq!(charge(&[second], 10, &Strangers), Ok(()));
}

#[test]
fn a_second_copy_of_the_library_in_a_process_leaves_the_first_its_slot() {
    let [first, _] = two();
    let slot = first.page.register(&who(1), &Strangers).expect("there are slots");
    assert_ne!(slot, first.slot);
    assert_eq!(charge(&[Seat { slot, ..first }], 5, &Strangers), Err(Full));
    assert_eq!(charge(&[Seat { slot, ..first }], 4, &Strangers), Ok(()));
}

#[test]
fn gpu_time_that_a_dead_process_had_and_did_not_pay_is_charged_to_its_share_once() {
    /// The first process is dead.
    struct At(u64);
    impl Peers for At {
        fn gone(&self, who: &Identity) -> bool {
            who.pid == 1
        }
        fn pause(&self, _round: u32) -> bool {
            false
        }
        fn now(&self) -> u64 {
            self.0
        }
    }
    const SECOND: u64 = 1_000_000_000;
    let check = |owed: u64, since: u64, charged: u64| {
        let [first, second] = two();
        let slot = &first.page.slots()[0];
        slot.owes(owed);
        slot.unmeasured(since);
        for _ in 0..2 {
            assert!(second.page.tidy(Some(second.slot), &At(9 * SECOND)));
        }
        let balance = first.page.balance().load(Acquire);
        assert_eq!(balance, -i64::try_from(charged).expect("it fits"), "{owed} {since}");
        // By whoever found it.
        let file = crate::explore::file(first.page);
        let page = Snapshot::new(&file[..Snapshot::length(&file)]).expect("a page");
        assert_eq!(page.slots().map(|slot| slot.charged_ns).collect::<Vec<_>>(), [charged]);
        // The next owner owes nothing.
        assert_eq!(first.page.register(&who(3), &Strangers), Ok(first.slot));
        assert_eq!(first.page.slots()[0].unpaid(9 * SECOND), 0);
    };
    check(0, 0, 0);
    check(7, 0, 7);
    check(7, 9 * SECOND - 50, 57);
    // Long ago, in the future, and what nobody owes.
    check(0, 5, SECOND);
    check(7, 10 * SECOND, 7);
    check(u64::MAX, 5, 11 * SECOND);
}

#[test]
fn short_lives_leave_no_slots_behind() {
    struct All;
    impl Peers for All {
        fn gone(&self, _who: &Identity) -> bool {
            true
        }
        fn pause(&self, _round: u32) -> bool {
            false
        }
        fn now(&self) -> u64 {
            0
        }
    }
    let page = page();
    for pid in 1..3 * SLOTS as u32 {
        page.register(&who(pid), &All).expect("there are slots");
    }
}

#[test]
fn a_full_house_takes_a_newcomer_once_somebody_is_dead() {
    struct All(u32);
    impl Peers for All {
        fn gone(&self, who: &Identity) -> bool {
            who.pid == self.0
        }
        fn pause(&self, _round: u32) -> bool {
            false
        }
        fn now(&self) -> u64 {
            0
        }
    }
    let page = page();
    for pid in 1..=SLOTS as u32 {
        page.register(&who(pid), &All(0)).expect("there are slots");
    }
    assert_eq!(page.register(&who(5000), &All(0)), Err(NoSlot));
    assert_eq!(page.register(&who(5000), &All(700)), Ok(699));
    assert_eq!(page.counted(Fault::NoSlot), 1);
}

#[test]
fn the_node_reads_what_the_processes_wrote() {
    let [first, second] = two();
    charge(&[second], 3, &Strangers).expect("it fits");
    second.page.slots()[1].note(2, 1);
    let file = crate::explore::file(first.page);
    let page = Snapshot::new(&file[..Snapshot::length(&file)]).expect("a page");
    let slots: Vec<_> = page.slots().map(|slot| (slot.who, slot.held, slot.context, slot.managed)).collect();
    assert_eq!(slots, [(who(1), 6, 0, 0), (who(2), 3, 2, 1)]);
    assert_eq!((page.used(), page.sum()), (9, 9));
    assert_eq!(Snapshot::new(&file[..4000]).err(), Some(PageError::Foreign));
}

#[test]
fn threads_never_hold_more_than_the_limit_and_leave_nothing_behind() {
    let page = page();
    std::thread::scope(|scope| {
        for pid in 1..=4 {
            scope.spawn(move || {
                let slot = page.register(&who(pid), &Strangers).expect("there are slots");
                let seat = [Seat { page, slot, limit: 10 }];
                for turn in 0..5_000 {
                    let bytes = 1 + (turn + u64::from(pid)) % 7;
                    if charge(&seat, bytes, &Strangers).is_ok() {
                        assert!(page.used() <= 10);
                        uncharge(&seat, bytes);
                    }
                }
            });
        }
    });
    assert_eq!((page.used(), page.slots().iter().map(Slot::weighs).sum::<u64>()), (0, 0));
}

proptest::proptest! {
    #[test]
    fn any_bytes_give_a_snapshot_or_an_error(bytes in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300)) {
        let mut page = vec![0; 4096 + 256];
        page[..64].copy_from_slice(&crate::account::fresh());
        page.splice(64..64 + bytes.len(), bytes.iter().copied());
        page.extend(&bytes);
        let _ = Snapshot::length(&page);
        if let Ok(snapshot) = Snapshot::new(&page) {
            let _ = (snapshot.used(), snapshot.sum(), snapshot.slots().count());
        }
    }
}
