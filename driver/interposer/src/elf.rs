//! Reads the loader's list of mapped objects and their symbol tables.
//!
//! The library must find functions that its own exports hide, in places where `dlopen` and `dlsym`
//! cannot be called: under the loader's lock, in another library's constructor, at the program's
//! first instruction. So it gets the objects from `dl_iterate_phdr` and reads the symbol tables
//! itself. Objects of other namespaces (`dlmopen`) are not listed; those are found from an address
//! in `/proc/self/maps`.

use crate::sys;
use core::ffi::{c_char, c_int, c_void};
use core::ptr;

/// The parts of an object's dynamic section that a lookup needs. Valid while the object is mapped.
#[derive(Clone, Copy)]
pub(crate) struct Object {
    base: usize,
    dynamic: *const Dynamic,
    strings: *const u8,
    symbols: *const Symbol,
    versions: *const u16,
    gnu_hash: *const u32,
    soname: Option<usize>,
}

#[repr(C)]
struct Dynamic {
    tag: i64,
    value: usize,
}

#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: usize,
    size: usize,
}

#[repr(C)]
struct Segment {
    kind: u32,
    flags: u32,
    offset: usize,
    address: usize,
    physical: usize,
    in_file: usize,
    in_memory: usize,
    align: usize,
}

#[repr(C)]
struct Header {
    magic: [u8; 4],
    class: u8,
    rest: [u8; 11],
    kind: u16,
    machine: u16,
    version: u32,
    entry: usize,
    segments: usize,
    sections: usize,
    flags: u32,
    size: u16,
    segment_size: u16,
    segment_count: u16,
}

#[repr(C)]
struct Info {
    base: usize,
    name: *const c_char,
    segments: *const Segment,
    count: u16,
}

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_NULL: i64 = 0;
const DT_NEEDED: i64 = 1;
const DT_STRTAB: i64 = 5;
const DT_SYMTAB: i64 = 6;
const DT_SONAME: i64 = 14;
const DT_GNU_HASH: i64 = 0x6fff_fef5;
const DT_VERSYM: i64 = 0x6fff_fff0;
/// Bit of a version index: only references to exactly this version see the symbol.
const HIDDEN: u16 = 0x8000;

unsafe extern "C" {
    fn dl_iterate_phdr(
        each: unsafe extern "C" fn(*const Info, usize, *mut c_void) -> c_int,
        data: *mut c_void,
    ) -> c_int;
    /// The linker places it at this library's first byte.
    #[cfg(panic = "abort")]
    static __ehdr_start: u8;
}

/// The base address of this library.
pub(crate) fn own_base() -> usize {
    #[cfg(panic = "abort")]
    return &raw const __ehdr_start as usize;
    // A plain build exports nothing and has no base address.
    #[cfg(not(panic = "abort"))]
    return 0;
}

/// This library.
pub(crate) fn own() -> Option<Object> {
    Object::mapped(Some(own_base()).filter(|base| *base != 0)?)
}

/// Called with an object and with a test whether an address is in it; returns true to stop.
type Visit<'a> = &'a mut dyn FnMut(&Object, &dyn Fn(usize) -> bool) -> bool;

