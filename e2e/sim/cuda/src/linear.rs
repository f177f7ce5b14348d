//! Memory by address: plain, pitched, managed and pinned, and what an address is.

use divvy_sim::Guest;
use std::sync::Arc;

use crate::argument::{In, Out};
use crate::code::Code;
use crate::content::Content;
use crate::context::{self, Context};
use crate::device::read_all;
use crate::frame::{Outcome, entry};
use crate::handle::Handle;
use crate::memory::{Block, Host, Payer};
use crate::pool::Location;
use crate::process::Process;
use crate::stream::Stream;

/// `CU_MEM_ATTACH_GLOBAL` and `CU_MEM_ATTACH_HOST`.
const ATTACH: u32 = 3;
/// Rows of pitched memory begin at multiples of this.
const PITCH: u64 = 512;

/// Host memory for devices: mapped here, or the program's own.
fn add_host(process: &Process, size: u64, own: Option<u64>, host: Host) -> Outcome<u64> {
    let context = context::current()?;
    if size == 0 {
        return Err(Code::InvalidValue);
    }
    let content = if own.is_some() { Content::NONE } else { Content::new(size)? };
    let address = own.unwrap_or_else(|| content.address());
    process.memory.add(context, size, Payer::Host(host), address, content)
}

const fn pinned(flags: u32, registered: bool) -> Host {
    Host { managed: false, registered, flags, home: None }
}

/// Moves managed memory to a device or to the host, in the order of a stream.
pub(crate) fn prefetch(
    process: &Process,
    (address, size): (u64, u64),
    device: Option<i32>,
    stream: &Stream,
) -> Outcome {
    let guest = match device {
        Some(ordinal) => Some(process.device(ordinal)?.guest(process.sim)?),
        None => None,
    };
    let time = managed(process, address, |block, home| {
        if address - block.0 + size > block.1 {
            return Err(Code::InvalidValue);
        }
        match guest {
            Some(guest) => {
                settle(home, Some(&guest), block.1);
                Ok(guest.bring(size))
            }
            // It stays that device's: the next kernel there brings it back.
            None => Ok(home.as_ref().map_or(0, |home| home.put_out(size))),
        }
    })?;
    if time > 0 && !stream.capture_work(time) {
        stream.copy(time, device.is_some());
    }
    Ok(())
}

/// Says where managed memory is to be: `CU_MEM_ADVISE_*`, of which only the preferred location changes anything here.
fn advise(process: &Process, address: u64, advice: u32, device: Option<i32>) -> Outcome {
    const SET: u32 = 3;
    const UNSET: u32 = 4;
    let guest = match (advice, device) {
        (1..=6, None) => None,
        (1..=6, Some(ordinal)) => Some(process.device(ordinal)?.guest(process.sim)?),
        _ => return Err(Code::InvalidValue),
    };
    let own = process.memory.with(address, |block| Arc::clone(&block.context.guest));
    managed(process, address, |block, home| {
        match advice {
            SET => settle(home, guest.as_ref(), block.1),
            UNSET => settle(home, own.as_ref(), block.1),
            _ => {}
        }
        Ok(())
    })
}

/// Kernels of another device touch it from now on, or of none.
fn settle(home: &mut Option<Arc<Guest>>, new: Option<&Arc<Guest>>, size: u64) {
    if home.as_ref().map(Arc::as_ptr) == new.map(Arc::as_ptr) {
        return;
    }
    if let Some(guest) = new {
        guest.manage(size);
    }
    if let Some(before) = std::mem::replace(home, new.map(Arc::clone)) {
        before.unmanage(size);
    }
}

/// Changes whose managed memory is: its address and size, and its home.
fn managed<T>(
    process: &Process,
    address: u64,
    change: impl FnOnce((u64, u64), &mut Option<Arc<Guest>>) -> Outcome<T>,
) -> Outcome<T> {
    let changed = process.memory.with(address, |block| {
        let at = (block.address, block.size);
        match &mut block.payer {
            Payer::Host(Host { managed: true, home, .. }) => change(at, home),
            _ => Err(Code::InvalidValue),
        }
    });
    changed.unwrap_or(Err(Code::InvalidValue))
}

