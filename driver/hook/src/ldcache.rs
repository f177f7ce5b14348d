//! glibc's loader cache, `/etc/ld.so.cache`, format `glibc-ld.so.cache1.1`: a header, entries
//! sorted for binary search, strings, and an extension with the subdirectories for CPU levels.
//!
//! New entries replace those of the same name, and the whole file is rewritten. Images of glibc
//! before 2.32 have the same table after an older one; every glibc reads the newer one if it is
//! there. The loader ignores an unreadable cache, so such a cache is replaced.

use crate::args::HookArgs;
use crate::root::{Root, RootError};
use std::cmp::Ordering;
use std::collections::HashMap;
use std::ffi::c_char;
use std::path::Path;

/// Largest cache that is read. A cache of ten thousand libraries is smaller than a tenth of this.
const MAX_FILE_BYTES: u64 = 8 << 20;
/// Limit of the total string length. Entries may share strings, so a small file could expand to a
/// huge list.
const MAX_STRINGS_BYTES: usize = 16 << 20;
const MAX_STRING_BYTES: usize = 4096;
/// Limit of CPU levels; glibc has four.
const MAX_CPU_LEVELS: usize = 1024;
const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
const HEADER: usize = 48;
const ENTRY: usize = 24;
const EXTENSION_MAGIC: u32 = 0xeaa4_2174;
const TAG_GENERATOR: u32 = 0;
const TAG_HWCAPS: u32 = 1;
const GENERATOR: &[u8] = b"divvy-hook";
/// If this bit is set, the other bits are an index into the CPU levels.
const HWCAP_EXTENSION: u64 = 1 << 62;
const LITTLE_ENDIAN: u8 = 2;
/// An ELF library of glibc for this architecture.
#[cfg(target_arch = "x86_64")]
const FLAGS: u32 = 0x0303;
#[cfg(not(target_arch = "x86_64"))]
const FLAGS: u32 = 0x0a03;

/// Adds the names to the container's cache.
pub fn update(root: &Root, args: &HookArgs) -> Result<(), RootError> {
    let have = root.read(Path::new("/etc/ld.so.cache"), MAX_FILE_BYTES)?.unwrap_or_default();
    let paths: Vec<(&[u8], Vec<u8>)> = args
        .entries
        .iter()
        .map(|entry| {
            (entry.name.as_bytes(), entry.dir.join(&entry.name).into_os_string().into_encoded_bytes())
        })
        .collect();
    let mut cache = Cache::parse(&have).unwrap_or_default();
    cache.add(paths.iter().map(|(name, path)| (*name, path.as_slice())));
    let bytes = cache.to_bytes();
    if bytes == have {
        return Ok(());
    }
    root.dir(Path::new("/etc"))?.replace("ld.so.cache", &bytes)
}

/// A cache. Names and paths borrow from the bytes that it was parsed from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cache<'a> {
    entries: Vec<Entry<'a>>,
    /// Subdirectories for CPU levels; entries refer to them by index.
    levels: Vec<&'a [u8]>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry<'a> {
    flags: u32,
    name: &'a [u8],
    path: &'a [u8],
    os_version: u32,
    hwcap: u64,
}

