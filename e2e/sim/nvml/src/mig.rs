//! MIG mode, MIG devices, and the relation between devices and instances.

use divvy_sim::code::Code;

use crate::abi::Attributes;
use crate::argument::Out;
use crate::handle::Device;
use crate::library::entry;

entry! {
    /// Also NOT_SUPPORTED for a MIG device: programs rely on that to detect MIG support.
    fn nvmlDeviceGetMigMode(nvml, device: Device, current: Out<u32>, pending: Out<u32>) {
        let (_, gpu) = device.whole(&nvml.state)?;
        if gpu.model().mig.is_none() {
            return Err(Code::NotSupported);
        }
        current.set(gpu.mig.current.into());
        pending.set(gpu.mig.pending.into());
        Ok(())
    }

    /// Succeeds even if the mode could not be activated; the activation status reports that. With
    /// `Host::mig_mode_errors`, a GPU in use is an error. A pending mode is stored in both cases.
    fn nvmlDeviceSetMigMode(nvml, device: Device, mode: u32, activation: Out<u32>) {
        let (slot, gpu) = device.whole(&nvml.state)?;
        if mode > 1 {
            return Err(Code::InvalidArgument);
        }
        if gpu.model().mig.is_none() {
            return Err(Code::NotSupported);
        }
        nvml.may_administer()?;
        let status = nvml.change(|state| state.set_mig_mode(slot, mode == 1))?;
        activation.set(status.into());
        if status == Code::InUse && nvml.state.host.mig_mode_errors { Err(status) } else { Ok(()) }
    }

    /// 0 while MIG is off or not supported.
    fn nvmlDeviceGetMaxMigDeviceCount(nvml, device: Device, count: Out<u32>) {
        let (_, gpu) = device.whole(&nvml.state)?;
        let most = gpu.model().mig.as_ref().filter(|_| gpu.mig.current).map_or(0, |mig| mig.compute_slices);
        count.set(most);
        Ok(())
    }

    fn nvmlDeviceGetMigDeviceHandleByIndex(nvml, device: Device, index: u32, found: Out<Device>) {
        let (slot, gpu) = device.whole(&nvml.state)?;
        let mig = gpu.model().mig.as_ref().filter(|_| gpu.mig.current).ok_or(Code::NotSupported)?;
        if index >= mig.compute_slices {
            return Err(Code::InvalidArgument);
        }
        let (gi, ci) = nvml.mig_devices(gpu).nth(index as usize).ok_or(Code::NotFound)?;
        found.set(Device::of_mig(slot, gi.id, ci));
        Ok(())
    }

    fn nvmlDeviceIsMigDeviceHandle(nvml, device: Device, is_mig: Out<u32>) {
        is_mig.set(device.target(&nvml.state)?.mig.is_some().into());
        Ok(())
    }

    fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvml, device: Device, parent: Out<Device>) {
        let target = device.target(&nvml.state)?;
        target.mig.ok_or(Code::InvalidArgument)?;
        parent.set(Device::of_gpu(target.slot, target.gpu));
        Ok(())
    }

    fn nvmlDeviceGetGpuInstanceId(nvml, device: Device, id: Out<u32>) {
        let (gi, _) = device.target(&nvml.state)?.mig.ok_or(Code::NotSupported)?;
        id.set(gi.id);
        Ok(())
    }

    fn nvmlDeviceGetComputeInstanceId(nvml, device: Device, id: Out<u32>) {
        let (_, ci) = device.target(&nvml.state)?.mig.ok_or(Code::NotSupported)?;
        id.set(ci.id);
        Ok(())
    }

    fn nvmlDeviceGetAttributes(nvml, device: Device, attributes: Out<Attributes>) {
        attributes.set(crate::compute_instance::attributes(&device.target(&nvml.state)?)?);
        Ok(())
    }

    fn nvmlDeviceGetAttributes_v2(nvml, device: Device, attributes: Out<Attributes>) {
        attributes.set(crate::compute_instance::attributes(&device.target(&nvml.state)?)?);
        Ok(())
    }
}
