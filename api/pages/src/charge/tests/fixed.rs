//! Charges of device memory beside managed memory, in every interleaving and with kills.

use super::super::*;
use crate::explore::{Act, End, ExploredPeers, answers, explore, identity, page};
use crate::word::Word;

const SOFT: u64 = 3;
const LIMIT: u64 = 6;

/// An allocation, kept or freed at once.
#[derive(Clone, Copy)]
enum Op {
    Fixed(u64),
    FixedAwhile(u64),
    Managed(u64),
    ManagedAwhile(u64),
}
use Op::*;

/// Checks for all interleavings and kills that living processes never ask the driver for more
/// than `SOFT` bytes of device memory, and never charge more than `LIMIT`.
fn check(kills: u32, plans: &[&[Op]]) {
    let page = page();
    // The bytes that the driver has allocated: changed after the charge, and before the
    // release.
    let made: &Word = Box::leak(Box::default());
    let acts: Vec<Act<'_>> = plans
        .iter()
        .zip(1..)
        .map(|(plan, pid)| -> Act<'_> {
            let slot = page.register(&identity(pid), &ExploredPeers).expect("there are slots");
            let slot_ref = SlotRef { page, slot, limit: LIMIT };
            let note = move |by| page.slots[usize::from(slot)].add_memory_use(0, by);
            let fixed = move |amount: u64, awhile: bool| {
                if charge_fixed(&slot_ref, SOFT, amount, &ExploredPeers).is_err() {
                    return false;
                }
                made.update(|made| made + amount);
                if awhile {
                    made.update(|made| made - amount);
                    uncharge(&[slot_ref], amount);
                }
                true
            };
            let managed = move |amount: u64, awhile: bool| {
                if charge(&[slot_ref], amount, &ExploredPeers).is_err() {
                    return false;
                }
                note(amount as i64);
                if awhile {
                    note(-(amount as i64));
                    uncharge(&[slot_ref], amount);
                }
                true
            };
            Box::new(move || {
                let did = |act: &Op| match *act {
                    Fixed(amount) => fixed(amount, false),
                    FixedAwhile(amount) => fixed(amount, true),
                    Managed(amount) => managed(amount, false),
                    ManagedAwhile(amount) => managed(amount, true),
                };
                answers(plan.iter().map(did))
            })
        })
        .collect();
    explore(
        &acts,
        kills,
        &|read| {
            assert!(bytes(page.total.word.peek(read)) <= LIMIT, "beyond the limit");
            assert!(kills > 0 || made.peek(read) <= SOFT, "more than the device has for it");
        },
        &|last| {
            let held = |(plan, end): (&&[Op], &End)| match end {
                End::Killed => 0,
                End::Result(answers) => plan.iter().zip(0..).fold(0, |sum, (act, at)| match *act {
                    Fixed(amount) if answers >> at & 1 == 1 => sum + amount,
                    _ => sum,
                }),
            };
            assert!(plans.iter().zip(&last.ends).map(held).sum::<u64>() <= SOFT, "{:?}", last.ends);
        },
    );
}

#[test]
fn device_memory_limit_holds_beside_managed_memory() {
    check(0, &[&[ManagedAwhile(3), Fixed(1)], &[Fixed(2), Fixed(2)]]);
    check(0, &[&[Managed(2), ManagedAwhile(1)], &[Fixed(3), FixedAwhile(1)]]);
    check(0, &[&[Fixed(2), Managed(3)], &[ManagedAwhile(2), Fixed(2)]]);
    check(1, &[&[ManagedAwhile(3), Fixed(2)], &[Fixed(2), Fixed(1)]]);
    check(1, &[&[Managed(3)], &[Fixed(3), FixedAwhile(1)]]);
}

#[test]
fn managed_memory_does_not_count_as_device_memory() {
    let page = page();
    let slot = page.register(&identity(1), &ExploredPeers).expect("there are slots");
    let slot_ref = SlotRef { page, slot, limit: LIMIT };
    charge(&[slot_ref], 3, &ExploredPeers).expect("it fits");
    page.slots[0].add_memory_use(0, 3);
    assert_eq!(charge_fixed(&slot_ref, SOFT, 4, &ExploredPeers), Err(Refused));
    assert_eq!(charge_fixed(&slot_ref, SOFT, 3, &ExploredPeers), Ok(()));
    assert_eq!((page.used(), charge_fixed(&slot_ref, SOFT, 1, &ExploredPeers)), (6, Err(Refused)));
    assert_eq!(page.fault_count(Fault::Refused), 2);
}
