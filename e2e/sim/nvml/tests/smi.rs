//! Output, effects and errors of `nvidia-smi`.
//!
//! This test program is also the `nvidia-smi` of the simulated driver root, so it has no test
//! harness.
#![allow(unsafe_code, reason = "the library is called through C")]

mod common;

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitCode};

use common::Node;
use divvy_sim::code::Code;
use divvy_sim::control::{Pattern, When};
use divvy_sim::state::State;

fn main() -> ExitCode {
    if let Some(code) = divvy_sim::command::multicall() {
        return code;
    }
    let tests: [(&str, fn()); 6] = [
        ("closed_pipe_ends_the_program", closed_pipe_ends_the_program),
        ("gpus_and_mig_devices_are_listed", gpus_and_mig_devices_are_listed),
        ("instances_are_created_listed_and_destroyed", instances_are_created_listed_and_destroyed),
        ("profile_list_matches_a_real_card", profile_list_matches_a_real_card),
        ("settings_without_nvml_call_change_the_state", settings_without_nvml_call_change_the_state),
        ("xml_matches_nvml", xml_matches_nvml),
    ];
    for (name, test) in tests {
        test();
        println!("test {name} ... ok");
    }
    ExitCode::SUCCESS
}

/// Runs `nvidia-smi` of the node. Returns its exit status and output.
fn smi(node: &Node, arguments: &str) -> (Option<i32>, String) {
    let program = node.dir.path().join("usr/bin/nvidia-smi");
    let output = Command::new(program).args(arguments.split_whitespace()).output().expect("nvidia-smi runs");
    (output.status.code(), String::from_utf8(output.stdout).expect("text"))
}

#[track_caller]
fn check(node: &Node, arguments: &str, status: i32, expected: &str) {
    let (code, text) = smi(node, arguments);
    assert_eq!(
        (code, text.trim_end()),
        (Some(status), expected.trim_matches('\n')),
        "nvidia-smi {arguments}"
    );
}

fn uuids(node: &Node) -> (String, Vec<String>) {
    let state = node.sim.read().expect("a state");
    let gpu = &state.gpus[0];
    (gpu.uuid.clone(), gpu.mig_devices().map(|(_, ci)| ci.uuid.clone()).collect())
}

fn closed_pipe_ends_the_program() {
    let node = Node::up("8xH100-SXM5-80GB");
    let program = node.dir.path().join("usr/bin/nvidia-smi");
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = Command::new(program).arg("-q").stdout(writer).output().expect("nvidia-smi runs");
    assert_eq!((output.status.signal(), String::from_utf8_lossy(&output.stderr)), (Some(13), "".into()));
}

fn gpus_and_mig_devices_are_listed() {
    let node = Node::up("H100-SXM5-80GB");
    let (gpu, _) = uuids(&node);
    check(&node, "-L", 0, &format!("GPU 0: NVIDIA H100 80GB HBM3 (UUID: {gpu})"));
    check(&node, "-mig 1 -i 0", 0, "Enabled MIG Mode for GPU 00000000:0A:00.0\nAll done.");
    smi(&node, "mig -cgi 3g.40gb:4,19:0 -C");
    let (gpu, migs) = uuids(&node);
    let expected = format!(
        "GPU 0: NVIDIA H100 80GB HBM3 (UUID: {gpu})
  MIG 3g.40gb     Device  0: (UUID: {})
  MIG 1g.10gb     Device  1: (UUID: {})",
        migs[0], migs[1]
    );
    check(&node, "-L", 0, &expected);
    check(&node, "-i 1 -L", 2, "No devices were found: 1");
    assert_eq!(smi(&node, "-nonsense").0, Some(2));
}

