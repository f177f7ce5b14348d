//! Identity of a device: names, numbers, memory, PCI address, and modes that do not change.

use divvy_sim::catalogue::Addressing;
use divvy_sim::code::Code;
use divvy_sim::state::Gpu;

use crate::abi::{
    AddressingMode, Bar1Memory, BridgeChips, C2cModeInfo, Capabilities, Memory, MemoryV2, PciInfo,
    PciInfoExt, Pdi, Plain, PlatformInfo,
};
use crate::argument::{Array, MaybeOut, Out, Outcome, TextOut, fixed};
use crate::discovery::pci_address;
use crate::handle::{Device, Target};
use crate::library::entry;

const MIB: u64 = 1 << 20;
/// NVIDIA's PCI vendor id.
const VENDOR: u32 = 0x10de;
const DISPLAY_CLASS: u32 = 3;

/// Total, reserved and used bytes. Compute instances share the memory of their GPU instance.
fn memory(target: &Target<'_>) -> MemoryV2 {
    let model = target.gpu.model();
    let (total, reserved, used) = match target.mig {
        None => (model.memory_total_mib, model.memory_reserved_mib, target.gpu.used_mib(None)),
        Some((gi, _)) => {
            let size = model.profile(gi.profile).map_or(0, |profile| profile.memory_mib);
            // Reserved memory of an empty instance, in proportion to its slices.
            (size, size.min(16 * u64::from(gi.placement.size)), target.gpu.used_mib(Some(gi.id)))
        }
    };
    let used = used.min(total - reserved);
    MemoryV2 {
        version: 0,
        total: total * MIB,
        reserved: reserved * MIB,
        free: (total - reserved - used) * MIB,
        used: used * MIB,
    }
}

fn pci(gpu: &Gpu) -> Outcome<PciInfo> {
    let (domain, bus, device) = pci_address(&gpu.bdf).ok_or(Code::Unknown)?;
    Ok(PciInfo {
        bus_id_legacy: fixed(&format!("{domain:04X}:{bus:02X}:{device:02X}.0")),
        domain,
        bus,
        device,
        pci_device_id: u32::from(gpu.model().device_id) << 16 | VENDOR,
        pci_subsystem_id: u32::from(gpu.model().device_id) << 16 | VENDOR,
        bus_id: fixed(&format!("{domain:08X}:{bus:02X}:{device:02X}.0")),
    })
}

