//! Shares that may hold more than they have of the device.

use super::world::{Fake, Pages, World, device, kept};
use crate::table::Class;
use crate::{Device, Grown, Kind};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const MIB: u64 = 1 << 20;
const OVER: Pages = Pages::Over { soft: 10 * MIB, limit: 30 * MIB };

fn managed(device: Device<'_, Fake>, bytes: u64, pointer: u64) {
    let reserved = device.reserve_managed(bytes).expect("it fits");
    reserved.keep_all(Kind::StandIn { pointer, context: 1 }).expect("it is kept");
}

#[test]
fn what_cannot_move_has_a_limit_of_its_own_within_that_of_all() {
    let world = World::new(&[OVER]);
    let process = world.process(1);
    let device = device(&process);
    assert!(device.over_commits());
    assert!(device.reserve(10 * MIB + 1).is_err());
    assert_eq!(device.mem_info(8 * MIB, 20 * MIB), (30 * MIB, 30 * MIB));
    managed(device, 20 * MIB, 0x1000);
    assert_eq!(world.told(), (0, 20 * MIB));
    assert!(device.reserve_managed(10 * MIB + 1).is_err());
    kept(device, 10 * MIB, 0x2000);
    assert!(device.reserve(1).is_err());
    assert_eq!(device.mem_info(8 * MIB, 20 * MIB), (0, 30 * MIB));
    assert!(process.stands_in(0x1000) && !process.stands_in(0x2000));
    process.take(Class::Pointer, 0x1000).expect("it is there").freed();
    process.take(Class::StandIn, 0x1000).expect("it is there").freed();
    assert_eq!((world.used(), world.told()), (vec![10 * MIB], (0, 0)));
    assert!(!process.stands_in(0x1000));
    assert!(device.reserve(1).is_err(), "what was managed left no room for it");
    // A pool that would grow beyond the claim does not.
    assert!(device.grow(Grown::Pool(0x5000)).ask(MIB, 0, 0).is_err());
    process.take(Class::Pointer, 0x2000).expect("it is there").freed();
    assert!(device.grow(Grown::Pool(0x5000)).ask(10 * MIB, 0, 0).is_ok());
}

#[test]
fn an_allocation_that_was_granted_more_than_asked_is_charged_as_what_it_is() {
    let world = World::new(&[OVER]);
    let process = world.process(1);
    let device = device(&process);
    let fixed = device.reserve(9 * MIB).expect("it fits");
    assert!(fixed.keep(Kind::Linear { pointer: 0x1000, context: 1 }, 11 * MIB).is_err());
    let moves = device.reserve_managed(9 * MIB).expect("it fits");
    assert!(moves.keep(Kind::StandIn { pointer: 0x1000, context: 1 }, 11 * MIB).is_ok());
    assert_eq!(world.used(), [11 * MIB]);
}

#[test]
fn managed_memory_of_the_dead_leaves_no_room_for_what_cannot_move() {
    let world = World::new(&[OVER]);
    let (one, other) = (world.process(1), world.process(2));
    managed(device(&one), 20 * MIB, 0x1000);
    kept(device(&other), 10 * MIB, 0x1000);
    world.kill(1);
    assert!(device(&other).reserve(MIB).is_err());
    assert_eq!(world.used(), [10 * MIB]);
}

#[test]
fn a_context_that_ends_takes_along_what_stood_in() {
    let world = World::new(&[OVER]);
    let process = world.process(1);
    managed(device(&process), 20 * MIB, 0x1000);
    process.context_leaves(1).expect("it is looked at").gone();
    assert_eq!((world.used(), process.stands_in(0x1000)), (vec![0], false));
}

/// Threads of several processes, each of which holds some of both sorts for a moment: what the driver was asked for
/// never exceeds what the device has for the share, nor all of it the limit.
#[test]
fn no_order_of_charges_exceeds_either_limit() {
    let world = World::new(&[OVER]);
    let processes = [1, 2, 3].map(|pid| world.process(pid));
    let (fixed, all) = (AtomicU64::new(0), AtomicU64::new(0));
    let holds = |sum: &AtomicU64, bytes: u64, most: u64| {
        assert!(sum.fetch_add(bytes, SeqCst) + bytes <= most);
    };
    std::thread::scope(|scope| {
        for (process, seed) in processes.iter().zip(1_u64..).flat_map(|one| [one, (one.0, one.1 + 7)]) {
            let (fixed, all) = (&fixed, &all);
            scope.spawn(move || {
                let device = device(process);
                for turn in 0..2_000_u64 {
                    let number = (turn * 31 + seed * 17) % 23;
                    let (bytes, pointer) = ((1 + number % 12) * MIB, (seed << 40) + (turn << 12));
                    let is_managed = number % 2 == 0;
                    let reserved =
                        if is_managed { device.reserve_managed(bytes) } else { device.reserve(bytes) };
                    let Ok(reserved) = reserved else { continue };
                    holds(all, bytes, 30 * MIB);
                    let kind = if is_managed {
                        Kind::StandIn { pointer, context: 1 }
                    } else {
                        holds(fixed, bytes, 10 * MIB);
                        Kind::Linear { pointer, context: 1 }
                    };
                    reserved.keep_all(kind).expect("it is kept");
                    if !is_managed {
                        fixed.fetch_sub(bytes, SeqCst);
                    }
                    all.fetch_sub(bytes, SeqCst);
                    process.take(Class::Pointer, pointer).expect("it is there").freed();
                }
            });
        }
    });
    assert_eq!((world.used(), world.told()), (vec![0], (0, 0)));
}
