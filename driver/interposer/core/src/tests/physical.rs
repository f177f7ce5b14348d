//! Physical memory by handle: charged while a reference or a mapping lives, whoever comes between.

use super::MIB;
use super::events::check;
use super::world::{Pages, Process, World, device};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

pub(super) fn create(process: &Process, handle: u64) {
    device(process).reserve(MIB).expect("it fits").keep_handle(handle).expect("it is kept");
}

fn release(process: &Process, handle: u64) {
    process.release(handle).expect("it is in the table").released();
}

fn map(process: &Process, address: u64, handle: u64) {
    process.hold(handle).expect("it is in the table").mapped(address, MIB);
}

fn retain(process: &Process, handle: u64, address: u64) {
    process.hold_at(address).expect("it is mapped").retained(handle);
}

#[test]
fn physical_memory_is_charged_while_a_handle_or_a_mapping_lives() {
    check(&[
        ("a handle", &|p| create(p, 70), MIB),
        ("its mapping", &|p| map(p, 0x10_0000, 70), MIB),
        ("a second mapping", &|p| map(p, 0x40_0000, 70), MIB),
        ("a release that the driver refused", &|p| assert!(p.release(70).is_some()), MIB),
        ("the release", &|p| release(p, 70), MIB),
        ("a release of what is not ours", &|p| assert!(p.release(70).is_none()), MIB),
        ("the same number for other memory", &|p| create(p, 70), 2 * MIB),
        ("one unmap", &|p| p.unmapped(0x10_0000, MIB), 2 * MIB),
        ("the last unmap", &|p| p.unmapped(0x40_0000, MIB), MIB),
        ("the release of the other", &|p| release(p, 70), 0),
    ]);
}

#[test]
fn a_handle_that_is_retained_by_an_address_keeps_its_memory() {
    check(&[
        ("a handle", &|p| create(p, 70), MIB),
        ("its mapping", &|p| map(p, 0x10_0000, 70), MIB),
        ("a retain", &|p| retain(p, 70, 0x10_0000), MIB),
        ("the release", &|p| release(p, 70), MIB),
        ("the release of the retained", &|p| release(p, 70), MIB),
        ("a retain of what only its mapping keeps", &|p| retain(p, 71, 0x10_0400), MIB),
        ("the unmap", &|p| p.unmapped(0x10_0000, MIB), MIB),
        ("the release", &|p| release(p, 71), 0),
    ]);
}

#[test]
fn one_unmap_ends_all_mappings_in_its_range() {
    check(&[
        ("a handle", &|p| create(p, 70), MIB),
        ("another", &|p| create(p, 71), 2 * MIB),
        ("two mappings side by side", &|p| (0..2).for_each(|i| map(p, i * MIB, 70 + i)), 2 * MIB),
        ("one behind imported memory", &|p| map(p, 4 * MIB, 71), 2 * MIB),
        ("the releases", &|p| [70, 71].into_iter().for_each(|handle| release(p, handle)), 2 * MIB),
        ("the unmap of both", &|p| p.unmapped(0, 2 * MIB), MIB),
        ("one that begins with what is not ours", &|p| p.unmapped(3 * MIB, 2 * MIB), 0),
    ]);
}

#[test]
fn exported_memory_is_charged_for_good() {
    check(&[
        ("a handle", &|p| create(p, 70), MIB),
        ("an export that the driver refused", &|p| p.hold(70).expect("it is in the table").refused(), MIB),
        ("the release", &|p| release(p, 70), 0),
        ("another handle", &|p| create(p, 71), MIB),
        ("its export", &|p| assert!(p.hold(71).is_some()), MIB),
        ("its import under a handle of its own", &|p| assert!(p.hold(72).is_none()), MIB),
        ("the release of the exported", &|p| release(p, 71), MIB),
        ("the release of the imported", &|p| assert!(p.release(72).is_none()), MIB),
        ("an export of what is not ours", &|p| assert!(p.hold(72).is_none()), MIB),
        ("the same number for other memory", &|p| create(p, 71), 2 * MIB),
        ("its release", &|p| release(p, 71), MIB),
    ]);
}

/// What another thread does between a call's two halves, which are before and after the driver's part of it.
#[test]
fn memory_that_is_held_while_its_handle_is_released_stays_charged() {
    check(&[
        ("a handle", &|p| create(p, 70), MIB),
        (
            "an export that is refused after the release",
            &|p| {
                let export = p.hold(70).expect("it is in the table");
                release(p, 70);
                export.refused();
            },
            0,
        ),
        ("another", &|p| create(p, 70), MIB),
        (
            "a mapping in the middle of its release",
            &|p| {
                let released = p.release(70).expect("it is in the table");
                map(p, 0x10_0000, 70);
                released.released();
            },
            MIB,
        ),
        ("its unmap", &|p| p.unmapped(0x10_0000, MIB), 0),
        ("another", &|p| create(p, 70), MIB),
        (
            "a release in the middle of its mapping",
            &|p| {
                let held = p.hold(70).expect("it is in the table");
                release(p, 70);
                held.mapped(0x10_0000, MIB);
            },
            MIB,
        ),
        (
            "an unmap in the middle of a retain",
            &|p| {
                let held = p.hold_at(0x10_0000).expect("it is mapped");
                p.unmapped(0x10_0000, MIB);
                held.retained(70);
            },
            MIB,
        ),
        (
            "its release, in the middle of which other memory has its handle",
            &|p| {
                let released = p.release(70).expect("it is in the table");
                create(p, 70);
                released.released();
            },
            MIB,
        ),
        (
            "that one's, in the middle of which it is exported",
            &|p| {
                let released = p.release(70).expect("it is in the table");
                assert!(p.hold(70).is_some());
                released.released();
            },
            MIB,
        ),
        ("a release once more", &|p| assert!(p.release(70).is_none()), MIB),
    ]);
}

/// The driver gives the same handle to all who retain the same memory.
#[test]
fn threads_that_retain_and_release_the_same_memory_leave_it_to_its_mapping() {
    let world = World::new(&[Pages::share(10 * MIB)]);
    let process = world.process(1);
    create(&process, 70);
    map(&process, 0x10_0000, 70);
    release(&process, 70);
    // Waits that do not sleep, so that both go on at the same moment.
    let (steps, lost) = (AtomicU64::new(0), AtomicU64::new(0));
    let together = |step: u64| {
        steps.fetch_add(1, SeqCst);
        while steps.load(SeqCst) < 2 * step {
            std::thread::yield_now();
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for round in 0..50_000 {
                    // A thread that stops would leave the other waiting.
                    together(2 * round + 1);
                    process.hold_at(0x10_0000).into_iter().for_each(|held| held.retained(70));
                    together(2 * round + 2);
                    match process.release(70) {
                        Some(release) => release.released(),
                        None => drop(lost.fetch_add(1, SeqCst)),
                    }
                }
            });
        }
    });
    assert_eq!((lost.into_inner(), world.used()), (0, vec![MIB]));
    process.unmapped(0x10_0000, MIB);
    assert_eq!(world.used(), [0]);
}

#[test]
fn imported_memory_is_its_owners() {
    check(&[
        ("a mapping of an imported handle", &|p| assert!(p.hold(99).is_none()), 0),
        ("a retain of it", &|p| assert!(p.hold_at(0x10_0000).is_none()), 0),
        ("its unmap", &|p| p.unmapped(0x10_0000, MIB), 0),
        ("its release", &|p| assert!(p.release(99).is_none()), 0),
    ]);
}
