//! `/sys`: the PCI tree with NUMA nodes, and the loaded modules.

use super::entry::{Entry, Tree};
use crate::state::{Gpu, State};

/// Number of CPUs of each NUMA node.
const CPUS_PER_NODE: u32 = 32;

/// Entries that do not depend on a GPU.
pub(super) fn node(state: &State, tree: &mut Tree) {
    for (module, there) in [
        ("nvidia", state.modules.nvidia),
        ("nvidia_uvm", state.modules.uvm),
        ("nvidia_modeset", state.modules.modeset),
    ] {
        if there {
            file(tree, format!("sys/module/{module}/version"), &state.driver);
            file(tree, format!("sys/module/{module}/initstate"), "live");
            file(tree, format!("sys/module/{module}/refcnt"), "0");
        }
    }
    let nodes = state.gpus.iter().filter_map(|gpu| gpu.numa).max().map_or(1, |last| last + 1);
    const NODES: &str = "sys/devices/system/node";
    let online = if nodes == 1 { "0".to_owned() } else { format!("0-{}", nodes - 1) };
    file(tree, format!("{NODES}/online"), &online);
    file(tree, format!("{NODES}/possible"), &online);
    for node in 0..nodes {
        let near = |other: u32| if other == node { "10" } else { "21" };
        let distance: Vec<&str> = (0..nodes).map(near).collect();
        file(tree, format!("{NODES}/node{node}/cpulist"), &cpus(Some(node)));
        file(tree, format!("{NODES}/node{node}/distance"), &distance.join(" "));
    }
    tree.insert("sys/bus/pci/devices".to_owned(), Entry::Dir);
}

/// A GPU and the bridges above it.
pub(super) fn gpu(slot: usize, gpu: &Gpu, bound: bool, tree: &mut Tree) {
    let mut dir = gpu.pcie_root.clone();
    for (depth, bridge) in gpu.bridges.iter().enumerate() {
        dir = format!("{dir}/{bridge}");
        let vendor = if depth == 0 { "0x8086" } else { "0x1000" };
        let path = format!("sys/devices/{dir}");
        file(tree, format!("{path}/vendor"), vendor);
        file(tree, format!("{path}/class"), "0x060400");
        file(tree, format!("{path}/numa_node"), &numa(gpu.numa));
        tree.insert(format!("sys/bus/pci/devices/{bridge}"), Entry::Link(format!("../../../devices/{dir}")));
    }
    dir = format!("{dir}/{}", gpu.bdf);
    tree.insert(format!("sys/bus/pci/devices/{}", gpu.bdf), Entry::Link(format!("../../../devices/{dir}")));
    let path = format!("sys/devices/{dir}");
    let model = gpu.model();
    let class = if model.display { 0x03_0000 } else { 0x03_0200 };
    let speed =
        ["2.5", "5.0", "8.0", "16.0", "32.0", "64.0"][(model.pcie_generation as usize).clamp(1, 6) - 1];
    let mut set = |name: &str, value: &str| file(tree, format!("{path}/{name}"), value);
    set("vendor", "0x10de");
    set("device", &format!("{:#06x}", model.device_id));
    set("subsystem_vendor", "0x10de");
    set("subsystem_device", &format!("{:#06x}", model.device_id));
    set("irq", &gpu.irq().to_string());
    set("revision", "0xa1");
    set("class", &format!("{class:#08x}"));
    set("numa_node", &numa(gpu.numa));
    set("local_cpulist", &cpus(gpu.numa));
    set("enable", "1");
    for which in ["max", "current"] {
        set(&format!("{which}_link_speed"), &format!("{speed} GT/s PCIe"));
        set(&format!("{which}_link_width"), "16");
    }
    set("resource", &resources(slot, model.bar1_mib));
    tree.insert(format!("{path}/config"), Entry::File(config(model.device_id, class)));
    let up = "../".repeat(dir.split('/').count() + 1);
    let group = format!("{up}kernel/iommu_groups/{}", slot + 10);
    tree.insert(format!("{path}/iommu_group"), Entry::Link(group));
    tree.insert(
        format!("sys/kernel/iommu_groups/{}/devices/{}", slot + 10, gpu.bdf),
        Entry::Link(format!("../../../../devices/{dir}")),
    );
    tree.insert(format!("{path}/subsystem"), Entry::Link(format!("{up}bus/pci")));
    if bound {
        tree.insert(format!("{path}/driver"), Entry::Link(format!("{up}bus/pci/drivers/nvidia")));
        tree.insert(
            format!("sys/bus/pci/drivers/nvidia/{}", gpu.bdf),
            Entry::Link(format!("../../../../devices/{dir}")),
        );
    }
}

fn file(tree: &mut Tree, path: String, text: &str) {
    tree.insert(path, Entry::File(format!("{text}\n").into_bytes()));
}

fn numa(node: Option<u32>) -> String {
    node.map_or("-1".to_owned(), |node| node.to_string())
}

fn cpus(node: Option<u32>) -> String {
    let first = node.unwrap_or(0) * CPUS_PER_NODE;
    format!("{first}-{}", first + CPUS_PER_NODE - 1)
}

/// The base address registers as `begin end flags`: registers, memory, and unused ones.
fn resources(slot: usize, bar1_mib: u64) -> String {
    let base = 0x10_0000_0000_u64 + ((slot as u64) << 40);
    let mut lines = vec![
        format!("{:#018x} {:#018x} {:#018x}", base, base + 0xff_ffff, 0x14_220c),
        format!(
            "{:#018x} {:#018x} {:#018x}",
            base + (1 << 39),
            base + (1 << 39) + (bar1_mib << 20) - 1,
            0x14_220c
        ),
    ];
    lines.resize(13, format!("{:#018x} {:#018x} {:#018x}", 0, 0, 0));
    lines.join("\n")
}

/// The standard header of the configuration space.
fn config(device: u16, class: u32) -> Vec<u8> {
    let mut bytes = vec![0; 256];
    bytes[0..2].copy_from_slice(&0x10de_u16.to_le_bytes());
    bytes[2..4].copy_from_slice(&device.to_le_bytes());
    bytes[8] = 0xa1;
    bytes[0x2c..0x2e].copy_from_slice(&0x10de_u16.to_le_bytes());
    bytes[0x2e..0x30].copy_from_slice(&device.to_le_bytes());
    bytes[9..12].copy_from_slice(&class.to_le_bytes()[0..3]);
    bytes
}
