//! Rules have their effect on calls of all processes.

mod common;

use common::Node;
use divvy_sim::code::Code;
use divvy_sim::control::{Latency, Pattern, TraceLine, When, is_alive};
use divvy_sim::{Call, Sim, State};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

const CREATE: &str = "nvmlDeviceCreateGpuInstance";

/// Makes a call. Returns whether its effect happened, and its result.
fn call(sim: &Sim, name: &str, gpu: Option<usize>) -> (bool, Result<(), Code>) {
    let mut happened = false;
    let result = sim.call(Call { name, gpu, args: &[19, 0] }, || {
        happened = true;
        Ok(())
    });
    (happened, result)
}

fn rule(node: &Node, change: impl FnOnce(&mut State)) {
    node.sim
        .update(|state| {
            change(state);
            Ok(())
        })
        .expect("rules are accepted");
}

/// Waits until a call is blocked.
fn wait_held(sim: &Sim) {
    let begin = Instant::now();
    while !sim.read().expect("a state").control.held.iter().any(is_alive) {
        assert!(begin.elapsed() < Duration::from_secs(30), "no call was blocked");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn nth_call_fails_before_or_after_its_effect() {
    let check = |nth, when, expected: [(bool, Result<(), Code>); 3]| {
        let node = Node::create("L4");
        rule(&node, |state| state.add_fault(Pattern::new(CREATE), nth, when, Code::Timeout));
        // Calls of several processes count together; other calls do not count.
        let sims = [node.reopen(), node.reopen(), node.reopen()];
        let got = sims.map(|sim| {
            assert_eq!(call(&sim, "nvmlDeviceGetUUID", Some(0)), (true, Ok(())));
            call(&sim, CREATE, Some(0))
        });
        assert_eq!(got, expected);
    };
    let (fine, lost) = ((true, Ok(())), Err(Code::Timeout));
    check(Some(2), When::Before, [fine, (false, lost), fine]);
    check(Some(2), When::After, [fine, (true, lost), fine]);
    check(None, When::Before, [(false, lost); 3]);
}

#[test]
fn pattern_matches_a_name_or_prefix_and_a_gpu() {
    let check = |pattern: &str, gpu, name: &str, on, expected| {
        let pattern = Pattern { call: pattern.to_owned(), gpu };
        assert_eq!(pattern.matches(&Call { name, gpu: on, args: &[] }), expected, "{pattern:?} {name}");
    };
    check(CREATE, None, CREATE, Some(1), true);
    check(CREATE, None, "nvmlDeviceCreateGpuInstanceWithPlacement", Some(1), false);
    check("nvmlDeviceCreate*", None, CREATE, None, true);
    check("*", None, "nvmlInit_v2", None, true);
    check("*", Some(1), CREATE, Some(1), true);
    check("*", Some(1), CREATE, Some(0), false);
    check("*", Some(1), "nvmlInit_v2", None, false);
}

#[test]
fn held_call_blocks_until_released() {
    let check = |when, effect_before_release: u32| {
        let node = Node::create("L4");
        rule(&node, |state| state.add_hold(Pattern::new(CREATE), Some(1), when));
        let (other, effects) = (node.reopen(), AtomicU32::new(0));
        std::thread::scope(|scope| {
            let held = scope.spawn(|| {
                other.call(Call { name: CREATE, gpu: None, args: &[] }, || {
                    effects.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                })
            });
            wait_held(&node.sim);
            assert_eq!(effects.load(Ordering::SeqCst), effect_before_release);
            assert_eq!(call(&node.sim, CREATE, None), (true, Ok(())), "only the first call is held");
            rule(&node, |state| state.release(Some(CREATE)));
            assert_eq!(held.join().expect("no panic"), Ok(()));
        });
        assert_eq!(effects.load(Ordering::SeqCst), 1);
        assert!(node.sim.read().expect("a state").control.held.is_empty());
    };
    check(When::Before, 0);
    check(When::After, 1);
}

#[test]
fn trace_has_one_line_for_each_call() {
    let node = Node::create("L4");
    call(&node.sim, CREATE, Some(0)).1.expect("no rule");
    rule(&node, |state| {
        state.control.trace = true;
        state.add_fault(Pattern::new("nvmlInit*"), None, When::Before, Code::DriverNotLoaded);
    });
    call(&node.reopen(), CREATE, Some(0)).1.expect("no rule for it");
    let _ = call(&node.sim, "nvmlInit_v2", None);
    rule(&node, |state| state.control.trace = false);
    let _ = call(&node.sim, "nvmlInit_v2", None);
    let text = std::fs::read_to_string(node.sim.trace_path()).expect("a trace");
    let lines: Vec<TraceLine> =
        text.lines().map(|line| serde_json::from_str(line).expect("a trace line")).collect();
    let got: Vec<_> = lines.iter().map(|line| (line.call.as_str(), line.gpu, line.code)).collect();
    assert_eq!(got, [(CREATE, Some(0), Code::Success), ("nvmlInit_v2", None, Code::DriverNotLoaded)]);
    assert_eq!((lines[0].pid, &lines[0].args[..]), (std::process::id(), &[19, 0][..]));
}

#[test]
fn global_lock_serializes_calls() {
    let node = Node::create("2xL4");
    rule(&node, |state| {
        state.set_latency(Latency { pattern: Pattern::new(CREATE), ms: 1, global_lock: true });
    });
    let inside = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for gpu in 0..2 {
            let (sim, inside) = (node.reopen(), &inside);
            scope.spawn(move || {
                for _ in 0..20 {
                    let effect = || {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two at once");
                        std::thread::yield_now();
                        inside.fetch_sub(1, Ordering::SeqCst);
                        Ok(())
                    };
                    sim.call(Call { name: CREATE, gpu: Some(gpu), args: &[] }, effect).expect("no fault");
                }
            });
        }
    });
}

#[test]
fn latency_delays_calls_until_set_to_zero() {
    let node = Node::create("L4");
    let slow = |ms| Latency { pattern: Pattern::new(CREATE), ms, global_lock: false };
    rule(&node, |state| state.set_latency(slow(30)));
    let begin = Instant::now();
    call(&node.sim, CREATE, None).1.expect("no fault");
    // A sleep is never too short, but how much longer it is depends on the machine.
    assert!(begin.elapsed() >= Duration::from_millis(30));
    rule(&node, |state| state.set_latency(slow(0)));
    assert!(node.sim.read().expect("a state").control.latencies.is_empty());
}
