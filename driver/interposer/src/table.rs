//! The names that are hooked, and which variant of a CUDA function each stands for.
//!
//! Written by the build script from `symbols/`; looked up by a hash, because a program's start asks for hundreds of
//! names.
//!
//! Nothing here is a pointer: the loader would have to add the library's address to each in every process, and the
//! pages with them would be every process's own. A name is a part of one text, and the address of a hook is what this
//! library's own symbol table says.

use crate::elf;

/// Of a function: those that this library defines first (CUDA's, those of NVML that are viewed, those that are denied, those of the video
/// engines), [`COUNT`] of them, then those that hooks call and that are not hooked (CUDA's, NVML's).
pub(crate) type Index = usize;

/// A part of [`LETTERS`].
struct Name {
    at: u16,
    length: u8,
}

impl Name {
    fn text(&self) -> &'static [u8] {
        let from = usize::from(self.at);
        LETTERS.get(from..from + usize::from(self.length)).unwrap_or_default()
    }
}

/// One answer that `cuGetProcAddress` can give for a name.
pub(crate) struct Variant {
    export: u16,
    /// Least CUDA version at which a program gets it.
    pub(crate) version: u16,
    /// 0, or CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM.
    pub(crate) flags: u8,
}

impl Variant {
    pub(crate) fn export(&self) -> Index {
        self.export.into()
    }
}

include!(concat!(env!("OUT_DIR"), "/table.rs"));

pub(crate) fn name(at: Index) -> &'static [u8] {
    NAMES.get(at).map_or(b"", Name::text)
}

/// Where this library has its function of that name, if it is one that it exports.
#[cold]
pub(crate) fn hook(at: Index) -> Option<usize> {
    elf::own()?.function(name(at))
}

/// The hooked function that is exported under exactly this name.
///
/// # Safety
/// `name` ends with a zero byte.
pub(crate) unsafe fn export(name: *const u8) -> Option<Index> {
    // SAFETY: as the caller says.
    unsafe { find(name, &EXPORT_SLOTS, &NAMES) }
}

/// The variants of a name that programs ask `cuGetProcAddress` for, each with its place in [`VARIANTS`].
///
/// # Safety
/// `name` ends with a zero byte.
pub(crate) unsafe fn family(name: *const u8) -> Option<impl Iterator<Item = (usize, &'static Variant)>> {
    // SAFETY: as the caller says.
    let (from, to) = RANGES.get(unsafe { find(name, &FAMILY_SLOTS, &FAMILIES) }?)?;
    Some(VARIANTS.iter().enumerate().take(usize::from(*to)).skip(usize::from(*from)))
}

/// # Safety
/// `name` ends with a zero byte.
#[cold]
unsafe fn find(name: *const u8, slots: &[u16], names: &[Name]) -> Option<usize> {
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
        let found = names.get(entry.checked_sub(1)?)?;
        // SAFETY: as above.
        if unsafe { elf::same(name, found.text()) } {
            return Some(entry - 1);
        }
        slot += 1;
    }
}
