//! Compute time on a simulated device: what a share gets, and when its launches wait.
//!
//! The clock advances only by waiting and by the time a launch costs the program, so runs are short
//! and deterministic. The device runs one kernel after the other. Kernels that leave room run
//! concurrently with those of other streams.

use super::fixture::{FakeSystem, PagesSpec, TestContainer, device};
use crate::{Device, System, Timer, Work};
use divvy_pages::{Compute, Flags};
use std::cell::{Cell, RefCell};

pub(super) const US: u64 = 1_000;
pub(super) const MS: u64 = 1_000 * US;
pub(super) const SECOND: u64 = 1_000 * MS;
/// Time that a launch costs the program's thread, in nanoseconds.
pub(super) const CALL: u64 = 3 * US;

/// The device and its events.
pub(super) struct Gpu<'a> {
    system: &'a FakeSystem,
    /// Time at which the work of each stream completes.
    streams: [Cell<u64>; 4],
    /// Intervals in which the device is busy.
    busy: RefCell<Vec<(u64, u64)>>,
    /// Context and time of each event.
    events: RefCell<Vec<(u64, Option<u64>)>>,
    pub(super) context: Cell<u64>,
}

/// One stream, for one launch.
pub(super) struct On<'a>(pub(super) &'a Gpu<'a>, pub(super) usize);

impl<'a> Gpu<'a> {
    pub(super) fn new(system: &'a FakeSystem) -> Self {
        Self {
            system,
            streams: Default::default(),
            busy: RefCell::default(),
            events: RefCell::default(),
            context: Cell::new(77),
        }
    }

    fn run(&self, stream: usize, length: u64, alone: bool) -> i32 {
        self.system.advance(CALL);
        let all = self.streams.iter().map(Cell::get).max().unwrap_or_default();
        let after = if alone { all } else { self.streams[stream].get() };
        let begin = after.max(self.system.now());
        self.streams[stream].set(begin + length);
        self.busy.borrow_mut().push((begin, begin + length));
        0
    }

    /// Time of an event. Events of a destroyed context must not be queried.
    fn time(&self, event: u64) -> Option<u64> {
        let (context, time) = self.events.borrow()[event as usize - 1];
        assert!(context >= self.context.get(), "an event of a destroyed context");
        time
    }

    /// Waits until all launched work has completed.
    pub(super) fn wait_idle(&self) {
        let end = self.streams.iter().map(Cell::get).max().unwrap_or_default();
        self.system.advance(end.saturating_sub(self.system.now()));
    }

    /// Busy time in that window, in nanoseconds.
    pub(super) fn busy_ns(&self, from: u64, to: u64) -> u64 {
        let mut all = self.busy.borrow().clone();
        all.sort_unstable();
        let (mut sum, mut last) = (0, from);
        for (begin, end) in all {
            let (begin, end) = (begin.max(last), end.min(to));
            sum += end.saturating_sub(begin);
            last = last.max(end);
        }
        sum
    }
}

impl Timer for On<'_> {
    fn context(&self) -> u64 {
        self.0.context.get()
    }

    fn create(&self) -> u64 {
        let mut events = self.0.events.borrow_mut();
        events.push((self.context(), None));
        assert!(
            events.iter().filter(|event| event.0 == self.context()).count() <= 300,
            "events are used again"
        );
        events.len() as u64
    }

    fn destroy(&self, event: u64) {
        self.0.time(event);
    }

    fn record(&self, event: u64) -> bool {
        let at = self.0.streams[self.1].get().max(self.0.system.now());
        self.0.time(event);
        self.0.events.borrow_mut()[event as usize - 1].1 = Some(at);
        true
    }

    fn is_done(&self, event: u64) -> Option<bool> {
        self.0.time(event).map(|at| at <= self.0.system.now())
    }

    fn elapsed(&self, from: u64, to: u64) -> Option<i64> {
        Some(self.0.time(to)? as i64 - self.0.time(from)? as i64)
    }
}

