//! Stream-ordered memory: pools, which the driver lets grow and shrink as it sees fit.
//!
//! Charged is what a pool has of the device, not what is allocated from it. Before an allocation it is what the pool
//! will have to grow by; afterwards, what the driver says it has grown to.

use super::driver::{self, Handle, Ordinal, PoolProperties};
use super::{Answer, Call, OUT_OF_MEMORY, SUCCESS, hook, real, to};
use crate::share::{self, Device, LEDGER, Standing};
use crate::worker;
use divvy_interposer_core::table::Class;
use divvy_interposer_core::{Full, Grown};

/// The device whose memory a pool has, `Some(None)` for the host's; `None` where nobody knows. What the program made is in
/// the table, as drivers before CUDA 13 do not tell it.
fn owner_of(pool: Handle) -> Option<Option<Ordinal>> {
    LEDGER.owner_of(pool as u64).or_else(|| driver::owner_of_pool(pool))
}

/// The device that a pool which the program names is charged to. One that nobody knows is charged to the device of the
/// first stream that allocates from it, and to that one from then on.
fn payer(pool: Handle, stream: Handle) -> Result<Option<Ordinal>, Full> {
    match owner_of(pool) {
        Some(owner) => Ok(owner),
        None => {
            let device = driver::stream_device(stream);
            LEDGER.pool_is_of(pool as u64, device).map(|()| device)
        }
    }
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
    payer: Result<Option<Ordinal>, Full>,
    (out, bytes, stream): (*mut u64, usize, Handle),
    call: Call<'_, *mut u64>,
) -> Answer {
    let Ok(payer) = payer else { return OUT_OF_MEMORY };
    let (Some(pool), Some(device), false) = (pool, payer, out.is_null()) else { return call.with(out) };
    let share = match share::of_cuda(device) {
        Standing::Free => return call.with(out),
        Standing::Closed => return OUT_OF_MEMORY,
        Standing::Share(share) => share,
    };
    worker::heed(&share);
    // Recorded into a graph, it allocates nothing now.
    if driver::is_capturing(stream) {
        return call.with(out);
    }
    let what = Grown::Pool(pool as u64);
    let mut growing = share.grow(what);
    let Some((reserved, used)) = driver::pool_memory(pool) else { return call.with(out) };
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
    let answer = call.with(&raw mut pointer);
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
        unsafe { from(device.and_then(driver::pool_of), Ok(device), (out, bytes, stream), to(&|out| real(out, bytes, stream))) }
    }
}

hook! {
    /// On the per-thread default stream.
    cuMemAllocAsync_ptsz(out: *mut u64, bytes: usize, stream: Handle) |real| {
        let device = driver::stream_device(stream);
        let on = driver::per_thread(stream);
        // SAFETY: the program's place for the pointer, or null.
        unsafe { from(device.and_then(driver::pool_of), Ok(device), (out, bytes, on), to(&|out| real(out, bytes, stream))) }
    }
}

hook! {
    /// From a pool that the program names.
    cuMemAllocFromPoolAsync(out: *mut u64, bytes: usize, pool: Handle, stream: Handle) |real| {
        // SAFETY: the program's place for the pointer, or null.
        unsafe { from(Some(pool), payer(pool, stream), (out, bytes, stream), to(&|out| real(out, bytes, pool, stream))) }
    }
}

hook! {
    /// On the per-thread default stream.
    cuMemAllocFromPoolAsync_ptsz(out: *mut u64, bytes: usize, pool: Handle, stream: Handle) |real| {
        let on = driver::per_thread(stream);
        // SAFETY: the program's place for the pointer, or null.
        unsafe { from(Some(pool), payer(pool, on), (out, bytes, on), to(&|out| real(out, bytes, pool, stream))) }
    }
}

hook! {
    /// Empty at first.
    cuMemPoolCreate(out: *mut Handle, properties: *const PoolProperties) |real| {
        if out.is_null() || properties.is_null() || !share::is_any() {
            return real(out, properties);
        }
        let mut pool = core::ptr::null_mut();
        let answer = real(&raw mut pool, properties);
        if answer != SUCCESS {
            return answer;
        }
        // SAFETY: not null, and the driver has read it.
        let owner = unsafe { (*properties).owner() };
        if owner.is_some_and(|owner| LEDGER.pool_is_of(pool as u64, owner).is_err()) {
            if let Some(destroy) = real!(cuMemPoolDestroy(Handle)) {
                // SAFETY: what the driver has just made, and nobody else knows.
                unsafe { destroy(pool) };
            }
            return OUT_OF_MEMORY;
        }
        // SAFETY: the program's place for the handle.
        unsafe { *out = pool };
        SUCCESS
    }
}

/// The share that pays for a pool.
fn share_of(pool: Handle) -> Option<Device> {
    match share::of_cuda(owner_of(pool)??) {
        Standing::Share(share) => Some(share),
        Standing::Free | Standing::Closed => None,
    }
}

hook! {
    /// With all that is not allocated from it. The rest the driver keeps until it is freed, which no call tells:
    /// it stays charged until the process ends, or the node's measure corrects it.
    cuMemPoolDestroy(pool: Handle) |real| {
        // Nobody is about to trim it meanwhile, see `give_back`.
        let share = share_of(pool);
        let _alone = share.as_ref().map(|share| share.grow(Grown::Pool(pool as u64)));
        let allocated = driver::pool_memory(pool).map_or(u64::MAX, |(_, used)| used);
        // The handle may be another pool's as soon as the driver is done.
        let (taken, known) = (LEDGER.take(Class::Pool, pool as u64), LEDGER.pool_ends(pool as u64));
        let answer = real(pool);
        if answer == SUCCESS {
            if let Some(known) = known {
                known.forgotten();
            }
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
        let Some(share) = share_of(pool) else { return real(pool, keep) };
        let growing = share.grow(Grown::Pool(pool as u64));
        let answer = real(pool, keep);
        if let Some((reserved, _)) = driver::pool_memory(pool) {
            growing.settle_anyway(reserved);
        }
        answer
    }
}
