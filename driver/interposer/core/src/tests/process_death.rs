//! Compute time of short-lived processes: the share is charged for their kernels, whether or not
//! they waited for them.

use super::fixture::device;
use super::throttle::{Gpu, MS, On, SECOND, US, compute_share, launch};
use crate::System;

/// Percent of the device that a 30 % share gets from a sequence of processes. Each process takes
/// `begins` nanoseconds to start and launches `kernels` kernels of `length` nanoseconds. It is
/// killed when these have completed, with or without a wait that the library sees.
fn got(begins: u64, kernels: u64, length: u64, waits: bool) -> f64 {
    let container = compute_share(30);
    let watcher = container.process(9_999_999);
    let system = watcher.system();
    let gpu = Gpu::new(system);
    let mut pid = 0;
    while system.now() < 12 * SECOND {
        pid += 1;
        gpu.context.set(100 + u64::from(pid));
        let process = container.process(pid);
        let device = device(&process);
        device.reserve_context().expect("it fits").commit_context(1).expect("it is recorded");
        system.advance(begins);
        (0..kernels).for_each(|_| launch(device, &gpu, 0, 1, length, true));
        gpu.wait_idle();
        if waits {
            device.collect_measurements(&On(&gpu, 0));
        }
        container.kill(pid);
    }
    gpu.busy_ns(2 * SECOND, 12 * SECOND) as f64 / (10 * SECOND) as f64 * 100.0
}

#[test]
fn short_processes_together_get_the_share() {
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
fn process_that_never_waits_gets_no_extra_time() {
    for (kernels, length) in [(1, 50 * MS), (1, 500 * MS), (3, 10 * MS)] {
        let had = got(MS, kernels, length, false);
        assert!((25.0..32.0).contains(&had), "{kernels} of {} us: {had}", length / US);
    }
}

#[test]
fn settled_process_dies_without_charge() {
    let container = compute_share(30);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    let first = device(&process);
    first.reserve_context().expect("it fits").commit_context(1).expect("it is recorded");
    launch(first, &gpu, 0, 1, 100 * US, true);
    gpu.wait_idle();
    first.collect_measurements(&On(&gpu, 0));
    process.system().advance(100 * SECOND);
    container.kill(1);
    let next = container.process(2);
    let begun = next.system().now();
    launch(device(&next), &gpu, 0, 1, 100 * US, true);
    assert!(next.system().now() - begun < MS);
}
