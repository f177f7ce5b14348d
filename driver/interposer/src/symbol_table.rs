//! The hooked names, and the variant of a CUDA function that each stands for.
//!
//! The build script generates the tables from `symbols/`. Lookups use a hash, because a program's
//! start looks up hundreds of names. The tables contain no pointers: the loader would have to
//! relocate each in every process, and the memory pages would no longer be shared. A name is a
//! range of one text, and the address of a hook comes from this library's own symbol table.

use crate::elf;

/// Index of a function. The first [`COUNT`] are defined by this library: CUDA hooks, NVML hooks,
/// denied NVML functions, video engine hooks. Functions that hooks call but do not replace follow:
/// CUDA, NVML.
pub(crate) type Index = usize;

/// A range of [`LETTERS`].
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

/// One function that `cuGetProcAddress` can return for a name.
pub(crate) struct Variant {
    export: u16,
    /// Minimum CUDA version for which it is returned.
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

/// Returns the address of this library's hook, if it is exported.
#[cold]
pub(crate) fn hook(at: Index) -> Option<usize> {
    elf::own()?.function(name(at))
}

/// Returns the hook that is exported under exactly this name.
///
/// # Safety
/// `name` ends with a zero byte.
pub(crate) unsafe fn export(name: *const u8) -> Option<Index> {
    // SAFETY: guaranteed by the caller.
    unsafe { find(name, &EXPORT_SLOTS, &NAMES) }
}

/// Returns the variants of a name that programs pass to `cuGetProcAddress`, each with its index in
/// [`VARIANTS`].
///
/// # Safety
/// `name` ends with a zero byte.
pub(crate) unsafe fn family(name: *const u8) -> Option<impl Iterator<Item = (usize, &'static Variant)>> {
    // SAFETY: guaranteed by the caller.
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
