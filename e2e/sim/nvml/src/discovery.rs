//! Finds devices by index, UUID, PCI address and serial number.
//!
//! Only GPUs with a node in `/dev` at the first init are counted. A container thus finds only its
//! own GPUs, and a node that appears later is found after the next init. A MIG device is
//! found by its UUID in the current format and in that before R470, `MIG-GPU-<uuid>/<gi>/<ci>`.

use divvy_sim::code::Code;
use divvy_sim::state::Gpu;

use crate::abi::{PciInfo, Uuid};
use crate::argument::{Out, Outcome, TextIn};
use crate::handle::Device;
use crate::library::{Nvml, entry};

/// `NVML_UUID_TYPE_ASCII` and `_BINARY`.
const UUID_ASCII: u32 = 1;
const UUID_BINARY: u32 = 2;

fn by_index(nvml: &Nvml, index: u32) -> Outcome<Device> {
    let (slot, gpu) = nvml.gpus().nth(index as usize).ok_or(Code::InvalidArgument)?;
    reachable(slot, gpu)
}

fn reachable(slot: usize, gpu: &Gpu) -> Outcome<Device> {
    gpu.failure().map_or(Ok(Device::of_gpu(slot, gpu)), Err)
}

fn by_uuid(nvml: &Nvml, wanted: &str) -> Outcome<Device> {
    for (slot, gpu) in nvml.gpus() {
        if gpu.uuid.eq_ignore_ascii_case(wanted) {
            return reachable(slot, gpu);
        }
        for (gi, ci) in nvml.mig_devices(gpu) {
            let legacy = || format!("MIG-{}/{}/{}", gpu.uuid, gi.id, ci.id);
            if ci.uuid.eq_ignore_ascii_case(wanted) || legacy().eq_ignore_ascii_case(wanted) {
                return reachable(slot, gpu).map(|_| Device::of_mig(slot, gi.id, ci));
            }
        }
    }
    Err(Code::NotFound)
}

/// `0000:17:00.0`, `00000000:17:00.0`, `17:00.0` and `17:00` are equivalent, in upper or lower
/// case.
fn by_pci(nvml: &Nvml, wanted: &str) -> Outcome<Device> {
    let address = pci_address(wanted).ok_or(Code::InvalidArgument)?;
    let (slot, gpu) =
        nvml.gpus().find(|(_, gpu)| pci_address(&gpu.bdf) == Some(address)).ok_or(Code::NotFound)?;
    reachable(slot, gpu)
}

fn is_at(gpu: &Gpu, wanted: &PciInfo) -> bool {
    pci_address(&gpu.bdf) == Some((wanted.domain, wanted.bus, wanted.device))
}

fn remove(nvml: &Nvml, wanted: &PciInfo) -> Outcome {
    nvml.may_administer()?;
    nvml.change(|state| {
        let gpu =
            state.gpus.iter_mut().find(|gpu| !gpu.missing && is_at(gpu, wanted)).ok_or(Code::NotFound)?;
        if !gpu.processes.is_empty() || !gpu.holders.is_empty() || !gpu.instances.is_empty() {
            return Err(Code::InUse);
        }
        gpu.missing = true;
        Ok(())
    })
}

/// PCI domain, bus and device.
pub(crate) fn pci_address(text: &str) -> Option<(u32, u32, u32)> {
    let text = text.split_once('.').map_or(text, |(address, _function)| address);
    let mut parts = text.rsplit(':').map(|part| u32::from_str_radix(part, 16));
    let (device, bus) = (parts.next()?.ok()?, parts.next()?.ok()?);
    let domain = parts.next().unwrap_or(Ok(0)).ok()?;
    parts.next().is_none().then_some((domain, bus, device))
}

