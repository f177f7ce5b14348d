//! Inventories with GPUs of the catalogue, as the driver would report them.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses only a part")]

use divvy_catalogue::GpuModel;
use divvy_model::Placement;
use divvy_model::inventory::{ComputeInstance, Gpu, GpuInstance, Inventory, Mig, MigMode, Origin};

/// A node with `count` GPUs of one model.
pub(crate) fn inventory_of(model: &str, count: u32) -> Inventory {
    node((0..count).map(|number| gpu(divvy_catalogue::find(model).unwrap().row(), number)).collect())
}

/// A node with these GPUs.
pub(crate) fn node(gpus: Vec<Gpu>) -> Inventory {
    let driver_version = "580.95.05".to_owned();
    Inventory { driver_version, cuda_version: (13, 0), gpus, ..Inventory::default() }
}

/// One GPU without instances.
pub(crate) fn gpu(model: &GpuModel, number: u32) -> Gpu {
    Gpu {
        uuid: format!("GPU-5d5a3bd7-0000-4000-8000-{number:012x}").into(),
        pci_bus_id: format!("0000:{:02x}:00.0", 0x1a + number),
        pcie_root: Some(format!("pci0000:{:02x}", 0x16 + number)),
        numa_node: Some(number % 2),
        nvlink_group: model.nvswitch.then(|| "f3a1".to_owned()),
        nvlink_peers: if model.nvswitch { 7 } else { 0 },
        ..divvy_catalogue::node::gpu(model, number)
    }
}

/// Adds an instance to a GPU and enables MIG mode.
pub(crate) fn with_instance(mut gpu: Gpu, profile_id: u32, start: u32, origin: Origin) -> Gpu {
    let size = gpu.profile(profile_id).unwrap().placements[0].size;
    let uuid = format!("MIG-{}-{profile_id}-{start}", gpu.number);
    if let Mig::Supported { mode, instances, .. } = &mut gpu.mig {
        *mode = MigMode::On;
        instances.push(GpuInstance {
            id: start + 1,
            profile_id,
            placement: Placement { start, size },
            compute_instances: vec![ComputeInstance { id: 0, profile_id: 0, uuid }],
            origin,
        });
    }
    gpu
}

/// The same GPU with another MIG mode.
pub(crate) fn in_mode(mut gpu: Gpu, wanted: MigMode) -> Gpu {
    if let Mig::Supported { mode, .. } = &mut gpu.mig {
        *mode = wanted;
    }
    gpu
}

/// Whether it is a device for adminAccess. Most tests leave these out: one of each GPU is published on
/// every server, whatever the GPU's modes are.
pub(crate) fn is_observer(device: &str) -> bool {
    device.ends_with("-observer")
}
