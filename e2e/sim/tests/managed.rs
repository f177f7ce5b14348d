//! Managed memory of two processes on one GPU: who pays for which pages, and whose have to make room.

mod common;

use common::Node;
use divvy_sim::Guest;
use divvy_sim::ledger::{Kernel, PAGE, Place};
use proptest::prelude::*;

/// Pages that an L4 can hold.
const ALL: u64 = (23034 - 472) / 2;
/// A kernel's own time, and what a miss adds: a fault, and a page's way over a bus of 12 GB/s.
const TIME: u64 = 1000;
const MISS: f64 = 20_000.0 + (2 << 20) as f64 / 12.0;

fn guest(node: &Node) -> Guest {
    let ledger = node.sim.ledger().expect("a ledger");
    Guest::enter(ledger, Place { slot: 0, instance: None }).expect("a GPU")
}

fn run(guest: &Guest, touches: bool) -> u64 {
    let (begin, end) = guest.submit(Kernel { after: 0, length: TIME, touches });
    end - begin
}

/// Pages that a kernel has to wait for.
fn misses(guest: &Guest) -> u64 {
    ((run(guest, true) - TIME) as f64 / MISS).round() as u64
}

/// Pages that are free.
fn free(guest: &Guest) -> u64 {
    guest.memory().0 / PAGE
}

#[test]
fn a_kernel_pays_for_what_is_not_there() {
    let node = Node::up("L4");
    let one = guest(&node);
    assert_eq!((free(&one), run(&one, true)), (ALL, TIME));
    one.manage(10 * PAGE - 1);
    assert_eq!((free(&one), run(&one, false)), (ALL, TIME), "a copy touches nothing");
    assert_eq!(run(&one, true), TIME + (10.0 * MISS) as u64);
    assert_eq!((free(&one), run(&one, true)), (ALL - 10, TIME));
    one.unmanage(10 * PAGE - 1);
    assert_eq!((free(&one), run(&one, true)), (ALL, TIME));
}

#[test]
fn two_sets_that_do_not_fit_push_each_other_out() {
    let node = Node::up("L4");
    let both = [guest(&node), guest(&node)];
    let set = ALL * 6 / 10;
    both.iter().for_each(|guest| guest.manage(set * PAGE));
    assert_eq!(both.each_ref().map(misses), [set; 2]);
    for guest in both.iter().cycle().take(6) {
        assert_eq!(misses(guest), 2 * set - ALL, "what the other has pushed out");
        assert_eq!(misses(guest), 0);
    }
}

#[test]
fn allocated_memory_comes_first() {
    let node = Node::up("L4");
    let (one, other) = (guest(&node), guest(&node));
    one.manage(ALL * PAGE);
    assert_eq!((misses(&one), free(&one)), (ALL, 0));
    assert!(other.charge(100 * PAGE));
    assert_eq!((free(&one), misses(&one), misses(&one)), (0, 100, 100), "it has no room for all");
    assert!(!other.charge(ALL * PAGE));
    other.refund(100 * PAGE);
    assert_eq!([misses(&one), misses(&one)], [100, 0]);
}

#[test]
fn what_a_process_had_is_free_after_it() {
    let node = Node::up("L4");
    let one = guest(&node);
    let other = guest(&node);
    other.manage(50 * PAGE);
    assert_eq!((misses(&other), free(&one)), (50, ALL - 50));
    drop(other);
    assert_eq!(free(&one), ALL);
}

#[derive(Clone, Copy, Debug)]
enum Act {
    Manage(u64),
    Unmanage(u64),
    Run,
    Charge(u64),
    Refund(u64),
    Bring(u64),
    PutOut(u64),
}

fn act() -> impl Strategy<Value = (usize, Act)> {
    let size = || 0..ALL * 2 / 3;
    let act = prop_oneof![
        size().prop_map(Act::Manage),
        size().prop_map(Act::Unmanage),
        Just(Act::Run),
        size().prop_map(Act::Charge),
        size().prop_map(Act::Refund),
        size().prop_map(Act::Bring),
        size().prop_map(Act::PutOut),
    ];
    (0..2_usize, act)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn no_more_is_there_than_fits_and_nobody_misses_more_than_it_has(
        acts in proptest::collection::vec(act(), 1..60),
    ) {
        let node = Node::up("L4");
        let both = [guest(&node), guest(&node)];
        let (mut manages, mut used) = ([0_u64; 2], [0_u64; 2]);
        for (who, act) in acts {
            let guest = &both[who];
            match act {
                Act::Manage(size) => {
                    guest.manage(size * PAGE);
                    manages[who] += size;
                }
                Act::Unmanage(size) => {
                    let size = size.min(manages[who]);
                    guest.unmanage(size * PAGE);
                    manages[who] -= size;
                }
                Act::Run => {
                    prop_assert!(misses(guest) <= manages[who]);
                    let room = ALL - used[0] - used[1];
                    prop_assert_eq!(misses(guest), manages[who].saturating_sub(room), "the rest is there");
                }
                Act::Charge(size) => {
                    let fits = used[0] + used[1] + size <= ALL;
                    prop_assert_eq!(guest.charge(size * PAGE), fits);
                    used[who] += if fits { size } else { 0 };
                }
                Act::Refund(size) => {
                    let size = size.min(used[who]);
                    guest.refund(size * PAGE);
                    used[who] -= size;
                }
                Act::Bring(size) => drop(guest.bring(size * PAGE)),
                Act::PutOut(size) => drop(guest.put_out(size * PAGE)),
            }
            let there = node.sim.ledger().expect("a ledger").uses().iter().map(|found| found.bytes).sum::<u64>();
            prop_assert_eq!(there / PAGE + free(guest), ALL);
            prop_assert!(there / PAGE <= ALL);
        }
    }
}
