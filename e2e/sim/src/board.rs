//! GPU boards: their ids and their place on the PCI bus.
//!
//! Pairs of GPUs share a PCIe root, as on boards with a switch for each pair. GPUs with their own
//! PCI domain do not.

use crate::catalogue::Model;
use crate::mig;
use crate::state::{Energy, Gpu, Health, Loss, MigMode};

/// A new board in the `position`-th place of the bus, without a device node.
pub(crate) fn board(model: Model, position: usize, pdi: u64, numa: Option<u32>) -> Gpu {
    let row = model.row();
    let (pair, half) = (position / 2, position % 2);
    let (domain, bus) = if row.own_pci_domain { (0x10 * pair + 8 + half, 0) } else { (0, 7 + 15 * pair) };
    let hop = |bus: usize, device: usize| format!("{domain:04x}:{bus:02x}:{device:02x}.0");
    let (bdf, bridges) = if row.own_pci_domain {
        (hop(1, 0), vec![hop(0, 0)])
    } else {
        (hop(bus + 3 + half, 0), vec![hop(bus, 1), hop(bus + 1, 0), hop(bus + 2, half)])
    };
    Gpu {
        model,
        uuid: mig::gpu_uuid(pdi),
        serial: serial(pdi),
        pdi,
        minor: 0,
        node: false,
        node_due_ms: None,
        bdf,
        pcie_root: format!("pci{domain:04x}:{bus:02x}"),
        bridges,
        numa,
        module: u32::try_from(position + 1).unwrap_or(u32::MAX),
        lost: false,
        loss: Loss::default(),
        missing: false,
        dead: false,
        epoch: 1,
        mig: MigMode::default(),
        compute_mode: 0,
        persistence: false,
        timeslice: 0,
        instances: Vec::new(),
        processes: Vec::new(),
        holders: Vec::new(),
        health: Health::default(),
        limits: Vec::new(),
        energy: Energy::starting_now(),
    }
}

/// Puts a new board of the same model into the place of a GPU.
pub(crate) fn replace(gpu: &mut Gpu, pdi: u64) {
    mig::boot(gpu);
    gpu.pdi = pdi;
    gpu.uuid = mig::gpu_uuid(pdi);
    gpu.serial = serial(pdi);
    gpu.mig = MigMode::default();
    gpu.health = Health::default();
    gpu.dead = false;
}

/// A device id that looks random (SplitMix64).
pub(crate) fn device_id(seed: u64, number: u64) -> u64 {
    let mut mixed = seed.wrapping_mul(0x0101).wrapping_add(number + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

fn serial(pdi: u64) -> String {
    format!("165{:010}", pdi % 10_000_000_000)
}
