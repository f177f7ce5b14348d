//! Topology of a GPU: CPU and memory affinity, PCI neighbours, NVLink and the fabric.
//!
//! As on real cards, MIG deactivates the NVLinks and removes the GPU from the fabric.

use divvy_sim::code::Code;
use divvy_sim::state::{Gpu, State};

use crate::abi::{
    FabricInfo, FabricInfoV2, FabricInfoV3, NvLinkInfoV1, NvLinkInfoV2, PciInfo, Plain, Versioned,
};
use crate::argument::{Array, Count, Out, Outcome, fixed};
use crate::discovery::pci_address;
use crate::handle::Device;
use crate::library::{Nvml, entry};

/// `NVML_NVLINK_MAX_LINKS`.
const MAX_LINKS: u32 = 18;
const NVLINK_TO_GPU: u32 = 0;
const NVLINK_TO_SWITCH: u32 = 2;
/// `NVML_GPU_FABRIC_STATE_COMPLETED`.
const FABRIC_COMPLETED: u32 = 3;
/// Healthy bandwidth, routes, access times and configuration: "false" in each field of two bits.
const FABRIC_HEALTHY: u32 = 0x1aa;
const FABRIC_SUMMARY_HEALTHY: u8 = 1;

/// Number of CPUs of this machine.
pub(crate) fn cpus() -> u32 {
    std::thread::available_parallelism().map_or(1, |count| count.get() as u32)
}

/// Sets bits in an array of `words` words.
fn set_bits(array: &Array<u64>, words: u32, bits: impl Iterator<Item = u32>) {
    let mut set = vec![0_u64; words as usize];
    for bit in bits {
        if let Some(word) = set.get_mut(bit as usize / 64) {
            *word |= 1 << (bit % 64);
        }
    }
    array.fill(set);
}

/// Distance of two GPUs in the PCI tree: `nvmlGpuTopologyLevel_t`.
fn distance(first: &Gpu, second: &Gpu) -> u32 {
    if first.uuid == second.uuid {
        return 0;
    }
    let shared = first.bridges.iter().zip(&second.bridges).take_while(|(one, other)| one == other).count();
    let last = first.bridges.len().min(second.bridges.len());
    match (first.pcie_root == second.pcie_root, shared) {
        (true, shared) if shared > 0 && shared == last => 10,
        (true, shared) if shared > 0 => 20,
        (true, _) => 30,
        (false, _) if first.numa == second.numa => 40,
        (false, _) => 50,
    }
}

fn links(gpu: &Gpu) -> u32 {
    if gpu.mig.current { 0 } else { gpu.model().nvlink_links }
}

/// The GPU, if it has a link with that number, active or not.
fn link(nvml: &Nvml, device: Device, link: u32) -> Outcome<&Gpu> {
    let (_, gpu) = device.whole(&nvml.state)?;
    if link >= MAX_LINKS {
        return Err(Code::InvalidArgument);
    }
    if link < gpu.model().nvlink_links { Ok(gpu) } else { Err(Code::NotSupported) }
}

/// Without NVSwitches, bridges connect pairs of neighbouring GPUs.
fn bridge_peer<'s>(state: &'s State, gpu: &Gpu) -> Option<&'s Gpu> {
    let all: Vec<&Gpu> =
        state.listed().map(|(_, gpu)| gpu).filter(|other| other.model == gpu.model).collect();
    let position = all.iter().position(|other| other.uuid == gpu.uuid)?;
    all.get(position ^ 1).copied()
}

fn remote(state: &State, gpu: &Gpu, link: u32) -> Outcome<PciInfo> {
    let (domain, bus, device, vendor) = if gpu.model().nvswitch {
        // Up to six NVSwitches, at the end of the first PCI domain.
        (0, 0xf0 + link % 6, 0, 0x22a3_10de)
    } else {
        let peer = bridge_peer(state, gpu).ok_or(Code::NotSupported)?;
        let (domain, bus, device) = pci_address(&peer.bdf).ok_or(Code::Unknown)?;
        (domain, bus, device, u32::from(peer.model().device_id) << 16 | 0x10de)
    };
    Ok(PciInfo {
        bus_id_legacy: fixed(&format!("{domain:04X}:{bus:02X}:{device:02X}.0")),
        domain,
        bus,
        device,
        pci_device_id: vendor,
        pci_subsystem_id: 0,
        bus_id: fixed(&format!("{domain:08X}:{bus:02X}:{device:02X}.0")),
    })
}

