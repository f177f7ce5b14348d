//! Memory limits of cgroups.

use crate::abi::{GetMemoryLimits, SetMemoryLimits};
use crate::argument::{Out, Outcome, TextIn};
use crate::handle::Device;
use crate::library::entry;

fn path(cgroup: &TextIn) -> Outcome<String> {
    Ok(cgroup.text()?.to_owned())
}

entry! {
    fn nvmlDeviceSetMemoryLimits_v1(nvml, device: Device, limits: Out<SetMemoryLimits>) {
        nvml.may_administer()?;
        device.whole(&nvml.state)?;
        let SetMemoryLimits { cgroup, soft, hard } = limits.get();
        let path = path(&TextIn::from(cgroup))?;
        nvml.change(|state| {
            let (slot, _) = device.whole(state)?;
            state.limit_cgroup(slot, &path, soft, hard)
        })
    }

    fn nvmlDeviceGetMemoryLimits_v1(nvml, device: Device, limits: Out<GetMemoryLimits>) {
        let (_, gpu) = device.whole(nvml.state_with_gpu_processes()?)?;
        nvml.state.has_cgroup_limits()?;
        let given = limits.get();
        let limit = gpu.cgroup_limit(&path(&TextIn::from(given.cgroup))?)?;
        let used = gpu.used_by(&limit.members());
        limits.set(GetMemoryLimits { soft: limit.soft, hard: limit.hard, used, ..given });
        Ok(())
    }
}
