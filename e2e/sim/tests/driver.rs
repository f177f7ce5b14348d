//! Driver upgrades in the steps of the GPU operator, and processes with the driver root `/`.

mod common;

use common::Node;
use divvy_sim::Sim;
use divvy_sim::code::Code;
use divvy_sim::driver_root::{CreateError, load_driver, replace_driver, unload_driver};
use divvy_sim::state::{Holder, Process, ProcessKind, State};
use std::os::unix::fs::MetadataExt;
use std::process::Command;

const MODULE: &str = "sys/module/nvidia";

fn update(node: &Node, change: impl FnOnce(&mut State) -> Result<(), Code>) {
    node.sim.update(change).expect("a change");
}

fn module_inode(node: &Node) -> u64 {
    std::fs::metadata(node.sim.root().join(MODULE)).expect("a module").ino()
}

#[test]
fn unload_removes_the_driver_and_load_brings_it_back() {
    let node = Node::create("2xH100-SXM5-80GB");
    let (inode, root) = (module_inode(&node), node.sim.root().to_owned());
    update(&node, |state| {
        state.set_mig_mode(0, true)?;
        state.create_gi(0, 19, None).map(drop)
    });
    unload_driver(&node.sim).expect("no users");
    for path in [MODULE, "usr", "dev/nvidia0", "dev/nvidiactl", "dev/nvidia-uvm", "proc/driver/nvidia"] {
        assert!(!node.has(path), "{path}");
    }
    let bdf = node.sim.read().expect("a state").gpus[0].bdf.clone();
    assert!(node.has(&format!("sys/bus/pci/devices/{bdf}/vendor")));
    assert!(!node.has(&format!("sys/bus/pci/devices/{bdf}/driver")));
    update(&node, |state| {
        state.reboot();
        Ok(())
    });
    assert!(!node.has(MODULE), "a boot does not load an unmounted driver");
    unload_driver(&node.sim).expect("nothing to do");
    load_driver(&node.sim, "590.44.01").expect("no driver is loaded");
    let state = node.sim.read().expect("a state");
    assert_eq!((state.driver.as_str(), state.gpus[0].instances.len()), ("590.44.01", 0));
    assert_ne!(module_inode(&node), inode);
    assert_eq!(node.text(&format!("{MODULE}/version")), "590.44.01\n");
    for path in ["usr/bin/nvidia-smi", "dev/nvidia1", "dev/nvidia-uvm", "proc/driver/nvidia/version"] {
        assert!(node.has(path), "{path}");
    }
    assert!(node.sim.library("libnvidia-ml.so.590.44.01").exists());
    assert!(!node.sim.library("libnvidia-ml.so.580.95.05").exists());
    let refused = load_driver(&node.sim, "590.44.01");
    assert!(matches!(refused, Err(CreateError::Loaded { .. })), "{refused:?}");
    assert_eq!(root, node.reopen().root());
}

#[test]
fn every_load_has_a_new_module_directory() {
    let node = Node::create("L4");
    let mut inodes = vec![module_inode(&node)];
    unload_driver(&node.sim).expect("no users");
    load_driver(&node.sim, "580.95.05").expect("no driver is loaded");
    inodes.push(module_inode(&node));
    replace_driver(&node.sim, "590.44.01").expect("a new driver");
    inodes.push(module_inode(&node));
    unload_driver(&node.sim).expect("no users");
    replace_driver(&node.sim, "595.10.01").expect("a new driver");
    inodes.push(module_inode(&node));
    assert!(inodes.windows(2).all(|pair| pair[0] != pair[1]), "{inodes:?}");
    assert!(node.has("usr/bin/nvidia-smi"));
}

#[test]
fn used_module_is_not_unloaded() {
    let node = Node::create("L4");
    let refused = || assert!(matches!(unload_driver(&node.sim), Err(CreateError::InUse)));
    let (user, other) = (node.reopen().use_module(), node.sim.use_module());
    refused();
    drop((user, other));
    let name = || "python3".to_owned();
    let process = Process { pid: 1, name: name(), kind: ProcessKind::Compute, instance: None, memory_mib: 1 };
    update(&node, |state| state.add_process(0, process));
    refused();
    update(&node, |state| state.remove_process(None, 1));
    update(&node, |state| state.add_holder(0, Holder { pid: 2, name: name(), gi: None }));
    refused();
    update(&node, |state| state.remove_process(None, 2));
    unload_driver(&node.sim).expect("no users");
    assert!(!node.has(MODULE));
}

#[test]
fn board_identity_is_the_same_in_proc_and_sysfs() {
    let node = Node::create("H100-SXM5-80GB,GB200");
    for gpu in &node.sim.read().expect("a state").gpus {
        let information = node.text(&format!("proc/driver/nvidia/gpus/{}/information", gpu.bdf));
        let sys = |name: &str| node.text(&format!("sys/bus/pci/devices/{}/{name}", gpu.bdf));
        assert!(information.contains(&format!("IRQ:   \t\t {}\n", sys("irq").trim())), "{information}");
        assert!(information.contains(&format!("Video BIOS: \t {}\n", gpu.vbios())), "{information}");
        assert_eq!(sys("subsystem_device"), sys("device"));
    }
}

/// Runs only where this process may create a mount namespace.
#[test]
fn process_with_root_slash_renders_the_trees() {
    let node = Node::create("2xL4");
    let bdf = node.sim.read().expect("a state").gpus[0].bdf.clone();
    let gpu = format!("proc/driver/nvidia/gpus/{bdf}");
    assert!(node.has(&gpu));
    let script = format!(
        "mount -t tmpfs none /run && mkdir /run/divvy-sim || exit 77\n\
         mount --bind {} /run/divvy-sim || exit 77\n\
         exec {} -C / unplug 0",
        node.sim.dir().display(),
        env!("CARGO_BIN_EXE_divvy-sim")
    );
    let output = Command::new("unshare").args(["-rm", "sh", "-c", &script]).output();
    let Ok(output) = output else { return };
    if output.status.success() {
        assert!(!node.has(&gpu));
        assert!(Sim::open(node.sim.root()).is_ok());
    } else {
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(77) || error.contains("unshare"), "{error}");
    }
}