/// `nvmlNvlinkVersion_t`: 2.2, 3.0, 4.0 and 5.0.
fn nvlink_version(gpu: &Gpu) -> u32 {
    match gpu.model().architecture as u32 {
        ..=6 => 3,
        7 | 8 => 4,
        9 => 6,
        _ => 7,
    }
}

fn fabric(gpu: &Gpu) -> Outcome<FabricInfoV3> {
    if !gpu.model().fabric {
        return Err(Code::NotSupported);
    }
    // A GPU with MIG enabled is not registered.
    let registered = !gpu.mig.current;
    Ok(FabricInfoV3 {
        state: if registered { FABRIC_COMPLETED } else { 0 },
        health_mask: if registered { FABRIC_HEALTHY } else { 0 },
        health_summary: if registered { FABRIC_SUMMARY_HEALTHY } else { 0 },
        ..FabricInfoV3::zeroed()
    })
}

entry! {
    fn nvmlDeviceGetCpuAffinity(nvml, device: Device, words: u32, set: Array<u64>) {
        device.target(&nvml.state)?;
        if set.is_null() || words == 0 {
            return Err(Code::InvalidArgument);
        }
        set_bits(&set, words, 0..cpus());
        Ok(())
    }

    fn nvmlDeviceGetCpuAffinityWithinScope(nvml, device: Device, words: u32, set: Array<u64>, scope: u32) {
        device.target(&nvml.state)?;
        if set.is_null() || words == 0 || scope > 1 {
            return Err(Code::InvalidArgument);
        }
        set_bits(&set, words, 0..cpus());
        Ok(())
    }

    fn nvmlDeviceGetMemoryAffinity(nvml, device: Device, words: u32, set: Array<u64>, scope: u32) {
        let target = device.target(&nvml.state)?;
        if set.is_null() || words == 0 || scope > 1 {
            return Err(Code::InvalidArgument);
        }
        set_bits(&set, words, target.gpu.numa.into_iter());
        Ok(())
    }

    /// The NUMA node of the GPU's own memory. Only coherent GPUs have one.
    fn nvmlDeviceGetNumaNodeId(nvml, device: Device, node: Out<u32>) {
        let (_, gpu) = device.whole(&nvml.state)?;
        let numa = gpu.numa.filter(|_| gpu.model().own_pci_domain).ok_or(Code::NotSupported)?;
        node.set(numa + 1);
        Ok(())
    }

    fn nvmlDeviceGetTopologyCommonAncestor(nvml, first: Device, second: Device, level: Out<u32>) {
        level.set(distance(first.whole(&nvml.state)?.1, second.whole(&nvml.state)?.1));
        Ok(())
    }

    fn nvmlDeviceGetTopologyNearestGpus(
        nvml,
        device: Device,
        level: u32,
        count: Count,
        array: Array<Device>,
    ) {
        let (own, gpu) = device.whole(&nvml.state)?;
        if level > 50 || !level.is_multiple_of(10) {
            return Err(Code::InvalidArgument);
        }
        let near = nvml.gpus().filter(|(slot, other)| *slot != own && distance(gpu, other) == level);
        count.list_when_asked(&array, near.map(|(slot, gpu)| Device::of_gpu(slot, gpu)).collect())
    }

    /// 0 is OK, 5 is not supported. Depends on the capability index: reads, writes, NVLink,
    /// atomics, PCI.
    fn nvmlDeviceGetP2PStatus(nvml, first: Device, second: Device, index: u32, status: Out<u32>) {
        let (first, second) = (device_of(nvml, first)?, device_of(nvml, second)?);
        if index > 4 {
            return Err(Code::InvalidArgument);
        }
        let switched = first.model().nvswitch && second.model().nvswitch;
        let bridged = || bridge_peer(&nvml.state, first).is_some_and(|peer| peer.uuid == second.uuid);
        let linked = links(first) > 0 && links(second) > 0 && (switched || bridged());
        let near = !first.mig.current && !second.mig.current && distance(first, second) <= 30;
        let fine = match index {
            2 => linked,
            4 => near,
            _ => linked || near,
        };
        status.set(if fine { 0 } else { 5 });
        Ok(())
    }

    fn nvmlDeviceGetNvLinkState(nvml, device: Device, number: u32, active: Out<u32>) {
        active.set(u32::from(number < links(link(nvml, device, number)?)));
        Ok(())
    }

    fn nvmlDeviceGetNvLinkVersion(nvml, device: Device, number: u32, version: Out<u32>) {
        version.set(nvlink_version(link(nvml, device, number)?));
        Ok(())
    }

    fn nvmlDeviceGetNvLinkCapability(nvml, device: Device, number: u32, capability: u32, result: Out<u32>) {
        link(nvml, device, number)?;
        match capability {
            0..=3 | 5 => result.set(1),
            4 => result.set(0),
            _ => return Err(Code::InvalidArgument),
        }
        Ok(())
    }

    fn nvmlDeviceGetNvLinkRemoteDeviceType(nvml, device: Device, number: u32, kind: Out<u32>) {
        let gpu = link(nvml, device, number)?;
        if number >= links(gpu) {
            return Err(Code::NotSupported);
        }
        kind.set(if gpu.model().nvswitch { NVLINK_TO_SWITCH } else { NVLINK_TO_GPU });
        Ok(())
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo(nvml, device: Device, number: u32, info: Out<PciInfo>) {
        let gpu = link(nvml, device, number)?;
        info.set(remote_of_active(nvml, gpu, number)?);
        Ok(())
    }

    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(nvml, device: Device, number: u32, info: Out<PciInfo>) {
        let gpu = link(nvml, device, number)?;
        info.set(remote_of_active(nvml, gpu, number)?);
        Ok(())
    }

    /// Replay, recovery and checksum errors: always 0.
    fn nvmlDeviceGetNvLinkErrorCounter(nvml, device: Device, number: u32, counter: u32, value: Out<u64>) {
        link(nvml, device, number)?;
        if counter > 4 {
            return Err(Code::InvalidArgument);
        }
        value.set(0);
        Ok(())
    }

    fn nvmlDeviceResetNvLinkErrorCounters(nvml, device: Device, number: u32) {
        link(nvml, device, number)?;
        nvml.may_administer()
    }

    fn nvmlDeviceGetNvLinkInfo(nvml, device: Device, info: Out<NvLinkInfoV2>) {
        device.whole(&nvml.state)?;
        match info.version() {
            version @ NvLinkInfoV1::VERSION => {
                info.as_version().set(NvLinkInfoV1 { version, is_nvle_enabled: 0 });
            }
            version @ NvLinkInfoV2::VERSION => info.set(NvLinkInfoV2 { version, ..NvLinkInfoV2::zeroed() }),
            _ => return Err(Code::ArgumentVersionMismatch),
        }
        Ok(())
    }

    fn nvmlDeviceGetGpuFabricInfo(nvml, device: Device, info: Out<FabricInfo>) {
        let FabricInfoV3 { cluster_uuid, status, clique, state, .. } = fabric(device.whole(&nvml.state)?.1)?;
        info.set(FabricInfo { cluster_uuid, status, clique, state });
        Ok(())
    }

    fn nvmlDeviceGetGpuFabricInfoV(nvml, device: Device, info: Out<FabricInfoV3>) {
        let version = info.version();
        if !matches!(version, FabricInfoV2::VERSION | FabricInfoV3::VERSION) {
            return Err(Code::ArgumentVersionMismatch);
        }
        let found = FabricInfoV3 { version, ..fabric(device.whole(&nvml.state)?.1)? };
        if version == FabricInfoV3::VERSION {
            info.set(found);
            return Ok(());
        }
        let FabricInfoV3 { cluster_uuid, status, clique, state, health_mask, .. } = found;
        info.as_version().set(FabricInfoV2 { version, cluster_uuid, status, clique, state, health_mask });
        Ok(())
    }
}

fn device_of(nvml: &Nvml, device: Device) -> Outcome<&Gpu> {
    Ok(device.whole(&nvml.state)?.1)
}

fn remote_of_active(nvml: &Nvml, gpu: &Gpu, number: u32) -> Outcome<PciInfo> {
    if number >= links(gpu) {
        return Err(Code::NotSupported);
    }
    remote(&nvml.state, gpu, number)
}
