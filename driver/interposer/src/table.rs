//! The names that are hooked, and which variant of a CUDA function each stands for.
//!
//! Written by the build script from `symbols/`; looked up by a hash, because a program's start asks for hundreds of
//! names.

use crate::elf;

/// Of a function: those of [`EXPORTS`] first (CUDA's, those of NVML that are viewed, those that are denied), then those
/// of [`USES`], which hooks call and which are not hooked (CUDA's, NVML's).
pub(crate) type Index = usize;

/// A function that this library defines.
pub(crate) struct Export {
    pub(crate) name: &'static [u8],
    pub(crate) hook: Address,
}

/// Of a function, in a table of functions of all signatures.
pub(crate) struct Address(pub(crate) *const ());

// SAFETY: the address of a function is the same in every thread.
unsafe impl Sync for Address {}

/// One answer that `cuGetProcAddress` can give for a name.
pub(crate) struct Variant {
    pub(crate) export: Index,
    /// Least CUDA version at which a program gets it.
    pub(crate) version: u32,
    /// 0, or CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM.
    pub(crate) flags: u32,
}

/// A name that programs ask `cuGetProcAddress` for, and its variants, `from..to` in [`VARIANTS`].
pub(crate) struct Family {
    name: &'static [u8],
    from: u16,
    to: u16,
}

impl Family {
    pub(crate) fn variants(&self) -> impl Iterator<Item = (usize, &'static Variant)> {
        let from = usize::from(self.from);
        VARIANTS.iter().enumerate().take(usize::from(self.to)).skip(from)
    }
}

include!(concat!(env!("OUT_DIR"), "/table.rs"));

pub(crate) fn name(at: Index) -> &'static [u8] {
    match EXPORTS.get(at) {
        Some(export) => export.name,
        None => USES.get(at - COUNT).copied().unwrap_or_default(),
    }
}

/// The hooked function that is exported under exactly this name.
///
/// # Safety
/// `name` ends with a zero byte.
pub(crate) unsafe fn export(name: *const u8) -> Option<Index> {
    // SAFETY: as the caller says.
    unsafe { find(name, &EXPORT_SLOTS, |at| EXPORTS[at].name) }
}

/// The variants of a name that programs ask `cuGetProcAddress` for.
///
/// # Safety
/// `name` ends with a zero byte.
pub(crate) unsafe fn family(name: *const u8) -> Option<&'static Family> {
    // SAFETY: as the caller says.
    unsafe { find(name, &FAMILY_SLOTS, |at| FAMILIES[at].name) }.map(|at| &FAMILIES[at])
}

/// # Safety
/// `name` ends with a zero byte.
unsafe fn find(name: *const u8, slots: &[u16], named: impl Fn(usize) -> &'static [u8]) -> Option<usize> {
    let mut hash = 0x811c_9dc5u32;
    let mut at = name;
    // SAFETY: stops at the zero byte.
    unsafe {
        while *at != 0 {
            hash = (hash ^ u32::from(*at)).wrapping_mul(0x0100_0193);
            at = at.add(1);
        }
    }
    let mut slot = hash as usize;
    loop {
        let entry = usize::from(slots[slot & (slots.len() - 1)]);
        // SAFETY: as above.
        if entry == 0 || unsafe { elf::same(name, named(entry - 1)) } {
            return entry.checked_sub(1);
        }
        slot += 1;
    }
}
