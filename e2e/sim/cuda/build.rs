//! Sets the library's soname and writes the table of its symbols, with a stub for each that no
//! module implements.
//!
//! `-Bsymbolic`, because the real driver never calls its own functions through the dynamic linker:
//! a library that defines the same names gets the program's calls, and none of the driver's own.
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    for file in ["symbols.txt", "build.rs", "src"] {
        println!("cargo::rerun-if-changed={file}");
    }
    let list = fs::read_to_string("symbols.txt").expect("symbols.txt is beside build.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let rows: Vec<Vec<&str>> =
        list.lines().filter(|line| !line.starts_with('#')).map(|line| line.split(' ').collect()).collect();
    fs::write(out.join("indices.rs"), indices(&rows)).expect("OUT_DIR is writable");
    fs::write(out.join("table.rs"), table(&rows, &implemented(Path::new("src"))))
        .expect("OUT_DIR is writable");
}

/// The names of the entry points in the sources: `fn cuInit(`, `fn cuMemcpy | cuMemcpy_ptds(`, and
/// names in the tables of macros.
fn implemented(src: &Path) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for file in fs::read_dir(src).expect("src is a directory").flatten() {
        let text = fs::read_to_string(file.path()).unwrap_or_default();
        for line in text.lines().map(str::trim_start) {
            let line = line.strip_prefix("early ").unwrap_or(line);
            let row = line.split_once(": ").filter(|(kind, _)| kind.len() <= 3).map_or(line, |(_, row)| row);
            let entry = line.strip_prefix("fn ").map(|rest| rest.split('(').next().unwrap_or_default());
            let listed = entry.unwrap_or(if row.starts_with("cu") { row } else { "" });
            let words = listed.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
            names.extend(words.filter(|word| word.starts_with("cu")).map(str::to_owned));
        }
    }
    names
}

/// Generates the indices and the names of the functions.
fn indices(rows: &[Vec<&str>]) -> String {
    let (mut at, mut names) = (String::new(), String::new());
    for (index, row) in rows.iter().enumerate() {
        let name = row[0];
        writeln!(at, "pub(crate) const {name}: usize = {index};").expect("writing to a string");
        writeln!(names, "\"{name}\",").expect("writing to a string");
    }
    let count = rows.len();
    format!(
        "/// Indices of the functions.\n#[allow(non_upper_case_globals, reason = \"symbols\")]\n\
         pub(crate) mod at {{\n{at}}}\n\
         pub(crate) const COUNT: usize = {count};\n\
         pub(crate) static NAMES: [&str; COUNT] = [\n{names}];\n"
    )
}

/// Generates a stub for each function that is not implemented, and `SYMBOLS` with the addresses of
/// all functions.
fn table(rows: &[Vec<&str>], implemented: &BTreeSet<String>) -> String {
    let (mut stubs, mut symbols) = (String::new(), String::new());
    for row in rows {
        let [name, base, version, twin] = row[..] else { panic!("symbols.txt: cannot read {row:?}") };
        if !implemented.contains(name) {
            writeln!(stubs, "stub!({name});").expect("writing to a string");
        }
        let twin = twin != "legacy";
        writeln!(
            symbols,
            "Symbol {{ name: \"{name}\", base: \"{base}\", version: {version}, twin: {twin}, \
             pointer: Pointer({name} as *const ()) }},"
        )
        .expect("writing to a string");
    }
    format!("{stubs}\npub(crate) static SYMBOLS: [Symbol; COUNT] = [\n{symbols}];\n")
}