/// One of `cuPointerGetAttribute`'s answers.
fn attribute(block: &Block, address: u64, attribute: u32, answer: Out<()>) -> Outcome {
    let host = block.host();
    let managed = host.is_some_and(|host| host.managed);
    let word = |value: u32| answer.cast::<u32>().set(value);
    let long = |value: u64| answer.cast::<u64>().set(value);
    match attribute {
        1 => answer.cast::<context::Handle>().set(context::Handle::of(Some(block.context))),
        // CU_MEMORYTYPE_HOST or CU_MEMORYTYPE_DEVICE.
        2 => word(if host.is_some() && !managed { 1 } else { 2 }),
        3 => long(address),
        4 if host.is_some() => long(address),
        4 => Err(Code::InvalidValue),
        6 => word(0),
        7 => long(block.id),
        8 => word(u32::from(managed)),
        9 => word(block.context.device.ordinal.cast_unsigned()),
        10 => word(u32::from(matches!(block.payer, Payer::Guest(_)))),
        11 => long(block.address),
        12 => long(block.size),
        13 => word(1),
        14 | 15 => long(0),
        // Read and write.
        16 => word(3),
        17 => match block.payer {
            Payer::Pool(pool) => long(pool.number() as u64),
            _ => long(0),
        },
        18 => long(block.size),
        19 => long(block.address),
        20 => long(block.id),
        21 => word(0),
        _ => Err(Code::InvalidValue),
    }
}

/// What is told of an address that is no allocation: nothing, for questions that have a "none".
fn no_attribute(attribute: u32, answer: Out<()>) -> Outcome {
    match attribute {
        1 | 3 | 4 | 11 | 12 | 17 => answer.cast::<u64>().set(0),
        9 => answer.cast::<i32>().set(-2),
        8 | 13 => answer.cast::<u32>().set(0),
        _ => answer.cast::<u32>().set(0),
    }
}

