//! Gates that the node closes, with and without a deadline.

use super::fixture::device;
use super::throttle::{CALL, Gpu, MS, SECOND, US, compute_share, launch, vary};
use crate::System;

#[test]
fn closed_gate_lets_one_launch_per_second_through() {
    let container = compute_share(0);
    let (policy, _) = container.pages();
    let process = container.process(1);
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
fn gate_with_a_deadline_opens_by_itself() {
    let container = compute_share(0);
    let (policy, _) = container.pages();
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    let begin = process.system().now();
    policy.close_gate_until(begin + 200 * MS);
    launch(device(&process), &gpu, 0, 1, US, true);
    assert_eq!(process.system().now(), begin + 200 * MS + CALL);
    (0..1000).for_each(|_| launch(device(&process), &gpu, 0, 1, US, true));
    assert_eq!(process.system().now(), begin + 200 * MS + 1001 * CALL, "and stays open");
}

#[test]
fn waiting_launch_respects_a_gate_closed_meanwhile() {
    for (name, cores, length) in [("time", 10, 100 * US), ("the device", 0, 5 * MS)] {
        let container = compute_share(cores);
        let (policy, _) = container.pages();
        policy.set_agent_limited(true);
        let process = container.process(1);
        let gpu = Gpu::new(process.system());
        (0..500).for_each(|number| launch(device(&process), &gpu, 0, 1, vary(length, number), true));
        let until = process.system().now() + 300 * MS;
        process.system().close_at_wait(policy, until);
        for number in 0.. {
            let begun = process.system().now();
            launch(device(&process), &gpu, 0, 1, vary(length, number), true);
            if policy.gate_closed_until() > 0 {
                break;
            }
            assert!(begun < until, "{name}: it never waits");
        }
        assert!(process.system().now() >= until, "{name}: a launch went while the gate was closed");
    }
}

#[test]
fn waiter_sleeps_under_a_gate_with_a_past_deadline() {
    for (name, cores, length) in [("time", 10, 100 * US), ("the device", 0, 5 * MS)] {
        let container = compute_share(cores);
        let (policy, _) = container.pages();
        policy.set_agent_limited(true);
        let process = container.process(1);
        let gpu = Gpu::new(process.system());
        // The node daemon closed the gate and has died.
        policy.close_gate_until(1);
        let immediate_returns = process.system().immediate_returns();
        (0..500).for_each(|number| launch(device(&process), &gpu, 0, 1, vary(length, number), true));
        assert!(process.system().now() > 100 * MS, "{name}: it never waits");
        assert_eq!(process.system().immediate_returns() - immediate_returns, 0, "{name}");
    }
}
