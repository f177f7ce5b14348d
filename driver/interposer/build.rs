//! Generates the tables of hooked names from `symbols/`.
//!
//! `hooks.txt` lists the functions that the library defines, `uses.txt` those that hooks only call,
//! `cuda.txt` every function that `cuGetProcAddress` can return, and `nvml.txt` the denied ones.
//! Lookups run inside programs' `dlsym` calls, so the tables are precomputed: open addressing over
//! FNV-1a, without allocation or start-up work.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=symbols");
    let hooks = lines("hooks.txt");
    let denied = lines("nvml.txt");
    let of = |prefix: &str| hooks.iter().filter(|name| name.starts_with(prefix)).collect::<Vec<&String>>();
    let (encode, cuvid, nvml) = (of("Nv"), of("cuvid"), of("nvml"));
    let cuda: Vec<&String> = of("cu").into_iter().filter(|name| !cuvid.contains(name)).collect();
    assert_eq!(hooks.len(), cuda.len() + nvml.len() + encode.len() + cuvid.len(), "a hook of no library");
    // CUDA first, so that one comparison recognises its indices.
    let all = cuda
        .iter()
        .chain(&nvml)
        .copied()
        .chain(&denied)
        .chain(encode.iter().copied())
        .chain(cuvid.iter().copied());
    let exports: Vec<&str> = all.map(String::as_str).collect();
    let codec = exports.len() - encode.len() - cuvid.len();
    let distinct: BTreeSet<&str> = exports.iter().copied().collect();
    assert_eq!(distinct.len(), exports.len(), "a name is listed twice in hooks.txt and nvml.txt");

    let mut text = String::new();
    let out = &mut text;
    constant(out, "CUDA", "Index", cuda.len());
    constant(out, "ENCODE", "Index", codec);
    constant(out, "CUVID", "Index", codec + encode.len());
    constant(out, "COUNT", "usize", exports.len());
    let (cuda_uses, nvml_uses): (Vec<String>, Vec<String>) =
        lines("uses.txt").into_iter().partition(|name| name.starts_with("cu"));
    let uses: Vec<String> = cuda_uses.iter().chain(&nvml_uses).cloned().collect();
    constant(out, "CUDA_USES", "Index", exports.len() + cuda_uses.len());
    constant(out, "TOTAL", "usize", exports.len() + uses.len());
    let mut letters = String::new();
    let all: Vec<&str> = exports.iter().copied().chain(uses.iter().map(String::as_str)).collect();
    // The longest first: many names are a prefix or suffix of another.
    let mut longest = all.clone();
    longest.sort_by_key(|name| std::cmp::Reverse(name.len()));
    named(&mut letters, &longest);
    put(out, format!("static NAMES: [Name; TOTAL] = [{}];", named(&mut letters, &all)));
    put(out, "/// Each name that is listed is a function here.\nconst _: () = {".into());
    for (at, name) in exports.iter().enumerate() {
        let module = match at {
            at if at < cuda.len() => "crate::cuda",
            at if at < cuda.len() + nvml.len() => "crate::nvml",
            at if at >= codec => "crate::codec",
            _ => "denied",
        };
        put(out, format!("let _ = {module}::{name};"));
    }
    put(out, "};".into());
    put(out, "pub(crate) mod index {".into());
    let is_denied = |at: &usize| (cuda.len() + nvml.len()..codec).contains(at);
    for (at, name) in exports.iter().enumerate().filter(|(at, _)| !is_denied(at)) {
        put(out, format!("pub(crate) const {name}: super::Index = {at};"));
    }
    for (at, name) in uses.iter().enumerate() {
        put(out, format!("pub(crate) const {name}: super::Index = {};", exports.len() + at));
    }
    put(out, "}".into());
    put(out, "pub(crate) mod denied {".into());
    for (at, name) in exports.iter().enumerate().filter(|(at, _)| is_denied(at)) {
        put(out, format!("crate::nvml::denied!({name}, {at});"));
    }
    put(out, "}".into());
    hashed(out, "EXPORT_SLOTS", &exports);

    let at: BTreeMap<&str, usize> = exports.iter().enumerate().map(|(at, name)| (*name, at)).collect();
    let variants: Vec<Vec<String>> =
        lines("cuda.txt").iter().map(|line| line.split(' ').map(str::to_owned).collect()).collect();
    let mut families: BTreeMap<&str, Vec<(usize, u32, u32)>> = BTreeMap::new();
    for variant in &variants {
        let [name, version, flags, export] = variant.as_slice() else { panic!("cuda.txt: {variant:?}") };
        if let Some(at) = at.get(export.as_str()) {
            let number = |text: &str| text.parse::<u32>().expect("cuda.txt holds numbers");
            families.entry(name.as_str()).or_default().push((*at, number(version), number(flags)));
        }
    }
    let names: Vec<&str> = families.keys().copied().collect();
    let total: usize = families.values().map(Vec::len).sum();
    put(out, format!("pub(crate) static VARIANTS: [Variant; {total}] = ["));
    let mut ranges = Vec::new();
    let mut from = 0;
    for family in families.values() {
        for (at, version, flags) in family {
            put(out, format!("Variant {{ export: {at}, version: {version}, flags: {flags} }},"));
        }
        ranges.push((from, from + family.len()));
        from += family.len();
    }
    put(out, "];".into());
    let count = names.len();
    put(out, format!("static FAMILIES: [Name; {count}] = [{}];", named(&mut letters, &names)));
    put(out, format!("static RANGES: [(u16, u16); {count}] = {ranges:?};"));
    hashed(out, "FAMILY_SLOTS", &names);
    put(out, format!("static LETTERS: [u8; {}] = *b\"{letters}\";", letters.len()));

    let target = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("table.rs");
    fs::write(target, text).expect("OUT_DIR is writable");
}

fn lines(name: &str) -> Vec<String> {
    let text = fs::read_to_string(format!("symbols/{name}")).expect("the lists lie in symbols/");
    text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).map(str::to_owned).collect()
}

fn put(out: &mut String, line: String) {
    writeln!(out, "{line}").expect("writing to a string");
}

fn constant(out: &mut String, name: &str, kind: &str, value: usize) {
    put(out, format!("pub(crate) const {name}: {kind} = {value};"));
}

/// Returns each name's range in `letters`, and appends missing names.
fn named(letters: &mut String, names: &[&str]) -> String {
    let place = |name: &&str| {
        let at = letters.find(name).unwrap_or_else(|| {
            letters.push_str(name);
            letters.len() - name.len()
        });
        format!("Name {{ at: {at}, length: {} }},", name.len())
    };
    names.iter().map(place).collect()
}

/// Writes the slots of one table: the index of a name plus 1, or 0 for an empty slot. At most half
/// full.
fn hashed(out: &mut String, name: &str, names: &[&str]) {
    let size = (names.len() * 2).next_power_of_two();
    let mut slots = vec![0u16; size];
    for (at, name) in names.iter().enumerate() {
        let mut slot = fnv(name) as usize & (size - 1);
        while slots[slot] != 0 {
            slot = (slot + 1) & (size - 1);
        }
        slots[slot] = u16::try_from(at + 1).expect("there are fewer names");
    }
    put(out, format!("pub(crate) static {name}: [u16; {size}] = {slots:?};"));
}

/// Must match `symbol_table::find`.
fn fnv(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}
