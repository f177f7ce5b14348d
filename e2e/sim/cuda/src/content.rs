//! Host memory that stands for the content of device memory. It is mapped at the first write, and
//! untouched pages take no memory.

use std::fs::File;
use std::os::fd::AsRawFd;

use crate::code::{Code, Outcome};

/// A mapping of `length` bytes, or none yet.
pub(crate) struct Content {
    place: *mut u8,
    length: usize,
}

// SAFETY: only an address; code that copies through it is responsible for the access.
unsafe impl Send for Content {}

impl Content {
    pub(crate) const NONE: Self = Self { place: std::ptr::null_mut(), length: 0 };

    /// New memory, all zeros.
    pub(crate) fn new(length: u64) -> Outcome<Self> {
        Self::map(length, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)
    }

    /// Memory that is shared with others that map the file.
    pub(crate) fn of(file: &File, length: u64) -> Outcome<Self> {
        Self::map(length, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn map(length: u64, flags: i32, file: i32) -> Outcome<Self> {
        let length = usize::try_from(length).map_err(|_| Code::OutOfMemory)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, at an address that the kernel selects.
        let place = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, file, 0) };
        if place == libc::MAP_FAILED {
            Err(Code::OutOfMemory)
        } else {
            Ok(Self { place: place.cast(), length })
        }
    }

    /// Its address. Maps it if it is not mapped yet.
    pub(crate) fn place(&mut self, length: u64) -> Outcome<*mut u8> {
        if self.place.is_null() {
            *self = Self::new(length)?;
        }
        Ok(self.place)
    }

    /// Its address, if it is mapped.
    pub(crate) fn address(&self) -> u64 {
        self.place as u64
    }

    pub(crate) fn unmap(self) {
        if !self.place.is_null() {
            // SAFETY: mapped above with that length, and the device memory that it stood for is
            // freed.
            unsafe { libc::munmap(self.place.cast(), self.length) };
        }
    }
}
