//! NVIDIA's libraries, and the address of each function in them that is hooked or that hooks call.
//!
//! A library is genuine by its SONAME, wherever it lies: the driver's own, or the newer copy that an image brings for
//! forward compatibility. Looked for once, when the first hook is called or `dlsym` first answers with an address in
//! it; after that a hook's way to the driver is one load.
//!
//! One process has one driver. If a program loads a second copy beside the first (`dlmopen`), hooks go on to call the
//! first: its functions that are not hooked then know nothing of the other's contexts and fail, which is the safe side.
//! A copy that was unloaded is forgotten.

use crate::elf::{self, Object};
use crate::table;
use core::sync::atomic::{AtomicUsize, Ordering};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Library {
    Cuda,
    Nvml,
    Encode,
    Cuvid,
}

/// Where they are mapped; 0: not found yet.
static BASES: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];
/// By [`table::Index`]; 0: not looked up yet, or not in this driver.
pub(crate) static FUNCTIONS: [AtomicUsize; table::TOTAL] = [const { AtomicUsize::new(0) }; table::TOTAL];

/// A library under a genuine one's name that needs something from here is our own shim.
const OURS: &[u8] = b"/run/divvy/lib/";

impl Library {
    fn soname(self) -> &'static [u8] {
        match self {
            Library::Cuda => b"libcuda.so.1",
            Library::Nvml => b"libnvidia-ml.so.1",
            Library::Encode => b"libnvidia-encode.so.1",
            Library::Cuvid => b"libnvcuvid.so.1",
        }
    }

    fn base(self) -> &'static AtomicUsize {
        &BASES[self as usize]
    }

    /// Whether it is this one and not a shim of ours in its place.
    #[cold]
    fn is(self, object: &Object) -> bool {
        object.base() != elf::own_base() && object.is_named(self.soname()) && !object.needs_below(OURS)
    }

    /// Whether `address`, which the loader gave for the function `at`, is the genuine one; makes the library it lies in
    /// the one that hooks call, if there is none yet.
    #[cold]
    pub(crate) fn owns(self, at: table::Index, address: usize) -> bool {
        if FUNCTIONS[at].load(Ordering::Relaxed) == address {
            return true;
        }
        let Some(object) = elf::object_at(address).filter(|object| self.is(object)) else { return false };
        let known = self.base().load(Ordering::Acquire);
        if known != object.base() && (known == 0 || !elf::object_at(known).is_some_and(|old| self.is(&old))) {
            self.bind(&object);
        }
        true
    }

    /// Looks for it among the objects of the program's namespace.
    fn find(self) -> Option<Object> {
        let mut found = None;
        elf::each_object(&mut |object, _| {
            if self.is(object) {
                found = Some(*object);
            }
            found.is_some()
        });
        found
    }

    pub(crate) fn is_loaded(self) -> bool {
        self.base().load(Ordering::Acquire) != 0 || self.find().is_some()
    }

    /// Two threads may do this at once: they store the same.
    #[cold]
    fn bind(self, object: &Object) {
        for at in (0..table::TOTAL).filter(|at| library(*at) == self) {
            FUNCTIONS[at].store(object.function(table::name(at)).unwrap_or(0), Ordering::Relaxed);
        }
        self.base().store(object.base(), Ordering::Release);
    }
}

/// Which library the function is of.
pub(crate) fn library(at: table::Index) -> Library {
    match at {
        _ if at < table::CUDA || (table::COUNT..table::CUDA_USES).contains(&at) => Library::Cuda,
        _ if (table::ENCODE..table::CUVID).contains(&at) => Library::Encode,
        _ if (table::CUVID..table::COUNT).contains(&at) => Library::Cuvid,
        _ => Library::Nvml,
    }
}

/// The driver's own function; `None` where this driver has none of that name, or is not loaded.
#[inline]
pub(crate) fn function(at: table::Index) -> Option<usize> {
    match FUNCTIONS[at].load(Ordering::Relaxed) {
        0 => first(at),
        address => Some(address),
    }
}

#[cold]
fn first(at: table::Index) -> Option<usize> {
    let library = library(at);
    if library.base().load(Ordering::Acquire) == 0 {
        library.bind(&library.find()?);
    }
    Some(FUNCTIONS[at].load(Ordering::Relaxed)).filter(|address| *address != 0)
}
