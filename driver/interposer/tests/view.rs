//! What NVML shows in a container with a share, and what it denies: by the simulated library, and by `nvidia-smi` over it.
//!
//! The program of this test stands in for `nvidia-smi` in the simulated driver root, so it has no test harness.

mod common;

use common::container::Node;
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = divvy_sim::command::multicall() {
        return code;
    }
    if common::container::answer() {
        return ExitCode::SUCCESS;
    }
    let tests: [(&str, fn()); 4] = [
        ("nvidia_smi_shows_the_share", nvidia_smi_shows_the_share),
        ("the_memory_of_the_other_share_does_not_show", the_memory_of_the_other_share_does_not_show),
        ("the_processes_of_the_other_share_do_not_show", the_processes_of_the_other_share_do_not_show),
        ("what_changes_a_device_is_denied", what_changes_a_device_is_denied),
    ];
    for (name, test) in tests {
        test();
        println!("test {name} ... ok");
    }
    ExitCode::SUCCESS
}

/// `nvidia-smi` of the node in a container with these shares: whether it succeeded, and what it printed.
fn smi(node: &Node, shares: &[common::container::Share], arguments: &str) -> (bool, String) {
    let container = node.container(shares);
    let mut command = container.command(&node.program("nvidia-smi"));
    let output = command.args(arguments.split_whitespace()).output().expect("nvidia-smi runs");
    (output.status.success(), String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

const MEMORY: &str = "--query-gpu=memory.total,memory.used,memory.free --format=csv,noheader,nounits";

fn nvidia_smi_shows_the_share() {
    let node = Node::up("L4");
    let share = node.share("claim", "share", node.policy(0, 1000));
    let shares = [share];
    assert_eq!(smi(&node, &shares, MEMORY), (true, "1000, 0, 1000".to_owned()));
    let container = node.container(&shares);
    let mut program = container.started();
    assert!(program.ask("alloc v2 300").starts_with("ok "));
    assert_eq!(smi(&node, &shares, MEMORY), (true, "1000, 300, 700".to_owned()));
    let (shown, without) = (smi(&node, &shares, "").1, smi(&node, &[], "").1);
    assert!(shown.contains("300MiB /   1000MiB"), "{shown}");
    assert!(without.contains(" 23034MiB"), "{without}");
}

fn the_memory_of_the_other_share_does_not_show() {
    let node = Node::up("L4");
    let one = [node.share("one", "share", node.policy(0, 1000))];
    let two = [node.share("two", "share", node.policy(0, 2000))];
    let container = node.container(&one);
    let mut program = container.started();
    assert!(program.ask("alloc v2 900").starts_with("ok "));
    assert_eq!(smi(&node, &two, MEMORY), (true, "2000, 0, 2000".to_owned()));
}

/// The pids in the table of processes that `nvidia-smi` prints: what stands before the kind of each, C.
fn pids(node: &Node, shares: &[common::container::Share]) -> Vec<String> {
    let (done, shown) = smi(node, shares, "");
    assert!(done, "{shown}");
    let rows = shown.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut pids: Vec<String> = rows
        .filter_map(|row| row.windows(2).find(|pair| pair[1] == "C").map(|pair| pair[0].to_owned()))
        .collect();
    pids.sort_unstable();
    pids
}

fn the_processes_of_the_other_share_do_not_show() {
    let node = Node::up("L4");
    let one = [node.share("one", "share", node.policy(0, 1000))];
    let two = [node.share("two", "share", node.policy(0, 2000))];
    let (first, second) = (node.container(&one), node.container(&two));
    let (mut first, mut second) = (first.started(), second.started());
    assert!(first.ask("alloc v2 100").starts_with("ok ") && second.ask("alloc v2 200").starts_with("ok "));
    let (first, second) = (first.pid().to_string(), second.pid().to_string());
    assert_eq!(pids(&node, &one), std::slice::from_ref(&first));
    assert_eq!(pids(&node, &two), std::slice::from_ref(&second));
    // The driver's own list, of which each share is shown its part.
    let mut both = [first, second];
    both.sort_unstable();
    assert_eq!(pids(&node, &[]), both);
}

fn what_changes_a_device_is_denied() {
    let node = Node::up("H100-SXM5-80GB");
    let share = [node.share("claim", "share", node.policy(0, 1000))];
    let (done, said) = smi(&node, &share, "-mig 1 -i 0");
    assert!(!done && said.contains("Insufficient Permissions"), "{said}");
    let (done, said) = smi(&node, &[], "-mig 1 -i 0");
    assert!(done, "without a share it is allowed: {said}");
}
