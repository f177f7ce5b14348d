//! Memory by address: plain, pitched, managed and pinned, and the attributes of addresses.

use divvy_sim::GpuProcess;
use std::sync::Arc;

use crate::argument::{In, Out, read_all};
use crate::code::{Code, Outcome};
use crate::content::Content;
use crate::frame::entry;
use crate::handle::Handle;
use crate::location::Location;
use crate::objects::{Block, ContextHandle, Host, Payer, Process, Stream, current_context};

/// `CU_MEM_ATTACH_GLOBAL` and `CU_MEM_ATTACH_HOST`.
const ATTACH: u32 = 3;
/// Rows of pitched memory begin at multiples of this, in bytes.
const PITCH: u64 = 512;

/// Adds host memory for devices: mapped here, or the program's own.
fn add_host(process: &Process, size: u64, own: Option<u64>, host: Host) -> Outcome<u64> {
    let context = current_context()?;
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
    let gpu_process = match device {
        Some(ordinal) => Some(process.device(ordinal)?.gpu_process(process.sim)?),
        None => None,
    };
    let time = managed(process, address, |block, home| {
        if address - block.0 + size > block.1 {
            return Err(Code::InvalidValue);
        }
        match gpu_process {
            Some(gpu_process) => {
                settle(home, Some(&gpu_process), block.1);
                Ok(gpu_process.prefetch(size))
            }
            // It still belongs to the device: the next kernel there brings it back.
            None => Ok(home.as_ref().map_or(0, |home| home.offload(size))),
        }
    })?;
    if time > 0 && !stream.capture_work(time) {
        stream.copy(time, device.is_some());
    }
    Ok(())
}

/// Sets the location of managed memory: of `CU_MEM_ADVISE_*`, only the preferred location has an
/// effect here.
fn advise(process: &Process, address: u64, advice: u32, device: Option<i32>) -> Outcome {
    const SET: u32 = 3;
    const UNSET: u32 = 4;
    let gpu_process = match (advice, device) {
        (1..=6, None) => None,
        (1..=6, Some(ordinal)) => Some(process.device(ordinal)?.gpu_process(process.sim)?),
        _ => return Err(Code::InvalidValue),
    };
    let own = process.memory.with(address, |block| Arc::clone(&block.context.gpu_process));
    managed(process, address, |block, home| {
        match advice {
            SET => settle(home, gpu_process.as_ref(), block.1),
            UNSET => settle(home, own.as_ref(), block.1),
            _ => {}
        }
        Ok(())
    })
}

/// From now on kernels of another device use it, or of none.
fn settle(home: &mut Option<Arc<GpuProcess>>, new: Option<&Arc<GpuProcess>>, size: u64) {
    if home.as_ref().map(Arc::as_ptr) == new.map(Arc::as_ptr) {
        return;
    }
    if let Some(gpu_process) = new {
        gpu_process.add_managed(size);
    }
    if let Some(before) = std::mem::replace(home, new.map(Arc::clone)) {
        before.remove_managed(size);
    }
}

