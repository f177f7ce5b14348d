//! Entry points for stream-ordered memory and its pools.

use std::sync::PoisonError;

use crate::argument::{In, Out};
use crate::code::{Code, Outcome};
use crate::content::Content;
use crate::frame::entry;
use crate::handle::Handle;
use crate::location::{Access, Location, PoolProperties};
use crate::objects::{Device, Payer, Pool, Process, Stream, current_context};
use crate::process;

/// Allocates memory of a pool for a stream of the current context.
fn allocate(process: &Process, size: u64, pool: Handle<Pool>) -> Outcome<u64> {
    if size == 0 {
        return Err(Code::InvalidValue);
    }
    let context = current_context()?;
    pool.get()?.take(size)?;
    process.memory.add(context, size, Payer::Pool(pool), 0, Content::NONE)
}

fn create(process: &'static Process, properties: PoolProperties) -> Outcome<Handle<Pool>> {
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

/// The device whose pools serve a location's pinned memory. Other locations have no default pools
/// here.
fn pool_at(process: &'static Process, location: Location, kind: u32) -> Outcome<&'static Device> {
    process.device(location.device().filter(|_| kind == 1).ok_or(Code::NotSupported)?)
}

entry! {
    fn cuMemAllocAsync | cuMemAllocAsync_ptsz(
        process, own; address: Out<u64>, size: u64, stream: Handle<Stream>,
    ) {
        address.check()?;
        let stream = Stream::of(stream, own)?;
        if let Some(made) = stream.capture_allocation(process, size)? {
            return address.set(made);
        }
        let pool = current_context()?.device.pool(process);
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

    /// Also frees memory of `cuMemAlloc`.
    fn cuMemFreeAsync | cuMemFreeAsync_ptsz(process, own; address: u64, stream: Handle<Stream>) {
        let stream = Stream::of(stream, own)?;
        if stream.capture_free(address) {
            return Ok(());
        }
        if address == 0 {
            return Ok(());
        }
        process.memory.free(address, |block| {
            matches!(block.payer, Payer::Pool(_) | Payer::Graph { .. } | Payer::GpuProcess(_))
        })
    }

    fn cuMemPoolCreate(process; pool: Out<Handle<Pool>>, properties: In<PoolProperties>) {
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
        pool.get()?.close();
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
            // Drivers report a pool's properties since CUDA 13.
            9.. if process::driver_version()? < 13000 => Err(Code::InvalidValue),
            1..=3 => {
                let switches = pool.switches.lock().unwrap_or_else(PoisonError::into_inner);
                word(switches[attribute as usize - 1])
            }
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

    /// High-water marks can only be reset to 0, which sets them to the current value.
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