entry! {
    fn nvmlDeviceGetCount(nvml, count: Out<u32>) {
        count.set(nvml.gpus().count() as u32);
        Ok(())
    }

    fn nvmlDeviceGetCount_v2(nvml, count: Out<u32>) {
        count.set(nvml.gpus().count() as u32);
        Ok(())
    }

    fn nvmlDeviceGetHandleByIndex(nvml, index: u32, device: Out<Device>) {
        device.set(by_index(nvml, index)?);
        Ok(())
    }

    fn nvmlDeviceGetHandleByIndex_v2(nvml, index: u32, device: Out<Device>) {
        device.set(by_index(nvml, index)?);
        Ok(())
    }

    fn nvmlDeviceGetHandleByUUID(nvml, uuid: TextIn, device: Out<Device>) {
        device.set(by_uuid(nvml, uuid.text()?)?);
        Ok(())
    }

    fn nvmlDeviceGetHandleByUUIDV(nvml, uuid: Out<Uuid>, device: Out<Device>) {
        uuid.expect_version()?;
        let Uuid { kind, value, .. } = uuid.get();
        let found = match kind {
            UUID_ASCII => {
                let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
                let text = std::str::from_utf8(value.get(..end).unwrap_or_default());
                by_uuid(nvml, text.map_err(|_| Code::NotFound)?)?
            }
            UUID_BINARY => {
                let digits: String = value.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
                let dashed = [(0, 8), (8, 12), (12, 16), (16, 20), (20, 32)]
                    .map(|(from, to)| digits.get(from..to).unwrap_or_default())
                    .join("-");
                by_uuid(nvml, &format!("GPU-{dashed}")).or_else(|_| by_uuid(nvml, &format!("MIG-{dashed}")))?
            }
            _ => return Err(Code::InvalidArgument),
        };
        device.set(found);
        Ok(())
    }

    fn nvmlDeviceGetHandleByPciBusId(nvml, address: TextIn, device: Out<Device>) {
        device.set(by_pci(nvml, address.text()?)?);
        Ok(())
    }

    fn nvmlDeviceGetHandleByPciBusId_v2(nvml, address: TextIn, device: Out<Device>) {
        device.set(by_pci(nvml, address.text()?)?);
        Ok(())
    }

    fn nvmlDeviceGetHandleBySerial(nvml, serial: TextIn, device: Out<Device>) {
        let wanted = serial.text()?;
        let (slot, gpu) = nvml.gpus().find(|(_, gpu)| gpu.serial == wanted).ok_or(Code::NotFound)?;
        device.set(reachable(slot, gpu)?);
        Ok(())
    }

    /// Removes the GPU from the bus until it is rediscovered or the machine boots.
    fn nvmlDeviceRemoveGpu(nvml, info: Out<PciInfo>) {
        remove(nvml, &info.get())
    }

    fn nvmlDeviceRemoveGpu_v2(nvml, info: Out<PciInfo>, _gpu_state: u32, _link_state: u32) {
        remove(nvml, &info.get())
    }

    fn nvmlDeviceDiscoverGpus(nvml, info: Out<PciInfo>) {
        let wanted = info.get();
        nvml.may_administer()?;
        nvml.change(|state| {
            let removed = state.gpus.iter_mut().find(|gpu| gpu.missing && is_at(gpu, &wanted));
            let gpu = removed.ok_or(Code::NotFound)?;
            gpu.missing = gpu.dead;
            if gpu.missing { Err(Code::NotFound) } else { Ok(()) }
        })
    }

    fn nvmlDeviceGetIndex(nvml, device: Device, index: Out<u32>) {
        let target = device.target(&nvml.state)?;
        let position = nvml.gpus().position(|(slot, _)| slot == target.slot).ok_or(Code::InvalidArgument)?;
        index.set(position as u32);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_address_is_parsed_in_every_spelling() {
        let check = |text: &str, expected| assert_eq!(pci_address(text), expected, "{text}");
        check("0000:17:00.0", Some((0, 0x17, 0)));
        check("00000000:17:00.0", Some((0, 0x17, 0)));
        check("0008:01:00.0", Some((8, 1, 0)));
        check("0000:C1:00.0", Some((0, 0xc1, 0)));
        check("17:00.0", Some((0, 0x17, 0)));
        check("17:00", Some((0, 0x17, 0)));
        check("0:1:2:3", None);
        check("zz:00.0", None);
        check("", None);
    }
}
