//! Frees, and calls of other threads during them.

use super::MIB;
use super::fixture::{PagesSpec, Process, TestContainer, allocate, device};
use crate::table::Class;
use std::sync::Mutex;

const KEY: u64 = 0x7f00_0000_0000;

fn freeing(process: &Process, key: u64) -> crate::PendingFree<'_, super::fixture::FakeSystem> {
    process.begin_free(Class::Pointer, key).expect("no other free is pending")
}

#[test]
fn failed_free_keeps_the_charge() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    allocate(device(&process), MIB, KEY);
    drop(freeing(&process, KEY));
    assert_eq!(container.used(), [MIB]);
    freeing(&process, KEY).commit();
    assert_eq!(container.used(), [0]);
}

#[test]
fn address_reused_during_its_free_is_charged_once() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    allocate(device(&process), MIB, KEY);
    let first = freeing(&process, KEY);
    // The driver has freed it and given the address to another thread.
    allocate(device(&process), 3 * MIB, KEY);
    assert_eq!(container.used(), [3 * MIB]);
    // That thread frees it too, and gets the address once more.
    let second = freeing(&process, KEY);
    allocate(device(&process), 5 * MIB, KEY);
    second.commit();
    first.commit();
    assert_eq!(container.used(), [5 * MIB]);
    freeing(&process, KEY).commit();
    assert_eq!(container.used(), [0]);
}

#[test]
fn concurrent_double_free_counts_once() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    allocate(device(&process), MIB, KEY);
    let first = freeing(&process, KEY);
    assert!(process.begin_free(Class::Pointer, KEY).is_none());
    first.commit();
    assert_eq!(container.used(), [0]);
}

#[test]
fn many_frees_can_be_pending() {
    let container = TestContainer::new(&[PagesSpec::share(1000 * MIB)]);
    let process = container.process(1);
    let keys = || (0..500).map(|number| KEY + number * 2 * MIB);
    keys().for_each(|key| allocate(device(&process), MIB, key));
    drop(keys().map(|key| freeing(&process, key)).collect::<Vec<_>>());
    assert_eq!(container.used(), [500 * MIB]);
    let all: Vec<_> = keys().map(|key| freeing(&process, key)).collect();
    all.into_iter().for_each(crate::PendingFree::commit);
    assert_eq!(container.used(), [0]);
}

#[test]
fn key_that_is_not_an_address_is_freed() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    allocate(device(&process), MIB, u64::MAX);
    freeing(&process, u64::MAX).commit();
    assert_eq!(container.used(), [0]);
}

#[test]
fn context_destroyed_during_a_free_refunds_once() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    allocate(device(&process), MIB, KEY);
    let free = freeing(&process, KEY);
    process.begin_teardown(1).expect("it is known").commit();
    assert_eq!(container.used(), [0]);
    free.commit();
    assert_eq!(container.used(), [0]);
}

#[test]
fn addresses_passed_between_threads_are_charged_right() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    // The driver's free addresses; the last freed is reused first.
    let free = Mutex::new((0..6).map(|number| KEY + number * 2 * MIB).collect::<Vec<u64>>());
    std::thread::scope(|scope| {
        for thread in 1..=4 {
            let (process, free) = (&process, &free);
            scope.spawn(move || {
                for round in 0..3000 {
                    let Some(key) = free.lock().expect("no panic").pop() else { continue };
                    allocate(device(process), thread + round % 7, key);
                    let freeing = process.begin_free(Class::Pointer, key).expect("no other free is pending");
                    free.lock().expect("no panic").push(key);
                    freeing.commit();
                }
            });
        }
    });
    assert_eq!(container.used(), [0]);
    assert_eq!(free.lock().expect("no panic").len(), 6);
}