entry! {
    fn nvmlDeviceGetName(nvml, device: Device, name: TextOut, length: u32) {
        let target = device.target(&nvml.state)?;
        let product = &target.gpu.model().product;
        match target.mig {
            None => name.set(product, length),
            Some((gi, ci)) => {
                let profile = crate::compute_instance::name(target.gpu, gi, ci.profile).ok_or(Code::Unknown)?;
                name.set(&format!("{product} MIG {profile}"), length)
            }
        }
    }

    fn nvmlDeviceGetUUID(nvml, device: Device, uuid: TextOut, length: u32) {
        let target = device.target(&nvml.state)?;
        uuid.set(target.mig.map_or(&target.gpu.uuid, |(_, ci)| &ci.uuid), length)
    }

    fn nvmlDeviceGetSerial(nvml, device: Device, serial: TextOut, length: u32) {
        serial.set(&device.target(&nvml.state)?.gpu.serial, length)
    }

    fn nvmlDeviceGetMinorNumber(nvml, device: Device, minor: Out<u32>) {
        minor.set(device.target(&nvml.state)?.gpu.minor);
        Ok(())
    }

    fn nvmlDeviceGetModuleId(nvml, device: Device, module: Out<u32>) {
        module.set(device.whole(&nvml.state)?.1.module);
        Ok(())
    }

    fn nvmlDeviceGetBrand(nvml, device: Device, brand: Out<u32>) {
        brand.set(device.target(&nvml.state)?.gpu.model().brand);
        Ok(())
    }

    fn nvmlDeviceGetArchitecture(nvml, device: Device, architecture: Out<u32>) {
        architecture.set(device.target(&nvml.state)?.gpu.model().architecture as u32);
        Ok(())
    }

    fn nvmlDeviceGetCudaComputeCapability(nvml, device: Device, major: Out<u32>, minor: Out<u32>) {
        let capability = device.target(&nvml.state)?.gpu.model().compute_capability;
        major.set(capability.0);
        minor.set(capability.1);
        Ok(())
    }

    fn nvmlDeviceGetNumGpuCores(nvml, device: Device, cores: Out<u32>) {
        let (_, gpu) = device.whole(&nvml.state)?;
        let per_sm = if matches!(gpu.model().compute_capability, (7, 5) | (8, 0)) { 64 } else { 128 };
        cores.set(gpu.model().multiprocessors * per_sm);
        Ok(())
    }

    fn nvmlDeviceGetMemoryInfo(nvml, device: Device, info: Out<Memory>) {
        // The first version of the structure includes reserved memory in used memory.
        let state = nvml.state_with_gpu_processes()?;
        let MemoryV2 { total, reserved, free, used, .. } = memory(&device.target(state)?);
        info.set(Memory { total, free, used: used + reserved });
        Ok(())
    }

    fn nvmlDeviceGetMemoryInfo_v2(nvml, device: Device, info: Out<MemoryV2>) {
        info.expect_version()?;
        let state = nvml.state_with_gpu_processes()?;
        info.set(MemoryV2 { version: info.version(), ..memory(&device.target(state)?) });
        Ok(())
    }

    fn nvmlDeviceGetBAR1MemoryInfo(nvml, device: Device, info: Out<Bar1Memory>) {
        let target = device.target(&nvml.state)?;
        let model = target.gpu.model();
        let grid = model.mig.as_ref().map_or(1, |mig| mig.grid);
        let share = target.mig.map_or(grid, |(gi, _)| gi.placement.size);
        let total = model.bar1_mib * MIB / u64::from(grid) * u64::from(share);
        let used = MIB.min(total);
        info.set(Bar1Memory { total, free: total - used, used });
        Ok(())
    }

    fn nvmlDeviceGetPciInfo(nvml, device: Device, info: Out<PciInfo>) {
        info.set(pci(device.target(&nvml.state)?.gpu)?);
        Ok(())
    }

    fn nvmlDeviceGetPciInfo_v2(nvml, device: Device, info: Out<PciInfo>) {
        info.set(pci(device.target(&nvml.state)?.gpu)?);
        Ok(())
    }

    fn nvmlDeviceGetPciInfo_v3(nvml, device: Device, info: Out<PciInfo>) {
        info.set(pci(device.target(&nvml.state)?.gpu)?);
        Ok(())
    }

    fn nvmlDeviceGetPciInfoExt(nvml, device: Device, info: Out<PciInfoExt>) {
        info.expect_version()?;
        let gpu = device.target(&nvml.state)?.gpu;
        let PciInfo { domain, bus, device, pci_device_id, pci_subsystem_id, bus_id, .. } = pci(gpu)?;
        info.set(PciInfoExt {
            version: info.version(),
            domain,
            bus,
            device,
            pci_device_id,
            pci_subsystem_id,
            base_class: DISPLAY_CLASS,
            sub_class: if gpu.model().display { 0 } else { 2 },
            bus_id,
        });
        Ok(())
    }

    fn nvmlDeviceGetPdi(nvml, device: Device, info: Out<Pdi>) {
        info.expect_version()?;
        info.set(Pdi { version: info.version(), value: device.whole(&nvml.state)?.1.pdi });
        Ok(())
    }

    /// Both versions have one layout and the same module id. Racks are not simulated.
    fn nvmlDeviceGetPlatformInfo(nvml, device: Device, info: Out<PlatformInfo>) {
        let first = size_of::<PlatformInfo>() as u32 | 1 << 24;
        if info.version() != first {
            info.expect_version()?;
        }
        let (_, gpu) = device.whole(&nvml.state)?;
        if !gpu.model().own_pci_domain {
            return Err(Code::NotSupported);
        }
        info.set(PlatformInfo {
            version: info.version(),
            peer_type: 1,
            module_id: gpu.module as u8,
            host_id: 1,
            ..PlatformInfo::zeroed()
        });
        Ok(())
    }

    fn nvmlDeviceGetAddressingMode(nvml, device: Device, mode: Out<AddressingMode>) {
        mode.expect_version()?;
        let value = device.target(&nvml.state)?.gpu.model().addressing as u32;
        mode.set(AddressingMode { version: mode.version(), value });
        Ok(())
    }

    fn nvmlDeviceGetC2cModeInfoV(nvml, device: Device, info: Out<C2cModeInfo>) {
        match device.whole(&nvml.state)?.1.model().addressing {
            Addressing::Hmm => Err(Code::NotSupported),
            Addressing::Ats => {
                info.set(C2cModeInfo { is_c2c_enabled: 1 });
                Ok(())
            }
        }
    }

    fn nvmlDeviceGetCapabilities(nvml, device: Device, capabilities: Out<Capabilities>) {
        capabilities.expect_version()?;
        device.whole(&nvml.state)?;
        capabilities.set(Capabilities { version: capabilities.version(), mask: 0 });
        Ok(())
    }

    fn nvmlDeviceGetBoardId(nvml, device: Device, board: Out<u32>) {
        let (domain, bus, device) = pci_address(&device.whole(&nvml.state)?.1.bdf).ok_or(Code::Unknown)?;
        board.set(domain << 16 | bus << 8 | device);
        Ok(())
    }

    fn nvmlDeviceGetMultiGpuBoard(nvml, device: Device, multi: Out<u32>) {
        device.whole(&nvml.state)?;
        multi.set(0);
        Ok(())
    }

    fn nvmlDeviceOnSameBoard(nvml, first: Device, second: Device, same: Out<u32>) {
        let boards = (first.whole(&nvml.state)?.0, second.whole(&nvml.state)?.0);
        same.set(u32::from(boards.0 == boards.1));
        Ok(())
    }

    fn nvmlDeviceGetBridgeChipInfo(nvml, device: Device, _chips: Out<BridgeChips>) {
        device.whole(&nvml.state)?;
        Err(Code::NotSupported)
    }

    fn nvmlDeviceGetBoardPartNumber(nvml, device: Device, part: TextOut, length: u32) {
        let (_, gpu) = device.whole(&nvml.state)?;
        part.set(&format!("900-2{:04X}-0000-000", gpu.model().device_id), length)
    }

    fn nvmlDeviceGetVbiosVersion(nvml, device: Device, version: TextOut, length: u32) {
        let (_, gpu) = device.whole(&nvml.state)?;
        version.set(&gpu.vbios(), length)
    }

    fn nvmlDeviceGetInforomImageVersion(nvml, device: Device, version: TextOut, length: u32) {
        let (_, gpu) = device.whole(&nvml.state)?;
        version.set(&format!("G{:03}.0200.00.05", gpu.model().device_id % 1000), length)
    }

    fn nvmlDeviceGetInforomVersion(nvml, device: Device, object: u32, version: TextOut, length: u32) {
        device.whole(&nvml.state)?;
        match object {
            0 => version.set("2.1", length),
            1 => version.set("7.16", length),
            2 | 3 => Err(Code::NotSupported),
            _ => Err(Code::InvalidArgument),
        }
    }

    fn nvmlDeviceGetInforomConfigurationChecksum(nvml, device: Device, checksum: Out<u32>) {
        checksum.set(device.whole(&nvml.state)?.1.pdi as u32);
        Ok(())
    }

    fn nvmlDeviceValidateInforom(nvml, device: Device) {
        device.whole(&nvml.state).map(drop)
    }

    fn nvmlDeviceGetGspFirmwareVersion(nvml, device: Device, version: TextOut) {
        device.whole(&nvml.state)?;
        version.set(&nvml.state.driver, 64)
    }

    fn nvmlDeviceGetGspFirmwareMode(nvml, device: Device, enabled: Out<u32>, default: Out<u32>) {
        device.whole(&nvml.state)?;
        enabled.set(1);
        default.set(1);
        Ok(())
    }

    fn nvmlDeviceGetBusType(nvml, device: Device, bus: Out<u32>) {
        device.whole(&nvml.state)?;
        bus.set(2);
        Ok(())
    }

    /// Bare metal, or a GPU passed through to a virtual machine.
    fn nvmlDeviceGetVirtualizationMode(nvml, device: Device, mode: Out<u32>) {
        device.target(&nvml.state)?;
        mode.set(u32::from(nvml.state.host.vm));
        Ok(())
    }

    fn nvmlDeviceGetDisplayMode(nvml, device: Device, mode: Out<u32>) {
        device.whole(&nvml.state)?;
        mode.set(0);
        Ok(())
    }

    fn nvmlDeviceGetDisplayActive(nvml, device: Device, active: Out<u32>) {
        device.whole(&nvml.state)?;
        active.set(0);
        Ok(())
    }

    fn nvmlDeviceGetPersistenceMode(nvml, device: Device, mode: Out<u32>) {
        mode.set(u32::from(device.target(&nvml.state)?.gpu.persistence));
        Ok(())
    }

    fn nvmlDeviceSetPersistenceMode(nvml, device: Device, mode: u32) {
        let (slot, _) = device.whole(&nvml.state)?;
        if mode > 1 {
            return Err(Code::InvalidArgument);
        }
        nvml.may_administer()?;
        nvml.change(|state| {
            state.gpu_mut(slot)?.persistence = mode == 1;
            Ok(())
        })
    }

    fn nvmlDeviceGetComputeMode(nvml, device: Device, mode: Out<u32>) {
        mode.set(device.target(&nvml.state)?.gpu.compute_mode);
        Ok(())
    }

    /// Mode 1, exclusive thread, is deprecated and treated as mode 3, exclusive process.
    fn nvmlDeviceSetComputeMode(nvml, device: Device, mode: u32) {
        let (slot, _) = device.whole(&nvml.state)?;
        let mode = match mode {
            0 | 2 | 3 => mode,
            1 => 3,
            _ => return Err(Code::InvalidArgument),
        };
        nvml.may_administer()?;
        nvml.change(|state| {
            state.gpu_mut(slot)?.compute_mode = mode;
            Ok(())
        })
    }

    fn nvmlDeviceGetGpuOperationMode(nvml, device: Device, _current: Out<u32>, _pending: Out<u32>) {
        device.whole(&nvml.state)?;
        Err(Code::NotSupported)
    }

    fn nvmlDeviceGetSupportedPerformanceStates(nvml, device: Device, states: Array<u32>, bytes: u32) {
        device.whole(&nvml.state)?;
        // P0, then "unknown" up to the end of the array.
        if states.is_null() || bytes < 4 {
            return Err(if states.is_null() { Code::InvalidArgument } else { Code::InsufficientSize });
        }
        states.fill((0..bytes / 4).map(|at| if at == 0 { 0 } else { 32 }));
        Ok(())
    }

    fn nvmlDeviceGetDriverModel(nvml, device: Device, _current: MaybeOut<u32>, _pending: MaybeOut<u32>) {
        device.whole(&nvml.state)?;
        Err(Code::NotSupported)
    }
}
