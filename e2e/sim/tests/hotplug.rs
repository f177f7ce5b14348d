//! Device nodes that come late, and GPUs that are added, removed or replaced.

mod common;

use common::Node;
use divvy_sim::State;
use divvy_sim::catalogue;
use divvy_sim::code::Code;
use std::collections::BTreeSet;
use std::process::Command;

fn update(node: &Node, change: impl FnOnce(&mut State) -> Result<(), Code>) {
    node.sim.update(change).expect("a change");
}

/// Names of the GPUs' device nodes.
fn nodes(node: &Node) -> Vec<String> {
    let names = std::fs::read_dir(node.sim.dev()).expect("a directory").flatten();
    let gpu = |name: &String| name.strip_prefix("nvidia").is_some_and(|minor| minor.parse::<u32>().is_ok());
    let mut names: Vec<String> =
        names.filter_map(|entry| entry.file_name().into_string().ok()).filter(gpu).collect();
    names.sort();
    names
}

/// UUIDs in `/proc`, of the GPUs that also have a driver in `/sys`.
fn listed(node: &Node) -> BTreeSet<String> {
    let dir = node.sim.root().join("proc/driver/nvidia/gpus");
    let bound = |bdf: &String| {
        node.has(&format!("sys/bus/pci/devices/{bdf}/driver"))
            && node.text(&format!("sys/bus/pci/devices/{bdf}/vendor")) == "0x10de\n"
    };
    let gpus = std::fs::read_dir(dir).expect("a directory").flatten();
    gpus.filter_map(|entry| entry.file_name().into_string().ok())
        .filter(bound)
        .filter_map(|bdf| {
            let text = node.text(&format!("proc/driver/nvidia/gpus/{bdf}/information"));
            Some(text.lines().find_map(|line| line.strip_prefix("GPU UUID: \t "))?.to_owned())
        })
        .collect()
}

fn uuids(node: &Node) -> BTreeSet<String> {
    let state = node.sim.read().expect("a state");
    state.listed().map(|(_, gpu)| gpu.uuid.clone()).collect()
}

#[test]
fn device_nodes_appear_one_after_the_other() {
    let node = Node::create_with("3xL4", |options| options.host.node_delay_ms = 600_000);
    assert_eq!((nodes(&node).len(), listed(&node).len()), (0, 3));
    let due: Vec<u64> =
        node.sim.read().expect("a state").gpus.iter().filter_map(|gpu| gpu.node_due_ms).collect();
    assert_eq!((due[1] - due[0], due[2] - due[1]), (600_000, 600_000));
    update(&node, |state| {
        state.gpus[0].node_due_ms = Some(1);
        Ok(())
    });
    drop(node.reopen().read());
    assert_eq!(nodes(&node), ["nvidia0"]);
    update(&node, |state| {
        state.host.node_delay_ms = 1;
        state.reboot();
        Ok(())
    });
    node.sim.create_late_nodes().expect("nodes");
    assert_eq!(nodes(&node), ["nvidia0", "nvidia1", "nvidia2"]);
}

#[test]
fn helper_creates_late_nodes_in_the_background() {
    let node = Node::create_with("2xL4", |options| {
        (options.host.node_delay_ms, options.host.bare) = (50, true);
    });
    let program = node.sim.root().join("usr/bin/nvidia-modprobe");
    assert!(Command::new(&program).arg("-u").status().expect("nvidia-modprobe").success());
    assert_eq!(listed(&node).len(), 2);
    // Nothing here reads the state, so only the helper can create them.
    while nodes(&node).len() < 2 {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn modprobe_of_a_slow_host_waits_for_the_node() {
    let node = Node::create_with("2xL4", |options| {
        (options.host.node_delay_ms, options.host.bare) = (20, true);
    });
    let program = node.sim.root().join("usr/bin/nvidia-modprobe");
    assert!(Command::new(program).args(["-c", "1"]).status().expect("nvidia-modprobe").success());
    assert!(node.has("dev/nvidia0") && node.has("dev/nvidia1"));
}

#[test]
fn plugged_gpu_is_listed_at_once() {
    let node = Node::create("2xL4");
    update(&node, |state| state.plug(catalogue::find("H100-SXM5-80GB").expect("a model")).map(drop));
    assert_eq!((listed(&node), uuids(&node).len()), (uuids(&node), 3));
    assert_eq!(nodes(&node), ["nvidia0", "nvidia1", "nvidia2"]);
    let full = Node::create("32xL4");
    let plugged = full.sim.update(|state| state.plug(catalogue::find("L4").expect("a model")));
    assert_eq!(plugged.map_err(Code::from).err(), Some(Code::InsufficientResources));
}

#[test]
fn unplugged_gpu_vanishes_until_a_board_replaces_it() {
    let node = Node::create("3xL4");
    let before = uuids(&node);
    update(&node, |state| state.unplug(1));
    assert_eq!(
        (nodes(&node), listed(&node)),
        (vec!["nvidia0".to_owned(), "nvidia2".to_owned()], uuids(&node))
    );
    let bdf = node.sim.read().expect("a state").gpus[1].bdf.clone();
    assert!(!node.has(&format!("sys/bus/pci/devices/{bdf}")));
    update(&node, |state| state.replace_gpu(1));
    let gpu = node.sim.read().expect("a state").gpus[1].clone();
    assert!(!before.contains(&gpu.uuid) && listed(&node).contains(&gpu.uuid));
    assert_eq!((gpu.minor, gpu.bdf), (1, bdf));
    assert_eq!(nodes(&node).len(), 3);
}

#[test]
fn migration_replaces_all_boards_at_the_next_boot() {
    let node = Node::create("2xL4");
    let before = uuids(&node);
    update(&node, |state| {
        state.migrate();
        Ok(())
    });
    assert_eq!(listed(&node), before);
    let mut all = before;
    for _ in 0..3 {
        update(&node, |state| {
            state.migrate();
            state.reboot();
            Ok(())
        });
        assert_eq!(listed(&node), uuids(&node));
        all.extend(uuids(&node));
    }
    assert_eq!(all.len(), 8);
    let now = uuids(&node);
    update(&node, |state| {
        state.reboot();
        Ok(())
    });
    assert_eq!(uuids(&node), now);
}
