//! Stream-ordered memory: pools, which the driver lets grow and shrink as it sees fit.
//!
//! Charged is what a pool has of the device, not what is allocated from it. Before an allocation it is what the pool
//! will have to grow by; afterwards, what the driver says it has grown to.

use super::driver::{self, Handle, Ordinal, PoolProperties};
use super::{Answer, OUT_OF_MEMORY, SUCCESS, hook, real};
use crate::share::{self, Device, LEDGER, Standing};
use crate::worker;
use divvy_interposer_core::Grown;
use divvy_interposer_core::handles::{self, Known};
use divvy_interposer_core::table::Class;

/// Pools that the program made, each with its device, for drivers before CUDA 13, which do not tell it.
static POOLS: [Known; 64] = [const { Known::none() }; 64];

fn device_of(pool: Handle) -> Option<Ordinal> {
    handles::device_of(&POOLS, pool as u64).or_else(|| driver::device_of_pool(pool))
}

/// Gives back what the pools of a device hold for nothing, before somebody is refused.
#[cold]
pub(super) fn shrink(device: &Device) {
    give_back(device);
}

/// The same, when the node asks for it. It is told what is left for nothing all the same.
pub(crate) fn give_back(device: &Device) {
    let mut idle = 0;
    device.pools(|pool| {
        let growing = device.grow(Grown::Pool(pool));
        // One that was destroyed meanwhile is in nobody's hands.
        if growing.charged() == 0 {
            return;
        }
        trim(pool as Handle);
        if let Some((reserved, used)) = driver::pool_memory(pool as Handle) {
            idle += reserved.saturating_sub(used);
            growing.settle_anyway(reserved);
        }
    });
    device.note_idle(idle);
}

fn trim(pool: Handle) {
    if let Some(trim) = real!(cuMemPoolTrimTo(Handle, usize)) {
        // SAFETY: a pool that the driver answers for; where it is gone the driver says so.
        unsafe { trim(pool, 0) };
    }
}

/// An allocation from `pool`. `call` writes to a place of ours.
///
/// # Safety
/// `out` is null, which the driver refuses, or can be written.
#[inline(never)]
unsafe fn from(
    pool: Option<Handle>,
    device: Option<Ordinal>,
    (out, bytes, stream): (*mut u64, usize, Handle),
    call: &dyn Fn(*mut u64) -> Answer,
) -> Answer {
    let (Some(pool), Some(device), false) = (pool, device, out.is_null()) else { return call(out) };
    let share = match share::of_cuda(device) {
        Standing::Free => return call(out),
        Standing::Closed => return OUT_OF_MEMORY,
        Standing::Share(share) => share,
    };
    worker::heed(&share);
    // Recorded into a graph, it allocates nothing now.
    if driver::is_capturing(stream) {
        return call(out);
    }
    let what = Grown::Pool(pool as u64);
    let mut growing = share.grow(what);
    let Some((reserved, used)) = driver::pool_memory(pool) else { return call(out) };
    if growing.ask(bytes as u64, reserved, used).is_err() {
        drop(growing);
        shrink(&share);
        growing = share.grow(what);
        let Some((reserved, used)) = driver::pool_memory(pool) else { return OUT_OF_MEMORY };
        if growing.ask(bytes as u64, reserved, used).is_err() {
            return OUT_OF_MEMORY;
        }
    }
    let mut pointer = 0;
    let answer = call(&raw mut pointer);
    let now = driver::pool_memory(pool).map(|(reserved, _)| reserved);
    if answer != SUCCESS {
        if let Some(reserved) = now {
            growing.settle_anyway(reserved);
        }
        return answer;
    }
    // What it has grown to is not known: it cannot stay.
    if now.is_some_and(|reserved| growing.settle(reserved).is_ok()) {
        // SAFETY: as the caller says.
        unsafe { *out = pointer };
        return SUCCESS;
    }
    if let Some(free) = real!(cuMemFreeAsync(u64, Handle)) {
        // SAFETY: what the driver has just allocated on that stream, and nobody else knows.
        unsafe { free(pointer, stream) };
    }
    trim(pool);
    if let Some((reserved, _)) = driver::pool_memory(pool) {
        share.grow(what).settle_anyway(reserved);
    }
    OUT_OF_MEMORY
}

