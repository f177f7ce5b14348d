//! The shares of this process, by device.

use crate::process::Kernel;
use divvy_interposer_core::{GpuUuid, ProcessState};

pub(crate) static PROCESS: ProcessState<Kernel> = ProcessState::new(Kernel);

/// How a device is treated.
pub(crate) type DeviceAccess = divvy_interposer_core::DeviceAccess<'static, Kernel>;
/// A device with a share.
pub(crate) type Device = divvy_interposer_core::Device<'static, Kernel>;

/// Looks up a CUDA device. An ordinal that the driver does not know is unmanaged: the driver
/// refuses the call itself.
pub(crate) fn for_ordinal(ordinal: i32) -> DeviceAccess {
    let mut unknown = false;
    let standing = PROCESS.device(ordinal, || {
        let uuids = uuids(ordinal);
        unknown = uuids.is_none();
        uuids
    });
    if unknown { DeviceAccess::Unmanaged } else { standing }
}

/// The total memory to report for a CUDA device, instead of the driver's `total`.
#[cold]
pub(crate) fn total_mem(ordinal: i32, total: u64) -> u64 {
    PROCESS.total_mem(|| uuids(ordinal), total)
}

#[cold]
fn uuids(ordinal: i32) -> Option<[GpuUuid; 2]> {
    crate::cuda::driver::uuids(ordinal).map(|uuids| uuids.map(GpuUuid))
}

/// Looks up a device by the UUID text of NVML.
#[cold]
pub(crate) fn for_uuid(text: &[u8]) -> DeviceAccess {
    GpuUuid::read(text).map_or(DeviceAccess::Unmanaged, |uuid| PROCESS.device_by_uuid(uuid))
}

/// Returns true if the container has a share.
pub(crate) fn has_shares() -> bool {
    !PROCESS.has_no_policies()
}
