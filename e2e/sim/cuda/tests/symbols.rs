//! The exported symbols: all functions of the list, under the right soname. The library itself
//! calls none of them through the dynamic linker.

#[path = "../../nvml/tests/elf/mod.rs"]
mod elf;

use std::collections::BTreeSet;

/// The additional symbol by which tests count calls.
const COUNTER: &str = "divvy_sim_cuda_calls";

fn library() -> elf::Dynamic {
    let program = std::env::current_exe().expect("this test");
    elf::Dynamic::read(&program.with_file_name("libdivvy_sim_cuda.so"))
}

fn listed() -> BTreeSet<String> {
    let lines = include_str!("../symbols.txt").lines().filter(|line| !line.starts_with('#'));
    lines.filter_map(|line| line.split_once(' ')).map(|(name, _)| name.to_owned()).collect()
}

/// The names of the driver's functions.
fn of_driver(names: &BTreeSet<String>) -> Vec<&String> {
    names.iter().filter(|name| name.starts_with("cu")).collect()
}

#[test]
fn library_exports_exactly_the_list() {
    let (listed, mut exported) = (listed(), library().exported);
    assert_eq!(listed.len(), 724);
    assert!(exported.remove(COUNTER));
    assert_eq!(exported.difference(&listed).collect::<Vec<_>>(), Vec::<&String>::new());
    assert_eq!(listed.difference(&exported).collect::<Vec<_>>(), Vec::<&String>::new());
}

#[test]
fn soname_is_that_of_the_real_library() {
    assert_eq!(library().soname, "libcuda.so.1");
}

/// A library that defines the same names must get the program's calls, and none of the library's
/// own.
#[test]
fn internal_calls_bypass_the_dynamic_linker() {
    let file = library();
    // The C library's functions are looked up, which shows that this test can see lookups.
    assert!(!file.undefined.is_empty() && !file.relocated.is_empty());
    assert_eq!(of_driver(&file.undefined), Vec::<&String>::new());
    assert_eq!(of_driver(&file.relocated), Vec::<&String>::new());
}
