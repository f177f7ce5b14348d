//! Physical memory by handle, reserved address ranges, and the mappings between them.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use divvy_sim::GpuProcess;

use crate::addresses;
use crate::argument::Out;
use crate::code::{Code, Outcome};
use crate::content::Content;
use crate::location::Location;

/// Reserved addresses begin here,
const BASE: u64 = addresses::END;
/// and end here: a program's own code may lie beyond.
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

/// The virtual memory of the process.
///
/// Physical memory lives as long as it has references: each creation, retain or import of its
/// handle, each mapping, and other processes that imported it. Its creator pays until then, while
/// the process lives. Memory that another process holds beyond the last local reference is checked
/// again before an allocation fails. Tiles of sparse arrays and multicast objects hold it too.
#[derive(Default)]
pub(crate) struct Physical {
    store: Mutex<Store>,
}

#[derive(Default)]
pub(crate) struct Store {
    pub(crate) allocations: HashMap<u64, Allocation>,
    last: u64,
    /// The ends of reserved ranges by their begins, and ranges that were freed.
    pub(crate) reserved: BTreeMap<u64, u64>,
    pub(crate) free: BTreeMap<u64, u64>,
    next: Option<u64>,
    pub(crate) mapped: BTreeMap<u64, Mapping>,
    pub(crate) held: HashMap<Holder, u64>,
    /// Memory that was freed here while another process had it imported.
    lingering: Vec<(File, Arc<GpuProcess>, u64)>,
}

/// Physical memory.
pub(crate) struct Allocation {
    pub(crate) properties: Properties,
    pub(crate) size: u64,
    /// The process that pays; none for imported memory and host memory.
    pub(crate) gpu_process: Option<Arc<GpuProcess>>,
    pub(crate) references: u32,
    pub(crate) mappings: u32,
    pub(crate) content: Content,
    /// Set once it was exported or imported.
    pub(crate) shared: Option<File>,
}

/// A mapping, keyed by its address.
pub(crate) struct Mapping {
    pub(crate) size: u64,
    pub(crate) offset: u64,
    pub(crate) handle: u64,
    pub(crate) access: u32,
}

impl Physical {
    pub(crate) fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mapped range that contains an address.
    pub(crate) fn range(&self, address: u64) -> Option<(u64, u64)> {
        self.store().mapping(address).map(|(begin, mapping)| (begin, mapping.size))
    }

    /// The host memory for `length` bytes at a reserved address; `None` for other addresses.
    pub(crate) fn place(&self, address: u64, length: u64) -> Option<Outcome<*mut u8>> {
        (BASE..END).contains(&address).then(|| self.store().place(address, length))
    }

    /// The answer to one attribute of `cuPointerGetAttribute`, for a mapped address.
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

    /// Releases memory that no other process holds any more.
    pub(crate) fn sweep(&self) {
        self.store().lingering.retain(|(file, gpu_process, size)| {
            let gone = alone(file);
            if gone {
                gpu_process.refund(*size);
            }
            !gone
        });
    }
}

impl Store {
    /// The mapping that contains an address, and the address where it begins.
    pub(crate) fn mapping(&self, address: u64) -> Option<(u64, &Mapping)> {
        let (begin, mapping) = self.mapped.range(..=address).next_back()?;
        (address - begin < mapping.size).then_some((*begin, mapping))
    }

    /// The handle of the memory that is mapped at an address.
    pub(crate) fn handle_at(&self, address: u64) -> Option<u64> {
        self.mapping(address).map(|(_, mapping)| mapping.handle)
    }

    fn place(&mut self, address: u64, length: u64) -> Outcome<*mut u8> {
        let (begin, mapping) = self.mapping(address).ok_or(Code::InvalidValue)?;
        let (within, offset, handle) = (address - begin, mapping.offset, mapping.handle);
        // A copy across two mappings would need two pieces of host memory.
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
        // Handles are large numbers, so that programs cannot confuse them with other values.
        let handle = 0x7ff0_0000_0000 + (self.last << 8);
        self.allocations.insert(handle, allocation);
        handle
    }

    /// Frees an allocation without references.
    pub(crate) fn end(&mut self, handle: u64) {
        if self
            .allocations
            .get(&handle)
            .is_none_or(|allocation| allocation.references + allocation.mappings > 0)
        {
            return;
        }
        let Some(Allocation { gpu_process, size, content, shared, .. }) = self.allocations.remove(&handle)
        else {
            return;
        };
        content.unmap();
        match (gpu_process, shared) {
            (Some(gpu_process), Some(file)) if !alone(&file) => {
                self.lingering.push((file, gpu_process, size))
            }
            (Some(gpu_process), _) => gpu_process.refund(size),
            (None, _) => {}
        }
    }

    pub(crate) fn unmap(&mut self, address: u64, size: u64) -> Outcome {
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

    /// Whether one reserved range contains the whole given range.
    pub(crate) fn reservation(&self, address: u64, size: u64) -> bool {
        let end = address.checked_add(size);
        let found = self.reserved.range(..=address).next_back();
        found.zip(end).is_some_and(|((_, last), end)| end <= *last)
    }

    pub(crate) fn reserve(&mut self, size: u64, alignment: u64) -> Outcome<u64> {
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

/// A reference to physical memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    Tile([u64; 7]),
    /// A multicast object, from that offset.
    Multicast(u64, u64),
}

impl Store {
    pub(crate) fn hold(&mut self, holder: Holder, handle: u64) -> Outcome {
        let allocation = self.allocations.get_mut(&handle).ok_or(Code::InvalidValue)?;
        allocation.mappings += 1;
        self.release(holder);
        self.held.insert(holder, handle);
        Ok(())
    }

    pub(crate) fn release(&mut self, holder: Holder) -> bool {
        let Some(handle) = self.held.remove(&holder) else { return false };
        if let Some(allocation) = self.allocations.get_mut(&handle) {
            allocation.mappings -= 1;
        }
        self.end(handle);
        true
    }
}

/// The size of the header of a shared allocation's file, in bytes.
pub(crate) const HEADER: usize = 4096;

/// Whether no other process has imported the file's memory: importers hold a shared lock.
fn alone(file: &File) -> bool {
    lock(file.as_raw_fd(), libc::F_WRLCK)
}

/// Locks this open file description, until it is closed.
pub(crate) fn lock(file: RawFd, kind: i32) -> bool {
    // SAFETY: all-zero bytes are a flock.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_len = 1;
    // SAFETY: an open descriptor, and a structure that lives during the call.
    unsafe { libc::fcntl(file, libc::F_OFD_SETLK, &lock) == 0 }
}
