//! Two threads on the words of one page, in every order and with every load as old as its ordering allows ([`crate::sync`]).
//!
//! What the exploration of the charge knows only as whole steps is run here as it ships: a change of a word is a load and
//! exchanges until one succeeds. The stock of compute time, whose words are not the charge's, is modelled beside who takes
//! from it, in the library.

use crate::account::{Identity, SlotState, bytes};
use crate::charge::{Full, Peers, Seat, charge, uncharge};
use crate::explore::{page, who};
use crate::sync::{Model, spin_loop};

const LIMIT: u64 = 10;

/// Nobody dies; who waits lets others go on.
struct Neighbours;

impl Peers for Neighbours {
    fn gone(&self, _who: &Identity) -> bool {
        false
    }

    fn pause(&self, _round: u32) -> bool {
        spin_loop();
        true
    }

    fn now(&self) -> u64 {
        0
    }
}

/// What one thread does with its seat, and whether it got what it asked for.
type Act = fn(Seat<'static>) -> bool;

fn charges<const BYTES: u64>(seat: Seat<'static>) -> bool {
    let charged = charge(&[seat], BYTES, &Neighbours);
    assert!(seat.page.used() <= LIMIT, "beyond the limit");
    charged != Err(Full)
}

fn frees<const BYTES: u64>(seat: Seat<'static>) -> bool {
    uncharge(&[seat], BYTES);
    true
}

/// Two processes that hold so much do one thing each; `end` is told what each was answered and holds then. Whatever
/// is left of the limit is there afterwards, and not a byte more.
fn check(holds: [u64; 2], acts: [Act; 2], end: fn([bool; 2], [u64; 2])) {
    let page = page();
    let seats = [1, 2].map(|pid| {
        let slot = page.register(&who(pid), &Neighbours).expect("there are slots");
        Seat { page, slot, limit: LIMIT }
    });
    for (seat, bytes) in seats.iter().zip(holds) {
        charge(&[*seat], bytes, &Neighbours).expect("it fits");
    }
    Model::default().check(move || {
        let [one, two] = seats;
        let other = loom::thread::spawn(move || acts[1](two));
        let answers = [acts[0](one), other.join().expect("no panic")];
        let held = seats.map(|seat| bytes(page.slots[usize::from(seat.slot)].held.load()));
        assert_eq!(page.used(), held[0] + held[1], "the total is what the slots hold");
        end(answers, held);
        let left = LIMIT - page.used();
        assert_eq!(charge(&[one], left, &Neighbours), Ok(()));
        assert_eq!(charge(&[one], 1, &Neighbours), Err(Full));
    });
}

#[test]
fn of_two_that_do_not_fit_together_one_gets_the_last_byte() {
    check([0, 0], [charges::<6>, charges::<6>], |answers, held| {
        assert_eq!((answers[0] ^ answers[1], held[0] + held[1]), (true, 6));
    });
}

#[test]
fn one_that_fits_is_not_refused_for_one_that_does_not() {
    check([0, 4], [charges::<6>, charges::<7>], |answers, held| {
        assert_eq!((answers, held), ([true, false], [6, 4]));
    });
}

#[test]
fn what_is_freed_meanwhile_is_there_or_not_yet() {
    check([10, 0], [frees::<6>, charges::<6>], |answers, held| {
        assert_eq!(held, [4, if answers[1] { 6 } else { 0 }]);
    });
}

#[test]
fn two_that_come_at_once_have_a_slot_each_and_their_bytes_count() {
    let page = page();
    Model::default().check(move || {
        let comes = move |pid| {
            let slot = page.register(&who(pid), &Neighbours).expect("there are slots");
            (slot, charges::<6>(Seat { page, slot, limit: LIMIT }))
        };
        let other = loom::thread::spawn(move || comes(2));
        let [one, two] = [comes(1), other.join().expect("no panic")];
        assert_ne!(one.0, two.0);
        for (slot, pid) in [(one.0, 1), (two.0, 2)] {
            let owner = page.slots()[usize::from(slot)].owner();
            assert_eq!((owner.state(), owner.pid()), (SlotState::Live, pid));
        }
        assert_eq!((one.1 ^ two.1, page.used()), (true, 6));
    });
}

#[test]
fn a_thread_of_the_same_process_charges_the_same_slot() {
    let page = page();
    let slot = page.register(&who(1), &Neighbours).expect("there are slots");
    let seat = Seat { page, slot, limit: LIMIT };
    Model::default().check(move || {
        let other = loom::thread::spawn(move || charges::<6>(seat));
        let answers = [charges::<6>(seat), other.join().expect("no panic")];
        assert_eq!((answers[0] ^ answers[1], page.used()), (true, 6));
        let slot = &page.slots[usize::from(slot)];
        assert_eq!(slot.held.load(), 6, "nothing is in flight");
    });
}