pub(super) fn launch(
    device: Device<'_, FakeSystem>,
    gpu: &Gpu<'_>,
    stream: usize,
    function: u64,
    length: u64,
    alone: bool,
) {
    let work = Work { function, blocks: 1000 };
    if device.process.try_fast_launch(work) {
        gpu.run(stream, length, alone);
    } else {
        device.launch(work, &On(gpu, stream), true, || gpu.run(stream, length, alone));
    }
}

pub(super) fn compute_share(cores: u32) -> TestContainer {
    TestContainer::new(&[PagesSpec::Compute {
        compute: Compute { cores, ..Compute::default() },
        flags: Flags::default(),
    }])
}

/// A program without pauses: issues the launch with the given number.
pub(super) type Program = fn(Device<'_, FakeSystem>, &Gpu<'_>, u64);

/// Varies a length by 20 %.
pub(super) fn vary(length: u64, number: u64) -> u64 {
    let chance = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    length * (800 + chance % 401) / 1000
}

pub(super) const PROGRAMS: [(&str, Program); 8] = [
    ("20 us", |device, gpu, n| launch(device, gpu, 0, 1, vary(20 * US, n), true)),
    ("100 us", |device, gpu, n| launch(device, gpu, 0, 1, vary(100 * US, n), true)),
    ("1 ms", |device, gpu, n| launch(device, gpu, 0, 1, vary(MS, n), true)),
    ("1 ms on four streams at once", |device, gpu, n| {
        launch(device, gpu, n as usize % 4, 1, vary(MS, n), false);
    }),
    ("5 ms", |device, gpu, n| launch(device, gpu, 0, 1, vary(5 * MS, n), true)),
    ("10 us and 10 ms by turns", |device, gpu, n| {
        launch(device, gpu, 0, 1 + n % 2, vary([10 * US, 10 * MS][n as usize % 2], n), true);
    }),
    ("10 us, of which some look longer, and 10 ms by turns", |device, gpu, n| {
        let short = if (n / 2).is_multiple_of(20) { 2 * MS } else { 10 * US };
        launch(device, gpu, 0, 1 + n % 2, vary([short, 10 * MS][n as usize % 2], n), true);
    }),
    ("10 us and 10 ms of one function", |device, gpu, n| {
        launch(device, gpu, 0, 1, vary([10 * US, 10 * MS][n as usize % 2], n), true);
    }),
];

/// Percent of the device from the third to the seventh second, and the longest time between two
/// launches in that time.
fn runs(cores: u32, program: Program) -> (f64, u64) {
    let container = compute_share(cores);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    let (mut number, mut longest, mut last) = (0, 0, 0);
    while process.system().now() < 7 * SECOND {
        program(device(&process), &gpu, number);
        number += 1;
        let now = process.system().now();
        if last > 2 * SECOND {
            longest = longest.max(now - last);
        }
        last = now;
    }
    (gpu.busy_ns(2 * SECOND, 7 * SECOND) as f64 / (5 * SECOND) as f64 * 100.0, longest)
}

