//! Charges allocations around the driver's call.

use super::call::{Call, CuResult, OUT_OF_MEMORY, SUCCESS, real};
use super::driver::Current;
use super::trim;
use crate::share::{self, DeviceAccess, PROCESS};
use divvy_interposer_core::table::Class;
use divvy_interposer_core::{Refused, Reservation};

/// Allocates `bytes`. `call` calls the driver, which writes to a local, and returns what it
/// created. `keep` records that with the context, `pass` hands it to the program, and `undo` frees
/// it.
pub(super) fn allocate<T: Copy>(
    current: Option<Current>,
    bytes: u64,
    call: impl FnOnce() -> Result<T, CuResult>,
    keep: impl FnOnce(Reservation<'static, crate::process::Kernel>, T, u64) -> Result<(), Refused>,
    pass: impl FnOnce(T),
    undo: impl FnOnce(T),
) -> CuResult {
    allocate_charged(current, reserve(current, bytes), call, keep, pass, undo)
}

/// The charge, or `None` if the device has no share.
pub(super) type ChargeResult = Result<Option<Reservation<'static, crate::process::Kernel>>, Refused>;

/// [`allocate`] with an existing charge.
pub(super) fn allocate_charged<T: Copy>(
    current: Option<Current>,
    charge: ChargeResult,
    call: impl FnOnce() -> Result<T, CuResult>,
    keep: impl FnOnce(Reservation<'static, crate::process::Kernel>, T, u64) -> Result<(), Refused>,
    pass: impl FnOnce(T),
    undo: impl FnOnce(T),
) -> CuResult {
    let Ok(reservation) = charge else { return OUT_OF_MEMORY };
    let context = current.map_or(0, |current| current.context as u64);
    let made = match call() {
        Ok(made) => made,
        Err(error) => return error,
    };
    if let Some(reservation) = reservation
        && keep(reservation, made, context).is_err()
    {
        undo(made);
        return OUT_OF_MEMORY;
    }
    pass(made);
    SUCCESS
}

/// Charges `bytes` if the device has a share. If they do not fit, pools are trimmed first.
pub(super) fn reserve(current: Option<Current>, bytes: u64) -> ChargeResult {
    // An overcommitting share gets managed memory instead, if its limit allows that.
    charge_or_trim(current, bytes, |device| !device.overcommits(), |device| device.reserve(bytes))
}

/// Like [`reserve`], for managed memory.
pub(super) fn reserve_managed(current: Option<Current>, bytes: u64) -> ChargeResult {
    charge_or_trim(current, bytes, |_| true, |device| device.reserve_managed(bytes))
}

fn charge_or_trim(
    current: Option<Current>,
    bytes: u64,
    is_final: impl Fn(&share::Device) -> bool,
    charge: impl Fn(&share::Device) -> Result<Reservation<'static, crate::process::Kernel>, Refused>,
) -> ChargeResult {
    // Without a context, or for an invalid device, the driver refuses the call itself.
    match current.map_or(DeviceAccess::Unmanaged, |current| share::for_ordinal(current.device)) {
        DeviceAccess::Unmanaged => Ok(None),
        DeviceAccess::Denied => Err(Refused),
        DeviceAccess::Share(device) => charge(&device)
            .or_else(|_| {
                trim::trim_before_refusal(&device);
                charge(&device)
            })
            .inspect_err(|_| {
                if is_final(&device) {
                    device.report_refusal(bytes);
                }
            })
            .map(Some),
    }
}

/// Refunds the charge of `key` if `call` frees it.
pub(super) fn free(class: Class, key: u64, call: Call<'_>) -> CuResult {
    let Some(freeing) = PROCESS.begin_free(class, key) else { return call.call() };
    let answer = call.call();
    if answer == SUCCESS {
        freeing.commit();
    }
    answer
}

/// Frees linear memory that was just allocated and not yet passed to the program.
pub(super) fn free_linear(pointer: u64) {
    if let Some(free) = real!(cuMemFree_v2(u64)) {
        // SAFETY: just allocated by the driver and not yet passed to the program.
        unsafe { free(pointer) };
    }
}
