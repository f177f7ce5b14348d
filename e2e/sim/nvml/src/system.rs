//! The library itself: init, shutdown, versions, error texts, and answers for a node without units
//! and vGPUs.

use std::ffi::{CStr, c_char};

use divvy_sim::code::Code;

use crate::abi::DriverBranch;
use crate::argument::{Array, Count, Out, TextOut, fixed};
use crate::handle::Device;
use crate::library::{self, entry};

/// `NVML_INIT_FLAG_NO_GPUS`.
const NO_GPUS: u32 = 1;
/// NO_GPUS, NO_ATTACH and FORCE_INIT.
const KNOWN_FLAGS: u32 = 7;

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> u32 {
    library::guarded(|| library::init("nvmlInit", true))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> u32 {
    library::guarded(|| library::init("nvmlInit_v2", true))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(flags: u32) -> u32 {
    library::guarded(|| {
        if flags & !KNOWN_FLAGS != 0 {
            return Err(Code::InvalidArgument);
        }
        library::init("nvmlInitWithFlags", flags & NO_GPUS == 0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> u32 {
    library::guarded(library::shutdown)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: u32) -> *const c_char {
    text_of(result).as_ptr()
}

/// The texts of the real library, as programs print them.
const fn text_of(result: u32) -> &'static CStr {
    match result {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        5 => c"Already Initialized",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        8 => c"Insufficient External Power",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        11 => c"Interrupt Request Issue",
        12 => c"NVML Shared Library Not Found",
        13 => c"Function Not Found",
        14 => c"Corrupted infoROM",
        15 => c"GPU is lost",
        16 => c"GPU requires reset",
        17 => c"The operating system has blocked the request.",
        18 => c"Driver/library version mismatch",
        19 => c"In use by another client",
        20 => c"Insufficient Memory",
        21 => c"No data",
        22 => c"The requested vgpu operation is not available on target device, becasue ECC is enabled",
        23 => c"Insufficient Resources",
        24 => c"Frequency Not Supported",
        25 => c"Argument version mismatch",
        26 => c"Deprecated",
        27 => c"Not Ready",
        28 => c"GPU not found",
        29 => c"Invalid State",
        30 => c"Reset Type Not Supported",
        _ => c"Unknown Error",
    }
}

entry! {
    fn nvmlSystemGetDriverVersion(nvml, version: TextOut, length: u32) {
        version.set(&nvml.state.driver, length)
    }

    /// NVML's version is the driver's with the major API version in front.
    fn nvmlSystemGetNVMLVersion(nvml, version: TextOut, length: u32) {
        version.set(&format!("{}.{}", nvml.state.cuda.0, nvml.state.driver), length)
    }

    fn nvmlSystemGetCudaDriverVersion(nvml, version: Out<u32>) {
        version.set(nvml.state.cuda.0 * 1000 + nvml.state.cuda.1 * 10);
        Ok(())
    }

    fn nvmlSystemGetCudaDriverVersion_v2(nvml, version: Out<u32>) {
        version.set(nvml.state.cuda.0 * 1000 + nvml.state.cuda.1 * 10);
        Ok(())
    }

    fn nvmlSystemGetDriverBranch(nvml, info: Out<DriverBranch>, length: u32) {
        info.expect_version()?;
        let major = nvml.state.driver.split('.').next().unwrap_or_default();
        let branch = format!("r{major}_00");
        if branch.len() >= length as usize {
            return Err(Code::InsufficientSize);
        }
        info.set(DriverBranch { branch: fixed(&branch), ..info.get() });
        Ok(())
    }

    /// The name comes from the state's processes, else from the kernel.
    fn nvmlSystemGetProcessName(nvml, pid: u32, name: TextOut, length: u32) {
        let state = nvml.state_with_gpu_processes()?;
        let mut processes = state.gpus.iter().flat_map(|gpu| &gpu.processes);
        let known = processes.find(|process| process.pid == pid);
        let text = match known {
            Some(process) => process.name.clone(),
            None => std::fs::read_to_string(format!("/proc/{pid}/comm"))
                .map_err(|_| Code::NotFound)?
                .trim_end()
                .to_owned(),
        };
        // A name that does not fit is truncated, not refused.
        let room = (length as usize).saturating_sub(1);
        let end = (0..=text.len().min(room)).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        name.set(text.get(..end).unwrap_or_default(), length)
    }

    fn nvmlSystemGetHicVersion(_nvml, count: Count, _entries: Array<u8>) {
        count.set(0);
        Ok(())
    }

    fn nvmlSystemGetTopologyGpuSet(nvml, cpu: u32, count: Count, devices: Array<Device>) {
        if cpu >= crate::topology::cpus() {
            return Err(Code::InvalidArgument);
        }
        let items = nvml.gpus().map(|(slot, gpu)| Device::of_gpu(slot, gpu)).collect();
        count.list_when_asked(&devices, items)
    }

    fn nvmlGetExcludedDeviceCount(_nvml, count: Out<u32>) {
        count.set(0);
        Ok(())
    }

    fn nvmlGetExcludedDeviceInfoByIndex(_nvml, _index: u32, _info: Out<u8>) {
        Err(Code::InvalidArgument)
    }

    fn nvmlUnitGetCount(_nvml, count: Out<u32>) {
        count.set(0);
        Ok(())
    }

    fn nvmlUnitGetHandleByIndex(_nvml, _index: u32, _unit: Out<u64>) {
        Err(Code::InvalidArgument)
    }

    /// Environment, feature, developer tools: confidential computing is off.
    fn nvmlSystemGetConfComputeState(_nvml, state: Out<[u32; 3]>) {
        state.set([0; 3]);
        Ok(())
    }

    /// CPU and GPUs have no capabilities for confidential computing.
    fn nvmlSystemGetConfComputeCapabilities(_nvml, capabilities: Out<[u32; 2]>) {
        capabilities.set([0; 2]);
        Ok(())
    }
}
