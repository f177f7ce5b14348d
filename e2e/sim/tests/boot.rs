//! What boots, resets and losses do to the node and its trees.

mod common;

use common::Node;
use divvy_sim::code::Code;
use divvy_sim::state::{EventKind, State};
use divvy_sim::up::replace_driver;
use std::process::Command;

fn minors(state: &State) -> Vec<Option<u32>> {
    state.gpus.iter().map(|gpu| (!gpu.missing).then_some(gpu.minor)).collect()
}

#[test]
fn a_lost_gpu_is_missing_after_a_reboot_and_shifts_the_others() {
    let node = Node::up("4xH100-SXM5-80GB");
    let read = || node.sim.read().expect("a state");
    node.sim.update(|state| state.lose(1, false)).expect("a GPU");
    assert_eq!(read().gpu(1).map(drop), Err(Code::GpuIsLost));
    assert_eq!(minors(&read()), [Some(0), Some(1), Some(2), Some(3)]);
    let reboot = || {
        node.sim
            .update(|state| {
                state.reboot();
                Ok(())
            })
            .expect("a node");
    };
    reboot();
    assert_eq!(minors(&read()), [Some(0), None, Some(1), Some(2)]);
    assert_eq!(read().gpu(1).map(drop), Err(Code::NotFound));
    assert!(node.has("dev/nvidia2") && !node.has("dev/nvidia3"));
    let (lost, moved) = (read().gpus[1].bdf.clone(), read().gpus[2].bdf.clone());
    assert!(!node.has(&format!("proc/driver/nvidia/gpus/{lost}")));
    assert!(!node.has(&format!("sys/bus/pci/devices/{lost}")));
    let information = node.text(&format!("proc/driver/nvidia/gpus/{moved}/information"));
    assert!(information.contains("Device Minor: \t 1\n"), "{information}");
    node.sim.update(|state| state.find(1)).expect("a GPU");
    assert_eq!(minors(&read()), [Some(0), None, Some(1), Some(2)], "found at boot, not before");
    reboot();
    assert_eq!(minors(&read()), [Some(0), Some(1), Some(2), Some(3)]);
    assert!(node.has("dev/nvidia3") && node.has(&format!("sys/bus/pci/devices/{lost}/numa_node")));
}

#[test]
fn instances_and_settings_do_not_outlive_a_boot_or_reset() {
    let check = |end: fn(&mut State) -> Result<(), Code>, mode: bool, timeslice: u32| {
        let node = Node::up("H100-SXM5-80GB");
        node.sim
            .update(|state| {
                state.set_mig_mode(0, true)?;
                let gi = state.create_gi(0, 9, None)?;
                state.create_ci(0, gi.id, 2, None)?;
                state.gpus[0].timeslice = 2;
                Ok(())
            })
            .expect("room");
        let epoch = node.sim.read().expect("a state").gpus[0].epoch;
        node.sim.update(end).expect("idle");
        let state = node.sim.read().expect("a state");
        let gpu = &state.gpus[0];
        assert!(gpu.instances.is_empty() && gpu.epoch > epoch);
        assert_eq!((gpu.mig.current, gpu.timeslice), (mode, timeslice));
        assert!(!node.has("proc/driver/nvidia/capabilities/gpu0/mig/gi2"));
        assert!(!node.has("dev/nvidia-caps/nvidia-cap21"));
    };
    check(|state| state.reset(0, false), true, 2);
    check(
        |state| {
            state.reboot();
            Ok(())
        },
        false,
        0,
    );
}

#[test]
fn changes_of_instances_and_mode_are_announced() {
    let node = Node::up("2xH100-SXM5-80GB");
    node.sim
        .update(|state| {
            state.set_mig_mode(1, true)?;
            let gi = state.create_gi(1, 19, None)?;
            state.xid(1, 94, Some((gi.id, 0)))?;
            state.destroy_gi(1, gi.id)
        })
        .expect("room");
    let state = node.sim.read().expect("a state");
    let kinds: Vec<_> = state.events.queue.iter().map(|event| (event.slot, event.kind)).collect();
    let change = (1, EventKind::MigConfigChange);
    assert_eq!(kinds, [change, change, (1, EventKind::Xid(94)), change]);
    assert!(state.events.queue.is_sorted_by_key(|event| event.seq));
}

