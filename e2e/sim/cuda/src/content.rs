//! Host memory that stands for what device memory holds. It is there once somebody writes, and pages that nobody
//! touches take no memory.

use std::fs::File;
use std::os::fd::AsRawFd;

use crate::code::Code;
use crate::frame::Outcome;

/// A mapping; none yet, or of so many bytes.
pub(crate) struct Content {
    place: *mut u8,
    length: usize,
}

// SAFETY: an address; who copies through it answers for that.
unsafe impl Send for Content {}

impl Content {
    pub(crate) const NONE: Self = Self { place: std::ptr::null_mut(), length: 0 };

    /// New memory, all zeros.
    pub(crate) fn new(length: u64) -> Outcome<Self> {
        Self::map(length, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, -1)
    }

    /// Memory that others who map the file share.
    pub(crate) fn of(file: &File, length: u64) -> Outcome<Self> {
        Self::map(length, libc::MAP_SHARED, file.as_raw_fd())
    }

    fn map(length: u64, flags: i32, file: i32) -> Outcome<Self> {
        let length = usize::try_from(length).map_err(|_| Code::OutOfMemory)?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping where the kernel likes.
        let place = unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, file, 0) };
        if place == libc::MAP_FAILED {
            Err(Code::OutOfMemory)
        } else {
            Ok(Self { place: place.cast(), length })
        }
    }

    /// Where it is, made if it is not there yet.
    pub(crate) fn place(&mut self, length: u64) -> Outcome<*mut u8> {
        if self.place.is_null() {
            *self = Self::new(length)?;
        }
        Ok(self.place)
    }

    /// Where it is, if it is there.
    pub(crate) fn address(&self) -> u64 {
        self.place as u64
    }

    pub(crate) fn unmap(self) {
        if !self.place.is_null() {
            // SAFETY: mapped above with that length, and what it was the content of is gone.
            unsafe { libc::munmap(self.place.cast(), self.length) };
        }
    }
}
