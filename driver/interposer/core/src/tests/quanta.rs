//! Launches under exclusive quanta on the simulated device of [`super::throttle`].

use super::fixture::{Process, TestContainer, device};
use super::throttle::{CALL, Gpu, MS, On, PROGRAMS, SECOND, US, compute_share, launch, vary};
use crate::System;
use crate::throttle::Bucket;
use divvy_pages::account::QuantumState;
use divvy_pages::policy::{UNBOUNDED, accrued};
use divvy_pages::sync::Ordering::Relaxed;
use proptest::prelude::*;

/// A share with this number of per cent, whose launches need a quantum, as long as the test lasts.
fn exclusive_share(cores: u32) -> TestContainer {
    let container = compute_share(cores);
    let (policy, _) = container.pages();
    policy.set_agent_limited(true);
    policy.set_exclusive(true);
    policy.set_quanta_expire(u64::MAX);
    policy.grant(if cores == 0 { UNBOUNDED } else { u64::from(cores) * SECOND / 100 }, u64::MAX);
    container
}

/// The program waits for all of its work.
fn synchronize(process: &Process, gpu: &Gpu<'_>) {
    device(process).mark_before_wait(&On(gpu, 0));
    gpu.wait_idle();
    device(process).collect_measurements(&On(gpu, 0));
}

