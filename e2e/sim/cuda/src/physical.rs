//! Virtual memory: physical memory by handle, reserved addresses, and one mapped at the other.
//!
//! Physical memory lives as long as somebody refers to it: its handle as often as it was created, retained or imported,
//! each mapping once, and other processes that have imported it. Whoever created it pays until then, as far as this
//! process lives: what another process still holds when the last reference here goes is looked at again before
//! memory is said to be short.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use divvy_sim::Guest;

use crate::argument::{In, Out};
use crate::code::Code;
use crate::content::Content;
use crate::context;
use crate::device::read_all;
use crate::figures::PAGE;
use crate::frame::{Outcome, entry};
use crate::holders::Holder;
use crate::memory;
use crate::pool::{Access, Location};
use crate::process::Process;
use crate::shareable::{HEADER, alone};

/// Reserved addresses lie from here on.
const BASE: u64 = memory::END;
/// And below this: a program's own code may be beyond it.
const END: u64 = 0x5500 << 32;
/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    pub(crate) kind: u32,
    pub(crate) handles: u32,
    pub(crate) location: Location,
    pub(crate) windows: u64,
    pub(crate) compression: u8,
    pub(crate) rdma: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

const _: () = assert!(size_of::<Properties>() == 32);

/// All of the process.
#[derive(Default)]
pub(crate) struct Physical {
    store: Mutex<Store>,
}

#[derive(Default)]
pub(crate) struct Store {
    pub(crate) allocations: HashMap<u64, Allocation>,
    last: u64,
    /// Ends of reserved ranges by their begins, and ranges that were freed.
    reserved: BTreeMap<u64, u64>,
    free: BTreeMap<u64, u64>,
    next: Option<u64>,
    mapped: BTreeMap<u64, Mapping>,
    pub(crate) held: HashMap<Holder, u64>,
    /// Freed here, and imported elsewhere when they were.
    lingering: Vec<(File, Arc<Guest>, u64)>,
}

/// Physical memory.
pub(crate) struct Allocation {
    pub(crate) properties: Properties,
    pub(crate) size: u64,
    /// Who pays: nobody here for imported memory and memory of the host.
    pub(crate) guest: Option<Arc<Guest>>,
    pub(crate) references: u32,
    pub(crate) mappings: u32,
    pub(crate) content: Content,
    /// Once it was exported or imported.
    pub(crate) shared: Option<File>,
}

/// A mapping, at the address that it is kept by.
struct Mapping {
    size: u64,
    offset: u64,
    handle: u64,
    access: u32,
}

impl Physical {
    pub(crate) fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mapped range that an address is in.
    pub(crate) fn range(&self, address: u64) -> Option<(u64, u64)> {
        self.store().mapping(address).map(|(begin, mapping)| (begin, mapping.size))
    }

    /// Host memory that stands for so many bytes at a reserved address; none for other addresses.
    pub(crate) fn place(&self, address: u64, length: u64) -> Option<Outcome<*mut u8>> {
        (BASE..END).contains(&address).then(|| self.store().place(address, length))
    }

    /// One of `cuPointerGetAttribute`'s answers, for a mapped address.
    pub(crate) fn attribute(&self, address: u64, which: u32, answer: Out<()>) -> Option<Outcome> {
        let store = self.store();
        let (begin, mapping) = store.mapping(address)?;
        let allocation = store.allocations.get(&mapping.handle)?;
        let long = |value: u64| answer.cast::<u64>().set(value);
        let word = |value: u32| answer.cast::<u32>().set(value);
        Some(match which {
            1 | 17 => long(0),
            2 => word(if allocation.properties.location.kind == Location::DEVICE { 2 } else { 1 }),
            3 => long(address),
            6 | 8 | 10 | 15 | 21 => word(0),
            7 | 20 => long(mapping.handle),
            9 => word(allocation.properties.location.id.cast_unsigned()),
            11 | 19 => long(begin),
            12 | 18 => long(mapping.size),
            13 => word(1),
            14 => long(allocation.properties.handles.into()),
            16 => word(mapping.access),
            _ => Err(Code::InvalidValue),
        })
    }

    /// Gives back what no other process holds any more.
    pub(crate) fn sweep(&self) {
        self.store().lingering.retain(|(file, guest, size)| {
            let gone = alone(file);
            if gone {
                guest.refund(*size);
            }
            !gone
        });
    }
}

impl Store {
    fn mapping(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (begin, mapping) = self.mapped.range(..=address).next_back()?;
        (address - begin < mapping.size).then_some((*begin, mapping))
    }

    /// Of the memory that is mapped at an address.
    pub(crate) fn handle_at(&self, address: u64) -> Option<u64> {
        self.mapping(address).map(|(_, mapping)| mapping.handle)
    }

