//! Shared objects that have only a soname.
//!
//! A driver root has dozens of libraries that NVML never uses, but CDI files mount them and
//! `ldconfig` indexes them. Each of these stands in for one: a valid ELF file with a soname, no
//! symbols and no code.

const EHDR: u64 = 64;
const PHDR: u64 = 56;
const SYM: u64 = 24;
const DYN: u64 = 16;

/// Program header types.
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_GNU_STACK: u32 = 0x6474_e551;

/// Program header flags: the loader writes to the dynamic section.
const READ_WRITE: u32 = 6;

const PAGE: u64 = 0x1_0000;

/// `EM_X86_64` or `EM_AARCH64`.
const MACHINE: u16 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };

/// Builds a shared object with that soname.
pub(crate) fn shared_object(soname: &str) -> Vec<u8> {
    let symbols = EHDR + 3 * PHDR;
    let hash = symbols + SYM;
    let dynamic = hash + 16;
    let entries = 7;
    let strings = dynamic + entries * DYN;
    let strings_len = soname.len() as u64 + 2;
    let end = strings + strings_len;

    let mut file = Vec::new();
    file.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    half(&mut file, 3); // ET_DYN
    half(&mut file, MACHINE);
    word(&mut file, 1);
    for field in [0, EHDR, 0] {
        long(&mut file, field); // no entry, program headers, no sections
    }
    word(&mut file, 0);
    for field in [64, 56, 3, 64, 0, 0] {
        half(&mut file, field);
    }

    segment(&mut file, PT_LOAD, 0, end, PAGE);
    segment(&mut file, PT_DYNAMIC, dynamic, entries * DYN, 8);
    segment(&mut file, PT_GNU_STACK, 0, 0, 16);

    file.resize(file.len() + SYM as usize, 0); // the null symbol
    for field in [1, 1, 0, 0] {
        word(&mut file, field); // one bucket, one chain, both empty
    }
    const DT_HASH: u64 = 4;
    const DT_STRTAB: u64 = 5;
    const DT_SYMTAB: u64 = 6;
    const DT_STRSZ: u64 = 10;
    const DT_SYMENT: u64 = 11;
    const DT_SONAME: u64 = 14;
    for (tag, value) in [
        (DT_SONAME, 1),
        (DT_HASH, hash),
        (DT_STRTAB, strings),
        (DT_SYMTAB, symbols),
        (DT_STRSZ, strings_len),
        (DT_SYMENT, SYM),
        (0, 0),
    ] {
        long(&mut file, tag);
        long(&mut file, value);
    }
    file.push(0);
    file.extend(soname.as_bytes());
    file.push(0);
    file
}

fn segment(file: &mut Vec<u8>, kind: u32, at: u64, len: u64, align: u64) {
    word(file, kind);
    word(file, READ_WRITE);
    for field in [at, at, at, len, len, align] {
        long(file, field);
    }
}

fn half(file: &mut Vec<u8>, value: u16) {
    file.extend(value.to_le_bytes());
}

fn word(file: &mut Vec<u8>, value: u32) {
    file.extend(value.to_le_bytes());
}

fn long(file: &mut Vec<u8>, value: u64) {
    file.extend(value.to_le_bytes());
}
