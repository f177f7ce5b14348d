//! Entry points for virtual memory, multicast objects and exported memory: see
//! [`crate::physical_store`].

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};

use divvy_sim::usage::Place;
use rustix::fs::MemfdFlags;

use crate::argument::{In, Out, read_all};
use crate::code::{Code, Outcome};
use crate::content::Content;
use crate::frame::entry;
use crate::handle::Handle;
use crate::location::{Access, Location};
use crate::objects::{Process, Stream, current_context};
use crate::physical_store::{Allocation, HEADER, Holder, Mapping, Properties, lock};
use crate::pool_figures::PAGE;

fn create(process: &'static Process, size: u64, properties: Properties) -> Outcome<u64> {
    if properties.kind != 1 || size == 0 || !size.is_multiple_of(PAGE) {
        return Err(Code::InvalidValue);
    }
    process.physical.sweep();
    let gpu_process = match properties.location {
        Location { kind: Location::DEVICE, id } => {
            let gpu_process = process.device(id)?.gpu_process(process.sim)?;
            if !gpu_process.charge(size) {
                return Err(Code::OutOfMemory);
            }
            Some(gpu_process)
        }
        // Memory of the host.
        Location { kind: 2..=4, .. } => None,
        _ => return Err(Code::InvalidValue),
    };
    let content = Content::NONE;
    let allocation =
        Allocation { properties, size, gpu_process, references: 1, mappings: 0, content, shared: None };
    Ok(process.physical.store().add(allocation))
}

entry! {
    fn cuMemGetAllocationGranularity(
        _process; granularity: Out<u64>, _properties: In<Properties>, _option: u32,
    ) {
        granularity.set(PAGE)
    }

    fn cuMemCreate(process; handle: Out<u64>, size: u64, properties: In<Properties>, flags: u64) {
        handle.check()?;
        if flags != 0 {
            return Err(Code::InvalidValue);
        }
        handle.set(create(process, size, properties.get()?)?)
    }

    fn cuMemRelease(process; handle: u64) {
        process.physical.sweep();
        let mut store = process.physical.store();
        let allocation = store.allocations.get_mut(&handle).filter(|allocation| allocation.references > 0);
        allocation.ok_or(Code::InvalidValue)?.references -= 1;
        store.end(handle);
        Ok(())
    }

    fn cuMemRetainAllocationHandle(process; handle: Out<u64>, address: u64) {
        handle.check()?;
        let mut store = process.physical.store();
        let found = store.mapping(address).map(|(_, mapping)| mapping.handle).ok_or(Code::InvalidValue)?;
        store.allocations.get_mut(&found).ok_or(Code::InvalidValue)?.references += 1;
        handle.set(found)
    }

    fn cuMemGetAllocationPropertiesFromHandle(process; properties: Out<Properties>, handle: u64) {
        let store = process.physical.store();
        properties.set(store.allocations.get(&handle).ok_or(Code::InvalidValue)?.properties)
    }

    fn cuMemAddressReserve(process; address: Out<u64>, size: u64, alignment: u64, _wish: u64, flags: u64) {
        address.check()?;
        let aligned = alignment == 0 || alignment.is_power_of_two();
        if size == 0 || !size.is_multiple_of(PAGE) || !aligned || flags != 0 {
            return Err(Code::InvalidValue);
        }
        address.set(process.physical.store().reserve(size, alignment.max(PAGE))?)
    }

    fn cuMemAddressFree(process; address: u64, size: u64) {
        let mut store = process.physical.store();
        let whole = store.reserved.get(&address).is_some_and(|end| *end == address + size);
        let used = store.mapped.range(address..address.saturating_add(size)).next().is_some();
        if !whole || used {
            return Err(Code::InvalidValue);
        }
        store.reserved.remove(&address);
        store.free.insert(address, address + size);
        Ok(())
    }

    fn cuMemMap(process; address: u64, size: u64, offset: u64, handle: u64, flags: u64) {
        let mut store = process.physical.store();
        let reserved = store.reservation(address, size);
        let end = address.saturating_add(size);
        let before = address.checked_sub(1).and_then(|before| store.mapping(before));
        let free = store.mapped.range(address..end).next().is_none()
            && before.is_none_or(|(begin, mapping)| begin + mapping.size <= address);
        let pages = [address, size, offset].iter().all(|number| number.is_multiple_of(PAGE));
        let allocation = store.allocations.get_mut(&handle).filter(|allocation| allocation.references > 0);
        let allocation = allocation.ok_or(Code::InvalidValue)?;
        let within = offset.checked_add(size).is_some_and(|end| end <= allocation.size);
        if flags != 0 || size == 0 || !reserved || !free || !pages || !within {
            return Err(Code::InvalidValue);
        }
        allocation.mappings += 1;
        store.mapped.insert(address, Mapping { size, offset, handle, access: 0 });
        Ok(())
    }

    fn cuMemUnmap(process; address: u64, size: u64) {
        process.physical.store().unmap(address, size)
    }

    fn cuMemSetAccess(process; address: u64, size: u64, access: In<Access>, count: u64) {
        let access = read_all(access, count as usize)?;
        let mut store = process.physical.store();
        let end = address.checked_add(size).ok_or(Code::InvalidValue)?;
        let covered: u64 = store.mapped.range(address..end).map(|(_, mapping)| mapping.size).sum();
        if covered != size || size == 0 {
            return Err(Code::InvalidValue);
        }
        let flags = access.iter().fold(0, |most, access| access.flags.max(most));
        store.mapped.range_mut(address..end).for_each(|(_, mapping)| mapping.access = flags);
        Ok(())
    }

    fn cuMemGetAccess(process; flags: Out<u64>, _location: In<Location>, address: u64) {
        let store = process.physical.store();
        flags.set(store.mapping(address).ok_or(Code::InvalidValue)?.1.access.into())
    }

    /// For RDMA, which is not simulated.
    fn cuMemGetHandleForAddressRange(
        _process; _handle: Out<i32>, _address: u64, _size: u64, _kind: u32, _flags: u64,
    ) {
        current_context()?;
        Err(Code::NotSupported)
    }
}

