//! Stream-ordered memory: pools that reserve device memory in chunks and hand it out.
//!
//! A pool keeps what is given back to it until a synchronisation, and beyond that as much as its release threshold
//! says. What is reserved, not what is used, is missing on the device. Freeing takes effect at once here: the order of
//! streams decides when memory may be used again, and programs cannot tell.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use divvy_sim::Guest;

use crate::argument::{In, Out};
use crate::code::Code;
use crate::content::Content;
use crate::context;
use crate::device::Device;
use crate::figures::Figures;
use crate::frame::{Outcome, entry};
use crate::handle::{Handle, Object};
use crate::memory::Payer;
use crate::process::{self, Process};
use crate::stream::Stream;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Location {
    pub(crate) kind: u32,
    pub(crate) id: i32,
}

impl Location {
    /// `CU_MEM_LOCATION_TYPE_DEVICE`.
    pub(crate) const DEVICE: u32 = 1;

    /// The ordinal, if it is a device.
    pub(crate) fn device(self) -> Option<i32> {
        (self.kind == Self::DEVICE).then_some(self.id)
    }
}

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    allocation: u32,
    handles: u32,
    location: Location,
    security: usize,
    max_size: u64,
    usage: u16,
    rdma: u8,
    reserved: [u8; 53],
}

const _: () = assert!(size_of::<Properties>() == 88);

impl Properties {
    /// Of pinned memory of a device.
    pub(crate) const fn of_device(ordinal: i32) -> Self {
        Self {
            allocation: 1,
            handles: 0,
            location: Location { kind: Location::DEVICE, id: ordinal },
            security: 0,
            max_size: 0,
            usage: 0,
            rdma: 0,
            reserved: [0; 53],
        }
    }

    /// The device that its memory is of, if it is a device's.
    pub(crate) fn device(self) -> Option<i32> {
        self.location.device()
    }
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Access {
    pub(crate) location: Location,
    pub(crate) flags: u32,
}

/// A memory pool.
pub(crate) struct Pool {
    /// None for memory of the host.
    device: Option<&'static Device>,
    process: &'static Process,
    /// A device's own: never destroyed.
    default: bool,
    properties: Properties,
    switches: Mutex<[u32; 3]>,
    book: Mutex<Book>,
}

impl Object for Pool {
    const MAGIC: u64 = 0x706f_6f6c_5f6c_6976;
}

#[derive(Default)]
struct Book {
    figures: Figures,
    /// Who pays for what is reserved, while something is.
    payer: Option<Arc<Guest>>,
    /// Destroyed: ends when the last of its memory comes back.
    closed: bool,
}

impl Pool {
    fn new(
        process: &'static Process,
        device: Option<&'static Device>,
        default: bool,
        properties: Properties,
    ) -> Self {
        let book =
            Book { figures: Figures { most: properties.max_size, ..Figures::default() }, ..Book::default() };
        Self { device, process, default, properties, switches: Mutex::new([1; 3]), book: Mutex::new(book) }
    }

    /// A pool of a device, as the device has of its own.
    pub(crate) fn of_device(process: &'static Process, device: &'static Device) -> Handle<Self> {
        Handle::new(Self::new(process, Some(device), true, Properties::of_device(device.ordinal)))
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn figures(&self) -> Figures {
        self.book().figures
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Figures)) {
        change(&mut self.book().figures);
    }

    /// Sets so many bytes aside for an allocation.
    pub(crate) fn take(&self, size: u64) -> Outcome {
        let mut book = self.book();
        if book.closed {
            return Err(Code::InvalidValue);
        }
        if let Some((liked, least)) = book.figures.growth(size)? {
            let grown = match self.device {
                None => liked,
                Some(device) => {
                    let guest = match &book.payer {
                        Some(guest) => Arc::clone(guest),
                        None => device.guest(self.process.sim)?,
                    };
                    let fits = [liked, least].into_iter().find(|grown| guest.charge(*grown));
                    let grown = fits.ok_or(Code::OutOfMemory)?;
                    book.payer = Some(guest);
                    grown
                }
            };
            book.figures.grow(grown);
        }
        book.figures.take(size);
        Ok(())
    }

    /// Takes back what an allocation had.
    pub(crate) fn give(&self, size: u64) {
        let mut book = self.book();
        book.figures.give(size);
        if book.closed {
            Self::shrink(&mut book, 0);
        }
    }