/// Calls `visit` for the objects of the program's namespace, in the loader's order.
#[cold]
pub(crate) fn each_object(visit: Visit<'_>) {
    #[cold]
    unsafe extern "C" fn each(info: *const Info, _size: usize, data: *mut c_void) -> c_int {
        // SAFETY: the loader's description is valid during this call; `data` is what was passed
        // below.
        let (info, visit) = unsafe { (&*info, &mut *data.cast::<Visit<'_>>()) };
        if info.segments.is_null() {
            return 0;
        }
        // SAFETY: the loader's own table of that many segments.
        let segments = unsafe { core::slice::from_raw_parts(info.segments, info.count.into()) };
        match Object::new(info.base, segments) {
            Some(object) => visit(&object, &|address| holds(info.base, segments, address)).into(),
            None => 0,
        }
    }
    let mut visit = visit;
    // SAFETY: `each` has the required signature, and `visit` outlives the call.
    unsafe { dl_iterate_phdr(each, (&raw mut visit).cast()) };
}

fn holds(base: usize, segments: &[Segment], address: usize) -> bool {
    segments.iter().any(|segment| {
        segment.kind == PT_LOAD
            && address.wrapping_sub(base.wrapping_add(segment.address)) < segment.in_memory
    })
}

/// The object of any namespace that contains `address`.
#[cold]
pub(crate) fn object_at(address: usize) -> Option<Object> {
    let mut found = None;
    each_object(&mut |object, holds| {
        if holds(address) {
            found = Some(*object);
        }
        found.is_some()
    });
    found.or_else(|| Object::mapped(Maps::open()?.file_start(address)?))
}

impl Object {
    #[cold]
    fn new(base: usize, segments: &[Segment]) -> Option<Object> {
        let dynamic = segments.iter().find(|segment| segment.kind == PT_DYNAMIC)?;
        let mut object = Object {
            base,
            dynamic: base.wrapping_add(dynamic.address) as *const Dynamic,
            strings: ptr::null(),
            symbols: ptr::null(),
            versions: ptr::null(),
            gnu_hash: ptr::null(),
            soname: None,
        };
        // glibc relocates these values in place; the kernel's vDSO and other loaders leave offsets.
        let place = |value: usize| if value < base { base.wrapping_add(value) } else { value };
        for entry in object.entries() {
            match entry.tag {
                DT_STRTAB => object.strings = place(entry.value) as *const u8,
                DT_SYMTAB => object.symbols = place(entry.value) as *const Symbol,
                DT_VERSYM => object.versions = place(entry.value) as *const u16,
                DT_GNU_HASH => object.gnu_hash = place(entry.value) as *const u32,
                DT_SONAME => object.soname = Some(entry.value),
                _ => {}
            }
        }
        (!object.strings.is_null() && !object.symbols.is_null()).then_some(object)
    }

    /// Reads an object from the first byte of its mapped file.
    fn mapped(start: usize) -> Option<Object> {
        // SAFETY: a mapping of a file's first page, found in the list of this process's mappings.
        let header = unsafe { &*(start as *const Header) };
        if header.magic != *b"\x7fELF" || header.class != 2 || header.segments % 8 != 0 {
            return None;
        }
        // SAFETY: the header's own table; linkers place it in the first page, which is mapped.
        let segments = unsafe {
            core::slice::from_raw_parts(
                (start + header.segments) as *const Segment,
                header.segment_count.into(),
            )
        };
        let first = segments.iter().find(|segment| segment.kind == PT_LOAD)?;
        Object::new(start.wrapping_sub(first.address - first.offset), segments)
    }

    fn entries<'a>(&self) -> impl Iterator<Item = &'a Dynamic> + use<'a> {
        let mut at = self.dynamic;
        core::iter::from_fn(move || {
            // SAFETY: a dynamic section ends with DT_NULL, and the iterator does not go past it.
            let entry = unsafe { &*at };
            if entry.tag == DT_NULL {
                return None;
            }
            // SAFETY: as above.
            at = unsafe { at.add(1) };
            Some(entry)
        })
    }

    pub(crate) fn base(&self) -> usize {
        self.base
    }

    pub(crate) fn is_named(&self, soname: &[u8]) -> bool {
        // SAFETY: DT_SONAME is an offset into the object's own string table.
        self.soname.is_some_and(|at| unsafe { same(self.strings.add(at), soname) })
    }

    /// Returns true if a needed library is named by a path with this prefix.
    pub(crate) fn needs_below(&self, prefix: &[u8]) -> bool {
        self.entries().any(|entry| {
            let matches = |(at, byte): (usize, &u8)| {
                // SAFETY: an offset into the object's own string table.
                unsafe { *self.strings.add(entry.value + at) == *byte }
            };
            entry.tag == DT_NEEDED && prefix.iter().enumerate().all(matches)
        })
    }

    /// Returns the address of the function `name` for references without a version.
    #[cold]
    pub(crate) fn function(&self, name: &[u8]) -> Option<usize> {
        if self.gnu_hash.is_null() {
            return None;
        }
        let hash = name.iter().fold(5381u32, |hash, byte| hash.wrapping_mul(33).wrapping_add((*byte).into()));
        // SAFETY: the layout of DT_GNU_HASH: four words, a Bloom filter of 64-bit words, buckets,
        // chains. Each index is bounded by the counts in the header, and a chain ends with an odd
        // word.
        unsafe {
            let [buckets, first, filter, shift] = *self.gnu_hash.cast::<[u32; 4]>();
            if buckets == 0 || filter == 0 {
                return None;
            }
            let bloom = self.gnu_hash.add(4).cast::<u64>();
            let word = bloom.add(((hash / 64) % filter) as usize).read_unaligned();
            if (word >> (hash % 64)) & (word >> ((hash >> (shift % 32)) % 64)) & 1 == 0 {
                return None;
            }
            let bucket = bloom.add(filter as usize).cast::<u32>();
            let chain = bucket.add(buckets as usize);
            let mut at = *bucket.add((hash % buckets) as usize);
            if at < first {
                return None;
            }
            loop {
                let entry = *chain.add((at - first) as usize);
                if (entry | 1) == (hash | 1) {
                    let symbol = &*self.symbols.add(at as usize);
                    let hidden = !self.versions.is_null() && *self.versions.add(at as usize) & HIDDEN != 0;
                    if !hidden && symbol.is_function() && same(self.strings.add(symbol.name as usize), name) {
                        return Some(self.base.wrapping_add(symbol.value));
                    }
                }
                if entry & 1 != 0 {
                    return None;
                }
                at += 1;
            }
        }
    }
}

impl Symbol {
    fn is_function(&self) -> bool {
        const FUNCTION: u8 = 2;
        const UNTYPED: u8 = 0;
        self.section != 0 && matches!(self.info & 15, FUNCTION | UNTYPED)
    }
}

/// # Safety
/// `text` ends with a zero byte.
pub(crate) unsafe fn same(text: *const u8, name: &[u8]) -> bool {
    // SAFETY: stops at the first difference, at the latest at the zero byte.
    name.iter().enumerate().all(|(at, byte)| unsafe { *text.add(at) } == *byte)
        && unsafe { *text.add(name.len()) } == 0
}

/// Reads `/proc/self/maps` line by line with a fixed buffer.
struct Maps {
    file: sys::File,
    buffer: [u8; 1024],
    filled: usize,
    at: usize,
}

/// One mapping: its addresses, and a hash of the file's device and inode.
struct Mapping {
    start: usize,
    end: usize,
    offset: usize,
    file: u64,
}

impl Maps {
    fn open() -> Option<Maps> {
        let file = sys::open_to_read(sys::From::Root, b"/proc/self/maps\0")?;
        Some(Maps { file, buffer: [0; 1024], filled: 0, at: 0 })
    }

    fn byte(&mut self) -> Option<u8> {
        if self.at == self.filled {
            (self.at, self.filled) = (0, self.file.read(&mut self.buffer));
        }
        let byte = *self.buffer.get(self.at).filter(|_| self.at < self.filled)?;
        self.at += 1;
        Some(byte)
    }

    /// Reads a hexadecimal number and the byte after it.
    fn number(&mut self) -> Option<(usize, u8)> {
        let mut number = 0usize;
        loop {
            let byte = self.byte()?;
            match (byte as char).to_digit(16) {
                Some(digit) => number = (number << 4) | digit as usize,
                None => return Some((number, byte)),
            }
        }
    }

    /// `start-end permissions offset device inode path`.
    fn line(&mut self) -> Option<Mapping> {
        let (start, _) = self.number()?;
        let (end, _) = self.number()?;
        while self.byte()? != b' ' {}
        let (offset, _) = self.number()?;
        let (major, _) = self.number()?;
        let (minor, _) = self.number()?;
        // The inode is decimal; read as hexadecimal it still identifies the file.
        let (inode, mut last) = self.number()?;
        while last != b'\n' {
            last = self.byte()?;
        }
        Some(Mapping {
            start,
            end,
            offset,
            file: ((major as u64) << 52) ^ ((minor as u64) << 44) ^ inode as u64,
        })
    }

    /// Returns the address of the first byte of the file that is mapped at `address`.
    fn file_start(mut self, address: usize) -> Option<usize> {
        let mut first = None;
        while let Some(mapping) = self.line() {
            if mapping.offset == 0 {
                first = Some((mapping.start, mapping.file));
            }
            if (mapping.start..mapping.end).contains(&address) {
                return first.filter(|(_, file)| *file == mapping.file && *file != 0).map(|(start, _)| start);
            }
        }
        None
    }
}