entry! {
    fn cuMemAlloc_v2(process; address: Out<u64>, size: u64) {
        address.check()?;
        let context = context::current()?;
        address.set(process.memory.allocate(context, size)?)
    }

    fn cuMemAllocPitch_v2(process; address: Out<u64>, pitch: Out<u64>, width: u64, height: u64, element: u32) {
        address.check()?;
        pitch.check()?;
        let context = context::current()?;
        if !matches!(element, 4 | 8 | 16) {
            return Err(Code::InvalidValue);
        }
        let row = width.checked_next_multiple_of(PITCH).ok_or(Code::InvalidValue)?;
        let size = row.checked_mul(height).ok_or(Code::InvalidValue)?;
        address.set(process.memory.allocate(context, size)?)?;
        pitch.set(row)
    }

    /// Of any sort that has no owner of another kind.
    fn cuMemFree_v2(process; address: u64) {
        context::current()?;
        let sort = |block: &Block| match &block.payer {
            Payer::Guest(_) | Payer::Pool(_) | Payer::Graph { .. } | Payer::External => true,
            Payer::Host(host) => host.managed,
            Payer::Stranger => false,
        };
        if address == 0 { Ok(()) } else { process.memory.free(address, sort) }
    }

    fn cuMemGetAddressRange_v2(process; base: Out<u64>, size: Out<u64>, address: u64) {
        context::current()?;
        let found = process.memory.with(address, |block| (block.address, block.size));
        let found = found.or_else(|| process.physical.range(address)).ok_or(Code::NotFound)?;
        base.offer(found.0);
        size.offer(found.1);
        Ok(())
    }

    /// Takes no device memory until a kernel touches it or it is moved there.
    fn cuMemAllocManaged(process; address: Out<u64>, size: u64, flags: u32) {
        address.check()?;
        if flags == 0 || flags & !ATTACH != 0 {
            return Err(Code::InvalidValue);
        }
        let guest = Arc::clone(&context::current()?.guest);
        let host = Host { managed: true, registered: false, flags, home: Some(Arc::clone(&guest)) };
        let made = add_host(process, size, None, host)?;
        guest.manage(size);
        address.set(made)
    }

    fn cuMemPrefetchAsync | cuMemPrefetchAsync_ptsz(process, own; address: u64, size: u64, device: i32, stream: Handle<Stream>) {
        // CU_DEVICE_CPU.
        prefetch(process, (address, size), (device != -1).then_some(device), Stream::of(stream, own)?)
    }

    fn cuMemPrefetchAsync_v2 | cuMemPrefetchAsync_v2_ptsz(
        process, own; address: u64, size: u64, location: Location, _flags: u32, stream: Handle<Stream>,
    ) {
        prefetch(process, (address, size), location.device(), Stream::of(stream, own)?)
    }

    fn cuMemAdvise(process; address: u64, _size: u64, advice: u32, device: i32) {
        advise(process, address, advice, (device != -1).then_some(device))
    }

    fn cuMemAdvise_v2(process; address: u64, _size: u64, advice: u32, location: Location) {
        advise(process, address, advice, location.device())
    }

    fn cuMemAllocHost_v2(process; address: Out<u64>, size: u64) {
        address.check()?;
        address.set(add_host(process, size, None, pinned(0, false))?)
    }

    fn cuMemHostAlloc(process; address: Out<u64>, size: u64, flags: u32) {
        address.check()?;
        address.set(add_host(process, size, None, pinned(flags, false))?)
    }

    fn cuMemFreeHost(process; address: u64) {
        context::current()?;
        let sort = |block: &Block| block.host().is_some_and(|host| !host.managed && !host.registered);
        if address == 0 { Ok(()) } else { process.memory.free(address, sort) }
    }

    fn cuMemHostRegister(process; address: u64, size: u64, flags: u32) {
        register(process, address, size, flags)
    }

    fn cuMemHostRegister_v2(process; address: u64, size: u64, flags: u32) {
        register(process, address, size, flags)
    }

    fn cuMemHostUnregister(process; address: u64) {
        context::current()?;
        let freed = process.memory.free(address, |block| block.host().is_some_and(|host| host.registered));
        freed.map_err(|_| Code::HostMemoryNotRegistered)
    }

    fn cuMemHostGetDevicePointer_v2(process; device: Out<u64>, address: u64, _flags: u32) {
        context::current()?;
        process.memory.with(address, |block| block.host().map(drop)).flatten().ok_or(Code::InvalidValue)?;
        device.set(address)
    }

    fn cuMemHostGetFlags(process; flags: Out<u32>, address: u64) {
        context::current()?;
        let found = process.memory.with(address, |block| block.host().map(|host| host.flags)).flatten();
        flags.set(found.ok_or(Code::InvalidValue)?)
    }

    fn cuPointerGetAttribute(process; answer: Out<()>, which: u32, address: u64) {
        answer.check()?;
        let found = process.memory.with(address, |block| attribute(block, address, which, answer));
        found.or_else(|| process.physical.attribute(address, which, answer)).unwrap_or(Err(Code::InvalidValue))
    }

    fn cuPointerGetAttributes(process; count: u32, which: In<u32>, answers: In<Out<()>>, address: u64) {
        let which = read_all(which, count as usize)?;
        let answers = read_all(answers, count as usize)?;
        for (which, answer) in which.into_iter().zip(answers) {
            let found = process.memory.with(address, |block| attribute(block, address, which, answer));
            let found = found.or_else(|| process.physical.attribute(address, which, answer));
            // Here what does not apply is none, and no error: so the runtime asks for a host's address of any memory.
            found.unwrap_or(Err(Code::InvalidValue)).or_else(|_| no_attribute(which, answer))?;
        }
        Ok(())
    }

    fn cuPointerSetAttribute(process; _value: In<u32>, which: u32, address: u64) {
        // CU_POINTER_ATTRIBUTE_SYNC_MEMOPS only.
        if which != 6 {
            return Err(Code::InvalidValue);
        }
        process.memory.with(address, |_| ()).ok_or(Code::InvalidValue)
    }

    fn cuMemGetInfo(_process; free: Out<u32>, total: Out<u32>) {
        let (left, all) = context::current()?.guest.memory();
        free.offer(u32::try_from(left).unwrap_or(u32::MAX));
        total.offer(u32::try_from(all).unwrap_or(u32::MAX));
        Ok(())
    }

    fn cuMemGetInfo_v2(_process; free: Out<u64>, total: Out<u64>) {
        let (left, all) = context::current()?.guest.memory();
        free.offer(left);
        total.offer(all);
        Ok(())
    }
}

fn register(process: &Process, address: u64, size: u64, flags: u32) -> Outcome {
    let known = process.memory.with(address, |_| ());
    if known.is_some() {
        return Err(Code::HostMemoryAlreadyRegistered);
    }
    add_host(process, size, Some(address), pinned(flags, true)).map(drop)
}

/// Frees what a context that ends leaves behind; of a primary one, what pools of its device have given as well.
pub(crate) fn end(process: &Process, context: &Context, primary: bool) {
    process.memory.free_all(|block| match &block.payer {
        Payer::Pool(_) | Payer::Graph { .. } => primary && std::ptr::eq(block.context.device, context.device),
        _ => block.context.id == context.id,
    });
}