hook! {
    /// From the device's current pool.
    cuMemAllocAsync(out: *mut u64, bytes: usize, stream: Handle) |real| {
        let device = driver::stream_device(stream);
        // SAFETY: the program's place for the pointer, or null.
        unsafe { from(device.and_then(driver::pool_of), device, (out, bytes, stream), &|out| real(out, bytes, stream)) }
    }
}

hook! {
    /// On the per-thread default stream.
    cuMemAllocAsync_ptsz(out: *mut u64, bytes: usize, stream: Handle) |real| {
        let device = driver::stream_device(stream);
        let on = driver::per_thread(stream);
        // SAFETY: the program's place for the pointer, or null.
        unsafe { from(device.and_then(driver::pool_of), device, (out, bytes, on), &|out| real(out, bytes, stream)) }
    }
}

hook! {
    /// From a pool that the program names.
    cuMemAllocFromPoolAsync(out: *mut u64, bytes: usize, pool: Handle, stream: Handle) |real| {
        // SAFETY: the program's place for the pointer, or null.
        unsafe { from(Some(pool), device_of(pool), (out, bytes, stream), &|out| real(out, bytes, pool, stream)) }
    }
}

hook! {
    /// On the per-thread default stream.
    cuMemAllocFromPoolAsync_ptsz(out: *mut u64, bytes: usize, pool: Handle, stream: Handle) |real| {
        let on = driver::per_thread(stream);
        // SAFETY: the program's place for the pointer, or null.
        unsafe { from(Some(pool), device_of(pool), (out, bytes, on), &|out| real(out, bytes, pool, stream)) }
    }
}

hook! {
    /// Empty at first.
    cuMemPoolCreate(out: *mut Handle, properties: *const PoolProperties) |real| {
        let answer = real(out, properties);
        if answer == SUCCESS && !out.is_null() && !properties.is_null() {
            // SAFETY: the driver has written the one and read the other.
            unsafe {
                if let Some(device) = (*properties).location.device() {
                    handles::remember(&POOLS, *out as u64, device);
                }
            }
        }
        answer
    }
}

hook! {
    /// With all that is not allocated from it. The rest the driver keeps until it is freed, which no call tells:
    /// it stays charged until the process ends, or the node's measure corrects it.
    cuMemPoolDestroy(pool: Handle) |real| {
        // Nobody is about to trim it meanwhile, see `give_back`.
        let standing = device_of(pool).map(share::of_cuda);
        let _alone = match &standing {
            Some(Standing::Share(share)) => Some(share.grow(Grown::Pool(pool as u64))),
            _ => None,
        };
        let allocated = driver::pool_memory(pool).map_or(u64::MAX, |(_, used)| used);
        // The handle may be another pool's as soon as the driver is done.
        let taken = LEDGER.take(Class::Pool, pool as u64);
        let answer = real(pool);
        if answer == SUCCESS {
            handles::forget(&POOLS, pool as u64);
            if let Some(taken) = taken {
                taken.freed_but(allocated);
            }
        }
        answer
    }
}

hook! {
    /// Gives back what is not allocated from it.
    cuMemPoolTrimTo(pool: Handle, keep: usize) |real| {
        let Some(Standing::Share(share)) = device_of(pool).map(share::of_cuda) else { return real(pool, keep) };
        let growing = share.grow(Grown::Pool(pool as u64));
        let answer = real(pool, keep);
        if let Some((reserved, _)) = driver::pool_memory(pool) {
            growing.settle_anyway(reserved);
        }
        answer
    }
}