#[test]
fn share_gets_its_percentage_for_any_kernel_length() {
    let mut wrong = Vec::new();
    for (name, program) in PROGRAMS {
        for cores in [1, 5, 10, 30, 50, 70, 99] {
            let (got, _) = runs(cores, program);
            if (got - f64::from(cores)).abs() > 2.0 {
                wrong.push(format!("{name}, {cores}: {got:.1}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn launch_wait_is_bounded() {
    for (name, program) in PROGRAMS {
        let (_, longest) = runs(30, program);
        assert!(longest <= 2 * crate::throttle::burst_ns(0) + 12 * MS, "{name}: {} us", longest / US);
    }
}

#[test]
fn exhausted_share_waits_for_a_batch() {
    let check = |cores: u32, length: u64, row: std::ops::Range<u64>, most: u64| {
        let container = compute_share(cores);
        let process = container.process(1);
        let gpu = Gpu::new(process.system());
        let (mut launches, mut pauses, mut longest) = (0, 0, 0);
        while process.system().now() < 7 * SECOND {
            let before = process.system().now();
            launch(device(&process), &gpu, 0, 1, length, true);
            let took = process.system().now() - before;
            if before > 2 * SECOND {
                launches += 1;
                pauses += u64::from(took > MS);
                longest = longest.max(took);
            }
        }
        assert!(row.contains(&(launches / pauses)), "{cores} %: {launches} in {pauses} rows");
        assert!(longest <= most, "{cores} %: {longest}");
    };
    check(50, MS, 2..4, 8 * MS);
    check(30, MS, 2..4, 11 * MS);
    check(10, MS, 1..3, 26 * MS);
    check(1, 100 * US, 1..4, 36 * MS);
    // Kernels that run one at a time.
    check(30, 5 * MS, 1..2, 17 * MS);
}

#[test]
fn share_without_a_limit_never_waits() {
    let container = compute_share(0);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    (0..1000).for_each(|_| launch(device(&process), &gpu, 0, 1, MS, true));
    assert_eq!(process.system().now(), 1000 * CALL);
    assert!(gpu.events.borrow().is_empty(), "and nothing is measured");
}

#[test]
fn first_throttled_launch_prints_the_limit() {
    let check = |compute: Compute, expected: &[&str]| {
        let container = TestContainer::new(&[PagesSpec::Compute { compute, flags: Flags::default() }]);
        let process = container.process(1);
        let gpu = Gpu::new(process.system());
        (0..200).for_each(|_| launch(device(&process), &gpu, 0, 1, MS, true));
        assert_eq!(process.system().printed(), expected);
    };
    let line = |percent| {
        format!(
            "divvy: launches are throttled to {percent} % of the GPU's compute time; to get more, raise \
             `cores` in the claim\n"
        )
    };
    check(Compute { cores: 10, ..Compute::default() }, &[&line(10)]);
    check(Compute { cores: 10, ceiling: 40, ..Compute::default() }, &[&line(40)]);
    check(Compute::default(), &[]);
}

#[test]
fn observe_only_share_never_waits() {
    let compute = Compute { cores: 10, ..Compute::default() };
    let container = TestContainer::new(&[PagesSpec::Compute { compute, flags: Flags::OBSERVE_ONLY }]);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    (0..1000).for_each(|_| launch(device(&process), &gpu, 0, 1, MS, true));
    assert_eq!(process.system().now(), 1000 * CALL);
}

#[test]
fn refused_launch_is_not_charged() {
    let container = compute_share(50);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    launch(device(&process), &gpu, 0, 1, 5 * MS, true);
    let work = Work { function: 1, blocks: 1000 };
    let refused = || device(&process).launch(work, &On(&gpu, 0), true, || 1);
    let begin = process.system().now();
    (0..1000).for_each(|_| assert_eq!(refused(), 1));
    assert!(process.system().now() - begin < 20 * MS, "no time was charged for them");
}

#[test]
fn thread_lost_in_a_launch_delays_others_once() {
    let container = compute_share(50);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    let work = Work { function: 1, blocks: 1000 };
    let lost = || device(&process).launch(work, &On(&gpu, 0), true, || panic!("it ends"));
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(lost)).is_err());
    let mut number = 0;
    while process.system().now() < 7 * SECOND {
        launch(device(&process), &gpu, 0, 1, vary(5 * MS, number), true);
        number += 1;
    }
    let got = gpu.busy_ns(2 * SECOND, 7 * SECOND) / (50 * MS);
    assert!((48..=52).contains(&got), "{got}");
}

#[test]
fn events_of_a_destroyed_context_are_not_used() {
    let container = compute_share(50);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    for context in 77..87 {
        gpu.context.set(context);
        (0..20).for_each(|number| launch(device(&process), &gpu, 0, 1, vary(5 * MS, number), true));
        // This context is not destroyed after all.
        drop(process.begin_teardown(context));
        (0..20).for_each(|number| launch(device(&process), &gpu, 0, 1, vary(5 * MS, number), true));
        process.begin_teardown(context).expect("a share").commit();
    }
    let got = gpu.busy_ns(0, process.system().now()) * 100 / process.system().now();
    assert!((45..=60).contains(&got), "{got}");
}

#[test]
fn long_wait_is_reported_while_it_lasts() {
    let container = compute_share(1);
    let (_, account) = container.pages();
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    let kernel = || launch(device(&process), &gpu, 0, 1, SECOND / 2, true);
    (0..3).for_each(|_| kernel());
    let (before, begun) = (container.report().waited_ns, process.system().now());
    process.system().watch_waits(account);
    kernel();
    let waited = process.system().now() - begun;
    let reported = process.system().watched_waits() - before;
    assert!(waited > 20 * SECOND && reported + 3 * SECOND > waited, "{reported} of {waited}");
}

#[test]
fn wakeup_request_is_answered_once() {
    let container = compute_share(0);
    let (policy, account) = container.pages();
    let (process, other) = (container.process(1), container.process(2));
    let rung = || account.doorbell().load(std::sync::atomic::Ordering::SeqCst);
    let check = |processes: &[&super::fixture::Process], expected: u32| {
        for process in processes {
            let gpu = Gpu::new(process.system());
            (0..3).for_each(|_| launch(device(process), &gpu, 0, 1, US, true));
        }
        assert_eq!(rung(), expected);
    };
    check(&[&process], 0);
    policy.request_wakeup(true, 5);
    check(&[&process], 1);
    check(&[&process, &other], 2);
    policy.request_wakeup(true, 6);
    check(&[&process], 3);
    policy.request_wakeup(false, 0);
    check(&[&process, &other], 3);
    assert_eq!((process.system().wakes(), other.system().wakes()), (2, 1), "waiters are woken");
}

#[test]
fn unlimited_share_never_waits_and_is_seen_active() {
    let container = compute_share(0);
    let (policy, account) = container.pages();
    policy.set_agent_limited(true);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    let mut number = 0;
    while process.system().now() < 3 * SECOND {
        launch(device(&process), &gpu, 0, 1, vary(MS, number), true);
        number += 1;
    }
    assert!(gpu.busy_ns(SECOND, 3 * SECOND) >= 1990 * MS);
    let last = account.refilled_at().load(std::sync::atomic::Ordering::SeqCst);
    assert!(process.system().now() - last < 20 * MS);
    let queued = gpu.streams[0].get() - process.system().now();
    assert!(queued <= 4 * MS, "{queued} ns are queued");
}

#[test]
fn unlimited_share_saves_no_burst() {
    let container = compute_share(0);
    let (policy, _) = container.pages();
    policy.set_agent_limited(true);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    let run = |until: u64| {
        while process.system().now() < until {
            launch(device(&process), &gpu, 0, 1, MS, true);
        }
    };
    run(SECOND);
    // The share is mostly idle.
    for _ in 0..50 {
        launch(device(&process), &gpu, 0, 1, MS, true);
        process.system().sleep(10 * MS);
    }
    let begin = process.system().now();
    policy.grant(400 * MS, begin + SECOND);
    run(begin + SECOND / 2);
    let worked = gpu.busy_ns(begin, begin + SECOND / 2) / MS;
    assert!((195..=205).contains(&worked), "{worked} ms of 200");
}

#[test]
fn granted_rate_replaces_the_policy_rate_until_it_expires() {
    let container = compute_share(30);
    let (policy, _) = container.pages();
    policy.grant(60 * 10 * MS, 4 * SECOND);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    let mut number = 0;
    while process.system().now() < 8 * SECOND {
        launch(device(&process), &gpu, 0, 1, vary(MS, number), true);
        number += 1;
    }
    let got = [(2, 4), (6, 8)].map(|(from, to)| gpu.busy_ns(from * SECOND, to * SECOND) / (20 * MS));
    assert!((58..=62).contains(&got[0]) && (28..=32).contains(&got[1]), "{got:?}");
}

#[test]
fn unattributed_grant_counts_launches_in_full() {
    // Four of five kernels are preempted and take three times as long.
    let worked = |is_doubted: bool| {
        let container = compute_share(30);
        let (policy, _) = container.pages();
        policy.grant(30 * 10 * MS, 9 * SECOND);
        policy.set_unattributed(is_doubted);
        let process = container.process(1);
        let gpu = Gpu::new(process.system());
        let mut number = 0_u64;
        while process.system().now() < 8 * SECOND {
            let length = if number.is_multiple_of(5) { MS } else { 3 * MS };
            launch(device(&process), &gpu, 0, 1, length, true);
            number += 1;
        }
        gpu.busy_ns(4 * SECOND, 8 * SECOND) / (40 * MS)
    };
    let [seen, doubted] = [worked(false), worked(true)];
    assert!(seen > 45 && (28..=32).contains(&doubted), "{seen} {doubted}");
}

#[test]
fn granted_rate_above_the_device_rate_is_applied() {
    use std::sync::atomic::Ordering::SeqCst;
    let waits = |rate: u64| {
        let container = compute_share(99);
        let (policy, account) = container.pages();
        policy.grant(rate, 4 * SECOND);
        let process = container.process(1);
        let gpu = Gpu::new(process.system());
        launch(device(&process), &gpu, 0, 1, MS, true);
        let begin = process.system().now();
        account.refilled_at().store(begin, SeqCst);
        account.balance().store(-(300 * MS as i64), SeqCst);
        for _ in 0..20 {
            launch(device(&process), &gpu, 0, 1, MS, true);
        }
        (process.system().now() - begin) / MS
    };
    let (own, above) = (waits(SECOND), waits(SECOND * 3 / 2));
    assert!((300..330).contains(&own) && (200..220).contains(&above), "{own} {above}");
}

#[test]
fn compute_of_shares_and_processes_adds_up() {
    let compute = Compute { cores: 20, ..Compute::default() };
    let one = PagesSpec::Compute { compute, flags: Flags::default() };
    let container = TestContainer::new(&[one, one]);
    let (first, second) = (container.process(1), container.process(2));
    let gpu = Gpu::new(first.system());
    let mut number = 0;
    while first.system().now() < 4 * SECOND {
        for process in [&first, &second] {
            launch(device(process), &gpu, 0, 1, vary(MS, number), true);
            number += 1;
        }
    }
    let got = gpu.busy_ns(2 * SECOND, 4 * SECOND) / (20 * MS);
    assert!((38..=42).contains(&got), "{got}");
}

#[test]
fn measured_and_fastest_times_are_reported() {
    let container = compute_share(50);
    let process = container.process(1);
    let gpu = Gpu::new(process.system());
    // Two kernels: one's duration says nothing about the other's.
    let run = |long: u64, short: u64| {
        let before = container.report();
        for _ in 0..100 {
            launch(device(&process), &gpu, 0, 1, long, true);
            launch(device(&process), &gpu, 0, 2, short, true);
        }
        let now = container.report();
        (
            now.measured_ns - before.measured_ns,
            now.fastest_ns - before.fastest_ns,
            now.long_kernel_ns - before.long_kernel_ns,
        )
    };
    launch(device(&process), &gpu, 0, 3, MS, true);
    let steady = run(5 * MS, MS / 2);
    assert!(steady.0 > 400 * MS && steady.0 < steady.1 * 6 / 5, "{steady:?}");
    // Kernels that fit a time slice do not count.
    assert!((450 * MS..=510 * MS).contains(&steady.2), "{steady:?}");
    let slow = run(50 * MS, 5 * MS);
    assert!(slow.0 > 4_000 * MS && slow.0 > slow.1 * 8, "{slow:?}");
}