    /// What a synchronisation does.
    pub(crate) fn settle(&self) {
        let mut book = self.book();
        let threshold = book.figures.threshold;
        Self::shrink(&mut book, threshold);
    }

    /// Lets go of all that is not used, but for so much.
    pub(crate) fn trim(&self, keep: u64) {
        Self::shrink(&mut self.book(), keep);
    }

    fn shrink(book: &mut Book, keep: u64) {
        let freed = book.figures.shrink(keep);
        if let Some(guest) = &book.payer {
            guest.refund(freed);
        }
        if book.figures.reserved == 0 {
            book.payer = None;
        }
    }
}

/// Memory of a pool, for a stream of the current context.
fn allocate(process: &Process, size: u64, pool: Handle<Pool>) -> Outcome<u64> {
    if size == 0 {
        return Err(Code::InvalidValue);
    }
    let context = context::current()?;
    pool.get()?.take(size)?;
    process.memory.add(context, size, Payer::Pool(pool), 0, Content::NONE)
}

fn create(process: &'static Process, properties: Properties) -> Outcome<Handle<Pool>> {
    // CU_MEM_ALLOCATION_TYPE_PINNED or MANAGED.
    if !matches!(properties.allocation, 1 | 2) {
        return Err(Code::InvalidValue);
    }
    let device = match properties.location {
        Location { kind: Location::DEVICE, id } => Some(process.device(id)?),
        Location { kind: 0 | 2..=4, .. } => None,
        _ => return Err(Code::InvalidValue),
    };
    Ok(Handle::new(Pool::new(process, device, false, properties)))
}

/// The device whose pools a location's pinned memory comes from; there are no others here that a program need not make.
fn pool_at(process: &'static Process, location: Location, kind: u32) -> Outcome<&'static Device> {
    process.device(location.device().filter(|_| kind == 1).ok_or(Code::NotSupported)?)
}

entry! {
    fn cuMemAllocAsync | cuMemAllocAsync_ptsz(process, own; address: Out<u64>, size: u64, stream: Handle<Stream>) {
        address.check()?;
        let stream = Stream::of(stream, own)?;
        if let Some(made) = stream.capture_allocation(process, size)? {
            return address.set(made);
        }
        let pool = context::current()?.device.pool(process);
        address.set(allocate(process, size, pool)?)
    }

    fn cuMemAllocFromPoolAsync | cuMemAllocFromPoolAsync_ptsz(
        process, own; address: Out<u64>, size: u64, pool: Handle<Pool>, stream: Handle<Stream>,
    ) {
        address.check()?;
        let stream = Stream::of(stream, own)?;
        if let Some(made) = stream.capture_allocation(process, size)? {
            return address.set(made);
        }
        address.set(allocate(process, size, pool)?)
    }

    /// Also of memory that `cuMemAlloc` gave.
    fn cuMemFreeAsync | cuMemFreeAsync_ptsz(process, own; address: u64, stream: Handle<Stream>) {
        let stream = Stream::of(stream, own)?;
        if stream.capture_free(address) {
            return Ok(());
        }
        if address == 0 {
            return Ok(());
        }
        process.memory.free(address, |block| matches!(block.payer, Payer::Pool(_) | Payer::Graph { .. } | Payer::Guest(_)))
    }

    fn cuMemPoolCreate(process; pool: Out<Handle<Pool>>, properties: In<Properties>) {
        pool.check()?;
        pool.set(create(process, properties.get()?)?)
    }

    fn cuMemPoolDestroy(process; pool: Handle<Pool>) {
        if pool.get()?.default {
            return Err(Code::InvalidValue);
        }
        for device in &process.devices {
            device.forget_pool(pool);
        }
        // Its memory lives on until it is freed, so the object does not end.
        let mut book = pool.get()?.book();
        book.closed = true;
        Pool::shrink(&mut book, 0);
        Ok(())
    }

    fn cuMemPoolTrimTo(_process; pool: Handle<Pool>, keep: u64) {
        pool.get()?.trim(keep);
        Ok(())
    }

    fn cuMemPoolGetAttribute(_process; pool: Handle<Pool>, attribute: u32, value: Out<()>) {
        let pool = pool.get()?;
        let figures = pool.figures();
        let long = |number: u64| value.cast::<u64>().set(number);
        let word = |number: u32| value.cast::<u32>().set(number);
        match attribute {
            // What a pool is a driver tells since CUDA 13.
            9.. if process::driver_version()? < 13000 => Err(Code::InvalidValue),
            1..=3 => word(pool.switches.lock().unwrap_or_else(PoisonError::into_inner)[attribute as usize - 1]),
            4 => long(figures.threshold),
            5 => long(figures.reserved),
            6 => long(figures.reserved_high),
            7 => long(figures.used),
            8 => long(figures.used_high),
            9 => word(pool.properties.allocation),
            10 => word(pool.properties.handles),
            11 => word(pool.properties.location.id.cast_unsigned()),
            12 => word(pool.properties.location.kind),
            13 => long(figures.most),
            14 => word(0),
            _ => Err(Code::InvalidValue),
        }
    }

    /// The high-water marks can only be set to 0, which is to what there is now.
    fn cuMemPoolSetAttribute(_process; pool: Handle<Pool>, attribute: u32, value: Out<()>) {
        let pool = pool.get()?;
        match attribute {
            1..=3 => {
                let on = value.cast::<u32>().get()?;
                pool.switches.lock().unwrap_or_else(PoisonError::into_inner)[attribute as usize - 1] = on;
            }
            4 => {
                let threshold = value.cast::<u64>().get()?;
                pool.change(|figures| figures.threshold = threshold);
            }
            6 | 8 if value.cast::<u64>().get()? != 0 => return Err(Code::InvalidValue),
            6 => pool.change(|figures| figures.reserved_high = figures.reserved),
            8 => pool.change(|figures| figures.used_high = figures.used),
            _ => return Err(Code::InvalidValue),
        }
        Ok(())
    }

    fn cuMemPoolSetAccess(_process; pool: Handle<Pool>, _access: In<Access>, _count: u64) {
        pool.get().map(drop)
    }

    fn cuMemPoolGetAccess(_process; flags: Out<u32>, pool: Handle<Pool>, location: In<Location>) {
        let own = pool.get()?.properties.location == location.get()?;
        flags.set(if own { 3 } else { 0 })
    }

    fn cuDeviceGetDefaultMemPool(process; pool: Out<Handle<Pool>>, device: i32) {
        pool.set(process.device(device)?.default_pool(process))
    }

    fn cuDeviceGetMemPool(process; pool: Out<Handle<Pool>>, device: i32) {
        pool.set(process.device(device)?.pool(process))
    }

    fn cuDeviceSetMemPool(process; device: i32, pool: Handle<Pool>) {
        let device = process.device(device)?;
        pool.get()?;
        device.set_pool(pool);
        Ok(())
    }

    fn cuMemGetDefaultMemPool(process; pool: Out<Handle<Pool>>, location: In<Location>, kind: u32) {
        pool.set(pool_at(process, location.get()?, kind)?.default_pool(process))
    }

    fn cuMemGetMemPool(process; pool: Out<Handle<Pool>>, location: In<Location>, kind: u32) {
        pool.set(pool_at(process, location.get()?, kind)?.pool(process))
    }

    fn cuMemSetMemPool(process; location: In<Location>, kind: u32, pool: Handle<Pool>) {
        pool.get()?;
        pool_at(process, location.get()?, kind)?.set_pool(pool);
        Ok(())
    }

    fn cuDeviceGraphMemTrim(process; device: i32) {
        process.device(device)?.graph_pool(process).get()?.trim(0);
        Ok(())
    }

    fn cuDeviceGetGraphMemAttribute(process; device: i32, attribute: u32, value: Out<u64>) {
        let figures = process.device(device)?.graph_pool(process).get()?.figures();
        match attribute {
            0 => value.set(figures.used),
            1 => value.set(figures.used_high),
            2 => value.set(figures.reserved),
            3 => value.set(figures.reserved_high),
            _ => Err(Code::InvalidValue),
        }
    }

    fn cuDeviceSetGraphMemAttribute(process; device: i32, attribute: u32, value: Out<u64>) {
        let pool = process.device(device)?.graph_pool(process).get()?;
        match (attribute, value.get()?) {
            (1, 0) => pool.change(|figures| figures.used_high = figures.used),
            (3, 0) => pool.change(|figures| figures.reserved_high = figures.reserved),
            _ => return Err(Code::InvalidValue),
        }
        Ok(())
    }
}
