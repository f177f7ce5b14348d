//! NVIDIA's libraries, and the addresses of the functions that are hooked or that hooks call.
//!
//! A library is recognised by its SONAME, wherever it is: the driver's own, or a newer copy in an
//! image for forward compatibility. The search runs once, when a hook is first called or `dlsym`
//! first returns an address in a library. After that, a hook reaches the driver with one load. If a
//! program loads a second copy (`dlmopen`), hooks keep calling the first. The first copy's
//! functions do not know contexts of the second and fail, which keeps the limit. An unloaded copy
//! is replaced.

use crate::elf::{self, Object};
use crate::symbol_table;
use core::sync::atomic::{AtomicUsize, Ordering};

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Library {
    Cuda,
    Nvml,
    Encode,
    Cuvid,
}

/// Base addresses of the libraries; 0 if not found yet.
static BASES: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];
/// Function addresses by [`symbol_table::Index`]; 0 if not looked up yet or not in this driver.
pub(crate) static FUNCTIONS: [AtomicUsize; symbol_table::TOTAL] =
    [const { AtomicUsize::new(0) }; symbol_table::TOTAL];

/// A library with NVIDIA's SONAME that needs a file below this path is Divvy's own shim.
const DIVVY_LIB_DIR: &[u8] = b"/run/divvy/lib/";

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

    /// Returns true if the object is this library and not a shim in its place.
    #[cold]
    fn matches(self, object: &Object) -> bool {
        object.base() != elf::own_base()
            && object.is_named(self.soname())
            && !object.needs_below(DIVVY_LIB_DIR)
    }

    /// Returns true if `address`, which the loader returned for function `at`, is in NVIDIA's
    /// library. The first such library becomes the one that hooks call.
    #[cold]
    pub(crate) fn owns(self, at: symbol_table::Index, address: usize) -> bool {
        if FUNCTIONS[at].load(Ordering::Relaxed) == address {
            return true;
        }
        let Some(object) = elf::object_at(address).filter(|object| self.matches(object)) else {
            return false;
        };
        let known = self.base().load(Ordering::Acquire);
        if known != object.base()
            && (known == 0 || !elf::object_at(known).is_some_and(|old| self.matches(&old)))
        {
            self.bind(&object);
        }
        true
    }

    /// Searches the objects of the program's namespace.
    fn find(self) -> Option<Object> {
        let mut found = None;
        elf::each_object(&mut |object, _| {
            if self.matches(object) {
                found = Some(*object);
            }
            found.is_some()
        });
        found
    }

    pub(crate) fn is_loaded(self) -> bool {
        self.base().load(Ordering::Acquire) != 0 || self.find().is_some()
    }

    /// Two threads may do this at once: they store the same values.
    #[cold]
    fn bind(self, object: &Object) {
        for at in (0..symbol_table::TOTAL).filter(|at| library(*at) == self) {
            FUNCTIONS[at].store(object.function(symbol_table::name(at)).unwrap_or(0), Ordering::Relaxed);
        }
        self.base().store(object.base(), Ordering::Release);
    }
}

/// The library of a function.
pub(crate) fn library(at: symbol_table::Index) -> Library {
    match at {
        _ if at < symbol_table::CUDA || (symbol_table::COUNT..symbol_table::CUDA_USES).contains(&at) => {
            Library::Cuda
        }
        _ if (symbol_table::ENCODE..symbol_table::CUVID).contains(&at) => Library::Encode,
        _ if (symbol_table::CUVID..symbol_table::COUNT).contains(&at) => Library::Cuvid,
        _ => Library::Nvml,
    }
}

/// The driver's own function; `None` if the driver has no such function or is not loaded.
#[inline]
pub(crate) fn function(at: symbol_table::Index) -> Option<usize> {
    match FUNCTIONS[at].load(Ordering::Relaxed) {
        0 => bind_and_find(at),
        address => Some(address),
    }
}

#[cold]
fn bind_and_find(at: symbol_table::Index) -> Option<usize> {
    let library = library(at);
    if library.base().load(Ordering::Acquire) == 0 {
        library.bind(&library.find()?);
    }
    Some(FUNCTIONS[at].load(Ordering::Relaxed)).filter(|address| *address != 0)
}
