//! A policy page as the node has it mapped, to change it in place.

use super::open;
use divvy_pages::PolicyPage;
use divvy_pages::policy::SIZE;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::io;
use std::path::Path;
use std::ptr;

/// A policy page, mapped to be changed.
#[derive(Debug)]
pub(crate) struct Mapped {
    address: ptr::NonNull<u8>,
}

// SAFETY: nothing of it is a thread's own, and the page is atomics throughout.
#[allow(unsafe_code)]
unsafe impl Send for Mapped {}

#[allow(unsafe_code)]
impl Mapped {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let file = open(path, true)?;
        if file.metadata()?.len() != SIZE as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice takes no memory from
        // anybody. The file is root's alone to write, so nobody cuts it short below us.
        let address = unsafe { mmap(ptr::null_mut(), SIZE, access, MapFlags::SHARED, &file, 0)? };
        ptr::NonNull::new(address.cast())
            .map(|address| Self { address })
            .ok_or_else(|| io::ErrorKind::Other.into())
    }

    pub(crate) fn page(&self) -> Option<&PolicyPage> {
        // SAFETY: so many bytes are mapped readable and writable until `self` is dropped,
        // and the answer borrows `self`.
        unsafe { PolicyPage::at(self.address.as_ptr(), SIZE) }
    }
}

#[allow(unsafe_code)]
impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: what `open` mapped, once, and nothing borrows it any more. It fails for
        // no mapping that is there.
        let _ = unsafe { munmap(self.address.as_ptr().cast(), SIZE) };
    }
}
