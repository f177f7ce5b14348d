//! The fast path: which launches take it, what they are charged, and what forces the slow path.

use super::fixture::{PagesSpec, Process, TestContainer, device};
use super::throttle::{Gpu, US, compute_share, launch};
use crate::Work;
use divvy_pages::{Compute, Flags};
use std::sync::atomic::Ordering::SeqCst;

/// The kernel of function 1 that [`launch`] launches.
const KERNEL: Work = Work { function: 1, blocks: 1000 };

/// Launches `launches` times in sequence, and returns how many took the fast path.
fn go(process: &Process, gpu: &Gpu<'_>, work: Work, launches: u64) -> u64 {
    let go = |_: &u64| {
        let goes = process.try_fast_launch(work);
        if !goes {
            launch(device(process), gpu, 0, work.function, 20 * US, true);
        }
        goes
    };
    (0..launches).filter(go).count() as u64
}

/// Runs `test` in a process that has launched the kernel for a while.
fn check(container: &TestContainer, test: impl FnOnce(&Process, &Gpu<'_>)) {
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    go(&process, &gpu, KERNEL, 2000);
    test(&process, &gpu);
}

#[test]
fn most_launches_of_a_known_kernel_take_the_fast_path() {
    check(&compute_share(50), |process, gpu| {
        let went = go(process, gpu, KERNEL, 10_000);
        assert!(went > 7_000, "{went}");
    });
}

#[test]
fn changed_state_forces_the_slow_path() {
    let changed = |name: &str, change: fn(&TestContainer, &Process)| {
        let container = compute_share(50);
        check(&container, |process, gpu| {
            assert!(go(process, gpu, KERNEL, 100) > 0, "{name}: they went before");
            change(&container, process);
            assert!((0..100).all(|_| !process.try_fast_launch(KERNEL)), "{name}");
        });
    };
    changed("the gate is closed", |container, _| container.pages().0.gate().store(1, SeqCst));
    changed("the node calls", |container, _| container.pages().0.request_wakeup(true, 5));
    changed("another policy", |container, _| container.set_limit(0, 1 << 20));
    changed("a child of fork", |_, process| process.system().fork(2));
}

#[test]
fn fast_path_resumes_after_a_slow_launch() {
    let container = compute_share(50);
    check(&container, |process, gpu| {
        container.pages().0.request_wakeup(true, 5);
        container.set_limit(0, 1 << 20);
        let went = go(process, gpu, KERNEL, 10_000);
        assert!(went > 7_000, "{went}");
    });
}

#[test]
fn unknown_kernel_or_grid_takes_the_slow_path() {
    check(&compute_share(50), |process, _| {
        for unknown in [Work { function: 2, ..KERNEL }, Work { blocks: 1, ..KERNEL }] {
            assert!((0..100).all(|_| !process.try_fast_launch(unknown)), "{unknown:?}");
        }
    });
}

#[test]
fn launch_without_credit_takes_the_slow_path() {
    check(&compute_share(1), |process, _| {
        let went = (0..100_000).filter(|_| process.try_fast_launch(KERNEL)).count();
        assert!(went < 1_000, "{went} went for nothing");
    });
}

#[test]
fn several_shares_or_no_limit_take_the_slow_path() {
    let compute = Compute { cores: 20, ..Compute::default() };
    let one = PagesSpec::Compute { compute, flags: Flags::default() };
    for container in [TestContainer::new(&[one, one]), compute_share(0)] {
        check(&container, |process, gpu| assert_eq!(go(process, gpu, KERNEL, 1_000), 0));
    }
}
