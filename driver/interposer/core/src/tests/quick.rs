//! Launches that go at once: which do, what they are charged, and what has them go the long way.

use super::pace::{Gpu, US, launch, share};
use super::world::{Pages, Process, World, device};
use crate::Work;
use divvy_pages::{Compute, Flags};
use std::sync::atomic::Ordering::SeqCst;

/// The kernel of function 1 that [`launch`] launches.
const KERNEL: Work = Work { function: 1, blocks: 1000 };

/// Of so many launches that come one after the other, how many go at once.
fn go(process: &Process, gpu: &Gpu<'_>, work: Work, launches: u64) -> u64 {
    let go = |_: &u64| {
        let goes = process.goes(work);
        if !goes {
            launch(device(process), gpu, 0, work.function, 20 * US, true);
        }
        goes
    };
    (0..launches).filter(go).count() as u64
}

/// In a process with these shares of one device, which has launched the kernel for a while.
fn check(world: &World, test: impl FnOnce(&Process, &Gpu<'_>)) {
    let process = world.process(1);
    let gpu = Gpu::new(process.system());
    go(&process, &gpu, KERNEL, 2000);
    test(&process, &gpu);
}

#[test]
fn most_launches_of_a_known_kernel_go_at_once() {
    check(&share(50), |process, gpu| {
        let went = go(process, gpu, KERNEL, 10_000);
        assert!(went > 7_000, "{went}");
    });
}

#[test]
fn what_has_to_be_looked_at_does_not_go_at_once() {
    let changed = |name: &str, change: fn(&World, &Process)| {
        let world = share(50);
        check(&world, |process, gpu| {
            assert!(go(process, gpu, KERNEL, 100) > 0, "{name}: they went before");
            change(&world, process);
            assert!((0..100).all(|_| !process.goes(KERNEL)), "{name}");
        });
    };
    changed("the gate is closed", |world, _| world.pages().0.gate().store(1, SeqCst));
    changed("the node calls", |world, _| world.pages().0.ask(true, 5));
    changed("another policy", |world, _| world.relimit(0, 1 << 20));
    changed("a child of fork", |_, process| process.system().fork(2));
}

#[test]
fn after_the_look_they_go_at_once_again() {
    let world = share(50);
    check(&world, |process, gpu| {
        world.pages().0.ask(true, 5);
        world.relimit(0, 1 << 20);
        let went = go(process, gpu, KERNEL, 10_000);
        assert!(went > 7_000, "{went}");
    });
}

#[test]
fn a_kernel_or_a_grid_that_is_not_known_is_measured_first() {
    check(&share(50), |process, _| {
        for unknown in [Work { function: 2, ..KERNEL }, Work { blocks: 1, ..KERNEL }] {
            assert!((0..100).all(|_| !process.goes(unknown)), "{unknown:?}");
        }
    });
}

#[test]
fn without_credit_none_goes_at_once() {
    check(&share(1), |process, _| {
        let went = (0..100_000).filter(|_| process.goes(KERNEL)).count();
        assert!(went < 1_000, "{went} went for nothing");
    });
}

#[test]
fn of_several_shares_and_without_a_limit_none_goes_at_once() {
    let compute = Compute { cores: 20, ..Compute::default() };
    let one = Pages::Compute { compute, flags: Flags::default() };
    for world in [World::new(&[one, one]), share(0)] {
        check(&world, |process, gpu| assert_eq!(go(process, gpu, KERNEL, 1_000), 0));
    }
}