#[test]
fn the_event_queue_is_bounded() {
    let node = Node::up("L4");
    node.sim.update(|state| (0..1000).try_for_each(|xid| state.xid(0, xid, None))).expect("a GPU");
    let events = node.sim.read().expect("a state").events.clone();
    assert_eq!((events.last, events.queue.len()), (1000, 128));
    assert_eq!(events.queue.last().map(|event| event.seq), Some(1000));
}

#[test]
fn a_bare_node_gets_its_nodes_from_nvidia_modprobe() {
    let node = Node::up_with("2xH100-SXM5-80GB", |options| options.host.bare = true);
    let modprobe = |args: &[&str]| {
        let program = node.sim.root().join("usr/bin/nvidia-modprobe");
        Command::new(program).args(args).status().expect("nvidia-modprobe").success()
    };
    assert!(!node.has("dev/nvidiactl") && !node.text("proc/devices").contains("nvidia"));
    assert!(modprobe(&["-c", "0"]));
    assert!(node.has("dev/nvidiactl") && node.has("dev/nvidia0") && !node.has("dev/nvidia1"));
    assert!(!node.has("dev/nvidia-uvm"));
    assert!(modprobe(&["-u", "-c=1", "-m"]));
    assert!(node.has("dev/nvidia1") && node.has("dev/nvidia-uvm-tools") && node.has("dev/nvidia-modeset"));
    assert!(node.text("proc/devices").contains("508 nvidia-uvm\n"));
    assert!(!modprobe(&["-c", "2"]), "there is no third GPU");
    let cap = "dev/nvidia-caps/nvidia-cap1";
    std::fs::remove_file(node.sim.root().join(cap)).expect("there");
    assert!(modprobe(&["-f", "/proc/driver/nvidia/capabilities/mig/config"]));
    assert!(node.has(cap));
    assert!(!modprobe(&["-f", "/proc/driver/nvidia/version"]));
}

#[test]
fn another_driver_version_replaces_files_and_forgets_instances() {
    let node = Node::up("H100-SXM5-80GB");
    node.sim
        .update(|state| {
            state.set_mig_mode(0, true)?;
            state.create_gi(0, 19, None).map(drop)
        })
        .expect("room");
    replace_driver(&node.sim, "590.44.01").expect("a new driver");
    let state = node.sim.read().expect("a state");
    assert_eq!((state.driver.as_str(), state.gpus[0].instances.len()), ("590.44.01", 0));
    for name in ["libnvidia-ml", "libcuda"] {
        assert!(node.sim.library(&format!("{name}.so.590.44.01")).exists());
        assert!(!node.sim.library(&format!("{name}.so.580.95.05")).exists());
        let target = std::fs::read_link(node.sim.library(&format!("{name}.so.1")));
        assert_eq!(target.expect("a link").to_str(), Some(format!("{name}.so.590.44.01").as_str()));
    }
    assert!(node.text("proc/driver/nvidia/version").contains("  590.44.01  "));
    assert!(replace_driver(&node.sim, "../evil").is_err());
}

#[test]
fn sysfs_says_where_a_gpu_sits() {
    let node = Node::up("3xH100-SXM5-80GB,GB200");
    let state = node.sim.read().expect("a state");
    let path = |slot: usize| {
        let link = node.sim.root().join("sys/bus/pci/devices").join(&state.gpus[slot].bdf);
        let path = link.canonicalize().expect("a device");
        path.strip_prefix(node.sim.root().join("sys/devices")).expect("below devices").to_owned()
    };
    let root = |slot: usize| path(slot).components().next().map(|first| first.as_os_str().to_owned());
    for (slot, gpu) in state.listed() {
        assert_eq!(root(slot).as_deref(), Some(gpu.pcie_root.as_ref()));
        let text = |name: &str| node.text(&format!("sys/bus/pci/devices/{}/{name}", gpu.bdf));
        assert_eq!(text("vendor"), "0x10de\n");
        assert_eq!(text("numa_node"), format!("{}\n", gpu.numa.expect("a NUMA node")));
        assert!(node.has(&format!("sys/bus/pci/devices/{}/driver/{}", gpu.bdf, gpu.bdf)));
    }
    assert!(root(0) == root(1) && root(0) != root(2) && root(2) != root(3));
    assert_eq!(state.gpus[3].bdf, "0019:01:00.0");
}
