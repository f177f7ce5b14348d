//! The shares of this process, and which of them a device is.

use crate::process::Kernel;
use divvy_interposer_core::{GpuUuid, Ledger};

pub(crate) static LEDGER: Ledger<Kernel> = Ledger::new(Kernel);

/// What holds for a device.
pub(crate) type Standing = divvy_interposer_core::Standing<'static, Kernel>;
/// A device with a share.
pub(crate) type Device = divvy_interposer_core::Device<'static, Kernel>;

/// Of a CUDA device. One that the driver does not know either is free: the driver refuses the call itself.
pub(crate) fn of_cuda(ordinal: i32) -> Standing {
    let mut unknown = false;
    let standing = LEDGER.device(ordinal, || {
        let uuids = uuids(ordinal);
        unknown = uuids.is_none();
        uuids
    });
    if unknown { Standing::Free } else { standing }
}

/// What a program is told of a CUDA device's memory in all, in place of `total`.
#[cold]
pub(crate) fn total_mem(ordinal: i32, total: u64) -> u64 {
    LEDGER.total_mem(|| uuids(ordinal), total)
}

#[cold]
fn uuids(ordinal: i32) -> Option<[GpuUuid; 2]> {
    crate::cuda::driver::uuids(ordinal).map(|uuids| uuids.map(GpuUuid))
}

/// Of the device that NVML calls so.
#[cold]
pub(crate) fn of_uuid(text: &[u8]) -> Standing {
    GpuUuid::read(text).map_or(Standing::Free, |uuid| LEDGER.device_of(uuid))
}

/// Whether the container has a share at all.
pub(crate) fn is_any() -> bool {
    !LEDGER.idle()
}