    fn place(&mut self, address: u64, length: u64) -> Outcome<*mut u8> {
        let (begin, mapping) = self.mapping(address).ok_or(Code::InvalidValue)?;
        let (within, offset, handle) = (address - begin, mapping.offset, mapping.handle);
        // A copy over two mappings would be of two pieces of host memory.
        if mapping.access == 0 || length > mapping.size - within {
            return Err(Code::InvalidValue);
        }
        let allocation = self.allocations.get_mut(&handle).ok_or(Code::InvalidValue)?;
        let skip = if allocation.shared.is_some() { HEADER as u64 } else { 0 };
        let place = allocation.content.place(allocation.size)?;
        Ok(place.wrapping_add((skip + offset + within) as usize))
    }

    pub(crate) fn add(&mut self, allocation: Allocation) -> u64 {
        self.last += 1;
        // No small numbers, which programs could mistake for something else.
        let handle = 0x7ff0_0000_0000 + (self.last << 8);
        self.allocations.insert(handle, allocation);
        handle
    }

    /// Lets go of what nothing refers to.
    pub(crate) fn end(&mut self, handle: u64) {
        if self
            .allocations
            .get(&handle)
            .is_none_or(|allocation| allocation.references + allocation.mappings > 0)
        {
            return;
        }
        let Some(Allocation { guest, size, content, shared, .. }) = self.allocations.remove(&handle) else {
            return;
        };
        content.unmap();
        match (guest, shared) {
            (Some(guest), Some(file)) if !alone(&file) => self.lingering.push((file, guest, size)),
            (Some(guest), _) => guest.refund(size),
            (None, _) => {}
        }
    }

    fn unmap(&mut self, address: u64, size: u64) -> Outcome {
        let end = address.checked_add(size).ok_or(Code::InvalidValue)?;
        let pieces: Vec<u64> = self.mapped.range(address..end).map(|(begin, _)| *begin).collect();
        let covered: u64 =
            pieces.iter().filter_map(|begin| self.mapped.get(begin)).map(|mapping| mapping.size).sum();
        if covered != size || size == 0 {
            return Err(Code::InvalidValue);
        }
        for mapping in pieces.iter().filter_map(|begin| self.mapped.remove(begin)).collect::<Vec<_>>() {
            if let Some(allocation) = self.allocations.get_mut(&mapping.handle) {
                allocation.mappings -= 1;
            }
            self.end(mapping.handle);
        }
        Ok(())
    }

    /// The reserved range that holds all of another one.
    fn reservation(&self, address: u64, size: u64) -> bool {
        let end = address.checked_add(size);
        let found = self.reserved.range(..=address).next_back();
        found.zip(end).is_some_and(|((_, last), end)| end <= *last)
    }

    fn reserve(&mut self, size: u64, alignment: u64) -> Outcome<u64> {
        let fits = |(begin, end): (&u64, &u64)| {
            let address = begin.checked_next_multiple_of(alignment)?;
            (address == *begin && end - begin == size).then_some(address)
        };
        let address = match self.free.iter().find_map(fits) {
            Some(address) => {
                self.free.remove(&address);
                address
            }
            None => {
                let next = self.next.unwrap_or(BASE);
                let address = next.checked_next_multiple_of(alignment).ok_or(Code::OutOfMemory)?;
                let end = address.checked_add(size).filter(|end| *end <= END).ok_or(Code::OutOfMemory)?;
                self.next = Some(end);
                address
            }
        };
        self.reserved.insert(address, address + size);
        Ok(address)
    }
}

fn create(process: &'static Process, size: u64, properties: Properties) -> Outcome<u64> {
    if properties.kind != 1 || size == 0 || !size.is_multiple_of(PAGE) {
        return Err(Code::InvalidValue);
    }
    process.physical.sweep();
    let guest = match properties.location {
        Location { kind: Location::DEVICE, id } => {
            let guest = process.device(id)?.guest(process.sim)?;
            if !guest.charge(size) {
                return Err(Code::OutOfMemory);
            }
            Some(guest)
        }
        // Memory of the host.
        Location { kind: 2..=4, .. } => None,
        _ => return Err(Code::InvalidValue),
    };
    let content = Content::NONE;
    let allocation =
        Allocation { properties, size, guest, references: 1, mappings: 0, content, shared: None };
    Ok(process.physical.store().add(allocation))
}

entry! {
    fn cuMemGetAllocationGranularity(_process; granularity: Out<u64>, _properties: In<Properties>, _option: u32) {
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

    /// For RDMA, which nobody does here.
    fn cuMemGetHandleForAddressRange(_process; _handle: Out<i32>, _address: u64, _size: u64, _kind: u32, _flags: u64) {
        context::current()?;
        Err(Code::NotSupported)
    }
}
