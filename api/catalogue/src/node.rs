//! A node that does not exist yet, as its node daemon would describe it.
//!
//! Facts of the model are exact. Facts that differ from node to node have valid placeholders: the UUID
//! `GPU-00000000-0000-0000-0000-00000000000N`, the bus id `ffff:NN:00.0`, the PCIe root `pciffff:NN`,
//! and versions 1.0. Each GPU has its own PCIe root, and no NUMA node. GPUs on NVSwitches reach each
//! other; bridges between pairs of GPUs are no fact of the model and are left out.

use crate::{GpuModel, Model, Toggle};
use divvy_model::inventory::{Gpu, Inventory, Mig, MigMode, MigProfile, MigToggle, Presence};
use divvy_model::{GpuNumber, GpuPolicy, names};

/// Placeholder of the version of the GPU driver. It is lower than every real one, so claims that
/// require a version do not match it.
pub const DRIVER_VERSION: &str = "1.0";
/// Placeholder of the CUDA version.
pub const CUDA_VERSION: (u32, u32) = (1, 0);

/// A node with these GPUs, in the order of their numbers and without instances. `stored` is the MIG
/// mode of GPUs on which it survives a reboot; on others it is off. NVLink is not visible in MIG mode.
pub fn inventory(models: &[Model], stored: MigMode) -> Inventory {
    let mut gpus: Vec<Gpu> = (0..).zip(models).map(|(number, model)| gpu(model.row(), number)).collect();
    for gpu in &mut gpus {
        if let Mig::Supported { mode, toggle: MigToggle::NeedsReset, .. } = &mut gpu.mig {
            *mode = stored;
        }
    }
    let in_mig_mode = |gpu: &Gpu| matches!(gpu.mig, Mig::Supported { mode: MigMode::On, .. });
    let switched = |index: &usize| models[*index].row().nvswitch && !in_mig_mode(&gpus[*index]);
    let on_switch: Vec<usize> = (0..models.len()).filter(switched).collect();
    if let [first, _, ..] = on_switch[..] {
        let group = gpus[first].uuid.to_string();
        let peers = u32::try_from(on_switch.len() - 1).unwrap_or(u32::MAX);
        for index in on_switch {
            gpus[index].nvlink_group = Some(group.clone());
            gpus[index].nvlink_peers = peers;
        }
    }
    Inventory {
        removals: Default::default(),
        driver_version: DRIVER_VERSION.to_owned(),
        cuda_version: CUDA_VERSION,
        gpus,
        device_plugin: None,
    }
}

/// One GPU of that model, without NVLink.
pub fn gpu(model: &GpuModel, number: u32) -> Gpu {
    let mig = match &model.mig {
        None => Mig::Unsupported,
        Some(mig) => Mig::Supported {
            mode: MigMode::Off,
            toggle: match mig.toggle {
                Toggle::Live => MigToggle::Live,
                Toggle::Reset => MigToggle::NeedsReset,
            },
            profiles: profiles(model),
            instances: Vec::new(),
        },
    };
    Gpu {
        number: GpuNumber(number),
        uuid: format!("GPU-00000000-0000-0000-0000-{number:012x}").into(),
        minor: number,
        product: model.product.clone(),
        brand: names::brand(model.brand).to_owned(),
        architecture: names::architecture(model.architecture as u32).to_owned(),
        compute_capability: model.compute_capability,
        memory_bytes: model.memory_total_mib << 20,
        addressing_mode: names::addressing_mode(model.addressing as u32).map(str::to_owned),
        pci_bus_id: format!("ffff:{number:02x}:00.0"),
        pcie_root: Some(format!("pciffff:{number:02x}")),
        numa_node: None,
        nvlink_group: None,
        nvlink_peers: 0,
        mig,
        presence: Presence::Present,
        conditions: Vec::new(),
        policy: GpuPolicy::default(),
    }
}

/// The GPU instance profiles of a model, by id; empty without MIG.
pub fn profiles(model: &GpuModel) -> Vec<MigProfile> {
    let rows = model.mig.iter().flat_map(|mig| &mig.profiles);
    let mut profiles: Vec<MigProfile> = rows
        .map(|row| MigProfile {
            id: row.id,
            index: row.index,
            name: row.name.clone(),
            memory_mib: row.memory_mib,
            multiprocessors: row.sm,
            copy_engines: row.ce,
            decoders: row.dec,
            encoders: row.enc,
            jpeg_engines: row.jpg,
            ofa_engines: row.ofa,
            max_instances: row.instances,
            placements: row.placements().collect(),
        })
        .collect();
    profiles.sort_by_key(|profile| profile.id);
    profiles
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse_list;

    #[test]
    fn gpus_on_switches_form_one_nvlink_group() {
        let groups = |list: &str| -> Vec<(Option<String>, u32)> {
            let node = inventory(&parse_list(list).expect(list), MigMode::On);
            node.gpus.into_iter().map(|gpu| (gpu.nvlink_group, gpu.nvlink_peers)).collect()
        };
        let group = || Some("GPU-00000000-0000-0000-0000-000000000001".to_owned());
        assert_eq!(groups("L4,2xB200"), [(None, 0), (group(), 1), (group(), 1)]);
        assert_eq!(groups("H200"), [(None, 0)]);
        assert_eq!(groups("2xA30"), [(None, 0), (None, 0)]);
        assert_eq!(groups("2xA100-SXM4-80GB"), [(None, 0), (None, 0)], "in MIG mode");
    }
}
