//! Reads the soname of a shared library, by which programs load it.
//!
//! The driver root may be an unpacked image in which `ldconfig` never ran, so links next to the file
//! may be missing, but the file itself has the name.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const DT_STRTAB: u64 = 5;
const DT_SONAME: u64 = 14;
/// Size limit for a table, in bytes; tables of real libraries are much smaller.
const TABLE_MAX_BYTES: u64 = 1 << 20;

/// Kind of a file, for the loader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// A 64-bit library for this machine. Without a soname it can only be loaded by its path.
    Library { soname: Option<String> },
    /// Any other file, for example a 32-bit library.
    Other,
}

/// Determines the kind of a file. Fails only if it cannot be read.
pub fn inspect(file: &File) -> io::Result<Object> {
    let length = file.metadata()?.len();
    let read = |at: u64, size: u64| -> io::Result<Option<Vec<u8>>> {
        let inside = at.checked_add(size).is_some_and(|end| end <= length);
        if !inside || size > TABLE_MAX_BYTES {
            return Ok(None);
        }
        let mut bytes = vec![0; size as usize];
        file.read_exact_at(&mut bytes, at)?;
        Ok(Some(bytes))
    };
    let Some(header) = read(0, 64)? else { return Ok(Object::Other) };
    // 64-bit, little-endian, shared object, this machine.
    if header[..6] != *b"\x7fELF\x02\x01" || u16_at(&header, 16) != 3 || u16_at(&header, 18) != MACHINE {
        return Ok(Object::Other);
    }
    let (entry, count) = (u64::from(u16_at(&header, 54)), u64::from(u16_at(&header, 56)));
    let Some(segments) = read(u64_at(&header, 32), entry * count)? else { return Ok(Object::Other) };
    if entry < 56 {
        return Ok(Object::Other);
    }
    let segments: Vec<Segment> = segments.chunks_exact(entry as usize).map(Segment::parse).collect();
    let Some(dynamic) = segments.iter().find(|segment| segment.kind == PT_DYNAMIC) else {
        return Ok(Object::Other);
    };
    let Some(dynamic) = read(dynamic.offset, dynamic.size)? else { return Ok(Object::Other) };
    let tag = |wanted: u64| {
        let mut entries = dynamic.chunks_exact(16).map(|entry| (u64_at(entry, 0), u64_at(entry, 8)));
        entries.find(|(tag, _)| *tag == wanted).map(|(_, value)| value)
    };
    let at = tag(DT_SONAME).zip(tag(DT_STRTAB)).and_then(|(name, table)| {
        let load = segments.iter().find(|s| s.kind == PT_LOAD && s.holds(table))?;
        (table - load.address).checked_add(load.offset)?.checked_add(name)
    });
    let Some(at) = at else { return Ok(Object::Library { soname: None }) };
    let text = read(at, length.saturating_sub(at).min(256))?.unwrap_or_default();
    let text = text.split(|byte| *byte == 0).next().unwrap_or_default();
    let soname = std::str::from_utf8(text).ok().filter(|name| !name.is_empty() && !name.contains('/'));
    Ok(Object::Library { soname: soname.map(str::to_owned) })
}

struct Segment {
    kind: u32,
    offset: u64,
    address: u64,
    size: u64,
}

impl Segment {
    fn parse(bytes: &[u8]) -> Self {
        Self {
            kind: u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            offset: u64_at(bytes, 8),
            address: u64_at(bytes, 16),
            size: u64_at(bytes, 32),
        }
    }

    fn holds(&self, address: u64) -> bool {
        address >= self.address && address - self.address < self.size
    }
}

/// The caller must have checked the length.
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// The caller must have checked the length.
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::io::Write;

    fn inspect_bytes(bytes: &[u8]) -> Object {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        inspect(&file).unwrap()
    }

    /// The C library of this test process.
    fn libc() -> Vec<u8> {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let path = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
        let path = path.into_iter().find(|path| path.contains("libc.so")).unwrap();
        std::fs::read(path).unwrap()
    }

    #[test]
    fn soname_of_a_real_library_is_read() {
        assert_eq!(inspect_bytes(&libc()), Object::Library { soname: Some("libc.so.6".into()) });
    }

    #[test]
    fn other_files_are_no_library() {
        for bytes in [b"".as_slice(), b"#!/bin/sh\n", &libc()[..200]] {
            assert_eq!(inspect_bytes(bytes), Object::Other);
        }
    }

    proptest! {
        #[test]
        fn damaged_libraries_do_not_panic(at in 0usize..4096, value: u8) {
            let mut bytes = libc();
            bytes[at] = value;
            inspect_bytes(&bytes);
        }
    }
}
