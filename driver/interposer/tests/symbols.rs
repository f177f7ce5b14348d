//! Properties of the shipped files: exports, imports, the required C library, and what they must
//! not contain because they are loaded into every process of a container.

mod common;

use object::Endianness;
use object::elf::{self, FileHeader64};
use object::read::elf::{Dyn as _, FileHeader as _, ProgramHeader as _, Sym as _};
use std::collections::BTreeSet;

type Header = FileHeader64<Endianness>;

const PRELOAD: &str = "libdivvy.so";
const CUDA_SHIM: &str = "shim/libcuda.so.1";
const NVML_SHIM: &str = "shim/libnvidia-ml.so.1";
const FILES: [&str; 3] = [PRELOAD, CUDA_SHIM, NVML_SHIM];

/// The only allowed imports: the loader's list of objects, and functions that compilers call.
const IMPORTS: &[&str] = &["dl_iterate_phdr", "memcpy", "memmove", "memset", "memcmp", "bcmp", "strlen"];

/// The parts of a shared object that the loader reads.
struct Shipped {
    bytes: u64,
    exports: BTreeSet<String>,
    /// With the required version of each, such as `GLIBC_2.2.5`.
    imports: Vec<(String, String)>,
    needed: Vec<String>,
    soname: String,
    /// Kinds and flags of the segments.
    segments: Vec<(u32, u32)>,
    /// Tags and values of the dynamic section.
    dynamic: Vec<(i64, u64)>,
}

fn read(file: &str) -> Shipped {
    let data = std::fs::read(common::shipped().join(file)).expect("the file was built");
    let data = data.as_slice();
    let header = Header::parse(data).expect("an ELF file of 64 bits");
    let endian = header.endian().expect("an endianness");
    let sections = header.sections(endian, data).expect("sections");
    let symbols = sections.symbols(endian, data, elf::SHT_DYNSYM).expect("dynamic symbols");
    let versions = sections.versions(endian, data).expect("versions can be read");
    let mut exports = BTreeSet::new();
    let mut imports = Vec::new();
    for (index, symbol) in symbols.enumerate().skip(1) {
        let name =
            String::from_utf8_lossy(symbol.name(endian, symbols.strings()).expect("a name")).into_owned();
        if !symbol.is_undefined(endian) {
            exports.insert(name);
            continue;
        }
        let version = versions.as_ref().and_then(|table| {
            table
                .version(table.version_index(endian, index))
                .ok()
                .flatten()
                .map(|version| version.name().to_vec())
        });
        imports.push((name, String::from_utf8_lossy(&version.unwrap_or_default()).into_owned()));
    }
    let segments = header.program_headers(endian, data).expect("segments");
    let table = segments
        .iter()
        .find_map(|segment| segment.dynamic(endian, data).expect("a dynamic section"))
        .expect("a shared object has a dynamic section");
    let text = |entry: &elf::Dyn64<Endianness>| {
        let name = entry.string(endian, symbols.strings()).expect("a string");
        String::from_utf8_lossy(name).into_owned()
    };
    let tagged = |tag: i64| table.iter().filter(move |entry| entry.d_tag(endian) == tag);
    Shipped {
        bytes: data.len() as u64,
        exports,
        imports,
        needed: tagged(elf::DT_NEEDED).map(text).collect(),
        soname: tagged(elf::DT_SONAME).map(text).collect(),
        segments: segments.iter().map(|s| (s.p_type(endian), s.p_flags(endian))).collect(),
        dynamic: table.iter().map(|entry| (entry.d_tag(endian), entry.d_val(endian))).collect(),
    }
}

fn set(names: impl IntoIterator<Item = String>) -> BTreeSet<String> {
    names.into_iter().collect()
}

/// True for functions of the video engines' libraries, which have no shim.
fn is_codec(name: &str) -> bool {
    name.starts_with("Nv") || name.starts_with("cuvid")
}

/// The hooks of CUDA and of NVML.
fn hooks() -> (BTreeSet<String>, BTreeSet<String>) {
    let hooks = common::listed("hooks.txt").into_iter().filter(|name| !is_codec(name));
    let (cuda, nvml): (Vec<_>, Vec<_>) = hooks.partition(|name| name.starts_with("cu"));
    (set(cuda), set(nvml.into_iter().chain(common::listed("nvml.txt"))))
}

