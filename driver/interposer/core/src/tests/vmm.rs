//! Physical memory by handle: charged while a reference or a mapping exists, with other threads in
//! between.

use super::MIB;
use super::charges::check;
use super::fixture::{PagesSpec, Process, TestContainer, device};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

pub(super) fn create(process: &Process, handle: u64) {
    device(process).reserve(MIB).expect("it fits").commit_handle(handle).expect("it is recorded");
}

fn release(process: &Process, handle: u64) {
    process.begin_release(handle).expect("it is in the table").commit();
}

fn map(process: &Process, address: u64, handle: u64) {
    process.add_reference(handle).expect("it is in the table").mapped(address, MIB);
}

fn retain(process: &Process, handle: u64, address: u64) {
    process.add_reference_at(address).expect("it is mapped").retained(handle);
}

#[test]
fn physical_memory_is_charged_while_referenced() {
    check(&[
        ("a handle", &|p| create(p, 70), MIB),
        ("its mapping", &|p| map(p, 0x10_0000, 70), MIB),
        ("a second mapping", &|p| map(p, 0x40_0000, 70), MIB),
        ("a refused release", &|p| assert!(p.begin_release(70).is_some()), MIB),
        ("the release", &|p| release(p, 70), MIB),
        ("a release of an unknown handle", &|p| assert!(p.begin_release(70).is_none()), MIB),
        ("the same number for other memory", &|p| create(p, 70), 2 * MIB),
        ("one unmap", &|p| p.remove_mappings(0x10_0000, MIB), 2 * MIB),
        ("the last unmap", &|p| p.remove_mappings(0x40_0000, MIB), MIB),
        ("the release of the other", &|p| release(p, 70), 0),
    ]);
}

#[test]
fn retained_handle_keeps_its_memory() {
    check(&[
        ("a handle", &|p| create(p, 70), MIB),
        ("its mapping", &|p| map(p, 0x10_0000, 70), MIB),
        ("a retain", &|p| retain(p, 70, 0x10_0000), MIB),
        ("the release", &|p| release(p, 70), MIB),
        ("the release of the retained", &|p| release(p, 70), MIB),
        ("a retain of memory without a handle", &|p| retain(p, 71, 0x10_0400), MIB),
        ("the unmap", &|p| p.remove_mappings(0x10_0000, MIB), MIB),
        ("the release", &|p| release(p, 71), 0),
    ]);
}

#[test]
fn unmap_removes_all_mappings_in_its_range() {
    check(&[
        ("a handle", &|p| create(p, 70), MIB),
        ("another", &|p| create(p, 71), 2 * MIB),
        ("two mappings side by side", &|p| (0..2).for_each(|i| map(p, i * MIB, 70 + i)), 2 * MIB),
        ("a mapping after imported memory", &|p| map(p, 4 * MIB, 71), 2 * MIB),
        ("the releases", &|p| [70, 71].into_iter().for_each(|handle| release(p, handle)), 2 * MIB),
        ("the unmap of both", &|p| p.remove_mappings(0, 2 * MIB), MIB),
        ("an unmap that starts with an unknown mapping", &|p| p.remove_mappings(3 * MIB, 2 * MIB), 0),
    ]);
}

#[test]
fn exported_memory_stays_charged() {
    check(&[
        ("a handle", &|p| create(p, 70), MIB),
        ("a refused export", &|p| p.add_reference(70).expect("it is in the table").cancel(), MIB),
        ("the release", &|p| release(p, 70), 0),
        ("another handle", &|p| create(p, 71), MIB),
        ("its export", &|p| assert!(p.add_reference(71).is_some()), MIB),
        ("its import under a new handle", &|p| assert!(p.add_reference(72).is_none()), MIB),
        ("the release of the exported", &|p| release(p, 71), MIB),
        ("the release of the imported", &|p| assert!(p.begin_release(72).is_none()), MIB),
        ("an export of an unknown handle", &|p| assert!(p.add_reference(72).is_none()), MIB),
        ("the same number for other memory", &|p| create(p, 71), 2 * MIB),
        ("its release", &|p| release(p, 71), MIB),
    ]);
}

/// Another thread acts between the two halves of a call, before and after the driver's part.
#[test]
fn reference_added_during_release_stays_charged() {
    check(&[
        ("a handle", &|p| create(p, 70), MIB),
        (
            "an export refused after the release",
            &|p| {
                let export = p.add_reference(70).expect("it is in the table");
                release(p, 70);
                export.cancel();
            },
            0,
        ),
        ("another", &|p| create(p, 70), MIB),
        (
            "a mapping during its release",
            &|p| {
                let released = p.begin_release(70).expect("it is in the table");
                map(p, 0x10_0000, 70);
                released.commit();
            },
            MIB,
        ),
        ("its unmap", &|p| p.remove_mappings(0x10_0000, MIB), 0),
        ("another", &|p| create(p, 70), MIB),
        (
            "a release during its mapping",
            &|p| {
                let held = p.add_reference(70).expect("it is in the table");
                release(p, 70);
                held.mapped(0x10_0000, MIB);
            },
            MIB,
        ),
        (
            "an unmap during a retain",
            &|p| {
                let held = p.add_reference_at(0x10_0000).expect("it is mapped");
                p.remove_mappings(0x10_0000, MIB);
                held.retained(70);
            },
            MIB,
        ),
        (
            "its release, during which its handle is reused",
            &|p| {
                let released = p.begin_release(70).expect("it is in the table");
                create(p, 70);
                released.commit();
            },
            MIB,
        ),
        (
            "the new memory's release, during which it is exported",
            &|p| {
                let released = p.begin_release(70).expect("it is in the table");
                assert!(p.add_reference(70).is_some());
                released.commit();
            },
            MIB,
        ),
        ("another release", &|p| assert!(p.begin_release(70).is_none()), MIB),
    ]);
}

/// The driver returns the same handle to all threads that retain the same memory.
#[test]
fn concurrent_retain_and_release_keep_the_mapping() {
    let container = TestContainer::new(&[PagesSpec::share(10 * MIB)]);
    let process = container.process(1);
    create(&process, 70);
    map(&process, 0x10_0000, 70);
    release(&process, 70);
    // The threads wait without sleeping, so that both continue at the same moment.
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
                    // No assertion here: a thread that panics would leave the other waiting.
                    together(2 * round + 1);
                    process.add_reference_at(0x10_0000).into_iter().for_each(|held| held.retained(70));
                    together(2 * round + 2);
                    match process.begin_release(70) {
                        Some(release) => release.commit(),
                        None => drop(lost.fetch_add(1, SeqCst)),
                    }
                }
            });
        }
    });
    assert_eq!((lost.into_inner(), container.used()), (0, vec![MIB]));
    process.remove_mappings(0x10_0000, MIB);
    assert_eq!(container.used(), [0]);
}

#[test]
fn imported_memory_is_not_charged() {
    check(&[
        ("a mapping of an imported handle", &|p| assert!(p.add_reference(99).is_none()), 0),
        ("a retain of it", &|p| assert!(p.add_reference_at(0x10_0000).is_none()), 0),
        ("its unmap", &|p| p.remove_mappings(0x10_0000, MIB), 0),
        ("its release", &|p| assert!(p.begin_release(99).is_none()), 0),
    ]);
}