/// Changes the device of managed memory, given its address and size and the current device.
fn managed<T>(
    process: &Process,
    address: u64,
    change: impl FnOnce((u64, u64), &mut Option<Arc<GpuProcess>>) -> Outcome<T>,
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

/// The answer to one attribute of `cuPointerGetAttribute`.
fn attribute(block: &Block, address: u64, attribute: u32, answer: Out<()>) -> Outcome {
    let host = block.host();
    let managed = host.is_some_and(|host| host.managed);
    let word = |value: u32| answer.cast::<u32>().set(value);
    let long = |value: u64| answer.cast::<u64>().set(value);
    match attribute {
        1 => answer.cast::<ContextHandle>().set(ContextHandle::of(Some(block.context))),
        // CU_MEMORYTYPE_HOST or CU_MEMORYTYPE_DEVICE.
        2 => word(if host.is_some() && !managed { 1 } else { 2 }),
        3 => long(address),
        4 if host.is_some() => long(address),
        4 => Err(Code::InvalidValue),
        6 => word(0),
        7 => long(block.id),
        8 => word(u32::from(managed)),
        9 => word(block.context.device.ordinal.cast_unsigned()),
        10 => word(u32::from(matches!(block.payer, Payer::GpuProcess(_)))),
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

/// The answer for an address that is no allocation: an empty value, for attributes that have one.
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
        let context = current_context()?;
        address.set(process.memory.allocate(context, size)?)
    }

    fn cuMemAllocPitch_v2(
        process; address: Out<u64>, pitch: Out<u64>, width: u64, height: u64, element: u32,
    ) {
        address.check()?;
        pitch.check()?;
        let context = current_context()?;
        if !matches!(element, 4 | 8 | 16) {
            return Err(Code::InvalidValue);
        }
        let row = width.checked_next_multiple_of(PITCH).ok_or(Code::InvalidValue)?;
        let size = row.checked_mul(height).ok_or(Code::InvalidValue)?;
        address.set(process.memory.allocate(context, size)?)?;
        pitch.set(row)
    }

    /// Frees memory of any kind that has no other function for that.
    fn cuMemFree_v2(process; address: u64) {
        current_context()?;
        let sort = |block: &Block| match &block.payer {
            Payer::GpuProcess(_) | Payer::Pool(_) | Payer::Graph { .. } | Payer::External => true,
            Payer::Host(host) => host.managed,
            Payer::OtherProcess => false,
        };
        if address == 0 { Ok(()) } else { process.memory.free(address, sort) }
    }

    fn cuMemGetAddressRange_v2(process; base: Out<u64>, size: Out<u64>, address: u64) {
        current_context()?;
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
        let gpu_process = Arc::clone(&current_context()?.gpu_process);
        let host = Host { managed: true, registered: false, flags, home: Some(Arc::clone(&gpu_process)) };
        let made = add_host(process, size, None, host)?;
        gpu_process.add_managed(size);
        address.set(made)
    }

    fn cuMemPrefetchAsync | cuMemPrefetchAsync_ptsz(
        process, own; address: u64, size: u64, device: i32, stream: Handle<Stream>,
    ) {
        // CU_DEVICE_CPU.
        prefetch(process, (address, size), (device != -1).then_some(device), Stream::of(stream, own)?)
    }

    fn cuMemPrefetchAsync_v2 | cuMemPrefetchAsync_v2_ptsz(
        process, own; address: u64, size: u64, location: Location, _flags: u32, stream: Handle<Stream>,
    ) {
        prefetch(process, (address, size), location.device(), Stream::of(stream, own)?)
    }

    fn cuMemPrefetchBatchAsync | cuMemPrefetchBatchAsync_ptsz(
        process, own; addresses: In<u64>, sizes: In<u64>, count: u64, locations: In<Location>, indices:
        In<u64>,
        kinds: u64, _flags: u64, stream: Handle<Stream>,
    ) {
        let stream = Stream::of(stream, own)?;
        for at in 0..count as usize {
            // Each location applies from its index on.
            let mut location = locations.get()?;
            for kind in 0..kinds as usize {
                if indices.at(kind)? <= at as u64 {
                    location = locations.at(kind)?;
                }
            }
            prefetch(process, (addresses.at(at)?, sizes.at(at)?), location.device(), stream)?;
        }
        Ok(())
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
        current_context()?;
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
        current_context()?;
        let freed = process.memory.free(address, |block| block.host().is_some_and(|host| host.registered));
        freed.map_err(|_| Code::HostMemoryNotRegistered)
    }

    fn cuMemHostGetDevicePointer_v2(process; device: Out<u64>, address: u64, _flags: u32) {
        current_context()?;
        process.memory.with(address, |block| block.host().map(drop)).flatten().ok_or(Code::InvalidValue)?;
        device.set(address)
    }

    fn cuMemHostGetFlags(process; flags: Out<u32>, address: u64) {
        current_context()?;
        let found = process.memory.with(address, |block| block.host().map(|host| host.flags)).flatten();
        flags.set(found.ok_or(Code::InvalidValue)?)
    }

    fn cuPointerGetAttribute(process; answer: Out<()>, which: u32, address: u64) {
        answer.check()?;
        let found = process.memory.with(address, |block| attribute(block, address, which, answer));
        found
            .or_else(|| process.physical.attribute(address, which, answer))
            .unwrap_or(Err(Code::InvalidValue))
    }

    fn cuPointerGetAttributes(process; count: u32, which: In<u32>, answers: In<Out<()>>, address: u64) {
        let which = read_all(which, count as usize)?;
        let answers = read_all(answers, count as usize)?;
        for (which, answer) in which.into_iter().zip(answers) {
            let found = process.memory.with(address, |block| attribute(block, address, which, answer));
            let found = found.or_else(|| process.physical.attribute(address, which, answer));
            // Attributes that do not apply are empty here, not an error: the runtime queries the
            // host address of any memory.
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
        let (left, all) = current_context()?.gpu_process.memory_info();
        free.offer(u32::try_from(left).unwrap_or(u32::MAX));
        total.offer(u32::try_from(all).unwrap_or(u32::MAX));
        Ok(())
    }

    fn cuMemGetInfo_v2(_process; free: Out<u64>, total: Out<u64>) {
        let (left, all) = current_context()?.gpu_process.memory_info();
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
