//! Dynamic section of a shared library, as far as the tests need it: soname, symbols, and the
//! symbols that the dynamic linker looks up.

use std::collections::BTreeSet;
use std::path::Path;

const RELA: u32 = 4;
const DYNAMIC: u32 = 6;
const DYNSYM: u32 = 11;
const SONAME: u64 = 14;

pub(crate) struct Dynamic {
    pub(crate) soname: String,
    pub(crate) exported: BTreeSet<String>,
    #[allow(dead_code, reason = "not every library needs none of its own names")]
    pub(crate) undefined: BTreeSet<String>,
    /// Symbols in relocations: the loader uses the first definition in the process.
    #[allow(dead_code, reason = "not every library needs none of its own names")]
    pub(crate) relocated: BTreeSet<String>,
}

struct Section {
    kind: u32,
    offset: usize,
    size: usize,
    link: usize,
    entry: usize,
}

fn number(bytes: &[u8], at: usize, size: usize) -> u64 {
    bytes[at..at + size].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
}

fn text(bytes: &[u8], at: usize) -> String {
    let end = bytes[at..].iter().position(|byte| *byte == 0).expect("strings end in NUL");
    String::from_utf8_lossy(&bytes[at..at + end]).into_owned()
}

impl Dynamic {
    /// Reads a little-endian 64-bit ELF file.
    pub(crate) fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).expect("a file");
        assert_eq!(&bytes[..6], b"\x7fELF\x02\x01", "{}", path.display());
        let headers = number(&bytes, 0x28, 8) as usize;
        let (size, count) = (number(&bytes, 0x3a, 2) as usize, number(&bytes, 0x3c, 2) as usize);
        let sections: Vec<Section> = (0..count)
            .map(|section| headers + section * size)
            .map(|at| Section {
                kind: number(&bytes, at + 4, 4) as u32,
                offset: number(&bytes, at + 0x18, 8) as usize,
                size: number(&bytes, at + 0x20, 8) as usize,
                link: number(&bytes, at + 0x28, 4) as usize,
                entry: number(&bytes, at + 0x38, 8) as usize,
            })
            .collect();
        let of_kind = |kind| sections.iter().find(|section| section.kind == kind).expect("a dynamic library");
        let entries = |section: &Section| {
            let (from, size) = (section.offset, section.entry);
            (0..section.size / size).map(move |entry| from + entry * size)
        };
        let dynamic = of_kind(DYNAMIC);
        let names = sections[dynamic.link].offset;
        let soname = entries(dynamic).find(|at| number(&bytes, *at, 8) == SONAME).expect("a soname");
        let symbols = of_kind(DYNSYM);
        let strings = sections[symbols.link].offset;
        let name = |at: usize| text(&bytes, strings + number(&bytes, at, 4) as usize);
        // Symbol 0 is the null symbol.
        let all: Vec<usize> = entries(symbols).skip(1).collect();
        // A symbol with section 0 is undefined.
        let (defined, undefined): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|at| number(&bytes, *at + 6, 2) != 0);
        let relocations = sections.iter().filter(|section| section.kind == RELA).flat_map(entries);
        // The upper half of the second word is the symbol; 0 for a relocation relative to the
        // library.
        let used = relocations.map(|at| number(&bytes, at + 12, 4) as usize).filter(|symbol| *symbol != 0);
        Self {
            soname: text(&bytes, names + number(&bytes, soname + 8, 8) as usize),
            exported: defined.into_iter().map(name).collect(),
            undefined: undefined.into_iter().map(name).collect(),
            relocated: used.map(|symbol| name(symbols.offset + symbol * symbols.entry)).collect(),
        }
    }
}
