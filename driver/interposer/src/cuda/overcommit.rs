//! Memory beyond what a share has of the device: managed memory in place of what the program asked for.
//!
//! A share that over-commits has a claim to so much of the device, and may hold more. As long as what it allocates fits the
//! claim, it is what the program asked for. What does not, or what the driver has no room for, is managed memory, which
//! the driver moves to the device when it is used and away when others need the room. It is told to keep it on the
//! device as long as it can. The program sees no difference: programs take other ways with managed memory, and those
//! would be slower or fail. What cannot be managed (pools, arrays, physical memory by handle, contexts) is refused
//! beyond the claim; nor can managed memory be shared with other processes: the driver says so itself.

use super::driver::{self, Handle};
use super::{Answer, Call, OUT_OF_MEMORY, SUCCESS, by, hook, memory, real};
use crate::share::{self, LEDGER, Standing};
use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicBool, Ordering};
use divvy_interposer_core::Kind;
use divvy_interposer_core::table::Class;

/// There has been such memory: before that nobody is asked about addresses.
static ANY: AtomicBool = AtomicBool::new(false);

const INVALID_VALUE: Answer = 1;
/// Rows of pitched memory begin at multiples of this, which all devices take.
const PITCH: usize = 512;

/// What `make` makes where the answer to an allocation is that there is no memory.
#[inline]
pub(super) fn instead_of<T>(answer: Answer, make: impl FnOnce() -> Option<T>) -> Option<T> {
    if answer == OUT_OF_MEMORY { make() } else { None }
}

/// Managed memory for the calling thread's device, if its share over-commits and has room.
#[cold]
pub(super) fn instead(bytes: u64) -> Option<u64> {
    let current = driver::current()?;
    let Standing::Share(device) = share::of_cuda(current.device) else { return None };
    if bytes == 0 || !device.over_commits() {
        return None;
    }
    let reservation = device.reserve_managed(bytes).ok()?;
    let allocate = real!(cuMemAllocManaged(*mut u64, usize, c_uint))?;
    let mut pointer = 0;
    // SAFETY: the driver writes an address; CU_MEM_ATTACH_GLOBAL.
    if unsafe { allocate(&raw mut pointer, usize::try_from(bytes).ok()?, 1) } != SUCCESS {
        return None;
    }
    driver::keep_on(pointer, bytes, current.device);
    ANY.store(true, Ordering::Release);
    let context = current.context as u64;
    if reservation.keep_all(Kind::StandIn { pointer, context }).is_err() {
        memory::free_again(pointer);
        return None;
    }
    Some(pointer)
}

/// The same in rows, with their pitch.
#[cold]
pub(super) fn rows_instead(width: usize, height: usize) -> Option<(u64, usize)> {
    let pitch = width.checked_next_multiple_of(PITCH)?;
    Some((instead((pitch as u64).checked_mul(height as u64)?)?, pitch))
}

/// Whether an address lies in such memory.
fn is_at(address: u64) -> bool {
    let begins = || driver::begin_of(address).unwrap_or(address);
    ANY.load(Ordering::Acquire) && (LEDGER.stands_in(address) || LEDGER.stands_in(begins()))
}

/// A free of what begins at `pointer` by `call`, after which it stands in for nothing.
pub(super) fn free(pointer: u64, call: Call<'_>) -> Answer {
    if !ANY.load(Ordering::Acquire) {
        return super::free(Class::Pointer, pointer, call);
    }
    // The driver may give the address to another thread before the first is back.
    let mark = LEDGER.take(Class::StandIn, pointer);
    let answer = super::free(Class::Pointer, pointer, call);
    if let Some(mark) = mark.filter(|_| answer == SUCCESS) {
        mark.freed();
    }
    answer
}

/// As [`free`], of a call that only memory knows which the driver allocated: managed memory is freed by the call that
/// knows it, which waits for the device.
pub(super) fn free_on(pointer: u64, stream: Handle, call: Call<'_>) -> Answer {
    if ANY.load(Ordering::Acquire)
        && LEDGER.stands_in(pointer)
        && !driver::is_capturing(stream)
        && let Some(real) = real!(cuMemFree_v2(u64))
    {
        // SAFETY: what the program frees.
        return free(pointer, by(&|| unsafe { real(pointer) }));
    }
    free(pointer, call)
}

/// What is answered in place of what the driver says of managed memory.
enum Said {
    /// CU_MEMORYTYPE_DEVICE.
    Device,
    /// It is not managed, or has no address for the host.
    Nothing,
}

fn said(attribute: c_int) -> Option<Said> {
    match attribute {
        2 => Some(Said::Device),
        4 | 8 => Some(Said::Nothing),
        _ => None,
    }
}

/// # Safety
/// The driver has written the answer to that attribute there.
unsafe fn say(attribute: c_int, out: *mut c_void) {
    // SAFETY: as the caller says. Of a truth value the lowest byte is all that is not zero.
    unsafe {
        match (said(attribute), attribute) {
            (Some(Said::Device), _) => *out.cast::<c_uint>() = 2,
            (Some(Said::Nothing), 4) => *out.cast::<u64>() = 0,
            (Some(Said::Nothing), _) => *out.cast::<u8>() = 0,
            (None, _) => {}
        }
    }
}

hook! {
    /// Of memory of the device the driver has no address for the host to tell, and refuses.
    cuPointerGetAttribute(out: *mut c_void, attribute: c_int, address: u64) |real| {
        let stands_in = !out.is_null() && said(attribute).is_some() && is_at(address);
        if stands_in && attribute == 4 {
            return INVALID_VALUE;
        }
        let answer = real(out, attribute, address);
        if stands_in && answer == SUCCESS {
            // SAFETY: the driver has just written it.
            unsafe { say(attribute, out) };
        }
        answer
    }
}

hook! {
    /// Several at once.
    cuPointerGetAttributes(count: c_uint, attributes: *const c_int, out: *mut *mut c_void, address: u64) |real| {
        let answer = real(count, attributes, out, address);
        if answer == SUCCESS && is_at(address) {
            for at in 0..count as usize {
                // SAFETY: the driver has read so many of both, and has written each answer.
                unsafe {
                    let (attribute, out) = (*attributes.add(at), *out.add(at));
                    if !out.is_null() {
                        say(attribute, out);
                    }
                }
            }
        }
        answer
    }
}
