//! One call after the other: what slots tell, how they are given, and whose bytes count.

use crate::account::{Fault, Identity, NodeLine, Owner, PageError, SLOTS, Slot, SlotState, Snapshot};
use crate::charge::{Full, NoSlot, Peers, Seat, charge, uncharge};
use crate::explore::{page, who};
use crate::sync::Ordering::Acquire;

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
    second.page.slots()[1].measured([40, 30, 20, 10]);
    let file = crate::explore::file(first.page);
    let page = Snapshot::new(&file[..Snapshot::length(&file)]).expect("a page");
    let slots: Vec<_> = page.slots().map(|slot| (slot.who, slot.held, slot.context, slot.managed)).collect();
    assert_eq!(slots, [(who(1), 6, 0, 0), (who(2), 3, 2, 1)]);
    let time = page.slots().map(|slot| [slot.measured_ns, slot.least_ns, slot.long_ns, slot.spared_ns]);
    assert_eq!(time.collect::<Vec<_>>(), [[0; 4], [40, 30, 20, 10]]);
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
