//! Gates that the node closes, for a while or for good.

use super::pace::{CALL, Gpu, MS, SECOND, US, about, launch, share};
use super::world::device;
use crate::System;

#[test]
fn a_closed_gate_holds_launches_and_starves_nobody() {
    let world = share(0);
    let (policy, _) = world.pages();
    let process = world.process(1);
    let gpu = Gpu::new(process.system());
    let at = |function| {
        launch(device(&process), &gpu, 0, function, US, true);
        process.system().now()
    };
    let before = at(1);
    policy.gate().store(1, std::sync::atomic::Ordering::SeqCst);
    assert!(at(1) >= before + SECOND, "one launch a second goes through");
    policy.gate().store(0, std::sync::atomic::Ordering::SeqCst);
    let open = process.system().now();
    assert_eq!(at(1), open + CALL);
}

#[test]
fn a_gate_that_is_closed_for_a_while_opens_by_itself() {
    let world = share(0);
    let (policy, _) = world.pages();
    let process = world.process(1);
    let gpu = Gpu::new(process.system());
    let begin = process.system().now();
    policy.close(begin + 200 * MS);
    launch(device(&process), &gpu, 0, 1, US, true);
    assert_eq!(process.system().now(), begin + 200 * MS + CALL);
    (0..1000).for_each(|_| launch(device(&process), &gpu, 0, 1, US, true));
    assert_eq!(process.system().now(), begin + 200 * MS + 1001 * CALL, "and stays open");
}

#[test]
fn a_gate_is_closed_to_who_waits_for_time_or_for_the_device() {
    for (name, cores, length) in [("time", 10, 100 * US), ("the device", 0, 5 * MS)] {
        let world = share(cores);
        let (policy, _) = world.pages();
        policy.divide(true);
        let process = world.process(1);
        let gpu = Gpu::new(process.system());
        (0..500).for_each(|number| launch(device(&process), &gpu, 0, 1, about(length, number), true));
        let until = process.system().now() + 300 * MS;
        process.system().close_at_wait(policy, until);
        for number in 0.. {
            let begun = process.system().now();
            launch(device(&process), &gpu, 0, 1, about(length, number), true);
            if policy.closed_until() > 0 {
                break;
            }
            assert!(begun < until, "{name}: it never waits");
        }
        assert!(process.system().now() >= until, "{name}: a launch went while the gate was closed");
    }
}

#[test]
fn who_waits_while_a_gate_is_closed_whose_time_is_over_sleeps() {
    for (name, cores, length) in [("time", 10, 100 * US), ("the device", 0, 5 * MS)] {
        let world = share(cores);
        let (policy, _) = world.pages();
        policy.divide(true);
        let process = world.process(1);
        let gpu = Gpu::new(process.system());
        // The node closed it and is gone.
        policy.close(1);
        let vain = process.system().vain_waits();
        (0..500).for_each(|number| launch(device(&process), &gpu, 0, 1, about(length, number), true));
        assert!(process.system().now() > 100 * MS, "{name}: it never waits");
        assert_eq!(process.system().vain_waits() - vain, 0, "{name}");
    }
}
