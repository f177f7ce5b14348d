//! Physical memory between processes: an allocation as a file, which others import by its descriptor.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, IntoRawFd, RawFd};

use divvy_sim::ledger::Place;
use rustix::fs::MemfdFlags;

use crate::argument::Out;
use crate::code::Code;
use crate::content::Content;
use crate::frame::{Outcome, entry};
use crate::physical::{Allocation, Properties};
use crate::pool::Location;
use crate::process::Process;

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: u32 = 1;
/// A shared allocation's file begins with so much that is about it.
pub(crate) const HEADER: usize = 4096;
const MAGIC: u64 = 0x6469_7676_795f_766d;

/// Whether no other process has imported the file's memory: importers hold a shared lock.
pub(crate) fn alone(file: &File) -> bool {
    lock(file.as_raw_fd(), libc::F_WRLCK)
}

/// A lock of this very opening of the file, which ends with it.
fn lock(file: RawFd, kind: i32) -> bool {
    // SAFETY: all-zero bytes are a flock.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    lock.l_whence = libc::SEEK_SET as i16;
    lock.l_len = 1;
    // SAFETY: an open descriptor, and a structure that lives during the call.
    unsafe { libc::fcntl(file, libc::F_OFD_SETLK, &lock) == 0 }
}

/// Opens the file behind a descriptor once more: locks and positions are the opening's.
fn reopen(file: RawFd) -> Outcome<File> {
    let path = format!("/proc/self/fd/{file}");
    File::options().read(true).write(true).open(path).map_err(|_| Code::InvalidValue)
}

/// What an exported allocation's file says of it.
fn header(place: Place, size: u64, properties: &Properties) -> Vec<u8> {
    let (gi, ci) = place.instance.unwrap_or((u32::MAX, u32::MAX));
    let words = [MAGIC, place.slot as u64, gi.into(), ci.into(), size, properties.handles.into()];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The same, read: its place, size and handle types.
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

/// Makes an allocation's memory a file that others can map.
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
            // SAFETY: both are mappings of the allocation's size, the new one behind its header.
            unsafe {
                std::ptr::copy_nonoverlapping(before.address() as *const u8, to, allocation.size as usize)
            };
        }
        before.unmap();
        allocation.content = content;
        allocation.shared = Some(reopen(file.as_raw_fd())?);
    }
    let file = allocation.shared.as_ref().ok_or(Code::Unknown)?;
    // An opening of its own: what it is locked with is not the exporter's.
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
        Allocation { properties, size, guest: None, references: 1, mappings: 0, content, shared };
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

    /// The descriptor itself is given, as if it were an address.
    fn cuMemImportFromShareableHandle(process; handle: Out<u64>, descriptor: usize, kind: u32) {
        handle.check()?;
        if kind != DESCRIPTOR {
            return Err(Code::InvalidValue);
        }
        let descriptor = i32::try_from(descriptor & 0xffff_ffff).map_err(|_| Code::InvalidValue)?;
        handle.set(import(process, descriptor)?)
    }
}
