//! Health: ECC errors, remapped rows, retired pages.
//!
//! GPUs from Ampere on remap rows; earlier ones retire pages. Each GPU supports only one of the
//! two.

use divvy_sim::catalogue::Architecture;
use divvy_sim::code::Code;
use divvy_sim::state::{Gpu, Health};

use crate::abi::{
    EccErrorCounts, RemappedRows, RepairStatus, RowRemapperHistogram, SramEccStatus, UnrepairableMemory,
};
use crate::argument::{Array, Count, Out, Outcome};
use crate::handle::Device;
use crate::library::{Nvml, entry};

/// Number of banks with rows that can be remapped.
const REMAP_BANKS: u32 = 640;
const CORRECTED: u32 = 0;
const UNCORRECTED: u32 = 1;
const VOLATILE: u32 = 0;
const AGGREGATE: u32 = 1;
/// `NVML_MEMORY_LOCATION_DRAM`. All simulated errors are there.
const DRAM: u32 = 2;
const LOCATIONS: u32 = 8;

fn ecc_errors(gpu: &Gpu, error: u32, counter: u32) -> Outcome<u64> {
    let health = &gpu.health;
    match (error, counter) {
        (CORRECTED, VOLATILE) => Ok(health.ecc_corrected),
        (UNCORRECTED, VOLATILE) => Ok(health.ecc_uncorrected),
        (CORRECTED, AGGREGATE) => Ok(health.ecc_corrected_total),
        (UNCORRECTED, AGGREGATE) => Ok(health.ecc_uncorrected_total),
        _ => Err(Code::InvalidArgument),
    }
}

/// The GPU, if its memory remaps rows.
fn gpu_with_row_remapping(nvml: &Nvml, device: Device) -> Outcome<&Gpu> {
    let (_, gpu) = device.whole(&nvml.state)?;
    if gpu.model().architecture >= Architecture::Ampere { Ok(gpu) } else { Err(Code::NotSupported) }
}

/// Checks that the GPU supports page retirement. The simulator never retires a page.
fn check_page_retirement(nvml: &Nvml, device: Device, cause: u32) -> Outcome {
    let (_, gpu) = device.whole(&nvml.state)?;
    if cause > 1 {
        return Err(Code::InvalidArgument);
    }
    if gpu.model().architecture >= Architecture::Ampere { Err(Code::NotSupported) } else { Ok(()) }
}