/// `CUarrayMapInfo`: the position in an array, the operation, the kind of handle, the handle, and
/// the offset in its memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    place: [u64; 7],
    operation: u32,
    kind: u32,
    handle: u64,
    offset: u64,
    rest: [u32; 4],
}

/// `CUmulticastObjectProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Multicast {
    devices: u32,
    size: u64,
    handles: u64,
    flags: u64,
}

const _: () = assert!(size_of::<Tile>() == 96 && size_of::<Multicast>() == 32);

fn bind(process: &Process, multicast: u64, offset: u64, handle: u64) -> Outcome {
    process.physical.store().hold(Holder::Multicast(multicast, offset), handle)
}

fn bind_at(process: &Process, multicast: u64, offset: u64, address: u64) -> Outcome {
    let mut store = process.physical.store();
    let handle = store.handle_at(address).ok_or(Code::InvalidValue)?;
    store.hold(Holder::Multicast(multicast, offset), handle)
}

entry! {
    fn cuMemMapArrayAsync | cuMemMapArrayAsync_ptsz(
        process, own; list: In<Tile>, count: u32, stream: Handle<Stream>,
    ) {
        Stream::of(stream, own)?;
        for tile in read_all(list, count as usize)? {
            let mut store = process.physical.store();
            match tile.operation {
                1 => store.hold(Holder::Tile(tile.place), tile.handle)?,
                2 => drop(store.release(Holder::Tile(tile.place))),
                _ => return Err(Code::InvalidValue),
            }
        }
        Ok(())
    }

    fn cuMulticastCreate(process; handle: Out<u64>, multicast: In<Multicast>) {
        handle.check()?;
        let size = multicast.get()?.size;
        let location = Location { kind: 0, id: 0 };
        let properties = Properties {
            kind: 1, handles: 0, location, windows: 0, compression: 0, rdma: 0, usage: 0, reserved: [0; 4],
        };
        let content = Content::NONE;
        let multicast = Allocation {
            properties, size, gpu_process: None, references: 1, mappings: 0, content, shared: None,
        };
        handle.set(process.physical.store().add(multicast))
    }

    fn cuMulticastAddDevice(process; multicast: u64, device: i32) {
        process.device(device)?;
        process.physical.store().allocations.get(&multicast).map(drop).ok_or(Code::InvalidValue)
    }

    fn cuMulticastBindMem(
        process; multicast: u64, at: u64, handle: u64, _offset: u64, _size: u64, _flags: u64,
    ) {
        bind(process, multicast, at, handle)
    }

    fn cuMulticastBindMem_v2(
        process; multicast: u64, _device: i32, at: u64, handle: u64, _offset: u64, _size: u64, _flags: u64,
    ) {
        bind(process, multicast, at, handle)
    }

    fn cuMulticastBindAddr(process; multicast: u64, at: u64, address: u64, _size: u64, _flags: u64) {
        bind_at(process, multicast, at, address)
    }

    fn cuMulticastBindAddr_v2(
        process; multicast: u64, _device: i32, at: u64, address: u64, _size: u64, _flags: u64,
    ) {
        bind_at(process, multicast, at, address)
    }

    fn cuMulticastUnbind(process; multicast: u64, _device: i32, at: u64, _size: u64) {
        let bound = process.physical.store().release(Holder::Multicast(multicast, at));
        if bound { Ok(()) } else { Err(Code::InvalidValue) }
    }
}

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: u32 = 1;
const MAGIC: u64 = 0x6469_7676_795f_766d;