#[test]
fn share_alone_gets_its_percentage_for_any_kernel() {
    let mut wrong = Vec::new();
    for (name, program) in PROGRAMS {
        for cores in [1, 5, 10, 30, 50, 70, 99] {
            let container = exclusive_share(cores);
            container.pages().0.grant_quantum(1, 0);
            let process = container.process(1);
            let gpu = Gpu::new(process.system());
            let mut number = 0;
            while process.system().now() < 7 * SECOND {
                program(device(&process), &gpu, number);
                number += 1;
            }
            let got = gpu.busy_ns(2 * SECOND, 7 * SECOND) as f64 / (5 * SECOND) as f64 * 100.0;
            if (got - f64::from(cores)).abs() > 2.0 {
                wrong.push(format!("{name}, {cores}: {got:.1}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn launches_end_with_the_quantum() {
    for length in [20 * US, MS, 5 * MS] {
        let container = exclusive_share(0);
        let (policy, account) = container.pages();
        policy.grant_quantum(1, 0);
        let process = container.process(1);
        let gpu = Gpu::new(process.system());
        (0..2000).for_each(|number| launch(device(&process), &gpu, 0, 1, vary(length, number), true));
        // Another share waits. Its quanta count no more after some time, so this program goes on.
        let ends = process.system().now() + 20 * MS;
        policy.end_quantum_at(ends);
        let expire = ends + SECOND;
        policy.set_quanta_expire(expire);
        let (rings, mut number) = (account.doorbell().load(std::sync::atomic::Ordering::SeqCst), 0);
        while process.system().now() < expire {
            number += 1;
            launch(device(&process), &gpu, 0, 1, vary(length, number), true);
        }
        let after = gpu.busy_ns(ends, expire);
        assert!(after <= 2 * length, "{length}: {after} ns after the end");
        let within = gpu.busy_ns(ends - 20 * MS, ends);
        assert!(within >= 15 * MS, "{length}: {within} ns in the quantum");
        let rung = account.doorbell().load(std::sync::atomic::Ordering::SeqCst) - rings;
        assert!((1..=2).contains(&rung), "{length}: it rings when it has no work, and when it waits: {rung}");
    }
}

#[test]
fn slot_says_what_the_process_does() {
    let container = exclusive_share(0);
    let (policy, account) = container.pages();
    policy.grant_quantum(7, 0);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    launch(device(&process), &gpu, 0, 1, MS, true);
    assert_eq!(container.report().quantum, Some((QuantumState::Working, 7)));
    synchronize(&process, &gpu);
    assert_eq!(container.report().quantum, Some((QuantumState::Drained, 7)));
    policy.grant_quantum(0, 1);
    policy.set_quanta_expire(process.system().now() + SECOND);
    launch(device(&process), &gpu, 0, 1, MS, true);
    // It waited, and then went by its bucket.
    assert_eq!(container.report().quantum, Some((QuantumState::Working, 0)));
    assert_eq!(account.doorbell().load(std::sync::atomic::Ordering::SeqCst), 1);
}

#[test]
fn work_is_charged_and_pauses_are_not() {
    for (length, pause) in [(20 * US, 0), (MS, 0), (5 * MS, 0), (20 * US, 300 * US), (MS, 300 * US)] {
        let container = exclusive_share(0);
        container.pages().0.grant_quantum(1, 0);
        let process = container.process(1);
        let gpu = Gpu::new(process.system());
        for number in 0..500 {
            launch(device(&process), &gpu, 0, 1, vary(length, number), true);
            if pause > 0 {
                synchronize(&process, &gpu);
                process.system().advance(pause);
            }
        }
        synchronize(&process, &gpu);
        let busy = gpu.busy_ns(0, process.system().now());
        let charged = container.report().charged_ns;
        // After a pause the device waits for the launch that follows the first event.
        let most = busy + busy / 100 + if pause > 0 { 500 * CALL } else { CALL };
        assert!((busy..=most).contains(&charged), "{length} every {pause}: {charged} for {busy}");
    }
}

#[test]
fn processes_of_a_share_are_charged_the_union() {
    let container = exclusive_share(0);
    let (policy, _) = container.pages();
    policy.grant_quantum(1, 0);
    let account = container.pages().1;
    assert_eq!(account.charge_interval(100, 300), 200);
    assert_eq!(account.charge_interval(200, 400), 100);
}

#[test]
fn share_that_gets_a_ceiling_does_not_pay_for_earlier_time() {
    let container = exclusive_share(0);
    let (policy, account) = container.pages();
    policy.grant_quantum(1, 0);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    let work_until = |end: u64| {
        while process.system().now() < end {
            launch(device(&process), &gpu, 0, 1, MS, true);
        }
    };
    work_until(20 * SECOND);
    let debt = -account.balance().load(Relaxed);
    assert!(debt <= 20 * MS as i64, "{debt} ns");
    policy.grant(30 * SECOND / 100, u64::MAX);
    let got = |from: u64, to: u64| gpu.busy_ns(from, to) as f64 / (to - from) as f64 * 100.0;
    work_until(26 * SECOND);
    let (soon, later) = (got(20 * SECOND, 21 * SECOND), got(21 * SECOND, 26 * SECOND));
    assert!((25.0..=35.0).contains(&soon) && (later - 30.0).abs() < 1.0, "{soon} {later}");
}

proptest! {
    /// Whatever a share is charged, and however its ceiling changes: without a ceiling it owes at most
    /// its burst, and with one at most what it used beyond the rate. It never has more than its burst
    /// and one hand-over.
    #[test]
    fn debts_are_bounded(
        steps in prop::collection::vec(
            (0..3 * SECOND, 0..2 * SECOND, prop::option::of(1..SECOND), any::<bool>()),
            1..80,
        ),
    ) {
        let container = exclusive_share(0);
        let page = container.pages().1;
        let burst = 20 * MS;
        let (mut now, mut owed) = (SECOND, 0_i64);
        page.refilled_at().store(now, Relaxed);
        for (pause, charged, rate, by_node) in steps {
            now += pause;
            let (rate, charged) = (rate.unwrap_or(UNBOUNDED), charged as i64);
            let filled = now - page.refilled_at().load(Relaxed) < 2 * US;
            let before = (owed - if filled { 0 } else { accrued(rate, pause) }).max(0);
            owed = before + charged;
            if rate == UNBOUNDED {
                owed = owed.min(burst as i64);
            } else if by_node {
                owed = owed.min(before.max(2 * burst as i64));
            }
            Bucket { page, rate, burst }.charge(charged, by_node, now);
            let balance = page.balance().load(Relaxed);
            prop_assert!(balance >= -owed && balance <= 2 * burst as i64, "{balance}, {owed}");
        }
    }
}

#[test]
fn share_without_an_agent_goes_by_its_record() {
    let container = exclusive_share(30);
    let (policy, _) = container.pages();
    policy.grant(UNBOUNDED, 1);
    policy.set_quanta_expire(1);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    let mut number = 0;
    while process.system().now() < 7 * SECOND {
        number += 1;
        launch(device(&process), &gpu, 0, 1, vary(MS, number), true);
    }
    let got = gpu.busy_ns(2 * SECOND, 7 * SECOND) as f64 / (5 * SECOND) as f64 * 100.0;
    assert!((got - 30.0).abs() < 1.0, "{got}");
}
