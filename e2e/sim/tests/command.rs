//! The command line: operations and error messages.

mod common;

use common::Node;
use std::process::{Command, Output};

fn run(node: &Node, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_divvy-sim"));
    command.env("DIVVY_SIM", node.sim.root()).args(args).output().expect("divvy-sim")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Runs a command that must succeed. Returns its output.
fn run_ok(node: &Node, args: &[&str]) -> String {
    let output = run(node, args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn show_draws_the_created_gpus() {
    let dir = tempfile::TempDir::new().expect("a temporary directory");
    let library = dir.path().join("library.so");
    std::fs::write(&library, "").expect("writable");
    let up = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_divvy-sim"));
        command.args(["up", "--gpus", "2xH100-SXM5-80GB,L4", "--library"]).arg(&library);
        command.arg(dir.path().join("node")).output().expect("divvy-sim")
    };
    let output = up();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let drawn = text(&output.stdout);
    assert_eq!(drawn.lines().filter(|line| line.starts_with("GPU ")).count(), 3, "{drawn}");
    assert!(text(&up().stderr).contains("already has simulated GPUs"));
}

#[test]
fn commands_change_the_gpus() {
    let node = Node::create("2xH100-SXM5-80GB");
    let state = || node.sim.read().expect("a state");
    node.sim
        .update(|state| {
            state.set_mig_mode(0, true)?;
            let gi = state.create_gi(0, 9, None)?;
            state.create_ci(0, gi.id, 2, None).map(drop)
        })
        .expect("free slices");
    run_ok(&node, &["process", "add", "0", "4711", "--instance", "2/0", "--name", "train"]);
    let drawn = run_ok(&node, &["show"]);
    assert!(drawn.contains("3g.40gb at 4:4 is GPU instance 2: train (4711)"), "{drawn}");
    assert!(!drawn.contains('\x1b'), "no colours without a terminal");
    let busy = run(&node, &["reset", "0"]);
    assert!(text(&busy.stderr).contains("IN_USE"));
    run_ok(&node, &["process", "remove", "4711"]);
    run_ok(&node, &["reset", "0"]);
    assert!(state().gpus[0].instances.is_empty());
    let uuid = state().gpus[1].uuid.clone();
    run_ok(&node, &["xid", &uuid, "79"]);
    run_ok(&node, &["recovery", &uuid, "2"]);
    run_ok(&node, &["lose", &uuid]);
    assert!(state().gpus[1].lost && state().gpus[1].health.recovery_action == 2);
    run_ok(&node, &["reboot"]);
    assert!(state().gpus[1].missing);
    run_ok(&node, &["find", "1"]);
    run_ok(&node, &["reboot"]);
    assert!(!state().gpus[1].missing);
    run_ok(&node, &["driver", "590.44.01"]);
    assert_eq!(state().driver, "590.44.01");
    let json: serde_json::Value = serde_json::from_str(&run_ok(&node, &["show", "--json"])).expect("JSON");
    assert_eq!(json["driver"], "590.44.01");
}

#[test]
fn commands_set_health_and_change_boards() {
    let node = Node::create("2xL4");
    let gpu = |slot: usize| node.sim.read().expect("a state").gpus[slot].clone();
    run_ok(&node, &["health", "0", "--ecc-uncorrected", "2", "--remap-pending", "--remap-failed=false"]);
    assert!(gpu(0).health.remap_pending && !gpu(0).health.remap_failed);
    assert_eq!(gpu(0).health.ecc_uncorrected, 2);
    run_ok(&node, &["health", "0", "--remap-pending", "false", "--recovery-action", "1", "--events"]);
    assert!(!gpu(0).health.remap_pending);
    assert!(node.text("dev/kmsg").contains("to 0x1 (GPU Reset Required)"));
    run_ok(&node, &["lose", "0", "--silent", "--code", "reset-required"]);
    assert_eq!(gpu(0).failure(), Some(divvy_sim::Code::ResetRequired));
    run_ok(&node, &["reset", "0"]);
    run_ok(&node, &["plug", "L4"]);
    run_ok(&node, &["unplug", "1"]);
    run_ok(&node, &["replace", "1"]);
    let uuid = gpu(2).uuid;
    run_ok(&node, &["migrate"]);
    run_ok(&node, &["reboot"]);
    assert!(gpu(0).failure().is_none() && gpu(1).minor == 1 && gpu(2).uuid != uuid);
    run_ok(&node, &["driver", "unload"]);
    assert!(!node.has("dev/nvidiactl"));
    run_ok(&node, &["driver", "load", "590.44.01"]);
    assert!(node.has("dev/nvidia2"));
}

#[test]
fn commands_set_and_remove_rules() {
    let node = Node::create("L4");
    let control = || node.sim.read().expect("a state").control.clone();
    run_ok(&node, &["latency", "nvmlDeviceGetUUID", "5", "--global-lock"]);
    run_ok(&node, &["fault", "nvmlInit*", "--nth", "2", "in_use", "--gpu", "0"]);
    run_ok(&node, &["hold", "nvmlShutdown", "--after"]);
    run_ok(&node, &["trace", "on"]);
    let rules = control();
    assert!(rules.trace && rules.latencies[0].global_lock && rules.faults[0].nth == Some(2));
    assert_eq!((rules.latencies.len(), rules.faults.len(), rules.holds.len()), (1, 1, 1));
    run_ok(&node, &["latency", "nvmlDeviceGetUUID", "0"]);
    run_ok(&node, &["fault", "--clear"]);
    run_ok(&node, &["release"]);
    run_ok(&node, &["trace", "off"]);
    assert_eq!(control(), divvy_sim::control::Control::default());
    assert_eq!(run_ok(&node, &["held"]) + &run_ok(&node, &["trace"]), "");
}

#[test]
fn invalid_arguments_are_explained() {
    let node = Node::create("L4");
    let check = |args: &[&str], expected: &str| {
        let output = run(&node, args);
        let error = text(&output.stderr);
        assert!(!output.status.success() && error.contains(expected), "{args:?}: {error}");
    };
    check(&["lose", "7"], "no GPU 7");
    check(&["lose", "first"], "give the GPU by its number");
    check(&["process", "remove", "1"], "NOT_FOUND");
    check(&["fault", "nvmlInit_v2", "BROKEN"], "no NVML return code");
    check(&["fault", "nvmlInit_v2", "IN_USE", "--nth", "0"], "--nth");
    check(&["hold", "nvmlInit_v2"], "--before|--after");
    check(&["driver", "new"], "not a driver version");
    check(&["driver", "load"], "VERSION");
    check(&["driver", "load", "590.44.01"], "is loaded; unload it first");
    check(&["driver", "590.44.01", "590.44.02"], "only `driver load` takes a version");
    check(&["plug", "H100"], "no GPU model");
    check(&["held", "--wait", "0"], "no call was blocked");
    check(&["--root", "/nonexistent", "show"], "no simulated GPUs in /nonexistent");
}

#[test]
fn catalogue_marks_unverified_figures() {
    let node = Node::create("L4");
    let listed = run_ok(&node, &["catalogue"]);
    for key in divvy_sim::catalogue::keys() {
        assert!(listed.contains(key), "{key}");
    }
    let line =
        |start: &str| listed.lines().find(|line| line.trim_start().starts_with(start)).map(str::to_owned);
    assert!(line("3g.90gb ").is_some_and(|line| line.ends_with("(unverified)")));
    assert!(line("3g.71gb ").is_some_and(|line| !line.ends_with("(unverified)")));
}
