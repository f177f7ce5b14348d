//! Imported memory of other libraries, such as graphics APIs, which pay for it. An imported file
//! descriptor belongs to this library. The content is only visible in this process.

use std::os::fd::{FromRawFd, OwnedFd};

use crate::argument::{In, Out};
use crate::code::Code;
use crate::content::Content;
use crate::frame::entry;
use crate::handle::{Handle, Object};
use crate::objects::{Payer, current_context};

/// `CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD`.
const DESCRIPTOR: u32 = 1;

/// `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Description {
    kind: u32,
    descriptor: i32,
    rest: u64,
    size: u64,
    flags: u32,
    reserved: [u32; 16],
}

/// `CUDA_EXTERNAL_MEMORY_BUFFER_DESC`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Part {
    offset: u64,
    size: u64,
    flags: u32,
    reserved: [u32; 16],
}

/// Imported memory.
pub(crate) struct External {
    size: u64,
}

impl Object for External {
    const MAGIC: u64 = 0x6578_7465_6c69_7665;
}

entry! {
    fn cuImportExternalMemory(_process; memory: Out<Handle<External>>, description: In<Description>) {
        memory.check()?;
        let given = description.get()?;
        // SAFETY: only checks whether the descriptor is open.
        let open = unsafe { libc::fcntl(given.descriptor, libc::F_GETFD) } >= 0;
        if given.kind != DESCRIPTOR || given.size == 0 || !open {
            return Err(Code::InvalidValue);
        }
        // SAFETY: the program transfers the ownership of the descriptor.
        drop(unsafe { OwnedFd::from_raw_fd(given.descriptor) });
        memory.set(Handle::new(External { size: given.size }))
    }

    /// The caller frees the buffer like an allocation.
    fn cuExternalMemoryGetMappedBuffer(
        process; address: Out<u64>, memory: Handle<External>, part: In<Part>,
    ) {
        address.check()?;
        let (whole, part) = (memory.get()?, part.get()?);
        let fits = part.offset.checked_add(part.size).is_some_and(|end| end <= whole.size);
        if !fits || part.size == 0 {
            return Err(Code::InvalidValue);
        }
        address.set(process.memory.add(current_context()?, part.size, Payer::External, 0, Content::NONE)?)
    }

    fn cuDestroyExternalMemory(_process; memory: Handle<External>) {
        memory.end().map(drop)
    }
}
