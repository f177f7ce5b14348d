//! `/proc/devices`, `/proc/driver/nvidia` and `/proc/driver/nvidia-caps`.

use super::entry::{Entry, Tree, major};
use crate::state::{Gpu, State};
use crate::visible_devices::{CAP_CONFIG, CAP_MONITOR, cap_ci, cap_gi};
use std::fmt::Write;

/// Number of GPUs, GPU instances and compute instances that the driver has capabilities for.
const GPUS: u32 = 32;
const GPU_INSTANCES: u32 = 15;
const COMPUTE_INSTANCES: u32 = 8;
/// The first minor after the capabilities of all GPUs.
const CAP_FABRIC_IMEX: u32 = 4323;

/// Entries that do not depend on a GPU.
pub(super) fn node(state: &State, tree: &mut Tree) {
    file(tree, "proc/devices", devices(state));
    file(tree, "proc/modules", modules(state));
    file(tree, "proc/sys/kernel/random/boot_id", boot_id(state));
    if !state.modules.nvidia {
        return;
    }
    let version = &state.driver;
    file(
        tree,
        "proc/driver/nvidia/version",
        format!(
            "NVRM version: NVIDIA UNIX Open Kernel Module for {}  {version}  Release Build  (simulated)\n\
             GCC version:  gcc version 13.3.0\n",
            std::env::consts::ARCH
        ),
    );
    file(tree, "proc/driver/nvidia/params", PARAMS.to_owned());
    file(tree, "proc/driver/nvidia/registry", "Binary: \"\"\n".to_owned());
    const CAPS: &str = "proc/driver/nvidia/capabilities";
    file(tree, &format!("{CAPS}/mig/config"), capability(CAP_CONFIG, 0o400));
    file(tree, &format!("{CAPS}/mig/monitor"), capability(CAP_MONITOR, 0o400));
    file(tree, &format!("{CAPS}/fabric-imex-mgmt"), capability(CAP_FABRIC_IMEX, 0o400));
    file(tree, "proc/driver/nvidia-caps/mig-minors", mig_minors());
    file(tree, "proc/driver/nvidia-caps/nvlink-minors", "fabric-mgmt 0\n".to_owned());
    file(tree, "proc/driver/nvidia-caps/sys-minors", format!("fabric-imex-mgmt {CAP_FABRIC_IMEX}\n"));
}

/// Entries of a GPU that is present.
pub(super) fn gpu(state: &State, gpu: &Gpu, tree: &mut Tree) {
    let text = format!(
        "Model: \t\t {}\nIRQ:   \t\t {}\nGPU UUID: \t {}\nVideo BIOS: \t {}\nBus Type: \t PCIe\n\
         DMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\nBus Location: \t {}\nDevice Minor: \t {}\n\
         GPU Firmware: \t {}\nGPU Excluded:\t No\n",
        gpu.model().product,
        gpu.irq(),
        gpu.uuid,
        gpu.vbios(),
        gpu.bdf,
        gpu.minor,
        state.driver,
    );
    file(tree, &format!("proc/driver/nvidia/gpus/{}/information", gpu.bdf), text);
    if gpu.model().mig.is_some() {
        tree.insert(format!("proc/driver/nvidia/capabilities/gpu{}/mig", gpu.minor), Entry::Dir);
    }
}

/// An id that differs between boots, and between simulators with different GPUs.
fn boot_id(state: &State) -> String {
    let node = state.gpus.first().map_or(0, |gpu| gpu.pdi) & 0xffff_ffff_ffff;
    format!("{:08x}-0000-4000-8000-{node:012x}\n", state.boot)
}

/// The capability files of a GPU's instances.
pub(super) fn instances(gpu: &Gpu, tree: &mut Tree) {
    for gi in &gpu.instances {
        let dir = format!("proc/driver/nvidia/capabilities/gpu{}/mig/gi{}", gpu.minor, gi.id);
        tree.insert(dir.clone(), Entry::Dir);
        file(tree, &format!("{dir}/access"), capability(cap_gi(gpu.minor, gi.id), 0o444));
        for ci in &gi.cis {
            tree.insert(format!("{dir}/ci{}", ci.id), Entry::Dir);
            let text = capability(cap_ci(gpu.minor, gi.id, ci.id), 0o444);
            file(tree, &format!("{dir}/ci{}/access", ci.id), text);
        }
    }
}

fn file(tree: &mut Tree, path: &str, text: String) {
    tree.insert(path.to_owned(), Entry::File(text.into_bytes()));
}

fn capability(minor: u32, mode: u32) -> String {
    format!("DeviceFileMinor: {minor}\nDeviceFileMode: {mode}\nDeviceFileModify: 1\n")
}

fn devices(state: &State) -> String {
    let mut text = String::from("Character devices:\n  1 mem\n  5 /dev/tty\n 10 misc\n");
    let mut line = |major: u32, name: &str| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{major:3} {name}");
    };
    if state.modules.nvidia {
        line(major::NVIDIA, "nvidia");
        if state.modules.modeset {
            line(major::NVIDIA, "nvidia-modeset");
        }
        line(major::NVIDIA, "nvidiactl");
        if state.modules.uvm {
            line(major::UVM, "nvidia-uvm");
        }
        line(major::CAPS, "nvidia-caps");
        line(major::CAPS_IMEX, "nvidia-caps-imex-channels");
    }
    text.push_str("\nBlock devices:\n  8 sd\n259 blkext\n");
    text
}

fn modules(state: &State) -> String {
    let loaded = state.modules;
    let mut text = String::new();
    for (name, there) in
        [("nvidia_uvm", loaded.uvm), ("nvidia_modeset", loaded.modeset), ("nvidia", loaded.nvidia)]
    {
        if there {
            let _ = writeln!(text, "{name} 4096000 0 - Live 0x0000000000000000 (O)");
        }
    }
    text
}

/// The complete table of minors. It does not depend on which instances exist.
fn mig_minors() -> String {
    let mut text = format!("config {CAP_CONFIG}\nmonitor {CAP_MONITOR}\n");
    for gpu in 0..GPUS {
        for gi in 0..GPU_INSTANCES {
            let _ = writeln!(text, "gpu{gpu}/gi{gi}/access {}", cap_gi(gpu, gi));
            for ci in 0..COMPUTE_INSTANCES {
                let _ = writeln!(text, "gpu{gpu}/gi{gi}/ci{ci}/access {}", cap_ci(gpu, gi, ci));
            }
        }
    }
    text
}

const PARAMS: &str = "\
ResmanDebugLevel: 4294967295
RmLogonRC: 1
ModifyDeviceFiles: 1
DeviceFileUID: 0
DeviceFileGID: 0
DeviceFileMode: 438
InitializeSystemMemoryAllocations: 1
UsePageAttributeTable: 4294967295
EnableMSI: 1
EnablePCIeGen3: 0
MemoryPoolSize: 0
EnableStreamMemOPs: 0
EnableResizableBar: 0
DynamicPowerManagement: 3
OpenRmEnableUnsupportedGpus: 1
";