#[test]
fn preload_library_exports_hooks_and_dlsym() {
    let (cuda, nvml) = hooks();
    let mut expected = set(["dlsym".to_owned(), "dlvsym".to_owned()]);
    expected.extend(cuda);
    expected.extend(nvml);
    expected.extend(common::listed("hooks.txt").into_iter().filter(|name| is_codec(name)));
    assert_eq!(read(PRELOAD).exports, expected);
}

#[test]
fn shim_exports_its_hooks_and_no_dlsym() {
    let (cuda, nvml) = hooks();
    // The linker adds the version node to the symbols, under its own name.
    let with_node = |names: BTreeSet<String>, node: &str| &names | &set([node.to_owned()]);
    assert_eq!(read(CUDA_SHIM).exports, with_node(cuda, "libcuda.so.1"));
    assert_eq!(read(NVML_SHIM).exports, with_node(nvml, "libnvidia-ml.so.1"));
}

#[test]
fn shim_has_the_soname_and_needs_the_real_library() {
    for (file, soname) in [(CUDA_SHIM, "libcuda.so.1"), (NVML_SHIM, "libnvidia-ml.so.1")] {
        let shim = read(file);
        assert_eq!(shim.soname, soname);
        assert_eq!(shim.needed, [format!("/run/divvy/lib/real/{soname}"), "libc.so.6".to_owned()]);
    }
    assert_eq!(read(PRELOAD).needed, ["libc.so.6"]);
}

#[test]
fn imports_exist_in_glibc_2_17() {
    for file in FILES {
        for (name, version) in read(file).imports {
            assert!(IMPORTS.contains(&name.as_str()), "{file} takes {name} from the C library");
            let number: Vec<u32> = version
                .strip_prefix("GLIBC_")
                .unwrap_or_else(|| panic!("{file} asks for {name} of version '{version}'"))
                .split('.')
                .map(|part| part.parse().expect("a number"))
                .collect();
            assert!(number <= vec![2, 17], "{file} asks for {name} of {version}");
        }
    }
}

#[test]
fn files_are_small() {
    // 150,000 once the library has one law of GPU time again: the second one takes 11,000.
    for file in FILES {
        let bytes = read(file).bytes;
        assert!(bytes < 150_000, "{file} has {bytes} bytes");
    }
}

#[test]
fn loading_runs_no_code_and_needs_no_tls() {
    const START_TAGS: [i64; 5] =
        [elf::DT_INIT, elf::DT_INIT_ARRAY, elf::DT_FINI, elf::DT_FINI_ARRAY, elf::DT_PREINIT_ARRAY];
    for file in FILES {
        let shipped = read(file);
        assert!(
            shipped.dynamic.iter().all(|(tag, _)| !START_TAGS.contains(tag)),
            "{file} has code to start with"
        );
        assert!(shipped.segments.iter().all(|(kind, _)| *kind != elf::PT_TLS), "{file} has thread-locals");
    }
}

#[test]
fn no_segment_is_writable_and_executable() {
    for file in FILES {
        let shipped = read(file);
        for (kind, flags) in &shipped.segments {
            assert!(
                flags & (elf::PF_W | elf::PF_X) != elf::PF_W | elf::PF_X,
                "{file}: segment {kind:#x} can be written and run"
            );
        }
        let stack = shipped.segments.iter().find(|(kind, _)| *kind == elf::PT_GNU_STACK);
        assert!(
            stack.is_some_and(|(_, flags)| flags & elf::PF_X == 0),
            "{file} wants a stack that can be run"
        );
        assert!(
            shipped.dynamic.iter().all(|(tag, _)| *tag != elf::DT_TEXTREL),
            "{file} has code to be relocated"
        );
        // Function pointers are in pages that are read-only before the program's first instruction.
        let flags =
            shipped.dynamic.iter().find(|(tag, _)| *tag == elf::DT_FLAGS).map_or(0, |(_, value)| *value);
        assert!(flags & u64::from(elf::DF_BIND_NOW) != 0, "{file} is bound lazily");
        assert!(shipped.segments.iter().any(|(kind, _)| *kind == elf::PT_GNU_RELRO), "{file} has no RELRO");
    }
}
