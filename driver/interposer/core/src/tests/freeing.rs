//! Frees, and who comes between.

use super::MIB;
use super::world::{Pages, Process, World, device, kept};
use crate::table::Class;
use std::sync::Mutex;

const KEY: u64 = 0x7f00_0000_0000;

fn freeing(process: &Process, key: u64) -> crate::Freeing<'_, super::world::Fake> {
    process.freeing(Class::Pointer, key).expect("nobody else frees it")
}

#[test]
fn what_the_driver_does_not_free_stays_charged_and_can_be_freed_later() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    kept(device(&process), MIB, KEY);
    drop(freeing(&process, KEY));
    assert_eq!(world.used(), [MIB]);
    freeing(&process, KEY).freed();
    assert_eq!(world.used(), [0]);
}

#[test]
fn an_address_that_comes_back_before_its_free_has_returned_is_charged_once_and_freed_once() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    kept(device(&process), MIB, KEY);
    let first = freeing(&process, KEY);
    // The driver has freed it and given the address to another thread.
    kept(device(&process), 3 * MIB, KEY);
    assert_eq!(world.used(), [3 * MIB]);
    // Which frees it as well, and gets it once more.
    let second = freeing(&process, KEY);
    kept(device(&process), 5 * MIB, KEY);
    second.freed();
    first.freed();
    assert_eq!(world.used(), [5 * MIB]);
    freeing(&process, KEY).freed();
    assert_eq!(world.used(), [0]);
}

#[test]
fn of_two_frees_of_the_same_at_once_one_counts() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    kept(device(&process), MIB, KEY);
    let first = freeing(&process, KEY);
    assert!(process.freeing(Class::Pointer, KEY).is_none());
    first.freed();
    assert_eq!(world.used(), [0]);
}

#[test]
fn any_number_of_frees_may_be_under_way() {
    let world = World::new(&[Pages::share(1000 * MIB)]);
    let process = world.process(1);
    let keys = || (0..500).map(|number| KEY + number * 2 * MIB);
    keys().for_each(|key| kept(device(&process), MIB, key));
    drop(keys().map(|key| freeing(&process, key)).collect::<Vec<_>>());
    assert_eq!(world.used(), [500 * MIB]);
    let all: Vec<_> = keys().map(|key| freeing(&process, key)).collect();
    all.into_iter().for_each(crate::Freeing::freed);
    assert_eq!(world.used(), [0]);
}

#[test]
fn a_key_that_is_no_address_is_freed_too() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    kept(device(&process), MIB, u64::MAX);
    freeing(&process, u64::MAX).freed();
    assert_eq!(world.used(), [0]);
}

#[test]
fn a_context_that_ends_meanwhile_takes_its_memory_with_it() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    kept(device(&process), MIB, KEY);
    let free = freeing(&process, KEY);
    process.context_leaves(1).expect("it is known").gone();
    assert_eq!(world.used(), [0]);
    free.freed();
    assert_eq!(world.used(), [0]);
}

#[test]
fn threads_to_which_the_driver_gives_each_others_addresses_are_charged_what_they_hold() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    // What the driver has free, the last freed first.
    let free = Mutex::new((0..6).map(|number| KEY + number * 2 * MIB).collect::<Vec<u64>>());
    std::thread::scope(|scope| {
        for thread in 1..=4 {
            let (process, free) = (&process, &free);
            scope.spawn(move || {
                for round in 0..3000 {
                    let Some(key) = free.lock().expect("no panic").pop() else { continue };
                    kept(device(process), thread + round % 7, key);
                    let freeing = process.freeing(Class::Pointer, key).expect("nobody else frees it");
                    free.lock().expect("no panic").push(key);
                    freeing.freed();
                }
            });
        }
    });
    assert_eq!(world.used(), [0]);
    assert_eq!(free.lock().expect("no panic").len(), 6);
}
