//! The time of processes that die young: their share is charged what they had, whether or not they waited for their kernels.

use super::pace::{Gpu, MS, On, SECOND, US, launch, share};
use super::world::device;
use crate::System;

/// Per cent of a device that a share of 30 has, whose processes come one after the other: each takes so long to begin, and
/// launches so many kernels of that length; when these have ended it dies, with or
/// without a wait that the library sees.
fn got(begins: u64, kernels: u64, length: u64, waits: bool) -> f64 {
    let world = share(30);
    let watcher = world.process(9_999_999);
    let system = watcher.system();
    let gpu = Gpu::new(system);
    let mut pid = 0;
    while system.now() < 12 * SECOND {
        pid += 1;
        gpu.context.set(100 + u64::from(pid));
        let process = world.process(pid);
        let device = device(&process);
        device.reserve_context().expect("it fits").keep_context(1).expect("it is kept");
        system.pass(begins);
        (0..kernels).for_each(|_| launch(device, &gpu, 0, 1, length, true));
        gpu.done();
        if waits {
            device.has_waited(&On(&gpu, 0));
        }
        world.kill(pid);
    }
    gpu.worked(2 * SECOND, 12 * SECOND) as f64 / (10 * SECOND) as f64 * 100.0
}

#[test]
fn a_process_for_a_few_kernels_and_then_another_have_together_what_the_share_has() {
    let check = |begins: u64, kernels: u64, length: u64| {
        let had = got(begins, kernels, length, true);
        assert!((28.0..32.0).contains(&had), "{kernels} of {} us: {had}", length / US);
    };
    check(MS, 1, 50 * MS);
    check(MS, 1, MS);
    check(MS, 3, 10 * MS);
    check(5 * MS, 20, MS);
    check(5 * MS, 1, SECOND);
}

#[test]
fn who_does_not_wait_for_its_kernels_is_charged_until_it_dies_and_has_no_more() {
    for (kernels, length) in [(1, 50 * MS), (1, 500 * MS), (3, 10 * MS)] {
        let had = got(MS, kernels, length, false);
        assert!((25.0..32.0).contains(&had), "{kernels} of {} us: {had}", length / US);
    }
}

#[test]
fn who_has_waited_may_live_on_and_die_at_no_cost() {
    let world = share(30);
    let process = world.process(1);
    let gpu = Gpu::new(process.system());
    let first = device(&process);
    first.reserve_context().expect("it fits").keep_context(1).expect("it is kept");
    launch(first, &gpu, 0, 1, 100 * US, true);
    gpu.done();
    first.has_waited(&On(&gpu, 0));
    process.system().pass(100 * SECOND);
    world.kill(1);
    let next = world.process(2);
    let begun = next.system().now();
    launch(device(&next), &gpu, 0, 1, 100 * US, true);
    assert!(next.system().now() - begun < MS);
}