impl<'a> Cache<'a> {
    /// Parses a cache; `None` if any part of it is invalid.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let table = if bytes.starts_with(OLD_MAGIC) {
            let count = u32_at(bytes, 12)? as usize;
            let end = count.checked_mul(12)?.checked_add(16)?;
            bytes.get(end.checked_next_multiple_of(8)?..)?
        } else {
            bytes
        };
        // 0 is the byte order of caches written before the header had that field.
        if !table.starts_with(MAGIC) || !matches!(table.get(28)?, 0 | &LITTLE_ENDIAN) {
            return None;
        }
        let count = u32_at(table, 20)? as usize;
        let entries = table.get(HEADER..HEADER.checked_add(count.checked_mul(ENTRY)?)?)?;
        let mut strings = 0;
        let mut text = |at: usize| -> Option<&'a [u8]> {
            let rest = table.get(at..)?;
            let rest = &rest[..rest.len().min(MAX_STRING_BYTES)];
            let text = &rest[..rest.iter().position(|byte| *byte == 0)?];
            strings += text.len() + 1;
            (strings <= MAX_STRINGS_BYTES).then_some(text)
        };
        let mut cache = Self::default();
        for entry in entries.chunks_exact(ENTRY) {
            cache.entries.push(Entry {
                flags: u32_at(entry, 0)?,
                name: text(u32_at(entry, 4)? as usize)?,
                path: text(u32_at(entry, 8)? as usize)?,
                os_version: u32_at(entry, 12)?,
                hwcap: u64::from(u32_at(entry, 16)?) | u64::from(u32_at(entry, 20)?) << 32,
            });
        }
        let extension = u32_at(table, 32)? as usize;
        // glibc before 2.33 writes no extension. Its offsets count from the start of the file, but
        // those of strings from the start of the table.
        if extension != 0 && u32_at(bytes, extension)? == EXTENSION_MAGIC {
            for section in 0..u32_at(bytes, extension.checked_add(4)?)? as usize {
                let at = section.checked_mul(16)?.checked_add(extension)?.checked_add(8)?;
                if u32_at(bytes, at)? != TAG_HWCAPS {
                    continue;
                }
                let (offset, size) = (u32_at(bytes, at + 8)? as usize, u32_at(bytes, at + 12)? as usize);
                for level in bytes.get(offset..offset.checked_add(size)?)?.chunks_exact(4) {
                    // Sections may overlap, so the length of the file does not limit their number.
                    if cache.levels.len() == MAX_CPU_LEVELS {
                        return None;
                    }
                    cache.levels.push(text(u32_at(level, 0)? as usize)?);
                }
            }
        }
        Some(cache)
    }

    /// Adds names, each replacing all entries that the loader could find under it.
    pub fn add(&mut self, names: impl Iterator<Item = (&'a [u8], &'a [u8])>) {
        let new: Vec<Entry<'a>> =
            names.map(|(name, path)| Entry { flags: FLAGS, name, path, os_version: 0, hwcap: 0 }).collect();
        self.entries.retain(|have| have.flags != FLAGS || !new.iter().any(|entry| entry.name == have.name));
        self.entries.extend(new);
        // The sort is stable: entries of equal names keep the order of the image.
        self.entries.sort_by(|a, b| compare(b.name, a.name).then(b.flags.cmp(&a.flags)));
        self.entries.dedup();
    }

    /// Serialises the cache.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut strings = Strings { start: HEADER + ENTRY * self.entries.len(), ..Strings::default() };
        let mut entries = Vec::with_capacity(ENTRY * self.entries.len());
        for entry in &self.entries {
            for word in [entry.flags, strings.put(entry.name), strings.put(entry.path), entry.os_version] {
                entries.extend(word.to_le_bytes());
            }
            entries.extend(entry.hwcap.to_le_bytes());
        }
        let levels: Vec<u32> = self.levels.iter().map(|level| strings.put(level)).collect();
        let generator = strings.put(GENERATOR);
        let extension = (strings.start + strings.bytes.len()).next_multiple_of(8);

        let mut file = MAGIC.to_vec();
        file.extend((self.entries.len() as u32).to_le_bytes());
        file.extend((strings.bytes.len() as u32).to_le_bytes());
        file.extend([LITTLE_ENDIAN, 0, 0, 0]);
        file.extend((extension as u32).to_le_bytes());
        file.resize(HEADER, 0);
        file.extend(entries);
        file.extend(strings.bytes);
        file.resize(extension, 0);
        let after = (extension + 8 + 2 * 16) as u32;
        let words = [EXTENSION_MAGIC, 2]
            .into_iter()
            .chain([TAG_GENERATOR, 0, generator, GENERATOR.len() as u32])
            .chain([TAG_HWCAPS, 0, after, 4 * levels.len() as u32])
            .chain(levels.iter().copied());
        file.extend(words.flat_map(u32::to_le_bytes));
        file
    }

    /// The path that the loader of this machine finds for a name, without CPU levels.
    pub fn find(&self, name: &str) -> Option<&'a [u8]> {
        // Binary search in descending order, as the loader does.
        let found = self.entries.binary_search_by(|entry| compare(name.as_bytes(), entry.name)).ok()?;
        let same = |at: &&Entry<'a>| at.name == name.as_bytes();
        let first = self.entries[..found].iter().rev().take_while(same).count();
        let mut entries = self.entries[found - first..].iter().take_while(same);
        entries
            .find(|entry| entry.flags == FLAGS && entry.hwcap & HWCAP_EXTENSION == 0)
            .map(|entry| entry.path)
    }
}

/// The strings of a file, without duplicates.
#[derive(Default)]
struct Strings<'a> {
    start: usize,
    bytes: Vec<u8>,
    at: HashMap<&'a [u8], u32>,
}

impl<'a> Strings<'a> {
    fn put(&mut self, text: &'a [u8]) -> u32 {
        *self.at.entry(text).or_insert_with(|| {
            let at = self.start + self.bytes.len();
            self.bytes.extend(text);
            self.bytes.push(0);
            at as u32
        })
    }
}

/// The loader's order of names: runs of digits compare as numbers and sort after any other
/// character. `c_char` is signed or not as on this architecture.
fn compare(a: &[u8], b: &[u8]) -> Ordering {
    let (mut a, mut b) = (a, b);
    loop {
        let (first, second) = (a.first().copied().unwrap_or(0), b.first().copied().unwrap_or(0));
        match (first.is_ascii_digit(), second.is_ascii_digit()) {
            (true, true) => match number(&mut a).cmp(&number(&mut b)) {
                Ordering::Equal => {}
                order => return order,
            },
            (true, false) => return Ordering::Greater,
            // The loader checks the second name only while the first has characters.
            (false, true) if first != 0 => return Ordering::Less,
            _ if first != second => return (first as c_char).cmp(&(second as c_char)),
            _ if first == 0 => return Ordering::Equal,
            _ => (a, b) = (&a[1..], &b[1..]),
        }
    }
}

fn number(text: &mut &[u8]) -> u32 {
    let mut value = 0u32;
    while let Some((digit, rest)) = text.split_first().filter(|(digit, _)| digit.is_ascii_digit()) {
        value = value.wrapping_mul(10).wrapping_add(u32::from(digit - b'0'));
        *text = rest;
    }
    value
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    let word = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
}
