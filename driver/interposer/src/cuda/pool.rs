//! Stream-ordered memory: pools, which the driver grows and shrinks itself.
//!
//! The charge is the pool's reserved size, not what is allocated from it. Before an allocation, the
//! expected growth is charged; afterwards, the size that the driver reports.

use super::call::{Call, CuResult, OUT_OF_MEMORY, SUCCESS, hook, real, to};
use super::driver::{self, Handle, Ordinal, PoolProperties};
use super::trim;
use crate::share::{self, Device, DeviceAccess, PROCESS};
use divvy_interposer_core::table::Class;
use divvy_interposer_core::{PoolKind, Refused};

/// The device whose memory a pool has, `Some(None)` for host memory; `None` if unknown. Pools that
/// the program created are in the table, because drivers before CUDA 13 do not report their device.
fn pool_owner(pool: Handle) -> Option<Option<Ordinal>> {
    PROCESS.pool_owner(pool as u64).or_else(|| driver::owner_of_pool(pool))
}

/// The device that pays for a pool. A pool of unknown device is assigned to the device of the first
/// stream that allocates from it.
fn paying_device(pool: Handle, stream: Handle) -> Result<Option<Ordinal>, Refused> {
    match pool_owner(pool) {
        Some(owner) => Ok(owner),
        None => {
            let device = driver::stream_device(stream);
            PROCESS.set_pool_owner(pool as u64, device).map(|()| device)
        }
    }
}

/// Allocates from `pool`. `call` writes to a local.
///
/// # Safety
/// `out` is null, which the driver refuses, or writable.
#[inline(never)]
unsafe fn allocate_from(
    pool: Option<Handle>,
    paying_device: Result<Option<Ordinal>, Refused>,
    (out, bytes, stream): (*mut u64, usize, Handle),
    call: Call<'_, *mut u64>,
) -> CuResult {
    let Ok(paying_device) = paying_device else { return OUT_OF_MEMORY };
    let (Some(pool), Some(device), false) = (pool, paying_device, out.is_null()) else {
        return call.with(out);
    };
    let share = match share::for_ordinal(device) {
        DeviceAccess::Unmanaged => return call.with(out),
        DeviceAccess::Denied => return OUT_OF_MEMORY,
        DeviceAccess::Share(share) => share,
    };
    trim::serve_requests(&share);
    // A captured call allocates nothing now.
    if driver::is_capturing(stream) {
        return call.with(out);
    }
    let what = PoolKind::Pool(pool as u64);
    let mut pool_call = share.open_pool(what);
    let Some((reserved, used)) = driver::pool_memory(pool) else { return call.with(out) };
    if pool_call.reserve_growth(bytes as u64, reserved, used).is_err() {
        drop(pool_call);
        trim::trim_before_refusal(&share);
        pool_call = share.open_pool(what);
        let Some((reserved, used)) = driver::pool_memory(pool) else { return OUT_OF_MEMORY };
        if pool_call.reserve_growth(bytes as u64, reserved, used).is_err() {
            share.report_refusal(bytes as u64);
            return OUT_OF_MEMORY;
        }
    }
    let mut pointer = 0;
    let answer = call.with(&raw mut pointer);
    let now = driver::pool_memory(pool).map(|(reserved, _)| reserved);
    if answer != SUCCESS {
        if let Some(reserved) = now {
            pool_call.force_settle(reserved);
        }
        return answer;
    }
    // If the new size is unknown or too large, the allocation is undone.
    if now.is_some_and(|reserved| pool_call.settle(reserved).is_ok()) {
        // SAFETY: guaranteed by the caller.
        unsafe { *out = pointer };
        return SUCCESS;
    }
    if let Some(free) = real!(cuMemFreeAsync(u64, Handle)) {
        // SAFETY: just allocated by the driver on that stream and not yet passed to the program.
        unsafe { free(pointer, stream) };
    }
    trim::trim_pool(pool);
    if let Some((reserved, _)) = driver::pool_memory(pool) {
        share.open_pool(what).force_settle(reserved);
    }
    OUT_OF_MEMORY
}

hook! {
    /// From the device's current pool.
    cuMemAllocAsync(out: *mut u64, bytes: usize, stream: Handle) |real| {
        let device = driver::stream_device(stream);
        // SAFETY: the program's output for the pointer, or null.
        unsafe {
            allocate_from(
                device.and_then(driver::pool_of), Ok(device), (out, bytes, stream),
                to(&|out| real(out, bytes, stream)),
            )
        }
    }
}