entry! {
    fn nvmlDeviceGetEccMode(nvml, device: Device, current: Out<u32>, pending: Out<u32>) {
        device.target(&nvml.state)?;
        current.set(1);
        pending.set(1);
        Ok(())
    }

    fn nvmlDeviceGetDefaultEccMode(nvml, device: Device, mode: Out<u32>) {
        device.whole(&nvml.state)?;
        mode.set(1);
        Ok(())
    }

    fn nvmlDeviceGetTotalEccErrors(nvml, device: Device, error: u32, counter: u32, count: Out<u64>) {
        count.set(ecc_errors(device.target(&nvml.state)?.gpu, error, counter)?);
        Ok(())
    }

    fn nvmlDeviceGetMemoryErrorCounter(
        nvml, device: Device, error: u32, counter: u32, location: u32, count: Out<u64>,
    ) {
        let errors = ecc_errors(device.target(&nvml.state)?.gpu, error, counter)?;
        if location >= LOCATIONS {
            return Err(Code::InvalidArgument);
        }
        count.set(if location == DRAM { errors } else { 0 });
        Ok(())
    }

    fn nvmlDeviceGetDetailedEccErrors(
        nvml,
        device: Device,
        error: u32,
        counter: u32,
        counts: Out<EccErrorCounts>,
    ) {
        let device_memory = ecc_errors(device.target(&nvml.state)?.gpu, error, counter)?;
        counts.set(EccErrorCounts { l1_cache: 0, l2_cache: 0, device_memory, register_file: 0 });
        Ok(())
    }

    fn nvmlDeviceClearEccErrorCounts(nvml, device: Device, counter: u32) {
        let (slot, _) = device.whole(&nvml.state)?;
        nvml.may_administer()?;
        nvml.change(|state| {
            let health = &mut state.gpu_mut(slot)?.health;
            *health = match counter {
                VOLATILE => Health { ecc_corrected: 0, ecc_uncorrected: 0, ..*health },
                AGGREGATE => Health { ecc_corrected_total: 0, ecc_uncorrected_total: 0, ..*health },
                _ => return Err(Code::InvalidArgument),
            };
            Ok(())
        })
    }

    fn nvmlDeviceGetSramEccErrorStatus(nvml, device: Device, status: Out<SramEccStatus>) {
        status.expect_version()?;
        let threshold_exceeded = gpu_with_row_remapping(nvml, device)?.health.sram_threshold_exceeded.into();
        let zeros = crate::abi::Plain::zeroed();
        status.set(SramEccStatus { version: status.version(), threshold_exceeded, ..zeros });
        Ok(())
    }

    fn nvmlDeviceGetRemappedRows(
        nvml, device: Device, corrected: Out<u32>, uncorrected: Out<u32>, pending: Out<u32>, failed: Out<u32>,
    ) {
        let health = &gpu_with_row_remapping(nvml, device)?.health;
        corrected.set(health.rows_remapped_corrected);
        uncorrected.set(health.rows_remapped_uncorrected);
        pending.set(health.remap_pending.into());
        failed.set(health.remap_failed.into());
        Ok(())
    }

    fn nvmlDeviceGetRemappedRows_v2(nvml, device: Device, rows: Out<RemappedRows>) {
        let health = &gpu_with_row_remapping(nvml, device)?.health;
        rows.set(RemappedRows {
            correctable_active: health.rows_remapped_corrected,
            correctable_inactive: 0,
            uncorrectable_active: health.rows_remapped_uncorrected,
            uncorrectable_inactive: health.remap_pending.into(),
            pending: health.remap_pending.into(),
            failure: health.remap_failed.into(),
        });
        Ok(())
    }

    fn nvmlDeviceGetRowRemapperHistogram(nvml, device: Device, histogram: Out<RowRemapperHistogram>) {
        let health = &gpu_with_row_remapping(nvml, device)?.health;
        let used = health.rows_remapped_corrected + health.rows_remapped_uncorrected;
        let used = used.min(REMAP_BANKS);
        let max = REMAP_BANKS - used;
        histogram.set(RowRemapperHistogram { max, high: used, partial: 0, low: 0, none: 0 });
        Ok(())
    }

    fn nvmlDeviceGetRepairStatus(nvml, device: Device, status: Out<RepairStatus>) {
        status.expect_version()?;
        device.whole(&nvml.state)?;
        status.set(RepairStatus { version: status.version(), channel_pending: 0, tpc_pending: 0 });
        Ok(())
    }

    fn nvmlDeviceGetUnrepairableMemoryFlag_v1(nvml, device: Device, status: Out<UnrepairableMemory>) {
        let unrepairable = gpu_with_row_remapping(nvml, device)?.health.remap_failed.into();
        status.set(UnrepairableMemory { unrepairable });
        Ok(())
    }

    fn nvmlDeviceGetRetiredPages(nvml, device: Device, cause: u32, count: Count, _addresses: Array<u64>) {
        check_page_retirement(nvml, device, cause)?;
        count.set(0);
        Ok(())
    }

    fn nvmlDeviceGetRetiredPages_v2(
        nvml, device: Device, cause: u32, count: Count, _addresses: Array<u64>, _times: Array<u64>,
    ) {
        check_page_retirement(nvml, device, cause)?;
        count.set(0);
        Ok(())
    }

    fn nvmlDeviceGetRetiredPagesPendingStatus(nvml, device: Device, pending: Out<u32>) {
        check_page_retirement(nvml, device, 0)?;
        pending.set(0);
        Ok(())
    }
}
