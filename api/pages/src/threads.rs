//! Loom models: two threads on the words of one page, in every order and with weak memory
//! ([`crate::sync`]).
//!
//! `explore` treats a change of a word as one step. Here it runs as shipped: a load, then exchanges
//! until one succeeds. The balance of compute time is modelled in the library.

use crate::account::{Identity, SlotState, bytes};
use crate::charge::{Peers, Refused, SlotRef, charge, uncharge};
use crate::explore::{identity, page};
use crate::sync::{Model, spin_loop};

const LIMIT: u64 = 10;

/// Peers that never die; waiting lets the other thread run.
struct YieldingPeers;

impl Peers for YieldingPeers {
    fn is_dead(&self, _identity: &Identity) -> bool {
        false
    }

    fn back_off(&self, _round: u32) -> bool {
        spin_loop();
        true
    }

    fn now_ns(&self) -> u64 {
        0
    }
}

/// An action of one thread on its slot; true if it succeeded.
type Act = fn(SlotRef<'static>) -> bool;

fn charges<const BYTES: u64>(slot_ref: SlotRef<'static>) -> bool {
    let charged = charge(&[slot_ref], BYTES, &YieldingPeers);
    assert!(slot_ref.page.used() <= LIMIT, "beyond the limit");
    charged != Err(Refused)
}

fn frees<const BYTES: u64>(slot_ref: SlotRef<'static>) -> bool {
    uncharge(&[slot_ref], BYTES);
    true
}

/// Two processes that hold `holds` bytes do one action each; `end` checks the results and the bytes
/// held then. Afterwards exactly the rest of the limit can be charged.
fn check(holds: [u64; 2], acts: [Act; 2], end: fn([bool; 2], [u64; 2])) {
    let page = page();
    let slots = [1, 2].map(|pid| {
        let slot = page.register(&identity(pid), &YieldingPeers).expect("there are slots");
        SlotRef { page, slot, limit: LIMIT }
    });
    for (slot_ref, bytes) in slots.iter().zip(holds) {
        charge(&[*slot_ref], bytes, &YieldingPeers).expect("it fits");
    }
    Model::default().check(move || {
        let [one, two] = slots;
        let other = loom::thread::spawn(move || acts[1](two));
        let answers = [acts[0](one), other.join().expect("no panic")];
        let held = slots.map(|slot_ref| bytes(page.slots[usize::from(slot_ref.slot)].held.load()));
        assert_eq!(page.used(), held[0] + held[1], "the total is what the slots hold");
        end(answers, held);
        let left = LIMIT - page.used();
        assert_eq!(charge(&[one], left, &YieldingPeers), Ok(()));
        assert_eq!(charge(&[one], 1, &YieldingPeers), Err(Refused));
    });
}

#[test]
fn one_of_two_racers_gets_the_last_byte() {
    check([0, 0], [charges::<6>, charges::<6>], |answers, held| {
        assert_eq!((answers[0] ^ answers[1], held[0] + held[1]), (true, 6));
    });
}

#[test]
fn fitting_request_is_not_refused_for_another() {
    check([0, 4], [charges::<6>, charges::<7>], |answers, held| {
        assert_eq!((answers, held), ([true, false], [6, 4]));
    });
}

#[test]
fn concurrent_free_is_seen_or_not_yet() {
    check([10, 0], [frees::<6>, charges::<6>], |answers, held| {
        assert_eq!(held, [4, if answers[1] { 6 } else { 0 }]);
    });
}

#[test]
fn concurrent_registrations_get_separate_slots() {
    let page = page();
    Model::default().check(move || {
        let comes = move |pid| {
            let slot = page.register(&identity(pid), &YieldingPeers).expect("there are slots");
            (slot, charges::<6>(SlotRef { page, slot, limit: LIMIT }))
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
fn threads_of_a_process_charge_one_slot() {
    let page = page();
    let slot = page.register(&identity(1), &YieldingPeers).expect("there are slots");
    let slot_ref = SlotRef { page, slot, limit: LIMIT };
    Model::default().check(move || {
        let other = loom::thread::spawn(move || charges::<6>(slot_ref));
        let answers = [charges::<6>(slot_ref), other.join().expect("no panic")];
        assert_eq!((answers[0] ^ answers[1], page.used()), (true, 6));
        let slot = &page.slots[usize::from(slot)];
        assert_eq!(slot.held.load(), 6, "nothing is in flight");
    });
}
