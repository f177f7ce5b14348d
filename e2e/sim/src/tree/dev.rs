//! `/dev/nvidia*`.

use super::entry::{Entry, Tree, major};
use crate::sim::STATE_DIR;
use crate::state::{Gpu, State};
use crate::store::KERNEL_LOG;
use crate::visible_devices::{CAP_CONFIG, CAP_MONITOR, cap_ci, cap_gi};

/// Minors of the driver's control and mode-setting nodes.
const CTL: u32 = 255;
const MODESET: u32 = 254;

/// The driver's nodes and those of the GPUs.
pub(super) fn node(state: &State, tree: &mut Tree) {
    tree.insert("dev".to_owned(), Entry::Dir);
    tree.insert("dev/kmsg".to_owned(), Entry::Link(format!("../{STATE_DIR}/{KERNEL_LOG}")));
    let mut add = |path: &str, major: u32, minor: u32, mode: u32| {
        let entry = Entry::Node { major, minor, mode, real: state.host.mknod };
        tree.insert(format!("dev/{path}"), entry);
    };
    if state.modules.nvidia {
        add("nvidiactl", major::NVIDIA, CTL, 0o666);
        add(&cap(CAP_CONFIG), major::CAPS, CAP_CONFIG, 0o400);
        add(&cap(CAP_MONITOR), major::CAPS, CAP_MONITOR, 0o400);
        for (_, gpu) in state.listed().filter(|(_, gpu)| gpu.node) {
            add(&format!("nvidia{}", gpu.minor), major::NVIDIA, gpu.minor, 0o666);
        }
    }
    if state.modules.modeset {
        add("nvidia-modeset", major::NVIDIA, MODESET, 0o666);
    }
    if state.modules.uvm {
        add("nvidia-uvm", major::UVM, 0, 0o666);
        add("nvidia-uvm-tools", major::UVM, 1, 0o666);
    }
}

/// The capability nodes of a GPU's instances.
pub(super) fn instances(state: &State, gpu: &Gpu, tree: &mut Tree) {
    let mut add = |minor: u32| {
        let entry = Entry::Node { major: major::CAPS, minor, mode: 0o444, real: state.host.mknod };
        tree.insert(format!("dev/{}", cap(minor)), entry);
    };
    for gi in &gpu.instances {
        add(cap_gi(gpu.minor, gi.id));
        for ci in &gi.cis {
            add(cap_ci(gpu.minor, gi.id, ci.id));
        }
    }
}

fn cap(minor: u32) -> String {
    format!("nvidia-caps/nvidia-cap{minor}")
}