fn instances_are_created_listed_and_destroyed() {
    let node = Node::up("H100-SXM5-80GB,L4");
    check(&node, "mig -lgi", 6, "No MIG-enabled devices found.");
    smi(&node, "-mig 1 -i 0");
    check(&node, "mig -lgi", 6, "No GPU instances found: Not Found");
    let made = "
Successfully created GPU instance ID  2 on GPU  0 using profile MIG 3g.40gb (ID  9)
Successfully created compute instance ID  0 on GPU  0 GPU instance ID  2 using profile MIG 3g.40gb (ID  2)";
    check(&node, "mig -i 0 -cgi 9 -C", 0, made);
    let refused = "
Unable to create a GPU instance on GPU  0 using profile 0: Insufficient Resources
Failed to create GPU instances: Insufficient Resources";
    check(&node, "mig -cgi 0", 23, refused);
    let listed = "
+-------------------------------------------------------+
| GPU instances:                                        |
| GPU   Name             Profile  Instance   Placement  |
|                          ID       ID       Start:Size |
|=======================================================|
|   0  MIG 3g.40gb          9        2          4:4     |
+-------------------------------------------------------+";
    check(&node, "mig -lgi", 0, listed);
    let in_use = "
Unable to destroy GPU instance ID  2 from GPU  0: In use by another client
Failed to destroy GPU instances: In use by another client";
    check(&node, "mig -dgi -gi 2", 19, in_use);
    check(
        &node,
        "mig -dci -gi 2 -ci 0",
        0,
        "Successfully destroyed compute instance ID  0 from GPU  0 GPU instance ID  2",
    );
    check(&node, "mig -dgi", 0, "Successfully destroyed GPU instance ID  2 from GPU  0");
    check(&node, "-mig 0 -i 0", 0, "Disabled MIG Mode for GPU 00000000:0A:00.0\nAll done.");
}

fn profile_list_matches_a_real_card() {
    let node = Node::up("A100-SXM4-40GB");
    let (_, text) = smi(&node, "mig -lgip");
    let row = "
|   0  MIG 1g.5gb        19     0/7        4.75       No     14     0     0   |
|                                                             1     0     0   |";
    assert!(text.contains(row), "{text}");
    let placements = "
GPU  0 Profile ID 19 Placements: {0,1,2,3,4,5,6}:1
GPU  0 Profile ID 20 Placements: {0,1,2,3,4,5,6}:1
GPU  0 Profile ID 15 Placements: {0,2,4,6}:2
GPU  0 Profile ID 14 Placements: {0,2,4}:2
GPU  0 Profile ID  9 Placements: {0,4}:4
GPU  0 Profile ID  5 Placement : {0}:4
GPU  0 Profile ID  0 Placement : {0}:8";
    check(&node, "mig -lgipp", 0, placements);
}

fn settings_without_nvml_call_change_the_state() {
    let node = Node::up("2xL4");
    let (gpu, _) = uuids(&node);
    smi(&node, &format!("compute-policy -i {gpu} --set-timeslice 2"));
    check(
        &node,
        "compute-policy -l",
        0,
        "Timeslice for GPU 00000000:0A:00.0: Medium\nTimeslice for GPU 00000000:0B:00.0: Default",
    );
    assert_eq!(smi(&node, "compute-policy --set-timeslice=4").0, Some(2));
    for (code, status, text) in
        [(Code::NotSupported, 3, "Not Supported"), (Code::GpuIsLost, 15, "GPU is lost")]
    {
        let refuse = |state: &mut State| {
            state.clear_faults(None);
            state.add_fault(Pattern::new("compute-policy"), None, When::Before, code);
            Ok(())
        };
        node.sim.update(refuse).expect("a rule");
        check(&node, &format!("compute-policy -i {gpu} --set-timeslice 1"), status, text);
    }
    smi(&node, "-c EXCLUSIVE_PROCESS -i 1");
    let state = node.sim.read().expect("a state");
    let modes: Vec<_> = state.gpus.iter().map(|gpu| (gpu.timeslice, gpu.compute_mode)).collect();
    assert_eq!(modes, [(2, 0), (0, 3)]);
}

fn xml_matches_nvml() {
    let node = Node::up("H100-SXM5-80GB");
    smi(&node, "-mig 1");
    smi(&node, "mig -cgi 19:2 -C");
    let (_, text) = smi(&node, "-q -x");
    let (gpu, _) = uuids(&node);
    for part in [
        "<current_mig>Enabled</current_mig>",
        "<gpu_instance_id>9</gpu_instance_id>",
        "<multiprocessor_count>16</multiprocessor_count>",
        "<product_name>NVIDIA H100 80GB HBM3</product_name>",
        &format!("<uuid>{gpu}</uuid>"),
        "</nvidia_smi_log>",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let (_, csv) = smi(&node, "--query-gpu=index,mig.mode.current,memory.total --format=csv,noheader");
    assert_eq!(csv, "0, Enabled, 81559 MiB\n");
}