/// Opens the file behind a descriptor again: locks and positions belong to the open file
/// description.
fn reopen(file: RawFd) -> Outcome<File> {
    let path = format!("/proc/self/fd/{file}");
    File::options().read(true).write(true).open(path).map_err(|_| Code::InvalidValue)
}

/// The header of an exported allocation's file.
fn header(place: Place, size: u64, properties: &Properties) -> Vec<u8> {
    let (gi, ci) = place.instance.unwrap_or((u32::MAX, u32::MAX));
    let words = [MAGIC, place.slot as u64, gi.into(), ci.into(), size, properties.handles.into()];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Reads the header: place, size and handle types.
fn read_header(mut file: &File) -> Outcome<(Place, u64, u32)> {
    let mut words = [[0; 8]; 6];
    for word in &mut words {
        file.read_exact(word).map_err(|_| Code::InvalidValue)?;
    }
    let [magic, slot, gi, ci, size, handles] = words.map(u64::from_le_bytes);
    if magic != MAGIC {
        return Err(Code::InvalidValue);
    }
    let instance = u32::try_from(gi).ok().zip(u32::try_from(ci).ok()).filter(|(gi, _)| *gi != u32::MAX);
    Ok((Place { slot: slot as usize, instance }, size, handles as u32))
}

/// Moves an allocation's memory to a file that others can map.
fn share(process: &Process, allocation: &mut Allocation) -> Outcome<RawFd> {
    if allocation.shared.is_none() {
        let device = process.device(allocation.properties.location.device().ok_or(Code::NotSupported)?)?;
        let flags = MemfdFlags::CLOEXEC;
        let made = rustix::fs::memfd_create("cuda-memory", flags).map_err(|_| Code::OperatingSystem)?;
        let mut file = File::from(made);
        let write = |file: &mut File| {
            file.write_all(&header(device.place, allocation.size, &allocation.properties))?;
            file.set_len(HEADER as u64 + allocation.size)
        };
        write(&mut file).map_err(|_| Code::OperatingSystem)?;
        let mut content = Content::of(&file, HEADER as u64 + allocation.size)?;
        let before = std::mem::replace(&mut allocation.content, Content::NONE);
        if before.address() != 0 {
            let to = content.place(0)?.wrapping_add(HEADER);
            // SAFETY: both are mappings of the allocation's size, the new one after its header.
            unsafe {
                std::ptr::copy_nonoverlapping(before.address() as *const u8, to, allocation.size as usize)
            };
        }
        before.unmap();
        allocation.content = content;
        allocation.shared = Some(reopen(file.as_raw_fd())?);
    }
    let file = allocation.shared.as_ref().ok_or(Code::Unknown)?;
    // A separate open file description, so that the importer's lock is not the exporter's.
    Ok(reopen(file.as_raw_fd())?.into_raw_fd())
}

fn import(process: &'static Process, descriptor: RawFd) -> Outcome<u64> {
    if descriptor < 0 {
        return Err(Code::InvalidValue);
    }
    let file = reopen(descriptor)?;
    let (place, size, handles) = read_header(&file)?;
    let device = process.devices.iter().find(|device| device.place == place).ok_or(Code::InvalidDevice)?;
    if !lock(file.as_raw_fd(), libc::F_RDLCK) {
        return Err(Code::InvalidValue);
    }
    let content = Content::of(&file, HEADER as u64 + size)?;
    let location = Location { kind: Location::DEVICE, id: device.ordinal };
    let properties = Properties {
        kind: 1,
        handles,
        location,
        windows: 0,
        compression: 0,
        rdma: 0,
        usage: 0,
        reserved: [0; 4],
    };
    let shared = Some(file);
    let allocation =
        Allocation { properties, size, gpu_process: None, references: 1, mappings: 0, content, shared };
    Ok(process.physical.store().add(allocation))
}

entry! {
    fn cuMemExportToShareableHandle(process; descriptor: Out<i32>, handle: u64, kind: u32, _flags: u64) {
        descriptor.check()?;
        let mut store = process.physical.store();
        let allocation = store.allocations.get_mut(&handle).filter(|allocation| allocation.references > 0);
        let allocation = allocation.ok_or(Code::InvalidValue)?;
        if kind != DESCRIPTOR || allocation.properties.handles & kind == 0 {
            return Err(Code::InvalidValue);
        }
        descriptor.set(share(process, allocation)?)
    }

    /// The descriptor itself is passed, as if it were an address.
    fn cuMemImportFromShareableHandle(process; handle: Out<u64>, descriptor: usize, kind: u32) {
        handle.check()?;
        if kind != DESCRIPTOR {
            return Err(Code::InvalidValue);
        }
        let descriptor = i32::try_from(descriptor & 0xffff_ffff).map_err(|_| Code::InvalidValue)?;
        handle.set(import(process, descriptor)?)
    }
}