hook! {
    /// On the per-thread default stream.
    cuMemAllocAsync_ptsz(out: *mut u64, bytes: usize, stream: Handle) |real| {
        let device = driver::stream_device(stream);
        let on = driver::per_thread(stream);
        // SAFETY: the program's output for the pointer, or null.
        unsafe {
            allocate_from(
                device.and_then(driver::pool_of), Ok(device), (out, bytes, on),
                to(&|out| real(out, bytes, stream)),
            )
        }
    }
}

hook! {
    /// From an explicit pool.
    cuMemAllocFromPoolAsync(out: *mut u64, bytes: usize, pool: Handle, stream: Handle) |real| {
        // SAFETY: the program's output for the pointer, or null.
        unsafe {
            allocate_from(
                Some(pool), paying_device(pool, stream), (out, bytes, stream),
                to(&|out| real(out, bytes, pool, stream)),
            )
        }
    }
}

hook! {
    /// On the per-thread default stream.
    cuMemAllocFromPoolAsync_ptsz(out: *mut u64, bytes: usize, pool: Handle, stream: Handle) |real| {
        let on = driver::per_thread(stream);
        // SAFETY: the program's output for the pointer, or null.
        unsafe {
            allocate_from(
                Some(pool), paying_device(pool, on), (out, bytes, on),
                to(&|out| real(out, bytes, pool, stream)),
            )
        }
    }
}

hook! {
    /// A new pool is empty and not charged.
    cuMemPoolCreate(out: *mut Handle, properties: *const PoolProperties) |real| {
        if out.is_null() || properties.is_null() || !share::has_shares() {
            return real(out, properties);
        }
        let mut pool = core::ptr::null_mut();
        let answer = real(&raw mut pool, properties);
        if answer != SUCCESS {
            return answer;
        }
        // SAFETY: not null, and the driver has read it.
        let owner = unsafe { (*properties).owner() };
        if owner.is_some_and(|owner| PROCESS.set_pool_owner(pool as u64, owner).is_err()) {
            if let Some(destroy) = real!(cuMemPoolDestroy(Handle)) {
                // SAFETY: just created by the driver and not yet passed to the program.
                unsafe { destroy(pool) };
            }
            return OUT_OF_MEMORY;
        }
        // SAFETY: the program's output for the handle.
        unsafe { *out = pool };
        SUCCESS
    }
}

/// The share that pays for a pool.
fn share_of_pool(pool: Handle) -> Option<Device> {
    match share::for_ordinal(pool_owner(pool)??) {
        DeviceAccess::Share(share) => Some(share),
        DeviceAccess::Unmanaged | DeviceAccess::Denied => None,
    }
}

hook! {
    /// Refunds memory that is not allocated from the pool. The driver keeps the rest until it is
    /// freed, which no call reports. It stays charged until the process exits or the node's
    /// measurement corrects it.
    cuMemPoolDestroy(pool: Handle) |real| {
        // Excludes a concurrent trim, see `trim_pools`.
        let share = share_of_pool(pool);
        let _alone = share.as_ref().map(|share| share.open_pool(PoolKind::Pool(pool as u64)));
        let allocated = driver::pool_memory(pool).map_or(u64::MAX, |(_, used)| used);
        // The driver may reuse the handle as soon as the call is done.
        let (taken, known) = (PROCESS.take(Class::Pool, pool as u64), PROCESS.take_pool_owner(pool as u64));
        let answer = real(pool);
        if answer == SUCCESS {
            if let Some(known) = known {
                known.discard();
            }
            if let Some(taken) = taken {
                taken.commit_except(allocated);
            }
        }
        answer
    }
}

hook! {
    /// Refunds the memory that is released.
    cuMemPoolTrimTo(pool: Handle, keep: usize) |real| {
        let Some(share) = share_of_pool(pool) else { return real(pool, keep) };
        let pool_call = share.open_pool(PoolKind::Pool(pool as u64));
        let answer = real(pool, keep);
        if let Some((reserved, _)) = driver::pool_memory(pool) {
            pool_call.force_settle(reserved);
        }
        answer
    }
}
