//! Effects of boots, resets and lost GPUs on the node and its trees.

mod common;

use common::Node;
use divvy_sim::code::Code;
use divvy_sim::driver_root::replace_driver;
use divvy_sim::state::{EventKind, State};
use std::process::Command;

fn minors(state: &State) -> Vec<Option<u32>> {
    state.gpus.iter().map(|gpu| (!gpu.missing).then_some(gpu.minor)).collect()
}

#[test]
fn lost_gpu_is_missing_after_reboot_and_shifts_minors() {
    let node = Node::create("4xH100-SXM5-80GB");
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
    assert_eq!(minors(&read()), [Some(0), None, Some(1), Some(2)], "found at the next boot only");
    reboot();
    assert_eq!(minors(&read()), [Some(0), Some(1), Some(2), Some(3)]);
    assert!(node.has("dev/nvidia3") && node.has(&format!("sys/bus/pci/devices/{lost}/numa_node")));
}

#[test]
fn boot_and_reset_remove_instances_and_settings() {
    let check = |end: fn(&mut State) -> Result<(), Code>, mode: bool, timeslice: u32| {
        let node = Node::create("H100-SXM5-80GB");
        node.sim
            .update(|state| {
                state.set_mig_mode(0, true)?;
                let gi = state.create_gi(0, 9, None)?;
                state.create_ci(0, gi.id, 2, None)?;
                state.gpus[0].timeslice = 2;
                Ok(())
            })
            .expect("free slices");
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
fn instance_and_mode_changes_queue_events() {
    let node = Node::create("2xH100-SXM5-80GB");
    node.sim
        .update(|state| {
            state.set_mig_mode(1, true)?;
            let gi = state.create_gi(1, 19, None)?;
            state.xid(1, 94, Some((gi.id, 0)))?;
            state.destroy_gi(1, gi.id)
        })
        .expect("free slices");
    let state = node.sim.read().expect("a state");
    let kinds: Vec<_> = state.events.queue.iter().map(|event| (event.slot, event.kind)).collect();
    let change = (1, EventKind::MigConfigChange);
    assert_eq!(kinds, [change, change, (1, EventKind::Xid(94)), change]);
    assert!(state.events.queue.is_sorted_by_key(|event| event.seq));
}

#[test]
fn event_queue_is_bounded() {
    let node = Node::create("L4");
    node.sim.update(|state| (0..1000).try_for_each(|xid| state.xid(0, xid, None))).expect("a GPU");
    let events = node.sim.read().expect("a state").events.clone();
    assert_eq!((events.last, events.queue.len()), (1000, 128));
    assert_eq!(events.queue.last().map(|event| event.seq), Some(1000));
}

#[test]
fn modprobe_creates_the_device_nodes_of_a_bare_node() {
    let node = Node::create_with("2xH100-SXM5-80GB", |options| options.host.bare = true);
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
    assert!(!modprobe(&["-c", "2"]), "minor 2 does not exist");
    let cap = "dev/nvidia-caps/nvidia-cap1";
    std::fs::remove_file(node.sim.root().join(cap)).expect("there");
    assert!(modprobe(&["-f", "/proc/driver/nvidia/capabilities/mig/config"]));
    assert!(node.has(cap));
    assert!(!modprobe(&["-f", "/proc/driver/nvidia/version"]));
}

#[test]
fn driver_replacement_replaces_files_and_instances() {
    let node = Node::create("H100-SXM5-80GB");
    node.sim
        .update(|state| {
            state.set_mig_mode(0, true)?;
            state.create_gi(0, 19, None).map(drop)
        })
        .expect("free slices");
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
fn sysfs_has_the_pci_topology() {
    let node = Node::create("3xH100-SXM5-80GB,GB200");
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
